"""What this consumer does with an event, whatever brought it: it keeps the decisions and the offers that they ask for.

Run by itself it makes the tables and purges old marks; do so before the first event, and then once a day.
"""

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

import asyncpg
from google.protobuf.json_format import MessageToDict

from decideonce.events import Event, MalformedEvent
from decideonce.inbox import SCHEMA, EventTooOld, Inbox

Message = TypeVar("Message")

INBOX = Inbox("offers")
PURGE_LIMIT = 1000

TABLES = f"""
{SCHEMA}
CREATE TABLE IF NOT EXISTS decided (
    decision_id uuid PRIMARY KEY,
    operation_key text NOT NULL,
    status integer NOT NULL,
    outcome text NOT NULL
);
CREATE TABLE IF NOT EXISTS offer (
    decision_id uuid NOT NULL,
    amount_minor bigint NOT NULL,
    currency text NOT NULL
);
CREATE TABLE IF NOT EXISTS set_aside (
    message text PRIMARY KEY,
    reason text NOT NULL,
    payload bytea
);
"""


async def deliver(
    pool: asyncpg.Pool, name: str, message: Message, payload: bytes | None, decode: Callable[[Message], Event]
) -> None:
    """Apply a message's event once. When this returns the message is dealt with; when it raises, it must come again."""
    async with pool.acquire() as connection, connection.transaction():
        try:
            event = decode(message)
            if await INBOX.first_time(connection, event):
                await apply(connection, event)
        except (MalformedEvent, EventTooOld) as refused:
            # For a person to look at: coming again would not change it.
            await connection.execute(
                "INSERT INTO set_aside (message, reason, payload) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
                name,
                str(refused),
                payload,
            )


async def apply(connection: asyncpg.pool.PoolConnectionProxy, event: Event) -> None:
    """Do what an event asks for, in the transaction that has its mark. Errors of statements aren't caught here."""
    if event.recorded is not None:
        await connection.execute(
            "INSERT INTO decided (decision_id, operation_key, status, outcome) VALUES ($1, $2, $3, $4)",
            event.decision_id,
            event.operation_key,
            event.recorded.status,
            event.recorded.decision.outcome,
        )
    elif event.effect is not None and event.type == "loan.offer-requested":
        offer = MessageToDict(event.effect.payload)
        await connection.execute(
            "INSERT INTO offer (decision_id, amount_minor, currency) VALUES ($1, $2, $3)",
            event.decision_id,
            # A number of a Struct is a double.
            int(offer["amount_minor"]),
            offer["currency"],
        )


def told_to_stop() -> asyncio.Event:
    """Give what is set by SIGTERM and SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def main(database_url: str) -> None:
    """Make the tables, and purge the marks that no event needs any more."""
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(TABLES)
        while await INBOX.purge(connection, PURGE_LIMIT) == PURGE_LIMIT:
            pass
    finally:
        await connection.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
