"""The command line's part for the catalog: publish one, and look at what is published."""

import json
from difflib import unified_diff
from pathlib import Path

import click
from google.protobuf import duration_pb2
from rich.text import Text

from decideonce.v1 import catalog_pb2
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server import console
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.catalog_wire import request_of
from decideonce_server.cli_service import CALL_TIME_S, Service, calls_service
from decideonce_server.errors import InvalidCatalog
from decideonce_server.options import VERSION, duration_text


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
        console.print_diff(lines)
