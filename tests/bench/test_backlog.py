"""A backlog by a real `decideonce housekeep`, in small: what `backlog.py` measures on 200,000 events."""

from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.engine import URL

from bench.backlog import BROKERS, RESIDENT_MAX_MB, drain
from brokers import Broker

EVENTS = 10_000


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    started = BROKERS[request.param]()
    try:
        yield started
    finally:
        started.close()


async def test_backlog_is_published(
    broker: Broker, database_url: URL, observer: asyncpg.Connection, tmp_path: Path
) -> None:
    """All events of a backlog arrive, each key's in order, and the publisher stays as small as it is to be."""
    drained = await drain(database_url, observer, broker, tmp_path / "housekeeping.log", EVENTS)
    assert drained.resident.proportional <= RESIDENT_MAX_MB
