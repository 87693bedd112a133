"""The command line: what calls a service."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from difflib import unified_diff
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

import click
import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.text import Text

from decideonce.keys import OPERATION_KEY_RULE, is_operation_key, new_operation_key
from decideonce.v1 import catalog_pb2
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.catalog_pb2_grpc import CatalogServiceStub
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceStub
from decideonce_server import console, values
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.catalog_wire import request_of
from decideonce_server.errors import InvalidCatalog, Violation
from decideonce_server.options import DURATION, duration_text, json_option, setting
from decideonce_server.settings import DEV_TOKEN_FILE

# For the answer's way, on top of what the caller wants to wait.
CALL_TIME_S = 10.0
# No operation lets a caller wait longer, and gRPC can't count much further.
WAIT_MAX = timedelta(days=1)
HEALTH_TIME_S = 2.0

VERSION = click.IntRange(1, 2**32 - 1)

STATUS_STYLES = {
    wire.DECISION_STATUS_SUCCEEDED: "green",
    wire.DECISION_STATUS_PROCESSING: "yellow",
    wire.DECISION_STATUS_FAILED_RETRYABLE: "yellow",
    wire.DECISION_STATUS_FAILED_FINAL: "red",
    wire.DECISION_STATUS_EXPIRED: "dim",
}


@dataclass(frozen=True, slots=True)
class Service:
    """A service to call, and as whom."""

    channel: grpc.Channel
    metadata: tuple[tuple[str, str], ...]

    @property
    def decisions(self) -> DecisionServiceStub:
        """The stub of DecisionService."""
        return DecisionServiceStub(self.channel)

    @property
    def catalog(self) -> CatalogServiceStub:
        """The stub of CatalogService."""
        return CatalogServiceStub(self.channel)


def calls_service(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which service to call, and the service; errors are said shortly."""

    @setting("--server", "The service to call.", default="127.0.0.1:50051")
    @setting("--token", "The caller's token. Without it: the one in DATA_DIR/dev-token, if there is one.")
    @setting("--data-dir", "Where a service in embedded mode keeps its data.", default=".decideonce")
    @setting("--tls-ca", "PEM certificates to trust. With it: TLS.", type=click.Path(path_type=Path, exists=True))
    @json_option
    @wraps(command)
    def wrapped(*, server: str, token: str | None, data_dir: str, tls_ca: Path | None, **options: Any) -> None:
        if token is None:
            token = _dev_token(Path(data_dir) / DEV_TOKEN_FILE)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        if tls_ca is None:
            channel = grpc.insecure_channel(server)
        else:
            channel = grpc.secure_channel(server, grpc.ssl_channel_credentials(tls_ca.read_bytes()))
        with channel, _said_shortly(server, has_token=bool(token), as_json=options["as_json"]):
            command(Service(channel, metadata), **options)

    return wrapped


def _dev_token(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        console.fail(f"can't read {path}: {error.strerror}", hint="give --token or DECIDEONCE_TOKEN")


@contextmanager
def _said_shortly(server: str, *, has_token: bool, as_json: bool) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        info, bad_request = _details(error)
        reason = info.reason or error.code().name
        # Without an ErrorInfo it is gRPC that speaks, not the service.
        message = error.details() if info.reason else f"no answer from {server}"
        violations = [Violation(v.field, v.description) for v in bad_request.field_violations]
        if as_json:
            said = {"reason": reason, "message": message, "metadata": dict(info.metadata)}
            console.print_json({"error": said | {"fields": [console.fields_of(v) for v in violations]}})
            raise SystemExit(1) from None
        metadata = "".join(f" ({name} {value})" for name, value in sorted(info.metadata.items()))
        console.fail(f"{reason}: {message}{metadata}", violations, _hint(error, reason, has_token=has_token))


def _details(error: grpc.RpcError) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.BadRequest]:
    trailers: Any = error.trailing_metadata() or ()
    status = status_pb2.Status.FromString(dict(trailers).get("grpc-status-details-bin", b""))
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info) or detail.Unpack(bad_request)
    return info, bad_request


