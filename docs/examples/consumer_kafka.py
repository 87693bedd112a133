"""Apply the events of a Kafka topic: consumer_kafka.py BROKERS TOPIC DATABASE_URL."""

import asyncio
import sys

import asyncpg
from confluent_kafka import KafkaException
from confluent_kafka.aio import AIOConsumer
from offers import deliver, told_to_stop

from decideonce import events


async def consume(consumer: AIOConsumer, pool: asyncpg.Pool, stopping: asyncio.Event) -> None:
    """Apply one message after the other, and commit its offset once its transaction is committed.

    An error ends this: to go on with the next message and commit that would skip the one that failed.
    """
    while not stopping.is_set():
        message = await consumer.poll(1.0)
        if message is None:
            continue
        if message.error() is not None:
            raise KafkaException(message.error())
        name = f"{message.topic()}/{message.partition()}/{message.offset()}"
        await deliver(pool, name, message, message.value(), events.from_kafka)
        await consumer.commit(message=message, asynchronous=False)


async def main(brokers: str, topic: str, database_url: str) -> None:
    """Consume as one of the group until told to stop."""
    settings = {
        "bootstrap.servers": brokers,
        "group.id": "offers",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    async with asyncpg.create_pool(database_url, min_size=1, max_size=2) as pool, AIOConsumer(settings) as consumer:
        await consumer.subscribe([topic])
        await consume(consumer, pool, told_to_stop())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
