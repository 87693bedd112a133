"""Stubs of four languages, made by their own tools, get exactly the same: with `make interop`."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2

from decideonce.v1 import decision_service_pb2 as wire
from harness import decide_request, new_key, status_request, table_policy
from interop.drivers import LANGUAGES, PROGRAMS, Driver, Said, environment
from processes import until
from reply_proxy import Fate, ReplyProxy, at_random, bodies_by_key, scripted
from stage import LedgerView, Stage

pytestmark = pytest.mark.interop

TABLE, ECHO = "interop.table", "interop.echo"
# Text, numbers and nesting whose spellings languages have of their own.
FACTS = {"n": 1, "amount": 1234567.25, "tiny": 1e-7, "name": "Zoë \U0001f600", "list": [True, None, {"b": 1, "a": 2}]}
OK = grpc.StatusCode.OK.value[0]
OPERATIONS, WORKERS, WITHIN_S = 5_000, 8, 120.0

Start = Callable[..., Awaitable[Driver]]


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give an operation that decides at once, and one that gives its facts back and does what they say."""
    operations = {TABLE: {"policy": "table"}, ECHO: {"policy": "echo", "time_budget": "10s"}}
    return operations, {"table": table_policy("LOW", "HIGH"), "echo": "echo_policy:decide"}


@pytest.fixture
async def start(stage: Stage) -> AsyncIterator[Start]:
    """Give a function that starts the driver of a language, on the stage's service unless told another."""
    async with AsyncExitStack() as drivers:

        async def start_one(
            language: str, address: str | None = None, authority: Path | None = None, workers: int = 1
        ) -> Driver:
            variables = environment(address or stage.service.address, stage.token, authority)
            driver = await Driver.start(language, variables, workers)
            drivers.push_async_callback(driver.close)
            return driver

        yield start_one


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    return request.param


def said(answer: Said) -> tuple[int, str, str]:
    """Give the code, and the reason and the domain of the error."""
    return answer.code, answer.error["reason"], answer.error["domain"]


def digests(answer: Said) -> list[str]:
    """Give SHA-256 of the decision and of the provenance as they came."""
    assert all(answer.recorded)
    return [hashlib.sha256(part).hexdigest() for part in answer.recorded]


async def test_replay_is_the_same_in_every_language(start: Start, language: str) -> None:
    """What one language decided, every language is given again: the same bytes of decision and provenance."""
    key = new_key()
    request = decide_request(ECHO, key, {"echo": FACTS, "reasons": ["Grüße", "b"], "outcome": "DÉCIDÉ"})
    original = await (await start(language)).ask("decide", request)
    assert (OK, "DECISION_STATUS_SUCCEEDED", False, "DÉCIDÉ") == (
        *(original.code, original.status),
        *(original.replayed, original.outcome),
    )
    for other in LANGUAGES:
        driver = await start(other)
        again = await driver.ask("decide", request)
        assert (OK, True, digests(original)) == (again.code, again.replayed, digests(again)), other
        recorded = await driver.ask("status", status_request(ECHO, key))
        assert (again.status, digests(original)) == (recorded.status, digests(recorded)), other


async def test_mismatch_is_told_with_its_reason(start: Start, stage: Stage, language: str) -> None:
    """A key that is used for another request is refused with an ErrorInfo that every language reads."""
    key = new_key()
    driver = await start(language)
    assert OK == (await driver.ask("decide", decide_request(TABLE, key, FACTS))).code
    refused = await driver.ask("decide", decide_request(TABLE, key, FACTS | {"n": 2}))
    already_exists = grpc.StatusCode.ALREADY_EXISTS.value[0]
    assert (already_exists, "OPERATION_KEY_REUSED", "decideonce") == said(refused)
    assert not refused.error["metadata"]
    unknown = await driver.ask("decide", decide_request("interop.unknown", key))
    assert (grpc.StatusCode.NOT_FOUND.value[0], "OPERATION_NOT_FOUND", "decideonce") == said(unknown)
    assert {"operation": "interop.unknown"} == unknown.error["metadata"]


async def test_processing_is_polled_to_its_end(start: Start, language: str) -> None:
    """A caller that doesn't wait is told PROCESSING and when to ask again, and polls until the decision is there."""
    key = new_key()
    facts = {"do": "sleep", "seconds": 0.5, "outcome": "SLEPT"}
    driver = await start(language)
    first = await driver.ask("decide", decide_request(ECHO, key, facts, max_wait=0))
    assert (OK, "DECISION_STATUS_PROCESSING") == (first.code, first.status)
    assert first.retry_after_ms > 0
    ended = await driver.ask("status", status_request(ECHO, key, max_wait=10))
    assert ("DECISION_STATUS_SUCCEEDED", "SLEPT") == (ended.status, ended.outcome)
    request = decide_request(ECHO, new_key(), facts, max_wait=0)
    finished = await driver.ask("finish", request, within_s=WITHIN_S)
    assert ("DECISION_STATUS_SUCCEEDED", "SLEPT") == (finished.status, finished.outcome)


async def test_health(start: Start, language: str) -> None:
    """The health protocol answers for the server, for the service by its name, and for nothing else."""
    driver = await start(language)
    names = ("", "decideonce.v1.DecisionService")
    answers = [await driver.ask("health", health_pb2.HealthCheckRequest(service=name)) for name in names]
    assert [(OK, "SERVING")] * 2 == [(answer.code, answer.status) for answer in answers]
    unknown = await driver.ask("health", health_pb2.HealthCheckRequest(service="nobody"))
    assert grpc.StatusCode.NOT_FOUND.value[0] == unknown.code


