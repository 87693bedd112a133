"""The tables as the code has them, and as the migrations leave them."""

from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from conftest import connect
from decideonce_server.embedded import EmbeddedPostgres
from decideonce_server.tables import metadata

LOOKS = {
    "columns": """SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns
        WHERE table_schema = 'public' AND table_name <> 'alembic_version'""",
    "constraints": """SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace AND conrelid <> COALESCE(to_regclass('alembic_version'), 0)
            AND contype <> 'n'""",
    "indexes": "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename <> 'alembic_version'",
}


async def described(connection: AsyncConnection) -> dict[str, set[tuple]]:
    return {name: {tuple(row) for row in await connection.execute(text(look))} for name, look in LOOKS.items()}


async def test_migrations_leave_the_tables_that_the_code_has(database_url: URL, postgres: EmbeddedPostgres) -> None:
    """Columns, defaults, constraints and indexes are the same in a migrated database and in one made from the code."""
    name = f"{database_url.database}_made"
    admin = await connect(postgres.url("postgres"))
    await admin.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    migrated, made = create_async_engine(database_url), create_async_engine(postgres.url(name))
    try:
        async with migrated.begin() as expected, made.begin() as actual:
            await actual.run_sync(metadata.create_all)
            assert await described(expected) == await described(actual)
    finally:
        await migrated.dispose()
        await made.dispose()
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()
