"""Every error that the service answers with; `status` maps them to gRPC.

DecideonceError
├── InvalidField: InvalidRequest, InvalidOperationKey, InvalidFacts, UnknownField, InvalidCatalog
├── OperationKeyReused, OperationKeyExpired, DecisionNotFound
├── OperationNotFound, NoActivePolicy, PolicyVersionNotFound
├── Unauthenticated, PermissionDenied
├── DeadlineTooShort
└── RetryableError: LedgerUnavailable, CatalogConflict, Overloaded, MismatchRateLimited

A class's docstring is its message: fixed text, never facts, SQL or another exception's text.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar

from decideonce.v1 import error_reason_pb2 as reasons


def utc_text(moment: datetime) -> str:
    """Write a moment as RFC 3339 in UTC."""
    return moment.isoformat().replace("+00:00", "Z")


class DecideonceError(Exception):
    """The base of all; never raised itself."""

    reason: ClassVar[reasons.ErrorReason.ValueType]

    def __init__(self, metadata: dict[str, str] | None = None) -> None:
        super().__init__(inspect.cleandoc(type(self).__doc__ or ""))
        self.metadata = metadata or {}


@dataclass(frozen=True, slots=True)
class Violation:
    """A field (a dotted path or JSON pointer) and the rule that it breaks."""

    field: str
    rule: str


class InvalidField(DecideonceError):
    """The base of all that name the fields at fault; never raised itself."""

    def __init__(self, violations: Sequence[Violation], metadata: dict[str, str] | None = None) -> None:
        super().__init__(metadata)
        self.violations = tuple(violations)


class InvalidRequest(InvalidField):
    """A field of the request is malformed."""

    reason = reasons.ERROR_REASON_INVALID_REQUEST


class InvalidOperationKey(InvalidField):
    """The operation key does not satisfy the key grammar."""

    reason = reasons.ERROR_REASON_INVALID_OPERATION_KEY


class InvalidFacts(InvalidField):
    """The facts do not satisfy the operation's contract."""

    reason = reasons.ERROR_REASON_INVALID_FACTS

    def __init__(self, violations: Sequence[Violation], total: int | None = None) -> None:
        super().__init__(violations, {"violations": str(len(violations) if total is None else total)})


class UnknownField(InvalidField):
    """The request has a field that the contract does not know."""

    reason = reasons.ERROR_REASON_UNKNOWN_FIELD

    def __init__(self, field: str, number: int) -> None:
        super().__init__([Violation(field, "is not part of the contract")], {"field_number": str(number)})


class InvalidCatalog(InvalidField):
    """The catalog is refused, and nothing of it was published."""

    reason = reasons.ERROR_REASON_INVALID_CATALOG

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__(violations, {"violations": str(len(violations))})


class OperationKeyReused(DecideonceError):
    """The operation key was used before with another request; use a new key for a new request."""

    reason = reasons.ERROR_REASON_OPERATION_KEY_REUSED


class OperationKeyExpired(DecideonceError):
    """The recorded answer is past its retention; the operation key can't be used again."""

    reason = reasons.ERROR_REASON_OPERATION_KEY_EXPIRED

    def __init__(self, decision_id: str, expired_at: datetime | None, key_retained_until: datetime | None) -> None:
        times = {"expired_at": expired_at, "key_retained_until": key_retained_until}
        super().__init__({"decision_id": decision_id} | {name: utc_text(at) for name, at in times.items() if at})


class DecisionNotFound(DecideonceError):
    """Nothing is recorded under this operation and operation key."""

    reason = reasons.ERROR_REASON_DECISION_NOT_FOUND


class OperationNotFound(DecideonceError):
    """The operation is not in the catalog."""

    reason = reasons.ERROR_REASON_OPERATION_NOT_FOUND


class NoActivePolicy(DecideonceError):
    """The operation has no active policy."""

    reason = reasons.ERROR_REASON_NO_ACTIVE_POLICY


class PolicyVersionNotFound(DecideonceError):
    """There is no such version of the policy."""

    reason = reasons.ERROR_REASON_POLICY_VERSION_NOT_FOUND


class Unauthenticated(DecideonceError):
    """The call has no valid credentials."""

    reason = reasons.ERROR_REASON_UNAUTHENTICATED


class PermissionDenied(DecideonceError):
    """The caller may not do this."""

    reason = reasons.ERROR_REASON_PERMISSION_DENIED


class DeadlineTooShort(DecideonceError):
    """Too little of the call's deadline is left to start; nothing was written."""

    reason = reasons.ERROR_REASON_DEADLINE_TOO_SHORT


class RetryableError(DecideonceError):
    """The base of all that the same call can overcome later; never raised itself."""

    def __init__(self, retry_after: timedelta = timedelta(milliseconds=200)) -> None:
        super().__init__()
        self.retry_after = retry_after


class LedgerUnavailable(RetryableError):
    """The ledger can't be reached; resend with the same operation key."""

    reason = reasons.ERROR_REASON_LEDGER_UNAVAILABLE


class CatalogConflict(RetryableError):
    """Another catalog was applied at the same time; nothing of this one was published."""

    reason = reasons.ERROR_REASON_CATALOG_CONFLICT


class Overloaded(RetryableError):
    """The service has more work than it can take on."""

    reason = reasons.ERROR_REASON_OVERLOADED


class MismatchRateLimited(RetryableError):
    """Too many requests that reuse an operation key for something else."""

    reason = reasons.ERROR_REASON_MISMATCH_RATE_LIMITED
