"""What every DecisionService answers, shown on the real one and on the one of `decideonce.testing`."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from decideonce.testing import DecideonceServer, FinalFailure, Outcome, Processing, RetryableFailure
from decideonce.v1 import decision_service_pb2 as wire
from harness import Caller, CallError, decide_request, new_key, recorded, refused, struct
from stage import Stage

OPERATION = "test.echo"
CODE = grpc.StatusCode
INVALID = CODE.INVALID_ARGUMENT
SUCCEEDED, PROCESSING = wire.DECISION_STATUS_SUCCEEDED, wire.DECISION_STATUS_PROCESSING
FAILED_FINAL, FAILED_RETRYABLE = wire.DECISION_STATUS_FAILED_FINAL, wire.DECISION_STATUS_FAILED_RETRYABLE

FAILS = {"do": "fail"}
RETRIES = {"do": "retry"}
TAKES_A_WHILE = {"do": "sleep", "seconds": 0.3}


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give an operation that does what its facts say."""
    return {OPERATION: {"policy": "echo", "default_wait": "5s"}}, {"echo": "echo_policy:decide"}


class Scripted(DecideonceServer):
    """The service of `decideonce.testing`, which does what the facts say too."""

    def __init__(self) -> None:
        super().__init__()
        self.decides(OPERATION, lambda facts: FinalFailure() if facts == FAILS else Outcome("DONE", {"echo": {}}))

    def _decide(self, request: wire.DecideRequest, context: Any) -> bytes:
        if request.facts == struct(TAKES_A_WHILE):
            self.next(Processing(0.3))
        if request.facts == struct(RETRIES):
            self.next(RetryableFailure("POLICY_RETRY_LATER"))
        return super()._decide(request, context)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with Scripted() as server:
        yield server


