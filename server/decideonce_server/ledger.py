"""The ledger: one row per (tenant, operation, operation key), and the only code that changes one.

    reserve ──> PROCESSING ──complete──> SUCCEEDED | FAILED_FINAL ──(retention)──> EXPIRED ──(its own)──> absent
                  ^    └────complete──> FAILED_RETRYABLE
                  └──────take_over──────────┘  (also from PROCESSING past its lease)

Postgres is authoritative, and its clock alone judges leases and retention, at read time. `attempt` is the fencing
token: who reserves or takes over holds it, and a completion that names another changes nothing. A key that was
forgotten begins again at attempt 1, so every write compares the decision's id too. Every operation takes and returns
sets, in the order of their members; sets are sorted by key when they are sent, so that two can't deadlock.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum
from functools import cached_property
from typing import Any
from uuid import UUID

from decideonce_server import outbox
from decideonce_server.database import Database, Row, Statement


class State(IntEnum):
    """The recorded state of a key: the numbers of decideonce.v1.DecisionStatus."""

    PROCESSING = 1
    SUCCEEDED = 2
    FAILED_RETRYABLE = 3
    FAILED_FINAL = 4
    EXPIRED = 5

    @property
    def is_final(self) -> bool:
        """Whether nothing but retention changes it any more."""
        return self in (State.SUCCEEDED, State.FAILED_FINAL, State.EXPIRED)


def bucket_of(operation_key: str) -> int:
    """Give a key's bucket, 0 to 255: the first byte of SHA-256 of the operation key."""
    return hashlib.sha256(operation_key.encode()).digest()[0]


@dataclass(frozen=True, order=True)
class Key:
    """What a row is found by. The three stay three, so that no two keys can be spelt alike."""

    tenant: str
    operation: str
    operation_key: str

    @cached_property
    def bucket(self) -> int:
        """The key's bucket."""
        return bucket_of(self.operation_key)

    @property
    def row(self) -> tuple[int, str, str, str]:
        """The primary key."""
        return self.bucket, self.tenant, self.operation, self.operation_key


@dataclass(frozen=True, slots=True)
class Reservation:
    """A key to reserve, with all that its attempts are made from."""

    key: Key
    decision_id: UUID
    fingerprint_version: int
    fingerprint: bytes
    operation_version: int
    policy_id: str
    policy_version: int
    lease: timedelta
    background: bool
    facts: bytes
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What is recorded under a key, as Postgres's clock judged it when it was read.

    `lease_left` is set while PROCESSING, `retry_left` while FAILED_RETRYABLE in the background; both may be negative.
    Lifetimes that are None in a final state are for ever.
    """

    key: Key
    decision_id: UUID
    state: State
    attempt: int
    background: bool
    fingerprint_version: int
    fingerprint: bytes
    operation_version: int
    policy_id: str
    policy_version: int
    reserve_time: datetime
    read_time: datetime
    lease_left: timedelta | None
    retry_left: timedelta | None
    replayable_until: datetime | None
    key_retained_until: datetime | None
    response: bytes | None
    traceparent: str | None = None
    complete_time: datetime | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether the attempt's lease ran out, so that another may take over."""
        return self.lease_left is not None and self.lease_left <= timedelta(0)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The right to decide one key: the record as it was when the attempt began, and its facts as JSON text.

    `began` is when, by this process's monotonic clock, in seconds.
    """

    record: Record
    facts: bytes
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an attempt. `retention` and `tombstone_retention` of None are for ever.

    `abandoned` is set where it isn't the attempt that ends itself: then the lease must be over, or the attempt failed.
    """

    key: Key
    decision_id: UUID
    attempt: int
    state: State
    response: bytes
    retention: timedelta | None
    tombstone_retention: timedelta | None
    retry_after: timedelta | None = None
    events: Sequence[outbox.Event] = field(default_factory=tuple)
    abandoned: bool = False

    @property
    def size(self) -> int:
        """The bytes of its largest part: the response, or an event."""
        return max(len(self.response), *(len(event.payload) for event in self.events), 0)


