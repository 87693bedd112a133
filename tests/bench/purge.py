"""Measures what retention costs the calls that go on meanwhile: `make bench`.

A million answers past their retention become tombstones and are deleted by a real `decideonce housekeep`, while a
client of its own process decides new keys at a fixed rate, whatever the answers take (an open loop: a call's time
counts from when it was due). Housekeeping is stopped and continued in turn, so that both kinds of calls are measured in
the same minutes of the same database.
"""

import argparse
import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import asyncpg
import grpc
from sqlalchemy.engine import URL

from conftest import connect
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.embedded import EmbeddedPostgres
from decideonce_server.migrate import migrate
from harness import Caller, ServiceProcess, make_token, new_key, table_policy, url_text, write_catalog

OPERATION = "bench.decide"
ROWS = 1_000_000
CALLS_PER_S = 200
# Shorter than the service's limit for an answer of Postgres, which counts on while housekeeping is stopped.
TURN_S = 6.0
# A turn that the rows' end cut short says little about the slowest hundredth.
CALLS_PER_TURN_MIN = 1_000

# Bodies of a usual size, all past their retention, in the order in which time writes rows.
PLANT = """
    INSERT INTO ledger (bucket, tenant, operation, operation_key, decision_id, state, attempt, background,
        fingerprint_version, fingerprint, operation_version, policy_id, policy_version, reserve_time, complete_time,
        replayable_until, key_retained_until, facts, response)
    SELECT get_byte(sha256(convert_to(k.operation_key, 'UTF8')), 0), 'acme', $2, k.operation_key, gen_random_uuid(), 2,
        1, false, 1, sha256(convert_to(k.operation_key, 'UTF8')), 1, 'table', 1, k.ended, k.ended, k.ended,
        k.ended + $3, convert_to(repeat('f', 200), 'UTF8'), convert_to(repeat('r', 500), 'UTF8')
    FROM (
        SELECT 'expired-' || gen_random_uuid() AS operation_key, now() - ($1 - n + 1) * (interval '1 day' / $1) AS ended
        FROM generate_series(1, $1) AS n
    ) k
"""


async def plant(connection: asyncpg.Connection, rows: int, retained: timedelta) -> None:
    """Write answers that are past their retention, with tombstones that are retained for an interval after it."""
    await connection.execute(PLANT, rows, OPERATION, retained, timeout=600)


@contextmanager
def housekeeping(url: URL, log: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Run a real `decideonce housekeep` with a process group of its own."""
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "decideonce_server", "housekeep", "--database-url", url_text(url), *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        assert "housekeeping ready" in process.stdout.readline(), log.read_text()
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


async def call_steadily(address: str, token: str, rate: float) -> None:
    """Decide new keys at a rate until stdin ends; print when each was due, and how long it took, in seconds.

    An answer that isn't the decision yet took forever: a percentile that reaches it can't hide it.
    """
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    calls: list[asyncio.Task[tuple[float, float]]] = []
    async with grpc.aio.insecure_channel(address) as channel:
        caller = Caller(channel, token)

        async def call(due: float) -> tuple[float, float]:
            answer = await caller.decide(OPERATION, new_key(), {"n": 0})
            return due, time.monotonic() - due if wire.DECISION_STATUS_SUCCEEDED == answer.status else math.inf

        due = time.monotonic()
        while not ended.is_set():
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            calls.append(asyncio.ensure_future(call(due)))
        json.dump(await asyncio.gather(*calls), sys.stdout)


@contextmanager
def client(service: ServiceProcess, token: str) -> Iterator[subprocess.Popen]:
    """Have a process of its own call the service."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--call", service.address, "--token", token],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Turn:
    """A stretch of time with or without housekeeping, by the monotonic clock that all processes share."""

    purging: bool
    began: float
    ended: float

    def times(self, calls: Sequence[tuple[float, float]]) -> list[float]:
        """Give how long those calls took that were due in it, in ascending order."""
        return sorted(took for due, took in calls if self.began <= due < self.ended)


