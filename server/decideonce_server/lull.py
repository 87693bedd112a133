"""Waits for a lull of the event loop, so that what many calls need done is done once for all of them.

Where the loop has nothing else to do, what is to be done is done at once. Where it is busy, those that it is busy with
join first, and where more are said to come, those too: for WAIT_MAX_S at most.
"""

import asyncio
import math
import time
from collections.abc import Callable

# A turn of the loop that took less of the processor had nothing to do: any step of a call takes longer. Of the
# processor, as a turn that others held up, beside this thread or in it, tells nothing of what there is to do.
TURN_S = 0.0001
WAIT_MAX_S = 0.01
# Between two looks for more that are to come.
LOOK_INTERVAL_S = 0.001


class Lull:
    """Does something in the next lull, once for all that asked for it until then.

    `expects_more` tells whether waiting is worth it although the loop has nothing else to do.
    """

    def __init__(self, work: Callable[[], None], expects_more: Callable[[], bool] = lambda: False) -> None:
        self._work = work
        self._expects_more = expects_more
        self._since: float | None = None

    def ask(self) -> None:
        """Have it done."""
        if self._since is None:
            self._since = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._look, self._since, -math.inf)

    def _look(self, since: float, before: float) -> None:
        """Do it if the whole turn from the look before took no time, or nobody may wait any longer."""
        now = time.thread_time()
        if time.perf_counter() - since < WAIT_MAX_S:
            if now - before > TURN_S:
                asyncio.get_running_loop().call_soon(self._look, since, now)
                return
            if self._expects_more():
                asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look, since, -math.inf)
                return
        self._since = None
        self._work()
