"""Callers that do what callers do: resend, change their minds, give up, poll, and come back much later."""

import asyncio
import hashlib
import random
import time
import uuid
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import grpc
from google.rpc import error_details_pb2, status_pb2

from chaos.deployment import BACKGROUND, BRIEF, QUICK, SLOW, TENANTS, Deployment
from chaos.history import FINAL, Call, History, Key, Result
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.database import LOCK_TIMEOUT_MS
from harness import decide_request, status_request

RESULTS = {
    wire.DECISION_STATUS_PROCESSING: Result.PROCESSING,
    wire.DECISION_STATUS_SUCCEEDED: Result.SUCCEEDED,
    wire.DECISION_STATUS_FAILED_RETRYABLE: Result.FAILED_RETRYABLE,
    wire.DECISION_STATUS_FAILED_FINAL: Result.FAILED_FINAL,
    wire.DECISION_STATUS_EXPIRED: Result.EXPIRED,
}
CALL_WITHIN_S = 8.0
# After everything has come to rest: as long as the pause between two attempts in the background.
FINAL_WITHIN_S = 60.0


@dataclass(frozen=True)
class Run:
    """One logical run of an operation, as its caller remembers it."""

    tenant: str
    operation: str
    operation_key: str
    # Two versions of the facts; the second is a mistake under the same key.
    facts: tuple[dict, dict]


class Workload:
    """Many callers at once; `rate` is about how many calls they make each second."""

    def __init__(self, deployment: Deployment, history: History, seed: int, rate: float) -> None:
        self._deployment = deployment
        self._history = history
        self._random = random.Random(seed)
        self._rate = rate
        self._remembered: deque[Run] = deque(maxlen=5000)
        self._running: set[asyncio.Task[None]] = set()
        self.began = time.monotonic()
        history.epoch = time.time()

    def now(self) -> float:
        """Tell the time of the history."""
        return time.monotonic() - self.began

    async def run(self, until: float) -> None:
        """Begin runs, and come back to old ones, until a time of the history; then wait for those that have begun."""
        # A run makes about this many calls.
        pause = 3.0 / self._rate
        while self.now() < until:
            task = asyncio.create_task(self._live(self._choose(), random.Random(self._random.random())))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            await asyncio.sleep(self._random.uniform(0, 2 * pause))
        await asyncio.gather(*self._running)

    def _choose(self) -> Run:
        if self._remembered and self._random.random() < 0.15:
            return self._random.choice(self._remembered)
        operation = self._random.choices([QUICK, SLOW, BACKGROUND, BRIEF], [60, 10, 15, 15])[0]
        n = self._random.randint(1, 1_000_000)
        seconds = round(self._random.uniform(0, 1.6), 3) if self._random.random() < 0.3 else 0
        facts = ({"n": n, "seconds": seconds}, {"n": n + 1, "seconds": seconds})
        run = Run(self._random.choice(TENANTS), operation, str(uuid.UUID(int=self._random.getrandbits(128))), facts)
        self._remembered.append(run)
        return run

    async def _live(self, run: Run, chance: random.Random) -> None:
        for turn in range(chance.choice((1, 2, 2, 3, 4))):
            facts = 1 if turn and chance.random() < 0.15 else 0
            if chance.random() < 0.1:
                # Gives up early, and comes back.
                await self.decide(run, facts, chance, timeout=chance.uniform(0.02, 0.4))
                continue
            if chance.random() < 0.15:
                await asyncio.gather(*(self.decide(run, facts, chance) for _ in range(3)))
                continue
            call = await self.decide(run, facts, chance)
            while call.result is Result.PROCESSING and chance.random() < 0.8:
                call = await self.status(run, chance)
            await asyncio.sleep(chance.uniform(0, 0.5))

    async def decide(self, run: Run, facts: int, chance: random.Random, timeout: float = CALL_WITHIN_S) -> Call:
        """Call Decide, and record the call."""
        request = decide_request(run.operation, run.operation_key, run.facts[facts])
        return await self._call("Decide", run, facts, request, chance, timeout)

    async def status(self, run: Run, chance: random.Random) -> Call:
        """Call GetDecisionStatus, and record the call."""
        request = status_request(run.operation, run.operation_key, max_wait=chance.choice((0, 1)))
        return await self._call("GetDecisionStatus", run, 0, request, chance, CALL_WITHIN_S)

    async def _call(self, method, run: Run, facts: int, request, chance: random.Random, timeout: float) -> Call:
        name = chance.choice(sorted(self._deployment.instances))
        call = Call(
            run.tenant,
            run.operation,
            run.operation_key,
            method,
            facts,
            name,
            self.now(),
            sent=run.facts[facts].get("n", 0),
        )
        metadata = [("authorization", f"Bearer {self._deployment.tokens[run.tenant]}")]
        try:
            stub = self._deployment.instances[name].stub
            answer = await getattr(stub, method)(request, metadata=metadata, timeout=timeout)
            _fill(call, answer)
        except grpc.RpcError as error:
            call.error = _error_text(error)
        except asyncio.CancelledError:
            # Its channel was closed under it, with its instance.
            call.error = "CANCELLED"
        except (grpc.aio.UsageError, ValueError):
            call.error = "UNAVAILABLE"
        call.ended = self.now()
        self._history.calls.append(call)
        return call

    async def ask_everyone_again(self) -> list[Key]:
        """Resend each run once everything has come to rest, until it is final; give those that don't become so."""
        owners = {}
        for call in self._history.calls:
            if call.method == "Decide" and call.is_acknowledged:
                owners[call.key] = call.facts
        runs = {(r.tenant, r.operation, r.operation_key): r for r in self._remembered}
        chance = random.Random(0)
        places = asyncio.Semaphore(16)

        async def ask(run: Run, facts: int) -> bool:
            async with places:
                until = self.now() + FINAL_WITHIN_S
                while self.now() < until:
                    call = await self.decide(run, facts, chance)
                    if call.result in FINAL or "EXPIRED" in call.error:
                        return True
                    await asyncio.sleep(0.2)
                return False

        keys = [key for key in owners if key in runs]
        are_final = await asyncio.gather(*(ask(runs[key], owners[key]) for key in keys))
        return [key for key, is_final in zip(keys, are_final, strict=True) if not is_final]


