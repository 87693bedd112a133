"""The interceptor that makes a call idempotent: it reserves the call's key before the servicer runs, or replays.

Which methods it protects is the contract's own word: those whose `idempotency_level` is IDEMPOTENT. A replay never
reaches the servicer.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from opentelemetry import metrics

from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server import answers
from decideonce_server.attempts import Attempts, current_attempt
from decideonce_server.auth import current_caller
from decideonce_server.catalog_reader import CatalogReader
from decideonce_server.database import LOCK_TIMEOUT_MS, LockTimeout
from decideonce_server.due_work import BackgroundWorker
from decideonce_server.errors import DeadlineTooShort
from decideonce_server.ledger import Record, State
from decideonce_server.requests import decision_request, wait_of
from decideonce_server.reserve import DecisionRequest, Reserve
from decideonce_server.waiting import ANSWER_TIME, Waiters, is_settled
from decideonce_server.wire import Context, Proceed, UnaryInterceptor, idempotent_methods

# Reserving and answering take a few milliseconds each; with less than this left the caller would hear of neither.
START_TIME_MIN = timedelta(milliseconds=50)
# A caller that got no answer asks again within about this time.
SOON = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class _Running:
    """An attempt that this call began; it goes on whatever becomes of the call."""

    record: Record
    answer: asyncio.Task[bytes]


class IdempotencyInterceptor(UnaryInterceptor):
    """Reserves or replays."""

    def __init__(
        self,
        reserve: Reserve,
        catalog: CatalogReader,
        attempts: Attempts,
        waiters: Waiters,
        worker: BackgroundWorker,
    ) -> None:
        super().__init__()
        self._reserve = reserve
        self._catalog = catalog
        self._attempts = attempts
        self._waiters = waiters
        self._worker = worker
        self._protected = idempotent_methods()
        self._replays_soon = metrics.get_meter("decideonce").create_counter(
            "replays_soon",
            description="Calls that found a decision made within the last 30 s: the first answer may have been lost",
        )
        self._replays_soon.add(0)

    async def intercept(self, method: str, request: wire.DecideRequest, context: Context, proceed: Proceed) -> Any:
        """Reserve the call's key and hand it on, or answer from the record."""
        if method not in self._protected:
            return await proceed(request, context)
        decision = decision_request(current_caller().tenant, request, context.invocation_metadata() or ())
        asked_wait = wait_of(request)
        deadline = _deadline(context)

        async def decide() -> bytes:
            answer: bytes = await proceed(request, context)
            return answer

        wait_until: float | None = None
        while True:
            try:
                # A call that is cancelled here leaves its reservation to be made and decided.
                begun = await asyncio.shield(self._attempts.start(self._begin(decision, decide)))
            except LockTimeout:
                return answers.processing(timedelta(milliseconds=LOCK_TIMEOUT_MS))
            if wait_until is None:
                if isinstance(begun, Record) and _is_soon(begun):
                    self._replays_soon.add(1)
                wait_until = min(await self._wait_until(begun, asked_wait), deadline)
            left = timedelta(seconds=max(0.0, wait_until - _now()))
            answer = await (self._own(begun, left) if isinstance(begun, _Running) else self._others(begun, left))
            if answer is not None:
                return answer

    async def _begin(
        self,
        request: DecisionRequest,
        decide: Callable[[], Coroutine[Any, Any, bytes]],
    ) -> Record | _Running:
        found = await self._reserve.reserve(request)
        if isinstance(found, Record):
            return found
        current_attempt.set(found)
        return _Running(found.record, self._attempts.start(decide()))

    async def _own(self, running: _Running, wait: timedelta) -> bytes:
        """Answer with this call's own attempt, as far as the caller waits for it and this process goes on."""
        await asyncio.wait({running.answer}, timeout=wait.total_seconds())
        if not running.answer.done() or running.answer.cancelled():
            return answers.answer(running.record, replayed=False)
        return running.answer.result()

    async def _others(self, record: Record, wait: timedelta) -> bytes | None:
        """Answer from what another call or a worker records; None where its attempt was abandoned meanwhile."""
        if record.background:
            self._worker.poke()
        if not is_settled(record) and wait > timedelta(0):
            record = await self._waiters.wait(record.key, wait, _is_settled_or_abandoned) or record
            if not is_settled(record) and _is_settled_or_abandoned(record):
                return None
        return answers.answer(record, replayed=is_settled(record))

    async def _wait_until(self, begun: Record | _Running, asked: timedelta | None) -> float:
        """Tell until when this call waits, by the loop's clock."""
        record = begun.record if isinstance(begun, _Running) else begun
        operation = await self._catalog.operation_version(record.key.operation, record.operation_version)
        wait = min(operation.contract.default_wait if asked is None else asked, operation.contract.max_wait)
        return _now() + wait.total_seconds()


def _is_settled_or_abandoned(record: Record) -> bool:
    return is_settled(record) or (record.is_abandoned and not record.background)


def _is_soon(record: Record) -> bool:
    """Tell whether a decision that a call found was made so shortly before that the call may repeat the first."""
    if record.state not in (State.SUCCEEDED, State.FAILED_FINAL) or record.complete_time is None:
        return False
    return record.read_time - record.complete_time <= SOON


def _now() -> float:
    return asyncio.get_running_loop().time()


def _deadline(context: Context) -> float:
    """Tell when the answer has to leave, by the loop's clock.

    Raises:
        DeadlineTooShort: there is too little time to begin.
    """
    # None without a deadline, whatever its type stub says.
    left = cast("float | None", context.time_remaining())
    if left is None:
        return math.inf
    if left < START_TIME_MIN.total_seconds():
        raise DeadlineTooShort
    return _now() + left - ANSWER_TIME.total_seconds()
