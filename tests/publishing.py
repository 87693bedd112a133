"""Events in an outbox, real publishers of them, and what these tell. As a program: a publisher with any lease."""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import uvloop
from sqlalchemy.engine import URL
from uuid_utils.compat import uuid7

from brokers import Forwarder, Nats, Received
from decideonce import events
from decideonce_server import logs
from decideonce_server.database import Database, database_url
from decideonce_server.events_url import open_sink
from decideonce_server.ledger import bucket_of
from decideonce_server.publisher import Publisher
from harness import READY_WITHIN_S, new_key, url_text
from processes import free_address, until
from sample_events import TRACEPARENT, body
from scraping import scrape

TENANT = "acme"
OPERATION = "credit.approve-loan"
TOPIC = "decideonce.events"
# More than a broker of the tests takes in one message.
TOO_LARGE = 2 * 1024 * 1024

PLANT = """INSERT INTO outbox (bucket, id, tenant, operation, operation_key, aggregatetype, aggregateid, type, payload,
    topic, traceparent) VALUES ($1, $2, $3, $4, $5, $4, $6, $7, $8, $9, $10)"""
HELD = "SELECT holder, count(*) FROM bucket_lease WHERE lease_expires_at > statement_timestamp() GROUP BY holder"

Row = tuple[Any, ...]


def event_rows(topic: str, key: str | None = None, count: int = 1, size: int = 0) -> list[Row]:
    """Make rows of one key's events, in their order; `size` bytes are added to each payload."""
    key = key or new_key()
    rows: list[Row] = []
    for number in range(count):
        made = body(key=key, effect={"n": number, "padding": "x" * size})
        # Those of one process ascend.
        made.event_id = str(uuid7())
        rows.append(
            (
                bucket_of(key),
                uuid.UUID(made.event_id),
                TENANT,
                OPERATION,
                key,
                f"{TENANT}/{key}",
                made.type,
                made.SerializeToString(deterministic=True),
                topic,
                TRACEPARENT,
            )
        )
    return rows


async def plant(connection: asyncpg.Connection, rows: Sequence[Row]) -> list[str]:
    """Write events into the outbox, and give their ids."""
    await connection.executemany(PLANT, rows)
    return [str(row[1]) for row in rows]


async def count(connection: asyncpg.Connection, table: str = "outbox") -> int:
    """Count the rows of a table."""
    return await connection.fetchval(f"SELECT count(*) FROM {table}")


async def is_empty(connection: asyncpg.Connection) -> bool:
    """Tell whether no event waits."""
    return not await count(connection)


async def parked(connection: asyncpg.Connection) -> list[tuple[str, str]]:
    """Give the ids of the parked events, with why."""
    return [
        (str(row["id"]), row["reason"]) for row in await connection.fetch("SELECT * FROM outbox_parked ORDER BY id")
    ]


async def shares(connection: asyncpg.Connection) -> list[int]:
    """Give how many buckets each publisher holds."""
    return sorted(row["count"] for row in await connection.fetch(HELD))


def decoded(broker: Any, received: Received) -> events.Event:
    """Decode a message as a consumer does."""
    prefix = events.NATS_PREFIX if isinstance(broker, Nats) else events.KAFKA_PREFIX
    return events.from_headers(received.headers.items(), received.payload, prefix)


def read_ids(broker: Any, topic: str, at_least: int = 0) -> list[str]:
    """Give the ids of a topic's events, each partition's in order."""
    messages = sorted(broker.read(topic, at_least), key=lambda one: (one.partition, one.position))
    return [str(decoded(broker, one).id) for one in messages]


def outbox_command(url: URL, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess:
    """Run one of an operator's commands for events, such as "list"."""
    return subprocess.run(
        [sys.executable, "-m", "decideonce_server", "outbox", *arguments, "--database-url", url_text(url)],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


class PublisherProcess:
    """A publisher that is a process of its own: `decideonce housekeep`, or with `lease` this module's program."""

    def __init__(self, url: URL, log: Path, *arguments: str, lease: float | None = None) -> None:
        self.log = log
        self.metrics_address = free_address()
        program = (
            ["-m", "decideonce_server", "housekeep", "--metrics", self.metrics_address]
            if lease is None
            else [__file__, "--lease", str(lease)]
        )
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *program, "--database-url", url_text(url), *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        assert "ready" in self.process.stdout.readline(), log.read_text()

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def ended(self, within_s: float = READY_WITHIN_S) -> int:
        """Wait for its end, and give its exit code."""
        return await asyncio.to_thread(self.process.wait, within_s)

    async def stop(self) -> int:
        """Ask it to stop, and give its exit code."""
        self.send_signal(signal.SIGTERM)
        return await self.ended()

    def kill(self) -> None:
        """Kill it, and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(READY_WITHIN_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    async def metrics(self) -> dict[str, float]:
        """Give what it tells Prometheus of events, by name; those with a label are added up."""
        told: dict[str, float] = {}
        for sample in await scrape(self.metrics_address):
            if sample.name.startswith("outbox_"):
                told[sample.name] = told.get(sample.name, 0) + sample.value
        return told

    async def until_metric(self, name: str, holds: Callable[[float], bool], within: float = 60.0) -> float:
        """Wait until something holds of a metric's value, and give that; longer than several tries of a sink take."""
        value = 0.0

        async def is_so() -> bool:
            nonlocal value
            value = (await self.metrics()).get(name, 0)
            return holds(value)

        await until(is_so, within)
        return value


class Gate(Forwarder):
    """A forwarder to a broker that can hold what publishers send, or cut off what the broker answers to that."""

    # In NATS' protocol: what a publisher sends with headers, and what comes to its inbox.
    SENT, ANSWERED = b"HPUB ", b"MSG _INBOX."

    def __init__(self, target: str) -> None:
        self.address = free_address()
        self.has_held = threading.Event()
        self.has_cut = threading.Event()
        self._holds = False
        self._cuts = False
        self._released = asyncio.Event()
        super().__init__(self.address, target)

    def hold(self) -> None:
        """Hold what is sent from now on."""
        self._holds = True

    def release(self) -> None:
        """Let everything pass."""
        self._holds = False
        self._loop.call_soon_threadsafe(self._released.set)

    def cut_next_answer(self) -> None:
        """Cut every connection rather than pass the broker's next answer on."""
        self._cuts = True

    async def until_held(self) -> None:
        """Wait until something is held."""
        assert await asyncio.to_thread(self.has_held.wait, READY_WITHIN_S)

    async def until_cut(self) -> None:
        """Wait until an answer was cut off."""
        assert await asyncio.to_thread(self.has_cut.wait, READY_WITHIN_S)

    async def _on_sent(self, data: bytes) -> None:
        if self._holds and self.SENT in data:
            self.has_held.set()
            await self._released.wait()

    async def _on_answered(self, data: bytes) -> None:
        if self._cuts and self.ANSWERED in data:
            self._cuts = False
            for writer in self._writers:
                writer.transport.abort()
            self.has_cut.set()


@contextlib.contextmanager
def gate(broker: Nats) -> Iterator[Gate]:
    """Give a gate before a broker."""
    made = Gate(broker.address)
    try:
        yield made
    finally:
        made.release()
        made.close()


async def publish(url: str, events_url: str, lease_s: float) -> None:
    """Publish until SIGTERM."""
    database = Database(database_url(url), pool_size=2)
    sink = open_sink(events_url, within_s=60.0)
    publisher = Publisher(database, sink, lease=timedelta(seconds=lease_s))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, publisher.stop)
    print("ready", flush=True)  # noqa: T201  # the test reads this
    try:
        await publisher.run()
    finally:
        await database.close()


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--events", required=True)
    parser.add_argument("--lease", type=float, required=True, help="seconds")
    given = parser.parse_args()
    logs.configure("info")
    uvloop.run(publish(given.database_url, given.events, given.lease))


if __name__ == "__main__":
    main()