_KEYS = """unnest(CAST(:buckets AS smallint[]), CAST(:tenants AS text[]), CAST(:operations AS text[]),
    CAST(:operation_keys AS text[])) AS k (bucket, tenant, operation, operation_key)"""

_RECORD = """l.bucket, l.tenant, l.operation, l.operation_key, l.decision_id, l.attempt, l.background,
    l.fingerprint_version, l.fingerprint, l.operation_version, l.policy_id, l.policy_version, l.reserve_time,
    l.complete_time, statement_timestamp() AS read_time,
    l.lease_expires_at - statement_timestamp() AS lease_left, l.retry_at - statement_timestamp() AS retry_left,
    l.replayable_until, l.key_retained_until, l.traceparent,
    CASE WHEN l.replayable_until <= statement_timestamp() THEN 5 ELSE l.state END AS state,
    CASE WHEN l.replayable_until <= statement_timestamp() THEN NULL ELSE l.response END AS response"""

RESERVE = Statement(
    # What is recorded already is read, and nothing written: a set of replays takes no commit. A key that another call
    # reserves at this moment gives no row: `read` then sees it, with a newer snapshot. A background key begins before
    # its first attempt, with a lease that is over, so that a worker takes it over like any other.
    "reserve",
    f"""WITH n AS MATERIALIZED (
        SELECT * FROM unnest(CAST(:buckets AS smallint[]), CAST(:tenants AS text[]), CAST(:operations AS text[]),
        CAST(:operation_keys AS text[]), CAST(:decision_ids AS uuid[]), CAST(:leases AS interval[]),
        CAST(:backgrounds AS boolean[]), CAST(:fingerprint_versions AS smallint[]), CAST(:fingerprints AS bytea[]),
        CAST(:operation_versions AS integer[]), CAST(:policy_ids AS text[]), CAST(:policy_versions AS integer[]),
        CAST(:facts AS bytea[]), CAST(:traceparents AS text[]))
        AS n (bucket, tenant, operation, operation_key, decision_id, lease, background, fingerprint_version,
            fingerprint, operation_version, policy_id, policy_version, facts, traceparent)
    ), known AS (
        SELECT {_RECORD} FROM n JOIN ledger l USING (bucket, tenant, operation, operation_key)
    ), reserved AS (
        INSERT INTO ledger AS l (bucket, tenant, operation, operation_key, decision_id, state, attempt,
            lease_expires_at, background, fingerprint_version, fingerprint, operation_version, policy_id,
            policy_version, reserve_time, facts, traceparent)
        SELECT n.bucket, n.tenant, n.operation, n.operation_key, n.decision_id, 1,
            CASE WHEN n.background THEN 0 ELSE 1 END,
            statement_timestamp() + CASE WHEN n.background THEN interval '0' ELSE n.lease END,
            n.background, n.fingerprint_version, n.fingerprint, n.operation_version, n.policy_id, n.policy_version,
            statement_timestamp(), n.facts, n.traceparent
        FROM n
        WHERE (n.bucket, n.tenant, n.operation, n.operation_key) NOT IN (
            SELECT k.bucket, k.tenant, k.operation, k.operation_key FROM known k)
        ORDER BY n.bucket, n.tenant, n.operation, n.operation_key
        ON CONFLICT (bucket, tenant, operation, operation_key) DO NOTHING
        RETURNING {_RECORD}
    )
    SELECT r.* FROM reserved r
    UNION ALL SELECT k.* FROM known k
    WHERE k.key_retained_until IS NULL OR k.key_retained_until > k.read_time""",
)

READ = Statement(
    # A key past its tombstone's retention is absent, whether or not it was deleted yet.
    "read",
    f"""SELECT {_RECORD} FROM {_KEYS} JOIN ledger l USING (bucket, tenant, operation, operation_key)
    WHERE l.key_retained_until IS NULL OR l.key_retained_until > statement_timestamp()""",
)

FORGET = Statement(
    # Makes room for a new reservation of a key that is past its tombstone's retention.
    "forget",
    f"""DELETE FROM ledger l USING {_KEYS}
    WHERE l.bucket = k.bucket AND l.tenant = k.tenant AND l.operation = k.operation
        AND l.operation_key = k.operation_key AND l.key_retained_until <= statement_timestamp()""",
)

