"""The command line, put together: what runs on this machine is here, the rest in the modules that are named `cli_…`."""

import os
from collections.abc import Callable
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.text import Text

from decideonce_server import app, cli_catalog, cli_decisions, cli_outbox, console, doctor, logs
from decideonce_server.cli_database import checked_url, data_dir_setting, database_url_setting, run, with_database
from decideonce_server.cli_service import Service, calls_service
from decideonce_server.cloudevent import PayloadFormat
from decideonce_server.database import database_url as read_url
from decideonce_server.giving_way import CORES
from decideonce_server.identity import Role, is_tenant
from decideonce_server.ledger_tokens import TokenStore
from decideonce_server.migrate import migrate
from decideonce_server.options import DURATION, json_option, setting
from decideonce_server.settings import Settings

HEALTH_TIME_S = 2.0
# More, each with its pool, would need more connections than Postgres allows unless told otherwise: 100.
UNASKED_WORKERS_MAX = 7
SHELLS = {found.name: found for found in (BashComplete, ZshComplete, FishComplete)}


def _together(*settings: Callable[..., Any]) -> Callable[..., Any]:
    """Make one decorator of several settings, shown in their order."""
    return lambda command: reduce(lambda made, setting_: setting_(made), reversed(settings), command)


listen_settings = _together(
    setting("--tls-certificate", "PEM certificate chain to serve with.", type=click.Path(path_type=Path, exists=True)),
    setting("--tls-key", "PEM key of the certificate.", type=click.Path(path_type=Path, exists=True)),
    setting(
        "--tls-client-ca",
        "PEM certificates of the authority whose certificates callers must show.",
        type=click.Path(path_type=Path, exists=True),
    ),
    setting(
        "--callers",
        "YAML file that maps client certificates and JWTs to tenants.",
        type=click.Path(path_type=Path, exists=True),
    ),
    setting("--allow-plaintext", "Serve without TLS on an address that isn't loopback.", is_flag=True),
    setting(
        "--connection-age-max",
        "How old a connection gets until its client is asked for a new one, which may reach another instance; its "
        "calls end first. 0s: for ever.",
        type=DURATION,
        default="30m",
    ),
)
process_settings = _together(
    setting("--metrics", "Where to serve Prometheus metrics. Without it: nowhere."),
    setting("--otlp", "Where to send traces by OTLP over gRPC: http://HOST:4317, or https://. Without it: nowhere."),
    setting("--pool-size", "Connections to Postgres, of each process.", type=click.IntRange(1, 1000), default=10),
    setting("--evaluators", "Evaluators of policies, of each process.", type=click.IntRange(2, 1000), default=16),
    setting("--attempts-max", "Attempts of a process at once; more are shed.", type=click.IntRange(1), default=1000),
    setting("--attempts-per-tenant", "Of these, those of one tenant.", type=click.IntRange(1), default=500),
    setting(
        "--waiters-per-tenant",
        "Calls of one tenant that wait for others' decisions, at each process; more are told to come back.",
        type=click.IntRange(1),
        default=1000,
    ),
    setting(
        "--new-keys-per-second",
        "New keys of one tenant and second, at each process; more are shed.",
        type=click.IntRange(1),
        default=1000,
    ),
    setting(
        "--mismatches-per-minute",
        "Keys that a tenant may reuse for something else, at all processes together.",
        type=click.IntRange(1),
        default=600,
    ),
    setting(
        "--events",
        "Where to publish events: kafka://HOST:PORT, nats://HOST:PORT, log:PATH, or none. Without it: none; with the "
        "embedded Postgres a file under --data-dir.",
    ),
    setting(
        "--events-format",
        "How an event's payload is written. Without it: json in a file, and protobuf elsewhere.",
        type=click.Choice([found.value for found in PayloadFormat]),
    ),
    setting("--drain", "How long a stop waits for work that has begun.", type=DURATION, default="30s"),
    setting("--log-level", "What to log.", default="info", type=click.Choice(["debug", "info", "warning", "error"])),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("decideonce-server"), message="decideonce %(version)s")
def cli() -> None:
    """Make business decisions exactly once."""
    logs.configure("warning")


