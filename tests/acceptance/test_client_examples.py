"""Stubs with the service config, and the Python client of docs/examples, while replies are lost."""

import asyncio
import importlib
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import grpc
import pytest

from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceStub
from harness import decide_request, new_key, table_policy
from processes import until
from reply_proxy import Fate, ReplyProxy, at_random, bodies_by_key, scripted
from stage import LedgerView, Stage

EXAMPLES = Path(__file__).parents[2] / "docs/examples/clients/python"
OPERATION, ECHO = "test.table", "test.echo"
WITHIN_S = 30.0
OPERATIONS = 50


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give an operation that decides at once, and one that does what its facts say and lets nobody wait."""
    operations = {OPERATION: {"policy": "table"}, ECHO: {"policy": "echo", "default_wait": "0s", "time_budget": "10s"}}
    return operations, {"table": table_policy("LOW", "HIGH"), "echo": "echo_policy:decide"}


@pytest.fixture
def example(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Give the example, which calls the stage."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("DECIDEONCE_SERVER", stage.service.address)
    monkeypatch.setenv("DECIDEONCE_TOKEN", stage.token)
    return importlib.import_module("decide")


def finish(example: ModuleType, stage: Stage, request: wire.DecideRequest) -> wire.DecideResponse:
    """Let the example finish a request, on a connection of its own."""
    with example.connect(("grpc.use_local_subchannel_pool", 1)) as channel:
        return example.finish(channel, stage.token, request.SerializeToString(deterministic=True), WITHIN_S)


async def test_service_config_retries(example, stage, monkeypatch) -> None:
    """A stub that has the service config resends what a lost connection took, and its caller sees nothing of it."""
    request = decide_request(OPERATION, new_key(), {"n": 1})
    async with ReplyProxy(stage.service.address, scripted(Fate.IS_LOST, Fate.IS_LOST)) as proxy:
        monkeypatch.setenv("DECIDEONCE_SERVER", proxy.address)
        with example.connect() as channel:
            metadata = [("authorization", f"Bearer {stage.token}")]
            answer = await asyncio.to_thread(DecisionServiceStub(channel).Decide, request, metadata=metadata)
    assert (wire.DECISION_STATUS_SUCCEEDED, True) == (answer.status, answer.replayed)
    assert (3, 1) == (len(proxy.requests), len(set(proxy.requests)))


async def test_reply_that_has_begun_is_asked_for_again(example, stage, monkeypatch) -> None:
    """Where a connection ends within a reply, gRPC retries no more, and the example does."""
    async with ReplyProxy(stage.service.address, scripted(Fate.IS_TORN)) as proxy:
        monkeypatch.setenv("DECIDEONCE_SERVER", proxy.address)
        answer = await asyncio.to_thread(finish, example, stage, decide_request(OPERATION, new_key(), {"n": 1}))
    assert ("HIGH", True) == (answer.decision.outcome, answer.replayed)
    assert (2, 1) == (len(proxy.requests), len(set(proxy.requests)))


async def test_every_caller_has_its_one_decision(example, stage, view, monkeypatch) -> None:
    """With three replies of ten lost, each operation is decided once, told once, and known to its caller."""
    requests = [decide_request(OPERATION, new_key(), {"n": number, "more": "facts"}) for number in range(OPERATIONS)]
    keys = [request.operation_key for request in requests]
    loop = asyncio.get_running_loop()
    async with ReplyProxy(stage.service.address, at_random(0.3, seed=1)) as proxy:
        monkeypatch.setenv("DECIDEONCE_SERVER", proxy.address)
        with ThreadPoolExecutor(8) as threads:
            calls = [loop.run_in_executor(threads, finish, example, stage, request) for request in requests]
            answers = await asyncio.gather(*calls)
    assert 5 < proxy.cuts
    assert dict.fromkeys(keys, 1) == {key: len(bodies) for key, bodies in bodies_by_key(proxy.requests).items()}
    told = {answer.provenance.operation_key: answer.provenance.decision_id for answer in answers}
    assert await view.decisions(keys) == told
    assert dict.fromkeys(keys, 1) == await view.events(keys)
    assert Counter(LOW=1, HIGH=OPERATIONS - 1) == Counter(answer.decision.outcome for answer in answers)


async def test_example_polls_and_makes_new_attempts(example, stage, view, tmp_path) -> None:
    """The example polls what is being decided, and calls again where an attempt failed and another may succeed."""
    source = tmp_path / "source"
    facts = {"do": "need", "source": str(source), "outcome": "LATE", "mark": "needs."}
    request = decide_request(ECHO, new_key(), facts)
    finishing = asyncio.ensure_future(asyncio.to_thread(finish, example, stage, request))

    async def has_failed() -> bool:
        state = "SELECT state FROM ledger WHERE operation_key = $1"
        failed = wire.DECISION_STATUS_FAILED_RETRYABLE
        return failed == await view.connection.fetchval(state, request.operation_key)

    await until(has_failed)
    source.touch()
    answer = await finishing
    assert ("LATE", True) == (answer.decision.outcome, answer.provenance.attempt > 1)


def test_example_tells_that_it_is_not_finished(example, tmp_path, monkeypatch, capsys) -> None:
    """A run that ends before the decision is there says so by its exit code, and the next run gets the decision."""
    arguments = (str(tmp_path / "work"), ECHO, '{"do": "sleep", "seconds": 0.5}')
    monkeypatch.setattr(example, "WITHIN_S", 0.3)
    assert (75, "DECISION_STATUS_PROCESSING \n") == (example.main(*arguments), capsys.readouterr().err)
    monkeypatch.setattr(example, "WITHIN_S", WITHIN_S)
    assert (0, "DONE") == (example.main(*arguments), capsys.readouterr().out.split()[0])


async def test_error_that_a_resend_cannot_help_ends_it(example, stage) -> None:
    """The example gives what is refused to its caller, at once."""
    with pytest.raises(grpc.RpcError) as refused:
        await asyncio.to_thread(finish, example, stage, decide_request("test.unknown", new_key()))
    assert (grpc.StatusCode.NOT_FOUND, None) == (refused.value.code(), example.retry_after(refused.value))


async def run(program: Path, *arguments: str) -> tuple[int, str]:
    """Run a program, and give its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(sys.executable, program, *arguments, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    return process.returncode, printed.decode()


async def test_caller_that_is_killed_goes_on(example, stage, view: LedgerView, tmp_path, monkeypatch) -> None:
    """A caller that is killed after it sent finishes the same operation, with the same bytes, when it is run again."""
    work_file = tmp_path / "work"
    arguments = (str(work_file), OPERATION, '{"n": 0}')
    async with ReplyProxy(stage.service.address) as proxy:
        monkeypatch.setenv("DECIDEONCE_SERVER", proxy.address)
        proxy.hold()
        first = await asyncio.create_subprocess_exec(sys.executable, EXAMPLES / "decide.py", *arguments)
        await until(lambda: proxy.requests)
        key = wire.DecideRequest.FromString(work_file.read_bytes()).operation_key
        await until(lambda: view.decisions([key]))
        first.kill()
        await first.wait()
        proxy.release()
        ended = [await run(EXAMPLES / "decide.py", *arguments) for _ in range(2)]
    decision_id = (await view.decisions([key]))[key]
    assert [(0, f"LOW {decision_id}\n")] * 2 == ended
    assert {work_file.read_bytes()} == set(proxy.requests)
