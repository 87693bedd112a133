"""The outbox: events that wait to be published, written in their decision's own transaction.

The table only ever sees INSERT and DELETE. An event that can't be sent moves to `outbox_parked`, with the reason; the
later events of its key wait until an operator sends it again or discards it. Deleting and parking are fenced by the
bucket's lease: a publisher that lost it changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from decideonce_server.database import Database, Statement

# What one read gives at most, beside its limit: events can be large, and all of it is in memory.
READ_BYTES_MAX = 16 * 1024 * 1024
# Of one bucket in one read, so that a read never looks at more of the first buckets than it has use for.
READ_PER_BUCKET = 64


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a key. `payload` is a serialized decideonce.v1.DecisionEvent."""

    id: UUID
    bucket: int
    tenant: str
    operation: str
    operation_key: str
    type: str
    payload: bytes
    topic: str
    traceparent: str | None = None

    @property
    def aggregate_id(self) -> str:
        """What orders events and partitions topics: neither part can have the "/" that joins them."""
        return f"{self.tenant}/{self.operation_key}"


@dataclass(frozen=True, slots=True)
class ParkedEvent:
    """An event that couldn't be sent, why, and since when by Postgres's clock."""

    event: Event
    reason: str
    park_time: datetime


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits: how many events, the id of the oldest of them, and how many are parked."""

    pending: int
    oldest: UUID | None
    parked: int


_COLUMNS = "bucket, id, tenant, operation, operation_key, aggregatetype, aggregateid, type, payload, topic, traceparent"
_EVENT = "o.id, o.bucket, o.tenant, o.operation, o.operation_key, o.type, o.payload, o.topic, o.traceparent"

# Part of the ledger's `complete`: the events of those members of the set whose attempt was still the key's. In order of
# their ids, so that whoever reads Postgres's log has a key's events in theirs.
INSERT_FOR_DONE = f"""INSERT INTO outbox ({_COLUMNS})
    SELECT e.bucket, e.id, e.tenant, e.operation, e.operation_key, e.operation, e.aggregateid, e.type, e.payload,
        e.topic, e.traceparent
    FROM unnest(CAST(:event_buckets AS smallint[]), CAST(:event_ids AS uuid[]), CAST(:event_tenants AS text[]),
        CAST(:event_operations AS text[]), CAST(:event_operation_keys AS text[]), CAST(:event_aggregate_ids AS text[]),
        CAST(:event_types AS text[]), CAST(:event_payloads AS bytea[]), CAST(:event_topics AS text[]),
        CAST(:event_traceparents AS text[]))
        AS e (bucket, id, tenant, operation, operation_key, aggregateid, type, payload, topic, traceparent)
    JOIN done USING (bucket, tenant, operation, operation_key)
    ORDER BY e.id"""

WAITING = Statement(
    # The oldest events of these buckets, but for those of a key that has an event parked. There is no memory of what
    # was read: an event that commits late is seen when it is there, whatever its id. The limit comes before the sum, so
    # that no bucket is looked into once there are enough.
    "outbox_waiting",
    f"""SELECT {_EVENT} FROM (
        SELECT e.*, sum(octet_length(e.payload)) OVER (ORDER BY e.place, e.id) - octet_length(e.payload) AS before
        FROM (
            SELECT b.place, w.* FROM unnest(CAST(:buckets AS smallint[])) WITH ORDINALITY AS b (bucket, place)
            CROSS JOIN LATERAL (
                SELECT w.* FROM outbox w
                WHERE w.bucket = b.bucket AND NOT EXISTS (
                    SELECT FROM outbox_parked p
                    WHERE p.bucket = w.bucket AND p.tenant = w.tenant AND p.operation = w.operation
                        AND p.operation_key = w.operation_key)
                ORDER BY w.id LIMIT :per_bucket
            ) w
            LIMIT :limit
        ) e
    ) o
    WHERE o.before < :bytes_max
    ORDER BY o.id""",
)

_MINE = """FROM unnest(CAST(:buckets AS smallint[]), CAST(:ids AS uuid[])) AS k (bucket, id)
    JOIN bucket_lease b ON b.bucket = k.bucket AND b.holder = :holder AND b.lease_expires_at > statement_timestamp()"""

PUBLISHED = Statement(
    # Events that the sink has: they have done their work, unless another publisher holds the bucket now.
    "outbox_published",
    f"""DELETE FROM outbox o USING (SELECT k.bucket, k.id {_MINE}) m WHERE o.bucket = m.bucket AND o.id = m.id
    RETURNING o.id""",
)

PARK = Statement(
    # In one statement, so that an event is never in both tables or in none.
    "outbox_park",
    f"""WITH refused AS (
        DELETE FROM outbox o USING (SELECT k.bucket, k.id {_MINE}) m WHERE o.bucket = m.bucket AND o.id = m.id
        RETURNING o.*
    )
    INSERT INTO outbox_parked ({_COLUMNS}, reason, park_time)
    SELECT {", ".join("r." + column.strip() for column in _COLUMNS.split(","))}, t.reason, statement_timestamp()
    FROM refused r JOIN unnest(CAST(:ids AS uuid[]), CAST(:reasons AS text[])) AS t (id, reason) USING (id)
    RETURNING id""",
)

RETRY = Statement(
    # Back among those that wait, under its own id: before the later events of its key.
    "outbox_retry",
    f"""WITH again AS (DELETE FROM outbox_parked p WHERE CAST(:ids AS uuid[]) IS NULL OR p.id = ANY(:ids) RETURNING p.*)
    INSERT INTO outbox ({_COLUMNS}) SELECT {_COLUMNS} FROM again RETURNING id""",
)

DISCARD = Statement(
    # For good; the later events of its key go on.
    "outbox_discard",
    "DELETE FROM outbox_parked p WHERE p.id = ANY(CAST(:ids AS uuid[])) RETURNING p.id",
)

LIST = Statement(
    # For people; the publisher reads by bucket.
    "outbox_list",
    f"SELECT {_EVENT} FROM outbox o ORDER BY o.id LIMIT :limit",
)

PARKED = Statement(
    # For people; one event where an id is given.
    "outbox_parked",
    f"""SELECT {_EVENT}, o.reason, o.park_time FROM outbox_parked o
    WHERE CAST(:id AS uuid) IS NULL OR o.id = :id ORDER BY o.id LIMIT :limit""",
)

SHOW = Statement("outbox_show", f"SELECT {_EVENT} FROM outbox o WHERE o.id = :id")

BACKLOG = Statement(
    # The oldest of each bucket is one look into the primary key.
    "outbox_backlog",
    """SELECT (SELECT count(*) FROM outbox) AS pending, (SELECT count(*) FROM outbox_parked) AS parked,
        (SELECT e.id FROM generate_series(0, 255) AS b (bucket)
            CROSS JOIN LATERAL (SELECT o.id FROM outbox o WHERE o.bucket = b.bucket ORDER BY o.id LIMIT 1) e
            ORDER BY e.id LIMIT 1) AS oldest""",
)


def insert_parameters(events: Sequence[Event]) -> dict[str, list[Any]]:
    """Give the parameters of INSERT_FOR_DONE."""
    return {
        "event_buckets": [event.bucket for event in events],
        "event_ids": [event.id for event in events],
        "event_tenants": [event.tenant for event in events],
        "event_operations": [event.operation for event in events],
        "event_operation_keys": [event.operation_key for event in events],
        "event_aggregate_ids": [event.aggregate_id for event in events],
        "event_types": [event.type for event in events],
        "event_payloads": [event.payload for event in events],
        "event_topics": [event.topic for event in events],
        "event_traceparents": [event.traceparent for event in events],
    }


class Outbox:
    """The outbox in Postgres.

    Every operation raises LedgerUnavailable where Postgres can't be reached or can't do it now.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def waiting(self, buckets: Sequence[int], limit: int) -> list[Event]:
        """Read what waits in these buckets and may be sent, the first buckets' first; by key in order."""
        rows = await self._database.run(
            WAITING,
            buckets=list(buckets),
            per_bucket=READ_PER_BUCKET,
            limit=limit,
            bytes_max=READ_BYTES_MAX,
        )
        return [Event(**dict(row)) for row in rows]

    async def published(self, holder: UUID, events: Sequence[Event]) -> int:
        """Delete events that the sink has, of those buckets that the holder still leases; give how many."""
        return len(await self._database.run(PUBLISHED, holder=holder, **_places(events)))

    async def park(self, holder: UUID, events: Sequence[Event], reasons: Sequence[str]) -> set[UUID]:
        """Park events that can't be sent, of those buckets that the holder still leases; give the ids of those."""
        rows = await self._database.run(PARK, holder=holder, reasons=list(reasons), **_places(events))
        return {row["id"] for row in rows}

    async def pending(self, limit: int) -> list[Event]:
        """List the oldest events that wait, parked ones apart."""
        return [Event(**dict(row)) for row in await self._database.run(LIST, limit=limit)]

    async def parked(self, limit: int) -> list[ParkedEvent]:
        """List the oldest parked events."""
        return [_parked(dict(row)) for row in await self._database.run(PARKED, id=None, limit=limit)]

    async def show(self, event_id: UUID) -> Event | ParkedEvent | None:
        """Find an event that waits or is parked; None where there is none of this id."""
        for row in await self._database.run(SHOW, id=event_id):
            return Event(**dict(row))
        for row in await self._database.run(PARKED, id=event_id, limit=1):
            return _parked(dict(row))
        return None

    async def retry(self, event_ids: Sequence[UUID] | None) -> int:
        """Have parked events sent again, all of them with None; give how many."""
        ids = None if event_ids is None else list(event_ids)
        return len(await self._database.run(RETRY, ids=ids))

    async def discard(self, event_ids: Sequence[UUID]) -> int:
        """Delete parked events for good; give how many."""
        return len(await self._database.run(DISCARD, ids=list(event_ids)))

    async def backlog(self) -> Backlog:
        """Count what waits and what is parked."""
        (row,) = await self._database.run(BACKLOG)
        return Backlog(row["pending"], row["oldest"], row["parked"])


def _places(events: Sequence[Event]) -> dict[str, list[Any]]:
    return {"buckets": [event.bucket for event in events], "ids": [event.id for event in events]}


def _parked(columns: dict[str, Any]) -> ParkedEvent:
    reason, park_time = columns.pop("reason"), columns.pop("park_time")
    return ParkedEvent(Event(**columns), reason, park_time)
