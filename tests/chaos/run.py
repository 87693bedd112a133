"""Drives a deployment under faults, then judges what was told: `make chaos [MINUTES=10] [SEED=…]`."""

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import asyncpg
from rich.console import Console
from rich.table import Table

# Programs are started from here, and nothing is forked: gRPC's fork handlers would only warn.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.checker import Event, Expectations, Row, Violation, check
from chaos.deployment import BRIEF, EFFECTS, LEASES, VERSIONS, Deployment, deploy, is_refused, tear_down
from chaos.history import BROKER, History, Key, Result
from chaos.nemesis import Nemesis
from chaos.trail import read_trail
from chaos.workload import RESULTS, Workload, digests
from consumer import NatsConsumer
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.events_pb2 import DecisionEvent

EXPECTATIONS = Expectations(frozenset({BRIEF}), LEASES, is_refused, EFFECTS, VERSIONS)
# The history's rate of calls, and how often there is a fault: what two cores can take.
CALLS_PER_S = 45.0
FAULT_PAUSE_S = 1.6
REST_WITHIN_S = 60.0

READ_ROWS = "SELECT tenant, operation, operation_key, state, attempt, response FROM ledger"


async def read_rows(connection: asyncpg.Connection) -> list[Row]:
    """Read the ledger as it stands."""
    rows = []
    for row in await connection.fetch(READ_ROWS):
        answer = wire.DecideResponse.FromString(row["response"] or b"")
        rows.append(
            Row(
                (row["tenant"], row["operation"], row["operation_key"]),
                RESULTS[row["state"]],
                row["attempt"],
                *digests(answer.decision, answer.provenance),
                answer.provenance.attempt,
                answer.failure.reason,
            )
        )
    return rows


async def read_events(connection: asyncpg.Connection, query: str) -> dict[Key, list[Event]]:
    """Read each key's events in the order of a query that gives payloads."""
    events: defaultdict[Key, list[Event]] = defaultdict(list)
    for (payload,) in await connection.fetch(query):
        event = DecisionEvent.FromString(payload)
        provenance, told = event.provenance, event.recorded.decision.outputs
        numbers = event.effect.payload if event.HasField("effect") else told
        events[provenance.tenant, provenance.operation, provenance.operation_key].append(
            Event(
                event.event_id,
                event.type,
                *digests(event.recorded.decision, provenance),
                event.recorded.failure.reason,
                int(numbers["n"]) if "n" in numbers else 0,
            )
        )
    return events


async def until_delivered(
    connection: asyncpg.Connection, consumer: NatsConsumer, within: float = REST_WITHIN_S
) -> None:
    """Wait until no event waits and all is applied, or too long has passed; what is missing then is a violation."""
    deadline = asyncio.get_running_loop().time() + within
    while asyncio.get_running_loop().time() < deadline:
        if not await connection.fetchval("SELECT count(*) FROM outbox") and await consumer.has_all():
            return
        await asyncio.sleep(0.2)


async def until_at_rest(connection: asyncpg.Connection) -> None:
    """Wait until nothing is open, or too long has passed; what is still open then is a violation."""
    deadline = asyncio.get_running_loop().time() + REST_WITHIN_S
    while asyncio.get_running_loop().time() < deadline:
        if not await connection.fetchval("SELECT count(*) FROM ledger WHERE state = 1"):
            return
        await asyncio.sleep(0.2)


async def watch_sessions(deployment: Deployment, found: list[str]) -> None:
    """Look for sessions that idle in a transaction, as long as it is let."""
    while True:
        await asyncio.sleep(0.5)
        try:
            connection = await deployment.cluster.primary.connect("chaos")
            try:
                while True:
                    rows = await connection.fetch(
                        """SELECT query FROM pg_stat_activity WHERE datname = 'chaos' AND state LIKE 'idle in%'
                        AND clock_timestamp() - state_change > interval '1 s'"""
                    )
                    found.extend(row["query"] for row in rows)
                    await asyncio.sleep(0.5)
            finally:
                await connection.close(timeout=1)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
            continue


@dataclass(frozen=True)
class Outcome:
    """What happened, what is wrong with it, and what the consumer counted."""

    history: History
    violations: list[Violation]
    consumed: str


