"""The outbox's statements on a real Postgres: what is read, and what deleting, parking and retrying change."""

import uuid
from datetime import timedelta

import asyncpg
import pytest

from decideonce_server.database import Database
from decideonce_server.outbox import READ_BYTES_MAX, READ_PER_BUCKET, Event, Outbox, ParkedEvent
from decideonce_server.outbox_buckets import BUCKETS, BucketLeases
from harness import new_key
from publishing import TOPIC, count, event_rows, parked, plant

ALL = list(range(BUCKETS))
LEASE = timedelta(seconds=60)


@pytest.fixture
def outbox(database: Database) -> Outbox:
    return Outbox(database)


@pytest.fixture
async def holder(database: Database) -> uuid.UUID:
    """Give one who holds every bucket."""
    leases = BucketLeases(database, uuid.uuid4(), LEASE)
    assert ALL == list(await leases.hold())
    return leases.holder


async def waiting(outbox: Outbox, limit: int = 1000) -> list[Event]:
    return await outbox.waiting(ALL, limit)


def ids(events: list[Event]) -> list[str]:
    return [str(event.id) for event in events]


async def test_events_are_read_in_order(outbox, observer) -> None:
    """What waits is read whole, in the order of ids, whichever bucket it is in; of no bucket nothing."""
    rows = [row for _ in range(20) for row in event_rows(TOPIC, count=2)]
    planted = await plant(observer, rows[::-1])
    found = await waiting(outbox)
    assert planted[::-1] == ids(found)
    one = found[0]
    assert rows[0] == (
        one.bucket,
        one.id,
        one.tenant,
        one.operation,
        one.operation_key,
        one.aggregate_id,
        one.type,
        one.payload,
        one.topic,
        one.traceparent,
    )
    assert [] == await outbox.waiting([], 1000)