def _hint(error: grpc.RpcError, reason: str, *, has_token: bool) -> str:
    if reason == "UNAUTHENTICATED":
        return "this token is not valid there" if has_token else "no token was sent: give --token or DECIDEONCE_TOKEN"
    if reason == "UNAVAILABLE":
        cause = (error.details() or "").rpartition(": ")[2]
        return f"{cause}; is `decideonce serve` running there? --server names another, --tls-ca is for TLS"
    return ""


def _facts(file: TextIO | None, pairs: tuple[str, ...]) -> dict[str, values.Json]:
    """Read facts from a file, then single ones from NAME=VALUE, where VALUE is JSON or else text."""
    facts: dict[str, values.Json] = {}
    if file is not None:
        try:
            read = json.load(file)
        except ValueError as error:
            raise click.BadParameter(f"must be JSON: {error}", param_hint="--facts") from None
        if not isinstance(read, dict):
            raise click.BadParameter("must be a JSON object", param_hint="--facts")
        facts = read
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise click.BadParameter("must be NAME=VALUE", param_hint="--fact")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        _put(facts, name.split("."), value)
    return facts


def _put(facts: dict[str, values.Json], path: list[str], value: values.Json) -> None:
    inner = facts
    for name in path[:-1]:
        below = inner.setdefault(name, {})
        if not isinstance(below, dict):
            raise click.BadParameter(f"{'.'.join(path)}: {name} is not an object", param_hint="--fact")
        inner = below
    inner[path[-1]] = value


def _key(text: str) -> str:
    if not is_operation_key(text):
        raise click.BadParameter(OPERATION_KEY_RULE, param_hint="KEY")
    return text


def _wait(max_wait: timedelta | None) -> duration_pb2.Duration | None:
    if max_wait is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromTimedelta(max_wait)
    return duration


def _call_time(max_wait: timedelta | None) -> float:
    return CALL_TIME_S + min(max_wait or timedelta(), WAIT_MAX).total_seconds()


@click.command()
@click.argument("operation")
@click.option("--facts", "facts_file", type=click.File(encoding="utf-8"), help="A JSON file, or - for stdin.")
@click.option(
    "--fact",
    "pairs",
    multiple=True,
    metavar="NAME=VALUE",
    help="One fact, over those of --facts; repeatable. VALUE is JSON, or else text. A NAME a.b is b within a.",
)
@click.option("--key", help="The operation key. Without it: a new one, which is printed.")
@click.option("--policy-version", type=VERSION, help="Decide under this version of the policy.")
@click.option("--max-wait", type=DURATION, help="How long to wait for a result. Without it: the operation's default.")
@calls_service
def decide(
    service: Service,
    *,
    operation: str,
    facts_file: TextIO | None,
    pairs: tuple[str, ...],
    key: str | None,
    policy_version: int | None,
    max_wait: timedelta | None,
    as_json: bool,
) -> None:
    """Decide OPERATION once, or replay the answer.

    Exits with 0 for every recorded answer, whatever its status; --json tells that.
    """
    key = new_operation_key() if key is None else _key(key)
    try:
        struct = values.to_struct(_facts(facts_file, pairs))
    except values.ValueFault as fault:
        raise click.BadParameter(f"{fault.path} {fault.rule}", param_hint="--facts") from None
    request = wire.DecideRequest(
        operation_key=key,
        operation=operation,
        facts=struct,
        policy_version=policy_version,
        max_wait=_wait(max_wait),
    )
    response = service.decisions.Decide(request, metadata=service.metadata, timeout=_call_time(max_wait))
    _print_decision(response, operation, key, as_json=as_json)


