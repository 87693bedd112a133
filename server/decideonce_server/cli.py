"""The command line: what runs on this machine. What calls a service is in `cli_calls`."""

from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop

from decideonce.v1 import events_pb2
from decideonce_server import app, cli_calls, console, doctor, logs
from decideonce_server.auth import Role, is_tenant
from decideonce_server.database import Database, DatabaseUrl, database_url
from decideonce_server.errors import DecideonceError, InvalidField
from decideonce_server.ledger_tokens import TokenStore
from decideonce_server.migrate import UnknownSchema, migrate
from decideonce_server.options import DURATION, json_option, setting
from decideonce_server.outbox import Outbox
from decideonce_server.settings import InvalidSetting, Settings

T = TypeVar("T")


database_url_setting = setting("--database-url", "Postgres to use. Without it: an embedded one under --data-dir.")
data_dir_setting = setting(
    "--data-dir",
    "Where the embedded Postgres keeps its data.",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".decideonce"),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("decideonce-server"), message="decideonce %(version)s")
@setting("--log-level", "What to log.", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
def cli(log_level: str) -> None:
    """Make business decisions exactly once."""
    logs.configure(log_level)


for command in cli_calls.COMMANDS:
    cli.add_command(command)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, and say shortly what can go wrong in an ordinary way."""
    try:
        return uvloop.run(work)
    except InvalidField as error:
        console.fail(str(error), error.violations)
    except (DecideonceError, InvalidSetting, UnknownSchema, ValueError) as error:
        console.fail(str(error))
    except RuntimeError as error:
        # gRPC's way of saying that it can't listen.
        console.fail(str(error))


@cli.command()
@setting("--listen", "Where to serve.", default="127.0.0.1:50051")
@database_url_setting
@data_dir_setting
@setting("--catalog", "A catalog to apply at start.", type=click.Path(path_type=Path, exists=True, file_okay=False))
@setting("--metrics", "Where to serve Prometheus metrics. Without it: nowhere.")
@setting("--tls-certificate", "PEM certificate chain to serve with.", type=click.Path(path_type=Path, exists=True))
@setting("--tls-key", "PEM key of the certificate.", type=click.Path(path_type=Path, exists=True))
@setting("--allow-plaintext", "Serve without TLS on an address that isn't loopback.", is_flag=True)
@setting("--pool-size", "Connections to Postgres.", type=click.IntRange(1, 1000), default=10)
@setting("--evaluators", "Processes that evaluate policies, at most.", type=click.IntRange(2, 1000), default=16)
@setting("--drain", "How long a stop waits for work that has begun.", type=DURATION, default="30s")
def serve(**settings: Any) -> None:
    """Serve until stopped; prints one line on stdout once it can answer."""
    _run(app.serve(Settings(**settings)))


@cli.command(name="migrate")
@setting("--database-url", "Postgres to migrate.", required=True)
def migrate_command(database_url: str) -> None:
    """Bring a database's schema to what this program needs. Safe to run many times over."""
    console.out.print(f"schema at {_run(migrate(_url(database_url)))}")


def _url(text: str) -> DatabaseUrl:
    try:
        return database_url(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--database-url") from None


def _with_database(text: str | None, data_dir: Path, use: Callable[[Database], Awaitable[T]]) -> T:
    async def run() -> T:
        async with app.postgres(None if text is None else _url(text), data_dir) as url:
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
def token_create(
    tenant: str,
    roles: tuple[str, ...],
    operations: tuple[str, ...],
    description: str,
    database_url: str | None,
    data_dir: Path,
) -> None:
    """Make a token for a tenant, and print it: it can't be shown again."""
    if not is_tenant(tenant):
        raise click.BadParameter("must be 1 to 64 characters of [A-Za-z0-9._:-]", param_hint="TENANT")
    text = _with_database(
        database_url,
        data_dir,
        lambda database: TokenStore(database).create(tenant, roles, operations, description),
    )
    click.echo(text)


@token.command(name="list")
@database_url_setting
@data_dir_setting
@json_option
def token_list(database_url: str | None, data_dir: Path, *, as_json: bool) -> None:
    """List every token, without its secret."""
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
def token_revoke(token_id: str, database_url: str | None, data_dir: Path) -> None:
    """Revoke a token; it is refused everywhere within a second."""
    if not _with_database(database_url, data_dir, lambda database: TokenStore(database).revoke(token_id)):
        console.fail(f"there is no token {token_id}, or it was revoked before")
    console.out.print(f"revoked {token_id}")


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
        console.out.print(f"and {pending - len(events)} more")


def _event(payload: bytes) -> events_pb2.DecisionEvent:
    return events_pb2.DecisionEvent.FromString(payload)


def _payload(payload: bytes) -> dict[str, Any]:
    return console.message_dict(_event(payload))


def _gist(payload: bytes) -> str:
    event = _event(payload)
    if event.HasField("effect"):
        return " ".join(f"{name}={value}" for name, value in console.message_dict(event.effect.payload).items())
    return event.recorded.decision.outcome or event.recorded.failure.reason


@cli.command(name="doctor")
@database_url_setting
@data_dir_setting
@json_option
def doctor_command(database_url: str | None, data_dir: Path, *, as_json: bool) -> None:
    """Check that this installation can work, and with --database-url that its database is in order."""
    url = None if database_url is None else _url(database_url)
    findings = _run(doctor.examine(url, data_dir))
    if as_json:
        console.print_json([console.fields_of(finding) for finding in findings])
    else:
        console.print_table(
            ["", "check", "found"],
            (("[green]ok[/]" if f.ok else "[bold red]FAULT[/]", f.check, f.found) for f in findings),
            empty="",
        )
    if not all(finding.ok for finding in findings):
        raise SystemExit(1)
