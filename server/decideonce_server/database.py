"""Postgres as the ledger modules see it: named statements, each its own transaction, and typed errors.

A statement is sent outside of any explicit transaction, so there is no COMMIT that could be lost, or answered with
ROLLBACK while the driver reports success: either its rows are there or it raised.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import asyncpg
from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from decideonce_server import measures
from decideonce_server.errors import LedgerUnavailable

# A reservation waits this long for another transaction that holds the same key, then the caller is told PROCESSING.
LOCK_TIMEOUT_MS = 300
# Far above what any set takes; a statement that runs longer waits for something that won't come.
STATEMENT_TIMEOUT_MS = 5_000
# A server that doesn't answer at all, not even with a time-out of its own: its host hangs or is cut off.
ANSWER_TIMEOUT_S = 7.0
CONNECT_TIMEOUT_S = 3.0
POOL_TIMEOUT_S = 3.0
CLOSE_TIMEOUT_S = 2.0

SETTINGS = {
    "application_name": "decideonce",
    "lock_timeout": f"{LOCK_TIMEOUT_MS}ms",
    "statement_timeout": f"{STATEMENT_TIMEOUT_MS}ms",
    "idle_in_transaction_session_timeout": f"{STATEMENT_TIMEOUT_MS}ms",
    # Arrays of a set differ in length from call to call; a plan made for one fits all.
    "plan_cache_mode": "force_generic_plan",
    # No statement is meant to read a whole table, or to be planned for as long as one that does. Of rows that are rare,
    # such as open work, ANALYZE samples none, and takes them for nearly all.
    "enable_seqscan": "off",
    "jit": "off",
    "timezone": "UTC",
}

LOCK_NOT_AVAILABLE = "55P03"
UNIQUE_VIOLATION = "23505"
READ_ONLY = "25006"
# After these the connection is gone.
CONNECTION_CLASS = "08"
FATAL = ("FATAL", "PANIC")
# Classes of SQLSTATE after which the same statement can succeed later: resources, operator's intervention (a statement
# time-out too), system error, serialization and deadlock, read-only (it became a standby), locks.
RETRYABLE_CLASSES = ("53", "57", "58", "40", "25", "55")

# What asyncpg raises for a connection that is gone. The last: its session has ended and its socket is still open.
LOST_ERRORS = (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError)
# What asyncpg raises while it connects; also that no host takes writes now.
CONNECT_ERRORS = (asyncpg.PostgresError, *LOST_ERRORS)

_DIALECT = URL.create("postgresql+asyncpg").get_dialect()()

# For those who hand a URL on and speak no SQL.
DatabaseUrl: TypeAlias = URL
# Of a statement; columns are read by name.
Row: TypeAlias = asyncpg.Record


class LockTimeout(LedgerUnavailable):
    """Another transaction held what was needed for longer than the lock time-out; nothing was written."""


class ConnectionLost(LedgerUnavailable):
    """The connection to the ledger was lost, and whether the call took effect is unknown; send it again, same key."""


class UniqueViolation(Exception):
    """A row with these values is there already; nothing was written."""


@dataclass(frozen=True)
class Statement:
    """One named SQL statement; the name stands in front of it in pg_stat_activity and pg_stat_statements."""

    name: str
    sql: str

    @cached_property
    def compiled(self) -> tuple[str, tuple[str, ...]]:
        """The statement as asyncpg takes it, and the names of its parameters in their order."""
        compiled: Any = text(f"/* {self.name} */ {self.sql}").compile(dialect=_DIALECT)
        return str(compiled), tuple(compiled.positiontup)


def database_url(url: str) -> DatabaseUrl:
    """Read a Postgres URL, and name the driver that this service uses.

    Raises:
        ValueError: it is no URL of Postgres.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ValueError("the database URL must look like postgresql://user@host:5432/name") from None
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise ValueError("the database URL must begin with postgresql://")
    return parsed.set(drivername="postgresql+asyncpg")


class Connector:
    """Makes connections to a URL's hosts: one by one, each with a time-out of its own, the last good one first.

    asyncpg's time-out is for all of them together: one that hangs would use up the others' time.
    """

    def __init__(self, url: DatabaseUrl) -> None:
        _, self._options = _DIALECT.create_connect_args(url)
        hosts, ports = self._options.pop("host", None), self._options.pop("port", None)
        self._addresses = list(zip(hosts, ports, strict=True)) if isinstance(hosts, list) else [(hosts, ports)]

    @property
    def seconds_max(self) -> float:
        """How long it takes at most, in s."""
        return CONNECT_TIMEOUT_S * len(self._addresses)

    async def __call__(self, dsn: str | None = None, **options: Any) -> "asyncpg.Connection[Row]":
        """Connect; `dsn` and options are asyncpg's, and a pool gives its own.

        Raises:
            CONNECT_ERRORS: no host can be connected to; it is what the last one gave.
        """
        for address in tuple(self._addresses):
            host, port = address
            options |= {"host": host, "port": port, "timeout": CONNECT_TIMEOUT_S}
            try:
                connection: asyncpg.Connection[Row] = await asyncpg.connect(dsn, **self._options, **options)
            except CONNECT_ERRORS as error:
                refusal = error
                self._addresses = [*(other for other in self._addresses if other != address), address]
            else:
                return connection
        raise refusal