@click.command()
@click.argument("operation")
@click.argument("key")
@click.option("--max-wait", type=DURATION, help="How long to wait for a final state.")
@calls_service
def status(service: Service, *, operation: str, key: str, max_wait: timedelta | None, as_json: bool) -> None:
    """Tell what is recorded under a KEY."""
    request = wire.GetDecisionStatusRequest(
        operation_key=_key(key),
        operation=operation,
        max_wait=_wait(max_wait),
    )
    response = service.decisions.GetDecisionStatus(request, metadata=service.metadata, timeout=_call_time(max_wait))
    _print_decision(response, operation, key, as_json=as_json)


def _print_decision(
    response: wire.DecideResponse | wire.GetDecisionStatusResponse,
    operation: str,
    key: str,
    *,
    as_json: bool,
) -> None:
    if as_json:
        console.print_json({"operation_key": key} | console.message_dict(response))
        return
    name = wire.DecisionStatus.Name(response.status).removeprefix("DECISION_STATUS_")
    title = Text(response.decision.outcome or name, f"bold {STATUS_STYLES.get(response.status, '')}")
    if isinstance(response, wire.DecideResponse) and response.status != wire.DECISION_STATUS_PROCESSING:
        title.append("  replayed: the recorded answer" if response.replayed else "  original", "not bold dim")
    provenance = response.provenance
    failure = response.failure
    console.print_record(
        title,
        {
            "reasons": list(response.decision.reasons),
            "outputs": console.one_line(console.message_dict(response.decision.outputs)),
            "failure": f"{failure.reason}: {failure.message}" if failure.reason else "",
            "operation": operation,
            "key": key,
            "decision": provenance.decision_id,
            "policy": f"{provenance.policy_id} version {provenance.policy_version}" if provenance.policy_id else "",
            "digest": provenance.policy_digest,
            "rules": list(provenance.matched_rules),
            "attempt": provenance.attempt or "",
            "retry after": duration_text(response.retry_after.ToTimedelta())
            if response.HasField("retry_after")
            else "",
            "then ask": f"decideonce status {operation} {key} --max-wait 10s"
            if response.status == wire.DECISION_STATUS_PROCESSING
            else "",
        },
    )


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@calls_service
def apply(service: Service, *, directory: Path, dry_run: bool, as_json: bool) -> None:
    """Publish a catalog, all of it or nothing.

    DIRECTORY is the whole catalog: what isn't in it isn't published afterwards.
    """
    try:
        source = read_catalog(directory)
    except InvalidCatalog as error:
        console.fail(str(error), error.violations)
    response = service.catalog.ApplyCatalog(
        request_of(source, dry_run=dry_run), metadata=service.metadata, timeout=60 + CALL_TIME_S
    )
    if as_json:
        console.print_json(console.message_dict(response))
        return
    console.print_table(
        ["change", "of", "name", "version", "settings"],
        (_change_row(change) for change in response.changes),
        empty="nothing changes" if dry_run else "nothing changed",
    )
    console.out.print(f"revision {response.revision}" + (" stays in force: this was a dry run" if dry_run else ""))


def _change_row(change: catalog_pb2.CatalogChange) -> tuple[str, ...]:
    kind = catalog_pb2.ChangeKind.Name(change.kind).removeprefix("CHANGE_KIND_").lower()
    subject = catalog_pb2.CatalogSubject.Name(change.subject).removeprefix("CATALOG_SUBJECT_").lower()
    versions = " → ".join(str(version) for version in (change.old_version, change.new_version) if version)
    return kind, subject, change.name, versions, " ".join(change.fields)


@click.group()
def operation() -> None:
    """Operations, as they are published."""


