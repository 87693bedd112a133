"""Events from the outbox to a real broker, by a real `decideonce housekeep`: what arrives, waits, or is parked."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from google.protobuf import timestamp_pb2
from sqlalchemy.engine import URL

from brokers import Broker, Nats, Tansu
from cluster import Cluster, cluster_directory
from conftest import connect
from decideonce.v1 import events_pb2
from decideonce_server.migrate import migrate
from decideonce_server.sink import SEND_WITHIN_S
from harness import new_key
from processes import free_address, until
from publishing import (
    TOO_LARGE,
    TOPIC,
    PublisherProcess,
    count,
    event_rows,
    gate,
    is_empty,
    outbox_command,
    parked,
    plant,
    read_ids,
)

SERVERS = [Nats, Tansu]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, started: Callable[[Any], Any]) -> Broker:
    """Give a broker of each kind."""
    return started(request.param)


@pytest.fixture
def nats(started: Callable[[Any], Any]) -> Nats:
    """Give NATS, which keeps what it has when it is stopped."""
    return started(Nats)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """Give a topic of the test's own."""
    name = f"test.{new_key()}"
    fixture = "server" if "server" in request.fixturenames else "nats"
    request.getfixturevalue(fixture).make_topic(name)
    return name


def outbox(url: URL, *arguments: str) -> str:
    """Run one of an operator's commands, and give what it says."""
    done = outbox_command(url, *arguments)
    assert 0 == done.returncode, done.stderr
    return done.stdout


async def test_late_committer_is_not_skipped(observer, database_url, nats, topic, publish) -> None:
    """An event that commits after later ones is published; a roll-back or a forgotten transaction stalls none.

    event-driven.io, on ordering in a Postgres outbox: a publisher that remembered the highest id passed an uncommitted
    lower one.
    """
    rows = [event_rows(topic)[0] for _ in range(4)]
    ids = [str(row[1]) for row in rows]
    late, rolled_back, forgotten = [await connect(database_url) for _ in range(3)]
    begun = late.transaction()
    await begun.start()
    await plant(late, rows[:1])
    await forgotten.execute("CREATE TABLE unrelated (n int)")
    await forgotten.execute("BEGIN; INSERT INTO unrelated VALUES (1)")
    await plant(observer, rows[1:2])
    publish(nats.url)
    await until(lambda: is_empty(observer))
    undone = rolled_back.transaction()
    await undone.start()
    await plant(rolled_back, rows[2:3])
    await undone.rollback()
    await plant(observer, rows[3:])
    await until(lambda: is_empty(observer))
    assert [ids[1], ids[3]] == read_ids(nats, topic)
    await begun.commit()
    await until(lambda: is_empty(observer))
    assert [ids[1], ids[3], ids[0]] == read_ids(nats, topic)
    for session in (late, rolled_back, forgotten):
        await session.close()


async def test_an_event_too_large_holds_back_its_own_key(observer, database_url, server, topic, publish) -> None:
    """Of eleven events the first is too large: it is parked, five of its key wait, five others are out in 2 s.

    The operator who discards it lets the five go, in order. zendesk/ruby-kafka#821: a message that was too large was
    tried for ever, and nothing behind it came out.
    """
    key = new_key()
    publisher = publish(server.url)
    await until(lambda: ready(observer))
    rows = [*event_rows(topic, key, size=TOO_LARGE), *event_rows(topic, key, 5)]
    others = [event_rows(topic)[0] for _ in range(5)]
    poison, *dependants = [str(row[1]) for row in rows]
    began = time.monotonic()
    await plant(observer, [*rows, *others])
    await until(lambda: only(observer, 5))
    assert 2.0 > time.monotonic() - began
    assert {str(row[1]) for row in others} == set(read_ids(server, topic, 5))
    assert [(poison, "MESSAGE_TOO_LARGE")] == await parked(observer)
    await publisher.until_metric("outbox_parked", lambda number: number == 1)
    told = await publisher.metrics()
    assert (1, 5) == (told["outbox_parkings_total"], told["outbox_published_total"])
    assert poison in outbox(database_url, "list", "--parked")
    assert "MESSAGE_TOO_LARGE" in outbox(database_url, "show", poison)
    assert "discarded 1\n" == outbox(database_url, "discard", "--yes", poison)
    await until(lambda: is_empty(observer))
    assert dependants == [one for one in read_ids(server, topic, 10) if one in dependants]
    await publisher.until_metric("outbox_parked", lambda number: number == 0)


async def ready(observer: asyncpg.Connection) -> bool:
    """Tell whether all buckets are held."""
    return 256 == await observer.fetchval("SELECT count(*) FROM bucket_lease WHERE holder IS NOT NULL")


async def only(observer: asyncpg.Connection, waiting: int) -> bool:
    """Tell whether one event is parked, and so many wait."""
    return (waiting, 1) == (await count(observer), await count(observer, "outbox_parked"))


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_raised_limit_lets_a_parked_event_go(observer, database_url, publish, kind) -> None:
    """Once the limit is raised, `outbox retry` sends what was too large before the later events of its key."""
    broker = kind()
    try:
        broker.make_topic(TOPIC)
        publisher = publish(broker.url)
        key = new_key()
        large = await plant(observer, [*event_rows(TOPIC, key, size=TOO_LARGE), *event_rows(TOPIC, key, 3)])
        await until(lambda: only(observer, 3))
        if kind is Nats:
            settings = broker.directory / "nats.conf"
            settings.write_text(settings.read_text().replace("max_payload: 1048576", "max_payload: 4194304"))
            await asyncio.to_thread(broker.stop)
            await asyncio.to_thread(broker.start)
        else:
            assert 0 == await publisher.stop()
            publish(f"{broker.url}?message.max.bytes=4194304")
        assert "retried 1\n" == outbox(database_url, "retry", large[0])
        await until(lambda: is_empty(observer))
        assert (large, []) == (read_ids(broker, TOPIC, 4), await parked(observer))
    finally:
        broker.close()


