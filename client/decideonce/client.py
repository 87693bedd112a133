"""The client of decideonce: a business decision exactly once, whatever happens on the way.

    async with DecisionClient("127.0.0.1:50051", token=token) as client:
        decision = await client.decide("credit.approve-loan", {"amount_minor": 120_000}, key=loan_id)
        decision.outcome

`SyncDecisionClient` is the same without async. Both do what `decideonce.protocol` says, and nothing else.

A call to `decide` is one logical run of an operation. Its facts are frozen when it begins, and everything that is sent
for it has the same operation key and the same bytes, so that a run is decided once however often it is sent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import grpc
import grpc.aio

from decideonce import requests
from decideonce._status import read_status
from decideonce.channel import CHANNEL_OPTIONS, Metadata, Token, check_plaintext, checked_metadata, with_token
from decideonce.errors import (
    DeadlineExceeded,
    DecideonceError,
    DecisionFailed,
    DecisionNotFound,
    FailedRetryable,
    InternalError,
    InvalidFacts,
    InvalidOperationKey,
    InvalidRequest,
    JournalFull,
    NoActivePolicy,
    OperationKeyExpired,
    OperationKeyReused,
    OperationNotFound,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    PolicyVersionNotFound,
    Refused,
    StillProcessing,
    Unauthenticated,
    Unavailable,
    UnknownField,
    Violation,
)
from decideonce.journal import Journal
from decideonce.keys import new_operation_key
from decideonce.protocol import Method, Pause, Protocol, Send, Steps, Store
from decideonce.requests import DecisionRequest, prepare
from decideonce.results import Decision, DecisionStatus, Execution, Failure, Operation, Provenance, Recorded
from decideonce.retry import RetryBudget, RetryPolicy

__all__ = [
    "CHANNEL_OPTIONS",
    "DEADLINE_S",
    "DeadlineExceeded",
    "DecideonceError",
    "Decision",
    "DecisionClient",
    "DecisionFailed",
    "DecisionNotFound",
    "DecisionRequest",
    "DecisionStatus",
    "Execution",
    "FailedRetryable",
    "Failure",
    "InternalError",
    "InvalidFacts",
    "InvalidOperationKey",
    "InvalidRequest",
    "Journal",
    "JournalFull",
    "NoActivePolicy",
    "Operation",
    "OperationKeyExpired",
    "OperationKeyReused",
    "OperationNotFound",
    "OutcomeUnknown",
    "Overloaded",
    "PermissionDenied",
    "PolicyVersionNotFound",
    "Provenance",
    "Recorded",
    "Refused",
    "Resumed",
    "RetryPolicy",
    "StillProcessing",
    "SyncDecisionClient",
    "Unauthenticated",
    "Unavailable",
    "UnknownField",
    "Violation",
    "new_operation_key",
    "prepare",
]

DEADLINE_S = 30.0

T = TypeVar("T")
ChannelT = TypeVar("ChannelT", grpc.aio.Channel, grpc.Channel)


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request of a journal that was sent again: with its decision, or the error that it ended with this time."""

    request: DecisionRequest
    decision: Decision | None
    error: DecideonceError | None


class _Client(Generic[ChannelT]):
    """What the two clients have in common: their settings, and what a call is made of."""

    def __init__(
        self,
        service: str | ChannelT,
        *,
        token: Token | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008  # frozen
        deadline: float | timedelta = DEADLINE_S,
        options: Sequence[tuple[str, Any]] = (),
        allow_plaintext_token: bool = False,
    ) -> None:
        if isinstance(service, str) and credentials is None:
            check_plaintext(service, has_token=token is not None, allowed=allow_plaintext_token)
        self._service: str | ChannelT = service
        self._token = token
        self._credentials = credentials
        self._options = [*CHANNEL_OPTIONS, *options]
        self._deadline_s = requests.seconds(deadline, "deadline")
        self._protocol = Protocol(retry, RetryBudget(retry))
        self._lock = threading.Lock()
        self._channel: ChannelT | None = None
        self._methods: dict[Method, Callable[..., Any]] = {}

    def _begin(self, step: Send, metadata: Metadata) -> Any:
        """Begin the call that a step asks for, with its very bytes."""
        with self._lock:
            if self._channel is None:
                # Not before: a channel of grpc.aio belongs to the loop that runs when it is made, and none survives a
                # fork.
                self._channel = self._open() if isinstance(self._service, str) else self._service
        if step.method not in self._methods:
            self._methods[step.method] = self._channel.unary_unary(
                step.method.path, response_deserializer=step.method.answer.FromString
            )
        method = self._methods[step.method]
        return method(step.request, timeout=step.timeout_s, metadata=with_token(metadata, self._token))

    def _open(self) -> ChannelT:
        raise NotImplementedError

    def _deciding(
        self,
        request: DecisionRequest,
        max_wait: float | timedelta | None,
        deadline: float | timedelta | None,
        journal: Journal | None,
    ) -> Steps[Decision]:
        max_wait_s = None if max_wait is None else requests.seconds(max_wait, "max_wait")
        return self._protocol.decide(request, self._deadline(deadline, max_wait_s), max_wait_s, journal)

    def _telling(
        self, operation: str, key: str, max_wait: float | timedelta, deadline: float | timedelta | None
    ) -> Steps[Recorded]:
        requests.check_key(operation, key)
        max_wait_s = requests.seconds(max_wait, "max_wait")
        return self._protocol.status(operation, key, max_wait_s, self._deadline(deadline, max_wait_s))

    def _deadline(self, given: float | timedelta | None, max_wait_s: float | None) -> float:
        if given is None:
            return self._deadline_s + (max_wait_s or 0.0)
        return requests.seconds(given, "deadline")


