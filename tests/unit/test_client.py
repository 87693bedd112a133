"""Both clients against a service of `decideonce.testing`, over gRPC."""

import asyncio
import dataclasses
import inspect
import json
import math
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from decideonce import client as public
from decideonce import errors
from decideonce.client import DecisionClient, DecisionStatus, Journal, RetryPolicy, SyncDecisionClient, prepare
from decideonce.testing import DecideonceServer, Error, FinalFailure, LostReply, Outcome, Processing, RetryableFailure
from processes import free_address, until

OPERATION = "credit.approve-loan"
FACTS = {"amount_minor": 120_000}
QUICK = RetryPolicy(backoff_initial_s=0.01)


class Awaited:
    """The client that blocks, called as if it were the other."""

    def __init__(self, client: SyncDecisionClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *arguments, **options: asyncio.to_thread(method, *arguments, **options)

    async def resume(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        for resumed in await asyncio.to_thread(lambda: list(self._client.resume(*arguments, **options))):
            yield resumed


@pytest.fixture
def server(decideonce_server: DecideonceServer) -> DecideonceServer:
    decideonce_server.decides(OPERATION, Outcome("APPROVED", {"limit": 5000, "rate": 0.5, "tags": ["a"]}, ["fine"]))
    return decideonce_server


@pytest.fixture(params=["asyncio", "sync"])
async def client(request, server: DecideonceServer) -> AsyncIterator[Any]:
    if request.param == "asyncio":
        async with server.client(retry=QUICK) as made:
            yield made
    else:
        with server.sync_client(retry=QUICK) as made:
            yield Awaited(made)


async def test_decision_is_frozen_and_typed(server, client) -> None:
    """A decision has its outcome, its outputs as JSON has them, and where it comes from, and can't be changed."""
    key = "8d7f1b9e-0c0a-4a53-9f7e-2f4f6f0a1c11"
    decision = await client.decide(OPERATION, FACTS, key=key, metadata={"x-request": "1", "x-bin": b"\xff"})
    assert ("APPROVED", ("fine",), False) == (decision.outcome, decision.reasons, decision.replayed)
    assert {"limit": 5000, "rate": 0.5, "tags": ["a"]} == decision.outputs
    assert "[5000, 0.5]" == json.dumps([decision.outputs["limit"], decision.outputs["rate"]])
    assert (key, "test", 7) == (
        decision.operation_key,
        decision.provenance.tenant,
        decision.provenance.decision_id.version,
    )
    assert (DecisionStatus.SUCCEEDED, None) == (decision.status, decision.replayable_until)
    assert timedelta(0) == decision.provenance.reserve_time.utcoffset()
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.outcome = "DENIED"
    (call,) = server.calls
    assert (FACTS, "1", b"\xff") == (call.facts, call.metadata["x-request"], call.metadata["x-bin"])


async def test_lost_replies_cost_no_second_decision(server, client) -> None:
    """However often a reply gets lost, all sends have one key and the same bytes, and the recorded decision is given.

    googleapis/google-cloud-ruby PR#1572: UNAVAILABLE was taken for "never executed".
    """
    server.next(LostReply(), LostReply())
    decision = await client.decide(OPERATION, FACTS)
    assert (True, 1) == (decision.replayed, server.decided)
    assert 3 == len(server.calls)
    assert {(decision.operation_key, server.calls[0].request)} == {(c.operation_key, c.request) for c in server.calls}


@pytest.mark.parametrize("kind", [DecisionClient, SyncDecisionClient])
async def test_facts_that_change_between_sends(server, kind) -> None:
    """A caller that changes its facts while they are sent again changes nothing of what is sent."""
    given: dict[str, Any] = {"limits": [1]}

    def token() -> str:
        given["limits"].append(2)
        given["more"] = True
        return server.token

    server.next(LostReply(), Error.unavailable())
    made = kind(server.address, token=token, retry=QUICK)
    decided = (
        made.decide(OPERATION, given) if kind is DecisionClient else asyncio.to_thread(made.decide, OPERATION, given)
    )
    assert "APPROVED" == (await decided).outcome
    assert [{"limits": [1]}] * 3 == [call.facts for call in server.calls]
    await asyncio.ensure_future(made.close()) if kind is DecisionClient else made.close()


async def test_decision_that_takes_a_while(server, client) -> None:
    """A decision under way is waited for, and is nobody's replay."""
    server.next(Processing(0.2))
    decision = await client.decide(OPERATION, FACTS, max_wait=0.2)
    assert ("APPROVED", False) == (decision.outcome, decision.replayed)
    assert {"Decide"} == {call.method for call in server.calls}


async def test_decision_that_is_polled(server, client) -> None:
    """A decision that the service doesn't wait for is polled until it is there."""
    server.next(Processing(math.inf))
    with pytest.raises(errors.StillProcessing) as raised:
        await client.decide(OPERATION, FACTS, max_wait=0)
    key = raised.value.operation_key
    waiting = asyncio.ensure_future(client.decide(OPERATION, FACTS, key=key, deadline=10))
    await until(lambda: "GetDecisionStatus" in [call.method for call in server.calls])
    server.finish(OPERATION, key)
    assert "APPROVED" == (await waiting).outcome
    assert 1 == server.decided


async def test_deadline_bounds_everything(server, client) -> None:
    """A decision that takes for ever ends the call at its deadline, and the same key asks for it later."""
    server.next(Processing(math.inf))
    begun = time.monotonic()
    with pytest.raises(errors.StillProcessing) as raised:
        await client.decide(OPERATION, FACTS, deadline=0.5)
    assert time.monotonic() - begun < 1.5
    server.finish(OPERATION, raised.value.operation_key)
    assert (await client.decide(OPERATION, FACTS, key=raised.value.operation_key)).replayed


async def test_attempts_that_fail(server, client) -> None:
    """An attempt that fails is followed by another, until one decides."""
    server.next(RetryableFailure(), RetryableFailure(), None)
    decision = await client.decide(OPERATION, FACTS)
    assert (3, False) == (decision.provenance.attempt, decision.replayed)
    server.next(RetryableFailure(retry_after_s=60.0))
    with pytest.raises(errors.FailedRetryable) as raised:
        await client.decide(OPERATION, FACTS, deadline=5)
    recorded = await client.status(OPERATION, raised.value.operation_key)
    assert (DecisionStatus.FAILED_RETRYABLE, timedelta(seconds=60)) == (recorded.status, recorded.retry_after)


async def test_final_failures_are_replayed(server, client) -> None:
    """A failure that is recorded for good is raised again by the same key, as replayed."""
    server.decides(OPERATION, lambda facts: FinalFailure() if facts["n"] else Outcome("APPROVED"))
    with pytest.raises(errors.DecisionFailed, match="POLICY_FAILED") as first:
        await client.decide(OPERATION, {"n": 1})
    with pytest.raises(errors.DecisionFailed) as again:
        await client.decide(OPERATION, {"n": 1}, key=first.value.operation_key)
    assert (False, True) == (first.value.replayed, again.value.replayed)
    assert first.value.provenance == again.value.provenance


async def test_a_key_is_for_one_request(server, client) -> None:
    """Other facts under a key are refused at once, and so is a key that the grammar hasn't."""
    decision = await client.decide(OPERATION, FACTS)
    for other in ({"facts": {"amount_minor": 1}}, {"facts": FACTS, "policy_version": 1}):
        with pytest.raises(errors.OperationKeyReused):
            await client.decide(OPERATION, key=decision.operation_key, **other)
    assert (3, 1) == (len(server.calls), server.decided)


async def test_service_that_has_too_much_to_do(server, client) -> None:
    """What the service sheds comes back when it says, and not before."""
    server.next(Error.overloaded(0.1), Error.unavailable(0.1))
    await client.decide(OPERATION, FACTS)
    first, second, third = (call.time for call in server.calls)
    assert min(second - first, third - second) >= 0.1


async def test_defect_is_not_tried_again(server, client) -> None:
    """INTERNAL ends the call, with what the service's log has."""
    server.next(Error.internal())
    with pytest.raises(errors.InternalError) as raised:
        await client.decide(OPERATION, FACTS)
    assert (1, 16) == (len(server.calls), len(raised.value.correlation_id))


async def test_details_of_8_kb(server, client) -> None:
    """An error with 8 KB of details arrives whole."""
    text = "x" * 8 * 1024
    server.next(Error(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FACTS", "No.", {"text": text}))
    with pytest.raises(errors.InvalidFacts) as raised:
        await client.decide(OPERATION, FACTS)
    assert {"text": text} == raised.value.metadata


async def test_request_that_is_too_large(server, client) -> None:
    """What gRPC finds too large isn't sent again: no ErrorInfo says that it could help."""
    with pytest.raises(errors.Refused, match="RESOURCE_EXHAUSTED") as raised:
        await client.decide(OPERATION, {"text": "x" * 1024 * 1024})
    assert (errors.Refused, []) == (type(raised.value), server.calls)


async def test_status_and_operation(server, client) -> None:
    """What is recorded, and an operation's contract, are told; what isn't there is said so."""
    decision = await client.decide(OPERATION, FACTS)
    recorded = await client.status(OPERATION, decision.operation_key)
    assert (DecisionStatus.SUCCEEDED, decision) == (recorded.status, recorded.decision)
    contract = await client.operation(OPERATION)
    assert (OPERATION, timedelta(seconds=0.5), None) == (contract.operation, contract.default_wait, contract.retention)
    assert {"type": "object"} == contract.facts_schema
    with pytest.raises(errors.DecisionNotFound):
        await client.status(OPERATION, "0" * 16)
    with pytest.raises(errors.OperationNotFound) as raised:
        await client.operation("no.such")
    assert {"operation": "no.such"} == raised.value.metadata
    with pytest.raises(errors.InvalidOperationKey):
        await client.status(OPERATION, "short")


async def test_journal_is_resumed(server, client, tmp_path: Path) -> None:
    """What a caller left unfinished is finished with the same bytes, and told once."""
    journal = Journal(tmp_path / "journal")
    request = prepare(OPERATION, FACTS)
    journal.add(request)
    server.next(Processing(math.inf))
    with pytest.raises(errors.StillProcessing) as raised:
        await client.decide(OPERATION, {"n": 2}, max_wait=0, journal=journal)
    first, second = [resumed async for resumed in client.resume(journal, deadline=0.2)]
    assert (request, "APPROVED", None) == (first.request, first.decision.outcome, first.error)
    assert (raised.value.operation_key, None) == (second.request.operation_key, second.decision)
    assert isinstance(second.error, errors.StillProcessing)
    server.finish(OPERATION, second.request.operation_key)
    (last,) = [resumed async for resumed in client.resume(journal)]
    assert (second.request, True) == (last.request, last.decision.replayed)
    assert {request.body, second.request.body} == {call.request for call in server.calls if call.method == "Decide"}
    assert [] == journal.unfinished()


async def test_wrong_token(server) -> None:
    """A caller without valid credentials is refused at once."""
    async with DecisionClient(server.address, token="no") as stranger:
        with pytest.raises(errors.Unauthenticated):
            await stranger.decide(OPERATION, FACTS)
    assert 1 == len(server.calls)


async def test_tenant_of_any_script() -> None:
    """A tenant's name is text of any script."""
    with DecideonceServer(tenant="büro-東京") as server:
        server.decides(OPERATION, Outcome("APPROVED"))
        async with server.client() as made:
            assert "büro-東京" == (await made.decide(OPERATION, FACTS)).provenance.tenant


async def test_unix_socket(tmp_path: Path) -> None:
    """A service on a Unix socket is as good as one on loopback, and needs no TLS."""
    with DecideonceServer(listen=f"unix:{tmp_path}/socket") as server:
        server.decides(OPERATION, Outcome("APPROVED"))
        async with server.client() as made:
            assert "APPROVED" == (await made.decide(OPERATION, FACTS)).outcome


@pytest.mark.parametrize("kind", [DecisionClient, SyncDecisionClient])
async def test_tls(kind) -> None:
    """Over TLS a token is sent to whom the given authority vouches for, and to nobody else."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    (chain,) = certificate.cert_chain_pems
    credentials = grpc.ssl_server_credentials([(certificate.private_key_pem.bytes(), chain.bytes())])
    trusting = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with DecideonceServer(listen="localhost:0", credentials=credentials) as server:
        server.decides(OPERATION, Outcome("APPROVED"))
        for channel_credentials, expected in ((trusting, "APPROVED"), (grpc.ssl_channel_credentials(), "UNAVAILABLE")):
            made = kind(server.address, token=server.token, credentials=channel_credentials)
            assert expected == await outcome(made)
        assert 1 == len(server.calls)


async def outcome(client: DecisionClient | SyncDecisionClient) -> str:
    """Give the outcome of a decision, or the code of the error that it ends with, and close the client."""
    try:
        if isinstance(client, SyncDecisionClient):
            with client:
                return (await asyncio.to_thread(client.decide, OPERATION, FACTS, deadline=2)).outcome
        async with client:
            return (await client.decide(OPERATION, FACTS, deadline=2)).outcome
    except errors.DecideonceError as error:
        return error.code.name


async def test_service_that_is_not_there() -> None:
    """A service that can't be reached ends the call within its deadline, with the key."""
    begun = time.monotonic()
    async with DecisionClient(free_address(), token="t") as made:
        with pytest.raises(errors.Unavailable) as raised:
            await made.decide(OPERATION, FACTS, deadline=0.3)
    assert raised.value.operation_key is not None
    assert time.monotonic() - begun < 2.0


async def test_channel_of_the_callers_own(server) -> None:
    """A channel that is given is used, and stays open."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        async with DecisionClient(channel, token=server.token) as made:
            first = await made.decide(OPERATION, FACTS)
        again = await DecisionClient(channel, token=server.token).decide(OPERATION, FACTS, key=first.operation_key)
        assert again.replayed


async def test_cancelling_ends_the_wait(server) -> None:
    """A caller that is cancelled isn't held up, and its decision is made all the same."""
    server.next(Processing(math.inf))
    async with server.client() as made:
        waiting = asyncio.ensure_future(made.decide(OPERATION, FACTS))
        await until(lambda: server.decided)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        (call,) = server.calls
        server.finish(OPERATION, call.operation_key)
        assert (await made.decide(OPERATION, FACTS, key=call.operation_key)).replayed


def test_threads_share_a_client(server) -> None:
    """One client that blocks serves many threads at once."""
    barrier = threading.Barrier(16)
    with server.sync_client() as made, ThreadPoolExecutor(16) as threads:

        def decide(_: int) -> str:
            barrier.wait(10)
            return made.decide(OPERATION, FACTS).operation_key

        assert 16 == len(set(threads.map(decide, range(16))))


@pytest.mark.parametrize(
    ("service", "is_safe"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:50051", True),
        ("localhost", True),
        ("[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("dns:localhost:50051", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:2", True),
        ("ipv6:[::1]:1", True),
        ("unix:/run/decideonce", True),
        ("unix-abstract:decideonce", True),
        ("decisions:50051", False),
        ("10.0.0.1:50051", False),
        ("localhost.example:50051", False),
        ("dns:///decisions:50051", False),
        ("dns://127.0.0.1/decisions:50051", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:2", False),
        ("xds:///decisions", False),
    ],
)
def test_token_is_not_sent_for_everybody_to_read(service: str, is_safe: bool) -> None:
    """A token needs TLS, or this machine, or somebody who says that it doesn't."""
    if is_safe:
        SyncDecisionClient(service, token="t")
    else:
        with pytest.raises(errors.InvalidRequest, match="credentials must be given with a token"):
            SyncDecisionClient(service, token="t")
    SyncDecisionClient(service)
    SyncDecisionClient(service, token="t", allow_plaintext_token=True)
    SyncDecisionClient(service, token="t", credentials=grpc.ssl_channel_credentials())


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"X-Request": "1"}, "metadata"),
        ({"büro": "1"}, "metadata"),
        ({"": "1"}, "metadata"),
        ({1: "1"}, "metadata"),
        ({"x-tenant": "büro"}, "metadata.x-tenant"),
        ({"x-tenant": "a\nb"}, "metadata.x-tenant"),
        ({"x-tenant": b"a"}, "metadata.x-tenant"),
        ({"x-bin": "a"}, "metadata.x-bin"),
        ({"grpc-timeout": "1S"}, "metadata.grpc-timeout"),
        ({"authorization": "Bearer x"}, "metadata.authorization"),
        ({"x-large": "x" * 5000}, "metadata"),
    ],
)
async def test_wrong_metadata_is_not_sent(server, client, metadata, field, tmp_path) -> None:
    """Metadata that gRPC can't carry, or that isn't the caller's, is refused by name; nothing is sent or kept."""
    journal = Journal(tmp_path / "journal")
    with pytest.raises(errors.InvalidRequest) as raised:
        await client.decide(OPERATION, FACTS, metadata=metadata, journal=journal)
    assert [field] == [violation.field for violation in raised.value.violations]
    assert ([], []) == (server.calls, journal.unfinished())


async def test_token_that_is_none(server) -> None:
    """A token with a line's end, as files have, is refused, and stands in no text."""
    async with DecisionClient(server.address, token="secret\n") as made:
        with pytest.raises(errors.InvalidRequest, match="token must be") as raised:
            await made.decide(OPERATION, FACTS)
    assert "secret" not in str(raised.value)


def test_both_clients_have_the_same_methods() -> None:
    """What one client has the other has, with the same arguments."""
    twins = {"__aenter__": "__enter__", "__aexit__": "__exit__"}
    of_async = {name: value for name, value in vars(DecisionClient).items() if inspect.isfunction(value)}
    of_sync = {name: value for name, value in vars(SyncDecisionClient).items() if inspect.isfunction(value)}
    assert {twins.get(name, name) for name in of_async} == set(of_sync)
    for name, method in of_async.items():
        one, other = inspect.signature(method), inspect.signature(of_sync[twins.get(name, name)])
        assert list(one.parameters.values()) == list(other.parameters.values())


def test_public_names() -> None:
    """The client's public names are these; one more or less is a change that its users see."""
    assert sorted(errors.__all__) == sorted(set(public.__all__) & set(errors.__all__))
    assert [
        "CHANNEL_OPTIONS",
        "DEADLINE_S",
        "Decision",
        "DecisionClient",
        "DecisionRequest",
        "DecisionStatus",
        "Execution",
        "Failure",
        "Journal",
        "Operation",
        "Provenance",
        "Recorded",
        "Resumed",
        "RetryPolicy",
        "SyncDecisionClient",
        "new_operation_key",
        "prepare",
    ] == sorted(set(public.__all__) - set(errors.__all__))
    assert all(hasattr(public, name) for name in public.__all__)