@operation.command(name="show")
@click.argument("name")
@calls_service
def operation_show(service: Service, *, name: str, as_json: bool) -> None:
    """Show the contract of operation NAME."""
    request = wire.GetOperationRequest(operation=name)
    response = service.decisions.GetOperation(request, metadata=service.metadata, timeout=CALL_TIME_S)
    if as_json:
        console.print_json(console.message_dict(response))
        return
    fields = {
        field.name: duration_text(value.ToTimedelta()) if isinstance(value, duration_pb2.Duration) else value
        for field, value in response.ListFields()
    }
    fields |= {lifetime: fields.get(lifetime, "forever") for lifetime in ("retention", "tombstone_retention")}
    fields["execution"] = wire.Execution.Name(response.execution).removeprefix("EXECUTION_").lower()
    schema = json.loads(fields.pop("facts_schema"))
    fields["facts_schema"] = json.dumps(schema, indent=2, ensure_ascii=False).splitlines()
    console.print_record(Text(fields.pop("operation"), "bold"), fields)


@click.group()
def policy() -> None:
    """Policies, as they are published."""


def _active(service: Service) -> list[catalog_pb2.PolicyVersion]:
    request = catalog_pb2.GetCatalogRequest()
    return list(service.catalog.GetCatalog(request, metadata=service.metadata, timeout=CALL_TIME_S).policies)


def _versions(service: Service, policy_id: str) -> list[catalog_pb2.PolicyVersion]:
    request = catalog_pb2.ListPolicyVersionsRequest(policy_id=policy_id, page_size=1000)
    versions: list[catalog_pb2.PolicyVersion] = []
    while True:
        page = service.catalog.ListPolicyVersions(request, metadata=service.metadata, timeout=CALL_TIME_S)
        versions += page.versions
        if not page.next_page_token:
            return versions
        request.page_token = page.next_page_token


@policy.command(name="list")
@click.argument("policy_id", required=False)
@calls_service
def policy_list(service: Service, *, policy_id: str | None, as_json: bool) -> None:
    """List the policies in force, or all versions of POLICY_ID."""
    versions = _active(service) if policy_id is None else _versions(service, policy_id)
    if as_json:
        console.print_json([console.message_dict(version) for version in versions])
        return
    console.print_table(
        ["policy", "version", "engine", "published", "digest", ""],
        (
            (
                version.policy_id,
                version.version,
                version.engine,
                f"{version.create_time.ToDatetime():%Y-%m-%d %H:%M}",
                version.digest,
                Text("active" if version.active else "", "green"),
            )
            for version in versions
        ),
        empty="no policies",
    )


def _content(service: Service, policy_id: str, version: int) -> catalog_pb2.GetPolicyVersionResponse:
    request = catalog_pb2.GetPolicyVersionRequest(policy_id=policy_id, version=version)
    return service.catalog.GetPolicyVersion(request, metadata=service.metadata, timeout=CALL_TIME_S)


def _readable(response: catalog_pb2.GetPolicyVersionResponse) -> str:
    if response.version.engine == "jdm":
        return json.dumps(json.loads(response.content), indent=2, ensure_ascii=False)
    return response.content


@policy.command(name="show")
@click.argument("policy_id")
@click.argument("version", type=VERSION, required=False)
@calls_service
def policy_show(service: Service, *, policy_id: str, version: int | None, as_json: bool) -> None:
    """Show a VERSION of POLICY_ID, or the active one."""
    response = _content(service, policy_id, version or 0)
    if as_json:
        console.print_json(console.message_dict(response))
    else:
        click.echo(_readable(response))


@policy.command(name="diff")
@click.argument("policy_id")
@click.argument("old", type=VERSION)
@click.argument("new", type=VERSION)
@calls_service
def policy_diff(service: Service, *, policy_id: str, old: int, new: int, as_json: bool) -> None:
    """Show how version NEW of POLICY_ID differs from OLD."""
    before, after = (_readable(_content(service, policy_id, version)).splitlines() for version in (old, new))
    lines = list(unified_diff(before, after, f"{policy_id} {old}", f"{policy_id} {new}", lineterm=""))
    if as_json:
        console.print_json({"policy_id": policy_id, "old_version": old, "new_version": new, "diff": lines})
    else:
        click.echo("\n".join(lines) or "no difference")


@click.command(name="health")
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


COMMANDS = (decide, status, apply, operation, policy, health)
