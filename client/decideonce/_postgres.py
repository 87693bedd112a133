"""A caller's own connection to Postgres, of asyncpg or SQLAlchemy; neither is imported unless it is used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

if TYPE_CHECKING:
    import asyncpg
    import sqlalchemy
    from asyncpg.pool import PoolConnectionProxy
    from sqlalchemy import orm
    from sqlalchemy.ext import asyncio as sqlalchemy_asyncio

    AsyncConnection: TypeAlias = (
        asyncpg.Connection[Any]
        | PoolConnectionProxy[Any]
        | sqlalchemy_asyncio.AsyncConnection
        | sqlalchemy_asyncio.AsyncSession
    )
    SyncConnection: TypeAlias = sqlalchemy.Connection | orm.Session


class NotInTransaction(RuntimeError):
    """The connection is in no transaction: a crash could part what is written from what belongs to it."""

    def __init__(self) -> None:
        super().__init__("a transaction is needed, that of the rows which belong together: begin one, no autocommit")


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement with named parameters, in their order."""

    text: str
    parameters: tuple[str, ...]

    @property
    def numbered(self) -> str:
        """The statement as asyncpg has it."""
        text = self.text
        for number, name in enumerate(self.parameters, 1):
            text = re.sub(rf":{name}\b", f"${number}", text)
        return text


async def rows(
    connection: AsyncConnection, statement: Statement, values: tuple[Any, ...], *, in_transaction: bool = False
) -> Sequence[Any]:
    """Execute a statement, and give its rows.

    Raises NotInTransaction where it has to be in one, TypeError for what is no such connection, and what the
    connection raises.
    """
    if _is_asyncpg(connection):
        if in_transaction and not connection.is_in_transaction():
            raise NotInTransaction
        return cast("Sequence[Any]", await connection.fetch(statement.numbered, *values))
    if not hasattr(connection, "run_sync"):
        raise TypeError("needed is a connection of asyncpg, or an async connection or session of SQLAlchemy")
    joined = cast("sqlalchemy_asyncio.AsyncConnection", connection)
    return await joined.run_sync(rows_sync, statement, values, in_transaction=in_transaction)


def rows_sync(
    connection: SyncConnection, statement: Statement, values: tuple[Any, ...], *, in_transaction: bool = False
) -> Sequence[Any]:
    """Do what `rows` does, with a connection or session of SQLAlchemy that isn't async."""
    joined = _joined(connection)
    if in_transaction and _is_autocommit(joined):
        raise NotInTransaction
    # Whoever has such a connection has the library.
    from sqlalchemy import text  # noqa: PLC0415

    found = joined.execute(text(statement.text), dict(zip(statement.parameters, values, strict=True)))
    return found.all() if found.returns_rows else ()


def _is_asyncpg(connection: object) -> TypeGuard[asyncpg.Connection[Any] | PoolConnectionProxy[Any]]:
    return hasattr(connection, "is_in_transaction")


def _joined(connection: Any) -> sqlalchemy.Connection:
    """Give the connection that is in the transaction of a session, or the connection itself."""
    if hasattr(connection, "run_sync") or not hasattr(connection, "connection"):
        raise TypeError("needed is a connection or session of SQLAlchemy that isn't async")
    is_session = hasattr(connection, "get_bind")
    return cast("sqlalchemy.Connection", connection.connection() if is_session else connection)


def _is_autocommit(connection: sqlalchemy.Connection) -> bool:
    driver = connection.connection.dbapi_connection
    return driver is not None and connection.dialect.detect_autocommit_setting(driver)
