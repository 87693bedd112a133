"""What a measurement takes: CPU time of whole trees of processes, and what Postgres writes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg
import psutil

# Postgres's sessions tell what they did within a second while they are busy, and within 10 s once they are idle.
STATISTICS_SETTLE_S = 11.0


def cpu_seconds(roots: Sequence[psutil.Process]) -> float:
    """Give the CPU time that processes and all under them have used so far, those that ended among them."""
    total = 0.0
    for process in {one for root in roots for one in (root, *root.children(recursive=True))}:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used so far: CPU time in seconds, and bytes of write-ahead log. No server, no CPU time of it."""

    server_s: float | None
    postgres_s: float
    wal_bytes: int

    def per_call(self, earlier: "Usage", calls: int) -> dict[str, float]:
        """Give what each of so many calls took since an earlier moment."""
        server = {}
        if self.server_s is not None and earlier.server_s is not None:
            server["server_us"] = (self.server_s - earlier.server_s) / calls * 1e6
        return server | {
            "postgres_us": (self.postgres_s - earlier.postgres_s) / calls * 1e6,
            "wal_bytes": (self.wal_bytes - earlier.wal_bytes) / calls,
        }


class Meter:
    """Reads what a Postgres and some processes have used; each may be measured beside others' processes."""

    def __init__(self, connection: asyncpg.Connection, postmaster: psutil.Process) -> None:
        self._connection = connection
        self.postmaster = postmaster

    @classmethod
    async def of(cls, connection: asyncpg.Connection) -> "Meter":
        """Make a meter of the Postgres that a connection leads to, on this machine."""
        backend = psutil.Process(await connection.fetchval("SELECT pg_backend_pid()"))
        postmaster = backend.parent()
        assert postmaster is not None
        return cls(connection, postmaster)

    async def read(self, roots: Sequence[psutil.Process]) -> Usage:
        """Read what was used so far."""
        wal = await self._connection.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'")
        return Usage(cpu_seconds(roots) if roots else None, cpu_seconds([self.postmaster]), int(wal))

    async def transactions(self) -> int:
        """Count the transactions of this database so far, once every session has told of its own.

        A statement that is sent alone is a transaction, and a round trip.
        """
        await asyncio.sleep(STATISTICS_SETTLE_S)
        return await self._connection.fetchval(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )
