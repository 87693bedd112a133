"""What a supervisor does about a process that keeps dying, what processes say, and what a stop waits for."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable

import grpc
import pytest

from decideonce.v1 import decision_service_pb2 as wire
from harness import Caller, ServiceProcess, make_token, new_key, url_text, write_catalog
from processes import children, free_address, until
from stage import ALONE, evaluations

OPERATION = "supervise.echo"


@pytest.fixture
def start(start_service, tmp_path) -> Callable[..., ServiceProcess]:
    """Give a function that starts a service without housekeeping; each applies the same catalog."""
    settings = {"policy": "echo", "time_budget": "30s", "default_wait": "20s", "lease": "60s"}
    catalog = write_catalog(tmp_path / "catalog", {OPERATION: settings}, {"echo": "echo_policy:decide"})

    def start(*arguments: str) -> ServiceProcess:
        return start_service("--catalog", str(catalog), ALONE, *arguments)

    return start


async def test_worker_that_keeps_dying_is_reported_and_replaced_with_a_pause(
    database_url, start, connect_caller
) -> None:
    """The first death is mended at once; those that follow are errors in the log, each with a longer pause."""
    service = start()
    (worker,) = children(service, "worker")
    for _ in range(3):
        died = worker
        died.kill()
        worker = await until(lambda died=died: next((w for w in children(service, "worker") if w != died), None))
    said = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    deaths = [line for line in said if line["event"] == "a process died and is replaced"]
    assert [("warning", 0.0), ("error", 1.0), ("error", 2.0)] == [(d["level"], d["pause_seconds"]) for d in deaths]
    assert {("worker 0", -signal.SIGKILL)} == {(d["role"], d["exit_code"]) for d in deaths}
    caller = connect_caller(service, await make_token(database_url, "acme"))
    assert wire.DECISION_STATUS_SUCCEEDED == (await until(lambda: answer_of(caller))).status


def test_one_worker_answers_calls_for_each_core(start_service) -> None:
    """Where nothing says how many, a process answers calls for each core that the service may use, seven at most."""
    every = os.sched_getaffinity(0)
    expected = []
    found = []
    for cores in (every, {min(every)}):
        os.sched_setaffinity(0, cores)
        try:
            service = start_service(ALONE, DECIDEONCE_WORKERS="")
        finally:
            os.sched_setaffinity(0, every)
        expected.append(min(len(cores), 7))
        found.append(len(children(service, "worker")))
    assert expected == found


async def answer_of(caller: Caller) -> wire.DecideResponse | None:
    try:
        return await caller.decide(OPERATION, new_key())
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return None


async def test_stdout_has_the_ready_line_and_nothing_else(database_url, start, connect_caller, tmp_path) -> None:
    """Whoever started a process reads one line from it; what policies print goes to its log."""
    service, token, address = start(), await make_token(database_url, "acme"), free_address()
    log = tmp_path / "worker.log"
    arguments = ["-m", "decideonce_server", "worker", "--listen", address, "--database-url", url_text(database_url)]
    with log.open("wb") as stderr:
        worker = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, stderr=stderr)
    try:
        assert b"decideonce worker ready\n" == await worker.stdout.readline()
        async with grpc.aio.insecure_channel(address) as channel:
            await Caller(channel, token).decide(OPERATION, new_key(), {"mark": "worker."})
        await connect_caller(service, token).decide(OPERATION, new_key(), {"mark": "service."})
        worker.terminate()
        assert b"" == await worker.stdout.read()
        assert 0 == await worker.wait()
    finally:
        if worker.returncode is None:
            worker.kill()
    assert 0 == await asyncio.to_thread(service.stop)
    assert "" == service.process.stdout.read()
    assert 1 == evaluations(service, "service.")
    assert 1 == log.read_text().count("evaluated worker.\n")


async def test_stop_waits_for_an_attempt_whose_caller_left(database_url, observer, start, connect_caller) -> None:
    """Work that no call is waiting for any more is finished and recorded before a process ends.

    grpc/grpc.io PR#1137: a handler is cancelled with its caller, and its work is half done.
    """
    service = start()
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key = new_key()
    call = caller.decide(OPERATION, key, {"mark": "one.", "do": "sleep", "seconds": 1.5})
    left = asyncio.ensure_future(call)
    await until(lambda: evaluations(service, "one."))
    call.cancel()
    await asyncio.wait({left})
    assert left.cancelled()
    assert 1 == await observer.fetchval("SELECT state FROM ledger WHERE operation_key = $1", key)
    assert 0 == await asyncio.to_thread(service.stop)
    row = await observer.fetchrow("SELECT state, attempt, (SELECT count(*) FROM outbox) FROM ledger")
    assert (2, 1, 1) == tuple(row)
    assert 1 == evaluations(service, "one.")


async def test_stop_ends_waits_for_what_others_decide(database_url, start, connect_caller) -> None:
    """A duplicate that waits at a stopping instance for another's attempt gets PROCESSING; the attempt goes on."""
    owner, stopping = start(), start("--drain", "60s")
    token = await make_token(database_url, "acme")
    key, facts = new_key(), {"mark": "one.", "do": "sleep", "seconds": 5}
    original = asyncio.ensure_future(connect_caller(owner, token).decide(OPERATION, key, facts))
    await until(lambda: evaluations(owner, "one."))
    waiting = connect_caller(stopping, token)
    await waiting.channel.channel_ready()
    duplicate = asyncio.ensure_future(waiting.decide(OPERATION, key, facts))
    # The second is answered behind the first, so the first has begun to wait by then.
    assert wire.DECISION_STATUS_PROCESSING == (await waiting.decide(OPERATION, key, facts, max_wait=0.2)).status
    assert not duplicate.done()
    stopping.process.send_signal(signal.SIGTERM)
    answer = await duplicate
    assert not original.done()
    assert wire.DECISION_STATUS_PROCESSING == answer.status
    assert 0 < answer.retry_after.ToTimedelta().total_seconds() <= 1
    assert 0 == await asyncio.to_thread(stopping.process.wait, 20)
    assert wire.DECISION_STATUS_SUCCEEDED == (await original).status