TAKE_OVER = Statement(
    # Compare-and-set on the attempt that was seen: of many who see a lease run out, one gets the next attempt.
    "take_over",
    f"""UPDATE ledger l SET state = 1, attempt = l.attempt + 1, lease_expires_at = statement_timestamp() + t.lease,
        retry_at = NULL, response = NULL
    FROM unnest(CAST(:buckets AS smallint[]), CAST(:tenants AS text[]), CAST(:operations AS text[]),
        CAST(:operation_keys AS text[]), CAST(:decision_ids AS uuid[]), CAST(:attempts AS integer[]),
        CAST(:leases AS interval[])) AS t (bucket, tenant, operation, operation_key, decision_id, attempt, lease)
    WHERE l.bucket = t.bucket AND l.tenant = t.tenant AND l.operation = t.operation
        AND l.operation_key = t.operation_key AND l.decision_id = t.decision_id AND l.attempt = t.attempt
        AND (l.state = 3 OR l.state = 1 AND l.lease_expires_at <= statement_timestamp())
    RETURNING {_RECORD}, l.facts""",
)

COMPLETE = Statement(
    # The decision and its events in one statement, hence in one transaction; an attempt that lost its lease to another
    # changes nothing and tells no event. Whoever ends what was abandoned finds it so at that moment: attempts are
    # exhausted only when nobody is at work.
    "complete",
    f"""WITH done AS (
        UPDATE ledger l SET state = c.state, lease_expires_at = NULL, response = c.response,
            retry_at = statement_timestamp() + c.retry_after, complete_time = statement_timestamp(),
            replayable_until = CASE WHEN c.state <> 3 THEN statement_timestamp() + c.retention END,
            key_retained_until =
                CASE WHEN c.state <> 3 THEN statement_timestamp() + c.retention + c.tombstone_retention END
        FROM unnest(CAST(:buckets AS smallint[]), CAST(:tenants AS text[]), CAST(:operations AS text[]),
            CAST(:operation_keys AS text[]), CAST(:decision_ids AS uuid[]), CAST(:attempts AS integer[]),
            CAST(:states AS smallint[]), CAST(:responses AS bytea[]), CAST(:retry_afters AS interval[]),
            CAST(:retentions AS interval[]), CAST(:tombstone_retentions AS interval[]), CAST(:abandoned AS boolean[]))
            AS c (bucket, tenant, operation, operation_key, decision_id, attempt, state, response, retry_after,
                retention, tombstone_retention, abandoned)
        WHERE l.bucket = c.bucket AND l.tenant = c.tenant AND l.operation = c.operation
            AND l.operation_key = c.operation_key AND l.decision_id = c.decision_id AND l.attempt = c.attempt
            AND CASE WHEN c.abandoned THEN l.state = 3 OR l.state = 1 AND l.lease_expires_at <= statement_timestamp()
                ELSE l.state = 1 END
        RETURNING {_RECORD}
    ), told AS (
        {outbox.INSERT_FOR_DONE}
    )
    SELECT * FROM done""",
)

RENEW = Statement(
    # Only while the attempt is still the key's; one that was taken over stays lost.
    "renew",
    """UPDATE ledger l SET lease_expires_at = statement_timestamp() + t.lease
    FROM unnest(CAST(:buckets AS smallint[]), CAST(:tenants AS text[]), CAST(:operations AS text[]),
        CAST(:operation_keys AS text[]), CAST(:decision_ids AS uuid[]), CAST(:attempts AS integer[]),
        CAST(:leases AS interval[])) AS t (bucket, tenant, operation, operation_key, decision_id, attempt, lease)
    WHERE l.bucket = t.bucket AND l.tenant = t.tenant AND l.operation = t.operation
        AND l.operation_key = t.operation_key AND l.decision_id = t.decision_id AND l.attempt = t.attempt
        AND l.state = 1
    RETURNING l.tenant, l.operation, l.operation_key""",
)