async def test_a_topic_that_does_not_exist_is_made_later(observer, database_url, server, publish) -> None:
    """Events to an unknown topic are parked, one of each key; once there is one, `retry --all` sends all, in order."""
    topic = f"test.{new_key()}"
    publish(server.url)
    keys = [await plant(observer, event_rows(topic, count=3)) for _ in range(4)]
    await until(lambda: four_parked(observer))
    assert sorted((ids[0], "TOPIC_NOT_FOUND") for ids in keys) == await parked(observer)
    server.make_topic(topic)
    assert "retried 4\n" == outbox(database_url, "retry", "--all")
    await until(lambda: is_empty(observer))
    arrived = read_ids(server, topic, 12)
    assert keys == [[one for one in arrived if one in ids] for ids in keys]
    assert 12 == len(arrived)


async def four_parked(observer: asyncpg.Connection) -> bool:
    return 4 == await count(observer, "outbox_parked")


async def test_what_is_no_event_is_parked(observer, database_url, nats, topic, publish) -> None:
    """A payload that can't be told, whatever wrote it, is parked; the operator sees it, and others go out."""
    publish(nats.url)
    timeless = events_pb2.DecisionEvent(event_time=timestamp_pb2.Timestamp(seconds=10**15)).SerializeToString()
    rows = [(*event_rows(topic)[0][:7], payload, topic, None) for payload in (b"\xff", timeless)]
    stuck = await plant(observer, rows)
    others = await plant(observer, event_rows(topic, count=2))
    await until(lambda: is_empty(observer))
    assert others == read_ids(nats, topic, 2)
    assert [(one, "REFUSED") for one in stuck] == await parked(observer)
    assert all(one in outbox(database_url, "list", "--parked") for one in stuck)
    assert "REFUSED" in outbox(database_url, "show", stuck[0])


async def test_an_outage_is_never_poison(observer, server, topic, publish) -> None:
    """While the broker is down nothing is parked, and tries are counted; all arrives once it is back, in order."""
    publisher = publish(server.url)
    first = await plant(observer, event_rows(topic))
    await until(lambda: is_empty(observer))
    await asyncio.to_thread(server.stop)
    try:
        keys = [await plant(observer, event_rows(topic, count=5)) for _ in range(10)]
        # One of each key is tried.
        await publisher.until_metric("outbox_retries_total", lambda number: number >= 10)
        await publisher.until_metric("outbox_pending", lambda number: number == 50)
        assert [] == await parked(observer)
        assert 0 < (await publisher.metrics())["outbox_lag_seconds"]
    finally:
        await asyncio.to_thread(server.start)
    await until(lambda: is_empty(observer))
    arrived = read_ids(server, topic, 50)
    assert keys == [in_order_of_first(arrived, ids) for ids in keys]
    assert set(arrived) - set(first) == {one for ids in keys for one in ids}
    assert [] == await parked(observer)


def in_order_of_first(arrived: list[str], ids: list[str]) -> list[str]:
    """Give those of the ids that arrived, in the order in which each came first."""
    return [one for one in dict.fromkeys(arrived) if one in ids]


async def test_a_lost_acknowledgement(observer, nats, topic, publish) -> None:
    """An event whose acknowledgement is lost after the broker stored it is sent again, and the broker keeps one."""
    with gate(nats) as between:
        publisher = publish(f"nats://{between.address}")
        await plant(observer, event_rows(topic))
        await until(lambda: is_empty(observer))
        between.cut_next_answer()
        lost = await plant(observer, event_rows(topic))
        await between.until_cut()
        await until(lambda: is_empty(observer))
        assert lost == read_ids(nats, topic)[1:]
        assert 1 == (await publisher.metrics())["outbox_retries_total"]


async def test_housekeeping_starts_without_its_broker(observer, publish) -> None:
    """A broker that can't be reached at the start keeps housekeeping from nothing; it stops in good order, too."""
    publisher = publish(f"nats://{free_address()}", "--drain", "1s")
    await plant(observer, event_rows(TOPIC))
    await publisher.until_metric("outbox_pending", lambda number: number == 1)
    began = time.monotonic()
    assert 0 == await publisher.stop()
    # Sooner than the broker would be given up.
    assert SEND_WITHIN_S > time.monotonic() - began
    assert (1, []) == (await count(observer), await parked(observer))


async def test_postgres_restarts_while_events_go_out(nats, topic, tmp_path) -> None:
    """Publishing goes on by itself after Postgres crashed in the middle of it, and nothing is lost or out of order."""
    with cluster_directory() as directory:
        cluster = await asyncio.to_thread(Cluster.create, directory / "data")
        publisher = None
        try:
            await migrate(cluster.url)
            session = await cluster.connect()
            keys = [await plant(session, event_rows(topic, count=20)) for _ in range(100)]
            publisher = PublisherProcess(cluster.url, tmp_path / "publisher.log", "--events", nats.url)
            await until(lambda: some_are_out(session, 2000))
            await session.close()
            await asyncio.to_thread(cluster.restart, "immediate")
            session = await cluster.connect()
            await until(lambda: is_empty(session), 60)
            await session.close()
            arrived = read_ids(nats, topic, 2000)
            assert keys == [in_order_of_first(arrived, ids) for ids in keys]
            assert publisher.process.poll() is None
        finally:
            if publisher is not None:
                publisher.kill()
            await asyncio.to_thread(cluster.destroy)


async def some_are_out(session: asyncpg.Connection, planted: int) -> bool:
    return await count(session) < planted