def _fill(call: Call, answer: wire.DecideResponse | wire.GetDecisionStatusResponse) -> None:
    call.result = RESULTS[answer.status]
    contended = timedelta(milliseconds=LOCK_TIMEOUT_MS)
    call.is_contended = call.result is Result.PROCESSING and answer.retry_after.ToTimedelta() == contended
    call.replayed = isinstance(answer, wire.DecideResponse) and answer.replayed
    if answer.HasField("provenance"):
        call.decision, call.provenance = digests(answer.decision, answer.provenance)
        call.provenance_tenant = answer.provenance.tenant
        call.policy_version = answer.provenance.policy_version
        call.attempt = answer.provenance.attempt
        call.outcome, call.failure = answer.decision.outcome, answer.failure.reason
        if "n" in answer.decision.outputs:
            call.told = int(answer.decision.outputs["n"])


def digests(decision: wire.Decision, provenance: wire.Provenance) -> tuple[str, str]:
    """Give short digests of what must never change in an answer."""
    of_decision, of_provenance = (
        hashlib.sha256(part.SerializeToString(deterministic=True)).hexdigest()[:16] for part in (decision, provenance)
    )
    return of_decision, of_provenance


def _error_text(error: grpc.RpcError) -> str:
    trailers = dict(error.trailing_metadata() or ())
    details = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    info = error_details_pb2.ErrorInfo()
    for detail in details.details:
        detail.Unpack(info)
    return f"{error.code().name} {info.reason}".strip()