class DecisionClient(_Client[grpc.aio.Channel]):
    """A client for asyncio.

    `service` is its address, in any form that gRPC takes ("host:50051", "dns:///host:50051", "unix:/path"), or a
    channel of your own, which stays yours to close; give that `CHANNEL_OPTIONS`, and no service config that retries.
    `token` is the caller's bearer token, or a function that gives it, which is called for each send and mustn't block.
    `credentials` are for TLS, such as `grpc.ssl_channel_credentials()`; without them a token is sent to this machine
    only, unless `allow_plaintext_token`. `retry` says how often is tried again, `deadline` (in seconds, or a timedelta)
    how long a call may take that doesn't say so itself. `options` are gRPC's, over those of CHANNEL_OPTIONS.

    One client for one event loop; any number of calls may share it. Raises InvalidRequest.
    """

    async def decide(
        self,
        operation: str,
        facts: Mapping[str, object],
        *,
        key: str | None = None,
        policy_version: int | None = None,
        max_wait: float | timedelta | None = None,
        deadline: float | timedelta | None = None,
        journal: Journal | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> Decision:
        """Decide once, or get the recorded decision.

        `key` names this logical run: use the same for every repetition of it, and a name of your own, such as the
        loan's, where a process may die in between. Without it: a UUIDv4, which the decision and every error have.
        `facts` are JSON values (see `decideonce.facts`); they are copied before anything is sent. `policy_version` pins
        one. `max_wait` is how long to wait while the service works on the decision, zero for not at all; without it: up
        to the deadline. `deadline` is when the call ends whatever happens; without it: the client's, on top of
        max_wait. Both are in seconds from now, or timedeltas. A `journal` keeps the request until its end is known.
        `metadata` is sent along, such as a `traceparent`.

        Raises the errors of `decideonce.errors`: InvalidRequest and its kin before anything is sent or from the
        service, DecisionFailed where a failure is recorded for good, OutcomeUnknown where the same call has to be made
        again, with the error's `operation_key`.
        """
        request = prepare(operation, facts, key=key, policy_version=policy_version, max_wait=max_wait)
        return await self.send(request, max_wait=max_wait, deadline=deadline, journal=journal, metadata=metadata)

    async def send(
        self,
        request: DecisionRequest,
        *,
        max_wait: float | timedelta | None = None,
        deadline: float | timedelta | None = None,
        journal: Journal | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> Decision:
        """Do what `decide` does, with a request that was prepared before."""
        return await self._run(self._deciding(request, max_wait, deadline, journal), metadata)

    async def status(
        self,
        operation: str,
        key: str,
        *,
        max_wait: float | timedelta = 0.0,
        deadline: float | timedelta | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> Recorded:
        """Tell what is recorded under a key; wait up to `max_wait` until that is settled.

        Raises DecisionNotFound, InvalidRequest, Unauthenticated, PermissionDenied and OutcomeUnknown.
        """
        return await self._run(self._telling(operation, key, max_wait, deadline), metadata)

    async def operation(
        self,
        name: str,
        *,
        deadline: float | timedelta | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> Operation:
        """Tell an operation's contract.

        Raises OperationNotFound, InvalidRequest, Unauthenticated, PermissionDenied and OutcomeUnknown.
        """
        return await self._run(self._protocol.operation(name, self._deadline(deadline, None)), metadata)

    async def resume(
        self,
        journal: Journal,
        *,
        older_than: float | timedelta = 0.0,
        deadline: float | timedelta | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> AsyncIterator[Resumed]:
        """Send again what a journal has, oldest first, and give how each ended.

        What is finished is no longer in the journal when it is given; what isn't stays there for the next time. Where
        processes share a journal, `older_than` (in seconds, or a timedelta) leaves out what others may still be at:
        give more than their deadlines. `deadline` is for each.
        """
        age = requests.seconds(older_than, "older_than")
        for request in await asyncio.to_thread(journal.unfinished, age):
            try:
                decision = await self.send(request, deadline=deadline, journal=journal, metadata=metadata)
            except DecideonceError as error:
                yield Resumed(request, None, error)
            else:
                yield Resumed(request, decision, None)

    async def close(self) -> None:
        """Close the channel that this client made; calls on their way are cancelled."""
        if self._channel is not None and isinstance(self._service, str):
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, steps: Steps[T], metadata: Mapping[str, str | bytes] | None) -> T:
        checked = checked_metadata(metadata)
        came: Any = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as done:
                return cast("T", done.value)
            came = None
            match step:
                case Send():
                    came = await self._sent(step, checked)
                case Pause():
                    await asyncio.sleep(step.seconds)
                case Store():
                    await asyncio.to_thread(step.work)

    async def _sent(self, step: Send, metadata: Metadata) -> Any:
        try:
            return await self._begin(step, metadata)
        except grpc.aio.AioRpcError as error:
            return read_status(error.code(), error.details(), error.trailing_metadata())

    def _open(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(str(self._service), options=self._options)
        return grpc.aio.secure_channel(str(self._service), self._credentials, options=self._options)


class SyncDecisionClient(_Client[grpc.Channel]):
    """A client that blocks. Its arguments and methods are those of `DecisionClient`; any thread may use it."""

    def decide(
        self,
        operation: str,
        facts: Mapping[str, object],
        *,
        key: str | None = None,
        policy_version: int | None = None,
        max_wait: float | timedelta | None = None,
        deadline: float | timedelta | None = None,
        journal: Journal | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> Decision:
        """Do what `DecisionClient.decide` does."""
        request = prepare(operation, facts, key=key, policy_version=policy_version, max_wait=max_wait)
        return self.send(request, max_wait=max_wait, deadline=deadline, journal=journal, metadata=metadata)

    def send(
        self,
        request: DecisionRequest,
        *,
        max_wait: float | timedelta | None = None,
        deadline: float | timedelta | None = None,
        journal: Journal | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> Decision:
        """Do what `DecisionClient.send` does."""
        return self._run(self._deciding(request, max_wait, deadline, journal), metadata)

    def status(
        self,
        operation: str,
        key: str,
        *,
        max_wait: float | timedelta = 0.0,
        deadline: float | timedelta | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> Recorded:
        """Do what `DecisionClient.status` does."""
        return self._run(self._telling(operation, key, max_wait, deadline), metadata)

    def operation(
        self,
        name: str,
        *,
        deadline: float | timedelta | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> Operation:
        """Do what `DecisionClient.operation` does."""
        return self._run(self._protocol.operation(name, self._deadline(deadline, None)), metadata)

    def resume(
        self,
        journal: Journal,
        *,
        older_than: float | timedelta = 0.0,
        deadline: float | timedelta | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> Iterator[Resumed]:
        """Do what `DecisionClient.resume` does."""
        for request in journal.unfinished(requests.seconds(older_than, "older_than")):
            try:
                decision = self.send(request, deadline=deadline, journal=journal, metadata=metadata)
            except DecideonceError as error:
                yield Resumed(request, None, error)
            else:
                yield Resumed(request, decision, None)

    def close(self) -> None:
        """Close the channel that this client made; calls on their way are cancelled."""
        if self._channel is not None and isinstance(self._service, str):
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, steps: Steps[T], metadata: Mapping[str, str | bytes] | None) -> T:
        checked = checked_metadata(metadata)
        came: Any = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as done:
                return cast("T", done.value)
            came = None
            match step:
                case Send():
                    came = self._sent(step, checked)
                case Pause():
                    time.sleep(step.seconds)
                case Store():
                    step.work()

    def _sent(self, step: Send, metadata: Metadata) -> Any:
        try:
            return self._begin(step, metadata)
        except grpc.RpcError as error:
            call = cast("grpc.Call", error)
            return read_status(call.code(), call.details(), cast("Any", call.trailing_metadata()))

    def _open(self) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(str(self._service), options=self._options)
        return grpc.secure_channel(str(self._service), self._credentials, options=self._options)
