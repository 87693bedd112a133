"""The outermost interceptor: every error that a call ends with becomes one gRPC status, by one table.

Each carries one google.rpc.ErrorInfo of domain "decideonce" (AIP-193); a BadRequest where fields are at fault; a
RetryInfo and the `grpc-retry-pushback-ms` trailer (gRPC A6) where the same call may succeed later.
"""

import asyncio
import secrets
from typing import Any

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from decideonce.v1 import error_reason_pb2 as reasons
from decideonce_server.errors import DecideonceError, InvalidField, RetryableError, Violation
from decideonce_server.recording import reason_name
from decideonce_server.wire import Context, Proceed, UnaryInterceptor

DOMAIN = "decideonce"

# All trailers together have 8 KB before clients begin to reject them; details travel in base64, 4 bytes for 3.
DETAILS_BYTES_MAX = 4_000
VIOLATION_CHARACTERS_MAX = 200

CODES: dict[reasons.ErrorReason.ValueType, grpc.StatusCode] = {
    reasons.ERROR_REASON_OPERATION_KEY_REUSED: grpc.StatusCode.ALREADY_EXISTS,
    reasons.ERROR_REASON_OPERATION_KEY_EXPIRED: grpc.StatusCode.FAILED_PRECONDITION,
    reasons.ERROR_REASON_INVALID_OPERATION_KEY: grpc.StatusCode.INVALID_ARGUMENT,
    reasons.ERROR_REASON_INVALID_FACTS: grpc.StatusCode.INVALID_ARGUMENT,
    reasons.ERROR_REASON_UNKNOWN_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    reasons.ERROR_REASON_INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    reasons.ERROR_REASON_OPERATION_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    reasons.ERROR_REASON_NO_ACTIVE_POLICY: grpc.StatusCode.FAILED_PRECONDITION,
    reasons.ERROR_REASON_POLICY_VERSION_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    reasons.ERROR_REASON_DECISION_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    reasons.ERROR_REASON_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    reasons.ERROR_REASON_PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    reasons.ERROR_REASON_MISMATCH_RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    reasons.ERROR_REASON_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    reasons.ERROR_REASON_DEADLINE_TOO_SHORT: grpc.StatusCode.DEADLINE_EXCEEDED,
    reasons.ERROR_REASON_LEDGER_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    reasons.ERROR_REASON_INTERNAL: grpc.StatusCode.INTERNAL,
    reasons.ERROR_REASON_INVALID_CATALOG: grpc.StatusCode.INVALID_ARGUMENT,
    reasons.ERROR_REASON_CATALOG_CONFLICT: grpc.StatusCode.ABORTED,
}

log = structlog.get_logger()


class InternalError(DecideonceError):
    """The service has a defect; its log has more under the correlation id."""

    reason = reasons.ERROR_REASON_INTERNAL


def code_of(error: BaseException) -> grpc.StatusCode:
    """Give the code that a call ends with."""
    if isinstance(error, DecideonceError):
        return CODES[error.reason]
    if isinstance(error, asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.INTERNAL


class StatusInterceptor(UnaryInterceptor):
    """Turns whatever is raised below into a status."""

    async def intercept(self, method: str, request: Any, context: Context, proceed: Proceed) -> Any:
        """Hand a call on, and end it with a status where that raises."""
        try:
            return await proceed(request, context)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError as cancelled:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # Something below was cancelled and not this call: its caller must not hang.
            error: DecideonceError = _defect(method, cancelled)
        except DecideonceError as refusal:
            error = refusal
        except Exception as defect:  # noqa: BLE001  # whatever it is, its text stays here
            error = _defect(method, defect)
        return await _abort(context, error)


def _defect(method: str, defect: BaseException) -> DecideonceError:
    correlation_id = secrets.token_hex(8)
    log.error("defect", method=method, correlation_id=correlation_id, exc_info=defect)
    return InternalError({"correlation_id": correlation_id})


async def _abort(context: Context, error: DecideonceError) -> bytes:
    status = rpc_status(error)
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
    if isinstance(error, RetryableError):
        trailers.append(("grpc-retry-pushback-ms", str(round(error.retry_after.total_seconds() * 1000))))
    await context.abort(CODES[error.reason], status.message, tuple(trailers))
    raise AssertionError("abort returned")


def rpc_status(error: DecideonceError) -> status_pb2.Status:
    """Make the status of an error, no larger than trailers may be."""
    code: tuple[int, str] = CODES[error.reason].value
    status = status_pb2.Status(code=code[0], message=str(error))
    _add(status, error_details_pb2.ErrorInfo(reason=reason_name(error.reason), domain=DOMAIN, metadata=error.metadata))
    if isinstance(error, RetryableError):
        retry_info = error_details_pb2.RetryInfo()
        retry_info.retry_delay.FromTimedelta(error.retry_after)
        _add(status, retry_info)
    if isinstance(error, InvalidField):
        _add(status, _bad_request(error.violations, DETAILS_BYTES_MAX - status.ByteSize()))
    return status


def _add(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _bad_request(violations: tuple[Violation, ...], size_max: int) -> error_details_pb2.BadRequest:
    """Name as many violations as there is room for; the ErrorInfo says how many there are."""
    bad_request = error_details_pb2.BadRequest()
    for violation in violations:
        bad_request.field_violations.add(
            field=violation.field[:VIOLATION_CHARACTERS_MAX],
            description=violation.rule[:VIOLATION_CHARACTERS_MAX],
        )
        if bad_request.ByteSize() > size_max:
            del bad_request.field_violations[-1]
            break
    return bad_request
