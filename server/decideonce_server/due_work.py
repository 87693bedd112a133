"""Takes up work that is due and that no attempt holds. Two take it up: background workers and the rescuer."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence

import structlog
from cachetools import TTLCache

from decideonce_server.attempts import Attempts
from decideonce_server.decide import Decide
from decideonce_server.errors import LedgerUnavailable
from decideonce_server.ledger import Attempt, Key, Ledger, Record
from decideonce_server.reserve import Reserve
from decideonce_server.waiting import Waiters

# How many decisions one process makes at once; a policy itself is held to half of its evaluators.
PARALLEL_MAX = 16
# A record that a defect kept from being taken up is tried again after this long.
DEFECTIVE_S = 60.0
DEFECTIVE_MAX = 1000
# Processes that look at the same moment see the same work: each picks from more than it takes, so that few collide.
CHOICE = 4

log = structlog.get_logger()


class DueWork:
    """Decides what falls due, until cancelled."""

    # Whether inline work is taken up too, once its attempt's lease is over.
    abandoned = False
    # How late work that another process left is taken up.
    poll_interval_s = 0.25

    def __init__(self, ledger: Ledger, reserve: Reserve, decide: Decide, attempts: Attempts, waiters: Waiters) -> None:
        self._ledger = ledger
        self._reserve = reserve
        self._decide = decide
        self._attempts = attempts
        self._waiters = waiters
        self._poked = asyncio.Event()
        self._free = PARALLEL_MAX
        self._defective: TTLCache[Key, None] = TTLCache(DEFECTIVE_MAX, DEFECTIVE_S)

    def poke(self) -> None:
        """Look for work now: there is some, or room for more."""
        self._poked.set()

    async def run(self) -> None:
        """Take up what is due, several times a second or when poked."""
        while True:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it can lose a cancellation that comes together with a poke.
                async with asyncio.timeout(self.poll_interval_s):
                    await self._poked.wait()
            self._poked.clear()
            try:
                await self._take_up()
            except LedgerUnavailable:
                log.warning("due work not looked for: the ledger can't be reached", who=type(self).__name__)

    async def _take_up(self) -> None:
        if not self._free:
            return
        due = await self._ledger.due(PARALLEL_MAX * CHOICE, abandoned=self.abandoned)
        for record in choose([record for record in due if record.key not in self._defective], self._free):
            # Ending this loop must not leave a lease to nobody.
            taking = self._attempts.start(self._take_over(record))
            await asyncio.wait({taking})
            error = taking.exception()
            if isinstance(error, LedgerUnavailable):
                raise error
            if error is not None:
                # Attempts told of it. One record that can't be taken up must not keep all others waiting.
                self._defective[record.key] = None

    async def _take_over(self, record: Record) -> None:
        taken = await self._reserve.take_over(record)
        if isinstance(taken, Attempt):
            self._free -= 1
            self._attempts.start(self._decide_one(taken))
        elif taken is not None:
            self._waiters.tell(taken)

    async def _decide_one(self, attempt: Attempt) -> None:
        try:
            record, _ = await self._decide.decide(attempt)
            self._waiters.tell(record)
        finally:
            self._free += 1
            self.poke()


def choose(due: Sequence[Record], count: int) -> list[Record]:
    """Choose at random, but from tenants in turn: one with a long backlog doesn't keep the others waiting.

    Where there is room for one alone, each tenant is as likely as the next, however much it has waiting.
    """
    tenants = sorted({record.key.tenant for record in due})
    places = {tenant: place for place, tenant in enumerate(random.sample(tenants, len(tenants)))}
    turns: Counter[str] = Counter()
    chosen: list[tuple[int, int, Record]] = []
    for record in random.sample(due, len(due)):  # nothing secret
        turns[record.key.tenant] += 1
        chosen.append((turns[record.key.tenant], places[record.key.tenant], record))
    return [record for _, _, record in sorted(chosen, key=lambda choice: choice[:2])[:count]]


class BackgroundWorker(DueWork):
    """Decides background operations."""


class Rescuer(DueWork):
    """Takes over stale work of every kind, whether or not a caller comes back for it."""

    abandoned = True
    # Nobody waits for it but by chance, and each look costs an idle process a part of its time.
    poll_interval_s = 0.5