async def test_tls(start: Start, stage: Stage, tmp_path: Path, language: str) -> None:
    """A caller decides over TLS where it trusts the server's authority, and never where it doesn't."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    files = ("--tls-certificate", str(tmp_path / "server.pem"), "--tls-key", str(tmp_path / "server.key"))
    service = await asyncio.to_thread(stage.start_another, *files)
    trusting = await start(language, service.address, tmp_path / "ca.pem")
    answer = await trusting.ask("decide", decide_request(TABLE, new_key(), FACTS))
    assert (OK, "HIGH") == (answer.code, answer.outcome)
    # Health isn't in the service config, so it doesn't wait for a connection.
    stranger = await start(language, service.address, tmp_path / "other.pem")
    refused = await stranger.ask("health", health_pb2.HealthCheckRequest())
    assert grpc.StatusCode.UNAVAILABLE.value[0] == refused.code
    service.kill()


async def test_service_config_retries(start: Start, stage: Stage, language: str) -> None:
    """With the service config a plain stub resends what a lost connection took: the caller sees one good answer."""
    async with ReplyProxy(stage.service.address, scripted(Fate.IS_LOST, Fate.IS_LOST)) as proxy:
        driver = await start(language, proxy.address)
        answer = await driver.ask("decide", decide_request(TABLE, new_key(), FACTS))
        assert (OK, "HIGH", True) == (answer.code, answer.outcome, answer.replayed)
        assert (2, 3, 1) == (proxy.cuts, len(proxy.requests), len(set(proxy.requests)))


async def test_service_config_waits_for_a_connection(start: Start, stage: Stage, language: str) -> None:
    """With the service config a plain stub's call outlasts connections that fail for longer than its retries take."""
    async with ReplyProxy(stage.service.address, refuses=2) as proxy:
        driver = await start(language, proxy.address)
        answer = await driver.ask("decide", decide_request(TABLE, new_key(), FACTS))
        assert (OK, "HIGH", False) == (answer.code, answer.outcome, answer.replayed)
        assert 0 == proxy.refuses


async def test_torn_reply_is_asked_for_again(start: Start, stage: Stage, language: str) -> None:
    """Where a connection ends within a reply, gRPC gives UNAVAILABLE to a plain stub's caller; the example resends."""
    async with ReplyProxy(stage.service.address, scripted(Fate.IS_TORN, Fate.IS_TORN)) as proxy:
        driver = await start(language, proxy.address)
        torn = await driver.ask("decide", decide_request(TABLE, new_key(), FACTS))
        assert grpc.StatusCode.UNAVAILABLE.value[0] == torn.code
        finished = await driver.ask("finish", decide_request(TABLE, new_key(), FACTS), within_s=WITHIN_S)
        assert (OK, "HIGH") == (finished.code, finished.outcome)


async def test_every_caller_has_its_one_decision(start: Start, stage: Stage, view: LedgerView, language: str) -> None:
    """With three replies of ten lost, 5,000 operations are decided once each, told once, and known to their callers."""
    requests = [decide_request(TABLE, new_key(), FACTS | {"n": number}) for number in range(OPERATIONS)]
    keys = [request.operation_key for request in requests]
    began = time.monotonic()
    async with ReplyProxy(stage.service.address, at_random(0.3, seed=1)) as proxy:
        driver = await start(language, proxy.address, workers=WORKERS)
        answers = await asyncio.gather(*(driver.ask("finish", request, within_s=WITHIN_S) for request in requests))
        print(f"{language}: {time.monotonic() - began:.1f} s, {len(proxy.requests)} requests, {proxy.cuts} cuts")
        assert dict.fromkeys(keys, 1) == {key: len(bodies) for key, bodies in bodies_by_key(proxy.requests).items()}
        assert 0.25 < proxy.cuts / len(proxy.requests) < 0.35
    assert {(OK, "DECISION_STATUS_SUCCEEDED")} == {(answer.code, answer.status) for answer in answers}
    assert Counter(HIGH=OPERATIONS - 1, LOW=1) == Counter(answer.outcome for answer in answers)
    assert await view.decisions(keys) == {key: answer.decision_id for key, answer in zip(keys, answers, strict=True)}
    assert dict.fromkeys(keys, 1) == await view.events(keys)


async def run(language: str, address: str, stage: Stage, *arguments: str) -> tuple[int | None, str]:
    """Run a language's example, and give its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAMS[language], *arguments, env=environment(address, stage.token), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    return process.returncode, printed.decode()


async def test_killed_example_goes_on(stage: Stage, view: LedgerView, tmp_path: Path, language: str) -> None:
    """An example that is killed after it sent finishes the same operation, with the same bytes, in its next run."""
    work_file = tmp_path / "work"
    arguments = (str(work_file), TABLE, '{"n": 0, "note": "Zoë", "of": {"b": 1, "a": [2.5, null]}}')
    async with ReplyProxy(stage.service.address) as proxy:
        proxy.hold()
        variables = environment(proxy.address, stage.token)
        first = await asyncio.create_subprocess_exec(*PROGRAMS[language], *arguments, env=variables)
        await until(lambda: proxy.requests)
        key = wire.DecideRequest.FromString(work_file.read_bytes()).operation_key
        await until(lambda: view.decisions([key]))
        first.kill()
        await first.wait()
        proxy.release()
        ended = [await run(language, proxy.address, stage, *arguments) for _ in range(2)]
    decision_id = (await view.decisions([key]))[key]
    assert [(0, f"LOW {decision_id}\n")] * 2 == ended
    assert {work_file.read_bytes()} == set(proxy.requests)


async def test_example_tells_what_is_refused(stage: Stage, tmp_path: Path, language: str) -> None:
    """An example ends with 1 where running it again can't help."""
    refused = await run(language, stage.service.address, stage, str(tmp_path / "work"), "interop.unknown", "{}")
    assert (1, "") == refused
