"""Applies retention: answers past it become tombstones, and tombstones past theirs are deleted.

No answer depends on it: expiry is judged when a record is read. It works in small batches, each a transaction, bucket
by bucket, so it can be stopped at any point and run many times over; and it rests between them, so that it never takes
more than its share of the database.
"""

import asyncio
import time

import structlog
from opentelemetry import metrics

from decideonce_server.errors import LedgerUnavailable
from decideonce_server.ledger import Ledger

# Small enough that its rows are locked, and its commit holds up others', for milliseconds: the slowest hundredth of the
# calls that go on took 2.4 times as long with batches of 200 as without any, with 50 1.3 times (`make bench`).
BATCH = 50
# Of its time, the part that it works.
WORKING_SHARE = 0.25
# Between two rounds, where one found nothing to do.
IDLE_INTERVAL_S = 5.0

log = structlog.get_logger()


class Reaper:
    """Applies retention, until cancelled."""

    def __init__(self, ledger: Ledger, *, idle_interval_s: float = IDLE_INTERVAL_S) -> None:
        self._ledger = ledger
        self._idle_interval_s = idle_interval_s
        meter = metrics.get_meter("decideonce")
        self._tombstoned = meter.create_counter("tombstoned", description="Answers that were purged after retention")
        self._purged = meter.create_counter("purged", description="Tombstones that were deleted after retention")
        for counter in (self._tombstoned, self._purged):
            counter.add(0)

    async def run(self) -> None:
        """Make rounds, again and again."""
        while True:
            try:
                worked = await self.round()
            except LedgerUnavailable:
                log.warning("retention not applied: the ledger can't be reached")
                worked = 0
            if not worked:
                await asyncio.sleep(self._idle_interval_s)

    async def round(self) -> int:
        """Take one batch at most from each bucket that has work; give how many rows were changed.

        Raises:
            LedgerUnavailable, LockTimeout: see Ledger; what was done is done.
        """
        changed = 0
        for bucket in await self._ledger.reapable():
            began = time.monotonic()
            tombstoned = await self._ledger.tombstone(bucket, BATCH)
            purged = await self._ledger.purge(bucket, BATCH)
            self._tombstoned.add(tombstoned)
            self._purged.add(purged)
            changed += tombstoned + purged
            await asyncio.sleep((time.monotonic() - began) * (1 / WORKING_SHARE - 1))
        return changed
