"""The worker of background operations: takes over keys that no attempt holds, and decides them."""

import asyncio
import contextlib

import structlog

from decideonce_server.attempts import Attempts
from decideonce_server.database import LockTimeout
from decideonce_server.decide import Decide
from decideonce_server.errors import LedgerUnavailable
from decideonce_server.ledger import Attempt, Ledger
from decideonce_server.reserve import Reserve
from decideonce_server.waiting import Waiters

# How many decisions a worker makes at once; a policy itself is held to half of the evaluators.
PARALLEL_MAX = 16
# How late a key that another process reserved, or that fell due, is taken up.
POLL_INTERVAL_S = 0.5

log = structlog.get_logger()


class BackgroundWorker:
    """Decides what falls due, until cancelled."""

    def __init__(self, ledger: Ledger, reserve: Reserve, decide: Decide, attempts: Attempts, waiters: Waiters) -> None:
        self._ledger = ledger
        self._reserve = reserve
        self._decide = decide
        self._attempts = attempts
        self._waiters = waiters
        self._poked = asyncio.Event()
        self._free = PARALLEL_MAX

    def poke(self) -> None:
        """Look for work now: this process has just reserved some."""
        self._poked.set()

    async def run(self) -> None:
        """Take up what is due, twice a second or when poked."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poked.wait(), POLL_INTERVAL_S)
            self._poked.clear()
            try:
                await self._take_up()
            except (LedgerUnavailable, LockTimeout):
                log.warning("background work not looked for: the ledger can't be reached")

    async def _take_up(self) -> None:
        while self._free:
            due = await self._ledger.due(self._free)
            for record in due:
                taken = await self._reserve.take_over(record)
                if isinstance(taken, Attempt):
                    self._free -= 1
                    self._attempts.start(self._decide_one(taken))
                elif taken is not None:
                    self._waiters.tell(taken)
            if not due:
                return

    async def _decide_one(self, attempt: Attempt) -> None:
        try:
            record, _ = await self._decide.decide(attempt)
            self._waiters.tell(record)
        finally:
            self._free += 1
            self.poke()
