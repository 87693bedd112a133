"""What is recorded when an attempt ends: the response, as the bytes that every answer has, and the events."""

import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from google.protobuf import timestamp_pb2
from uuid_utils.compat import uuid7

from decideonce.events import RECORDED_EVENT_TYPE
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1 import error_reason_pb2 as reasons
from decideonce.v1 import events_pb2
from decideonce_server import outbox, tracing, values
from decideonce_server.catalog import OperationContract
from decideonce_server.fingerprint import fingerprint_text
from decideonce_server.ledger import Attempt, Completion, Record, State
from decideonce_server.policy import Effect, Evaluation, PolicyVersion

FAILURE_MESSAGES = {
    reasons.ERROR_REASON_POLICY_TIMEOUT: "The policy did not end within the operation's time budget.",
    reasons.ERROR_REASON_POLICY_CRASHED: "The policy's evaluator died.",
    reasons.ERROR_REASON_POLICY_RETRY_LATER: "The policy can't decide yet.",
    reasons.ERROR_REASON_POLICY_FAILED: "The policy could not decide on these facts.",
    reasons.ERROR_REASON_INVALID_RESULT: "The policy gave no valid result.",
    reasons.ERROR_REASON_RESULT_TOO_LARGE: "The policy's result is larger than a decision may be.",
    reasons.ERROR_REASON_ATTEMPTS_EXHAUSTED: "Every attempt that the operation allows was used up.",
    reasons.ERROR_REASON_INTERNAL: "The service had a defect.",
}


def reason_name(reason: reasons.ErrorReason.ValueType) -> str:
    """Give a reason's name as it is sent: without the enum's prefix."""
    return reasons.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no decision. A retryable one says when another attempt is due, where workers make it."""

    reason: reasons.ErrorReason.ValueType
    retryable: bool = False
    retry_after: timedelta | None = None


# A client takes 4 MB at most unless it is told otherwise, and brokers take events of 1 MB; JSON makes them longer.
RESULT_BYTES_MAX = 512 * 1024

RESULT_TOO_LARGE = Failure(reasons.ERROR_REASON_RESULT_TOO_LARGE)
ATTEMPTS_EXHAUSTED = Failure(reasons.ERROR_REASON_ATTEMPTS_EXHAUSTED)


def database_now(attempt: Attempt) -> datetime:
    """Tell the time by Postgres's clock: when the attempt began, carried forward by this process's monotonic clock."""
    return attempt.record.read_time + timedelta(seconds=time.monotonic() - attempt.began)


def completion(
    attempt: Attempt,
    contract: OperationContract,
    policy: PolicyVersion,
    end: Evaluation | Failure,
) -> Completion:
    """Make what is recorded of an attempt that ended with an evaluation or a failure."""
    record = attempt.record
    provenance = _provenance(record, policy, database_now(attempt))
    response = wire.DecideResponse(provenance=provenance)
    effects: tuple[Effect, ...] = ()
    retry_after = None
    if isinstance(end, Evaluation):
        response.status = wire.DECISION_STATUS_SUCCEEDED
        response.provenance.engine = end.engine
        response.provenance.matched_rules.extend(end.matched_rules)
        response.decision.outcome = end.outcome
        response.decision.outputs.CopyFrom(values.to_struct(end.outputs))
        response.decision.reasons.extend(end.reasons)
        effects = end.effects
    else:
        response.status = wire.DECISION_STATUS_FAILED_RETRYABLE if end.retryable else wire.DECISION_STATUS_FAILED_FINAL
        response.failure.reason = reason_name(end.reason)
        response.failure.message = FAILURE_MESSAGES[end.reason]
        retry_after = end.retry_after
    state = State(response.status)
    return Completion(
        key=record.key,
        decision_id=record.decision_id,
        attempt=record.attempt,
        state=state,
        response=response.SerializeToString(deterministic=True),
        retention=contract.retention,
        tombstone_retention=contract.tombstone_retention,
        retry_after=retry_after,
        events=_events(record, contract.topic, response, effects) if state.is_final else (),
    )


def _provenance(record: Record, policy: PolicyVersion, evaluate_time: datetime) -> wire.Provenance:
    return wire.Provenance(
        decision_id=str(record.decision_id),
        tenant=record.key.tenant,
        operation=record.key.operation,
        operation_key=record.key.operation_key,
        policy_id=policy.policy_id,
        policy_version=policy.version,
        policy_digest=policy.digest,
        fingerprint=fingerprint_text(record.fingerprint_version, record.fingerprint),
        reserve_time=_timestamp(record.reserve_time),
        evaluate_time=_timestamp(evaluate_time),
        attempt=record.attempt,
    )


def _timestamp(moment: datetime) -> timestamp_pb2.Timestamp:
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromDatetime(moment)
    return timestamp


def _events(
    record: Record,
    topic: str,
    response: wire.DecideResponse,
    effects: tuple[Effect, ...],
) -> list[outbox.Event]:
    recorded = events_pb2.DecisionRecorded(
        status=response.status,
        decision=response.decision if response.HasField("decision") else None,
        failure=response.failure if response.HasField("failure") else None,
    )
    bodies = [events_pb2.DecisionEvent(type=RECORDED_EVENT_TYPE, recorded=recorded)]
    bodies += [
        events_pb2.DecisionEvent(
            type=effect.type,
            effect=events_pb2.Effect(payload=values.to_struct(effect.payload)),
        )
        for effect in effects
    ]
    return [_event(record, topic, body, response.provenance) for body in bodies]


def _event(
    record: Record,
    topic: str,
    event: events_pb2.DecisionEvent,
    provenance: wire.Provenance,
) -> outbox.Event:
    # UUIDv7 of one process ascend, so the events of a decision keep their order.
    event_id = uuid7()
    event.event_id = str(event_id)
    event.event_time.CopyFrom(provenance.evaluate_time)
    event.provenance.CopyFrom(provenance)
    return outbox.Event(
        id=event_id,
        bucket=record.key.bucket,
        tenant=record.key.tenant,
        operation=record.key.operation,
        operation_key=record.key.operation_key,
        type=event.type,
        payload=event.SerializeToString(deterministic=True),
        topic=topic,
        traceparent=tracing.traceparent(record.traceparent),
    )
