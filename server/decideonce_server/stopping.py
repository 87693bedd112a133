"""How a process is asked to stop: by a signal, or by the end of its supervisor; asked a second time, it is quicker."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

# Set by the supervisor for its processes.
SUPERVISED = "DECIDEONCE_SUPERVISED"


class Stopping:
    """The wish that this process stops. One instance for a process, made in its running loop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._asked_again = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._ask)
        if os.environ.get(SUPERVISED):
            # Ctrl-C reaches every process of a terminal; here the supervisor passes it on.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            loop.add_reader(sys.stdin.fileno(), self._supervisor_ended)
        else:
            loop.add_signal_handler(signal.SIGINT, self._ask)

    def _supervisor_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        self._ask()

    def _ask(self) -> None:
        if self.asked.is_set():
            self._asked_again.set()
            for callback in self._callbacks:
                callback()
        self.asked.set()

    def when_asked_again(self, callback: Callable[[], None]) -> None:
        """Have this called whenever the process is asked once more."""
        self._callbacks.append(callback)

    async def unless_asked_again(self, work: Awaitable[Any]) -> None:
        """Wait for work, but no longer than until the process is asked a second time; then the work is cancelled."""
        tasks = {asyncio.ensure_future(work), asyncio.ensure_future(self._asked_again.wait())}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
