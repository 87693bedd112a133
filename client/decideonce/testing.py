"""For tests of callers: a service in the test's own process, with the contract of the real one.

    with DecideonceServer() as server:
        server.decides("credit.approve-loan", Outcome("APPROVED"))
        server.next(LostReply())
        with server.sync_client() as client:
            assert client.decide("credit.approve-loan", {}).outcome == "APPROVED"
        first, second = server.calls
        assert first.request == second.request

It speaks gRPC, on this machine alone, and keeps what it decided until it is closed. It judges keys and requests as the
real one does: the same request under a key is replayed, byte for byte, another is refused. What it doesn't have is a
catalog: facts are checked for what can be sent at all, not by a schema, and there is no time to live.

With pytest, the fixture `decideonce_server` is there by itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import message, unknown_fields

from decideonce import facts, requests, results
from decideonce._status import CallStatus, Violation, write_trailers
from decideonce.client import DecisionClient, SyncDecisionClient
from decideonce.errors import InvalidFacts
from decideonce.keys import OPERATION_KEY_PATTERN, OPERATION_KEY_RULE, is_operation_key
from decideonce.v1 import decision_service_pb2 as wire

__all__ = [
    "Call",
    "DecideonceServer",
    "Error",
    "FinalFailure",
    "LostReply",
    "Outcome",
    "Processing",
    "RetryableFailure",
]

DEFAULT_WAIT_S = 0.5
WAIT_MAX_S = 30.0
REQUEST_BYTES_MAX = 1024 * 1024
# Kept of a call's deadline for the answer's own way.
ANSWER_TIME_S = 0.03
RETRY_AFTER_S = 0.02
STOP_S = 1.0

_OPERATION = re.compile("[a-z0-9]+([.-][a-z0-9]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is decided: the `outcome`, never empty, and what comes with it."""

    outcome: str
    outputs: Mapping[str, object] = field(default_factory=dict)
    reasons: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class FinalFailure:
    """FAILED_FINAL is recorded: `reason` is the name of an ErrorReason without its prefix."""

    reason: str = "POLICY_FAILED"
    message: str = "The policy failed."


@dataclass(frozen=True, slots=True)
class LostReply:
    """The call is decided and recorded, and its reply gets lost: the caller sees UNAVAILABLE."""


@dataclass(frozen=True, slots=True)
class Processing:
    """The decision takes so many seconds (`math.inf`: for ever); whoever doesn't wait for it is told PROCESSING."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RetryableFailure:
    """FAILED_RETRYABLE is recorded; the next call makes another attempt, and takes the next fault."""

    reason: str = "POLICY_TIMEOUT"
    message: str = "The evaluation took too long."
    retry_after_s: float = RETRY_AFTER_S


@dataclass(frozen=True, slots=True)
class Error:
    """The call ends with a gRPC error, and nothing is recorded.

    `reason` is the name of an ErrorReason without its prefix; "" is an error that isn't the service's own. `message`
    comes from you. `retry_after_s` is said by RetryInfo and the `grpc-retry-pushback-ms` trailer.
    """

    code: grpc.StatusCode
    reason: str = ""
    message: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None

    @classmethod
    def unavailable(cls, retry_after_s: float = RETRY_AFTER_S) -> Self:
        """Make the error of a service that can't reach its ledger."""
        return cls(grpc.StatusCode.UNAVAILABLE, "LEDGER_UNAVAILABLE", retry_after_s=retry_after_s)

    @classmethod
    def overloaded(cls, retry_after_s: float = RETRY_AFTER_S) -> Self:
        """Make the error of a service that takes on no more."""
        return cls(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry_after_s=retry_after_s)

    @classmethod
    def conflict(cls) -> Self:
        """Make the error of an operation key that was used for another request."""
        return cls(grpc.StatusCode.ALREADY_EXISTS, "OPERATION_KEY_REUSED")

    @classmethod
    def internal(cls) -> Self:
        """Make the error of a defect."""
        return cls(grpc.StatusCode.INTERNAL, "INTERNAL", metadata={"correlation_id": secrets.token_hex(8)})


