"""What the client sends, waits for and gives up on, with no network and no time."""

import contextlib
from datetime import timedelta

import grpc
import pytest

from decideonce import errors
from decideonce.protocol import Method
from decideonce.requests import DecisionRequest, prepare
from decideonce.results import Decision, DecisionStatus
from decideonce.retry import RetryPolicy
from decideonce.v1 import decision_service_pb2 as wire
from protocol_driver import KEY, OPERATION, Driver, ended, failed, polled, processing, succeeded

CODE = grpc.StatusCode
UNAVAILABLE = ended(CODE.UNAVAILABLE)


def request() -> DecisionRequest:
    return prepare(OPERATION, {"amount_minor": 120_000}, key=KEY)


def decide(driver: Driver, deadline_s: float = 30.0, max_wait_s: float | None = None, journal=None) -> Decision:
    return driver.run(driver.protocol.decide(request(), deadline_s, max_wait_s, journal))


def test_an_answer_ends_the_call() -> None:
    """A decision that is answered at once is given, after one send and no pause."""
    driver = Driver(succeeded())
    decision = decide(driver)
    assert ("APPROVED", False, KEY) == (decision.outcome, decision.replayed, decision.operation_key)
    assert ([Method.DECIDE], []) == ([step.method for step in driver.sent], driver.pauses)


def test_every_send_has_the_same_bytes() -> None:
    """What is sent again is sent as it was: one key, one body.

    googleapis/google-cloud-ruby PR#1572: a key that was made within the retry loop.
    """
    driver = Driver(UNAVAILABLE, UNAVAILABLE, processing(), UNAVAILABLE, polled(processing()), succeeded(replayed=True))
    assert decide(driver).replayed
    bodies = {step.request for step in driver.sent if step.method is Method.DECIDE}
    assert {request().body} == bodies
    assert KEY == wire.DecideRequest.FromString(bodies.pop()).operation_key


def test_backoffs_double_up_to_the_longest() -> None:
    """A pause is a random part of a backoff that doubles, and is bounded."""
    driver = Driver(*[UNAVAILABLE] * 7, succeeded(), policy=RetryPolicy(backoff_max_s=2.0))
    decide(driver)
    assert [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0] == driver.pauses


def test_pauses_are_as_long_as_the_service_asks() -> None:
    """RetryInfo, and before it the pushback, say the least that is waited."""
    driver = Driver(
        ended(CODE.UNAVAILABLE, "LEDGER_UNAVAILABLE", retry_delay_s=0.5),
        ended(CODE.RESOURCE_EXHAUSTED, "OVERLOADED", retry_delay_s=3.0, pushback="2000"),
        ended(CODE.RESOURCE_EXHAUSTED, pushback="0"),
        succeeded(),
    )
    decide(driver)
    assert [0.6, 2.2, 0.4] == driver.pauses


@pytest.mark.parametrize("pushback", ["-1", "", "soon", "1.5", "+5", " 5", "1_000", "\u0661", "9" * 5000])
def test_pushback_that_is_no_number_ends_the_call(pushback: str) -> None:
    """A pushback that is negative or no number says not to send again (gRFC A6)."""
    driver = Driver(ended(CODE.UNAVAILABLE, "LEDGER_UNAVAILABLE", retry_delay_s=0.1, pushback=pushback))
    with pytest.raises(errors.Unavailable):
        decide(driver)
    assert 1 == len(driver.sent)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (ended(CODE.INTERNAL, "INTERNAL", metadata={"correlation_id": "c0ffee"}), errors.InternalError),
        (ended(CODE.INTERNAL, pushback="10"), errors.InternalError),
        (ended(CODE.UNKNOWN), errors.InternalError),
        (ended(CODE.CANCELLED), errors.InternalError),
        (ended(CODE.ABORTED, retry_delay_s=0.1), errors.InternalError),
        (ended(CODE.ALREADY_EXISTS, "OPERATION_KEY_REUSED"), errors.OperationKeyReused),
        (ended(CODE.INVALID_ARGUMENT, "INVALID_FACTS"), errors.InvalidFacts),
        (ended(CODE.UNAUTHENTICATED, "UNAUTHENTICATED"), errors.Unauthenticated),
        (ended(CODE.RESOURCE_EXHAUSTED), errors.Refused),
    ],
)
def test_nothing_else_is_sent_again(status, kind: type[errors.DecideonceError]) -> None:
    """What can't be overcome ends the call after one send, and the error has the key."""
    driver = Driver(status)
    with pytest.raises(kind) as raised:
        decide(driver)
    assert (kind, KEY, 1) == (type(raised.value), raised.value.operation_key, len(driver.sent))


