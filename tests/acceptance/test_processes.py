"""The processes of an instance: how they stop, who replaces one that died, and how they share their work."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decideonce.v1 import decision_service_pb2 as wire
from harness import Caller, make_token, new_key, write_catalog
from processes import children, until
from stage import ALONE, evaluations

SUCCEEDED = wire.DECISION_STATUS_SUCCEEDED
PROCESSING = wire.DECISION_STATUS_PROCESSING
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# A drain is far longer than this, so that what ends within it didn't wait for one.
SOON_S = 10.0


@pytest.fixture
def start(start_service, tmp_path) -> Callable[..., object]:
    """Give a function that starts a service; each applies the same catalog."""
    echo = {"policy": "echo", "time_budget": "120s", "default_wait": "20s", "lease": "120s"}
    operations = {"process.echo": echo, "process.background": echo | {"execution": "background", "default_wait": "0s"}}
    catalog = write_catalog(tmp_path / "catalog", operations, {"echo": "echo_policy:decide"})

    def start(*arguments: str) -> object:
        return start_service("--catalog", str(catalog), *arguments)

    return start


@asynccontextmanager
async def watching(service, name: str = "") -> AsyncIterator[Callable[[], object]]:
    """Give a function that gives the next status that a health watcher hears; it has heard SERVING."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))

        async def hear() -> int:
            async with asyncio.timeout(SOON_S):
                return (await watch.read()).status

        assert SERVING == await hear()
        yield hear


async def ended(service, within: float) -> int:
    """Give the exit code of a service that ends within seconds."""
    return await asyncio.to_thread(service.process.wait, within)


async def test_stop_says_so_first_and_answers_what_has_begun(database_url, start, connect_caller) -> None:
    """On SIGTERM a service is NOT_SERVING while calls in flight go on; they are answered, and it ends with 0."""
    service = start()
    caller = connect_caller(service, await make_token(database_url, "acme"))
    calls = [
        asyncio.ensure_future(caller.decide("process.echo", new_key(), {"mark": "one.", "do": "sleep", "seconds": 2}))
        for _ in range(5)
    ]
    await until(lambda: evaluations(service, "one.") == len(calls))
    async with watching(service) as hear, watching(service, "decideonce.v1.DecisionService") as hear_named:
        service.process.send_signal(signal.SIGTERM)
        assert (NOT_SERVING, NOT_SERVING) == (await hear(), await hear_named())
        assert not any(call.done() for call in calls)
        answers = await asyncio.gather(*calls)
    assert [(SUCCEEDED, False)] * 5 == [(answer.status, answer.replayed) for answer in answers]
    assert 0 == await ended(service, SOON_S)


async def test_what_cannot_be_finished_is_released(database_url, observer, start, connect_caller, tmp_path) -> None:
    """What a stop's drain is too short for gives its lease back: another instance takes over at once."""
    first, second = start(ALONE, "--drain", "500ms"), start(ALONE)
    token = await make_token(database_url, "acme")
    source = tmp_path / "source"
    facts = {"mark": "one.", "do": "need", "source": str(source), "fault": "sleep", "seconds": 100}
    owned, left = new_key(), new_key()
    caller = connect_caller(first, token)
    await caller.decide("process.echo", left, facts, max_wait=0)
    call = asyncio.ensure_future(caller.decide("process.echo", owned, facts))
    await until(lambda: evaluations(first, "one.") == 2)
    first.process.send_signal(signal.SIGTERM)
    assert 0 == await ended(first, SOON_S)
    assert PROCESSING == (await call).status
    source.touch()
    began = time.monotonic()
    for key in (owned, left):
        answer = await connect_caller(second, token).decide("process.echo", key, facts)
        assert (SUCCEEDED, False, 2) == (answer.status, answer.replayed, answer.provenance.attempt)
    assert SOON_S > time.monotonic() - began
    assert 2 == await observer.fetchval("SELECT count(*) FROM outbox")


async def test_second_signal_stops_faster(database_url, observer, start, connect_caller) -> None:
    """A service that is asked to stop a second time doesn't drain any longer, and still gives its leases back."""
    service = start()
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key = new_key()
    call = asyncio.ensure_future(caller.decide("process.echo", key, {"mark": "one.", "do": "sleep", "seconds": 100}))
    await until(lambda: evaluations(service, "one."))
    async with watching(service) as hear:
        service.process.send_signal(signal.SIGTERM)
        assert NOT_SERVING == await hear()
        assert not call.done()
        service.process.send_signal(signal.SIGTERM)
    assert 0 == await ended(service, SOON_S)
    await asyncio.gather(call, return_exceptions=True)
    left = "SELECT lease_expires_at <= clock_timestamp() FROM ledger WHERE operation_key = $1"
    assert await observer.fetchval(left, key)


