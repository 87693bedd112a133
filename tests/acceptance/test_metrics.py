"""What an operator's Prometheus gets."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta

import grpc
import pytest

from conftest import connect
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.database import Database
from decideonce_server.ledger_watch import LedgerWatch, Load
from decideonce_server.status import CODES
from decideonce_server.telemetry import REFUSALS
from harness import Caller, make_token, new_key, refused, write_catalog
from processes import children, free_address, until
from scraping import scrape, total
from stage import LedgerView, Stage

OPERATION = "count.echo"
ONCE = "count.once"
BACKGROUND = "count.background"


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give an operation whose facts say what happens, one with a single attempt, and one that workers decide."""
    facts = {"type": "object", "properties": {"n": {"type": "integer"}}}
    return (
        {
            OPERATION: {"policy": "echo", "facts": facts, "default_wait": "5s"},
            ONCE: {"policy": "echo", "max_attempts": 1},
            BACKGROUND: {"policy": "echo", "execution": "background"},
        },
        {"echo": "echo_policy:decide"},
    )


@pytest.fixture(scope="module")
def flags(metrics_address: str) -> list[str]:
    """Let the service tell what it counts; two mismatches are too many."""
    return ["--metrics", metrics_address, "--mismatches-per-minute", "1"]


async def results(address: str) -> Counter[tuple[str, str]]:
    samples = [sample for sample in await scrape(address) if sample.name == "decide_calls_total"]
    return Counter({(s.labels["operation"], s.labels["result"]): int(s.value) for s in samples})


