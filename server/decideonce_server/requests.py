"""Reads what requests say, and refuses what is malformed, naming the field and the rule."""

from collections.abc import Iterable
from datetime import timedelta

from google.protobuf import duration_pb2

from decideonce.keys import OPERATION_KEY_RULE, is_operation_key
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server import tracing
from decideonce_server.catalog import NAME_RULE
from decideonce_server.errors import InvalidOperationKey, InvalidRequest, Violation
from decideonce_server.ledger import Key
from decideonce_server.policy import is_name
from decideonce_server.reserve import DecisionRequest

# What google.protobuf.Duration allows: about 10,000 years.
DURATION_SECONDS_MAX = 315_576_000_000
NANOSECONDS = 1_000_000_000
# Facts that a policy decides on are small; documents belong elsewhere, under a reference.
REQUEST_BYTES_MAX = 1024 * 1024


def decision_request(
    tenant: str,
    request: wire.DecideRequest,
    metadata: Iterable[tuple[str, str | bytes]],
) -> DecisionRequest:
    """Read what identifies a Decide call, and its place in a trace.

    Raises:
        InvalidOperationKey, InvalidRequest: a field is malformed.
    """
    return DecisionRequest(
        key=decision_key(tenant, request),
        facts=request.facts,
        policy_version=request.policy_version if request.HasField("policy_version") else None,
        traceparent=tracing.traceparent(tracing.caller_traceparent(metadata)),
    )


def decision_key(tenant: str, request: wire.DecideRequest | wire.GetDecisionStatusRequest) -> Key:
    """Read the key of a call.

    Raises:
        InvalidOperationKey, InvalidRequest: a field is malformed.
    """
    if not is_operation_key(request.operation_key):
        raise InvalidOperationKey([Violation("operation_key", OPERATION_KEY_RULE)])
    return Key(tenant, name_of(request.operation, "operation"), request.operation_key)


def name_of(name: str, field: str) -> str:
    """Read the name of an operation or a policy.

    Raises:
        InvalidRequest: it can't be the name of any.
    """
    if not is_name(name):
        raise InvalidRequest([Violation(field, NAME_RULE)])
    return name


def wait_of(request: wire.DecideRequest | wire.GetDecisionStatusRequest) -> timedelta | None:
    """Read how long the caller will wait; None where it doesn't say.

    Raises:
        InvalidRequest: it is no duration, or below zero.
    """
    return duration_of(request.max_wait, "max_wait") if request.HasField("max_wait") else None


def duration_of(duration: duration_pb2.Duration, field: str) -> timedelta:
    """Read a duration, in whole microseconds.

    Raises:
        InvalidRequest: it is no duration, or below zero.
    """
    if not (0 <= duration.seconds <= DURATION_SECONDS_MAX and 0 <= duration.nanos < NANOSECONDS):
        raise InvalidRequest([Violation(field, "must be a duration, zero or more")])
    return timedelta(seconds=duration.seconds, microseconds=duration.nanos // 1000)
