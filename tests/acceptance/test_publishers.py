"""Several publishers, each a real process: who holds which buckets, and what a stop, a kill or a freeze does to it."""

import asyncio
import signal
import time
from collections.abc import Iterator

import asyncpg
import pytest

from brokers import Nats, Tansu
from decideonce_server.publisher import LEASE
from decideonce_server.sink import SEND_WITHIN_S
from harness import new_key
from processes import until
from publishing import TOPIC, count, event_rows, gate, is_empty, parked, plant, read_ids, shares

# Much shorter than the real one's.
LEASE_S = 2.0
LONG_LEASE_S = 60.0


@pytest.fixture(scope="module")
def nats() -> Iterator[Nats]:
    """Give a broker."""
    broker = Nats()
    try:
        yield broker
    finally:
        broker.close()


@pytest.fixture
def topic(nats: Nats) -> str:
    """Give a topic of the test's own."""
    name = f"test.{new_key()}"
    nats.make_topic(name)
    return name


async def have(observer: asyncpg.Connection, *expected: int) -> None:
    """Wait until publishers hold so many buckets each."""

    async def is_so() -> bool:
        return list(expected) == await shares(observer)

    await until(is_so)


async def test_publishers_share_evenly(observer, nats, publish) -> None:
    """One publisher holds all buckets, two a half each; one that is stopped gives its half back at once."""
    first = publish(nats.url)
    await have(observer, 256)
    second = publish(nats.url)
    await have(observer, 128, 128)
    assert 0 == await second.stop()
    assert [128] == await shares(observer)
    began = time.monotonic()
    await have(observer, 256)
    # Well before any lease would run out.
    assert LEASE.total_seconds() / 2 > time.monotonic() - began
    assert 0 == await first.stop()
    assert (0, []) == (await count(observer, "bucket_holder"), await shares(observer))


async def test_three_publishers_and_one_that_is_killed(observer, nats, topic, publish) -> None:
    """The buckets of a publisher that was killed are taken over once its leases run out, and their events go out."""
    first, _, _ = [publish(nats.url, lease=LEASE_S) for _ in range(3)]
    await have(observer, 84, 86, 86)
    first.kill()
    ids = {one for _ in range(20) for one in await plant(observer, event_rows(topic))}
    await have(observer, 128, 128)
    await until(lambda: is_empty(observer))
    assert ids == set(read_ids(nats, topic, 20))


async def test_a_loser_deletes_and_parks_nothing(observer, nats, topic, publish) -> None:
    """Of two publishers that see leases run out one wins; the loser, stopped while it sent, changes nothing afterwards.

    Neither does it delete what it sent, nor park what was refused; the winner does, and each key's order holds.
    """
    with gate(nats) as losers, gate(nats) as winners:
        loser = publish(f"nats://{losers.address}", lease=LEASE_S)
        await have(observer, 256)
        losers.hold()
        keys = [await plant(observer, event_rows(topic, count=5)) for _ in range(20)]
        refused = await plant(observer, event_rows(f"test.{new_key()}"))
        await losers.until_held()
        loser.send_signal(signal.SIGSTOP)
        winners.hold()
        winner = publish(f"nats://{winners.address}", lease=LONG_LEASE_S)
        await winners.until_held()
        before = await observer.fetch("SELECT o::text FROM outbox o ORDER BY id")
        losers.release()
        loser.send_signal(signal.SIGCONT)
        await until(lambda: "leases of buckets were lost" in loser.log.read_text())
        assert before == await observer.fetch("SELECT o::text FROM outbox o ORDER BY id")
        assert [] == await parked(observer)
        assert "event parked" not in loser.log.read_text()
        winners.release()
        await until(lambda: is_empty(observer))
        assert [(refused[0], "TOPIC_NOT_FOUND")] == await parked(observer)
        assert "event parked" in winner.log.read_text() + loser.log.read_text()
    arrived = read_ids(nats, topic, 100)
    assert keys == [[one for one in arrived if one in ids] for ids in keys]


async def test_a_stop_ends_the_set_that_is_being_sent(observer, nats, topic, publish) -> None:
    """A publisher that is stopped while a slow broker has its set deletes what arrived: nothing is sent twice."""
    with gate(nats) as between:
        publisher = publish(f"nats://{between.address}", "--drain", "20s")
        await have(observer, 256)
        between.hold()
        ids = await plant(observer, event_rows(topic, count=3))
        await between.until_held()
        publisher.send_signal(signal.SIGTERM)
        between.release()
        assert 0 == await publisher.ended()
    left = [str(row["id"]) for row in await observer.fetch("SELECT id FROM outbox ORDER BY id")]
    assert ids[0] not in left
    assert ids == read_ids(nats, topic, 1) + left
    assert [] == await shares(observer)


@pytest.mark.parametrize("kind", [Nats, Tansu])
async def test_a_stop_does_not_wait_longer_than_its_drain(observer, publish, kind) -> None:
    """A publisher whose broker doesn't answer any more stops when its drain is over, and leaves its events."""
    broker = kind()
    try:
        broker.make_topic(TOPIC)
        publisher = publish(broker.url, "--drain", "1s")
        await plant(observer, event_rows(TOPIC))
        await until(lambda: is_empty(observer))
        broker.freeze()
        await plant(observer, event_rows(TOPIC))
        await publisher.until_metric("outbox_pending", lambda number: number == 1)
        began = time.monotonic()
        assert 0 == await publisher.stop()
        # Sooner than the broker would be given up.
        assert SEND_WITHIN_S > time.monotonic() - began
        assert (1, []) == (await count(observer), await parked(observer))
    finally:
        broker.thaw()
        broker.close()


async def test_many_publishers_come_and_go(observer, nats, topic, publish) -> None:
    """While publishers join, are stopped and are killed, each key's events arrive once each, in their order."""
    keys = [await plant(observer, event_rows(topic, count=10)) for _ in range(40)]
    publishers = [publish(nats.url, lease=LEASE_S) for _ in range(2)]
    keys += [await plant(observer, event_rows(topic, count=10)) for _ in range(40)]
    publishers[0].kill()
    publishers.append(publish(nats.url, lease=LEASE_S))
    keys += [await plant(observer, event_rows(topic, count=10)) for _ in range(40)]
    assert 0 == await publishers[1].stop()
    await until(lambda: is_empty(observer))
    await have(observer, 256)
    arrived = await asyncio.to_thread(read_ids, nats, topic, 1200)
    assert keys == [[one for one in arrived if one in ids] for ids in keys]
