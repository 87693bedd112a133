"""What a process doesn't take on, and what it still answers then."""

import asyncio

import grpc

from decideonce.v1 import decision_service_pb2 as wire
from harness import make_token, new_key, refused, write_catalog


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
    service = start_service("--catalog", str(catalog), "--mismatches-per-minute", "3")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    other = connect_caller(service, await make_token(database_url, "other"))
    key = new_key()
    for one in (caller, other):
        await one.decide("test.echo", key)
    before = await observer.fetch("SELECT * FROM ledger ORDER BY tenant")
    # A fixed window may turn over once in between.
    errors = [await refused(caller.decide("test.echo", key, {"echo": {"i": i}})) for i in range(8)]
    reasons = [error.reason for error in errors]
    assert ["OPERATION_KEY_REUSED"] * 3 == reasons[:3]
    limited = next(error for error in errors if error.reason == "MISMATCH_RATE_LIMITED")
    assert (grpc.StatusCode.RESOURCE_EXHAUSTED, True) == (limited.code, limited.retry_after)
    assert {"OPERATION_KEY_REUSED", "MISMATCH_RATE_LIMITED"} == set(reasons)
    assert (await caller.decide("test.echo", key)).replayed
    assert "OPERATION_KEY_REUSED" == (await refused(other.decide("test.echo", key, {"echo": {"i": 1}}))).reason
    assert before == await observer.fetch("SELECT * FROM ledger ORDER BY tenant")