@pytest.fixture(params=["real", "testing"])
def reached(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Give the address and a token of each service."""
    if request.param == "real":
        stage: Stage = request.getfixturevalue("stage")
        return stage.service.address, stage.token
    server: Scripted = request.getfixturevalue("scripted")
    return server.address, server.token


@pytest.fixture
async def service(reached: tuple[str, str]) -> AsyncIterator[Caller]:
    """Give a caller of each service."""
    address, token = reached
    async with grpc.aio.insecure_channel(address) as channel:
        yield Caller(channel, token)


def seen(error: CallError) -> tuple[grpc.StatusCode, str, dict[str, str], list[str]]:
    """Give what an error says; all have a text, and what can be retried says when in both ways."""
    assert error.text
    assert error.retry_after is ("grpc-retry-pushback-ms" in error.trailers)
    return error.code, error.reason, error.metadata, error.fields


async def test_original_and_replay(service: Caller) -> None:
    """A decision is made once, and its replay is the same, byte for byte."""
    key = new_key()
    original = await service.decide(OPERATION, key, {"n": 1})
    replay = await service.decide(OPERATION, key, {"n": 1})
    assert [(SUCCEEDED, False), (SUCCEEDED, True)] == [(one.status, one.replayed) for one in (original, replay)]
    assert recorded(original) == recorded(replay)
    provenance = original.provenance
    assert (OPERATION, key, 1, "7") == (
        provenance.operation,
        provenance.operation_key,
        provenance.attempt,
        provenance.decision_id[14],
    )
    assert provenance.fingerprint.startswith("fp1:sha256:")
    assert provenance.policy_digest.startswith("sha256:")
    assert provenance.HasField("reserve_time")
    assert provenance.HasField("evaluate_time")
    assert not original.HasField("retry_after")


@pytest.mark.parametrize(
    ("fields", "is_same"),
    [
        ({"facts": {"b": [1, "x"], "a": 0}}, True),
        ({"facts": {"a": -0.0, "b": [1.0, "x"]}}, True),
        ({"facts": {"a": 0, "b": [1, "x"]}, "max_wait": 1}, True),
        ({"facts": {"a": 0, "b": ["x", 1]}}, False),
        ({"facts": {"a": 0, "b": [1, "x"], "c": None}}, False),
        ({"facts": {"a": False, "b": [1, "x"]}}, False),
        ({"facts": {"a": 0, "b": ["1", "x"]}}, False),
        ({"facts": {"a": 0, "b": [1, "x"]}, "policy_version": 1}, False),
    ],
)
async def test_what_makes_two_requests_one(service: Caller, fields: dict[str, Any], is_same: bool) -> None:
    """Order of members, spelling of numbers and waiting are no part of a request; everything else is."""
    key = new_key()
    await service.decide(OPERATION, key, {"a": 0, "b": [1, "x"]})
    if is_same:
        assert (await service.decide(OPERATION, key, **fields)).replayed
    else:
        expected = (CODE.ALREADY_EXISTS, "OPERATION_KEY_REUSED", {}, [])
        assert expected == seen(await refused(service.decide(OPERATION, key, **fields)))


async def test_decision_that_takes_a_while(service: Caller) -> None:
    """Who doesn't wait is told PROCESSING and when to ask again; who waits gets what is decided."""
    key = new_key()
    first = await service.decide(OPERATION, key, TAKES_A_WHILE, max_wait=0)
    assert (PROCESSING, False, True) == (first.status, first.replayed, first.HasField("retry_after"))
    assert not first.HasField("decision")
    asked = await service.status(OPERATION, key)
    assert PROCESSING == asked.status
    polled, resent = await asyncio.gather(
        service.status(OPERATION, key, max_wait=10), service.decide(OPERATION, key, TAKES_A_WHILE, max_wait=10)
    )
    assert (SUCCEEDED, SUCCEEDED, True) == (polled.status, resent.status, resent.replayed)
    assert recorded(polled) == recorded(resent)


async def test_answer_comes_before_the_deadline(service: Caller) -> None:
    """A caller with little time gets PROCESSING in time, and no broken call."""
    answer = await service.decide(OPERATION, new_key(), TAKES_A_WHILE, timeout=0.2)
    assert PROCESSING == answer.status


async def test_final_failure(service: Caller) -> None:
    """A policy that fails is recorded as FAILED_FINAL, and replayed with its failure."""
    key = new_key()
    answers = [await service.decide(OPERATION, key, FAILS) for _ in range(2)]
    assert [(FAILED_FINAL, False), (FAILED_FINAL, True)] == [(one.status, one.replayed) for one in answers]
    assert ["POLICY_FAILED"] * 2 == [one.failure.reason for one in answers]
    assert answers[0].failure == (await service.status(OPERATION, key)).failure
    assert not answers[0].HasField("decision")


async def test_attempt_that_fails(service: Caller) -> None:
    """A policy that asks for a retry is recorded as such, with when; each call makes another attempt."""
    key = new_key()
    answers = [await service.decide(OPERATION, key, RETRIES) for _ in range(2)]
    answers.append(await service.status(OPERATION, key))
    assert [(FAILED_RETRYABLE, "POLICY_RETRY_LATER", True)] * 3 == [
        (one.status, one.failure.reason, one.HasField("retry_after")) for one in answers
    ]
    assert [1, 2, 2] == [one.provenance.attempt for one in answers]
    assert [False, False] == [one.replayed for one in answers[:2]]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (decide_request(OPERATION, "short"), (INVALID, "INVALID_OPERATION_KEY", {}, ["operation_key"])),
        (decide_request(OPERATION, "k" * 129), (INVALID, "INVALID_OPERATION_KEY", {}, ["operation_key"])),
        (decide_request(OPERATION, "sixteen chars ü."), (INVALID, "INVALID_OPERATION_KEY", {}, ["operation_key"])),
        (decide_request("", "k" * 16), (INVALID, "INVALID_REQUEST", {}, ["operation"])),
        (decide_request("No Name", "k" * 16), (INVALID, "INVALID_REQUEST", {}, ["operation"])),
        (decide_request(OPERATION, "k" * 16, max_wait=-1), (INVALID, "INVALID_REQUEST", {}, ["max_wait"])),
        (
            decide_request("test.absent", "k" * 16),
            (CODE.NOT_FOUND, "OPERATION_NOT_FOUND", {"operation": "test.absent"}, []),
        ),
        (
            decide_request(OPERATION, "k" * 16, policy_version=7),
            (CODE.NOT_FOUND, "POLICY_VERSION_NOT_FOUND", {"policy_version": "7"}, []),
        ),
    ],
)
async def test_requests_that_are_refused(service: Caller, request_, expected) -> None:
    """What is malformed, or names what isn't there, is refused by its reason and field, and takes no key."""
    assert expected == seen(await refused(service.decide_raw(request_.SerializeToString())))
    if 16 <= len(request_.operation_key) <= 128 and request_.operation_key.isascii():
        expected = (CODE.NOT_FOUND, "DECISION_NOT_FOUND", {}, [])
        assert expected == seen(await refused(service.status(OPERATION, request_.operation_key)))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 2.0**53, "a\0b"])