def test_a_try_never_outlives_the_deadline() -> None:
    """A try has its own limit, and never more than what is left of the whole call's."""
    driver = Driver(*[ended(CODE.DEADLINE_EXCEEDED)] * 3, succeeded(), call_s=9.0)
    with pytest.raises(errors.DeadlineExceeded, match="outcome is unknown") as raised:
        decide(driver, deadline_s=20.0)
    assert [10.0, 10.0, 1.7] == [round(step.timeout_s, 6) for step in driver.sent]
    assert (KEY, CODE.DEADLINE_EXCEEDED) == (raised.value.operation_key, raised.value.code)


def test_polls_and_resends_take_turns() -> None:
    """While it is decided, a poll waits at the service, and a resend takes over where nobody decides any more."""
    driver = Driver(
        processing(), polled(processing()), processing(100), polled(succeeded(outcome="DENIED")), call_s=1.0
    )
    decision = decide(driver)
    assert ("DENIED", False) == (decision.outcome, decision.replayed)
    assert ["Decide", "GetDecisionStatus"] * 2 == driver.methods
    assert [0.35, 0.35, 0.2] == driver.pauses
    poll = wire.GetDecisionStatusRequest.FromString(driver.sent[1].request)
    assert (KEY, OPERATION, timedelta(seconds=20)) == (poll.operation_key, poll.operation, poll.max_wait.ToTimedelta())
    assert 28.65 == round(driver.sent[1].timeout_s, 6)


def test_decision_that_got_lost() -> None:
    """A poll that finds nothing, as after a failover that lost the record, is followed by the request itself."""
    driver = Driver(processing(), ended(CODE.NOT_FOUND, "DECISION_NOT_FOUND"), succeeded())
    assert "APPROVED" == decide(driver).outcome
    assert ["Decide", "GetDecisionStatus", "Decide"] == driver.methods


def test_who_does_not_wait_is_told_at_once() -> None:
    """With max_wait zero a decision under way ends the call, with the key and when to ask again."""
    driver = Driver(processing(250))
    with pytest.raises(errors.StillProcessing) as raised:
        decide(driver, max_wait_s=0.0)
    assert (KEY, timedelta(milliseconds=250)) == (raised.value.operation_key, raised.value.retry_after)
    assert (1, []) == (len(driver.sent), driver.pauses)


def test_processing_ends_with_the_deadline() -> None:
    """A decision that takes longer than the call may ends it in time, as still being made."""
    answers = [processing(), polled(processing())] * 10
    driver = Driver(*answers, call_s=1.0)
    begun = driver.now
    with pytest.raises(errors.StillProcessing, match="still being made"):
        decide(driver, deadline_s=5.0)
    assert driver.now - begun <= 5.0


def test_no_time_at_all() -> None:
    """A call without any time sends nothing."""
    driver = Driver()
    with pytest.raises(errors.DeadlineExceeded, match="before anything was sent"):
        decide(driver, deadline_s=0.0)
    assert [] == driver.sent


def test_failed_attempts_are_repeated_when_the_service_says() -> None:
    """FAILED_RETRYABLE is sent again after its retry_after, the same bytes, until it is decided."""
    retryable = failed(wire.DECISION_STATUS_FAILED_RETRYABLE, "POLICY_TIMEOUT", 1000)
    driver = Driver(retryable, processing(), polled(retryable), succeeded())
    decide(driver)
    assert ["Decide", "Decide", "GetDecisionStatus", "Decide"] == driver.methods
    assert [1.1, 0.35, 1.1] == driver.pauses


def test_failed_attempts_are_bounded() -> None:
    """So many failed tries in a row end the call, with the failure."""
    retryable = failed(wire.DECISION_STATUS_FAILED_RETRYABLE, "POLICY_TIMEOUT", 10)
    driver = Driver(UNAVAILABLE, retryable, retryable, policy=RetryPolicy(tries_max=3))
    with pytest.raises(errors.FailedRetryable) as raised:
        decide(driver)
    assert ("POLICY_TIMEOUT", KEY) == (raised.value.failure.reason, raised.value.operation_key)
    assert 3 == len(driver.sent)


def test_final_failure_is_an_error() -> None:
    """FAILED_FINAL raises what is recorded, and whether it was before.

    ikyriak/IdempotentAPI#37: a failure that was replayed silently looked like a fresh one.
    """
    response = failed(wire.DECISION_STATUS_FAILED_FINAL, "POLICY_FAILED")
    response.replayed = True
    with pytest.raises(errors.DecisionFailed) as raised:
        decide(Driver(response))
    error = raised.value
    assert ("POLICY_FAILED", True, "loan-approval") == (error.reason, error.replayed, error.provenance.policy_id)
    assert (KEY, True) == (error.operation_key, error.is_final)


