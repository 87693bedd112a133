"""What the service answers, as frozen Python values. Times are in UTC; a number of JSON is an int where it is whole."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from google.protobuf import struct_pb2, timestamp_pb2

from decideonce.v1 import decision_service_pb2 as wire

_WHOLE_MAX = 2**53 - 1


class DecisionStatus(enum.Enum):
    """The recorded state of an operation key."""

    PROCESSING = wire.DECISION_STATUS_PROCESSING
    SUCCEEDED = wire.DECISION_STATUS_SUCCEEDED
    FAILED_RETRYABLE = wire.DECISION_STATUS_FAILED_RETRYABLE
    FAILED_FINAL = wire.DECISION_STATUS_FAILED_FINAL
    EXPIRED = wire.DECISION_STATUS_EXPIRED


class Execution(enum.Enum):
    """Who evaluates an operation's policy: the call that reserves its key, or a worker in the background."""

    INLINE = wire.EXECUTION_INLINE
    BACKGROUND = wire.EXECUTION_BACKGROUND


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which attempt, policy and facts a recorded answer comes from; the fields are those of the contract."""

    decision_id: UUID
    tenant: str
    operation: str
    operation_key: str
    policy_id: str
    policy_version: int
    policy_digest: str
    fingerprint: str
    reserve_time: datetime
    evaluate_time: datetime | None
    attempt: int
    matched_rules: tuple[str, ...]
    engine: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no decision: the name of an ErrorReason without its prefix, and fixed text for people."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision that is recorded for good.

    `outcome` is never empty. `outputs` is everything else that the policy put out, as JSON has it. `replayed` tells
    that it had been recorded before this call. `replayable_until` and `key_retained_until` are None for "for ever".
    """

    outcome: str
    outputs: dict[str, Any] = field(hash=False)
    reasons: tuple[str, ...]
    replayed: bool
    provenance: Provenance
    replayable_until: datetime | None
    key_retained_until: datetime | None

    @property
    def operation_key(self) -> str:
        """The key that it is recorded under."""
        return self.provenance.operation_key

    @property
    def status(self) -> DecisionStatus:
        """SUCCEEDED, always: what else is recorded is no decision."""
        return DecisionStatus.SUCCEEDED


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is recorded under an operation key.

    `decision` is there with SUCCEEDED, `failure` with FAILED_RETRYABLE and FAILED_FINAL, `retry_after` with PROCESSING
    and FAILED_RETRYABLE.
    """

    status: DecisionStatus
    decision: Decision | None
    failure: Failure | None
    provenance: Provenance | None
    retry_after: timedelta
    replayed: bool
    replayable_until: datetime | None
    key_retained_until: datetime | None


@dataclass(frozen=True, slots=True)
class Operation:
    """The published contract of one operation, as it holds for new keys; the fields are those of the contract.

    `retention` and `tombstone_retention` are None for "for ever". `facts_schema` is JSON Schema (2020-12).
    """

    operation: str
    operation_version: int
    operation_key_pattern: str
    execution: Execution
    default_wait: timedelta
    max_wait: timedelta
    lease: timedelta
    time_budget: timedelta
    max_attempts: int
    retention: timedelta | None
    tombstone_retention: timedelta | None
    fingerprint_version: str
    facts_schema: Any = field(hash=False)
    policy_id: str
    policy_version: int
    policy_digest: str
    request_bytes_max: int
    facts_depth_max: int
    result_bytes_max: int


def recorded_of(answer: wire.DecideResponse | wire.GetDecisionStatusResponse) -> Recorded:
    """Read an answer.

    Raises ValueError for a status that this version doesn't know.
    """
    replayed = isinstance(answer, wire.DecideResponse) and answer.replayed
    status = DecisionStatus(answer.status)
    provenance = _provenance(answer.provenance) if answer.HasField("provenance") else None
    replayable_until = _time(answer.replayable_until) if answer.HasField("replayable_until") else None
    key_retained_until = _time(answer.key_retained_until) if answer.HasField("key_retained_until") else None
    decision = None
    if status is DecisionStatus.SUCCEEDED:
        if provenance is None:
            raise ValueError("a decision without its provenance")
        decision = Decision(
            outcome=answer.decision.outcome,
            outputs=plain(answer.decision.outputs),
            reasons=tuple(answer.decision.reasons),
            replayed=replayed,
            provenance=provenance,
            replayable_until=replayable_until,
            key_retained_until=key_retained_until,
        )
    return Recorded(
        status=status,
        decision=decision,
        failure=Failure(answer.failure.reason, answer.failure.message) if answer.HasField("failure") else None,
        provenance=provenance,
        retry_after=answer.retry_after.ToTimedelta(),
        replayed=replayed,
        replayable_until=replayable_until,
        key_retained_until=key_retained_until,
    )


def operation_of(answer: wire.GetOperationResponse) -> Operation:
    """Read an operation's contract."""
    background = answer.execution == wire.EXECUTION_BACKGROUND
    return Operation(
        operation=answer.operation,
        operation_version=answer.operation_version,
        operation_key_pattern=answer.operation_key_pattern,
        execution=Execution.BACKGROUND if background else Execution.INLINE,
        default_wait=answer.default_wait.ToTimedelta(),
        max_wait=answer.max_wait.ToTimedelta(),
        lease=answer.lease.ToTimedelta(),
        time_budget=answer.time_budget.ToTimedelta(),
        max_attempts=answer.max_attempts,
        retention=answer.retention.ToTimedelta() if answer.HasField("retention") else None,
        tombstone_retention=answer.tombstone_retention.ToTimedelta()
        if answer.HasField("tombstone_retention")
        else None,
        fingerprint_version=answer.fingerprint_version,
        facts_schema=json.loads(answer.facts_schema),
        policy_id=answer.policy_id,
        policy_version=answer.policy_version,
        policy_digest=answer.policy_digest,
        request_bytes_max=answer.request_bytes_max,
        facts_depth_max=answer.facts_depth_max,
        result_bytes_max=answer.result_bytes_max,
    )


def plain(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Read a Struct as JSON has it: dicts, lists, texts, numbers, booleans and None."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() and abs(number) <= _WHOLE_MAX else number
    if kind == "struct_value":
        return plain(value.struct_value)
    if kind == "list_value":
        return [_plain(item) for item in value.list_value.values]
    return None if kind is None or kind == "null_value" else getattr(value, kind)


def _provenance(provenance: wire.Provenance) -> Provenance:
    return Provenance(
        decision_id=UUID(provenance.decision_id),
        tenant=provenance.tenant,
        operation=provenance.operation,
        operation_key=provenance.operation_key,
        policy_id=provenance.policy_id,
        policy_version=provenance.policy_version,
        policy_digest=provenance.policy_digest,
        fingerprint=provenance.fingerprint,
        reserve_time=_time(provenance.reserve_time),
        evaluate_time=_time(provenance.evaluate_time) if provenance.HasField("evaluate_time") else None,
        attempt=provenance.attempt,
        matched_rules=tuple(provenance.matched_rules),
        engine=provenance.engine,
    )


def _time(timestamp: timestamp_pb2.Timestamp) -> datetime:
    return timestamp.ToDatetime(tzinfo=UTC)
