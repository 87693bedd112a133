"""Measures the service on ten million finished decisions, and for half an hour at half of its peak rate.

Size: two services on one Postgres, one with 10,000 finished decisions and one with many more, measured in turn. The
decisions are planted by SQL: copies of one that the service made, under keys of their own, so that they are replayed as
real ones are; a replay may find any of them. Time: an open loop at half of the peak rate, with events published to a
file; latency, memory and the tables' sizes are read every minute.
"""

import argparse
import asyncio
import io
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import asyncpg

from bench import tables
from bench.backlog import Resident
from bench.loader import call, keys_of
from bench.subject import Subject, measured_on, subject
from bench.throughput import CALLERS_OPEN, machine, write
from conftest import connect
from decideonce_server.migrate import migrate
from decideonce_server.tables import ledger

OUTPUT = Path(".bench/growth.json")
ROWS = 10_000_000
ROWS_FEW = 10_000
MINUTES = 30
ROUNDS = 5
SECONDS = 10
CALLERS = 64
PLANTED_AT_ONCE = 500_000
WITHIN_S = 3600.0

Content = dict[str, Any]

# What a copy has of its own; the response tells its key.
BUCKET = "get_byte(sha256(convert_to(k.operation_key, 'UTF8')), 0)"
OWN = {
    "bucket": BUCKET,
    "operation_key": "k.operation_key",
    "decision_id": "gen_random_uuid()",
    # As if made one after the other: an index doesn't fold what differs.
    "replayable_until": "l.replayable_until + random() * interval '1 hour'",
    "key_retained_until": "l.key_retained_until + interval '1 hour'",
    "response": """overlay(l.response PLACING convert_to(k.operation_key, 'UTF8')
        FROM position(convert_to(l.operation_key, 'UTF8') IN l.response))""",
}
COLUMNS = [column.name for column in ledger.columns]
PLANT = f"""INSERT INTO ledger ({", ".join(COLUMNS)})
    SELECT {", ".join(OWN.get(name, f"l.{name}") for name in COLUMNS)}
    FROM planted k CROSS JOIN (SELECT * FROM ledger LIMIT 1) l
    ORDER BY {BUCKET}, k.operation_key"""


async def plant(measured: Subject, rows: int, out: TextIO) -> None:
    """Plant finished decisions under the first keys of a subject that has made a single one."""
    observer = measured.observer
    async with bulk_writes(observer):
        for first in range(0, rows, PLANTED_AT_ONCE):
            count = min(PLANTED_AT_ONCE, rows - first)
            await plant_keys(observer, await keys_of(measured.keys, count))
            print(f"planted {first + count:,} of {rows:,}", flush=True, file=out)
    await observer.execute("VACUUM ANALYZE ledger", timeout=WITHIN_S)
    await observer.execute("CHECKPOINT", timeout=WITHIN_S)


async def plant_keys(observer: asyncpg.Connection, keys: bytes) -> None:
    """Plant a finished decision under each key, a line each: copies of one that is there."""
    await observer.execute("CREATE UNLOGGED TABLE planted (operation_key text)")
    await observer.copy_to_table("planted", source=io.BytesIO(keys), timeout=WITHIN_S)
    await observer.execute(PLANT, timeout=WITHIN_S)
    await observer.execute("DROP TABLE planted")


@asynccontextmanager
async def bulk_writes(observer: asyncpg.Connection) -> AsyncIterator[None]:
    """Have Postgres write what could be planted again with less care than what it serves."""
    settings = {"full_page_writes": "off", "max_wal_size": "'8GB'", "synchronous_commit": "off"}
    for name, value in settings.items():
        await observer.execute(f"ALTER SYSTEM SET {name} = {value}")
    await observer.execute("SELECT pg_reload_conf()")
    try:
        yield
    finally:
        for name in settings:
            await observer.execute(f"ALTER SYSTEM RESET {name}")
        await observer.execute("SELECT pg_reload_conf()")


