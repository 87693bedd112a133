"""Brings a database's schema to the version that this program needs, and refuses one that it doesn't know."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from importlib.resources import files
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from decideonce_server.database import CONNECT_ERRORS, Connector

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

# Alembic is imported where it is used: that takes a fifth of a process's start, and few processes migrate anything.

# An arbitrary number, the same in every process that migrates.
ADVISORY_LOCK = 0x6465_6369_6465


# What the role that a service connects as may do: neither alter the schema nor change what is immutable. Tokens stand
# in their table as hashes.
PRIVILEGES = {
    "alembic_version": "SELECT",
    "ledger": "SELECT, INSERT, UPDATE, DELETE",
    "outbox": "SELECT, INSERT, DELETE",
    "outbox_parked": "SELECT, INSERT, DELETE",
    "mismatch": "SELECT, INSERT, UPDATE, DELETE",
    "bucket_lease": "SELECT, UPDATE",
    "bucket_holder": "SELECT, INSERT, UPDATE, DELETE",
    "policy_version": "SELECT, INSERT",
    "operation_version": "SELECT, INSERT",
    "catalog": "SELECT, INSERT",
    "token": "SELECT",
}


class UnknownRole(Exception):
    """The database has no such role; the text says what to do."""


class UnknownSchema(Exception):
    """The database's schema is not the one that this program needs; the text says what to do."""


class DatabaseUnreachable(Exception):
    """No connection to the database could be made; the text says why."""


@asynccontextmanager
async def _connection(url: URL) -> AsyncIterator[AsyncConnection]:
    engine = create_async_engine(url, poolclass=NullPool, async_creator=Connector(url))
    try:
        try:
            connection = await engine.connect()
        except CONNECT_ERRORS as error:
            raise DatabaseUnreachable(f"the database can't be reached: {str(error) or 'it does not answer'}") from error
        async with aclosing(connection):
            yield connection
    finally:
        await engine.dispose()


def _config(connection: Connection | None = None) -> "Config":
    from alembic.config import Config  # noqa: PLC0415  # see above

    config = Config()
    config.set_main_option("script_location", str(files("decideonce_server") / "migrations"))
    config.attributes["connection"] = connection
    return config


def schema_head() -> str:
    """Name the schema version that this program needs."""
    return str(_scripts().get_current_head())


def _scripts() -> "ScriptDirectory":
    from alembic.script import ScriptDirectory  # noqa: PLC0415  # see above

    return ScriptDirectory.from_config(_config())


def _revision(connection: Connection) -> str | None:
    from alembic.runtime.migration import MigrationContext  # noqa: PLC0415  # see above

    return MigrationContext.configure(connection).get_current_revision()


def _upgrade(connection: Connection, service_role: str | None) -> None:
    from alembic import command  # noqa: PLC0415  # see above

    connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": ADVISORY_LOCK})
    connection.commit()
    try:
        _refuse_unknown(_revision(connection))
        connection.commit()
        command.upgrade(_config(connection), "head")
        if service_role is not None:
            _grant(connection, service_role)
        connection.commit()
    finally:
        connection.rollback()
        connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": ADVISORY_LOCK})


def _grant(connection: Connection, role: str) -> None:
    if connection.scalar(text("SELECT count(*) FROM pg_roles WHERE rolname = :role"), {"role": role}) == 0:
        raise UnknownRole(f'there is no role {role}: make it with CREATE ROLE "{role}" LOGIN, and come again')
    quoted = connection.dialect.identifier_preparer.quote(role)
    for table, privileges in PRIVILEGES.items():
        connection.execute(text(f"REVOKE ALL ON {table} FROM {quoted}"))
        connection.execute(text(f"GRANT {privileges} ON {table} TO {quoted}"))


async def is_owner(url: URL) -> bool:
    """Tell whether the role that a URL connects as could alter the schema.

    Raises:
        DatabaseUnreachable: no connection could be made.
    """
    async with _connection(url) as connection:
        return bool(
            await connection.scalar(
                text("SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass('ledger')")
            )
        )


async def migrate(url: URL, service_role: str | None = None) -> str:
    """Bring the schema to the newest version, one process at a time, and name that version.

    The service role, if one is named, gets the privileges that a service needs, and no others.

    Raises:
        UnknownRole: there is no role of this name.
        UnknownSchema: the schema was made by a newer program.
        DatabaseUnreachable: no connection could be made.
    """
    async with _connection(url) as connection:
        await connection.run_sync(_upgrade, service_role)
    return schema_head()


async def check_schema(url: URL) -> None:
    """Check that the database has the schema that this program needs.

    Raises:
        UnknownSchema: it has another, or none.
        DatabaseUnreachable: no connection could be made.
    """
    async with _connection(url) as connection:
        revision = await connection.run_sync(_revision)
    _refuse_unknown(revision)
    if revision != schema_head():
        raise UnknownSchema(
            f"the database's schema is at {revision or 'nothing'}, and this program needs {schema_head()}: "
            "run `decideonce migrate`",
        )


def _refuse_unknown(revision: str | None) -> None:
    known = {script.revision for script in _scripts().walk_revisions()}
    if revision is not None and revision not in known:
        raise UnknownSchema(
            f"the database's schema is at {revision}, which this program doesn't know (it knows up to "
            f"{schema_head()}): run a newer decideonce",
        )
