"""What `throughput.py`, `growth.py` and `phases.py` rely on, in small; all of it with the load generator in interop."""

import io
import sys
from dataclasses import replace

import pytest

from bench import growth, tables, throughput
from bench.loader import Keys, LoadFailed, call
from bench.phases import OTHER, phase_of, phases
from bench.sql_client import sql_client
from bench.subject import CATALOG, FACTS, OPERATION, subject
from decideonce.v1 import decision_service_pb2 as wire
from harness import make_token, new_key, recorded


async def test_sql_client_and_planted_decisions_are_as_the_service_made_them(
    database_url, observer, start_service, connect_caller, monkeypatch
) -> None:
    """A decision by pgbench has the rows and events that the service's has; a planted one is replayed under its key."""
    monkeypatch.setenv("PYTHONPATH", str(CATALOG / "python"))
    service = start_service("--catalog", str(CATALOG), "--no-housekeeping")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    first = await caller.decide(OPERATION, new_key(), FACTS)
    planted = new_key()
    client = await sql_client(observer, observer, database_url)
    await growth.plant_keys(observer, planted.encode())
    replay = await caller.decide(OPERATION, planted, FACTS)
    assert (wire.DECISION_STATUS_SUCCEEDED, True) == (replay.status, replay.replayed)
    assert planted == replay.provenance.operation_key
    assert recorded(first)[0] == recorded(replay)[0]
    await client.settle()
    run = await client.run(clients=1, seconds=1)
    assert run["calls"] > 0
    kinds = "SELECT state, octet_length(response) AS size, count(*) FROM ledger GROUP BY 1, 2"
    (kind,) = await observer.fetch(kinds)
    assert (2, 2 + run["calls"]) == (kind["state"], kind["count"])
    events = "SELECT count(*) FROM outbox o JOIN ledger l USING (bucket, tenant, operation, operation_key)"
    assert 2 * run["calls"] == await observer.fetchval(events)


SAMPLES = {
    "work (/x/decideonce_server/app.py:1);intercept (/x/decideonce_server/wire.py:3)": "parse",
    "Ledger.reserve (/x/decideonce_server/ledger.py:9);fetch (/x/asyncpg/e.py:1)": "statements: reserve",
    "work (/x/decideonce_server/app.py:1);run (/x/uvloop/__init__.py:2)": OTHER,
    "serve (/x/decideonce_server/decide.py:2);dumps (/usr/lib/python3/json/__init__.py:2)": "the rest of the way",
    "run (/usr/lib/python3/threading.py:9)": OTHER,
}


@pytest.mark.parametrize("stack", SAMPLES)
def test_a_sample_has_its_phase(stack) -> None:
    """A stack counts for the innermost module that has a phase; a statement for the ledger's method around it."""
    assert SAMPLES[stack] == phase_of(stack)


def test_samples_are_counted_by_phase() -> None:
    """Samples of the main thread count, but for those whose frames could not be read."""
    main, other = "thread (1): MainThread", "thread (2): Thread-3"
    parse, loop = "intercept (/x/decideonce_server/wire.py:3)", "run (/x/uvloop/__init__.py:2)"
    folded = f"{main};{loop};{parse} 3\n{main};{loop} 2\n{main} 7\n{other};{parse} 5\n{main};{parse} 1\n"
    assert {"parse": 4, OTHER: 2} == phases(folded)


def run_of(per_second: float, p50_ms: float = 1.0) -> dict:
    """Make what a measurement gives."""
    times = {"p50_ms": p50_ms, "p95_ms": 2.0, "p99_ms": 3.0, "max_ms": 4.0}
    return times | {"per_second": per_second, "server_us": 100.0, "postgres_us": 50.0, "wal_bytes": 2_000.0}


def test_goals_are_judged_within_their_rounds() -> None:
    """A goal's value is the median of its ratios in each round, and says plainly whether it is reached."""
    content = {
        "runs": {
            "first@64": [run_of(300), run_of(600), run_of(700)],
            "echo@64": [run_of(500), run_of(1_000), run_of(7_000)],
            "first@1": [run_of(1, 5.0)],
            "echo@1": [run_of(1, 1.0)],
            "pgbench@1": [run_of(1, 2.0)],
        },
        "once": {"policy_ms": 0.5, "first_round_trips": 0.3},
    }
    judged = {tuple(goal.values): goal.is_reached for goal in tables.goals(content)}
    assert {(0.6, 0.6, 0.1): True, (1.5,): False, (0.3,): False, (2_000.0,) * 3: True} == judged


def test_tables_stand_between_their_markers() -> None:
    """A section's tables replace the last ones, and nothing else of the page; a page without the section is refused."""
    page = "before\n<!-- growth -->\nold\n<!-- /growth -->\nafter\n"
    assert page.replace("old", "new") == tables.with_section(page, "growth", "new")
    with pytest.raises(ValueError, match="profile"):
        tables.with_section(page, "profile", "new")
    for name in tables.SECTIONS:
        assert tables.with_section(tables.PAGE.read_text(), name, "new")


@pytest.mark.interop
async def test_everything_is_measured() -> None:
    """A short run measures the service, the echo and pgbench, checks every answer, and makes the page's tables."""
    plan = throughput.Plan(workers=2, rounds=1, seconds=1, callers=(1, 64), replayed=500, peers=())
    content = throughput.document(await throughput.measure(plan, sys.stdout))
    kinds = {f"{kind}@{callers}" for kind in ("first", "replay", "echo", "pgbench") for callers in (1, 64)}
    assert kinds | {"first@half", "replay@half"} == content["runs"].keys()
    # A first decision has two statements and a replay one, which at 64 callers calls share.
    assert all(0 < content["once"][f"{kind}_round_trips"] < 1 for kind in ("first", "replay"))
    assert 8 == len(list(tables.goals(content)))
    assert "first decisions at 64 callers, to the echo" in tables.throughput(content)


@pytest.mark.interop
async def test_wrong_answers_are_found() -> None:
    """The load generator fails where keys that should be new are known, or known ones new, or callers aren't let in."""
    async with subject(1) as measured:
        await call(measured.target, measured.keys, calls=10)
        again = Keys(measured.keys.seed)
        with pytest.raises(LoadFailed, match='"replayed": 10'):
            await call(measured.target, again, calls=10)
        with pytest.raises(LoadFailed, match='"replayed": 10'):
            await call(measured.target, Keys(), calls=10, replayed=10)
        stranger = replace(measured.target, headers=measured.target.headers[:-1])
        with pytest.raises(LoadFailed, match='"grpc_status": 10'):
            await call(stranger, measured.keys, calls=10)


@pytest.mark.interop
async def test_growth_is_measured() -> None:
    """A short run measures a small and a large ledger, and minutes at half load, and makes the page's tables."""
    out = io.StringIO()
    size = await growth.at_size(workers=1, rows=20_000, rounds=1, seconds=1, out=out)
    time = await growth.over_time(workers=1, minutes=10, minute_s=1.0, out=out)
    content = {"made": "2026-01-02T03:04:05", "machine": throughput.machine(), "size": size, "time": time}
    assert ["first few", "replay few", "first many", "replay many"] == list(size["runs"])
    assert 4 == len(list(tables.growth_goals(content)))
    assert "20,000" in tables.growth(content)
