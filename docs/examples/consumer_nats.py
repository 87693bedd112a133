"""Apply the events of NATS subjects: consumer_nats.py SERVER SUBJECT DATABASE_URL."""

import asyncio
import sys

import asyncpg
import nats
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from offers import deliver, told_to_stop

from decideonce import events

# One message at a time over all processes: after one that failed, none overtakes it.
IN_ORDER = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=1)


async def consume(subscription: JetStreamContext.PullSubscription, pool: asyncpg.Pool, stopping: asyncio.Event) -> None:
    """Apply one message after the other, and acknowledge it once its transaction is committed."""
    while not stopping.is_set():
        try:
            (message,) = await subscription.fetch(1, timeout=1)
        except nats.errors.TimeoutError:
            continue
        name = f"{message.metadata.stream}/{message.metadata.sequence.stream}"
        await deliver(pool, name, message, message.data, events.from_nats)
        await message.ack_sync()


async def main(server: str, subject: str, database_url: str) -> None:
    """Consume as the durable consumer `offers` until told to stop."""
    connection = await nats.connect(server)
    try:
        async with asyncpg.create_pool(database_url, min_size=1, max_size=2) as pool:
            subscription = await connection.jetstream().pull_subscribe(subject, durable="offers", config=IN_ORDER)
            await consume(subscription, pool, told_to_stop())
    finally:
        await connection.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
