"""Drives what `decideonce.protocol` says on a clock of its own, with answers that a test has written."""

from collections.abc import Callable
from typing import Any

import grpc

from decideonce._status import CallStatus
from decideonce.protocol import Pause, Protocol, Send, Steps, Store
from decideonce.retry import RetryBudget, RetryPolicy
from decideonce.v1 import decision_service_pb2 as wire

KEY = "8d7f1b9e-0c0a-4a53-9f7e-2f4f6f0a1c11"
OPERATION = "credit.approve-loan"


class Driver:
    """Gives the script's answers in their order; an answer that is callable is called with what was sent.

    `jitter` gives the greatest pause that it may, so that pauses are told.
    """

    def __init__(self, *script: Any, policy: RetryPolicy | None = None, call_s: float = 0.0) -> None:
        self.script = list(script)
        self.now = 100.0
        self.sent: list[Send] = []
        self.pauses: list[float] = []
        self.call_s = call_s
        policy = policy or RetryPolicy()
        self.protocol = Protocol(policy, RetryBudget(policy), lambda: self.now, lambda _, most: most)

    def run(self, steps: Steps[Any]) -> Any:
        """Carry every step out."""
        came: Any = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as done:
                return done.value
            came = None
            match step:
                case Send():
                    came = self._answer(step)
                case Pause():
                    self.pauses.append(round(step.seconds, 6))
                    self.now += step.seconds
                case Store():
                    step.work()

    def _answer(self, step: Send) -> Any:
        self.sent.append(step)
        self.now += min(self.call_s, step.timeout_s)
        answer = self.script.pop(0)
        return answer(step) if isinstance(answer, Callable) else answer

    @property
    def methods(self) -> list[str]:
        """The methods that were called."""
        return [step.method.path.rpartition("/")[2] for step in self.sent]


def succeeded(*, replayed: bool = False, outcome: str = "APPROVED") -> wire.DecideResponse:
    """Make an answer."""
    response = wire.DecideResponse(status=wire.DECISION_STATUS_SUCCEEDED, replayed=replayed, provenance=provenance())
    response.decision.outcome = outcome
    return response


def polled(answer: wire.DecideResponse) -> wire.GetDecisionStatusResponse:
    """Make the answer of a poll of one of Decide."""
    bare = wire.DecideResponse()
    bare.CopyFrom(answer)
    bare.ClearField("replayed")
    return wire.GetDecisionStatusResponse.FromString(bare.SerializeToString())


def processing(retry_after_ms: int = 250) -> wire.DecideResponse:
    """Make an answer."""
    response = wire.DecideResponse(status=wire.DECISION_STATUS_PROCESSING)
    response.retry_after.FromMilliseconds(retry_after_ms)
    return response


def failed(status: wire.DecisionStatus.ValueType, reason: str, retry_after_ms: int | None = None) -> Any:
    """Make an answer."""
    failure = wire.Failure(reason=reason, message="It failed.")
    response = wire.DecideResponse(status=status, failure=failure, provenance=provenance())
    if retry_after_ms is not None:
        response.retry_after.FromMilliseconds(retry_after_ms)
    return response


def provenance() -> wire.Provenance:
    """Make a provenance."""
    made = wire.Provenance(
        decision_id="0199f0a0-0000-7000-8000-000000000001",
        tenant="acme",
        operation=OPERATION,
        operation_key=KEY,
        policy_id="loan-approval",
        policy_version=3,
        policy_digest="sha256:" + "0" * 64,
        fingerprint="fp1:sha256:" + "1" * 64,
        attempt=1,
        matched_rules=["rule-1"],
        engine="zen-engine/2.1.3",
    )
    made.reserve_time.FromSeconds(1_800_000_000)
    made.evaluate_time.FromMilliseconds(1_800_000_000_250)
    return made


def ended(code: grpc.StatusCode, reason: str = "", **details: Any) -> CallStatus:
    """Make the status of a call that wasn't answered."""
    return CallStatus(code, "No.", reason, **details)