Fault = LostReply | Processing | RetryableFailure | Error
Policy = Outcome | FinalFailure | Callable[[dict[str, Any]], Outcome | FinalFailure]


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it came: `request` is its bytes, `facts` what they hold; `time` is of `time.monotonic`."""

    method: str
    operation: str
    operation_key: str
    facts: dict[str, Any]
    request: bytes
    metadata: Mapping[str, str | bytes]
    time: float


@dataclass(slots=True)
class _Record:
    """What is recorded under a key; `settled` is the part of an answer that never changes."""

    canonical: bytes
    attempt: int
    ready_at: float
    status: wire.DecisionStatus.ValueType
    settled: bytes
    retry_after_s: float = RETRY_AFTER_S


class _Refusal(Exception):
    """A call ends with an error."""

    def __init__(self, error: Error, violations: tuple[Violation, ...] = ()) -> None:
        super().__init__(error.reason)
        self.error = error
        self.violations = violations


class DecideonceServer:
    """A service for tests; `with` starts and stops it.

    `address` is where it is then. It takes calls with the bearer token `token`, and they are those of the tenant
    `tenant`. Tests of any thread or loop may use it; `listen` may be a `unix:` address, too. With `credentials` it has
    TLS, such as those of `grpc.ssl_server_credentials()`.
    """

    def __init__(
        self,
        *,
        tenant: str = "test",
        listen: str = "127.0.0.1:0",
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.tenant = tenant
        self.token = secrets.token_urlsafe(16)
        self.address = listen
        self.calls: list[Call] = []
        self._credentials = credentials
        self._policies: dict[str, Policy] = {}
        self._faults: deque[Fault | None] = deque()
        self._records: dict[tuple[str, str], _Record] = {}
        self._changed = threading.Condition()
        self._server: grpc.Server | None = None
        self._threads: ThreadPoolExecutor | None = None

    def decides(self, operation: str, policy: Policy) -> None:
        """Put an operation into the catalog: what it decides, or a function that says so of the facts."""
        with self._changed:
            self._policies[operation] = policy

    def next(self, *faults: Fault | None) -> None:
        """Let the next calls of Decide, those that are well-formed, have these faults, one each; None is no fault."""
        with self._changed:
            self._faults.extend(faults)

    def finish(self, operation: str, operation_key: str) -> None:
        """End the processing of a decision now."""
        with self._changed:
            self._records[operation, operation_key].ready_at = 0.0
            self._changed.notify_all()

    @property
    def decided(self) -> int:
        """How many operation keys have a record."""
        with self._changed:
            return len(self._records)

    def client(self, **settings: Any) -> DecisionClient:
        """Make a client of this service; the settings are those of `DecisionClient`."""
        return DecisionClient(self.address, token=self.token, **settings)

    def sync_client(self, **settings: Any) -> SyncDecisionClient:
        """Make a client of this service; the settings are those of `SyncDecisionClient`."""
        return SyncDecisionClient(self.address, token=self.token, **settings)

    def __enter__(self) -> Self:
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
        # Each call that waits has a thread.
        self._threads = ThreadPoolExecutor(64, "decideonce-testing")
        self._server = grpc.server(self._threads, options=options)
        methods: dict[str, Callable[[Any, Any], bytes]] = {
            "Decide": self._decide,
            "GetDecisionStatus": self._status,
            "GetOperation": self._operation,
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(self._handler(name, method)) for name, method in methods.items()
        }
        handler = grpc.method_handlers_generic_handler("decideonce.v1.DecisionService", handlers)
        self._server.add_generic_rpc_handlers((handler,))
        if self._credentials is None:
            port = self._server.add_insecure_port(self.address)
        else:
            port = self._server.add_secure_port(self.address, self._credentials)
        if not self.address.startswith("unix"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None and self._threads is not None:
            with self._changed:
                for record in self._records.values():
                    record.ready_at = 0.0
                self._changed.notify_all()
            # Those that wait were just told; a hard stop would be logged by their clients.
            self._server.stop(STOP_S).wait()
            self._threads.shutdown()

    def _handler(self, name: str, method: Callable[[Any, Any], bytes]) -> Callable[[bytes, Any], bytes]:
        request_type = getattr(wire, f"{name}Request")

        def handle(data: bytes, context: Any) -> bytes:
            try:
                request = _parsed(request_type, data)
                metadata = dict(context.invocation_metadata())
                self._note(name, request, data, metadata)
                self._authenticate(metadata)
                return method(request, context)
            except _Refusal as refusal:
                _end(context, refusal)
                return b""

        return handle

    def _authenticate(self, metadata: Mapping[str, str | bytes]) -> None:
        if metadata.get("authorization") != f"Bearer {self.token}":
            raise _Refusal(Error(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"))

    def _note(self, name: str, request: Any, data: bytes, metadata: dict[str, str | bytes]) -> None:
        found = results.plain(request.facts) if isinstance(request, wire.DecideRequest) else {}
        key = getattr(request, "operation_key", "")
        with self._changed:
            self.calls.append(Call(name, request.operation, key, found, data, metadata, time.monotonic()))

    def _decide(self, request: wire.DecideRequest, context: Any) -> bytes:
        _check_key(request)
        canonical = _canonical(request)
        wait_s = _wait_s(request, DEFAULT_WAIT_S, context)
        with self._changed:
            fault = self._faults.popleft() if self._faults else None
            if isinstance(fault, Error):
                raise _Refusal(fault)
            record = self._records.get((request.operation, request.operation_key))
            if record is not None and record.canonical != canonical:
                raise _Refusal(Error.conflict())
            is_found = record is not None and record.status != wire.DECISION_STATUS_FAILED_RETRYABLE
            if record is None or not is_found:
                record = self._begin(request, canonical, 1 if record is None else record.attempt + 1, fault)
            self._wait(record, wait_s)
            answer = _answer(record, replayed=is_found and _is_settled(record))
        if isinstance(fault, LostReply):
            raise _Refusal(Error(grpc.StatusCode.UNAVAILABLE, message="the reply is lost"))
        return answer

    def _begin(self, request: wire.DecideRequest, canonical: bytes, attempt: int, fault: Fault | None) -> _Record:
        policy = self._policies.get(request.operation)
        if policy is None:
            raise _Refusal(
                Error(grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND", metadata={"operation": request.operation})
            )
        if request.HasField("policy_version") and request.policy_version != 1:
            metadata = {"policy_version": str(request.policy_version)}
            raise _Refusal(Error(grpc.StatusCode.NOT_FOUND, "POLICY_VERSION_NOT_FOUND", metadata=metadata))
        response = wire.DecideResponse(provenance=self._provenance(request, canonical, attempt))
        retry_after_s = RETRY_AFTER_S
        if isinstance(fault, RetryableFailure):
            response.status = wire.DECISION_STATUS_FAILED_RETRYABLE
            response.failure.reason, response.failure.message = fault.reason, fault.message
            retry_after_s = fault.retry_after_s
        else:
            decided = policy(results.plain(request.facts)) if callable(policy) else policy
            _fill(response, decided)
        ready_at = time.monotonic() + fault.seconds if isinstance(fault, Processing) else 0.0
        settled = response.SerializeToString(deterministic=True)
        record = _Record(canonical, attempt, ready_at, response.status, settled, retry_after_s)
        self._records[request.operation, request.operation_key] = record
        return record

    def _provenance(self, request: wire.DecideRequest, canonical: bytes, attempt: int) -> wire.Provenance:
        digest = hashlib.sha256(canonical).hexdigest()
        provenance = wire.Provenance(
            decision_id=str(_uuid7()),
            tenant=self.tenant,
            operation=request.operation,
            operation_key=request.operation_key,
            policy_id="test-policy",
            policy_version=1,
            policy_digest=f"sha256:{hashlib.sha256(request.operation.encode()).hexdigest()}",
            fingerprint=f"fp1:sha256:{digest}",
            attempt=attempt,
            engine="decideonce.testing",
        )
        provenance.reserve_time.GetCurrentTime()
        provenance.evaluate_time.GetCurrentTime()
        return provenance

    def _status(self, request: wire.GetDecisionStatusRequest, context: Any) -> bytes:
        _check_key(request)
        wait_s = _wait_s(request, 0.0, context)
        with self._changed:
            record = self._records.get((request.operation, request.operation_key))
            if record is None:
                raise _Refusal(Error(grpc.StatusCode.NOT_FOUND, "DECISION_NOT_FOUND"))
            self._wait(record, wait_s)
            return _answer(record, replayed=False)

    def _operation(self, request: wire.GetOperationRequest, context: Any) -> bytes:  # noqa: ARG002
        _check_name(request.operation)
        with self._changed:
            if request.operation not in self._policies:
                raise _Refusal(
                    Error(grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND", metadata={"operation": request.operation})
                )
        return wire.GetOperationResponse(
            operation=request.operation,
            operation_version=1,
            operation_key_pattern=OPERATION_KEY_PATTERN,
            execution=wire.EXECUTION_INLINE,
            default_wait=requests.duration(DEFAULT_WAIT_S),
            max_wait=requests.duration(WAIT_MAX_S),
            lease=requests.duration(30.0),
            time_budget=requests.duration(1.0),
            max_attempts=5,
            fingerprint_version="fp1",
            facts_schema=json.dumps({"type": "object"}),
            policy_id="test-policy",
            policy_version=1,
            policy_digest=f"sha256:{hashlib.sha256(request.operation.encode()).hexdigest()}",
            request_bytes_max=REQUEST_BYTES_MAX,
            facts_depth_max=facts.DEPTH_MAX,
            result_bytes_max=512 * 1024,
        ).SerializeToString()

    def _wait(self, record: _Record, wait_s: float) -> None:
        """Wait until a record is settled, up to a limit; `_changed` is held."""
        until = time.monotonic() + wait_s
        while (now := time.monotonic()) < min(until, record.ready_at):
            # Condition can't wait for ever in seconds.
            self._changed.wait(min(until, record.ready_at, now + WAIT_MAX_S) - now)


def _is_settled(record: _Record) -> bool:
    return time.monotonic() >= record.ready_at


def _answer(record: _Record, *, replayed: bool) -> bytes:
    rest = wire.DecideResponse(replayed=replayed)
    if not _is_settled(record):
        rest.status = wire.DECISION_STATUS_PROCESSING
        rest.retry_after.CopyFrom(requests.duration(RETRY_AFTER_S))
        return rest.SerializeToString(deterministic=True)
    if record.status == wire.DECISION_STATUS_FAILED_RETRYABLE:
        rest.retry_after.CopyFrom(requests.duration(record.retry_after_s))
    # The recorded bytes as they are: protobuf reads the two as one message.
    return record.settled + rest.SerializeToString(deterministic=True)


def _fill(response: wire.DecideResponse, decided: Outcome | FinalFailure) -> None:
    if isinstance(decided, FinalFailure):
        response.status = wire.DECISION_STATUS_FAILED_FINAL
        response.failure.reason, response.failure.message = decided.reason, decided.message
        return
    response.status = wire.DECISION_STATUS_SUCCEEDED
    response.decision.outcome = decided.outcome
    response.decision.outputs.CopyFrom(facts.freeze(decided.outputs))
    response.decision.reasons.extend(decided.reasons)


def _parsed(request_type: Any, data: bytes) -> Any:
    try:
        request = request_type.FromString(data)
    except message.DecodeError:
        raise _invalid("INVALID_REQUEST", "request", "must be a protobuf message of its type") from None
    unknown = unknown_fields.UnknownFieldSet(request)
    if len(unknown):
        number = unknown[0].field_number
        raise _invalid("UNKNOWN_FIELD", str(number), "is not part of the contract", field_number=str(number))
    return request


def _check_key(request: wire.DecideRequest | wire.GetDecisionStatusRequest) -> None:
    if not is_operation_key(request.operation_key):
        raise _invalid("INVALID_OPERATION_KEY", "operation_key", OPERATION_KEY_RULE)
    _check_name(request.operation)


def _check_name(operation: str) -> None:
    if _OPERATION.fullmatch(operation) is None:
        raise _invalid("INVALID_REQUEST", "operation", "must be an operation's name")


def _canonical(request: wire.DecideRequest) -> bytes:
    """Write what a request asks for in one form: how long it waits isn't part of that."""
    found = results.plain(request.facts)
    try:
        facts.freeze(found)
    except InvalidFacts as refused:
        (violation,) = refused.violations
        raise _invalid("INVALID_FACTS", violation.field, violation.rule, violations="1") from None
    pinned = request.policy_version if request.HasField("policy_version") else None
    return json.dumps([request.operation, pinned, found], sort_keys=True).encode()


