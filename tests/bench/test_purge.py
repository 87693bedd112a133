"""Retention by a real `decideonce housekeep`, in small: what `purge.py` measures on a million rows."""

import asyncio
import os
import signal
from datetime import timedelta
from pathlib import Path

import asyncpg
from sqlalchemy.engine import URL

from bench.purge import housekeeping, plant

ROWS = 5_000
WITHIN_S = 60

# By what can be: whole answers, tombstones, and anything between.
COUNTS = """SELECT
    count(*) FILTER (WHERE state = 2 AND facts IS NOT NULL AND response IS NOT NULL) AS answers,
    count(*) FILTER (WHERE state = 5 AND facts IS NULL AND response IS NULL) AS tombstones,
    count(*) AS rows
    FROM ledger"""


async def until(observer: asyncpg.Connection, condition: str) -> tuple[int, int]:
    """Wait until a condition over the counts holds, and give whole answers and tombstones; nothing else is there."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            row = await observer.fetchrow(f"SELECT *, {condition} AS holds FROM ({COUNTS}) c")
            assert row["rows"] == row["answers"] + row["tombstones"]
            if row["holds"]:
                return row["answers"], row["tombstones"]


async def kill_in_the_middle(url: URL, observer: asyncpg.Connection, log: Path, condition: str) -> tuple[int, int]:
    """Run housekeeping until a condition holds, kill it, and give what it left once its last statement has ended."""
    with housekeeping(url, log) as process:
        await until(observer, condition)
        os.killpg(process.pid, signal.SIGKILL)
    sessions = """SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'decideonce'"""
    async with asyncio.timeout(WITHIN_S):
        while await observer.fetchval(sessions):
            pass
    return await until(observer, "true")


async def test_retention_survives_being_killed(database_url: URL, observer: asyncpg.Connection, tmp_path: Path) -> None:
    """All answers become tombstones and all tombstones are deleted, though housekeeping is killed in between.

    Each row is whole, or a tombstone, or gone, at every moment that anybody looks.
    """
    log = tmp_path / "housekeeping.log"
    await plant(observer, ROWS, timedelta(days=10))
    answers, tombstones = await kill_in_the_middle(database_url, observer, log, "tombstones > 0")
    assert 0 < tombstones < ROWS
    assert ROWS == answers + tombstones
    with housekeeping(database_url, log):
        assert (0, ROWS) == await until(observer, "answers = 0")
    await observer.execute("UPDATE ledger SET key_retained_until = replayable_until")
    _, tombstones = await kill_in_the_middle(database_url, observer, log, f"rows < {ROWS}")
    assert 0 < tombstones < ROWS
    with housekeeping(database_url, log):
        assert (0, 0) == await until(observer, "rows = 0")


async def test_retention_leaves_what_is_not_due(
    database_url: URL, observer: asyncpg.Connection, tmp_path: Path
) -> None:
    """Answers within their retention, and tombstones within theirs, stay as they are while others go."""
    await plant(observer, 300, timedelta(days=10))
    await observer.execute("UPDATE ledger SET replayable_until = now() + interval '1 day'")
    kept = await observer.fetch("SELECT l::text FROM ledger l ORDER BY 1")
    await plant(observer, 300, timedelta(days=10))
    await plant(observer, 300, timedelta(0))
    with housekeeping(database_url, tmp_path / "housekeeping.log"):
        assert (300, 300) == await until(observer, "answers = 300 AND rows = 600")
    assert kept == await observer.fetch("SELECT l::text FROM ledger l WHERE state = 2 ORDER BY 1")