for command in (
    cli_decisions.decide,
    cli_decisions.status,
    cli_catalog.apply,
    cli_catalog.operation,
    cli_catalog.policy,
    cli_outbox.outbox,
):
    cli.add_command(command)


@cli.command()
@setting("--listen", "Where to serve.", default="127.0.0.1:50051")
@database_url_setting
@data_dir_setting
@setting("--catalog", "A catalog to apply at start.", type=click.Path(path_type=Path, exists=True, file_okay=False))
@setting(
    "--workers",
    "Processes that answer calls, on one port.",
    type=click.IntRange(1, 256),
    default=min(len(CORES) or os.cpu_count() or 1, UNASKED_WORKERS_MAX),
    show_default=f"one per core, {UNASKED_WORKERS_MAX} at most",
)
@setting(
    "--housekeeping/--no-housekeeping", "Rescue stale work, apply retention and publish events here.", default=True
)
@listen_settings
@process_settings
def serve(*, log_level: str, **settings: Any) -> None:
    """Serve until stopped.

    Prints one line on stdout once it can answer; logs go to stderr. SIGTERM and SIGINT stop it.
    """
    logs.configure(log_level)
    run(app.serve(Settings(**settings)))


@cli.command(hidden=True)
@setting("--listen", "Where to serve.", required=True)
@setting("--database-url", "Postgres to use.", required=True, callback=checked_url)
@listen_settings
@process_settings
def worker(*, log_level: str, **settings: Any) -> None:
    """Answer calls; one process of `serve`, which starts it."""
    logs.configure(log_level)
    run(app.work(Settings(**settings)))


@cli.command()
@setting("--database-url", "Postgres to use.", required=True, callback=checked_url)
@process_settings
def housekeep(*, log_level: str, **settings: Any) -> None:
    """Rescue stale work, apply retention and publish events.

    `serve` does so too, unless it is told not to. Any number may run at once.
    """
    logs.configure(log_level)
    run(app.housekeep(Settings(**settings)))


@cli.command(name="migrate")
@setting("--database-url", "Postgres to migrate, as its schema's owner.", required=True, callback=checked_url)
@setting("--service-role", "Role that services connect as: it gets what they need, and nothing more.")
@json_option
def migrate_command(database_url: str, service_role: str | None, *, as_json: bool) -> None:
    """Bring a database's schema up to date.

    Safe to run many times over, and from many places at once.
    """
    schema = run(migrate(read_url(database_url), service_role))
    if as_json:
        console.print_json({"schema": schema})
    else:
        click.echo(f"the schema is at {schema}")


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
    text = with_database(
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
    tokens = with_database(database_url, data_dir, lambda database: TokenStore(database).list())
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
    if not with_database(database_url, data_dir, lambda database: TokenStore(database).revoke(token_id)):
        console.fail(f"there is no token {token_id}, or it was revoked before")
    if as_json:
        console.print_json({"token_id": token_id, "revoked": True})
    else:
        click.echo(f"revoked {token_id}")


@cli.command(name="doctor")
@database_url_setting
@data_dir_setting
@json_option
def doctor_command(database_url: str | None, data_dir: Path, *, as_json: bool) -> None:
    """Check this installation.

    With --database-url: that database too. Changes nothing; exits with 1 where something is at fault.
    """
    url = None if database_url is None else read_url(database_url)
    findings = run(doctor.examine(url, data_dir))
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


@cli.command()
@calls_service
def health(service: Service, *, as_json: bool) -> None:
    """Ask a service whether it is serving.

    Exits with 0 if it is, else with 1.
    """
    stub = health_pb2_grpc.HealthStub(service.channel)
    status = stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIME_S).status
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    if as_json:
        console.print_json({"status": name})
    else:
        click.echo(name)
    if status != health_pb2.HealthCheckResponse.SERVING:
        raise SystemExit(1)


@cli.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes commands and flags.

    bash and zsh evaluate it: eval "$(decideonce completion bash)". fish reads it: decideonce completion fish | source
    """
    click.echo(SHELLS[shell](cli, {}, "decideonce", "_DECIDEONCE_COMPLETE").source())
