"""The consumers of docs/examples, on real brokers."""

import asyncio
import importlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import nats
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.aio import AIOConsumer
from sqlalchemy.engine import URL

import brokers
from decideonce import inbox
from decideonce.events import JSON, KAFKA_PREFIX, NATS_PREFIX, PROTOBUF
from decideonce.v1 import events_pb2
from harness import new_key, url_text
from processes import WITHIN_S, until
from sample_events import attributes, body, payload

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
TOPIC = "decisions"
OFFER = {"amount_minor": 250_000, "currency": "EUR"}

Sent = tuple[dict[str, str], bytes]


@contextmanager
def serving(broker: brokers.Broker) -> Iterator[Any]:
    """Give a broker that has the topic, until the block ends."""
    with closing(broker):
        broker.make_topic(TOPIC)
        yield broker


@pytest.fixture
def kafka() -> Iterator[brokers.Tansu]:
    with serving(brokers.Tansu()) as broker:
        yield broker


@pytest.fixture
def nats_server() -> Iterator[brokers.Nats]:
    with serving(brokers.Nats()) as broker:
        yield broker


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
async def tables(database_url: URL) -> None:
    """Make the tables, as a reader does."""
    await run("offers.py", url_text(database_url))


@pytest.fixture
async def pool(database_url: URL) -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(url_text(database_url), min_size=1, max_size=2) as pool:
        yield pool


async def run(program: str, *arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, EXAMPLES / program, *arguments)
    assert 0 == await process.wait()


def sent(made: events_pb2.DecisionEvent, prefix: str, content_type: str = PROTOBUF) -> Sent:
    return attributes(made, prefix, content_type), payload(made, content_type)


def deliveries(prefix: str) -> list[Sent]:
    """Make messages: a decision and its offer, both again and late, one broken, one too old, and another decision."""
    key = new_key()
    decided, offer = sent(body(key=key), prefix), sent(body(key=key, effect=OFFER), prefix, JSON)
    broken = ({"content-type": PROTOBUF}, b"broken")
    old = sent(body(datetime.now(UTC) - inbox.HORIZON, key), prefix)
    return [decided, offer, decided, offer, broken, old, decided, sent(body(), prefix)]


async def results(observer: asyncpg.Connection) -> dict[str, list[Any]]:
    """Give what the consumer has written."""
    return {
        "decided": [row["outcome"] for row in await observer.fetch("SELECT outcome FROM decided")],
        "offers": [tuple(row) for row in await observer.fetch("SELECT amount_minor, currency FROM offer")],
        "marks": [await observer.fetchval("SELECT count(*) FROM decideonce_inbox")],
        "set aside": [
            row["reason"].partition(" ")[0]
            for row in await observer.fetch("SELECT reason FROM set_aside ORDER BY message")
        ],
    }


def expected(prefix: str) -> dict[str, list[Any]]:
    return {
        "decided": ["approved", "approved"],
        "offers": [(250_000, "EUR")],
        "marks": [3],
        "set aside": [f"{prefix}specversion", "event"],
    }


def produce(broker: brokers.Tansu, messages: list[Sent]) -> None:
    producer = Producer({"bootstrap.servers": broker.address, "enable.idempotence": True, "acks": "all"})
    for headers, data in messages:
        producer.produce(TOPIC, key="acme/one-key", value=data, headers=list(headers.items()))
    assert 0 == producer.flush(WITHIN_S)
    producer.close()


PARTITIONS = [TopicPartition(TOPIC, number) for number in range(brokers.PARTITIONS)]


def settings(broker: brokers.Tansu) -> dict[str, Any]:
    return {
        "bootstrap.servers": broker.address,
        "group.id": "offers",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "log_level": 2,
    }


async def consume(module: ModuleType, broker: brokers.Tansu, pool: asyncpg.Pool, stopping: asyncio.Event) -> None:
    """Run the example's loop on all partitions from what is committed: Tansu has no groups to subscribe in."""
    async with AIOConsumer(settings(broker)) as consumer:
        await consumer.assign(PARTITIONS)
        await module.consume(consumer, pool, stopping)


async def committed(broker: brokers.Tansu) -> int:
    """Give how many messages the group has committed."""
    async with AIOConsumer(settings(broker)) as consumer:
        return sum(max(partition.offset, 0) for partition in await consumer.committed(PARTITIONS))


async def consume_until(
    done: Callable[[], Awaitable[bool]], module: ModuleType, broker: brokers.Tansu, pool: asyncpg.Pool
) -> None:
    stopping = asyncio.Event()
    running = asyncio.create_task(consume(module, broker, pool, stopping))
    await until(done)
    stopping.set()
    async with asyncio.timeout(WITHIN_S):
        await running


async def test_kafka(kafka, example, tables, pool, observer) -> None:
    """The Kafka consumer applies each event once, sets aside what can't be applied, and commits every message."""
    messages = deliveries(KAFKA_PREFIX)
    produce(kafka, messages)

    async def last_is_applied() -> bool:
        return 2 == await observer.fetchval("SELECT count(*) FROM decided")

    await consume_until(last_is_applied, example("consumer_kafka"), kafka, pool)
    assert expected(KAFKA_PREFIX) == await results(observer)
    assert len(messages) == await committed(kafka)


async def test_kafka_message_that_fails_comes_again(kafka, example, tables, pool, observer) -> None:
    """A message whose transaction fails isn't committed, and is applied when the consumer is started again."""
    module = example("consumer_kafka")
    produce(kafka, deliveries(KAFKA_PREFIX)[:2])
    await observer.execute("ALTER TABLE offer RENAME TO elsewhere")
    with pytest.raises(asyncpg.UndefinedTableError):
        await consume(module, kafka, pool, asyncio.Event())
    assert (1, 1) == (await committed(kafka), await observer.fetchval("SELECT count(*) FROM decideonce_inbox"))
    await observer.execute("ALTER TABLE elsewhere RENAME TO offer")

    async def is_offered() -> bool:
        return await observer.fetchval("SELECT count(*) FROM offer")

    await consume_until(is_offered, module, kafka, pool)
    assert {"marks": [2], "offers": [(250_000, "EUR")]}.items() <= (await results(observer)).items()
    assert 2 == await committed(kafka)


async def test_nats(nats_server, tables, database_url, observer) -> None:
    """The NATS consumer does the same as a process of its own, and ends when told to."""
    messages = deliveries(NATS_PREFIX)
    async with await nats.connect(nats_server.url) as client:
        stream = client.jetstream()
        for headers, data in messages:
            await stream.publish(TOPIC, data, headers=headers)
        consumer = await asyncio.create_subprocess_exec(
            sys.executable, EXAMPLES / "consumer_nats.py", nats_server.url, TOPIC, url_text(database_url)
        )

        async def all_acknowledged() -> bool:
            assert consumer.returncode is None
            try:
                info = await stream.consumer_info(TOPIC, "offers")
            except nats.js.errors.NotFoundError:
                return False
            return len(messages) == info.ack_floor.stream_seq

        try:
            await until(all_acknowledged)
            consumer.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WITHIN_S):
                assert 0 == await consumer.wait()
        finally:
            if consumer.returncode is None:
                consumer.kill()
                await consumer.wait()
    assert expected(NATS_PREFIX) == await results(observer)
