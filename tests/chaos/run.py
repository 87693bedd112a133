"""Drives a deployment under faults, then judges what was told: `make chaos [MINUTES=10] [SEED=…]`."""

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import asyncpg
from rich.console import Console
from rich.table import Table

# Programs are started from here, and nothing is forked: gRPC's fork handlers would only warn.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.checker import Expectations, Row, Violation, check
from chaos.deployment import BRIEF, EFFECTS, LEASES, VERSIONS, Deployment, deploy, is_refused, tear_down
from chaos.history import History, Result
from chaos.nemesis import Nemesis
from chaos.trail import read_trail
from chaos.workload import RESULTS, Workload, decision_digests
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.events_pb2 import DecisionEvent

EXPECTATIONS = Expectations(frozenset({BRIEF}), LEASES, is_refused, EFFECTS, VERSIONS)
# The history's rate of calls, and how often there is a fault: what two cores can take.
CALLS_PER_S = 45.0
FAULT_PAUSE_S = 1.6
REST_WITHIN_S = 60.0

READ_ROWS = """SELECT l.tenant, l.operation, l.operation_key, l.state, l.attempt, l.response,
    (SELECT count(*) FROM outbox o WHERE o.bucket = l.bucket AND o.tenant = l.tenant AND o.operation = l.operation
        AND o.operation_key = l.operation_key AND o.type = 'decideonce.decision.v1') AS decision_events,
    (SELECT count(*) FROM outbox o WHERE o.bucket = l.bucket AND o.tenant = l.tenant AND o.operation = l.operation
        AND o.operation_key = l.operation_key AND o.type <> 'decideonce.decision.v1') AS effect_events,
    (SELECT o.payload FROM outbox o WHERE o.bucket = l.bucket AND o.tenant = l.tenant AND o.operation = l.operation
        AND o.operation_key = l.operation_key AND o.type = 'decideonce.decision.v1' LIMIT 1) AS event
    FROM ledger l"""


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
                *decision_digests(answer),
                answer.provenance.attempt,
                row["decision_events"],
                row["effect_events"],
                _is_told_truly(answer, row["event"]),
            )
        )
    return rows


def _is_told_truly(answer: wire.DecideResponse, payload: bytes | None) -> bool:
    if payload is None or answer.status == wire.DECISION_STATUS_UNSPECIFIED:
        return True
    event = DecisionEvent.FromString(payload)
    told = (event.recorded.status, event.recorded.decision, event.recorded.failure, event.provenance)
    return (answer.status, answer.decision, answer.failure, answer.provenance) == told


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


async def drive(seconds: float, seed: int, root: Path) -> tuple[History, list[Violation]]:
    """Drive a deployment for a time, and judge it."""
    history = History()
    deployment = await deploy(root)
    idle: list[str] = []
    watching = asyncio.create_task(watch_sessions(deployment, idle))
    try:
        workload = Workload(deployment, history, seed, CALLS_PER_S)
        nemesis = Nemesis(deployment, history, workload.now, seed)
        await asyncio.gather(workload.run(seconds), nemesis.run(seconds - 3, FAULT_PAUSE_S))
        connection = await deployment.cluster.primary.connect("chaos")
        await until_at_rest(connection)
        late = await workload.ask_everyone_again()
        rows, trail = await read_rows(connection), await read_trail(connection)
        violations = check(history, rows, trail, EXPECTATIONS, late)
        await connection.close()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await tear_down(deployment)
    return history, [*violations, *(Violation("a session idled in a transaction", query) for query in set(idle))]


def recovery_times(history: History) -> dict[str, list[float]]:
    """Give, by kind of fault, how long after its beginning the instance gave an original answer again."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    originals = sorted(
        (c.began, c.ended, c.instance) for c in history.calls if c.result is Result.SUCCEEDED and not c.replayed
    )
    for fault in history.faults:
        ended = next((e for b, e, where in originals if b >= fault.began and where == fault.where), None)
        if ended is not None:
            times[fault.kind].append(ended - fault.began)
    return times


def report(history: History, violations: list[Violation], seed: int) -> None:
    """Print what happened."""
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
        history, violations = asyncio.run(drive(arguments.minutes * 60, seed, Path(directory)))
    report(history, violations, seed)
    if violations:
        kept = Path(f"chaos-{seed}.jsonl")
        history.write(kept)
        print(f"the whole history is in {kept}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
