"""What a client does, without doing it: which bytes to send, how long to wait, when to give up.

Each function is a generator of steps. Whoever drives it carries a step out and sends it what came of that, and it ends
with a result or raises. The asyncio client and the one that blocks are two such drivers, so they can't differ.
"""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from decideonce import requests, results
from decideonce._status import CallStatus
from decideonce.errors import (
    DeadlineExceeded,
    DecideonceError,
    DecisionFailed,
    DecisionNotFound,
    FailedRetryable,
    InternalError,
    OperationKeyExpired,
    OutcomeUnknown,
    StillProcessing,
    error_of,
)
from decideonce.requests import DecisionRequest
from decideonce.results import Decision, DecisionStatus, Operation, Recorded
from decideonce.retry import RetryBudget, RetryPolicy, asked_pause_s
from decideonce.v1 import decision_service_pb2 as wire

if TYPE_CHECKING:
    from decideonce.journal import Journal

# The longest that one status call is held open: below what proxies commonly cut, and the service's own limit.
POLL_HOLD_MAX_S = 20.0

T = TypeVar("T")


class Method(enum.Enum):
    """A method of DecisionService, and the type of its answer."""

    DECIDE = ("Decide", wire.DecideResponse)
    GET_DECISION_STATUS = ("GetDecisionStatus", wire.GetDecisionStatusResponse)
    GET_OPERATION = ("GetOperation", wire.GetOperationResponse)

    def __init__(self, name: str, answer: Any) -> None:
        self.path = f"/decideonce.v1.DecisionService/{name}"
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Send:
    """Send these bytes, and give the answer, or the CallStatus that the call ended with."""

    method: Method
    request: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait, and give None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Store:
    """Do this, which waits for a disk, and give None."""

    work: Callable[[], None]


Steps: TypeAlias = Generator[Send | Pause | Store, Any, T]


@dataclass(slots=True)
class _Course:
    """How far a call has come: when it must end, by the clock; how many tries in a row failed; why it goes on."""

    until: float
    failures: int = 0
    last: DecideonceError | None = None