MISMATCH = Statement(
    # All processes count together, by the minute of Postgres's clock. Counts of minutes that are over are forgotten.
    "mismatch",
    """WITH gone AS (
        DELETE FROM mismatch m WHERE m.tenant = :tenant AND m.minute < date_trunc('minute', statement_timestamp())
    )
    INSERT INTO mismatch AS m (tenant, minute, count)
    VALUES (:tenant, date_trunc('minute', statement_timestamp()), 1)
    ON CONFLICT (tenant, minute) DO UPDATE SET count = m.count + 1
    RETURNING m.count AS mismatches, 60 - extract(second FROM statement_timestamp()) AS seconds_left""",
)

DUE = Statement(
    # Work that no attempt holds: not begun, abandoned, or failed and due again. Each tenant's oldest first, tenants in
    # turn, so that one with a long backlog doesn't keep the others waiting; the recursion finds the next tenant by one
    # look into the index.
    "due",
    f"""WITH RECURSIVE tenants AS (
        (SELECT l.tenant FROM ledger l WHERE coalesce(l.lease_expires_at, l.retry_at) IS NOT NULL
            ORDER BY l.tenant LIMIT 1)
        UNION ALL
        SELECT (SELECT l.tenant FROM ledger l WHERE coalesce(l.lease_expires_at, l.retry_at) IS NOT NULL
            AND l.tenant > t.tenant ORDER BY l.tenant LIMIT 1)
        FROM tenants t WHERE t.tenant IS NOT NULL
    )
    SELECT {_RECORD} FROM tenants t CROSS JOIN LATERAL (
        SELECT d.*, row_number() OVER (ORDER BY coalesce(d.lease_expires_at, d.retry_at)) AS turn FROM ledger d
        WHERE d.tenant = t.tenant AND coalesce(d.lease_expires_at, d.retry_at) <= statement_timestamp()
            AND (d.background OR :abandoned)
        ORDER BY coalesce(d.lease_expires_at, d.retry_at) LIMIT :limit
    ) l
    ORDER BY l.turn, coalesce(l.lease_expires_at, l.retry_at) LIMIT :limit""",
)

TOMBSTONE = Statement(
    # One bucket's oldest answers past their retention lose body and facts, unless an event still has to be published.
    # NOT IN reads a bucket's events once, into a hash; NOT EXISTS was planned to read them once for every row.
    "tombstone",
    """UPDATE ledger l SET state = 5, facts = NULL, response = NULL
    FROM (
        SELECT e.bucket, e.tenant, e.operation, e.operation_key FROM ledger e
        WHERE e.bucket = :bucket AND e.state IN (2, 4) AND e.replayable_until <= statement_timestamp()
            AND (e.tenant, e.operation, e.operation_key) NOT IN (
                SELECT o.tenant, o.operation, o.operation_key FROM outbox o WHERE o.bucket = :bucket
                UNION ALL
                SELECT p.tenant, p.operation, p.operation_key FROM outbox_parked p WHERE p.bucket = :bucket)
        ORDER BY e.replayable_until LIMIT :limit
    ) k
    WHERE l.bucket = k.bucket AND l.tenant = k.tenant AND l.operation = k.operation
        AND l.operation_key = k.operation_key AND l.state IN (2, 4) AND l.replayable_until <= statement_timestamp()
    RETURNING 1""",
)

REAPABLE = Statement(
    # The buckets that have work for the reaper: two looks into an index each.
    "reapable",
    """SELECT b.bucket FROM generate_series(0, 255) AS b (bucket)
    WHERE EXISTS (SELECT FROM ledger l
            WHERE l.bucket = b.bucket AND l.state IN (2, 4) AND l.replayable_until <= statement_timestamp())
        OR EXISTS (SELECT FROM ledger l
            WHERE l.bucket = b.bucket AND l.state = 5 AND l.key_retained_until <= statement_timestamp())""",
)

PURGE = Statement(
    # One bucket's oldest tombstones past their own retention; the keys are new again, as they were since that moment.
    "purge",
    """DELETE FROM ledger l USING (
        SELECT e.bucket, e.tenant, e.operation, e.operation_key FROM ledger e
        WHERE e.bucket = :bucket AND e.state = 5 AND e.key_retained_until <= statement_timestamp()
        ORDER BY e.key_retained_until LIMIT :limit
    ) k
    WHERE l.bucket = k.bucket AND l.tenant = k.tenant AND l.operation = k.operation
        AND l.operation_key = k.operation_key AND l.state = 5 AND l.key_retained_until <= statement_timestamp()
    RETURNING 1""",
)