async def test_a_read_is_bounded(outbox, observer) -> None:
    """A read gives so many events at most, so many of one bucket, and so many bytes, but never less than one event."""
    key = new_key()
    await plant(observer, event_rows(TOPIC, key, READ_PER_BUCKET + 10))
    assert READ_PER_BUCKET == len(await waiting(outbox))
    for _ in range(5):
        await plant(observer, event_rows(TOPIC))
    assert 3 == len(await waiting(outbox, 3))
    await observer.execute("TRUNCATE outbox")
    large = await plant(observer, event_rows(TOPIC, key, 3, READ_BYTES_MAX // 2))
    assert large[:2] == ids(await waiting(outbox))
    await observer.execute("TRUNCATE outbox")
    larger = await plant(observer, event_rows(TOPIC, key, 2, READ_BYTES_MAX))
    assert larger[:1] == ids(await waiting(outbox))


async def test_the_first_buckets_are_read_first(outbox, observer) -> None:
    """The order of the buckets asked for says whose events a bounded read gives."""
    await plant(observer, [event_rows(TOPIC)[0] for _ in range(20)])
    buckets = sorted({event.bucket for event in await waiting(outbox)})
    for order in (buckets, buckets[::-1]):
        assert order[0] == (await outbox.waiting(order, 1))[0].bucket


async def test_who_holds_no_lease_changes_nothing(database, outbox, observer, holder) -> None:
    """Deleting and parking work only for a bucket's holder, and only while the lease lasts."""
    (planted,) = await plant(observer, event_rows(TOPIC))
    events = await waiting(outbox)
    stranger = uuid.uuid4()
    assert (0, set()) == (await outbox.published(stranger, events), await outbox.park(stranger, events, ["REFUSED"]))
    await observer.execute("UPDATE bucket_lease SET lease_expires_at = now() - interval '1 ms'")
    assert (0, set()) == (await outbox.published(holder, events), await outbox.park(holder, events, ["REFUSED"]))
    assert ([planted], []) == (ids(await waiting(outbox)), await parked(observer))


async def test_published_events_are_deleted(outbox, observer, holder) -> None:
    """What the sink has is deleted, once; what came meanwhile stays."""
    await plant(observer, event_rows(TOPIC, count=3))
    events = await waiting(outbox)
    later = await plant(observer, event_rows(TOPIC))
    assert 3 == await outbox.published(holder, events)
    assert 0 == await outbox.published(holder, events)
    assert later == ids(await waiting(outbox))


async def test_a_parked_event_holds_back_its_own_key(outbox, observer, holder) -> None:
    """Later events of a parked event's key aren't read; those of the same key of another operation or tenant are."""
    key = new_key()
    rows = event_rows(TOPIC, key, 3)
    (other_operation,), (other_tenant,) = event_rows(TOPIC, key), event_rows(TOPIC, key)
    others = [
        (*other_operation[:3], "credit.other", *other_operation[4:]),
        (*other_tenant[:2], "globex", *other_tenant[3:]),
    ]
    planted = await plant(observer, rows)
    first = (await waiting(outbox))[0]
    assert {first.id} == await outbox.park(holder, [first], ["MESSAGE_TOO_LARGE"])
    assert [(planted[0], "MESSAGE_TOO_LARGE")] == await parked(observer)
    expected = await plant(observer, others)
    assert expected == ids(await waiting(outbox))


async def test_a_retried_event_is_first_again(outbox, observer, holder) -> None:
    """An event that is retried is as it was, before the later ones of its key; one that is discarded is gone."""
    planted = await plant(observer, event_rows(TOPIC, count=3))
    first = (await waiting(outbox))[0]
    for _ in range(2):
        await outbox.park(holder, [first], ["TOPIC_NOT_FOUND"])
        assert [] == await waiting(outbox)
        assert 0 == await outbox.retry([uuid.uuid4()])
        assert 1 == await outbox.retry([first.id])
        assert (planted, first) == (ids(await waiting(outbox)), (await waiting(outbox))[0])
    await outbox.park(holder, [first], ["TOPIC_NOT_FOUND"])
    assert (1, 0) == (await outbox.discard([first.id]), await outbox.discard([first.id]))
    assert (planted[1:], []) == (ids(await waiting(outbox)), await parked(observer))


async def test_all_parked_events_are_retried(outbox, observer, holder) -> None:
    """Without ids every parked event is retried, and what waits stays."""
    for _ in range(3):
        await plant(observer, event_rows(TOPIC, count=2))
    firsts = {event.operation_key: event for event in reversed(await waiting(outbox))}
    await outbox.park(holder, list(firsts.values()), ["REFUSED"] * 3)
    assert 3 == await outbox.retry(None)
    assert (6, []) == (len(await waiting(outbox)), await parked(observer))


async def test_what_waits_only_sees_insert_and_delete(outbox, observer, holder) -> None:
    """Nothing that is done to events updates a row of the outbox, as a pipeline that reads its log expects."""
    await plant(observer, event_rows(TOPIC, count=2))
    first, second = await waiting(outbox)
    await outbox.park(holder, [first], ["REFUSED"])
    await outbox.retry([first.id])
    await outbox.published(holder, [first, second])
    await observer.execute("SELECT pg_stat_force_next_flush()")
    row = await observer.fetchrow("SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'outbox'")
    assert 0 == row["n_tup_upd"]


async def test_the_backlog_is_counted(outbox, observer, holder) -> None:
    """The backlog tells how many events wait, the oldest of them, and how many are parked."""
    empty = await outbox.backlog()
    assert (0, None, 0) == (empty.pending, empty.oldest, empty.parked)
    planted = [(await plant(observer, event_rows(TOPIC)))[0] for _ in range(5)]
    events = await waiting(outbox)
    backlog = await outbox.backlog()
    assert (5, planted[0], 0) == (backlog.pending, str(backlog.oldest), backlog.parked)
    await outbox.park(holder, events[:1], ["REFUSED"])
    backlog = await outbox.backlog()
    assert (4, planted[1], 1) == (backlog.pending, str(backlog.oldest), backlog.parked)


async def test_events_are_listed_and_shown(outbox, observer, holder) -> None:
    """What waits and what is parked is listed oldest first and found by its id; an unknown id is nothing."""
    planted = [(await plant(observer, event_rows(TOPIC)))[0] for _ in range(3)]
    first, second, _ = await waiting(outbox)
    await outbox.park(holder, [first, second], ["REFUSED", "MESSAGE_TOO_LARGE"])
    found = await outbox.parked(1)
    assert [(first, "REFUSED")] == [(one.event, one.reason) for one in found]
    assert planted[2:] == ids(await outbox.pending(10))
    shown = await outbox.show(second.id)
    assert isinstance(shown, ParkedEvent)
    assert (second, "MESSAGE_TOO_LARGE") == (shown.event, shown.reason)
    assert planted[2] == str((await outbox.show(uuid.UUID(planted[2]))).id)
    assert await outbox.show(uuid.uuid4()) is None
    assert 1 == await count(observer)


async def test_parked_events_hold_to_the_bucket_rule(observer: asyncpg.Connection, outbox, holder) -> None:
    """Neither table takes an event in a bucket that isn't its key's."""
    (row,) = event_rows(TOPIC)
    with pytest.raises(asyncpg.CheckViolationError):
        await plant(observer, [((row[0] + 1) % BUCKETS, *row[1:])])
    await plant(observer, [row])
    await outbox.park(holder, await waiting(outbox), ["REFUSED"])
    with pytest.raises(asyncpg.CheckViolationError):
        await observer.execute("UPDATE outbox_parked SET bucket = (bucket + 1) % 256")