async def original(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: caller.decide(OPERATION, new_key(), {"n": 1})


async def replayed(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    key = new_key()
    await caller.decide(OPERATION, key, {"n": 1})
    return lambda: caller.decide(OPERATION, key, {"n": 1})


async def replayed_failure(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    key = new_key()
    await caller.decide(OPERATION, key, {"do": "fail"})
    return lambda: caller.decide(OPERATION, key, {"do": "fail"})


async def processing(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: caller.decide(OPERATION, new_key(), {"do": "sleep", "seconds": 0.2}, max_wait=0)


async def key_reused(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    key = new_key()
    await caller.decide(OPERATION, key, {"n": 1})
    return lambda: refused(caller.decide(OPERATION, key, {"n": 2}))


async def key_expired(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    key = new_key()
    await caller.decide(OPERATION, key, {"n": 1})
    await view.change(key, "replayable_until = now()")
    return lambda: refused(caller.decide(OPERATION, key, {"n": 1}))


async def invalid(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: refused(caller.decide(OPERATION, new_key(), {"n": "x"}))


async def malformed(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: refused(caller.decide_raw(b"\xff"))


async def retryable(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: caller.decide(OPERATION, new_key(), {"do": "retry"})


async def final(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: caller.decide(OPERATION, new_key(), {"do": "fail"})


async def no_token(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: refused(Caller(caller.channel, None).decide(OPERATION, new_key()))


async def not_in_catalog(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: refused(caller.decide("count.made-up", new_key()))


async def limited(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    call = await key_reused(caller, view)
    await call()
    return call


async def locked(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    async def while_the_ledger_is_locked():
        async with view.connection.transaction():
            await view.connection.execute("LOCK TABLE ledger")
            return await caller.decide(OPERATION, new_key(), {"n": 1})

    return while_the_ledger_is_locked


async def unavailable(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    name = await view.connection.fetchval("SELECT current_database()")

    async def while_no_session_is_let_in():
        admin = await connect(view.url.set(database="postgres"))
        try:
            await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            await admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1 AND application_name = $2",
                name,
                "decideonce",
            )
            return await refused(caller.decide(OPERATION, new_key(), {"n": 1}))
        finally:
            await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            await admin.close()

    return while_no_session_is_let_in


async def defect(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    """Name a version that was never published."""
    key = new_key()
    await caller.decide(OPERATION, key, {"n": 1})
    await view.change(key, "operation_version = 4711")
    return lambda: refused(caller.decide(OPERATION, key, {"n": 1}))


@pytest.mark.parametrize(
    ("prepare", "operation", "result"),
    [
        (original, OPERATION, "original"),
        (replayed, OPERATION, "replayed"),
        (replayed_failure, OPERATION, "replayed"),
        (processing, OPERATION, "processing"),
        # Reusing a key is limited by the minute, so the first to try is this one.
        (key_reused, OPERATION, "key_reused"),
        (limited, OPERATION, "limited"),
        (key_expired, OPERATION, "key_expired"),
        (invalid, OPERATION, "invalid"),
        (malformed, "unknown", "invalid"),
        (retryable, OPERATION, "retryable"),
        (final, OPERATION, "final"),
        (no_token, OPERATION, "refused"),
        (not_in_catalog, "unknown", "refused"),
        (locked, OPERATION, "processing"),
        (unavailable, OPERATION, "unavailable"),
        (defect, OPERATION, "defect"),
    ],
)
async def test_each_call_is_counted_once_under_its_result(
    caller: Caller, view: LedgerView, metrics_address: str, prepare, operation: str, result: str
) -> None:
    """A call of Decide counts as what its caller gets, with an operation of the catalog or as "unknown"."""
    call = await prepare(caller, view)
    before = await results(metrics_address)
    await call()
    assert {(operation, result): 1} == await results(metrics_address) - before


def test_every_error_has_a_result() -> None:
    """Whatever a call ends with is counted under a name."""
    assert set() == {*CODES.values(), grpc.StatusCode.CANCELLED} - set(REFUSALS)


async def test_phases_of_a_decision_are_measured(caller: Caller, metrics_address: str) -> None:
    """A decision takes one step in each phase, a replay is looked up only; the buckets fit both."""

    async def counts() -> Counter[str]:
        samples = [sample for sample in await scrape(metrics_address) if sample.name == "decide_phase_seconds_count"]
        return Counter({sample.labels["phase"]: int(sample.value) for sample in samples})

    key, before = new_key(), await counts()
    await caller.decide(OPERATION, key)
    once = {"queue": 1, "reserve": 1, "evaluate": 1, "complete": 1}
    assert once == await counts() - before
    await caller.decide(OPERATION, key)
    assert once | {"reserve": 2} == await counts() - before
    bounds = {s.labels["le"] for s in await scrape(metrics_address) if s.name == "decide_phase_seconds_bucket"}
    assert {"0.001", "10.0", "+Inf"} <= bounds


async def test_a_call_that_repeats_a_fresh_decision_is_counted(
    caller: Caller, view: LedgerView, metrics_address: str
) -> None:
    """Within 30 s the first answer may have been lost; a call that waits for another, or comes later, is none such."""

    async def soon() -> float:
        return total(await scrape(metrics_address), "replays_soon_total")

    key, before = new_key(), await soon()
    first = asyncio.ensure_future(caller.decide(OPERATION, key, {"do": "sleep", "seconds": 0.3}))
    await until(lambda: view.connection.fetchval("SELECT count(*) FROM ledger WHERE operation_key = $1", key))
    waited = await caller.decide(OPERATION, key, {"do": "sleep", "seconds": 0.3})
    assert (False, True) == ((await first).replayed, waited.replayed)
    assert before == await soon()
    await caller.decide(OPERATION, key, {"do": "sleep", "seconds": 0.3})
    assert before + 1 == await soon()
    await view.change(key, "complete_time = now() - interval '31 s'")
    await caller.decide(OPERATION, key, {"do": "sleep", "seconds": 0.3})
    assert before + 1 == await soon()


async def test_takeovers_and_exhausted_attempts_are_counted(
    caller: Caller, view: LedgerView, metrics_address: str
) -> None:
    """An attempt after a failed one or after a lease counts as that; attempts that are used up count when recorded."""

    async def counts() -> tuple[float, float, float]:
        samples = await scrape(metrics_address)
        takeovers = [total(samples, "takeovers_total", after=after) for after in ("failure", "lease")]
        return takeovers[0], takeovers[1], total(samples, "attempts_exhausted_total")

    failures, leases, exhausted = await counts()
    key = new_key()
    await caller.decide(OPERATION, key, {"do": "retry"})
    await caller.decide(OPERATION, key, {"do": "retry"})
    assert (failures + 1, leases, exhausted) == await counts()
    await view.change(key, "state = 1, response = NULL, retry_at = NULL, lease_expires_at = now()")
    await caller.decide(OPERATION, key, {"do": "retry"})
    assert (failures + 1, leases + 1, exhausted) == await counts()
    answer = await caller.decide(ONCE, new_key(), {"do": "retry"})
    assert wire.DECISION_STATUS_FAILED_FINAL == answer.status
    assert (failures + 1, leases + 1, exhausted + 1) == await counts()
    await caller.decide(BACKGROUND, new_key(), max_wait=5)
    assert (failures + 1, leases + 1, exhausted + 1) == await counts()


async def test_one_endpoint_tells_of_all_processes(database_url, start_service, connect_caller, tmp_path) -> None:
    """Every sample says whose it is, every call is counted by one worker, and a worker that dies comes back into it."""
    address = free_address()
    catalog = write_catalog(tmp_path / "catalog", {OPERATION: {"policy": "echo"}}, {"echo": "echo_policy:decide"})
    service = start_service("--catalog", str(catalog), "--workers", "2", "--metrics", address)
    everyone = {"worker 0", "worker 1", "housekeeping"}

    async def is_whole() -> bool:
        return everyone == {sample.labels["process"] for sample in await scrape(address)}

    assert await is_whole()
    token = await make_token(database_url, "acme")
    for _ in range(10):
        await connect_caller(service, token).decide(OPERATION, new_key())
    samples = await scrape(address)
    assert 10 == total(samples, "grpc_server_handled_total", grpc_method="Decide")
    assert 10 == total(samples, "grpc_server_handled_total", grpc_method="Decide", grpc_code="OK")
    assert {"10.0"} == {str(s.value) for s in samples if s.name == "pool_size"}
    assert everyone == {s.labels["process"] for s in samples if s.name == "pool_checked_out"}
    killed = children(service, "worker")[0]
    killed.kill()
    await until(lambda: killed not in children(service, "worker") and len(children(service, "worker")) == 2)
    await until(is_whole)


async def test_watch_tells_of_open_and_overdue_records(
    stage: Stage, caller: Caller, view: LedgerView, database: Database
) -> None:
    """Counted is what is PROCESSING and what has been due for over a minute; the oldest overdue answer has its age."""
    watch = LedgerWatch(database)
    assert Load(0, 0, timedelta(0)) == await watch.look()
    database_of_stage = Database(stage.url, pool_size=1)
    of_stage = LedgerWatch(database_of_stage)
    before = await of_stage.look()
    overdue, stale = new_key(), new_key()
    await caller.decide(OPERATION, overdue)
    await view.change(overdue, "replayable_until = now() - interval '3 days', key_retained_until = NULL")
    await caller.decide(OPERATION, stale)
    await view.change(
        stale, "state = 1, response = NULL, complete_time = NULL, lease_expires_at = now() - interval '1 hour'"
    )
    load = await of_stage.look()
    await database_of_stage.close()
    assert (before.processing + 1, before.stale + 1) == (load.processing, load.stale)
    assert timedelta(days=3) <= load.purge_delay <= timedelta(days=3, minutes=1)


async def test_housekeeping_tells_of_the_whole_ledger(database_url, start_service, connect_caller, tmp_path) -> None:
    """Gauges of the database come from housekeeping, and counters are there, at 0, before anything happens."""
    address = free_address()
    catalog = write_catalog(tmp_path / "catalog", {OPERATION: {"policy": "echo"}}, {"echo": "echo_policy:decide"})
    start_service("--catalog", str(catalog), "--metrics", address, "--events", f"log:{tmp_path}/events.jsonl")
    gauges = {"ledger_processing", "ledger_stale", "purge_delay_seconds", "outbox_pending", "outbox_lag_seconds"}
    counters = {
        "takeovers_total",
        "attempts_exhausted_total",
        "stale_completions_total",
        "outbox_published_total",
        "outbox_retries_total",
        "outbox_parkings_total",
        "tombstoned_total",
        "purged_total",
    }

    async def told() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for sample in await scrape(address):
            found.setdefault(sample.name, set()).add(f"{sample.labels['process']} {sample.value}")
        return found

    async def has_looked() -> bool:
        return gauges <= (await told()).keys()

    await until(has_looked)
    everything = await told()
    for name in gauges | counters:
        assert "housekeeping 0.0" in everything[name], name


TENANTS, KEYS = 500, 20
SERIES_MAX = 300


async def test_many_tenants_make_no_series(database_url, observer, start_service, tmp_path) -> None:
    """500 tenants with 20 keys each, and as many made-up operations, leave the endpoint under 300 series."""
    address = free_address()
    catalog = write_catalog(tmp_path / "catalog", {OPERATION: {"policy": "echo"}}, {"echo": "echo_policy:decide"})
    service = start_service("--catalog", str(catalog), "--metrics", address)
    secret_hash = hashlib.sha256(b"secret").digest()
    await observer.execute(
        """INSERT INTO token (token_id, secret_hash, tenant, roles, operations, description, create_time)
        SELECT 't' || n, $1, 'tenant-' || n, '{decide,read}', '{*}', '', now() FROM generate_series(1, $2) n""",
        secret_hash,
        TENANTS,
    )
    async with grpc.aio.insecure_channel(service.address) as channel:

        async def use(tenant: int) -> None:
            caller = Caller(channel, f"do_t{tenant}_secret")
            for _ in range(KEYS):
                await caller.decide(OPERATION, new_key(), timeout=60)
            await refused(caller.decide(f"count.made-up-{tenant}", new_key()))
            await refused(caller.status(f"count.made-up-{tenant}", new_key()))

        for first in range(1, TENANTS, 50):
            await asyncio.gather(*(use(tenant) for tenant in range(first, first + 50)))
    samples = await scrape(address)
    assert TENANTS * KEYS == total(samples, "decide_calls_total", operation=OPERATION, result="original")
    assert TENANTS == total(samples, "decide_calls_total", operation="unknown", result="refused")
    assert SERIES_MAX > len(samples)
    assert {OPERATION, "unknown"} == {sample.labels["operation"] for sample in samples if "operation" in sample.labels}
    assert set() == {name for sample in samples for name in sample.labels if "tenant" in name or "key" in name}
