"""Leases of buckets: how publishers divide their work, by Postgres's clock.

All publishers that are alive have even shares of the 256 buckets. Who has more than its share gives some back, who has
less takes what is free or whose lease ran out; every change is compare-and-set.
"""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from decideonce_server.database import Database, Statement

BUCKETS = 256

BEAT = Statement(
    # Says that the holder is alive, and counts how many are. Those long gone are forgotten.
    "bucket_beat",
    """WITH gone AS (
        DELETE FROM bucket_holder h
        WHERE h.alive_until < statement_timestamp() - interval '1 hour' AND h.holder <> :holder
    )
    INSERT INTO bucket_holder AS h (holder, alive_until) VALUES (:holder, statement_timestamp() + :lease)
    ON CONFLICT (holder) DO UPDATE SET alive_until = excluded.alive_until
    RETURNING (SELECT count(*) + 1 FROM bucket_holder o
        WHERE o.holder <> :holder AND o.alive_until > statement_timestamp()) AS holders""",
)

HOLD = Statement(
    # Renews what the holder has, up to its share, and fills the share with what nobody holds. Of two that want the same
    # bucket the second finds it held, and has one less this time.
    "bucket_hold",
    """WITH kept AS (
        SELECT b.bucket FROM bucket_lease b
        WHERE b.holder = :holder AND b.lease_expires_at > statement_timestamp() ORDER BY b.bucket LIMIT :share
    ), wanted AS (
        SELECT k.bucket FROM kept k
        UNION ALL
        (SELECT b.bucket FROM bucket_lease b
        WHERE b.lease_expires_at IS NULL OR b.lease_expires_at <= statement_timestamp()
        ORDER BY b.bucket LIMIT greatest(0, :share - (SELECT count(*) FROM kept)))
    )
    UPDATE bucket_lease b SET holder = :holder, lease_expires_at = statement_timestamp() + :lease
    FROM wanted w
    WHERE b.bucket = w.bucket AND (b.holder = :holder OR b.lease_expires_at IS NULL
        OR b.lease_expires_at <= statement_timestamp())
    RETURNING b.bucket""",
)

RELEASE = Statement(
    # All of the holder's buckets but these: others can take them at once.
    "bucket_release",
    """UPDATE bucket_lease b SET holder = NULL, lease_expires_at = NULL
    WHERE b.holder = :holder AND b.bucket <> ALL(CAST(:kept AS smallint[]))
    RETURNING b.bucket""",
)

LEAVE = Statement("bucket_leave", "DELETE FROM bucket_holder h WHERE h.holder = :holder")


class BucketLeases:
    """One holder's leases of buckets.

    Every operation raises LedgerUnavailable where Postgres can't be reached or can't do it now; leases then run out.
    """

    def __init__(self, database: Database, holder: UUID, lease: timedelta) -> None:
        self.holder = holder
        self._database = database
        self._lease = lease
        self._held: set[int] = set()

    async def hold(self) -> Sequence[int]:
        """Renew and take leases up to this holder's share, give back what is over it, and list what is held now."""
        (row,) = await self._database.run(BEAT, holder=self.holder, lease=self._lease)
        share = -(-BUCKETS // row["holders"])
        rows = await self._database.run(HOLD, holder=self.holder, share=share, lease=self._lease)
        held = {row["bucket"] for row in rows}
        if not self._held <= held:
            await self._database.run(RELEASE, holder=self.holder, kept=list(held))
        self._held = held
        return sorted(held)

    async def release(self) -> None:
        """Give all leases back, and be counted no more."""
        await self._database.run(RELEASE, holder=self.holder, kept=[])
        await self._database.run(LEAVE, holder=self.holder)
