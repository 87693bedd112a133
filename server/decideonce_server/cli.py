"""The command line: what runs on this machine. What calls a service is in `cli_calls`."""

from collections.abc import Awaitable, Callable, Coroutine
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop
from rich.text import Text

from decideonce.v1 import events_pb2
from decideonce_server import app, cli_calls, console, doctor, logs
from decideonce_server.auth import Role, is_tenant
from decideonce_server.database import Database
from decideonce_server.database import database_url as read_url
from decideonce_server.errors import DecideonceError, InvalidField
from decideonce_server.ledger_tokens import TokenStore
from decideonce_server.migrate import DatabaseUnreachable, UnknownSchema, migrate
from decideonce_server.options import DURATION, json_option, setting
from decideonce_server.outbox import Outbox
from decideonce_server.settings import InvalidSetting, Settings
from decideonce_server.supervisor import StartFailed

T = TypeVar("T")


def _checked_url(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    try:
        if text is not None:
            read_url(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return text


database_url_setting = setting(
    "--database-url",
    "Postgres to use. Without it: an embedded one under --data-dir.",
    callback=_checked_url,
)
data_dir_setting = setting(
    "--data-dir",
    "Where the embedded Postgres keeps its data.",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".decideonce"),
)


def _together(*settings: Callable[..., Any]) -> Callable[..., Any]:
    """Make one decorator of several settings, shown in their order."""
    return lambda command: reduce(lambda made, setting_: setting_(made), reversed(settings), command)


listen_settings = _together(
    setting("--tls-certificate", "PEM certificate chain to serve with.", type=click.Path(path_type=Path, exists=True)),
    setting("--tls-key", "PEM key of the certificate.", type=click.Path(path_type=Path, exists=True)),
    setting("--allow-plaintext", "Serve without TLS on an address that isn't loopback.", is_flag=True),
)
process_settings = _together(
    setting("--metrics", "Where to serve Prometheus metrics. Without it: nowhere."),
    setting("--pool-size", "Connections to Postgres, of each process.", type=click.IntRange(1, 1000), default=10),
    setting("--evaluators", "Evaluators of policies, of each process.", type=click.IntRange(2, 1000), default=16),
    setting("--attempts-max", "Attempts of a process at once; more are shed.", type=click.IntRange(1), default=1000),
    setting(
        "--mismatches-per-minute",
        "Keys that a tenant may reuse for something else, at each process.",
        type=click.IntRange(1),
        default=600,
    ),
    setting("--drain", "How long a stop waits for work that has begun.", type=DURATION, default="30s"),
    setting("--log-level", "What to log.", default="info", type=click.Choice(["debug", "info", "warning", "error"])),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("decideonce-server"), message="decideonce %(version)s")
def cli() -> None:
    """Make business decisions exactly once."""
    logs.configure("warning")


for command in cli_calls.COMMANDS:
    cli.add_command(command)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, and say shortly what can go wrong in an ordinary way."""
    try:
        return uvloop.run(work)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    except InvalidField as error:
        console.fail(str(error), error.violations)
    except (DecideonceError, UnknownSchema, DatabaseUnreachable, StartFailed, OSError) as error:
        console.fail(str(error))
    except RuntimeError as error:
        # gRPC's way of saying that it can't listen.
        if "Failed to bind" not in str(error):
            raise
        console.fail(str(error).partition(";")[0], hint="is another service running there?")


@cli.command()
@setting("--listen", "Where to serve.", default="127.0.0.1:50051")
@database_url_setting
@data_dir_setting
@setting("--catalog", "A catalog to apply at start.", type=click.Path(path_type=Path, exists=True, file_okay=False))
@setting("--workers", "Processes that answer calls, on one port.", type=click.IntRange(1, 256), default=1)
@setting("--housekeeping/--no-housekeeping", "Rescue stale work and apply retention here.", default=True)
@listen_settings
@process_settings
def serve(*, log_level: str, **settings: Any) -> None:
    """Serve until stopped.

    Prints one line on stdout once it can answer; logs go to stderr. SIGTERM and SIGINT stop it.
    """
    logs.configure(log_level)
    _run(app.serve(Settings(**settings)))


@cli.command(hidden=True)
@setting("--listen", "Where to serve.", required=True)
@setting("--database-url", "Postgres to use.", required=True, callback=_checked_url)
@listen_settings
@process_settings
def worker(*, log_level: str, **settings: Any) -> None:
    """Answer calls; one process of `serve`, which starts it."""
    logs.configure(log_level)
    _run(app.work(Settings(**settings)))


@cli.command()
@setting("--database-url", "Postgres to use.", required=True, callback=_checked_url)
@process_settings
def housekeep(*, log_level: str, **settings: Any) -> None:
    """Rescue stale work and apply retention.

    `serve` does so too, unless it is told not to. Any number may run at once.
    """
    logs.configure(log_level)
    _run(app.housekeep(Settings(**settings)))


@cli.command(name="migrate")
@setting("--database-url", "Postgres to migrate.", required=True, callback=_checked_url)
@json_option
def migrate_command(database_url: str, *, as_json: bool) -> None:
    """Bring a database's schema up to date.

    Safe to run many times over, and from many places at once.
    """
    schema = _run(migrate(read_url(database_url)))
    if as_json:
        console.print_json({"schema": schema})
    else:
        click.echo(f"the schema is at {schema}")


def _with_database(text: str | None, data_dir: Path, use: Callable[[Database], Awaitable[T]]) -> T:
    if text is None and not data_dir.exists():
        console.fail(
            f"there is no embedded Postgres under {data_dir}",
            hint="give --database-url, or the --data-dir of a service in embedded mode",
        )

    async def run() -> T:
        async with app.postgres(None if text is None else read_url(text), data_dir) as url:
            database = Database(url, pool_size=1)
            try:
                return await use(database)
            finally:
                await database.close()

    return _run(run())


@cli.group()
def token() -> None:
    """Callers' tokens."""


@token.command(name="create")
@click.argument("tenant")
@click.option("--role", "roles", multiple=True, required=True, type=click.Choice([role.value for role in Role]))
@click.option("--operation", "operations", multiple=True, default=["*"], show_default=True, help="Glob; repeatable.")
@click.option("--description", default="", help="Whose it is.")
@database_url_setting
@data_dir_setting
@json_option
def token_create(
    tenant: str,
    roles: tuple[str, ...],
    operations: tuple[str, ...],
    description: str,
    database_url: str | None,
    data_dir: Path,
    *,
    as_json: bool,
) -> None:
    """Make a token for a TENANT, and print it.

    It can't be shown again. Its part between the two "_" is its name, for `token revoke`.
    """
    if not is_tenant(tenant):
        raise click.BadParameter("must be 1 to 64 characters of [A-Za-z0-9._:-]", param_hint="TENANT")
    text = _with_database(
        database_url,
        data_dir,
        lambda database: TokenStore(database).create(tenant, roles, operations, description),
    )
    if as_json:
        console.print_json({"token": text, "token_id": text.split("_")[1]})
    else:
        click.echo(text)


@token.command(name="list")
@database_url_setting
@data_dir_setting
@json_option
def token_list(database_url: str | None, data_dir: Path, *, as_json: bool) -> None:
    """List every token, without the secrets."""
    tokens = _with_database(database_url, data_dir, lambda database: TokenStore(database).list())
    if as_json:
        console.print_json([console.fields_of(token) for token in tokens])
        return
    console.print_table(
        ["token", "tenant", "roles", "operations", "created", "revoked", "description"],
        (
            (
                found.token_id,
                found.tenant,
                " ".join(found.roles),
                " ".join(found.operations),
                f"{found.create_time:%Y-%m-%d %H:%M}",
                f"{found.revoke_time:%Y-%m-%d %H:%M}" if found.revoke_time else "",
                found.description,
            )
            for found in tokens
        ),
        empty="no tokens",
    )


@token.command(name="revoke")
@click.argument("token_id")
@database_url_setting
@data_dir_setting
@json_option
def token_revoke(token_id: str, database_url: str | None, data_dir: Path, *, as_json: bool) -> None:
    """Revoke a token.

    It is refused everywhere within a second.
    """
    if not _with_database(database_url, data_dir, lambda database: TokenStore(database).revoke(token_id)):
        console.fail(f"there is no token {token_id}, or it was revoked before")
    if as_json:
        console.print_json({"token_id": token_id, "revoked": True})
    else:
        click.echo(f"revoked {token_id}")


@cli.group(name="outbox")
def outbox_group() -> None:
    """Events that wait to be published."""


@outbox_group.command(name="list")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@database_url_setting
@data_dir_setting
@json_option
def outbox_list(limit: int, database_url: str | None, data_dir: Path, *, as_json: bool) -> None:
    """List the oldest events that wait."""
    pending, events = _with_database(database_url, data_dir, lambda database: Outbox(database).pending(limit))
    if as_json:
        console.print_json(
            {
                "pending": pending,
                "events": [console.fields_of(e) | {"payload": _payload(e.payload)} for e in events],
            }
        )
        return
    console.print_table(
        ["event", "type", "operation", "operation key", "says"],
        ((e.id, e.type, e.operation, e.operation_key, _gist(e.payload)) for e in events),
        empty="no events wait",
    )
    if pending > len(events):
        click.echo(f"and {pending - len(events)} more")


def _event(payload: bytes) -> events_pb2.DecisionEvent:
    return events_pb2.DecisionEvent.FromString(payload)


def _payload(payload: bytes) -> dict[str, Any]:
    return console.message_dict(_event(payload))


def _gist(payload: bytes) -> str:
    event = _event(payload)
    if event.HasField("effect"):
        return console.one_line(console.message_dict(event.effect.payload))
    return event.recorded.decision.outcome or event.recorded.failure.reason


@cli.command(name="doctor")
@database_url_setting
@data_dir_setting
@json_option
def doctor_command(database_url: str | None, data_dir: Path, *, as_json: bool) -> None:
    """Check this installation.

    With --database-url: that database too. Changes nothing; exits with 1 where something is at fault.
    """
    url = None if database_url is None else read_url(database_url)
    findings = _run(doctor.examine(url, data_dir))
    if as_json:
        console.print_json([console.fields_of(finding) for finding in findings])
    else:
        console.print_table(
            ["result", "check", "found"],
            ((Text("ok", "green") if f.ok else Text("FAULT", "bold red"), f.check, f.found) for f in findings),
            empty="",
        )
    if not all(finding.ok for finding in findings):
        raise SystemExit(1)
