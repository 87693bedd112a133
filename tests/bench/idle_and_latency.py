"""Measures what publishing costs while nothing happens, and how soon an event is out: `make bench`.

Idle: the CPU time of a real `decideonce housekeep` and all that it started, beside that of one that doesn't publish.
Latency: one call a second, to a consumer of a real NATS; from Postgres's `complete_time`, when the committing statement
begins, and from the caller's answer, when it has ended: what the disk takes is between them. One machine, one clock.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import asyncpg
import grpc
import nats
import psutil
from nats.aio.msg import Msg
from sqlalchemy.engine import URL

from bench.purge import percentile
from brokers import Nats
from conftest import connect
from decideonce import events
from decideonce_server.embedded import EmbeddedPostgres
from decideonce_server.migrate import migrate
from harness import Caller, ServiceProcess, make_token, new_key, table_policy, url_text, write_catalog
from processes import until
from publishing import TOPIC, PublisherProcess

OPERATION = "bench.decide"
IDLE_S = 30.0
CALLS = 120
CALLS_PER_S = 1.0
# Caches fill, and leases are taken.
SETTLE_S = 5.0

IDLE_GOAL_PERCENT = 1.0
LATENCY_GOAL_MS = 250.0


def cpu_s(process: subprocess.Popen) -> float:
    """Give the CPU time that a process and those that it started have used so far, in seconds.

    Each thread's is read in ns: what the kernel tells of a process is in ticks of 10 ms, half a percent of 2 s.
    """
    root = psutil.Process(process.pid)
    threads = [
        thread for one in (root, *root.children(recursive=True)) for thread in Path(f"/proc/{one.pid}/task").iterdir()
    ]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def idle_percent(url: URL, log: Path, events_url: str, measured_s: float, settle_s: float) -> float:
    """Give how much of a core housekeeping takes while nothing happens, in percent."""
    publisher = PublisherProcess(url, log, "--events", events_url)
    try:
        await asyncio.sleep(settle_s)
        used, began = cpu_s(publisher.process), time.monotonic()
        await asyncio.sleep(measured_s)
        percent = 100 * (cpu_s(publisher.process) - used) / (time.monotonic() - began)
        # It gives its buckets back, so that the next one need not wait for its leases.
        assert 0 == await publisher.stop()
        return percent
    finally:
        publisher.kill()


@dataclass(frozen=True)
class Idle:
    """What housekeeping takes of a core, in percent, with and without publishing."""

    publishing: float
    silent: float


async def measure_idle(
    url: URL, broker: Nats, directory: Path, measured_s: float = IDLE_S, settle_s: float = SETTLE_S
) -> Idle:
    """Measure both kinds of idle housekeeping, one after the other."""
    log = directory / "housekeeping.log"
    silent = await idle_percent(url, log, "none", measured_s, settle_s)
    return Idle(await idle_percent(url, log, broker.url, measured_s, settle_s), silent)


@asynccontextmanager
async def arrivals(broker: Nats) -> AsyncIterator[dict[str, float]]:
    """Give when each key's event came to a consumer, by the wall clock; it is filled while the block runs."""
    came: dict[str, float] = {}

    async def take(message: Msg) -> None:
        came.setdefault(events.from_nats(message).operation_key, time.time())

    async with await nats.connect(broker.url) as client:
        await client.jetstream().subscribe(TOPIC, cb=take, ordered_consumer=True)
        yield came


@dataclass(frozen=True)
class Latencies:
    """How long events took to the consumer, in milliseconds, ascending."""

    since_complete: Sequence[float]
    since_answer: Sequence[float]


async def measure_latency(
    observer: asyncpg.Connection, caller: Caller, broker: Nats, calls: int = CALLS, rate: float = CALLS_PER_S
) -> Latencies:
    """Decide at a rate, and give how long each event took to the consumer."""
    answered: dict[str, float] = {}
    async with arrivals(broker) as came:
        for _ in range(calls):
            # At any moment of the publisher's interval.
            await asyncio.sleep(random.uniform(0.5, 1.5) / rate)
            key = new_key()
            await caller.decide(OPERATION, key, {"n": 0})
            answered[key] = time.time()
        await until(lambda: came.keys() >= answered.keys())
    rows = await observer.fetch(
        "SELECT operation_key AS key, complete_time FROM ledger WHERE operation_key = ANY($1)", list(answered)
    )
    return Latencies(
        sorted((came[row["key"]] - row["complete_time"].timestamp()) * 1e3 for row in rows),
        sorted((came[key] - at) * 1e3 for key, at in answered.items()),
    )


def report(idle: Idle, latencies: Latencies, out: TextIO) -> None:
    """Print what was measured."""
    print(
        f"idle housekeeping: {idle.publishing:.2f}% of a core, {idle.silent:.2f}% without publishing "
        f"(goal: under {IDLE_GOAL_PERCENT:.0f}%)",
        file=out,
    )
    for since, taken in (("complete_time", latencies.since_complete), ("answer", latencies.since_answer)):
        print(
            f"{since} to consumer, {len(taken)} events: p50 {percentile(taken, 0.5):.0f} ms, "
            f"p99 {percentile(taken, 0.99):.0f} ms, most {taken[-1]:.0f} ms (goal: p99 under {LATENCY_GOAL_MS:.0f} ms)",
            file=out,
        )


async def measure(idle_s: float, calls: int, out: TextIO) -> None:
    """Make a database and a broker, and measure."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decideonce-bench-")))
        # The server runs as a user of its own where this runs as root.
        directory.chmod(0o755)
        postgres = EmbeddedPostgres(directory / "data")
        stack.callback(postgres.stop)
        broker = Nats()
        stack.callback(broker.close)
        broker.make_topic(TOPIC)
        url = await postgres.create_database()
        await migrate(url)
        idle = await measure_idle(url, broker, directory, idle_s)
        catalog = write_catalog(directory / "catalog", {OPERATION: {"policy": "table"}}, {"table": table_policy("LOW")})
        service = ServiceProcess(
            directory / "service.log",
            ["--database-url", url_text(url), "--catalog", str(catalog), "--events", broker.url],
        )
        stack.callback(service.kill)
        service.wait_until_ready()
        observer = await connect(url)
        async with grpc.aio.insecure_channel(service.address) as channel:
            caller = Caller(channel, await make_token(url, "acme"))
            await caller.decide(OPERATION, new_key(), {"n": 0})
            await asyncio.sleep(SETTLE_S)
            latencies = await measure_latency(observer, caller, broker, calls)
        await observer.close()
        report(idle, latencies, out)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds that idle housekeeping is measured")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls, one a second")
    given = parser.parse_args()
    asyncio.run(measure(given.idle, given.calls, sys.stdout))


if __name__ == "__main__":
    main()
