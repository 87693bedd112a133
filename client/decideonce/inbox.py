"""The inbox: a consumer's record of which events it has applied, in its own Postgres.

Events are delivered at least once. An event's mark is written in the transaction that has the event's effects, so that
both are there or neither is:

    async with connection.transaction():
        if await inbox.first_time(connection, event):
            ...  # the event's effects, on this connection

Connections are asyncpg's or SQLAlchemy's; neither library is imported unless it is used.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from decideonce import _postgres
from decideonce._postgres import NotInTransaction, Statement
from decideonce.events import Event

if TYPE_CHECKING:
    from decideonce._postgres import AsyncConnection, SyncConnection

__all__ = ["CONSUMER_MAX", "HORIZON", "MARGIN", "SCHEMA", "EventTooOld", "Inbox", "NotInTransaction"]

SCHEMA = """\
CREATE TABLE IF NOT EXISTS decideonce_inbox (
    consumer text NOT NULL,
    event_id uuid NOT NULL,
    event_time timestamptz NOT NULL,
    apply_time timestamptz NOT NULL,
    PRIMARY KEY (consumer, event_id)
);
CREATE INDEX IF NOT EXISTS decideonce_inbox_event_time ON decideonce_inbox (consumer, event_time);
"""
"""The table: PostgreSQL 12 or newer, in the consumer's own schema. Execute it once, or put it into your migrations."""

HORIZON = timedelta(days=7)

# Marks outlive the horizon by this much: a failover to a server whose clock is behind by less makes no old event new.
MARGIN = timedelta(days=1)

CONSUMER_MAX = 128

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class EventTooOld(Exception):
    """An event is past the horizon, so its mark may be purged and nobody can tell whether it was applied.

    It isn't applied. `event` is that event, `horizon` how old one may be.
    """

    def __init__(self, event: Event, horizon: timedelta) -> None:
        super().__init__(event, horizon)
        self.event = event
        self.horizon = horizon

    def __str__(self) -> str:
        return f"event {self.event.id} of {self.event.time.isoformat()} is past the horizon of {self.horizon}"


_MARK = Statement(
    # Waits for another transaction that writes the same mark, and inserts where that one rolls back. Seconds and not
    # days, which have 23 or 25 hours now and then; the statement's time and not the transaction's, which stands still.
    """\
/* decideonce_inbox_mark */ WITH event AS (
    SELECT CAST(:consumer AS text) AS consumer, CAST(:event_id AS uuid) AS id, CAST(:event_time AS timestamptz) AS time,
        statement_timestamp() - make_interval(secs => CAST(:horizon AS double precision)) AS horizon
), mark AS (
    INSERT INTO decideonce_inbox (consumer, event_id, event_time, apply_time)
    SELECT consumer, id, time, statement_timestamp() FROM event WHERE time > horizon
    ON CONFLICT (consumer, event_id) DO NOTHING
    RETURNING event_id
)
SELECT time > horizon AS accepted, EXISTS (SELECT FROM mark) AS first FROM event""",
    ("consumer", "event_id", "event_time", "horizon"),
)

_PURGE = Statement(
    """\
/* decideonce_inbox_purge */ WITH old AS (
    SELECT consumer, event_id FROM decideonce_inbox
    WHERE consumer = CAST(:consumer AS text)
        AND event_time < statement_timestamp() - make_interval(secs => CAST(:kept AS double precision))
    ORDER BY event_time LIMIT CAST(:limit AS bigint)
    FOR UPDATE SKIP LOCKED
), purged AS (
    DELETE FROM decideonce_inbox AS i USING old
    WHERE i.consumer = old.consumer AND i.event_id = old.event_id
    RETURNING i.event_id
)
SELECT count(*) FROM purged""",
    ("consumer", "kept", "limit"),
)


class Inbox:
    """Tells of each event whether it is new, and remembers it, within the consumer's transaction.

    `consumer` is who applies events, 1 to 128 characters: its processes share the name, and consumers with a table in
    common have names of their own. `horizon`, more than 0, is how old an event may be, by Postgres's clock: longer than
    events may be under way, outages of the publisher and of the broker included. All processes of a consumer need the
    same. Raises ValueError for other values.
    """

    def __init__(self, consumer: str, horizon: timedelta = HORIZON) -> None:
        if not 1 <= len(consumer) <= CONSUMER_MAX:
            raise ValueError(f"consumer must be 1 to {CONSUMER_MAX} characters")
        if horizon <= timedelta(0):
            raise ValueError("horizon must be more than 0")
        self.consumer = consumer
        self.horizon = horizon

    async def first_time(self, connection: AsyncConnection, event: Event) -> bool:
        """Mark an event. True: it is new, apply it in this same transaction. False: it is applied already.

        Waits while another transaction applies the same event. With REPEATABLE READ and SERIALIZABLE that can end with
        a serialization failure (SQLSTATE 40001), as any of the transaction's statements can: begin it anew.

        Raises EventTooOld, with the transaction unharmed; NotInTransaction; TypeError for what is no such connection;
        and what the connection raises.
        """
        (row,) = await _postgres.rows(connection, _MARK, self._mark(event), in_transaction=True)
        return self._judge(event, row)

    def first_time_sync(self, connection: SyncConnection, event: Event) -> bool:
        """Do what `first_time` does, with a connection or session of SQLAlchemy that isn't async."""
        (row,) = _postgres.rows_sync(connection, _MARK, self._mark(event), in_transaction=True)
        return self._judge(event, row)

    async def purge(self, connection: AsyncConnection, limit: int = 1000) -> int:
        """Delete up to `limit` (1 or more) marks of this consumer, oldest first, and give how many it were.

        A mark goes a day after the horizon refuses its event, so no answer of `first_time` changes. Call it now and
        then, until it gives less than the limit, in a transaction each. Raises ValueError for a limit below 1.
        """
        ((purged,),) = await _postgres.rows(connection, _PURGE, self._kept(limit))
        return int(purged)

    def purge_sync(self, connection: SyncConnection, limit: int = 1000) -> int:
        """Do what `purge` does, with a connection or session of SQLAlchemy that isn't async."""
        ((purged,),) = _postgres.rows_sync(connection, _PURGE, self._kept(limit))
        return int(purged)

    def _mark(self, event: Event) -> tuple[str, str, datetime, float]:
        # Both times are of the same moment, of two clocks. Taking the older one, an event that was given a new time on
        # its way is still judged by its age, and a clock that is wrong makes events older at most.
        made = _EPOCH + min(event.time - _EPOCH, timedelta(milliseconds=event.id.int >> 80))
        return self.consumer, str(event.id), made, self.horizon.total_seconds()

    def _judge(self, event: Event, row: Any) -> bool:
        accepted, first = row
        if not accepted:
            raise EventTooOld(event, self.horizon)
        return bool(first)

    def _kept(self, limit: int) -> tuple[str, float, int]:
        if limit < 1:
            raise ValueError("limit must be 1 or more")
        return self.consumer, (self.horizon + MARGIN).total_seconds(), limit