def test_a_decision_that_expires_meanwhile() -> None:
    """A poll that finds the body gone raises what Decide would."""
    gone = wire.GetDecisionStatusResponse(status=wire.DECISION_STATUS_EXPIRED)
    gone.key_retained_until.FromSeconds(1_800_000_000)
    with pytest.raises(errors.OperationKeyExpired) as raised:
        decide(Driver(processing(), gone))
    assert 2027 == raised.value.key_retained_until.year


@pytest.mark.parametrize("status", [0, 99])
def test_status_that_this_version_does_not_know(status: int) -> None:
    """An answer that can't be read is a defect whose outcome is unknown, and no decision."""
    with pytest.raises(errors.InternalError, match="outcome is unknown"):
        decide(Driver(wire.DecideResponse(status=status)))


def test_budget_is_shared_by_a_channels_calls() -> None:
    """Once half of the tokens are gone, no call is tried again until others were answered."""
    driver = Driver(policy=RetryPolicy(tokens_max=6, tokens_per_success=0.5))
    driver.script = [UNAVAILABLE, UNAVAILABLE, succeeded()]
    decide(driver)
    # 4.5 tokens are left, and one more failure leaves 3.5.
    driver.script = [UNAVAILABLE, UNAVAILABLE]
    with pytest.raises(errors.Unavailable):
        decide(driver)
    driver.script = [UNAVAILABLE]
    with pytest.raises(errors.Unavailable):
        decide(driver)
    driver.script = [succeeded() for _ in range(10)]
    for _ in range(10):
        decide(driver)
    driver.script = [UNAVAILABLE, succeeded()]
    assert "APPROVED" == decide(driver).outcome


def test_status_waits_until_it_is_settled() -> None:
    """A status that is asked to wait is asked again while there is time, and then told as it is."""
    driver = Driver(*[polled(processing(1000))] * 4, call_s=20.0)
    recorded = driver.run(driver.protocol.status(OPERATION, KEY, 60.0, 90.0))
    assert DecisionStatus.PROCESSING is recorded.status
    holds = [wire.GetDecisionStatusRequest.FromString(step.request).max_wait.ToMilliseconds() for step in driver.sent]
    assert [20_000, 20_000, 18_000] == holds


def test_status_is_retried_like_any_call() -> None:
    """A status that isn't answered is asked for again, and its error has the key."""
    driver = Driver(UNAVAILABLE, polled(succeeded()))
    assert "APPROVED" == driver.run(driver.protocol.status(OPERATION, KEY, 0.0, 5.0)).decision.outcome
    driver.script = [ended(CODE.NOT_FOUND, "DECISION_NOT_FOUND")]
    with pytest.raises(errors.DecisionNotFound) as raised:
        driver.run(driver.protocol.status(OPERATION, KEY, 0.0, 5.0))
    assert KEY == raised.value.operation_key


class Notes:
    """A journal that says what was done to it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.done: list[tuple[str, int]] = []

    def add(self, added: DecisionRequest) -> None:
        assert request() == added
        self.done.append(("add", len(self.driver.sent)))

    def remove(self, operation: str, operation_key: str) -> None:
        assert (OPERATION, KEY) == (operation, operation_key)
        self.done.append(("remove", len(self.driver.sent)))


@pytest.mark.parametrize(
    ("script", "done"),
    [
        ([UNAVAILABLE, succeeded()], [("add", 0), ("remove", 2)]),
        ([failed(wire.DECISION_STATUS_FAILED_FINAL, "POLICY_FAILED")], [("add", 0), ("remove", 1)]),
        ([ended(CODE.ALREADY_EXISTS, "OPERATION_KEY_REUSED")], [("add", 0), ("remove", 1)]),
        ([ended(CODE.INVALID_ARGUMENT, "INVALID_FACTS")], [("add", 0), ("remove", 1)]),
        ([ended(CODE.INTERNAL, "INTERNAL")], [("add", 0)]),
        ([ended(CODE.UNAUTHENTICATED, "UNAUTHENTICATED")], [("add", 0)]),
        ([ended(CODE.NOT_FOUND, "OPERATION_NOT_FOUND")], [("add", 0)]),
    ],
)
def test_journal_has_a_request_until_its_end_is_known(script, done) -> None:
    """A request is kept before it is sent, and forgotten when sending it again has no use."""
    driver = Driver(*script)
    journal = Notes(driver)
    with contextlib.suppress(errors.DecideonceError):
        decide(driver, journal=journal)
    assert done == journal.done


@pytest.mark.parametrize(
    "wrong",
    [
        {"tries_max": 0},
        {"try_timeout_s": 0},
        {"backoff_initial_s": -1},
        {"backoff_max_s": -1},
        {"tokens_max": -1},
        {"tokens_per_success": -0.1},
    ],
)
def test_policy_refuses_what_has_no_meaning(wrong: dict[str, float]) -> None:
    """A retry policy out of its ranges can't be made."""
    with pytest.raises(ValueError, match="must be"):
        RetryPolicy(**wrong)