def percentile(ascending: Sequence[float], share: float) -> float:
    """Give the smallest value that this share of all values doesn't exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


async def take_turns(housekeeper: subprocess.Popen, observer: asyncpg.Connection, turn_s: float) -> list[Turn]:
    """Stop and continue housekeeping in turn, until nothing is left to purge; it works three turns of four."""
    turns = []
    while await observer.fetchval("SELECT EXISTS (SELECT FROM ledger WHERE key_retained_until < now())"):
        for purging in (False, True, True, True):
            housekeeper.send_signal(signal.SIGCONT if purging else signal.SIGSTOP)
            began = time.monotonic()
            await asyncio.sleep(turn_s)
            turns.append(Turn(purging, began, time.monotonic()))
    return turns


def report(rows: int, turns: Sequence[Turn], calls: Sequence[tuple[float, float]], out: TextIO) -> float:
    """Print what was measured, and give the ratio of the two medians of p99."""
    medians = {}
    print(f"{'':8}{'calls':>8}{'p50 ms':>8}{'p99 ms':>8}", file=out)
    for purging in (False, True):
        measured = []
        for turn in turns:
            times = turn.times(calls)
            if turn.purging is purging and len(times) >= CALLS_PER_TURN_MIN:
                measured.append((percentile(times, 0.5) * 1e3, percentile(times, 0.99) * 1e3))
                print(
                    f"{'purge' if purging else 'rest':8}{len(times):8}{measured[-1][0]:8.1f}{measured[-1][1]:8.1f}",
                    file=out,
                )
        medians[purging] = [statistics.median(column) for column in zip(*measured, strict=True)]
    purging_s = sum(turn.ended - turn.began for turn in turns if turn.purging)
    ratio = medians[True][1] / medians[False][1]
    print(f"medians without purge: p50 {medians[False][0]:.1f} ms, p99 {medians[False][1]:.1f} ms", file=out)
    print(f"medians with purge:    p50 {medians[True][0]:.1f} ms, p99 {medians[True][1]:.1f} ms", file=out)
    print(f"p99 with purge is {ratio:.2f} times p99 without (goal: 2)", file=out)
    print(f"{rows} answers tombstoned and deleted in {purging_s:.0f} s: {rows / purging_s:.0f}/s", file=out)
    return ratio


async def measure(rows: int, rate: float, turn_s: float, out: TextIO) -> None:
    """Make a database, plant, and measure."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decideonce-bench-")))
        # The server runs as a user of its own where this runs as root.
        directory.chmod(0o755)
        postgres = EmbeddedPostgres(directory / "data")
        stack.callback(postgres.stop)
        url = await postgres.create_database()
        await migrate(url)
        observer = await connect(url)
        print(f"planting {rows} answers past their retention", flush=True, file=out)
        await plant(observer, rows, timedelta(0))
        await observer.execute("VACUUM ANALYZE ledger", timeout=600)
        await observer.execute("CHECKPOINT", timeout=600)
        catalog = write_catalog(directory / "catalog", {OPERATION: {"policy": "table"}}, {"table": table_policy("LOW")})
        service = ServiceProcess(
            directory / "service.log",
            ["--database-url", url_text(url), "--catalog", str(catalog), "--no-housekeeping"],
        )
        stack.callback(service.kill)
        service.wait_until_ready()
        caller = stack.enter_context(client(service, await make_token(url, "acme")))
        # Caches fill, evaluators start.
        await asyncio.sleep(3)
        housekeeper = stack.enter_context(housekeeping(url, directory / "housekeeping.log"))
        turns = await take_turns(housekeeper, observer, turn_s)
        await observer.close()
        output, _ = await asyncio.to_thread(caller.communicate, "")
        report(rows, turns, json.loads(output), out)


def main() -> None:
    """Run as a program: the measurement, or the client that it starts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rate", type=float, default=CALLS_PER_S, help="calls per second")
    parser.add_argument("--turn", type=float, default=TURN_S, help="seconds with and without housekeeping, in turn")
    parser.add_argument("--call", metavar="HOST:PORT", help=argparse.SUPPRESS)
    parser.add_argument("--token", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.call:
        asyncio.run(call_steadily(given.call, given.token, given.rate))
    else:
        asyncio.run(measure(given.rows, given.rate, given.turn, sys.stdout))


if __name__ == "__main__":
    main()
