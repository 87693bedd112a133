"""How an instance stops within its drain, whoever stays connected, and what it leaves to others."""

import asyncio
import signal
import time
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decideonce.v1 import decision_service_pb2 as wire
from harness import ServiceProcess, make_token, new_key, write_catalog
from processes import until
from stage import ALONE, evaluations

SUCCEEDED = wire.DECISION_STATUS_SUCCEEDED
PROCESSING = wire.DECISION_STATUS_PROCESSING
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# For closing connections and ending processes on a busy machine; far shorter than a long drain.
SURPLUS_S = 10.0


@pytest.fixture
def start(start_service, tmp_path) -> Callable[..., ServiceProcess]:
    """Give a function that starts a service without housekeeping; each applies the same catalog."""
    echo = {"policy": "echo", "time_budget": "120s", "default_wait": "30s", "lease": "120s"}
    operations = {"stop.echo": echo, "stop.background": echo | {"execution": "background", "default_wait": "0s"}}
    catalog = write_catalog(tmp_path / "catalog", operations, {"echo": "echo_policy:decide"})

    def start(*arguments: str) -> ServiceProcess:
        return start_service("--catalog", str(catalog), ALONE, *arguments)

    return start


async def ended(service, within: float) -> int:
    """Give the exit code of a service that ends within seconds."""
    return await asyncio.to_thread(service.process.wait, within)


def slow_at_first(directory):
    """Give facts that take for ever to decide on until a file is there."""
    return {"mark": "one.", "do": "need", "source": str(directory / "source"), "fault": "sleep", "seconds": 100}


async def test_health_watcher_does_not_hold_a_stop(database_url, start, connect_caller) -> None:
    """A client that watches health hears NOT_SERVING and stays connected, as clients do: the stop waits for calls only.

    What it does wait for, a call in flight, is answered.
    """
    service = start("--drain", "60s")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    facts = {"mark": "one.", "do": "sleep", "seconds": 1}
    call = asyncio.ensure_future(caller.decide("stop.echo", new_key(), facts))
    await until(lambda: evaluations(service, "one."))
    async with grpc.aio.insecure_channel(service.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert SERVING == (await watch.read()).status
        service.process.send_signal(signal.SIGTERM)
        assert NOT_SERVING == (await watch.read()).status
        assert not call.done()
        assert SUCCEEDED == (await call).status
        assert 0 == await ended(service, SURPLUS_S)


async def test_idle_service_tells_its_watcher_before_it_ends(database_url, start) -> None:
    """A service that has nothing to finish says NOT_SERVING too before it closes its connections."""
    service = start()
    async with grpc.aio.insecure_channel(service.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert SERVING == (await watch.read()).status
        service.process.send_signal(signal.SIGTERM)
        assert NOT_SERVING == (await watch.read()).status
        assert 0 == await ended(service, SURPLUS_S)


async def test_call_that_outlasts_the_drain_is_told_to_come_back(
    database_url, observer, start, connect_caller, tmp_path
) -> None:
    """A stop takes its drain once; who waits until then gets PROCESSING, and the next call elsewhere decides."""
    drain_s = 4
    first, second = start("--drain", f"{drain_s}s"), start()
    token = await make_token(database_url, "acme")
    key, facts = new_key(), slow_at_first(tmp_path)
    owner = asyncio.ensure_future(connect_caller(first, token).decide("stop.echo", key, facts))
    await until(lambda: evaluations(first, "one."))
    began = time.monotonic()
    first.process.send_signal(signal.SIGTERM)
    answer = await owner
    assert (PROCESSING, False) == (answer.status, answer.replayed)
    assert 0 < answer.retry_after.ToTimedelta().total_seconds() <= 1
    assert 0 == await ended(first, SURPLUS_S)
    assert drain_s <= time.monotonic() - began < 2 * drain_s
    (tmp_path / "source").touch()
    answer = await connect_caller(second, token).decide("stop.echo", key, facts)
    assert (SUCCEEDED, False, 2) == (answer.status, answer.replayed, answer.provenance.attempt)
    assert 1 == await observer.fetchval("SELECT count(*) FROM outbox")


async def test_background_work_that_outlasts_the_drain_is_left_to_others(
    database_url, observer, start, connect_caller, tmp_path
) -> None:
    """A process that stops takes up nothing of what it has just given back, so another instance does so at once."""
    first = start("--drain", "500ms")
    caller = connect_caller(first, await make_token(database_url, "acme"))
    facts = slow_at_first(tmp_path)
    for _ in range(12):
        await caller.decide("stop.background", new_key(), facts)
    # One policy has eight evaluators at most; the others wait for one.
    begun = "SELECT count(*) = 12 FROM ledger WHERE attempt = 1"
    await until(lambda: observer.fetchval(begun))
    await until(lambda: evaluations(first, "one.") == 8)
    first.process.send_signal(signal.SIGTERM)
    assert 0 == await ended(first, SURPLUS_S)
    rows = await observer.fetch("SELECT attempt, lease_expires_at <= clock_timestamp() FROM ledger")
    assert {(1, True)} == {tuple(row) for row in rows}
    (tmp_path / "source").touch()
    second = start()
    decided = "SELECT count(*) = 12 FROM ledger WHERE state = 2 AND attempt = 2"
    await until(lambda: observer.fetchval(decided))
    assert 12 == evaluations(second, "one.")
    assert 12 == await observer.fetchval("SELECT count(*) FROM outbox")


async def test_stop_begins_nothing_new(database_url, observer, start, connect_caller) -> None:
    """A process that stops finishes what it has begun, and begins no more of its backlog: that is for others."""
    first = start()
    caller = connect_caller(first, await make_token(database_url, "acme"))
    facts = {"mark": "one.", "do": "sleep", "seconds": 0.3}
    await asyncio.gather(*(caller.decide("stop.background", new_key(), facts) for _ in range(100)))
    await until(lambda: evaluations(first, "one.") >= 8)
    first.process.send_signal(signal.SIGTERM)
    assert 0 == await ended(first, SURPLUS_S)
    rows = await observer.fetch("SELECT state, attempt, count(*) FROM ledger GROUP BY state, attempt ORDER BY state")
    (not_begun, done) = (tuple(row) for row in rows)
    assert (1, 0) == not_begun[:2]
    assert (2, 1, 100 - not_begun[2]) == done
    assert done[2] == evaluations(first, "one.")
