"""What the commands share that use a database: its settings, and how they run and fail."""

from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop

from decideonce_server import app, console
from decideonce_server.callers import InvalidCallers
from decideonce_server.database import Database
from decideonce_server.database import database_url as read_url
from decideonce_server.errors import DecideonceError, InvalidField
from decideonce_server.migrate import DatabaseUnreachable, UnknownRole, UnknownSchema
from decideonce_server.options import setting
from decideonce_server.settings import InvalidSetting
from decideonce_server.supervisor import StartFailed

T = TypeVar("T")


def checked_url(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    """Refuse what is no URL of Postgres."""
    try:
        if text is not None:
            read_url(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return text


database_url_setting = setting(
    "--database-url",
    "Postgres to use. Without it: an embedded one under --data-dir.",
    callback=checked_url,
)
data_dir_setting = setting(
    "--data-dir",
    "Where the embedded Postgres keeps its data.",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".decideonce"),
)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, and say shortly what can go wrong in an ordinary way."""
    try:
        return uvloop.run(work)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    except (InvalidField, InvalidCallers) as error:
        console.fail(str(error), error.violations)
    except (DecideonceError, UnknownRole, UnknownSchema, DatabaseUnreachable, StartFailed, OSError) as error:
        console.fail(str(error))
    except RuntimeError as error:
        # gRPC's way of saying that it can't listen.
        if "Failed to bind" not in str(error):
            raise
        console.fail(str(error).partition(";")[0], hint="is another service running there?")


def with_database(text: str | None, data_dir: Path, use: Callable[[Database], Awaitable[T]]) -> T:
    """Use the given database, or the embedded one of a data directory."""
    if text is None and not data_dir.exists():
        console.fail(
            f"there is no embedded Postgres under {data_dir}",
            hint="give --database-url, or the --data-dir of a service in embedded mode",
        )

    async def work() -> T:
        async with app.postgres(None if text is None else read_url(text), data_dir) as url:
            database = Database(url, pool_size=1)
            try:
                return await use(database)
            finally:
                await database.close()

    return run(work())
