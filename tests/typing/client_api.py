"""The client as a caller writes it, for type checkers; it isn't run.

mypy and pyright read it as strictly as they can, as its users may: nothing here is of type Any but JSON's values.
"""

from datetime import datetime, timedelta
from typing import Any, assert_type
from uuid import UUID

import grpc

from decideonce.client import (
    CHANNEL_OPTIONS,
    Decision,
    DecisionClient,
    DecisionFailed,
    DecisionRequest,
    DecisionStatus,
    Execution,
    Failure,
    InvalidFacts,
    Journal,
    Operation,
    OperationKeyExpired,
    OutcomeUnknown,
    Provenance,
    Recorded,
    Resumed,
    RetryPolicy,
    StillProcessing,
    SyncDecisionClient,
    Violation,
    new_operation_key,
    prepare,
)
from decideonce.journal import PostgresJournal
from decideonce.testing import DecideonceServer, Error, LostReply, Outcome, Processing, RetryableFailure


async def with_asyncio(journal: Journal) -> None:
    """Use the client for asyncio."""
    client = DecisionClient("dns:///decisions:443", token=lambda: "t", credentials=grpc.ssl_channel_credentials())
    async with client as entered:
        assert_type(entered, DecisionClient)
    decision = await client.decide(
        "credit.approve-loan",
        {"amount_minor": 120_000, "customer": {"limits": [1, 2.5, None, True]}},
        key=new_operation_key(),
        policy_version=3,
        max_wait=timedelta(seconds=2),
        deadline=10,
        journal=journal,
        metadata={"traceparent": "00-…", "x-bin": b""},
    )
    assert_type(decision, Decision)
    assert_type(decision.outcome, str)
    assert_type(decision.outputs, dict[str, Any])
    assert_type(decision.reasons, tuple[str, ...])
    assert_type(decision.replayed, bool)
    assert_type(decision.provenance, Provenance)
    assert_type(decision.provenance.decision_id, UUID)
    assert_type(decision.provenance.reserve_time, datetime)
    assert_type(decision.replayable_until, datetime | None)
    recorded = await client.status("credit.approve-loan", decision.operation_key, max_wait=1.5)
    assert_type(recorded, Recorded)
    assert_type(recorded.status, DecisionStatus)
    assert_type(recorded.decision, Decision | None)
    assert_type(recorded.failure, Failure | None)
    operation = await client.operation("credit.approve-loan")
    assert_type(operation, Operation)
    assert_type(operation.execution, Execution)
    assert_type(operation.retention, timedelta | None)
    async for resumed in client.resume(journal, older_than=60):
        assert_type(resumed, Resumed)
        assert_type(resumed.decision, Decision | None)
    await client.close()


def with_threads(journal: Journal) -> None:
    """Use the client that blocks."""
    policy = RetryPolicy(tries_max=3, try_timeout_s=1.5)
    with SyncDecisionClient("localhost:50051", retry=policy, options=[("grpc.keepalive_time_ms", 60_000)]) as client:
        request = prepare("credit.approve-loan", {})
        assert_type(request, DecisionRequest)
        assert_type(client.send(request), Decision)
        for resumed in client.resume(journal):
            assert_type(resumed, Resumed)
    channel = grpc.insecure_channel("localhost:50051", options=CHANNEL_OPTIONS)
    SyncDecisionClient(channel)


def errors_have_types(client: SyncDecisionClient) -> Decision | None:
    """Handle errors by their classes."""
    try:
        return client.decide("credit.approve-loan", {})
    except InvalidFacts as error:
        assert_type(error.violations, tuple[Violation, ...])
    except OperationKeyExpired as error:
        assert_type(error.expired_at, datetime | None)
    except DecisionFailed as error:
        assert_type(error.failure, Failure | None)
    except StillProcessing as error:
        assert_type(error.retry_after, timedelta | None)
    except OutcomeUnknown as error:
        assert_type(error.operation_key, str | None)
        assert_type(error.code, grpc.StatusCode | None)
    return None


def for_tests(decideonce_server: DecideonceServer) -> None:
    """Script a service for tests."""
    decideonce_server.decides("credit.approve-loan", Outcome("APPROVED", {"limit": 1}, ["fine"]))
    decideonce_server.decides("credit.approve-loan", lambda facts: Outcome("DENIED" if facts["n"] else "APPROVED"))
    decideonce_server.next(LostReply(), Processing(0.5), RetryableFailure(), Error.overloaded(), None)
    assert_type(decideonce_server.client(deadline=1), DecisionClient)
    assert_type(decideonce_server.sync_client(), SyncDecisionClient)
    assert_type(decideonce_server.calls[0].facts, dict[str, Any])


async def in_postgres(journal: PostgresJournal, connection: Any) -> None:
    """Keep a request in the caller's own transaction."""
    await journal.add(connection, prepare("credit.approve-loan", {}))
    assert_type(await journal.unfinished(connection, limit=10), list[DecisionRequest])
    await journal.remove(connection, "credit.approve-loan", "k" * 16)
