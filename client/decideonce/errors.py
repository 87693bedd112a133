"""Every error that the client raises.

DecideonceError
├── Refused: it isn't answered as it is
│   ├── InvalidRequest: a field is at fault; a ValueError, too
│   │   └── InvalidOperationKey, InvalidFacts, UnknownField
│   ├── OperationKeyReused, OperationKeyExpired
│   ├── OperationNotFound, NoActivePolicy, PolicyVersionNotFound, DecisionNotFound
│   ├── Unauthenticated, PermissionDenied
│   └── JournalFull
├── DecisionFailed: it is recorded that there is no decision, and won't be
└── OutcomeUnknown: call again with the same operation key and facts
    ├── StillProcessing, FailedRetryable
    └── Unavailable, Overloaded, DeadlineExceeded, InternalError

A class is chosen by the `ErrorReason` that the service says, or else by gRPC's code: a newer service may say reasons
that this version doesn't know. Texts are the service's or gRPC's, and never hold facts, an operation key or a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import ClassVar

import grpc

from decideonce._status import CallStatus, Violation
from decideonce.results import Failure, Provenance

__all__ = [
    "DeadlineExceeded",
    "DecideonceError",
    "DecisionFailed",
    "DecisionNotFound",
    "FailedRetryable",
    "InternalError",
    "InvalidFacts",
    "InvalidOperationKey",
    "InvalidRequest",
    "JournalFull",
    "NoActivePolicy",
    "OperationKeyExpired",
    "OperationKeyReused",
    "OperationNotFound",
    "OutcomeUnknown",
    "Overloaded",
    "PermissionDenied",
    "PolicyVersionNotFound",
    "Refused",
    "StillProcessing",
    "Unauthenticated",
    "Unavailable",
    "UnknownField",
    "Violation",
]


class DecideonceError(Exception):
    """The base of all; never raised itself.

    `reason` is the name of an `ErrorReason` without its prefix, "" where the service said none. `code` is gRPC's, None
    where nothing was sent or the call was answered. `metadata` is what the reason carries. `operation_key` is the key
    of the call, where it has one: also one that the client made. `retry_after` is how long the service asks to wait.
    """

    is_final: ClassVar[bool] = False
    """Whether the request itself is what it ends by, so that sending it again has no use: a journal forgets it."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        code: grpc.StatusCode | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after: timedelta | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.code = code
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after
        self.operation_key: str | None = None

    def _time(self, name: str) -> datetime | None:
        text = self.metadata.get(name)
        return None if text is None else datetime.fromisoformat(text)


class Refused(DecideonceError):
    """The service, or this library before anything was sent, refuses the call as it is."""


class InvalidRequest(Refused, ValueError):
    """Fields break rules: `violations` names them, `facts.customer.limits[3]`, or as a JSON pointer by the service."""

    is_final = True

    def __init__(
        self,
        message: str,
        *,
        violations: tuple[Violation, ...] = (),
        reason: str = "",
        code: grpc.StatusCode | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, code=code, metadata=metadata)
        self.violations = violations

    def __str__(self) -> str:
        named = "".join(f"; {violation.field} {violation.rule}" for violation in self.violations)
        return super().__str__() + named


class InvalidOperationKey(InvalidRequest):
    """The operation key doesn't satisfy the key grammar."""


class InvalidFacts(InvalidRequest):
    """The facts can't be sent exactly, or don't satisfy the operation's schema."""


class UnknownField(InvalidRequest):
    """The service doesn't know a field of the request: it is older than this library."""


class OperationKeyReused(Refused):
    """The operation key was used before with another request: use a new key for a new request."""

    is_final = True


class OperationKeyExpired(Refused):
    """The recorded answer is past its retention, and the operation key can't be used again."""

    is_final = True

    @property
    def decision_id(self) -> str:
        """The decision's name, a UUIDv7."""
        return self.metadata.get("decision_id", "")

    @property
    def expired_at(self) -> datetime | None:
        """When its body went, in UTC."""
        return self._time("expired_at")

    @property
    def key_retained_until(self) -> datetime | None:
        """Until when the key is remembered, in UTC; None: for ever."""
        return self._time("key_retained_until")


class OperationNotFound(Refused):
    """The operation isn't in the service's catalog."""


class NoActivePolicy(Refused):
    """The operation has no policy yet that could decide."""


class PolicyVersionNotFound(Refused):
    """The operation's policy has no such version."""