@dataclass(frozen=True, slots=True)
class Protocol:
    """The protocol of one channel's calls."""

    policy: RetryPolicy
    budget: RetryBudget
    now: Callable[[], float] = time.monotonic
    jitter: Callable[[float, float], float] = field(default=random.uniform)

    def decide(
        self, request: DecisionRequest, deadline_s: float, max_wait_s: float | None, journal: Journal | None
    ) -> Steps[Decision]:
        """Send a request until its outcome is known. It is kept until it is finished, if there is a journal."""
        course = _Course(self.now() + deadline_s)
        if journal is not None:
            yield Store(partial(journal.add, request))
        forget = None if journal is None else partial(journal.remove, request.operation, request.operation_key)
        try:
            decision = yield from self._decide(request, course, max_wait_s)
        except DecideonceError as error:
            error.operation_key = request.operation_key
            if forget is not None and error.is_final:
                yield Store(forget)
            raise
        if forget is not None:
            yield Store(forget)
        return decision

    def _decide(self, request: DecisionRequest, course: _Course, max_wait_s: float | None) -> Steps[Decision]:
        """While the service works on it, polls and resends take turns.

        A poll waits for whoever decides, a resend takes over from one whose process died.
        """
        wait_until = course.until if max_wait_s is None else min(course.until, self.now() + max_wait_s)
        polls = False
        while True:
            if polls:
                hold_s = max(0.0, min(POLL_HOLD_MAX_S, wait_until - self.now()))
                poll = requests.status_request(request.operation, request.operation_key, hold_s)
                try:
                    answer = yield from self._answer(Method.GET_DECISION_STATUS, poll, course, hold_s)
                except DecisionNotFound:
                    # The service fell back to a ledger that doesn't have it: it is decided there, as if it were new.
                    polls = False
                    continue
            else:
                answer = yield from self._answer(Method.DECIDE, request.body, course, max_wait_s or 0.0)
            recorded = _recorded(answer)
            if recorded.decision is not None:
                return recorded.decision
            error = _error_of_state(recorded)
            pause_s = recorded.retry_after.total_seconds()
            if isinstance(error, StillProcessing):
                course.failures = 0
                yield from self._pause(pause_s + self.jitter(0, self.policy.backoff_s(1)), course, wait_until, error)
                polls = not polls
            elif isinstance(error, FailedRetryable):
                yield from self._pause_after_failure(pause_s, course, error)
                polls = False
            else:
                raise error

    def status(self, operation: str, key: str, max_wait_s: float, deadline_s: float) -> Steps[Recorded]:
        """Ask what is recorded, once it is settled or the wait is over."""
        try:
            return (yield from self._status(operation, key, max_wait_s, _Course(self.now() + deadline_s)))
        except DecideonceError as error:
            error.operation_key = key
            raise

    def _status(self, operation: str, key: str, max_wait_s: float, course: _Course) -> Steps[Recorded]:
        wait_until = min(course.until, self.now() + max_wait_s)
        while True:
            hold_s = max(0.0, min(POLL_HOLD_MAX_S, wait_until - self.now()))
            poll = requests.status_request(operation, key, hold_s)
            answer = yield from self._answer(Method.GET_DECISION_STATUS, poll, course, hold_s)
            recorded = _recorded(answer)
            pause_s = recorded.retry_after.total_seconds()
            if recorded.status is not DecisionStatus.PROCESSING or self.now() + pause_s >= wait_until:
                return recorded
            yield Pause(pause_s)

    def operation(self, name: str, deadline_s: float) -> Steps[Operation]:
        """Ask for an operation's contract."""
        course = _Course(self.now() + deadline_s)
        answer = yield from self._answer(Method.GET_OPERATION, requests.operation_request(name), course, 0.0)
        return results.operation_of(answer)

    def _answer(self, method: Method, request: bytes, course: _Course, hold_s: float) -> Steps[Any]:
        """Send one request until it is answered, the same bytes each time."""
        while True:
            left_s = course.until - self.now()
            if left_s <= 0:
                raise course.last or DeadlineExceeded("the deadline was over before anything was sent")
            status = yield Send(method, request, min(left_s, hold_s + self.policy.try_timeout_s))
            if not isinstance(status, CallStatus):
                self.budget.earn()
                return status
            error = error_of(status)
            pause_s = asked_pause_s(status)
            if pause_s is None or not self.budget.spend():
                raise error
            yield from self._pause_after_failure(pause_s, course, error)

    def _pause_after_failure(self, asked_s: float, course: _Course, error: DecideonceError) -> Steps[None]:
        course.failures += 1
        if course.failures >= self.policy.tries_max:
            raise error
        pause_s = asked_s + self.jitter(0, self.policy.backoff_s(course.failures))
        yield from self._pause(pause_s, course, course.until, error)

    def _pause(self, seconds: float, course: _Course, until: float, error: DecideonceError) -> Steps[None]:
        """Wait, or raise at once where there would be no time left then."""
        course.last = error
        if self.now() + seconds >= until:
            raise error
        yield Pause(seconds)


def _recorded(answer: Any) -> Recorded:
    try:
        return results.recorded_of(answer)
    except (ValueError, OverflowError) as fault:
        raise InternalError(f"the answer can't be read: {fault}; the outcome is unknown") from None


def _error_of_state(recorded: Recorded) -> DecideonceError:
    """Make the error of a recorded state that is no decision."""
    failure = recorded.failure
    why = "" if failure is None else f"{failure.reason}: {failure.message}; "
    match recorded.status:
        case DecisionStatus.FAILED_FINAL:
            return DecisionFailed(
                f"{why}there is no decision under this operation key, and will be none",
                failure=failure,
                provenance=recorded.provenance,
                replayed=recorded.replayed,
            )
        case DecisionStatus.FAILED_RETRYABLE:
            return FailedRetryable(
                f"{why}call again with the same operation key", failure=failure, retry_after=recorded.retry_after
            )
        case DecisionStatus.PROCESSING:
            return StillProcessing(
                "the decision is still being made: call again with the same operation key",
                retry_after=recorded.retry_after,
            )
        case DecisionStatus.EXPIRED:
            return _expired(recorded)
    return OutcomeUnknown("the outcome is unknown")


def _expired(recorded: Recorded) -> OperationKeyExpired:
    until = recorded.key_retained_until
    return OperationKeyExpired(
        "the recorded answer is past its retention; the operation key can't be used again",
        reason="OPERATION_KEY_EXPIRED",
        metadata={} if until is None else {"key_retained_until": until.isoformat()},
        retry_after=timedelta(0),
    )
