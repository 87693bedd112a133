"""Work that its caller can't cancel: a call that ends early leaves its reservation and its attempt running."""

import asyncio
import contextlib
from collections.abc import Coroutine
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import structlog

from decideonce_server.errors import DecideonceError
from decideonce_server.ledger import Attempt

T = TypeVar("T")

log = structlog.get_logger()

# Set by the interceptor that reserved, read by the servicer below it.
current_attempt: ContextVar[Attempt] = ContextVar("current_attempt")


class Attempts:
    """The tasks that run on their own; shutdown waits for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that goes on whatever becomes of its caller."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Asking for the exception also tells asyncio that somebody saw it: a caller who waits gets it too.
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, DecideonceError):
            log.error("an attempt ended with a defect", exc_info=error)

    async def drain(self, limit: timedelta) -> None:
        """Wait until all work has ended, also what it began meanwhile, for `limit` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit.total_seconds()):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """End what is still running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
