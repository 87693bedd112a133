"""Brings a database's schema to the version that this program needs, and refuses one that it doesn't know."""

from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

# An arbitrary number, the same in every process that migrates.
ADVISORY_LOCK = 0x6465_6369_6465


class UnknownSchema(Exception):
    """The database's schema is not the one that this program needs; the text says what to do."""


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("decideonce_server") / "migrations"))
    config.attributes["connection"] = connection
    return config


def schema_head() -> str:
    """Name the schema version that this program needs."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def _upgrade(connection: Connection) -> None:
    connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": ADVISORY_LOCK})
    connection.commit()
    try:
        _refuse_unknown(MigrationContext.configure(connection).get_current_revision())
        connection.commit()
        command.upgrade(_config(connection), "head")
        connection.commit()
    finally:
        connection.rollback()
        connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": ADVISORY_LOCK})


async def migrate(url: URL) -> str:
    """Bring the schema to the newest version, one process at a time, and name that version.

    Raises:
        UnknownSchema: the schema was made by a newer program.
    """
    engine = create_async_engine(url, poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_upgrade)
    finally:
        await engine.dispose()
    return schema_head()


async def check_schema(url: URL) -> None:
    """Check that the database has the schema that this program needs.

    Raises:
        UnknownSchema: it has another, or none.
    """
    engine = create_async_engine(url, poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            revision = await connection.run_sync(
                lambda sync: MigrationContext.configure(sync).get_current_revision(),
            )
    finally:
        await engine.dispose()
    _refuse_unknown(revision)
    if revision != schema_head():
        raise UnknownSchema(
            f"the database's schema is at {revision or 'nothing'}, and this program needs {schema_head()}: "
            "run `decideonce migrate`",
        )


def _refuse_unknown(revision: str | None) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if revision is not None and revision not in known:
        raise UnknownSchema(
            f"the database's schema is at {revision}, which this program doesn't know (it knows up to "
            f"{schema_head()}): run a newer decideonce",
        )
