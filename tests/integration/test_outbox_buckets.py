"""Leases of buckets on a real Postgres: shares, compare-and-set, and what a holder that was away finds."""

import asyncio
import uuid
from collections.abc import Callable
from datetime import timedelta

import asyncpg
import pytest
from sqlalchemy.engine import URL

from decideonce_server.database import Database
from decideonce_server.outbox_buckets import BUCKETS, BucketLeases
from publishing import count, shares

LEASE = timedelta(seconds=60)


@pytest.fixture
def holder(database: Database) -> Callable[[], BucketLeases]:
    """Give a function that makes a holder of leases."""
    return lambda: BucketLeases(database, uuid.uuid4(), LEASE)


async def run_out(observer: asyncpg.Connection, *holders: BucketLeases) -> None:
    """Let what holders have run out, as time does where they don't renew it."""
    gone = [one.holder for one in holders]
    await observer.execute("UPDATE bucket_lease SET lease_expires_at = now() WHERE holder = ANY($1)", gone)
    await observer.execute("UPDATE bucket_holder SET alive_until = now() WHERE holder = ANY($1)", gone)


async def test_shares_are_even(observer, holder) -> None:
    """Each that joins gets its share as soon as the others have renewed, and none holds what another does."""
    holders = [holder() for _ in range(5)]
    for joined, expected in enumerate([[256], [128, 128], [84, 86, 86], [64] * 4, [48, 52, 52, 52, 52]], start=1):
        for _ in range(2):
            held = [await one.hold() for one in holders[:joined]]
        assert expected == await shares(observer)
        assert list(range(BUCKETS)) == sorted(bucket for one in held for bucket in one)


async def test_a_holder_that_leaves_frees_its_buckets(observer, holder) -> None:
    """What is released is free at once, and who released it is counted no more."""
    first, second = holder(), holder()
    await first.hold()
    await second.hold()
    await first.hold()
    assert 128 == len(await second.hold())
    await first.release()
    assert 256 == len(await second.hold())
    assert 1 == await count(observer, "bucket_holder")


async def test_one_of_two_gets_what_ran_out(observer, database, database_url: URL, holder) -> None:
    """Two that see the same leases run out at the same moment get disjoint buckets, together all of them."""
    other = Database(database_url, pool_size=2)
    gone, left, right = holder(), holder(), BucketLeases(other, uuid.uuid4(), LEASE)
    await gone.hold()
    for one in (left, right):
        assert [] == list(await one.hold())
    for _ in range(20):
        await run_out(observer, gone, left, right)
        held = await asyncio.gather(left.hold(), right.hold())
        taken = [bucket for one in held for bucket in one]
        assert len(set(taken)) == len(taken)
        held = [await left.hold(), await right.hold(), await left.hold(), await right.hold()][2:]
        assert list(range(BUCKETS)) == sorted(bucket for one in held for bucket in one)
        await observer.execute("UPDATE bucket_lease SET holder = $1", gone.holder)
    await other.close()


async def test_a_holder_that_was_away_has_lost_its_buckets(observer, holder) -> None:
    """Leases that ran out belong to who took them; the one that was away finds its share again, later."""
    away, taker = holder(), holder()
    await away.hold()
    await run_out(observer, away)
    assert 256 == len(await taker.hold())
    assert [] == list(await away.hold())
    assert 128 == len(await taker.hold())
    assert 128 == len(await away.hold())


async def test_leases_that_nobody_took_are_renewed(observer, holder) -> None:
    """A holder whose leases ran out, but whom nobody replaced, goes on with all of them."""
    one = holder()
    await one.hold()
    await run_out(observer, one)
    assert 256 == len(await one.hold())


async def test_leases_are_judged_by_postgres_clock(observer, holder) -> None:
    """A lease ends so long after its renewal, by Postgres's clock."""
    one = holder()
    await one.hold()
    row = await observer.fetchrow(
        "SELECT min(lease_expires_at) - now() AS least, max(lease_expires_at) - now() AS most FROM bucket_lease"
    )
    assert LEASE - timedelta(seconds=10) < row["least"] <= row["most"] <= LEASE


async def test_those_long_gone_are_forgotten(observer, holder) -> None:
    """A holder that was killed is forgotten an hour later."""
    gone, one = holder(), holder()
    await gone.hold()
    await observer.execute("UPDATE bucket_holder SET alive_until = now() - interval '61 minutes'")
    await one.hold()
    assert [one.holder] == [row["holder"] for row in await observer.fetch("SELECT holder FROM bucket_holder")]
