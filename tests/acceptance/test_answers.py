"""What each case answers: code, reason, details and trailers, and what it leaves in the database."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import asyncpg
import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from conftest import connect
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.decision_service_pb2_grpc import add_DecisionServiceServicer_to_server
from decideonce_server import app
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.database import Database, Statement
from decideonce_server.ledger_tokens import PREFIX, TokenStore
from decideonce_server.servicer import DecisionServicer
from decideonce_server.settings import Settings
from harness import (
    Caller,
    CallError,
    call_error,
    decide_request,
    make_token,
    new_key,
    recorded,
    refused,
    status_request,
    table_policy,
    write_catalog,
)
from stage import TENANT, LedgerView, Stage, evaluations

OPERATION = "test.echo"
TRAILERS_MAX = 8192
# RFC 9113, section 6.5.2: what a field's size is counted with.
FIELD_OVERHEAD = 32
WAIT_S = 20.0

STRICT = {
    "type": "object",
    "properties": {"amount": {"type": "integer", "minimum": 1}},
    "required": ["amount"],
    "additionalProperties": False,
}


def operations_and_policies() -> tuple[dict, dict]:
    echo = {"policy": "echo", "time_budget": "10s", "default_wait": "10s"}
    operations = {
        OPERATION: echo,
        "test.short-lease": echo | {"lease": "200ms"},
        "test.short-budget": echo | {"time_budget": "50ms"},
        "test.one-attempt": echo | {"max_attempts": 1},
        "test.kept-an-hour": echo | {"retention": "1h", "tombstone_retention": "1h"},
        "test.background": {"policy": "echo", "execution": "background"},
        "test.strict": {"policy": "table", "facts": STRICT},
        "test.no-policy": {},
    }
    return operations, {"echo": "echo_policy:decide", "table": table_policy("LOW", "HIGH")}


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give an operation for each case."""
    return operations_and_policies()