class Ledger:
    """The ledger in Postgres. Each operation is one statement unless it says otherwise.

    Every operation raises LedgerUnavailable where Postgres can't be reached or can't do it now, and LockTimeout where
    another transaction holds a row for longer than the lock time-out.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def reserve(self, reservations: Sequence[Reservation]) -> list[Attempt | Record]:
        """Reserve each key, or read what is recorded under it; two statements where another call takes one meanwhile.

        An Attempt means that the key is now reserved by this call. For a background operation a Record of attempt 0 is
        given even to the call that reserved it: a worker makes the attempts. A reservation whose answer was lost can
        be made again: its own record is known by its decision id.
        """
        results: dict[UUID, Attempt | Record] = {}
        rest = sorted(reservations, key=lambda r: r.key.row)
        while rest:
            rows = await self._database.run(RESERVE, **reserve_parameters(rest))
            known = {record.key: record for record in map(_record, rows)}
            rest = _settle(rest, known, results)
            if not rest:
                break
            taken = await self.read([r.key for r in rest])
            rest = _settle(rest, {record.key: record for record in taken if record is not None}, results)
            if rest:
                await self._database.run(FORGET, **_key_parameters([r.key for r in rest]))
        return [results[r.decision_id] for r in reservations]

    async def read(self, keys: Sequence[Key]) -> list[Record | None]:
        """Read what is recorded under each key; None where nothing is, or nothing any more."""
        if not keys:
            return []
        rows = await self._database.run(READ, **_key_parameters(keys))
        known = {record.key: record for record in map(_record, rows)}
        return [known.get(key) for key in keys]

    async def take_over(self, records: Sequence[Record], leases: Sequence[timedelta]) -> list[Attempt | None]:
        """Begin the next attempt at each record that was read; None where the record has changed since.

        Taken over is what is FAILED_RETRYABLE, or PROCESSING past its lease.
        """
        parameters = _key_parameters([record.key for record in records])
        rows = await self._database.run(
            TAKE_OVER,
            **parameters,
            decision_ids=[record.decision_id for record in records],
            attempts=[record.attempt for record in records],
            leases=list(leases),
        )
        taken = {attempt.record.key: attempt for attempt in (Attempt(_record(row), row["facts"]) for row in rows)}
        return [taken.get(record.key) for record in records]

    async def complete(self, completions: Sequence[Completion]) -> list[Record | None]:
        """End each attempt, with its events, in one transaction; None where the attempt is no longer the key's.

        Of two that are of one key, as an attempt and the one that took over from it, the second has a transaction of
        its own: a key's row and events tell of one end.
        """
        firsts = {c.key: c for c in reversed(completions)}
        done = await self._complete(list(firsts.values()))
        seconds = [c for c in completions if firsts[c.key] is not c]
        later = iter(await self.complete(seconds) if seconds else ())
        return [done.get(c.key) if firsts[c.key] is c else next(later) for c in completions]

    async def _complete(self, completions: Sequence[Completion]) -> dict[Key, Record]:
        ordered = sorted(completions, key=lambda c: c.key.row)
        events = [event for completion in ordered for event in completion.events]
        rows = await self._database.run(
            COMPLETE,
            **_key_parameters([c.key for c in ordered]),
            decision_ids=[c.decision_id for c in ordered],
            attempts=[c.attempt for c in ordered],
            states=[c.state for c in ordered],
            responses=[c.response for c in ordered],
            retry_afters=[c.retry_after for c in ordered],
            retentions=[c.retention for c in ordered],
            tombstone_retentions=[c.tombstone_retention for c in ordered],
            abandoned=[c.abandoned for c in ordered],
            **outbox.insert_parameters(events),
        )
        return {record.key: record for record in map(_record, rows)}

    async def renew(self, records: Sequence[Record], leases: Sequence[timedelta]) -> set[Key]:
        """Renew each attempt's lease, from now; give the keys whose attempt is still theirs."""
        rows = await self._database.run(
            RENEW,
            **_key_parameters([record.key for record in records]),
            decision_ids=[record.decision_id for record in records],
            attempts=[record.attempt for record in records],
            leases=list(leases),
        )
        return {Key(row["tenant"], row["operation"], row["operation_key"]) for row in rows}

    async def release(self, records: Sequence[Record]) -> None:
        """End each attempt's lease now, so that another can take over at once."""
        await self.renew(records, [timedelta(0)] * len(records))

    async def due(self, limit: int, *, abandoned: bool) -> list[Record]:
        """Read work that no attempt holds: background work, and with `abandoned` inline work past its lease too."""
        return [_record(row) for row in await self._database.run(DUE, limit=limit, abandoned=abandoned)]

    async def count_mismatch(self, tenant: str) -> tuple[int, float]:
        """Count a mismatch of a tenant; give how many this minute has had, and how many seconds are left of it."""
        (row,) = await self._database.run(MISMATCH, tenant=tenant)
        return row["mismatches"], float(row["seconds_left"])

    async def reapable(self) -> list[int]:
        """List the buckets in which something is past its retention."""
        return [row["bucket"] for row in await self._database.run(REAPABLE)]

    async def tombstone(self, bucket: int, limit: int) -> int:
        """Take body and facts from answers of a bucket that are past their retention; give how many."""
        return len(await self._database.run(TOMBSTONE, bucket=bucket, limit=limit))

    async def purge(self, bucket: int, limit: int) -> int:
        """Delete tombstones of a bucket that are past their own retention; give how many."""
        return len(await self._database.run(PURGE, bucket=bucket, limit=limit))


