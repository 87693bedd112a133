"""What is open and overdue in the ledger, as gauges of the whole database: a look now and then, and no cost to calls.

Every housekeeping that runs tells the same numbers, so they are not to be added up.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import structlog

from decideonce_server import measures
from decideonce_server.database import Database, Statement
from decideonce_server.errors import LedgerUnavailable

INTERVAL_S = 10.0

LOAD = Statement(
    # Open work has an index of its own; the oldest overdue answer of each bucket is one look into another.
    "ledger_load",
    """SELECT open.processing, open.stale, statement_timestamp() - (
            SELECT min(first.replayable_until) FROM generate_series(0, 255) AS b (bucket) CROSS JOIN LATERAL (
                SELECT l.replayable_until FROM ledger l
                WHERE l.bucket = b.bucket AND l.state IN (2, 4) AND l.replayable_until <= statement_timestamp()
                ORDER BY l.replayable_until LIMIT 1) first) AS purge_delay
    FROM (
        SELECT count(*) FILTER (WHERE l.state = 1) AS processing, count(*) FILTER (
            WHERE coalesce(l.lease_expires_at, l.retry_at) < statement_timestamp() - interval '1 minute') AS stale
        FROM ledger l WHERE coalesce(l.lease_expires_at, l.retry_at) IS NOT NULL
    ) open""",
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Load:
    """How many records are PROCESSING, how much work is due for over a minute, how old the oldest overdue answer is."""

    processing: int
    stale: int
    purge_delay: timedelta


class LedgerWatch:
    """Looks again and again, until cancelled; while Postgres can't be reached nothing is told."""

    def __init__(self, database: Database, *, interval_s: float = INTERVAL_S) -> None:
        self._database = database
        self._interval_s = interval_s
        self._load: Load | None = None
        self._gauge("ledger_processing", "Records that are PROCESSING", lambda load: load.processing)
        self._gauge("ledger_stale", "Work that has been due for over a minute", lambda load: load.stale)
        self._gauge(
            "purge_delay",
            "Age of the oldest answer that is past its retention",
            lambda load: load.purge_delay.total_seconds(),
            "s",
        )

    def _gauge(self, name: str, description: str, value: Callable[[Load], float], unit: str = "") -> None:
        measures.gauge(name, description, lambda: None if self._load is None else value(self._load), unit)

    async def run(self) -> None:
        """Look, and rest, again and again."""
        while True:
            try:
                self._load = await self.look()
            except LedgerUnavailable:
                self._load = None
                log.warning("ledger not watched: it can't be reached")
            await asyncio.sleep(self._interval_s)

    async def look(self) -> Load:
        """Look once.

        Raises:
            LedgerUnavailable: Postgres can't be reached or can't do it now.
        """
        (row,) = await self._database.run(LOAD)
        return Load(row["processing"], row["stale"], row["purge_delay"] or timedelta(0))