class DecisionNotFound(Refused):
    """Nothing is recorded under this operation and operation key, for this caller."""


class Unauthenticated(Refused):
    """The call had no valid credentials."""


class PermissionDenied(Refused):
    """The caller may not do this."""


class JournalFull(Refused):
    """The journal has as many requests as it may, so nothing was sent: resume what it has."""


class DecisionFailed(DecideonceError):
    """FAILED_FINAL: recorded for good is a failure, and every resend gets it again; corrected facts need a new key.

    `failure` says why, `replayed` whether that had been recorded before this call.
    """

    is_final = True

    def __init__(
        self,
        message: str,
        *,
        failure: Failure | None = None,
        provenance: Provenance | None = None,
        replayed: bool = False,
    ) -> None:
        super().__init__(message, reason="" if failure is None else failure.reason)
        self.failure = failure
        self.provenance = provenance
        self.replayed = replayed


class OutcomeUnknown(DecideonceError):
    """No answer tells what becomes of the decision; it may be made already, or still be made.

    Call again with `operation_key` and the same facts, now or later: that answers with the decision, whoever made it.
    """


class StillProcessing(OutcomeUnknown):
    """The service is working on the decision; the wait for it is over."""


class FailedRetryable(OutcomeUnknown):
    """The service's last attempt failed, as `failure` says, and the next call makes another."""

    def __init__(self, message: str, *, failure: Failure | None = None, retry_after: timedelta | None = None) -> None:
        super().__init__(message, reason="" if failure is None else failure.reason, retry_after=retry_after)
        self.failure = failure


class Unavailable(OutcomeUnknown):
    """The service, or its ledger, can't be reached."""


class Overloaded(OutcomeUnknown):
    """The service has more calls, or more of this caller's, than it takes on."""


class DeadlineExceeded(OutcomeUnknown):
    """No answer came in time."""


class InternalError(OutcomeUnknown):
    """The service, or something between, has a defect; it isn't tried again."""

    @property
    def correlation_id(self) -> str:
        """What the service's log has too; "" where it isn't the service that speaks."""
        return self.metadata.get("correlation_id", "")


BY_REASON: Mapping[str, type[DecideonceError]] = {
    "OPERATION_KEY_REUSED": OperationKeyReused,
    "OPERATION_KEY_EXPIRED": OperationKeyExpired,
    "INVALID_OPERATION_KEY": InvalidOperationKey,
    "INVALID_FACTS": InvalidFacts,
    "UNKNOWN_FIELD": UnknownField,
    "INVALID_REQUEST": InvalidRequest,
    "OPERATION_NOT_FOUND": OperationNotFound,
    "NO_ACTIVE_POLICY": NoActivePolicy,
    "POLICY_VERSION_NOT_FOUND": PolicyVersionNotFound,
    "DECISION_NOT_FOUND": DecisionNotFound,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "MISMATCH_RATE_LIMITED": Overloaded,
    "OVERLOADED": Overloaded,
    "DEADLINE_TOO_SHORT": DeadlineExceeded,
    "LEDGER_UNAVAILABLE": Unavailable,
    "INTERNAL": InternalError,
}

_BY_CODE: Mapping[grpc.StatusCode, type[DecideonceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: Refused,
    grpc.StatusCode.ALREADY_EXISTS: Refused,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.UNIMPLEMENTED: Refused,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def error_of(status: CallStatus) -> DecideonceError:
    """Make the error of a call that wasn't answered."""
    kind = BY_REASON.get(status.reason) or _BY_CODE.get(status.code, InternalError)
    if status.code is grpc.StatusCode.RESOURCE_EXHAUSTED and status.reason not in BY_REASON:
        # Without a word on when to come back, it is gRPC that found a message or metadata too large.
        kind = Refused if status.retry_delay_s is None else Overloaded
    message = f"{status.reason or status.code.name}: {status.message}"
    if issubclass(kind, OutcomeUnknown):
        message += "; the outcome is unknown: call again with the same operation key"
    if issubclass(kind, InvalidRequest):
        return kind(
            message,
            violations=status.violations,
            reason=status.reason,
            code=status.code,
            metadata=status.metadata,
        )
    retry_after = None if status.retry_delay_s is None else timedelta(seconds=status.retry_delay_s)
    return kind(message, reason=status.reason, code=status.code, metadata=status.metadata, retry_after=retry_after)