async def drive(seconds: float, seed: int, root: Path) -> Outcome:
    """Drive a deployment for a time, and judge it."""
    history = History()
    deployment = await deploy(root)
    idle: list[str] = []
    watching = asyncio.create_task(watch_sessions(deployment, idle))
    consuming = asyncio.create_task(deployment.consumer.run())
    try:
        workload = Workload(deployment, history, seed, CALLS_PER_S)
        nemesis = Nemesis(deployment, history, workload.now, seed)
        await asyncio.gather(workload.run(seconds), nemesis.run(seconds - 3, FAULT_PAUSE_S))
        connection = await deployment.cluster.primary.connect("chaos")
        await until_at_rest(connection)
        late = await workload.ask_everyone_again()
        await until_delivered(connection, deployment.consumer)
        history.deliveries = [at - workload.began for at in deployment.consumer.times]
        violations = await judge(connection, deployment, history, late)
        await connection.close()
    finally:
        for task in (watching, consuming):
            task.cancel()
        # What ended one of them by itself is a defect of the driver.
        ended = await asyncio.gather(watching, consuming, return_exceptions=True)
        await tear_down(deployment)
    defects = [error for error in ended if not isinstance(error, asyncio.CancelledError)]
    if defects:
        raise ExceptionGroup("the driver has a defect", defects)
    idlers = [Violation("a session idled in a transaction", query) for query in set(idle)]
    return Outcome(history, [*violations, *idlers], str(deployment.consumer))


async def judge(
    connection: asyncpg.Connection, deployment: Deployment, history: History, late: list[Key]
) -> list[Violation]:
    """Judge what was told, what is recorded, and what was applied."""
    rows, trail = await read_rows(connection), await read_trail(connection)
    results = await deployment.cluster.primary.connect("consumer")
    applied = await read_events(results, "SELECT payload FROM applied ORDER BY number")
    await results.close()
    parked = await connection.fetch("SELECT id, reason FROM outbox_parked")
    return [
        *check(history, rows, trail, applied, EXPECTATIONS, late),
        *(Violation("an event is parked", f"  {row['id']} {row['reason']}") for row in parked),
    ]


def recovery_times(history: History) -> dict[str, list[float]]:
    """Give, by kind of fault, how long after its beginning the instance gave an original answer again.

    With the broker's it is how long until events were applied again.
    """
    times: defaultdict[str, list[float]] = defaultdict(list)
    originals = sorted(
        (c.began, c.ended, c.instance) for c in history.calls if c.result is Result.SUCCEEDED and not c.replayed
    )
    for fault in history.faults:
        if fault.where == BROKER:
            ended = next((at for at in history.deliveries if at > fault.ended), None)
        else:
            ended = next((e for b, e, where in originals if b >= fault.began and where == fault.where), None)
        if ended is not None:
            times[fault.kind].append(ended - fault.began)
    return times


def report(outcome: Outcome, seed: int) -> None:
    """Print what happened."""
    history, violations = outcome.history, outcome.violations
    console = Console(highlight=False, soft_wrap=True)
    results = Counter(call.error or call.result.value for call in history.calls)
    table = Table("result", "calls", box=None)
    for result, count in results.most_common():
        table.add_row(result, str(count))
    console.print(table)
    table = Table("fault", "times", "recovery: median", "worst", box=None)
    times = recovery_times(history)
    for kind, count in Counter(fault.kind for fault in history.faults).most_common():
        known = times.get(kind) or [float("nan")]
        table.add_row(kind, str(count), f"{statistics.median(known):.2f} s", f"{max(known):.2f} s")
    console.print(table)
    keys = len({call.key for call in history.calls})
    console.print(f"{len(history.calls)} calls of {keys} keys, {len(history.faults)} faults, seed {seed}")
    console.print(f"events: {outcome.consumed}")
    console.print(f"{len(violations)} violations")
    for violation in violations[:5]:
        console.print(str(violation), markup=False)


def main() -> None:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="decideonce-chaos-", ignore_cleanup_errors=True) as directory:
        outcome = asyncio.run(drive(arguments.minutes * 60, seed, Path(directory)))
    report(outcome, seed)
    if outcome.violations:
        kept = Path(f"chaos-{seed}.jsonl")
        outcome.history.write(kept)
        print(f"the whole history is in {kept}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
