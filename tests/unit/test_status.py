"""The one table of errors, and the statuses made from it."""

import inspect
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from decideonce.v1 import error_reason_pb2 as reasons
from decideonce_server import decide, errors, recording, status

TRAILERS_MAX = 8192


def error_classes() -> list[type[errors.DecideonceError]]:
    found = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.DecideonceError)]
    return [c for c in [*found, status.InternalError] if hasattr(c, "reason")]


def test_every_reason_is_an_error_or_a_failure() -> None:
    """Each value of ErrorReason has either a gRPC code or a failure's text, and only INTERNAL has both."""
    known = set(reasons.ErrorReason.values()) - {reasons.ERROR_REASON_UNSPECIFIED}
    assert known == set(status.CODES) | set(recording.FAILURE_MESSAGES)
    assert {reasons.ERROR_REASON_INTERNAL} == set(status.CODES) & set(recording.FAILURE_MESSAGES)


def test_every_reason_with_a_code_has_one_error_class() -> None:
    """Each code belongs to one class, whose docstring is its message."""
    assert sorted(status.CODES) == sorted(c.reason for c in error_classes())


def test_every_way_a_policy_fails_has_a_failure() -> None:
    """Each error of a policy becomes a failure with a fixed text."""
    assert all(failure.reason in recording.FAILURE_MESSAGES for failure in decide.FAILURES.values())


def details(error: errors.DecideonceError) -> dict[str, object]:
    found = {}
    for packed in status.rpc_status(error).details:
        kind = getattr(error_details_pb2, packed.TypeName().rsplit(".", 1)[-1])
        detail = kind()
        packed.Unpack(detail)
        found[kind.__name__] = detail
    return found


def test_error_info_names_reason_domain_and_metadata() -> None:
    """An error's ErrorInfo has the reason without its prefix, the domain, and the error's metadata."""
    error = errors.OperationKeyExpired("d-1", datetime(2026, 1, 2, tzinfo=UTC), None)
    info = details(error)["ErrorInfo"]
    assert ("OPERATION_KEY_EXPIRED", "decideonce", {"decision_id": "d-1", "expired_at": "2026-01-02T00:00:00Z"}) == (
        info.reason,
        info.domain,
        dict(info.metadata),
    )


def test_retryable_error_says_when() -> None:
    """An error that a retry can help has a RetryInfo with its delay."""
    retry_info = details(errors.LedgerUnavailable(timedelta(seconds=2)))["RetryInfo"]
    assert timedelta(seconds=2) == retry_info.retry_delay.ToTimedelta()


@pytest.mark.parametrize("text", ["a", "é", "€", "😀"])
def test_details_stay_under_the_trailers_limit(text: str) -> None:
    """400 violations of 20 KB keep their code, say how many they are, and are cut between characters.

    lakehq/sail PR#1859: details over the limit turned an error into another one.
    """
    violations = [errors.Violation(f"facts/{text * 50}/{i}", f"must be {text * 300}") for i in range(400)]
    error = errors.InvalidFacts(violations)
    packed = status.rpc_status(error)
    found = details(error)
    assert code_pb2.INVALID_ARGUMENT == packed.code
    assert "400" == found["ErrorInfo"].metadata["violations"]
    assert 0 < len(found["BadRequest"].field_violations) < 400
    assert all("\ufffd" not in violation.description for violation in found["BadRequest"].field_violations)
    assert TRAILERS_MAX * 3 // 4 > packed.ByteSize() + len(packed.message)


def test_messages_are_fixed() -> None:
    """An error's text is its class's docstring, whatever it was made with."""
    error = errors.InvalidFacts([errors.Violation("facts/iban", "must be DE02…")])
    assert inspect.cleandoc(errors.InvalidFacts.__doc__) == str(error)


def test_unknown_errors_are_internal() -> None:
    """Whatever isn't one of ours counts and answers as INTERNAL."""
    assert grpc.StatusCode.INTERNAL == status.code_of(KeyError("secret"))
