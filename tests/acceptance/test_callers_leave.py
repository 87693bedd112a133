"""Callers that hang up or run out of time: their work is done all the same, and nothing is left dirty."""

import asyncio
import random
from pathlib import Path

import grpc
import pytest

from conftest import connect
from decideonce.v1 import decision_service_pb2 as wire
from harness import make_token, new_key, write_catalog
from processes import until
from stage import ALONE, evaluations

OPERATION = "test.echo"
SUCCEEDED = wire.DECISION_STATUS_SUCCEEDED
COUNTS = "SELECT (SELECT count(*) FROM ledger WHERE state = 2), (SELECT count(*) FROM outbox)"


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    """Give a catalog with a long lease, so that what is left behind would stay for long."""
    settings = {"policy": "echo", "time_budget": "30s", "default_wait": "20s", "lease": "30s"}
    return str(write_catalog(tmp_path / "catalog", {OPERATION: settings}, {"echo": "echo_policy:decide"}))


async def test_call_that_ends_early_leaves_its_decision_to_be_made(
    database_url, observer, start_service, connect_caller, catalog
) -> None:
    """Calls cancelled, or out of time, at any moment: none leaves its key held, and each key is evaluated once.

    grpc/grpc.io PR#1137: a handler is cancelled at its next await, in the middle of what it does.
    """
    service = start_service("--catalog", catalog, ALONE)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await caller.decide(OPERATION, new_key())
    keys = {}
    for milliseconds in (0, 1, 2, 3, 5, 8, 12, 20, 50, 100, 200, 280, 290, 295, 300, 302, 304, 306, 310, 320):
        for how in (cancel, let_expire):
            key, mark = new_key(), f"{milliseconds} {how.__name__}."
            keys[key] = {"mark": mark, "do": "sleep", "seconds": 0.3}
            await how(caller, key, keys[key], milliseconds / 1000)
    for key, facts in keys.items():
        answer = await caller.decide(OPERATION, key, facts)
        assert (SUCCEEDED, 1) == (answer.status, answer.provenance.attempt), facts
        assert 1 == evaluations(service, facts["mark"]), facts
    assert (len(keys) + 1,) * 2 == tuple(await observer.fetchrow(COUNTS))


async def cancel(caller, key, facts, after):
    call = caller.decide(OPERATION, key, facts)
    await asyncio.wait({asyncio.ensure_future(call)}, timeout=after)
    call.cancel()


async def let_expire(caller, key, facts, after):
    (end,) = await asyncio.gather(caller.decide(OPERATION, key, facts, timeout=after), return_exceptions=True)
    if isinstance(end, grpc.RpcError):
        assert grpc.StatusCode.DEADLINE_EXCEEDED == end.code()


@pytest.mark.parametrize("table", ["ledger", "outbox"])
async def test_call_cancelled_around_a_statement_leaves_its_decision_to_be_made(
    database_url, observer, start_service, connect_caller, catalog, table
) -> None:
    """A call cancelled while its key is being reserved, or its decision recorded, leaves one decision all the same."""
    service = start_service("--catalog", catalog, ALONE)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    blocker, key, facts = await connect(database_url), new_key(), {"mark": "one."}
    await blocker.execute("BEGIN")
    await blocker.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")
    call = caller.decide(OPERATION, key, facts)
    pending = asyncio.ensure_future(call)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    await until(lambda: observer.fetchval(waiting))
    call.cancel()
    await asyncio.wait({pending})
    await blocker.execute("ROLLBACK")
    await blocker.close()
    row = await until(lambda: observer.fetchrow("SELECT state, attempt FROM ledger WHERE state <> 1"), within=2)
    assert (2, 1) == tuple(row)
    answer = await caller.decide(OPERATION, key, facts)
    assert (SUCCEEDED, True, 1) == (answer.status, answer.replayed, answer.provenance.attempt)
    assert 1 == evaluations(service, "one.")
    assert (1, 1) == tuple(await observer.fetchrow(COUNTS))


async def idle_in_transaction(observer) -> int:
    return await observer.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
    )


async def test_pool_is_clean_after_cancelled_calls(
    database_url, observer, start_service, connect_caller, catalog
) -> None:
    """After 50 calls that were cancelled at any moment, two connections serve 50 more, and each row is there for all.

    sqlalchemy/sqlalchemy#6652: a cancelled task gave its connection back with a transaction open.
    """
    service = start_service("--catalog", catalog, ALONE, "--pool-size", "2")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await caller.decide(OPERATION, new_key())
    chance, loop = random.Random(7), asyncio.get_running_loop()
    calls = [caller.decide(OPERATION, new_key()) for _ in range(50)]
    for call in calls:
        loop.call_later(chance.uniform(0, 0.05), call.cancel)
    await asyncio.gather(*(asyncio.wait_for(outcome(call), 20) for call in calls))
    keys = [new_key() for _ in range(50)]
    answers = await asyncio.gather(*(caller.decide(OPERATION, key) for key in keys))
    assert [SUCCEEDED] * 50 == [answer.status for answer in answers]
    seen = await observer.fetchval("SELECT count(*) FROM ledger WHERE state = 2 AND operation_key = ANY($1)", keys)
    assert 50 == seen
    assert 0 == await idle_in_transaction(observer)


async def outcome(call) -> str:
    """Tell what a caller learns before it has left."""
    try:
        answer = await call
    except grpc.RpcError as error:
        return error.code().name
    except asyncio.CancelledError:
        return "CANCELLED"
    return wire.DecisionStatus.Name(answer.status).removeprefix("DECISION_STATUS_")
