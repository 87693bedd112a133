"""What a process doesn't take on, and what it still answers then."""

import asyncio
from typing import Any

import grpc
import pytest

from decideonce.v1 import decision_service_pb2 as wire
from harness import call_error, make_token, new_key, refused, write_catalog


async def test_overload_sheds_new_work_and_answers_what_is_recorded(
    database_url, observer, tmp_path, start_service, connect_caller
) -> None:
    """A full process refuses new keys, writes nothing for them, and says when to come back; replays go on."""
    operations = {"test.echo": {"policy": "echo", "time_budget": "30s", "default_wait": "20s"}}
    catalog = write_catalog(tmp_path / "catalog", operations, {"echo": "echo_policy:decide"})
    service = start_service("--catalog", str(catalog), "--attempts-max", "2")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    done, slow, fresh = new_key(), {"do": "sleep", "seconds": 3}, new_key()
    await caller.decide("test.echo", done)
    running = [asyncio.ensure_future(caller.decide("test.echo", new_key(), slow)) for _ in range(2)]
    async with asyncio.timeout(10):
        while 2 != await observer.fetchval("SELECT count(*) FROM ledger WHERE state = 1"):
            pass
    error = await refused(caller.decide("test.echo", fresh))
    assert (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", True) == (error.code, error.reason, error.retry_after)
    assert "1000" == error.trailers["grpc-retry-pushback-ms"]
    assert 3 == await observer.fetchval("SELECT count(*) FROM ledger")
    assert (await caller.decide("test.echo", done)).replayed
    assert wire.DECISION_STATUS_SUCCEEDED == (await caller.status("test.echo", done)).status
    assert "OPERATION_KEY_REUSED" == (await refused(caller.decide("test.echo", done, slow))).reason
    await asyncio.gather(*running)
    assert wire.DECISION_STATUS_SUCCEEDED == (await caller.decide("test.echo", fresh)).status


async def test_too_many_mismatches_are_limited_per_tenant(
    database_url, observer, tmp_path, start_service, connect_caller
) -> None:
    """A tenant that reuses keys for other requests again and again is told to wait; right requests and others go on."""
    catalog = write_catalog(tmp_path / "catalog", {"test.echo": {"policy": "echo"}}, {"echo": "echo_policy:decide"})
    service = start_service("--catalog", str(catalog), "--mismatches-per-minute", "3", "--workers", "2")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    other = connect_caller(service, await make_token(database_url, "other"))
    key = new_key()
    for one in (caller, other):
        await one.decide("test.echo", key)
    before = await observer.fetch("SELECT * FROM ledger ORDER BY tenant")
    # Each on a connection of its own, so that both workers have some. A minute may turn over once in between.
    token = caller.metadata[0][1].removeprefix("Bearer ")
    errors = [
        await refused(connect_caller(service, token).decide("test.echo", key, {"echo": {"i": i}})) for i in range(8)
    ]
    reasons = [error.reason for error in errors]
    assert ["OPERATION_KEY_REUSED"] * 3 == reasons[:3]
    limited = next(error for error in errors if error.reason == "MISMATCH_RATE_LIMITED")
    assert (grpc.StatusCode.RESOURCE_EXHAUSTED, True) == (limited.code, limited.retry_after)
    assert {"OPERATION_KEY_REUSED", "MISMATCH_RATE_LIMITED"} == set(reasons)
    assert (await caller.decide("test.echo", key)).replayed
    assert "OPERATION_KEY_REUSED" == (await refused(other.decide("test.echo", key, {"echo": {"i": 1}}))).reason
    assert before == await observer.fetch("SELECT * FROM ledger ORDER BY tenant")


ECHO = ({"test.echo": {"policy": "echo", "time_budget": "30s", "default_wait": "20s"}}, {"echo": "echo_policy:decide"})


async def test_tenant_that_fills_its_part_leaves_the_rest_to_others(
    database_url, observer, tmp_path, start_service, connect_caller
) -> None:
    """A tenant with as many attempts as one may have is told to come back; another's new keys are decided."""
    catalog = write_catalog(tmp_path / "catalog", *ECHO)
    service = start_service("--catalog", str(catalog), "--attempts-per-tenant", "2")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    other = connect_caller(service, await make_token(database_url, "other"))
    slow = {"do": "sleep", "seconds": 3}
    running = [asyncio.ensure_future(caller.decide("test.echo", new_key(), slow)) for _ in range(2)]
    async with asyncio.timeout(10):
        while 2 != await observer.fetchval("SELECT count(*) FROM ledger WHERE state = 1"):
            pass
    assert "OVERLOADED" == (await refused(caller.decide("test.echo", new_key()))).reason
    assert wire.DECISION_STATUS_SUCCEEDED == (await other.decide("test.echo", new_key())).status
    await asyncio.gather(*running)


async def test_calls_at_the_same_moment_begin_no_more_than_there_is_room_for(
    database_url, observer, tmp_path, start_service, connect_caller
) -> None:
    """Of many calls that come before any has begun, those above the limit are shed and write nothing."""
    catalog = write_catalog(tmp_path / "catalog", *ECHO)
    service = start_service("--catalog", str(catalog), "--attempts-max", "5")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await caller.decide("test.echo", new_key())
    slow = {"do": "sleep", "seconds": 3}
    calls = await asyncio.gather(
        *(caller.decide("test.echo", new_key(), slow) for _ in range(100)), return_exceptions=True
    )
    shed = [call_error(call).reason for call in calls if isinstance(call, grpc.RpcError)]
    assert {"OVERLOADED"} == set(shed)
    begun = await observer.fetchval("SELECT count(*) FROM ledger")
    assert 101 == begun + len(shed)
    # One and those of the limit; a few more find room between a reservation and its attempt.
    assert 6 <= begun < 16


async def test_two_thousand_calls_at_once_are_shed_and_not_queued(
    database_url, observer, tmp_path, start_service, connect_caller
) -> None:
    """Of 2,000 calls at once one process takes on what it may and sheds the rest; replays among them are answered."""
    catalog = write_catalog(tmp_path / "catalog", *ECHO)
    # Its own settings, and callers that come from two tenants.
    service = start_service("--catalog", str(catalog), "--new-keys-per-second", "5000")
    callers = [connect_caller(service, await make_token(database_url, tenant)) for tenant in ("acme", "zenith")]
    recorded = new_key()
    for caller in callers:
        await caller.decide("test.echo", recorded)

    def call(i: int) -> Any:
        if i % 10 == 0:
            return callers[i % 20 // 10].decide("test.echo", recorded)
        return callers[i % 2].decide("test.echo", new_key(), {"do": "sleep", "seconds": 1}, max_wait=0)

    async with asyncio.timeout(60):
        calls = await asyncio.gather(*map(call, range(2_000)), return_exceptions=True)
    replays = [answer for i, answer in enumerate(calls) if i % 10 == 0]
    assert [] == [call_error(answer) for answer in replays if isinstance(answer, grpc.RpcError)][:3]
    assert {(wire.DECISION_STATUS_SUCCEEDED, True)} == {(answer.status, answer.replayed) for answer in replays}
    new = [answer for i, answer in enumerate(calls) if i % 10]
    shed = [call_error(answer) for answer in new if isinstance(answer, grpc.RpcError)]
    assert {("OVERLOADED", True)} == {(error.reason, error.retry_after) for error in shed}
    begun = {answer.status for answer in new if not isinstance(answer, grpc.RpcError)}
    assert {wire.DECISION_STATUS_PROCESSING} == begun
    # What was shed has written nothing; what is taken on is what the settings say, and some that were on their way.
    rows = await observer.fetchval("SELECT count(*) FROM ledger")
    assert 2 + len(new) - len(shed) == rows
    assert rows < 1_300


async def test_new_keys_of_a_tenant_are_limited_by_the_second(
    database_url, observer, tmp_path, start_service, connect_caller
) -> None:
    """More new keys than a tenant may have in a second are shed and write nothing; replays and other tenants go on."""
    catalog = write_catalog(tmp_path / "catalog", *ECHO)
    service = start_service("--catalog", str(catalog), "--new-keys-per-second", "5")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    other = connect_caller(service, await make_token(database_url, "other"))
    keys = [new_key() for _ in range(40)]
    calls = await asyncio.gather(*(caller.decide("test.echo", key) for key in keys), return_exceptions=True)
    decided = [key for key, call in zip(keys, calls, strict=True) if not isinstance(call, Exception)]
    assert 0 < len(decided) < len(keys)
    assert len(decided) == await observer.fetchval("SELECT count(*) FROM ledger")
    replays = await asyncio.gather(*(caller.decide("test.echo", decided[0]) for _ in range(20)))
    assert {True} == {answer.replayed for answer in replays}
    assert wire.DECISION_STATUS_SUCCEEDED == (await other.decide("test.echo", new_key())).status


async def test_calls_of_a_tenant_that_wait_are_limited(database_url, tmp_path, start_service, connect_caller) -> None:
    """One more than may wait is told PROCESSING at once; those that wait get the decision."""
    catalog = write_catalog(tmp_path / "catalog", *ECHO)
    service = start_service("--catalog", str(catalog), "--waiters-per-tenant", "2")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key, slow = new_key(), {"do": "sleep", "seconds": 3}
    first = asyncio.ensure_future(caller.decide("test.echo", key, slow))
    waiting = [asyncio.ensure_future(caller.decide("test.echo", key, slow)) for _ in range(4)]
    done, late = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert {wire.DECISION_STATUS_PROCESSING} == {call.result().status for call in done}
    answers = await asyncio.gather(first, *late)
    assert 2 <= [answer.status for answer in answers].count(wire.DECISION_STATUS_SUCCEEDED)


async def test_sizes_are_published_and_kept(database_url, observer, tmp_path, start_service, connect_caller) -> None:
    """A request that is too large is refused unread, and a result that is too large is no decision."""
    catalog = write_catalog(tmp_path / "catalog", *ECHO)
    service = start_service("--catalog", str(catalog), "--events", "none")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    contract = await caller.operation("test.echo")
    assert (1024 * 1024, 30, 512 * 1024) == (
        contract.request_bytes_max,
        contract.facts_depth_max,
        contract.result_bytes_max,
    )
    with pytest.raises(grpc.RpcError) as caught:
        await caller.decide("test.echo", new_key(), {"echo": {"x": "x" * contract.request_bytes_max}})
    assert grpc.StatusCode.RESOURCE_EXHAUSTED == caught.value.code()
    assert 0 == await observer.fetchval("SELECT count(*) FROM ledger")
    for facts in (
        {"echo": {"x": "x" * contract.result_bytes_max}},
        {"effects": [{"type": "too.large", "payload": {"x": "x" * contract.result_bytes_max}}]},
    ):
        answer = await caller.decide("test.echo", new_key(), facts)
        assert (wire.DECISION_STATUS_FAILED_FINAL, "RESULT_TOO_LARGE") == (answer.status, answer.failure.reason)
    assert 2 == await observer.fetchval("SELECT count(*) FROM outbox WHERE octet_length(payload) < 1000")


async def test_mismatch_that_can_not_be_counted_is_one_all_the_same(
    database_url, observer, tmp_path, start_service, connect_caller
) -> None:
    """While another's count stays locked, a key that is reused is refused as such, and not told to be in progress."""
    catalog = write_catalog(tmp_path / "catalog", *ECHO)
    service = start_service("--catalog", str(catalog))
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key = new_key()
    await caller.decide("test.echo", key)
    await observer.execute("BEGIN")
    await observer.execute("LOCK TABLE mismatch")
    assert "OPERATION_KEY_REUSED" == (await refused(caller.decide("test.echo", key, {"echo": {"i": 1}}))).reason
    await observer.execute("ROLLBACK")
