"""Postgres as the ledger modules see it: named statements, each its own transaction, and typed errors.

A statement is sent outside of any explicit transaction, so there is no COMMIT that could be lost, or answered with
ROLLBACK while the driver reports success: either its rows are there or it raised.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import asyncpg
from sqlalchemy import TextClause, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

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
# Classes of SQLSTATE after which the same statement can succeed later: connection, resources, operator's intervention
# (a statement time-out too), system error, serialization and deadlock, read-only (it became a standby), locks.
RETRYABLE_CLASSES = ("08", "53", "57", "58", "40", "25", "55")

# What asyncpg raises for a connection that is gone. The last: its session has ended and its socket is still open.
LOST_ERRORS = (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError)
# What asyncpg raises while it connects, and SQLAlchemy doesn't wrap; also that no host takes writes now.
CONNECT_ERRORS = (asyncpg.PostgresError, *LOST_ERRORS)

_DIALECT = URL.create("postgresql+asyncpg").get_dialect()()

# For those who hand a URL on and speak no SQL.
DatabaseUrl: TypeAlias = URL


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
    def clause(self) -> TextClause:
        """The statement as SQLAlchemy takes it."""
        return text(f"/* {self.name} */ {self.sql}")

    @cached_property
    def compiled(self) -> tuple[str, tuple[str, ...]]:
        """The statement as asyncpg takes it, and the names of its parameters in their order."""
        compiled: Any = self.clause.compile(dialect=_DIALECT)
        return str(compiled), tuple(compiled.positiontup)


class Row(asyncpg.Record):
    """A row of a statement; its columns are attributes."""

    def __getattr__(self, name: str) -> Any:
        """Give a column's value."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


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


class Database:
    """A pool of connections that run one statement at a time, each in a transaction of its own."""

    def __init__(self, url: DatabaseUrl, *, pool_size: int = 10) -> None:
        self.engine: AsyncEngine = create_async_engine(
            url,
            isolation_level="AUTOCOMMIT",
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            pool_pre_ping=False,
            hide_parameters=True,
            connect_args={"server_settings": SETTINGS, "timeout": CONNECT_TIMEOUT_S},
        )
        # Connections that were made before are given up where they are found.
        self._era = 0
        event.listen(self.engine.sync_engine, "connect", self._mark)
        event.listen(self.engine.sync_engine, "checkout", self._refuse_gone)
        connect_to_one(self.engine)

    def _mark(self, _connection: Any, pooled: ConnectionPoolEntry) -> None:
        pooled.info["era"] = self._era

    def _refuse_gone(self, connection: Any, pooled: ConnectionPoolEntry, _proxy: Any) -> None:
        """Have the pool make another connection in place of one that is closed or of an era that is over."""
        if connection.driver_connection.is_closed() or pooled.info["era"] != self._era:
            raise DisconnectionError

    async def run(self, statement: Statement, **parameters: Any) -> Sequence[Row]:
        """Run one statement and give its rows.

        Raises:
            LockTimeout: a row stayed locked by another transaction.
            UniqueViolation: a row with these values is there already.
            ConnectionLost: whether the statement took effect is unknown.
            LedgerUnavailable: Postgres can't be reached or can't do it now.
        """
        sql, names = statement.compiled
        async with self._connection() as driver:
            # Straight to the driver: SQLAlchemy's own way costs three times what the driver does with a statement.
            with _answered_in_time(driver), self._typed_errors(driver):
                return await driver.fetch(sql, *[parameters[name] for name in names], record_class=Row)

    @asynccontextmanager
    async def _connection(self) -> "AsyncIterator[asyncpg.Connection[Any]]":
        """Give a connection of the pool to one statement.

        Raises:
            LedgerUnavailable: there is none, and none can be made.
        """
        # Left in SQLAlchemy's own way: a cancelled call gives its connection back to the end.
        async with AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(self.engine.connect())
            # The pool calls it an invalid request where what it has just made is closed again and again.
            except (PoolTimeout, DBAPIError, InvalidRequestError, *CONNECT_ERRORS) as error:
                raise LedgerUnavailable from error
            assert connection.sync_connection is not None  # noqa: S101  # it is connected
            driver: Any = connection.sync_connection.connection.driver_connection
            yield driver

    @contextmanager
    def _typed_errors(self, driver: "asyncpg.Connection[Any]") -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            # Before asyncpg cancels the statement, which is no way to end one: see `_answered_in_time`.
            driver.terminate()
            raise
        except asyncpg.PostgresError as error:
            sqlstate = error.sqlstate or ""
            is_lost = driver.is_closed() or error.severity_en in FATAL or sqlstate.startswith(CONNECTION_CLASS)
            if is_lost or sqlstate == READ_ONLY:
                self._leave()
            if is_lost:
                raise ConnectionLost from error
            if sqlstate == LOCK_NOT_AVAILABLE:
                raise LockTimeout from error
            if sqlstate == UNIQUE_VIOLATION:
                raise UniqueViolation from error
            if sqlstate.startswith(RETRYABLE_CLASSES):
                raise LedgerUnavailable from error
            raise
        except LOST_ERRORS as error:
            self._leave()
            raise ConnectionLost from error

    def _leave(self) -> None:
        """Give up all connections made so far: their server is gone, hangs, or became a standby."""
        self._era += 1

    def measure_use(self) -> None:
        """Tell from now on how many connections the pool may have, and how many are in use."""
        pool: Any = self.engine.pool
        measures.gauge("pool_size", "Connections to Postgres that this process may use at once", pool.size)
        measures.gauge("pool_checked_out", "Connections to Postgres that are in use", pool.checkedout)

    async def close(self) -> None:
        """Close all connections; one whose server doesn't answer is left to end with the process."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.engine.dispose()


@contextmanager
def _answered_in_time(driver: "asyncpg.Connection[Any]") -> Iterator[None]:
    """Cut a connection whose server doesn't answer.

    The statement is not cancelled: a commit that waits for a synchronous standby would then pass for done without it.
    """
    cut = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, driver.terminate)
    try:
        yield
    finally:
        cut.cancel()


def connect_to_one(engine: AsyncEngine) -> None:
    """Have an engine try the hosts of its URL one by one, each with a time-out of its own, the last good one first.

    asyncpg's time-out is for all of them together: one that hangs would use up the others' time.
    """
    addresses: list[tuple[str, int]] = []

    def connect(dialect: Any, _record: Any, arguments: list[Any], parameters: dict[str, Any]) -> Any:
        nonlocal addresses
        if not isinstance(parameters.get("host"), list):
            return None
        addresses = addresses or list(zip(parameters["host"], parameters["port"], strict=True))
        for host, port in tuple(addresses):
            try:
                return dialect.connect(*arguments, **(parameters | {"host": host, "port": port}))
            except CONNECT_ERRORS as error:
                refusal = error
                addresses = [*(a for a in addresses if a != (host, port)), (host, port)]
        raise refusal

    event.listen(engine.sync_engine, "do_connect", connect)
