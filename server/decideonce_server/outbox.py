"""The outbox: events that wait to be published, written in their decision's own transaction.

The table only ever sees INSERT and DELETE.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from decideonce_server.database import Database, Statement


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

    @property
    def aggregate_id(self) -> str:
        """What orders events and partitions topics: neither part can have the "/" that joins them."""
        return f"{self.tenant}/{self.operation_key}"


# Part of the ledger's `complete`: the events of those members of the set whose attempt was still the key's.
INSERT_FOR_DONE = """INSERT INTO outbox (bucket, id, tenant, operation, operation_key, aggregatetype, aggregateid, type,
        payload)
    SELECT e.bucket, e.id, e.tenant, e.operation, e.operation_key, e.operation, e.aggregateid, e.type, e.payload
    FROM unnest(CAST(:event_buckets AS smallint[]), CAST(:event_ids AS uuid[]), CAST(:event_tenants AS text[]),
        CAST(:event_operations AS text[]), CAST(:event_operation_keys AS text[]), CAST(:event_aggregate_ids AS text[]),
        CAST(:event_types AS text[]), CAST(:event_payloads AS bytea[]))
        AS e (bucket, id, tenant, operation, operation_key, aggregateid, type, payload)
    JOIN done USING (bucket, tenant, operation, operation_key)"""

LIST = Statement(
    # For people; the publisher reads by bucket.
    "outbox_list",
    "SELECT id, tenant, operation, operation_key, type, payload FROM outbox ORDER BY id LIMIT :limit",
)

COUNT = Statement("outbox_count", "SELECT count(*) AS pending FROM outbox")


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
    }


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event that waits to be published."""

    id: UUID
    tenant: str
    operation: str
    operation_key: str
    type: str
    payload: bytes


class Outbox:
    """The outbox in Postgres, as operators see it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def pending(self, limit: int) -> tuple[int, list[PendingEvent]]:
        """Count the events that wait, and give the oldest of them."""
        count = (await self._database.run(COUNT))[0].pending
        rows = await self._database.run(LIST, limit=limit)
        return count, [PendingEvent(**row._asdict()) for row in rows]