async def at_size(workers: int, rows: int, rounds: int, seconds: int, out: TextIO) -> Content:
    """Measure a small and a large ledger in turn."""
    async with AsyncExitStack() as stack:
        few = await stack.enter_async_context(subject(workers))
        many = await stack.enter_async_context(_beside(few, workers))
        began = time.monotonic()
        await plant(few, ROWS_FEW, out)
        await plant(many, rows, out)
        content: Content = {"rows": rows, "planting_s": time.monotonic() - began, "runs": {}}
        content["bytes_per_decision"] = await bytes_per_decision(many)
        for number in range(-1, rounds):
            for name, one, planted in (("few", few, ROWS_FEW), ("many", many, rows)):
                for kind, replayed in (("first", 0), ("replay", planted)):
                    await one.settle()
                    run = await call(one.target, one.keys, callers=CALLERS, seconds=seconds, replayed=replayed)
                    # The first round is a warm-up.
                    if number >= 0:
                        content["runs"].setdefault(f"{kind} {name}", []).append(run)
                        print(f"{kind} on {planted:,}: {tables.run_text(run)}", flush=True, file=out)
    return content


@asynccontextmanager
async def _beside(other: Subject, workers: int) -> AsyncIterator[Subject]:
    """Run another service, on a database of its own of the same Postgres."""
    async with AsyncExitStack() as stack:
        await other.observer.execute("CREATE DATABASE many")
        url = other.postgres.url("many")
        await migrate(url)
        observer = await connect(url)
        stack.push_async_callback(observer.close)
        directory = other.directory / "many"
        directory.mkdir()
        yield await measured_on(stack, other.postgres, url, observer, directory, workers)


async def bytes_per_decision(measured: Subject) -> float:
    """Give what a row of the ledger takes, indexes too."""
    row = await measured.observer.fetchrow(
        "SELECT pg_total_relation_size('ledger') AS bytes, (SELECT count(*) FROM ledger) AS rows", timeout=WITHIN_S
    )
    return row["bytes"] / row["rows"]


async def over_time(workers: int, minutes: int, minute_s: float, out: TextIO) -> Content:
    """Measure at half of the peak rate for so many minutes of so many seconds."""
    with TemporaryDirectory(prefix="decideonce-events-") as directory:
        events = Path(directory) / "events.jsonl"
        async with subject(workers, "--events", f"log:{events}") as measured:
            peaks = [
                (await call(measured.target, measured.keys, callers=CALLERS, seconds=minute_s / 12))["per_second"]
                for _ in range(3)
            ]
            rate = statistics.median(peaks) / 2
            content: Content = {"rate": rate, "minutes": []}
            for number in range(minutes):
                run = await call(measured.target, measured.keys, callers=CALLERS_OPEN, seconds=minute_s, rate=rate)
                minute = run | await _state(measured)
                content["minutes"].append(minute)
                print(f"minute {number + 1}: {minute_text(minute)}", flush=True, file=out)
                # It is opened anew for each set of events.
                events.unlink(missing_ok=True)
    return content


async def _state(measured: Subject) -> Content:
    resident = Resident()
    resident.look(measured.root)
    sizes = await measured.observer.fetchrow(
        """SELECT pg_total_relation_size('outbox') AS outbox_bytes, (SELECT count(*) FROM outbox) AS outbox_rows,
            pg_total_relation_size('ledger') AS ledger_bytes, (SELECT count(*) FROM ledger) AS ledger_rows"""
    )
    return {"memory_mb": resident.proportional} | dict(sizes)


def minute_text(minute: Content) -> str:
    """Write a minute as a line."""
    return (
        f"{tables.run_text(minute)}; {minute['memory_mb']:.0f} MB, "
        f"{minute['ledger_bytes'] / minute['ledger_rows']:.0f} bytes a decision, "
        f"outbox {minute['outbox_bytes'] / 2**20:.0f} MB with {minute['outbox_rows']:,} events"
    )


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, default=ROWS, help="finished decisions to plant; 0 leaves this part out")
    parser.add_argument("--minutes", type=int, default=MINUTES, help="how long at half load; 0 leaves this part out")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="how long each measurement takes in each round")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    content: Content = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    if given.rows:
        content["size"] = asyncio.run(at_size(given.workers, given.rows, given.rounds, given.seconds, sys.stderr))
    if given.minutes:
        content["time"] = asyncio.run(over_time(given.workers, given.minutes, 60.0, sys.stderr))
    write(given.output, content)
    print(tables.growth(content))


if __name__ == "__main__":
    main()
