"""A request to decide, frozen: its key and its very bytes are the same on every send, after a crash too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

from google.protobuf import duration_pb2

from decideonce.errors import InvalidOperationKey, InvalidRequest, Violation
from decideonce.facts import freeze, text_fault
from decideonce.keys import OPERATION_KEY_RULE, is_operation_key, new_operation_key
from decideonce.v1 import decision_service_pb2 as wire

POLICY_VERSION_MAX = 2**32 - 1
# What google.protobuf.Duration and gRPC's own deadlines can both hold, by far.
SECONDS_MAX = 365 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """One request to decide. `body` is a `decideonce.v1.DecideRequest`, as bytes."""

    operation: str
    operation_key: str
    body: bytes = field(repr=False)


def prepare(
    operation: str,
    facts: Mapping[str, object],
    *,
    key: str | None = None,
    policy_version: int | None = None,
    max_wait: float | timedelta | None = None,
) -> DecisionRequest:
    """Freeze a request, without sending it; `client.send` does that. The arguments are those of `client.decide`.

    Raises InvalidFacts, InvalidOperationKey and InvalidRequest.
    """
    key = new_operation_key() if key is None else key
    check_key(operation, key)
    if policy_version is not None and (
        isinstance(policy_version, bool)
        or not isinstance(policy_version, int)
        or not 1 <= policy_version <= POLICY_VERSION_MAX
    ):
        refuse("policy_version", "must be a whole number from 1 to 2^32-1")
    body = wire.DecideRequest(
        operation_key=key,
        operation=operation,
        facts=freeze(facts),
        policy_version=policy_version,
        max_wait=None if max_wait is None else duration(seconds(max_wait, "max_wait")),
    )
    return DecisionRequest(operation, key, body.SerializeToString(deterministic=True))


def status_request(operation: str, key: str, max_wait_s: float) -> bytes:
    """Make the bytes that ask for what is recorded under a key."""
    request = wire.GetDecisionStatusRequest(operation_key=key, operation=operation, max_wait=duration(max_wait_s))
    return request.SerializeToString()


def operation_request(operation: str) -> bytes:
    """Make the bytes that ask for an operation's contract."""
    _check_operation(operation)
    return wire.GetOperationRequest(operation=operation).SerializeToString()


def check_key(operation: str, key: str) -> None:
    """Check what names a decision.

    Raises InvalidOperationKey and InvalidRequest.
    """
    _check_operation(operation)
    if not isinstance(key, str) or not is_operation_key(key):
        raise InvalidOperationKey(
            "the operation key can't be used",
            violations=(Violation("key", OPERATION_KEY_RULE),),
            reason="INVALID_OPERATION_KEY",
        )


def seconds(given: float | timedelta, name: str) -> float:
    """Read a length of time, given in seconds or as a timedelta.

    Raises InvalidRequest: it is below zero, or longer than a year.
    """
    length = given.total_seconds() if isinstance(given, timedelta) else given
    if not 0 <= length <= SECONDS_MAX:
        refuse(name, "must be zero or more, and a year at most")
    return float(length)


def duration(length_s: float) -> duration_pb2.Duration:
    """Write a length of time as protobuf has it."""
    made = duration_pb2.Duration()
    made.FromNanoseconds(round(length_s * 1e9))
    return made


def refuse(name: str, rule: str) -> NoReturn:
    """Refuse an argument.

    Raises InvalidRequest, always.
    """
    raise InvalidRequest("the call can't be sent", violations=(Violation(name, rule),), reason="INVALID_REQUEST")


def _check_operation(operation: str) -> None:
    if not isinstance(operation, str) or not operation:
        refuse("operation", "must be an operation's name")
    if (fault := text_fault(operation)) is not None:
        refuse("operation", fault)