def _wait_s(request: wire.DecideRequest | wire.GetDecisionStatusRequest, default_s: float, context: Any) -> float:
    asked_s = request.max_wait.seconds + request.max_wait.nanos / 1e9 if request.HasField("max_wait") else default_s
    if asked_s < 0:
        raise _invalid("INVALID_REQUEST", "max_wait", "must be a duration, zero or more")
    left_s = context.time_remaining()
    return min(asked_s, WAIT_MAX_S, WAIT_MAX_S if left_s is None else left_s - ANSWER_TIME_S)


def _invalid(reason: str, field_name: str, rule: str, **metadata: str) -> _Refusal:
    error = Error(grpc.StatusCode.INVALID_ARGUMENT, reason, metadata=metadata)
    return _Refusal(error, (Violation(field_name, rule),))


def _end(context: Any, refusal: _Refusal) -> None:
    error = refusal.error
    text = error.message or f"{error.reason.lower().replace('_', ' ')}."
    context.set_code(error.code)
    context.set_details(text)
    if error.reason or error.retry_after_s is not None:
        pushback = None if error.retry_after_s is None else str(round(error.retry_after_s * 1000))
        status = CallStatus(
            code=error.code,
            message=text,
            reason=error.reason,
            metadata=error.metadata,
            violations=refusal.violations,
            retry_delay_s=error.retry_after_s,
            pushback=pushback,
        )
        context.set_trailing_metadata(write_trailers(status))


def _uuid7() -> uuid.UUID:
    """Make a UUIDv7 (RFC 9562, section 5.7)."""
    random_bits = secrets.randbits(74)
    high, low = random_bits >> 62, random_bits & (2**62 - 1)
    return uuid.UUID(int=time.time_ns() // 1_000_000 << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low)