class Database:
    """A pool of connections that run one statement at a time, each in a transaction of its own.

    One instance belongs to the event loop that first runs a statement.
    """

    def __init__(self, url: DatabaseUrl, *, pool_size: int = 10) -> None:
        self.url = url
        self._pool_size = pool_size
        self._connector = Connector(url)
        self._acquire_s_max = POOL_TIMEOUT_S + self._connector.seconds_max
        self._pool: asyncpg.Pool[Row] | None = None

    async def run(self, statement: Statement, **parameters: Any) -> Sequence[Row]:
        """Run one statement and give its rows.

        Raises:
            LockTimeout: a row stayed locked by another transaction.
            UniqueViolation: a row with these values is there already.
            ConnectionLost: whether the statement took effect is unknown.
            LedgerUnavailable: Postgres can't be reached or can't do it now.
        """
        sql, names = statement.compiled
        arguments = [parameters[name] for name in names]
        pool = self._pool or await self._open()
        try:
            connection = await pool.acquire(timeout=self._acquire_s_max)
        except CONNECT_ERRORS as error:
            raise LedgerUnavailable from error
        try:
            with _answered_in_time(connection):
                return await connection.fetch(sql, *arguments)
        except asyncio.CancelledError:
            # Before asyncpg cancels the statement, which is no way to end one: see `_answered_in_time`.
            _cut(connection)
            raise
        except (asyncpg.PostgresError, *LOST_ERRORS) as error:
            typed = _typed(error)
            if isinstance(typed, ConnectionLost) or getattr(error, "sqlstate", None) == READ_ONLY:
                # The others go too: their server is gone, hangs, or became a standby.
                _cut(connection)
                await pool.expire_connections()
            if typed is None:
                raise
            raise typed from error
        finally:
            await pool.release(connection)

    async def _open(self) -> "asyncpg.Pool[Row]":
        self._pool = asyncpg.create_pool(
            connect=self._connector,
            server_settings=SETTINGS,
            min_size=0,
            max_size=self._pool_size,
            # Nothing is left on a connection, and one is kept for as long as it serves.
            reset=_leave_as_it_is,
            max_queries=2**63,
            max_inactive_connection_lifetime=0,
        )
        # It makes no connection yet.
        return await self._pool

    def measure_use(self) -> None:
        """Tell from now on how many connections the pool may have, and how many are in use."""

        def in_use() -> int:
            return self._pool.get_size() - self._pool.get_idle_size() if self._pool is not None else 0

        measures.gauge(
            "pool_size", "Connections to Postgres that this process may use at once", lambda: self._pool_size
        )
        measures.gauge("pool_checked_out", "Connections to Postgres that are in use", in_use)

    async def close(self) -> None:
        """Close all connections; one whose server doesn't answer is cut."""
        if self._pool is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._pool.close()


async def _leave_as_it_is(_connection: object) -> None:
    pass


def _typed(error: Exception) -> Exception | None:
    """Give what those who run statements are told of an error; None for one that no retry would mend."""
    if not isinstance(error, asyncpg.PostgresError):
        return ConnectionLost()
    sqlstate = error.sqlstate or ""
    if error.severity_en in FATAL or sqlstate.startswith(CONNECTION_CLASS):
        return ConnectionLost()
    if sqlstate == LOCK_NOT_AVAILABLE:
        return LockTimeout()
    if sqlstate == UNIQUE_VIOLATION:
        return UniqueViolation()
    return LedgerUnavailable() if sqlstate.startswith(RETRYABLE_CLASSES) else None


@contextmanager
def _answered_in_time(connection: "asyncpg.pool.PoolConnectionProxy[Row]") -> Iterator[None]:
    """Cut a connection whose server doesn't answer.

    The statement is not cancelled: a commit that waits for a synchronous standby would then pass for done without it.
    """
    cut = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, _cut, connection)
    try:
        yield
    finally:
        cut.cancel()


def _cut(connection: "asyncpg.pool.PoolConnectionProxy[Row]") -> None:
    # One that was cut already has left the pool.
    with suppress(asyncpg.InterfaceError):
        connection.terminate()
