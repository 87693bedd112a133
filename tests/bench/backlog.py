"""Measures how fast a backlog of events is published, and in how much memory: `make bench`.

Events are planted in the outbox and published by a real `decideonce housekeep` to a real broker. What is resident is
what its whole tree has, evaluators too.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import asyncpg
import psutil
from sqlalchemy.engine import URL

from bench.purge import housekeeping
from brokers import Broker, Nats, Received, Tansu
from conftest import connect
from decideonce_server.embedded import EmbeddedPostgres
from decideonce_server.ledger import bucket_of
from decideonce_server.migrate import migrate
from harness import new_key
from processes import until
from sample_events import TRACEPARENT, body

TOPIC = "bench.decisions"
EVENTS = 200_000
EVENTS_PER_KEY = 2
# With it a payload has about 700 bytes.
REMARK = "r" * 400
PER_S_MIN = 5_000
RESIDENT_MAX_MB = 200
PLANTED_AT_ONCE = 10_000
LOOK_EACH_S = 0.1
WITHIN_S = 300.0
BROKERS: dict[str, type[Broker]] = {"nats": Nats, "kafka": Tansu}

COLUMNS = [
    "bucket",
    "id",
    "tenant",
    "operation",
    "operation_key",
    "aggregatetype",
    "aggregateid",
    "type",
    "payload",
    "topic",
    "traceparent",
]


def rows(count: int) -> Iterator[tuple[object, ...]]:
    """Make rows of the outbox, each an event of a usual size; of each key a decision and effects."""
    for number in range(count):
        if number % EVENTS_PER_KEY == 0:
            key = new_key()
        made = body(key=key, effect={"remark": REMARK} if number % EVENTS_PER_KEY else None)
        if made.HasField("recorded"):
            made.recorded.decision.reasons.append(REMARK)
        tenant, operation = made.provenance.tenant, made.provenance.operation
        yield (
            bucket_of(key),
            made.event_id,
            tenant,
            operation,
            key,
            operation,
            f"{tenant}/{key}",
            made.type,
            made.SerializeToString(deterministic=True),
            TOPIC,
            TRACEPARENT,
        )


async def plant(connection: asyncpg.Connection, count: int) -> None:
    """Write a backlog."""
    for first in range(0, count, PLANTED_AT_ONCE):
        planted = list(rows(min(PLANTED_AT_ONCE, count - first)))
        await connection.copy_records_to_table("outbox", records=planted, columns=COLUMNS)
    await connection.execute("VACUUM ANALYZE outbox", timeout=WITHIN_S)


def arrived_in_order(received: Iterable[Received]) -> int:
    """Count the events that arrived after all earlier ones of their key; one that came again counts once."""
    latest: dict[str, str] = {}
    in_order = 0
    for one in sorted(received, key=lambda one: (one.partition, one.position)):
        attributes = {name[len("ce_") :]: value for name, value in one.headers.items()}
        # UUIDv7 ascend.
        if attributes["id"] > latest.get(attributes["partitionkey"], ""):
            latest[attributes["partitionkey"]] = attributes["id"]
            in_order += 1
    return in_order


@dataclass
class Resident:
    """How much memory a process and all under it have at most, in MB: `proportional` counts what they share once.

    `summed` counts it in each of them: an evaluator is a fork, and most of it is its parent's.
    """

    proportional: float = 0.0
    summed: float = 0.0

    def look(self, root: psutil.Process) -> None:
        """Take in what it is now."""
        sizes = []
        for process in (root, *root.children(recursive=True)):
            try:
                sizes.append(process.memory_full_info())
            except psutil.NoSuchProcess:
                continue
        self.proportional = max(self.proportional, sum(size.pss for size in sizes) / 1e6)
        self.summed = max(self.summed, sum(size.rss for size in sizes) / 1e6)


@asynccontextmanager
async def watched(pid: int) -> AsyncIterator[Resident]:
    """Look at a process's memory again and again during the block."""
    resident, root = Resident(), psutil.Process(pid)

    async def look() -> None:
        while True:
            resident.look(root)
            await asyncio.sleep(LOOK_EACH_S)

    looking = asyncio.create_task(look())
    try:
        yield resident
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


@dataclass(frozen=True)
class Drained:
    """A backlog that was published: how fast, how much of it was the publisher's own time, and in what memory."""

    events: int
    seconds: float
    cpu_seconds: float
    resident: Resident

    @property
    def per_s(self) -> float:
        """Events per second."""
        return self.events / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.events} events in {self.seconds:.1f} s: {self.per_s:.0f}/s (goal: {PER_S_MIN}), "
            f"{self.cpu_seconds:.1f} s of the publisher's CPU; "
            f"{self.resident.proportional:.0f} MB resident (at most: {RESIDENT_MAX_MB}), or "
            f"{self.resident.summed:.0f} MB where what processes share counts in each"
        )


async def drain(url: URL, observer: asyncpg.Connection, broker: Broker, log: Path, count: int) -> Drained:
    """Plant a backlog, and have it published."""
    broker.make_topic(TOPIC)
    await plant(observer, count)

    async def is_empty() -> bool:
        return not await observer.fetchval("SELECT EXISTS (SELECT FROM outbox)")

    with housekeeping(url, log, "--events", broker.url) as process:
        began = time.monotonic()
        async with watched(process.pid) as resident:
            await until(is_empty, WITHIN_S)
            seconds = time.monotonic() - began
            used = psutil.Process(process.pid).cpu_times()
    assert 0 == await observer.fetchval("SELECT count(*) FROM outbox_parked"), log.read_text()
    assert arrived_in_order(broker.read(TOPIC, count)) == count, "events are lost, or not in order"
    return Drained(count, seconds, used.user + used.system, resident)


async def measure(kind: str, count: int, out: TextIO) -> bool:
    """Measure with a kind of broker, and tell whether the goals are met."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decideonce-bench-")))
        # The server runs as a user of its own where this runs as root.
        directory.chmod(0o755)
        postgres = EmbeddedPostgres(directory / "data")
        stack.callback(postgres.stop)
        url = await postgres.create_database()
        await migrate(url)
        observer = await connect(url)
        stack.push_async_callback(observer.close)
        broker = BROKERS[kind]()
        stack.callback(broker.close)
        drained = await drain(url, observer, broker, directory / "housekeeping.log", count)
        print(f"{kind}: {drained}", flush=True, file=out)
        return drained.per_s >= PER_S_MIN and drained.resident.proportional <= RESIDENT_MAX_MB


def main() -> None:
    """Run as a program; exit with 1 where a goal isn't met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--broker", action="append", choices=BROKERS, help="both, where none is given")
    given = parser.parse_args()
    are_met = [asyncio.run(measure(kind, given.events, sys.stdout)) for kind in given.broker or BROKERS]
    raise SystemExit(not all(are_met))


if __name__ == "__main__":
    main()
