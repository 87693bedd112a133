"""The command line: what calls a service."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import unified_diff
from functools import wraps
from pathlib import Path
from typing import Any

import click
import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from decideonce.keys import OPERATION_KEY_RULE, is_operation_key, new_operation_key
from decideonce.v1 import catalog_pb2
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.catalog_pb2_grpc import CatalogServiceStub
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceStub
from decideonce_server import console, values
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.catalog_wire import request_of
from decideonce_server.errors import InvalidCatalog, Violation
from decideonce_server.options import DURATION, json_option, setting
from decideonce_server.settings import DEV_TOKEN_FILE

# For the answer's way, on top of what the caller wants to wait.
CALL_TIME_S = 10.0

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
        dev_token = Path(data_dir) / DEV_TOKEN_FILE
        if token is None and dev_token.exists():
            token = dev_token.read_text().strip()
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        if tls_ca is None:
            channel = grpc.insecure_channel(server)
        else:
            channel = grpc.secure_channel(server, grpc.ssl_channel_credentials(tls_ca.read_bytes()))
        with channel, _said_shortly(server):
            command(Service(channel, metadata), **options)

    return wrapped


@contextmanager
def _said_shortly(server: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        details = status_pb2.Status()
        trailers: Any = error.trailing_metadata() or ()
        details.ParseFromString(dict(trailers).get("grpc-status-details-bin", b""))
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        for detail in details.details:
            detail.Unpack(info) or detail.Unpack(bad_request)
        reason = info.reason or error.code().name
        metadata = "".join(f" ({name} {value})" for name, value in sorted(info.metadata.items()))
        text = f"{server}: {error.details()}" if not info.reason else f"{error.details()}{metadata}"
        console.fail(
            f"{reason}: {text}",
            [Violation(v.field, v.description) for v in bad_request.field_violations],
        )


def _facts(text: str | None, pairs: tuple[str, ...]) -> dict[str, values.Json]:
    """Read facts from a file or stdin, and single ones from NAME=VALUE, where VALUE is JSON or else text."""
    facts: dict[str, values.Json] = {}
    if text is not None:
        source = sys.stdin.read() if text == "-" else Path(text).read_text()
        try:
            read = json.loads(source)
        except json.JSONDecodeError as error:
            raise click.BadParameter(f"must be JSON: {error}", param_hint="--facts") from None
        if not isinstance(read, dict):
            raise click.BadParameter("must be a JSON object", param_hint="--facts")
        facts = read
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise click.BadParameter("must be NAME=VALUE", param_hint="--fact")
        try:
            facts[name] = json.loads(value)
        except json.JSONDecodeError:
            facts[name] = value
    return facts


def _key(text: str) -> str:
    if not is_operation_key(text):
        raise click.BadParameter(OPERATION_KEY_RULE, param_hint="KEY")
    return text


def _duration(milliseconds: Any) -> duration_pb2.Duration | None:
    if milliseconds is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromTimedelta(milliseconds)
    return duration


@click.command()
@click.argument("operation")
@click.option("--facts", "facts_file", help="A JSON file, or - for stdin.")
@click.option("--fact", "pairs", multiple=True, metavar="NAME=VALUE", help="One fact; VALUE is JSON, or else text.")
@click.option("--key", help="The operation key. Without it: a new one, which is printed.")
@click.option("--policy-version", type=int, help="Decide under this version of the policy.")
@click.option("--max-wait", type=DURATION, help="How long to wait for a result. Without it: the operation's default.")
@calls_service
def decide(
    service: Service,
    *,
    operation: str,
    facts_file: str | None,
    pairs: tuple[str, ...],
    key: str | None,
    policy_version: int | None,
    max_wait: Any,
    as_json: bool,
) -> None:
    """Decide OPERATION once under a key, or replay what is recorded."""
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
        max_wait=_duration(max_wait),
    )
    timeout = CALL_TIME_S + (max_wait.total_seconds() if max_wait else 0)
    response = service.decisions.Decide(request, metadata=service.metadata, timeout=timeout)
    _print_decision(response, operation, key, as_json=as_json)


@click.command()
@click.argument("operation")
@click.argument("key")
@click.option("--max-wait", type=DURATION, help="How long to wait for a final state.")
@calls_service
def status(service: Service, *, operation: str, key: str, max_wait: Any, as_json: bool) -> None:
    """Tell what is recorded under KEY."""
    request = wire.GetDecisionStatusRequest(
        operation_key=_key(key),
        operation=operation,
        max_wait=_duration(max_wait),
    )
    timeout = CALL_TIME_S + (max_wait.total_seconds() if max_wait else 0)
    response = service.decisions.GetDecisionStatus(request, metadata=service.metadata, timeout=timeout)
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
    replayed = isinstance(response, wire.DecideResponse) and response.replayed
    title = f"[bold {STATUS_STYLES[response.status]}]{response.decision.outcome or name}[/]"
    if response.status == wire.DECISION_STATUS_SUCCEEDED and isinstance(response, wire.DecideResponse):
        title += "  [dim]replayed: the recorded answer[/]" if replayed else "  [dim]original[/]"
    provenance = response.provenance
    policy = f"{provenance.policy_id} version {provenance.policy_version}, {provenance.policy_digest[:19]}…"
    console.print_record(
        title,
        {
            "reasons": list(response.decision.reasons),
            "outputs": json.dumps(outputs, ensure_ascii=False)
            if (outputs := console.message_dict(response.decision.outputs))
            else "",
            "failure": f"{response.failure.reason}: {response.failure.message}" if response.failure.reason else "",
            "operation": operation,
            "key": key,
            "decision": provenance.decision_id,
            "policy": policy if provenance.policy_id else "",
            "rules": list(provenance.matched_rules),
            "attempt": provenance.attempt or "",
            "retry after": f"{response.retry_after.ToMilliseconds()} ms" if response.HasField("retry_after") else "",
        },
    )


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@calls_service
def apply(service: Service, *, directory: Path, dry_run: bool, as_json: bool) -> None:
    """Publish the catalog in DIRECTORY, all of it or nothing."""
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
        ["", "", "name", "version", "settings"],
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
    parts = console.message_dict(response)
    if as_json:
        console.print_json(parts)
        return
    parts["facts_schema"] = json.dumps(json.loads(response.facts_schema), indent=2, ensure_ascii=False).splitlines()
    console.print_record(f"[bold]{parts.pop('operation')}[/]", parts)


@click.group()
def policy() -> None:
    """Policies, as they are published."""


@policy.command(name="list")
@click.argument("policy_id", required=False)
@calls_service
def policy_list(service: Service, *, policy_id: str | None, as_json: bool) -> None:
    """List the policies in force, or all versions of POLICY_ID."""
    if policy_id is None:
        catalog = service.catalog.GetCatalog(
            catalog_pb2.GetCatalogRequest(), metadata=service.metadata, timeout=CALL_TIME_S
        )
        versions = list(catalog.policies)
    else:
        request = catalog_pb2.ListPolicyVersionsRequest(policy_id=policy_id, page_size=1000)
        versions = list(
            service.catalog.ListPolicyVersions(request, metadata=service.metadata, timeout=CALL_TIME_S).versions
        )
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
                version.digest[:19] + "…",
                "[green]active[/]" if version.active else "",
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
@click.argument("version", type=int, default=0)
@calls_service
def policy_show(service: Service, *, policy_id: str, version: int, as_json: bool) -> None:
    """Show a VERSION of POLICY_ID, or the active one."""
    response = _content(service, policy_id, version)
    if as_json:
        console.print_json(console.message_dict(response))
    else:
        click.echo(_readable(response))


@policy.command(name="diff")
@click.argument("policy_id")
@click.argument("old", type=int)
@click.argument("new", type=int)
@calls_service
def policy_diff(service: Service, *, policy_id: str, old: int, new: int, as_json: bool) -> None:
    """Show how version NEW of POLICY_ID differs from OLD."""
    before, after = (_readable(_content(service, policy_id, version)).splitlines() for version in (old, new))
    lines = list(unified_diff(before, after, f"{policy_id} {old}", f"{policy_id} {new}", lineterm=""))
    if as_json:
        console.print_json(lines)
    else:
        click.echo("\n".join(lines) or "no difference")


COMMANDS = (decide, status, apply, operation, policy)
