"""The use case before a decision: judge the request, reserve its key, take over what was left, or find the record.

A key that is recorded already is judged by the operation version that it was recorded under; only a new key by today's
catalog. So a catalog change never breaks a safe resend.
"""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import dataclass, replace

from google.protobuf import struct_pb2
from uuid_utils.compat import uuid7

from decideonce_server import measures
from decideonce_server.catalog import Execution
from decideonce_server.catalog_reader import CatalogReader, Operation
from decideonce_server.database import ConnectionLost
from decideonce_server.errors import (
    DecideonceError,
    InvalidFacts,
    NoActivePolicy,
    OperationKeyExpired,
    OperationKeyReused,
    OperationNotFound,
    Overloaded,
    PolicyVersionNotFound,
)
from decideonce_server.fingerprint import FINGERPRINT_VERSION, fingerprint
from decideonce_server.ledger import Attempt, Key, Ledger, Record, Reservation, State
from decideonce_server.limits import Limits
from decideonce_server.policy import PolicyVersion
from decideonce_server.recording import ATTEMPTS_EXHAUSTED, completion
from decideonce_server.sets import LedgerSets

# Judging facts of this size takes about 2 ms, and of 1 MiB a hundred.
LARGE_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """What identifies one request: its key, its facts and the policy version that it pins, if it pins one."""

    key: Key
    facts: struct_pb2.Struct
    policy_version: int | None
    traceparent: str | None = None


class Reserve:
    """Reserves keys."""

    def __init__(self, ledger: Ledger, sets: LedgerSets, catalog: CatalogReader, limits: Limits) -> None:
        self._ledger = ledger
        self._sets = sets
        self._catalog = catalog
        self._limits = limits

    async def reserve(self, request: DecisionRequest) -> Attempt | Record:
        """Begin an attempt at this request, or find the record of an earlier one.

        Raises:
            OperationKeyReused: another request is recorded under this key.
            OperationKeyExpired: the record is past its retention.
            InvalidFacts, OperationNotFound, NoActivePolicy, PolicyVersionNotFound: the key is new, and today's catalog
                refuses the request; nothing was written.
            Overloaded: it would be new work, and this process has as much as it takes on; nothing was written.
            MismatchRateLimited: another request is recorded under this key, and the tenant has had too many of those.
            LedgerUnavailable, LockTimeout: see Ledger.
        """
        tenant = request.key.tenant
        overloaded = self._limits.new_work(tenant)
        with measures.phase("reserve"), self._limits.reserving(tenant) if overloaded is None else nullcontext():
            return await self._reserve_or_find(request, overloaded)

    async def _reserve_or_find(self, request: DecisionRequest, overloaded: Overloaded | None) -> Attempt | Record:
        tenant = request.key.tenant
        reservation = overloaded or self._limits.new_key(tenant) or await self._judge(request)
        while True:
            found = await self._reserve_or_read(request.key, reservation)
            if isinstance(reservation, Reservation) and _record_of(found).decision_id == reservation.decision_id:
                self._limits.count_new_key(tenant)
            if isinstance(found, Attempt):
                self._limits.begin_attempt(tenant)
                return found
            await self._refuse_another(found, request, reservation)
            if found.state is State.EXPIRED:
                raise OperationKeyExpired(str(found.decision_id), found.replayable_until, found.key_retained_until)
            if found.background or not (found.is_abandoned or found.state is State.FAILED_RETRYABLE):
                return found
            if overloaded is not None:
                raise overloaded
            next_attempt = await self.take_over(found)
            if next_attempt is not None:
                return next_attempt

    async def _judge(self, request: DecisionRequest) -> Reservation | DecideonceError:
        """Judge a request as if its key were new, by today's catalog; what refuses it counts for a new key only."""
        operation = self._catalog.operation(request.key.operation)
        if operation is None:
            return OperationNotFound({"operation": request.key.operation})
        policy = self._catalog.policy_of(request.key.operation)
        if policy is None:
            return NoActivePolicy({"operation": request.key.operation})
        try:
            judged = await _judged(request, operation)
            if request.policy_version is not None:
                policy = await self._catalog.policy_version(policy.policy_id, request.policy_version)
        except (InvalidFacts, PolicyVersionNotFound) as refusal:
            return refusal
        return _reservation(request, operation, policy, judged)

    async def _reserve_or_read(self, key: Key, reservation: Reservation | DecideonceError) -> Attempt | Record:
        if isinstance(reservation, Reservation):
            try:
                return await self._sets.reserve(reservation)
            except ConnectionLost:
                # Lost on the way back, it would leave the key to nobody for a whole lease: made again, a reservation
                # knows its own record.
                return await self._sets.reserve(reservation)
        record = await self._sets.read(key)
        if record is None:
            raise reservation
        return record

    async def _refuse_another(
        self, record: Record, request: DecisionRequest, reservation: Reservation | DecideonceError
    ) -> None:
        if isinstance(reservation, Reservation) and reservation.operation_version == record.operation_version:
            # Judged just now, by the very version that the record was made under.
            digest: bytes | None = reservation.fingerprint
        else:
            digest = await self._fingerprint_by(record, request)
        if digest != record.fingerprint:
            await self._limits.mismatch(record.key.tenant)
            raise OperationKeyReused

    async def _fingerprint_by(self, record: Record, request: DecisionRequest) -> bytes | None:
        """Judge a request by the operation version of a record; None where it doesn't satisfy that."""
        operation = await self._catalog.operation_version(record.key.operation, record.operation_version)
        try:
            return (await _judged(request, operation)).fingerprint
        except InvalidFacts:
            # The recorded request satisfied this schema, so this one is another.
            return None

    async def take_over(self, record: Record) -> Attempt | Record | None:
        """Begin the next attempt at a record that was left, or record that none is left; None where it has changed."""
        operation = await self._catalog.operation_version(record.key.operation, record.operation_version)
        if record.attempt >= operation.contract.max_attempts:
            policy = await self._catalog.policy_version(record.policy_id, record.policy_version)
            end = completion(Attempt(record, b""), operation.contract, policy, ATTEMPTS_EXHAUSTED)
            (ended,) = await self._ledger.complete([replace(end, abandoned=True)])
            if ended is not None:
                measures.count_attempts_exhausted()
            return ended
        (taken,) = await self._ledger.take_over([record], [operation.contract.lease])
        if taken is not None:
            self._limits.begin_attempt(record.key.tenant)
        # A background decision's first attempt takes over from nobody.
        if taken is not None and record.attempt > 0:
            measures.count_takeover(after_failure=record.state is State.FAILED_RETRYABLE)
        return taken


