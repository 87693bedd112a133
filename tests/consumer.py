"""A consumer of events, as another service has it: it applies each once, in a Postgres database of its own."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing

import asyncpg
import confluent_kafka
import nats
from confluent_kafka import KafkaException, TopicPartition
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from brokers import PARTITIONS, Broker, KafkaBroker, Nats
from decideonce.events import Event, from_kafka, from_nats
from decideonce.inbox import SCHEMA, Inbox

# Nothing in the table keeps an event from being applied twice: only the inbox does.
TABLES = f"""
{SCHEMA}
CREATE TABLE applied (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id uuid NOT NULL,
    payload bytea NOT NULL
);
"""
APPLY = "INSERT INTO applied (event_id, payload) VALUES ($1, $2)"
BATCH = 200
REWIND = 20
FETCH_WITHIN_S = 1.0
AGAIN_AFTER_S = 0.1
# What breaks under a consumer: its broker or its Postgres. It begins anew.
BROKEN = (OSError, nats.errors.Error, KafkaException, asyncpg.PostgresError, asyncpg.InterfaceError)


class Consumer:
    """Applies a topic's events; `connect` gives a connection to its database, which has TABLES.

    After anything broke it begins anew from a little before the last position that it knows to be applied, as one that
    was killed does. `duplicates` counts what the topic has more than once, `delivered_again` what came again so.
    """

    def __init__(self, connect: Callable[[], Awaitable[asyncpg.Connection]]) -> None:
        self._connect = connect
        self._inbox = Inbox("tests")
        self.delivered = 0
        self.duplicates = 0
        self.delivered_again = 0
        # When each batch was applied, by the monotonic clock.
        self.times: list[float] = []
        self.interruptions: Counter[str] = Counter()

    def __str__(self) -> str:
        broken = ", ".join(f"{name} {count}" for name, count in self.interruptions.items())
        return (
            f"{self.delivered} delivered, {self.duplicates} duplicates of the publishers, {self.delivered_again} again "
            f"after the consumer began anew ({broken or 'never'})"
        )

    async def run(self) -> None:
        """Apply what comes, until cancelled."""
        while True:
            try:
                async with aclosing(self.batches()) as batches:
                    await self._apply_all(batches)
            except BROKEN as error:
                await self._note(error)
                await asyncio.sleep(AGAIN_AFTER_S)

    async def is_new(self, connection: asyncpg.Connection, event: Event) -> bool:
        """Tell whether an event is to be applied, in the transaction that applies it."""
        return await self._inbox.first_time(connection, event)

    async def _note(self, error: Exception) -> None:
        self.interruptions[type(error).__name__] += 1

    async def _apply_all(self, batches: AsyncIterator[tuple[list[Event], int]]) -> None:
        connection = await self._connect()
        try:
            async for events, known in batches:
                is_new = await self._apply(connection, events)
                self.times.append(time.monotonic())
                self.delivered += len(events)
                self.delivered_again += known
                self.duplicates += is_new[known:].count(False)
        finally:
            connection.terminate()

    async def _apply(self, connection: asyncpg.Connection, events: Sequence[Event]) -> list[bool]:
        async with connection.transaction():
            is_new = []
            for event in events:
                is_new.append(await self.is_new(connection, event))
                if is_new[-1]:
                    await connection.execute(APPLY, event.id, event.body.SerializeToString(deterministic=True))
        return is_new

    def batches(self) -> AsyncGenerator[tuple[list[Event], int]]:
        """Give events in the topic's order, and how many of the first of them were applied before.

        When the next is asked for, the last is applied.
        """
        raise NotImplementedError


class NatsConsumer(Consumer):
    """Applies the events of a NATS subject."""

    def __init__(self, broker: Nats, topic: str, connect: Callable[[], Awaitable[asyncpg.Connection]]) -> None:
        super().__init__(connect)
        self.broker = broker
        self._topic = topic
        # A number of the stream.
        self._applied = 0

    async def has_all(self) -> bool:
        """Tell whether everything that the broker has is applied."""
        async with await nats.connect(self.broker.url) as client:
            info = await client.jetstream().stream_info(self._topic.replace(".", "-"))
            return info.state.last_seq == self._applied

    async def batches(self) -> AsyncGenerator[tuple[list[Event], int]]:
        """Pull from a position of its own: what was on its way when the broker stopped comes before anything newer."""
        position = max(0, self._applied - REWIND)
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=position + 1,
            inactive_threshold=60,
        )
        client = await nats.connect(self.broker.url, allow_reconnect=False, error_cb=self._note)
        try:
            subscription = await client.jetstream().pull_subscribe(self._topic, config=config)
            while True:
                try:
                    messages = await subscription.fetch(BATCH, FETCH_WITHIN_S)
                except nats.errors.TimeoutError:
                    continue
                numbers = [message.metadata.sequence.stream for message in messages]
                if numbers != list(range(position + 1, position + 1 + len(numbers))):
                    raise ConnectionResetError("messages were lost on their way")
                if not messages:
                    continue
                yield [from_nats(message) for message in messages], sum(n <= self._applied for n in numbers)
                position = numbers[-1]
                self._applied = max(self._applied, position)
        finally:
            await client.close()


class KafkaConsumer(Consumer):
    """Applies the events of a topic of Kafka's protocol."""

    def __init__(self, broker: KafkaBroker, topic: str, connect: Callable[[], Awaitable[asyncpg.Connection]]) -> None:
        super().__init__(connect)
        self.broker = broker
        self._topic = topic
        # Offsets by partition.
        self._applied = dict.fromkeys(range(PARTITIONS), -1)

    async def batches(self) -> AsyncGenerator[tuple[list[Event], int]]:
        """Read from positions of its own."""
        settings = {"bootstrap.servers": self.broker.address, "group.id": "unused", "log_level": 2}
        consumer = confluent_kafka.Consumer(settings | {"reconnect.backoff.max.ms": 1000})
        try:
            consumer.assign(
                [
                    TopicPartition(self._topic, partition, max(0, applied + 1 - REWIND))
                    for partition, applied in self._applied.items()
                ]
            )
            while True:
                found = await asyncio.to_thread(consumer.consume, BATCH, AGAIN_AFTER_S)
                messages = [message for message in found if message.error() is None]
                # Those that came before come first.
                messages.sort(key=lambda message: message.offset() > self._applied[message.partition()])
                known = sum(message.offset() <= self._applied[message.partition()] for message in messages)
                if messages:
                    yield [from_kafka(message) for message in messages], known
                for message in messages:
                    place = message.partition()
                    self._applied[place] = max(self._applied[place], message.offset())
        finally:
            await asyncio.to_thread(consumer.close)


def consumer_of(broker: Broker, topic: str, connect: Callable[[], Awaitable[asyncpg.Connection]]) -> Consumer:
    """Make the consumer of a kind of broker."""
    if isinstance(broker, Nats):
        return NatsConsumer(broker, topic, connect)
    assert isinstance(broker, KafkaBroker)
    return KafkaConsumer(broker, topic, connect)
