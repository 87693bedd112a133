"""The client's errors, and the details of google.rpc that they are made of."""

import pickle
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from decideonce import errors
from decideonce._status import CallStatus, Violation, read_status, write_trailers
from decideonce.v1 import error_reason_pb2 as reasons

CODE = grpc.StatusCode

# What CatalogService says, which this client doesn't call, and what recorded failures say, which are no errors.
NOT_OF_CALLS = {
    "UNSPECIFIED",
    "INVALID_CATALOG",
    "CATALOG_CONFLICT",
    "POLICY_TIMEOUT",
    "POLICY_CRASHED",
    "POLICY_RETRY_LATER",
    "POLICY_FAILED",
    "INVALID_RESULT",
    "ATTEMPTS_EXHAUSTED",
    "RESULT_TOO_LARGE",
}

FULL = CallStatus(
    CODE.INVALID_ARGUMENT,
    "The facts do not satisfy the operation's contract.",
    "INVALID_FACTS",
    {"violations": "2"},
    (Violation("facts/a", "must be text"), Violation("facts/b", "must be a number")),
    1.25,
    "1250",
)


def originals(status: CallStatus) -> bytes:
    """Write a status with googleapis' own messages."""
    code: tuple[int, str] = status.code.value
    made = status_pb2.Status(code=code[0], message=status.message)
    info = error_details_pb2.ErrorInfo(reason=status.reason, domain="decideonce", metadata=status.metadata)
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromTimedelta(timedelta(seconds=status.retry_delay_s or 0))
    bad = error_details_pb2.BadRequest()
    for violation in status.violations:
        bad.field_violations.add(field=violation.field, description=violation.rule)
    for detail in (info, retry, bad):
        packed = any_pb2.Any()
        packed.Pack(detail)
        made.details.append(packed)
    return made.SerializeToString()


def test_details_are_those_of_google_rpc() -> None:
    """What is written is, byte for byte, what googleapis' messages write; and what they write is read."""
    assert originals(FULL) == dict(write_trailers(FULL))["grpc-status-details-bin"]
    trailers = [("grpc-status-details-bin", originals(FULL)), ("grpc-retry-pushback-ms", "1250")]
    assert FULL == read_status(FULL.code, FULL.message, trailers)


@pytest.mark.parametrize("first", ["decideonce._status", "google.rpc.error_details_pb2"])
def test_details_do_not_clash_with_googleapis(first: str) -> None:
    """The client and googleapis-common-protos can be loaded into one process, in any order."""
    program = f"import {first}, decideonce._status, google.rpc.error_details_pb2, google.rpc.status_pb2"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (0, "") == (ran.returncode, ran.stderr)


@pytest.mark.parametrize(
    "trailers",
    [
        None,
        [],
        [("grpc-status-details-bin", b"\xff\xff")],
        [("grpc-status-details-bin", b"\x1a\x08\x0a\x02no\x12\x02\xff\xff")],
    ],
)
def test_details_that_cannot_be_read(trailers) -> None:
    """Without details, or with some that somebody between broke, a status is gRPC's own."""
    assert CallStatus(CODE.UNAVAILABLE, "reset") == read_status(CODE.UNAVAILABLE, "reset", trailers)


def test_reason_of_another_domain() -> None:
    """An ErrorInfo of another domain isn't this service's word, but its RetryInfo counts."""
    status = status_pb2.Status(code=8)
    for detail in (error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="proxy"), error_details_pb2.RetryInfo()):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    found = read_status(CODE.RESOURCE_EXHAUSTED, None, [("grpc-status-details-bin", status.SerializeToString())])
    assert CallStatus(CODE.RESOURCE_EXHAUSTED, "", retry_delay_s=0.0) == found
    assert errors.Overloaded is type(errors.error_of(found))


def test_every_reason_of_a_call_has_an_error() -> None:
    """Each reason that DecisionService ends a call with has its class."""
    names = {name.removeprefix("ERROR_REASON_") for name in reasons.ErrorReason.keys()}  # noqa: SIM118  # no mapping
    assert names - NOT_OF_CALLS == set(errors.BY_REASON)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (CODE.INVALID_ARGUMENT, errors.InvalidRequest),
        (CODE.NOT_FOUND, errors.Refused),
        (CODE.ALREADY_EXISTS, errors.Refused),
        (CODE.FAILED_PRECONDITION, errors.Refused),
        (CODE.UNIMPLEMENTED, errors.Refused),
        (CODE.RESOURCE_EXHAUSTED, errors.Refused),
        (CODE.UNAUTHENTICATED, errors.Unauthenticated),
        (CODE.PERMISSION_DENIED, errors.PermissionDenied),
        (CODE.UNAVAILABLE, errors.Unavailable),
        (CODE.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (CODE.INTERNAL, errors.InternalError),
        (CODE.UNKNOWN, errors.InternalError),
        (CODE.DATA_LOSS, errors.InternalError),
    ],
)
def test_reason_of_a_newer_service(code: grpc.StatusCode, kind: type[errors.DecideonceError]) -> None:
    """A reason that this version doesn't know is told by the error of its code, with the reason and its metadata."""
    error = errors.error_of(CallStatus(code, "No.", "OF_TOMORROW", {"a": "b"}))
    assert (kind, "OF_TOMORROW", code, {"a": "b"}) == (type(error), error.reason, error.code, error.metadata)
    assert str(error).startswith("OF_TOMORROW: No.")


def test_errors_have_what_their_reasons_carry() -> None:
    """Metadata are attributes, with types."""
    expired = errors.error_of(
        CallStatus(
            CODE.FAILED_PRECONDITION,
            "",
            "OPERATION_KEY_EXPIRED",
            {"decision_id": "d", "expired_at": "2026-01-02T03:04:05.678Z"},
        )
    )
    moment = datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC)
    assert ("d", moment, None) == (expired.decision_id, expired.expired_at, expired.key_retained_until)
    defect = errors.error_of(CallStatus(CODE.INTERNAL, "", "INTERNAL", {"correlation_id": "c0ffee"}))
    assert "c0ffee" == defect.correlation_id
    overloaded = errors.error_of(CallStatus(CODE.RESOURCE_EXHAUSTED, "", "OVERLOADED", retry_delay_s=0.2))
    assert timedelta(milliseconds=200) == overloaded.retry_after
    invalid = errors.error_of(FULL)
    assert (FULL.violations, True) == (invalid.violations, isinstance(invalid, ValueError))
    assert "facts/a must be text; facts/b must be a number" in str(invalid)


def test_errors_survive_pickling() -> None:
    """An error crosses to another process with everything that it has."""
    error = errors.error_of(FULL)
    error.operation_key = "8d7f1b9e-0c0a-4a53-9f7e-2f4f6f0a1c11"
    again = pickle.loads(pickle.dumps(error))
    assert (type(error), str(error), vars(error)) == (type(again), str(again), vars(again))