async def test_facts_that_are_not_exact(service: Caller, value: Any) -> None:
    """A value that some reader would lose or change is refused."""
    error = await refused(service.decide(OPERATION, new_key(), {"a": value}))
    assert (INVALID, "INVALID_FACTS", {"violations": "1"}) == seen(error)[:3]


@pytest.mark.parametrize(
    ("data", "reason", "metadata"),
    [
        (b"\xff\xff\xff", "INVALID_REQUEST", {}),
        (b"\xfa\x01\x01x", "UNKNOWN_FIELD", {"field_number": "31"}),
    ],
)
async def test_bytes_that_are_no_request(service: Caller, data: bytes, reason: str, metadata: dict[str, str]) -> None:
    """What is no message of its type, or has a field that the contract doesn't know, is refused."""
    whole = decide_request(OPERATION, new_key()).SerializeToString() + data
    assert (INVALID, reason, metadata) == seen(await refused(service.decide_raw(whole)))[:3]


async def test_status_of_a_key_that_was_never_used(service: Caller) -> None:
    """A key that nothing is recorded under is not found."""
    assert (CODE.NOT_FOUND, "DECISION_NOT_FOUND", {}, []) == seen(await refused(service.status(OPERATION, new_key())))


async def test_status_is_what_is_recorded(service: Caller) -> None:
    """A status has the recorded decision, byte for byte."""
    key = new_key()
    decided = await service.decide(OPERATION, key)
    assert recorded(decided) == recorded(await service.status(OPERATION, key))


async def test_callers_without_credentials(service: Caller) -> None:
    """Who has no valid token is told so, on every method, and nothing else."""
    stranger = Caller(service.channel, "do_0000_stranger")
    for call in (stranger.decide(OPERATION, new_key()), stranger.status(OPERATION, new_key()), stranger.operation("a")):
        assert (CODE.UNAUTHENTICATED, "UNAUTHENTICATED", {}, []) == seen(await refused(call))


async def test_contract_of_an_operation(service: Caller) -> None:
    """An operation's contract has everything that a caller needs; one that isn't there is named."""
    contract = await service.operation(OPERATION)
    assert (OPERATION, 1, "[A-Za-z0-9._~:-]{16,128}", "fp1") == (
        contract.operation,
        contract.operation_version,
        contract.operation_key_pattern,
        contract.fingerprint_version,
    )
    assert (1024 * 1024, 30, 512 * 1024, 1) == (
        contract.request_bytes_max,
        contract.facts_depth_max,
        contract.result_bytes_max,
        contract.policy_version,
    )
    assert all(contract.HasField(name) for name in ("default_wait", "max_wait", "lease", "time_budget"))
    expected = (CODE.NOT_FOUND, "OPERATION_NOT_FOUND", {"operation": "test.absent"}, [])
    assert expected == seen(await refused(service.operation("test.absent")))


async def test_request_that_is_too_large(service: Caller) -> None:
    """What is larger than a request may be is gRPC's to refuse, without a reason of the service's."""
    error = await refused(service.decide(OPERATION, new_key(), {"text": "x" * 1024 * 1024}))
    assert (CODE.RESOURCE_EXHAUSTED, "") == (error.code, error.reason)