def trailers_size(error: CallError) -> int:
    """Tell what all trailers of an error take on the wire at most."""
    fields = [("grpc-message", quote(error.text)), ("grpc-status", str(error.code.value[0])), *error.trailers.items()]
    # Bytes travel in base64.
    sizes = (len(value) * 4 // 3 + 4 if isinstance(value, bytes) else len(value) for _, value in fields)
    return sum(len(name) + FIELD_OVERHEAD for name, _ in fields) + sum(sizes)


def seen(error: CallError) -> tuple[grpc.StatusCode, str, dict[str, str], list[str]]:
    """Give what an error says, once it has been checked for what all errors must have."""
    retryable = "grpc-retry-pushback-ms" in error.trailers
    assert trailers_size(error) < TRAILERS_MAX
    assert error.text
    assert retryable is error.retry_after
    return error.code, error.reason, error.metadata, error.fields


# Recorded states: OK with a status.


async def test_first_result_then_replays(stage: Stage, caller: Caller, view: LedgerView) -> None:
    """The first call decides; every later one has the same decision and provenance, and evaluates nothing."""
    key, mark = new_key(), new_key()
    first = await caller.decide(OPERATION, key, {"mark": mark})
    assert (wire.DECISION_STATUS_SUCCEEDED, False) == (first.status, first.replayed)
    before = await view.counts()
    for _ in range(2):
        again = await caller.decide(OPERATION, key, {"mark": mark})
        assert (wire.DECISION_STATUS_SUCCEEDED, True) == (again.status, again.replayed)
        assert recorded(first) == recorded(again)
    status = await caller.status(OPERATION, key)
    assert (wire.DECISION_STATUS_SUCCEEDED, recorded(first)) == (status.status, recorded(status))
    assert before == await view.counts()
    assert 1 == evaluations(stage.service, mark)


async def test_provenance_says_where_a_decision_comes_from(caller: Caller) -> None:
    """A decision names itself, its caller's words, its policy and its attempt."""
    key = new_key()
    provenance = (await caller.decide("test.strict", key, {"amount": 1})).provenance
    assert (TENANT, "test.strict", key, "table", 1, 1) == (
        provenance.tenant,
        provenance.operation,
        provenance.operation_key,
        provenance.policy_id,
        provenance.policy_version,
        provenance.attempt,
    )
    assert 7 == uuid.UUID(provenance.decision_id).version
    for text, prefix in ((provenance.policy_digest, "sha256:"), (provenance.fingerprint, "fp1:sha256:")):
        assert text.startswith(prefix)
        assert 32 == len(bytes.fromhex(text.removeprefix(prefix)))
    assert provenance.engine.startswith("zen-engine/")
    assert provenance.matched_rules
    assert timedelta(0) <= provenance.evaluate_time.ToDatetime() - provenance.reserve_time.ToDatetime()


async def test_another_attempt_is_working(caller: Caller) -> None:
    """While an attempt works, a caller that doesn't wait is told PROCESSING and when to call again."""
    key, facts = new_key(), {"do": "sleep", "seconds": 0.3}
    first = await caller.decide(OPERATION, key, facts, max_wait=0)
    again = await caller.decide(OPERATION, key, facts, max_wait=0)
    status = await caller.status(OPERATION, key)
    for answer in (first, again, status):
        assert wire.DECISION_STATUS_PROCESSING == answer.status
        assert timedelta(0) < answer.retry_after.ToTimedelta() <= timedelta(seconds=30)
        assert not answer.HasField("decision")
    assert (False, False) == (first.replayed, again.replayed)
    assert wire.DECISION_STATUS_SUCCEEDED == (await caller.decide(OPERATION, key, facts)).status


async def test_retry_after_is_not_longer_than_the_lease(caller: Caller, view: LedgerView) -> None:
    """Who is told to call again is never told to wait longer than the lease that is left."""
    key = new_key()
    await caller.decide(OPERATION, key)
    await view.change(key, "state = 1, response = NULL, lease_expires_at = statement_timestamp() + interval '150 ms'")
    answer = await caller.status(OPERATION, key)
    assert timedelta(0) < answer.retry_after.ToTimedelta() <= timedelta(milliseconds=150)


async def test_retryable_failure_is_tried_again(caller: Caller, view: LedgerView) -> None:
    """An evaluation that may be tried again is FAILED_RETRYABLE; the next call makes the next attempt."""
    key, before = new_key(), await view.counts()
    first = await caller.decide("test.short-budget", key, {"do": "sleep", "seconds": 1})
    assert (wire.DECISION_STATUS_FAILED_RETRYABLE, False, 1) == (
        first.status,
        first.replayed,
        first.provenance.attempt,
    )
    assert "POLICY_TIMEOUT" == first.failure.reason
    assert first.retry_after.ToTimedelta() > timedelta(0)
    # No final decision, so no event.
    assert (before[0] + 1, before[1]) == await view.counts()
    status = await caller.status("test.short-budget", key)
    assert (wire.DECISION_STATUS_FAILED_RETRYABLE, first.failure) == (status.status, status.failure)
    again = await caller.decide("test.short-budget", key, {"do": "sleep", "seconds": 1})
    assert (wire.DECISION_STATUS_FAILED_RETRYABLE, False, 2) == (
        again.status,
        again.replayed,
        again.provenance.attempt,
    )
    assert first.provenance.decision_id == again.provenance.decision_id


@pytest.mark.parametrize(
    ("operation", "todo", "reason"),
    [
        (OPERATION, "fail", "POLICY_FAILED"),
        (OPERATION, "nothing", "INVALID_RESULT"),
        ("test.one-attempt", "retry", "ATTEMPTS_EXHAUSTED"),
    ],
)
async def test_final_failure_is_replayed(
    caller: Caller, view: LedgerView, operation: str, todo: str, reason: str
) -> None:
    """An evaluation that can't succeed is FAILED_FINAL with one event; later calls replay it and say so."""
    key, before = new_key(), await view.counts()
    secret = "DE02120300000000202051"
    first = await caller.decide(operation, key, {"do": todo, "iban": secret})
    assert (wire.DECISION_STATUS_FAILED_FINAL, False, reason) == (first.status, first.replayed, first.failure.reason)
    assert first.failure.message
    assert secret not in str(first)
    assert (before[0] + 1, before[1] + 1) == await view.counts()
    again = await caller.decide(operation, key, {"do": todo, "iban": secret})
    assert (wire.DECISION_STATUS_FAILED_FINAL, True, recorded(first)) == (
        again.status,
        again.replayed,
        recorded(again),
    )
    assert first.failure == again.failure
    assert (before[0] + 1, before[1] + 1) == await view.counts()


async def test_background_operation_answers_processing_and_decides(caller: Caller) -> None:
    """A background operation answers PROCESSING at once; its decision comes by polling, and then as a replay."""
    key = new_key()
    first = await caller.decide("test.background", key)
    assert (wire.DECISION_STATUS_PROCESSING, False) == (first.status, first.replayed)
    status = await caller.status("test.background", key, max_wait=10)
    again = await caller.decide("test.background", key)
    assert (wire.DECISION_STATUS_SUCCEEDED, True, recorded(status)) == (again.status, again.replayed, recorded(again))


async def test_lifetimes_are_told(caller: Caller) -> None:
    """A final answer says until when it is replayed and until when its key is remembered; for ever is absent."""
    kept, forever = await caller.decide("test.kept-an-hour", new_key()), await caller.decide(OPERATION, new_key())
    remembered = kept.key_retained_until.ToDatetime() - kept.replayable_until.ToDatetime()
    assert timedelta(hours=1) == remembered
    assert (False, False) == (forever.HasField("replayable_until"), forever.HasField("key_retained_until"))


# Broken contracts: gRPC errors.


async def test_reused_key(caller: Caller, view: LedgerView) -> None:
    """Another request under a used key is ALREADY_EXISTS and tells nothing of what is recorded."""
    key = new_key()
    first = await caller.decide(OPERATION, key, {"outcome": "APPROVED-4711"})
    counts, row = await view.counts(), await view.row(key)
    error = await refused(caller.decide(OPERATION, key, {"outcome": "DENIED"}))
    assert (grpc.StatusCode.ALREADY_EXISTS, "OPERATION_KEY_REUSED", {}, []) == seen(error)
    told = error.text.encode() + error.trailers["grpc-status-details-bin"]
    for stored in ("APPROVED-4711", first.provenance.decision_id, first.provenance.fingerprint, "echo"):
        assert stored.encode() not in told
    assert "new key" in error.text
    assert (counts, row) == (await view.counts(), await view.row(key))


async def test_key_past_its_retention(caller: Caller, view: LedgerView) -> None:
    """A resend after the retention is refused with what is still known; a status call answers EXPIRED."""
    key = new_key()
    first = await caller.decide("test.kept-an-hour", key)
    await view.change(
        key,
        "replayable_until = statement_timestamp(), key_retained_until = statement_timestamp() + interval '1 hour'",
    )
    row = await view.connection.fetchrow("SELECT * FROM ledger WHERE operation_key = $1", key)
    before = await view.counts()
    error = await refused(caller.decide("test.kept-an-hour", key))
    code, reason, metadata, fields = seen(error)
    assert (grpc.StatusCode.FAILED_PRECONDITION, "OPERATION_KEY_EXPIRED", []) == (code, reason, fields)
    assert {"decision_id", "expired_at", "key_retained_until"} == set(metadata)
    assert first.provenance.decision_id == metadata["decision_id"]
    for name, column in (("expired_at", "replayable_until"), ("key_retained_until", "key_retained_until")):
        moment = Timestamp()
        moment.FromJsonString(metadata[name])
        assert row[column].replace(tzinfo=None) == moment.ToDatetime()
    status = await caller.status("test.kept-an-hour", key)
    assert (wire.DECISION_STATUS_EXPIRED, False) == (status.status, status.HasField("decision"))
    assert before == await view.counts()


async def test_key_past_its_retention_that_is_remembered_for_ever(caller: Caller, view: LedgerView) -> None:
    """Where a key is remembered for ever, its expiry says no end."""
    key = new_key()
    await caller.decide("test.kept-an-hour", key)
    await view.change(key, "replayable_until = statement_timestamp(), key_retained_until = NULL")
    error = await refused(caller.decide("test.kept-an-hour", key))
    assert {"decision_id", "expired_at"} == set(seen(error)[2])


async def test_key_past_its_tombstone_is_new(caller: Caller, view: LedgerView) -> None:
    """Once even its tombstone is over, the key is new again."""
    key = new_key()
    first = await caller.decide("test.kept-an-hour", key)
    await view.change(
        key, "replayable_until = statement_timestamp(), key_retained_until = statement_timestamp() + interval '1 us'"
    )
    second = await caller.decide("test.kept-an-hour", key, {"other": 1})
    assert (wire.DECISION_STATUS_SUCCEEDED, False) == (second.status, second.replayed)
    assert first.provenance.decision_id != second.provenance.decision_id


INVALID = grpc.StatusCode.INVALID_ARGUMENT
REFUSED_REQUESTS = {
    "facts": (
        decide_request("test.strict", "", {"amount": 0}),
        (INVALID, "INVALID_FACTS", {"violations": "1"}, ["facts/amount"]),
    ),
    "two facts": (
        decide_request("test.strict", "", {"amount": "1", "iban": "x"}),
        (INVALID, "INVALID_FACTS", {"violations": "2"}, ["facts/amount", "facts/iban"]),
    ),
    "wait": (
        decide_request("test.strict", "", {"amount": 1}, max_wait=-1),
        (INVALID, "INVALID_REQUEST", {}, ["max_wait"]),
    ),
    "version": (
        decide_request("test.strict", "", {"amount": 1}, policy_version=7),
        (grpc.StatusCode.NOT_FOUND, "POLICY_VERSION_NOT_FOUND", {"policy_version": "7"}, []),
    ),
    "version zero": (
        decide_request("test.strict", "", {"amount": 1}, policy_version=0),
        (grpc.StatusCode.NOT_FOUND, "POLICY_VERSION_NOT_FOUND", {"policy_version": "0"}, []),
    ),
    "largest version": (
        decide_request("test.strict", "", {"amount": 1}, policy_version=2**32 - 1),
        (grpc.StatusCode.NOT_FOUND, "POLICY_VERSION_NOT_FOUND", {"policy_version": str(2**32 - 1)}, []),
    ),
}


@pytest.mark.parametrize("case", REFUSED_REQUESTS)
async def test_refused_request_leaves_its_key_free(caller: Caller, view: LedgerView, case: str) -> None:
    """A request that is refused writes no row: the same key then decides a good one."""
    request, expected = REFUSED_REQUESTS[case]
    key, before = new_key(), await view.counts()
    request = wire.DecideRequest.FromString(request.SerializeToString())
    request.operation_key = key
    error = await refused(caller.decide_raw(request.SerializeToString()))
    code, reason, metadata, fields = seen(error)
    assert expected == (code, reason, metadata, sorted(fields))
    assert before == await view.counts()
    good = await caller.decide("test.strict", key, {"amount": 1})
    assert (wire.DECISION_STATUS_SUCCEEDED, False) == (good.status, good.replayed)


async def test_violations_quote_no_value(caller: Caller) -> None:
    """A refusal names places and rules and never the values that broke them."""
    secret = "DE02120300000000202051"
    error = await refused(caller.decide("test.strict", new_key(), {"amount": secret}))
    assert secret.encode() not in error.trailers["grpc-status-details-bin"]
    assert secret not in error.text


@pytest.mark.parametrize(
    ("operation", "code", "reason"),
    [
        ("test.absent", grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND"),
        ("test.no-policy", grpc.StatusCode.FAILED_PRECONDITION, "NO_ACTIVE_POLICY"),
    ],
)
async def test_operation_that_cannot_decide(
    caller: Caller, view: LedgerView, operation: str, code: grpc.StatusCode, reason: str
) -> None:
    """An operation that is unknown or has no policy is named, and the key stays free."""
    key, before = new_key(), await view.counts()
    error = await refused(caller.decide(operation, key))
    assert (code, reason, {"operation": operation}, []) == seen(error)
    assert before == await view.counts()
    assert "DECISION_NOT_FOUND" == (await refused(caller.status(operation, key))).reason


@pytest.mark.parametrize("name", ["", "Test", "test..echo", "test/echo", "a" * 300])
async def test_names_that_no_operation_has(caller: Caller, view: LedgerView, name: str) -> None:
    """What can't be an operation's name is malformed, for each method that takes one."""
    before = await view.counts()
    for call in (caller.decide(name, new_key()), caller.status(name, new_key()), caller.operation(name)):
        error = await refused(call)
        assert (INVALID, "INVALID_REQUEST", {}, ["operation"]) == seen(error)
    assert before == await view.counts()


async def test_operation_contract_of_an_unknown_operation(caller: Caller) -> None:
    """GetOperation of what isn't in the catalog is NOT_FOUND and names it; one without a policy is told."""
    error = await refused(caller.operation("test.absent"))
    expected = (grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND", {"operation": "test.absent"}, [])
    assert expected == seen(error)
    assert "" == (await caller.operation("test.no-policy")).policy_id


async def test_status_of_what_is_not_there_is_one_answer(stage: Stage, caller: Caller, view: LedgerView) -> None:
    """A key never seen, one past its tombstone, another tenant's, and an unknown operation's: the same bytes.

    irzix/nestjs-agentic#126: one tenant could see what another had.
    """
    purged, others = new_key(), new_key()
    await caller.decide("test.kept-an-hour", purged)
    await view.change(purged, "replayable_until = reserve_time, key_retained_until = reserve_time")
    another = Caller(caller.channel, await make_token(stage.url, "globex"))
    await another.decide(OPERATION, others)
    before = await view.counts()
    answers = [
        await refused(caller.status(OPERATION, new_key())),
        await refused(caller.status("test.kept-an-hour", purged)),
        await refused(caller.status(OPERATION, others)),
        await refused(caller.status("test.absent", new_key())),
    ]
    assert (grpc.StatusCode.NOT_FOUND, "DECISION_NOT_FOUND", {}, []) == seen(answers[0])
    assert answers[0].trailers["grpc-status-details-bin"]
    assert [answers[0]] * 3 == answers[1:]
    assert before == await view.counts()


async def test_too_short_deadline_writes_nothing(caller: Caller, view: LedgerView) -> None:
    """A call with too little time to start is refused before a row is written, and says why if its caller still hears.

    The caller's own deadline may end the call first, so it is made until the service's answer came in time.
    """
    before, reason = await view.counts(), ""
    async with asyncio.timeout(WAIT_S):
        while not reason:
            error = await refused(caller.decide(OPERATION, new_key(), timeout=0.045))
            assert grpc.StatusCode.DEADLINE_EXCEEDED == error.code
            reason = error.reason
    assert (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_TOO_SHORT", {}, []) == seen(error)
    assert before == await view.counts()


# Who calls.


async def test_refused_credentials(stage: Stage, caller: Caller, view: LedgerView) -> None:
    """No token, a wrong one, two, another scheme: all are UNAUTHENTICATED with the same text, for every method."""
    key = new_key()
    await caller.decide(OPERATION, key)
    before = await view.counts()
    token_id = stage.token.removeprefix(PREFIX).split("_")[0]
    good = f"Bearer {stage.token}"
    for headers in (
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [f"Basic {stage.token}"],
        [stage.token],
        ["Bearer nonsense"],
        [f"Bearer {PREFIX}{token_id}_wrong"],
        [good + "x"],
        [good, good],
    ):
        stranger = Caller(caller.channel, None)
        stranger.metadata = [("authorization", header) for header in headers]
        for call in (
            stranger.decide(OPERATION, key),
            stranger.status(OPERATION, key),
            stranger.operation(OPERATION),
            stranger.decide_raw(b"\x0a\x00"),
        ):
            assert (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", {}, []) == seen(await refused(call))
    assert before == await view.counts()


async def test_caller_that_is_not_allowed(stage: Stage, caller: Caller, view: LedgerView) -> None:
    """A role or an operation that the caller doesn't have is PERMISSION_DENIED, also on a replay."""
    key = new_key()
    await caller.decide(OPERATION, key)
    before = await view.counts()
    reader, other, admin = [
        Caller(caller.channel, await make_token(stage.url, TENANT, roles, operations))
        for roles, operations in ((("read",), ("*",)), (("decide", "read"), ("other.*",)), (("admin",), ("*",)))
    ]
    for call in (
        reader.decide(OPERATION, key),
        other.decide(OPERATION, key),
        other.status(OPERATION, key),
        other.operation(OPERATION),
        # Absent or not: who may not ask doesn't learn.
        other.decide("test.absent", key),
        admin.decide(OPERATION, key),
        admin.status(OPERATION, key),
    ):
        assert (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", {}, []) == seen(await refused(call))
    assert before == await view.counts()
    assert wire.DECISION_STATUS_SUCCEEDED == (await reader.status(OPERATION, key)).status


async def test_revoked_token_is_refused_within_seconds(stage: Stage, caller: Caller) -> None:
    """A token that was revoked gets no replay any more."""
    token, key = await make_token(stage.url, TENANT), new_key()
    bearer = Caller(caller.channel, token)
    await bearer.decide(OPERATION, key)
    database = Database(stage.url, pool_size=1)
    assert await TokenStore(database).revoke(token.removeprefix(PREFIX).split("_")[0])
    await database.close()
    error = None
    async with asyncio.timeout(2):
        while error is None:
            try:
                await bearer.decide(OPERATION, key)
            except grpc.RpcError as refusal:
                error = call_error(refusal)
    assert (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", {}, []) == seen(error)


# Inside one process: which statements a call makes, and what a defect answers.

SECRET = "4711-0815"


class DefectiveServicer(DecisionServicer):
    """A servicer with a planted defect."""

    async def GetOperation(self, request: wire.GetOperationRequest, context: Any) -> Any:  # noqa: N802  # the contract's name
        raise KeyError(SECRET)


@pytest.fixture
async def inside(database_url, tmp_path, monkeypatch) -> AsyncIterator[tuple[Caller, Caller, list[str]]]:
    """Give a caller, one that may only read, and the names of the statements that were made so far."""
    parts = app.assemble(database_url, Settings(evaluators=2))
    statements: list[str] = []

    run = parts.database.run

    async def noted(statement: Statement, **parameters: Any) -> Any:
        statements.append(statement.name)
        return await run(statement, **parameters)

    monkeypatch.setattr(parts.database, "run", noted)

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(parts.database.close)
        stack.push_async_callback(parts.evaluators.close)
        stack.push_async_callback(parts.waiters.close)
        await parts.evaluators.start()
        operations, policies = operations_and_policies()
        # This process doesn't have the tests' policies, and its calls need the table only.
        directory = write_catalog(
            tmp_path / "catalog", {"test.strict": operations["test.strict"]}, {"table": policies["table"]}
        )
        await parts.apply.apply(read_catalog(directory), applied_by="test")
        await parts.catalog.refresh()
        server = grpc.aio.server(interceptors=app.interceptors(parts))
        servicer = DefectiveServicer(parts.decide, parts.sets, parts.catalog, parts.waiters)
        add_DecisionServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        yield (
            Caller(channel, await parts.tokens.create(TENANT, ["decide"], ["*"])),
            Caller(channel, await parts.tokens.create(TENANT, ["read"], ["*"])),
            statements,
        )


async def test_who_may_not_call_causes_no_look_up(inside) -> None:
    """A call that is refused for its caller looks up the caller and nothing else, also where it would be a replay."""
    caller, reader, statements = inside
    key = new_key()
    await caller.decide("test.strict", key, {"amount": 1})
    statements.clear()
    stranger, nobody = Caller(caller.channel, f"{PREFIX}x_y"), Caller(caller.channel, None)
    for call in (
        stranger.decide("test.strict", key, {"amount": 1}),
        nobody.decide("test.strict", key, {"amount": 1}),
        reader.decide("test.strict", key, {"amount": 1}),
    ):
        await refused(call)
    assert {"token_find"} == set(statements)


async def test_refusals_end_with_a_look_up(inside) -> None:
    """What is refused after the caller is known makes no change behind the refusal; only a mismatch is counted.

    grpc/grpc#30306: what follows an abort goes on where its exception is swallowed.
    """
    caller, _, statements = inside
    key = new_key()
    await caller.decide("test.strict", key, {"amount": 1})
    for call, expected in (
        (lambda: caller.decide("test.strict", key, {"amount": 2}), ["reserve", "mismatch"]),
        (lambda: caller.decide("test.strict", new_key(), {}), ["read"]),
        (lambda: caller.decide("test.absent", new_key()), ["read"]),
        (lambda: caller.decide("test.strict", "short"), []),
        (lambda: caller.status("test.strict", new_key()), ["read"]),
    ):
        statements.clear()
        await refused(call())
        assert expected == [name for name in statements if name != "token_find"]


async def test_defect_is_internal_and_says_nothing(inside, capfd) -> None:
    """A defect answers with fixed text and a correlation id that the log has too.

    d5h-foss/grpc-interceptor PR#43: what a handler raised lost its status on the way.
    """
    caller, _, _ = inside
    error = await refused(caller.operation("test.strict"))
    code, reason, metadata, fields = seen(error)
    assert (grpc.StatusCode.INTERNAL, "INTERNAL", {"correlation_id"}, []) == (code, reason, set(metadata), fields)
    assert 16 == len(metadata["correlation_id"])
    assert SECRET.encode() not in error.text.encode() + error.trailers["grpc-status-details-bin"]
    logged = capfd.readouterr()
    assert metadata["correlation_id"] in logged.out + logged.err
    assert "DecisionService/GetOperation" in logged.out + logged.err


# An unreachable ledger.


@pytest.fixture
async def admin(postgres) -> AsyncIterator[asyncpg.Connection]:
    """Give a session on another database, which stays when the service's is closed."""
    connection = await connect(postgres.url("postgres"))
    yield connection
    await connection.close()


async def test_unreachable_ledger_is_unavailable_and_comes_back(
    database_url, admin, start_service, connect_caller, tmp_path
) -> None:
    """While Postgres can't be reached every call is UNAVAILABLE and says when to retry; afterwards the key decides."""
    directory = write_catalog(tmp_path / "catalog", *operations_and_policies())
    service = start_service("--catalog", str(directory))
    caller = connect_caller(service, await make_token(database_url, TENANT))
    replayed, first = new_key(), new_key()
    known = await caller.decide(OPERATION, replayed)
    name = database_url.database
    await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
    for _ in range(2):
        for call in (
            caller.decide(OPERATION, first),
            caller.decide(OPERATION, replayed),
            caller.status(OPERATION, replayed),
        ):
            error = await refused(call)
            assert (grpc.StatusCode.UNAVAILABLE, "LEDGER_UNAVAILABLE", {}, []) == seen(error)
            assert error.retry_after
            assert 0 < int(error.trailers["grpc-retry-pushback-ms"]) <= 1000
    await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    decided = await caller.decide(OPERATION, first)
    assert (wire.DECISION_STATUS_SUCCEEDED, False) == (decided.status, decided.replayed)
    again = await caller.decide(OPERATION, replayed)
    assert (True, recorded(known)) == (again.replayed, recorded(again))


def test_requests_are_as_callers_send_them() -> None:
    """A request's optional fields are absent unless they are given."""
    assert (False, False) == (
        decide_request(OPERATION, new_key()).HasField("policy_version"),
        status_request(OPERATION, new_key()).HasField("max_wait"),
    )
