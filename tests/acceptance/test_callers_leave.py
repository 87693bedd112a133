"""Callers that hang up or run out of time: their work is done all the same, and nothing is left dirty."""

import asyncio
import random
import time
from pathlib import Path

import grpc
import pytest

from decideonce.v1 import decision_service_pb2 as wire
from harness import make_token, new_key, write_catalog

OPERATION = "test.echo"


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    """Give a catalog with a long lease, so that what is left behind would stay for long."""
    settings = {"policy": "echo", "time_budget": "10s", "default_wait": "15s", "lease": "30s"}
    return str(write_catalog(tmp_path / "catalog", {OPERATION: settings}, {"echo": "echo_policy:decide"}))


@pytest.mark.parametrize("how", ["deadline", "cancel"])
@pytest.mark.parametrize("after_ms", [60, 100, 200, 500])
async def test_attempt_goes_on_without_its_caller(
    database_url, observer, start_service, connect_caller, catalog, how, after_ms
) -> None:
    """A caller that leaves in mid-evaluation leaves one evaluation, which ends and is recorded.

    vmagamedov/grpclib#122: the handler was cancelled with its caller, and half of the work was done.
    """
    service = start_service("--catalog", catalog, "--no-housekeeping")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key, facts = new_key(), {"do": "sleep", "seconds": 1, "mark": "left."}
    call = caller.decide(OPERATION, key, facts, timeout=after_ms / 1000 if how == "deadline" else 20)
    if how == "cancel":
        asyncio.get_running_loop().call_later(after_ms / 1000, call.cancel)
    assert await outcome(call) in ("PROCESSING", "DEADLINE_EXCEEDED", "CANCELLED")
    async with asyncio.timeout(10):
        while await observer.fetchval("SELECT count(*) FROM ledger WHERE state = 1"):
            pass
    began = time.monotonic()
    again = await caller.decide(OPERATION, key, facts)
    assert wire.DECISION_STATUS_SUCCEEDED == again.status
    assert 1 == again.provenance.attempt
    assert 1 == service.log.read_text().count("evaluated left.")
    if again.replayed:
        assert time.monotonic() - began < 0.5
    assert 0 == await idle_in_transaction(observer)


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
    service = start_service("--catalog", catalog, "--no-housekeeping", "--pool-size", "2")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await caller.decide(OPERATION, new_key())
    chance, loop = random.Random(7), asyncio.get_running_loop()
    calls = [caller.decide(OPERATION, new_key()) for _ in range(50)]
    for call in calls:
        loop.call_later(chance.uniform(0, 0.05), call.cancel)
    await asyncio.gather(*(asyncio.wait_for(outcome(call), 20) for call in calls))
    keys = [new_key() for _ in range(50)]
    answers = await asyncio.gather(*(caller.decide(OPERATION, key) for key in keys))
    assert [wire.DECISION_STATUS_SUCCEEDED] * 50 == [answer.status for answer in answers]
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