def _settle(
    reservations: Sequence[Reservation],
    known: Mapping[Key, Record],
    results: dict[UUID, Attempt | Record],
) -> list[Reservation]:
    """Give each reservation whose key is known its result, and the others back."""
    for reservation in reservations:
        if (record := known.get(reservation.key)) is not None:
            results[reservation.decision_id] = _own_or_known(reservation, record)
    return [r for r in reservations if r.decision_id not in results]


def _own_or_known(reservation: Reservation, record: Record) -> Attempt | Record:
    is_own = record.decision_id == reservation.decision_id and record.attempt == 1 and record.state is State.PROCESSING
    return Attempt(record, reservation.facts) if is_own and not record.background else record


def _key_parameters(keys: Sequence[Key]) -> dict[str, list[Any]]:
    return {
        "buckets": [key.bucket for key in keys],
        "tenants": [key.tenant for key in keys],
        "operations": [key.operation for key in keys],
        "operation_keys": [key.operation_key for key in keys],
    }


def reserve_parameters(reservations: Sequence[Reservation]) -> dict[str, list[Any]]:
    """Give the parameters of RESERVE."""
    return _key_parameters([r.key for r in reservations]) | {
        "decision_ids": [r.decision_id for r in reservations],
        "leases": [r.lease for r in reservations],
        "backgrounds": [r.background for r in reservations],
        "fingerprint_versions": [r.fingerprint_version for r in reservations],
        "fingerprints": [r.fingerprint for r in reservations],
        "operation_versions": [r.operation_version for r in reservations],
        "policy_ids": [r.policy_id for r in reservations],
        "policy_versions": [r.policy_version for r in reservations],
        "facts": [r.facts for r in reservations],
        "traceparents": [r.traceparent for r in reservations],
    }


def _record(row: Row) -> Record:
    return Record(
        key=Key(row["tenant"], row["operation"], row["operation_key"]),
        decision_id=row["decision_id"],
        state=State(row["state"]),
        attempt=row["attempt"],
        background=row["background"],
        fingerprint_version=row["fingerprint_version"],
        fingerprint=row["fingerprint"],
        operation_version=row["operation_version"],
        policy_id=row["policy_id"],
        policy_version=row["policy_version"],
        reserve_time=row["reserve_time"],
        read_time=row["read_time"],
        lease_left=row["lease_left"],
        retry_left=row["retry_left"],
        replayable_until=row["replayable_until"],
        key_retained_until=row["key_retained_until"],
        response=row["response"],
        traceparent=row["traceparent"],
        complete_time=row["complete_time"],
    )
