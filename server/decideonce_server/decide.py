"""The use case: evaluate the pinned policy once, and record the decision and its events."""

from dataclasses import replace
from datetime import timedelta

import structlog
import tenacity
from opentelemetry import metrics

from decideonce.v1 import error_reason_pb2 as reasons
from decideonce_server import measures, tracing
from decideonce_server.backoff import pause_s
from decideonce_server.catalog import OperationContract
from decideonce_server.catalog_reader import CatalogReader
from decideonce_server.errors import DecisionNotFound, LedgerUnavailable, utc_text
from decideonce_server.evaluator import Evaluators
from decideonce_server.leases import LeaseKeeper
from decideonce_server.ledger import Attempt, Completion, Record
from decideonce_server.limits import Limits
from decideonce_server.policy import (
    Evaluation,
    InvalidResult,
    PolicyCrashed,
    PolicyError,
    PolicyFailed,
    PolicyTimeout,
    PolicyVersion,
    RetryLater,
)
from decideonce_server.recording import (
    ATTEMPTS_EXHAUSTED,
    RESULT_BYTES_MAX,
    RESULT_TOO_LARGE,
    Failure,
    completion,
    reason_name,
)
from decideonce_server.sets import LedgerSets
from decideonce_server.values import Json

FAILURES: dict[type[PolicyError], Failure] = {
    PolicyTimeout: Failure(reasons.ERROR_REASON_POLICY_TIMEOUT, retryable=True),
    PolicyCrashed: Failure(reasons.ERROR_REASON_POLICY_CRASHED, retryable=True),
    RetryLater: Failure(reasons.ERROR_REASON_POLICY_RETRY_LATER, retryable=True),
    PolicyFailed: Failure(reasons.ERROR_REASON_POLICY_FAILED),
    InvalidResult: Failure(reasons.ERROR_REASON_INVALID_RESULT),
}

# What is recorded of an attempt that ended with a defect: the next may meet a mended service.
DEFECT = Failure(reasons.ERROR_REASON_INTERNAL, retryable=True)

# Between the attempts that workers make: full jitter, so that what failed together isn't tried together.
BACKOFF = tenacity.wait_random_exponential(multiplier=1, max=60)

log = structlog.get_logger()


class Decide:
    """Decides attempts."""

    def __init__(
        self,
        ledger: LedgerSets,
        catalog: CatalogReader,
        evaluators: Evaluators,
        leases: LeaseKeeper,
        limits: Limits,
    ) -> None:
        self._ledger = ledger
        self._leases = leases
        self._limits = limits
        self._catalog = catalog
        self._evaluators = evaluators
        self._stale_completions = metrics.get_meter("decideonce").create_counter(
            "stale_completions",
            description="Attempts that ended after they had lost their lease to another; their results were discarded",
        )
        self._stale_completions.add(0)

    async def decide(self, attempt: Attempt) -> tuple[Record, bool]:
        """Decide, record and give the record, and whether it is this attempt's own.

        An attempt that lost its lease to another never answers with its own result: it gives what is recorded. One that
        ends with a defect is recorded as retryable, and its defect raised.

        Raises:
            LedgerUnavailable: whether the decision was recorded stayed unknown, or its row stayed locked.
            DecisionNotFound: the attempt lost its lease, and the winner's record is past its retention.
        """
        with self._limits.ending_attempt(attempt.record.key.tenant):
            completed = await self._evaluate_and_record(attempt)
        if completed is not None:
            return completed, True
        self._stale_completions.add(1)
        winner = await self._ledger.read(attempt.record.key)
        if winner is None:
            raise DecisionNotFound
        return winner, False

    async def _evaluate_and_record(self, attempt: Attempt) -> Record | None:
        record = attempt.record
        operation = await self._catalog.operation_version(record.key.operation, record.operation_version)
        policy = await self._catalog.policy_version(record.policy_id, record.policy_version)
        contract = operation.contract
        with (
            self._leases.renewing(record, contract.lease, contract.time_budget),
            tracing.attempt_span(record.traceparent, record.key.operation, record.key.operation_key, record.attempt),
        ):
            try:
                end = await self._evaluate(attempt, contract, policy)
                return await self._end(attempt, contract, policy, end)
            except LedgerUnavailable:
                raise
            except Exception:
                await self._end(attempt, contract, policy, _failure(DEFECT, record, contract))
                raise

    async def _evaluate(
        self,
        attempt: Attempt,
        contract: OperationContract,
        policy: PolicyVersion,
    ) -> Evaluation | Failure:
        record = attempt.record
        decision: dict[str, Json] = {
            "time": utc_text(record.reserve_time),
            "tenant": record.key.tenant,
            "operation": record.key.operation,
        }
        try:
            return await self._evaluators.evaluate(policy, attempt.facts, decision, contract.time_budget)
        except PolicyError as error:
            failure = FAILURES[type(error)]
        log.info("policy failed", policy=policy.policy_id, version=policy.version, reason=reason_name(failure.reason))
        return _failure(failure, record, contract) if failure.retryable else failure

    async def _end(
        self,
        attempt: Attempt,
        contract: OperationContract,
        policy: PolicyVersion,
        end: Evaluation | Failure,
    ) -> Record | None:
        with measures.phase("complete"):
            recorded = completion(attempt, contract, policy, end)
            if recorded.size > RESULT_BYTES_MAX:
                recorded = completion(attempt, contract, policy, RESULT_TOO_LARGE)
            completed = await self._complete(recorded, contract.lease)
        if completed is not None and end == ATTEMPTS_EXHAUSTED:
            measures.count_attempts_exhausted()
        return completed

    async def _complete(self, end: Completion, lease: timedelta) -> Record | None:
        """Record the end of an attempt, for as long as its lease; None where the attempt is no longer the key's."""
        try:
            return await self._ledger.complete(end)
        except LedgerUnavailable:
            return await self._complete_again(end, lease)

    async def _complete_again(self, end: Completion, lease: timedelta) -> Record | None:
        """Record the end of an attempt where the connection was lost around a commit that may have been made.

        So the record is read on a new one before anything else.
        """
        trying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(LedgerUnavailable),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1),
            stop=tenacity.stop_after_delay(lease),
            reraise=True,
        )

        async def complete() -> Record | None:
            record = await self._ledger.read(end.key)
            if record is not None and record.response == end.response:
                return record
            return await self._ledger.complete(end)

        return await trying(complete)


def _failure(failure: Failure, record: Record, contract: OperationContract) -> Failure:
    """Give what a retryable failure is, at this attempt of so many."""
    if record.attempt >= contract.max_attempts:
        return ATTEMPTS_EXHAUSTED
    return replace(failure, retry_after=_backoff(record) if record.background else None)


def _backoff(record: Record) -> timedelta:
    return timedelta(seconds=pause_s(BACKOFF, record.attempt))