def _record_of(found: Attempt | Record) -> Record:
    return found.record if isinstance(found, Attempt) else found


@dataclass(frozen=True, slots=True)
class _Judged:
    """A request that satisfies its operation's schema: its fingerprint, and its facts as JSON text."""

    fingerprint: bytes
    facts: bytes


async def _judged(request: DecisionRequest, operation: Operation) -> _Judged:
    """Judge a request's facts; large ones beside the loop, which goes on with others' calls.

    Raises:
        InvalidFacts: they don't satisfy the schema.
    """

    def judge() -> _Judged:
        accepted = operation.schema.accept(request.facts)
        return _Judged(
            fingerprint(request.key.operation, request.policy_version, accepted.identity),
            json.dumps(accepted.facts, ensure_ascii=False, separators=(",", ":")).encode(),
        )

    return await asyncio.to_thread(judge) if request.facts.ByteSize() > LARGE_BYTES else judge()


def _reservation(request: DecisionRequest, operation: Operation, policy: PolicyVersion, judged: _Judged) -> Reservation:
    return Reservation(
        key=request.key,
        decision_id=uuid7(),
        fingerprint_version=FINGERPRINT_VERSION,
        fingerprint=judged.fingerprint,
        operation_version=operation.version,
        policy_id=policy.policy_id,
        policy_version=policy.version,
        lease=operation.contract.lease,
        background=operation.contract.execution is Execution.BACKGROUND,
        facts=judged.facts,
        traceparent=request.traceparent,
    )