async def test_killed_worker_is_replaced_and_calls_go_on(database_url, start) -> None:
    """Of two workers one is killed: new calls are answered by the other at once, and soon there are two again."""
    service = start("--workers", "2", ALONE)
    token = await make_token(database_url, "acme")
    before = children(service, "worker")
    assert 2 == len(before)
    before[0].kill()
    # Until it is reaped, some thread of it may hold its sockets.
    await until(lambda: not before[0].is_running())
    for _ in range(20):
        assert SUCCEEDED == (await decide_anew(service, token)).status
    await until(lambda: len(children(service, "worker")) == 2 and before[0] not in children(service, "worker"), SOON_S)
    # Connections are spread by the kernel: the replacement serves once it gets one.
    (new,) = set(children(service, "worker")) - set(before)
    async with asyncio.timeout(SOON_S):
        while not any(c.laddr.port and c.status == psutil.CONN_LISTEN for c in new.net_connections("tcp")):
            assert SUCCEEDED == (await decide_anew(service, token)).status


async def decide_anew(service, token):
    # A channel with a connection of its own, which any of the workers may get.
    async with grpc.aio.insecure_channel(service.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        return await Caller(channel, token).decide("process.echo", new_key())


async def test_end_of_the_supervisor_ends_its_processes(database_url, start, connect_caller) -> None:
    """A supervisor that is killed leaves no process behind, busy or not."""
    service = start("--workers", "2", "--drain", "500ms")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    facts = {"mark": "one.", "do": "sleep", "seconds": 100}
    call = asyncio.ensure_future(caller.decide("process.echo", new_key(), facts))
    await until(lambda: evaluations(service, "one."))
    tree = psutil.Process(service.process.pid).children(recursive=True)
    # Workers, housekeeping, their fork servers and evaluators.
    assert 3 * 3 <= len(tree)
    service.process.kill()
    try:
        _, alive = await asyncio.to_thread(psutil.wait_procs, tree, 2 * SOON_S)
        assert [] == alive
    finally:
        for process in tree:
            if process.is_running():
                process.kill()
    await asyncio.gather(call, return_exceptions=True)


async def test_tenant_with_a_backlog_leaves_room_for_others(database_url, observer, start, connect_caller) -> None:
    """With 100 decisions of one tenant ahead, another tenant's only one is among the next 32 that are made."""
    service = start(ALONE)
    busy = connect_caller(service, await make_token(database_url, "busy"))
    other = connect_caller(service, await make_token(database_url, "other"))
    slow, key = {"do": "sleep", "seconds": 0.2}, new_key()
    await asyncio.gather(*(busy.decide("process.background", new_key(), slow) for _ in range(100)))
    await other.decide("process.background", key, slow)
    assert SUCCEEDED == (await other.status("process.background", key, max_wait=20)).status
    made = await observer.fetchval(
        """SELECT count(*) FROM ledger l JOIN ledger o ON o.tenant = 'other'
        WHERE l.complete_time BETWEEN o.reserve_time AND o.complete_time"""
    )
    assert 32 >= made
    assert 50 <= await observer.fetchval("SELECT count(*) FROM ledger WHERE state = 1")


async def test_record_that_can_not_be_taken_up_keeps_no_other_waiting(
    database_url, observer, start, connect_caller
) -> None:
    """Abandoned work that names a version that isn't stored is told of in the log, and housekeeping goes on."""
    service = start()
    caller = connect_caller(service, await make_token(database_url, "acme"))
    lost, left = new_key(), new_key()
    for key in (lost, left):
        await caller.decide("process.echo", key)
        await observer.execute(
            """UPDATE ledger SET state = 1, response = NULL, complete_time = NULL, lease_expires_at = now(),
            operation_version = CASE WHEN $2 THEN 999 ELSE 1 END WHERE operation_key = $1""",
            key,
            key == lost,
        )
        if key == lost:
            await until(lambda: "an attempt ended with a defect" in service.log.read_text())
    assert SUCCEEDED == (await caller.status("process.echo", left, max_wait=20)).status
    assert "is replaced" not in service.log.read_text()
