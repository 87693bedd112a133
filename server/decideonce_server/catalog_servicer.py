"""CatalogService: maps a request, calls, maps the result."""

from typing import Any

from decideonce.v1 import catalog_pb2 as wire
from decideonce.v1.catalog_pb2_grpc import CatalogServiceServicer
from decideonce_server.apply import Apply, ChangeKind, Subject
from decideonce_server.auth import current_caller
from decideonce_server.catalog_reader import CatalogReader
from decideonce_server.catalog_wire import source_of
from decideonce_server.errors import InvalidRequest, PolicyVersionNotFound, Violation
from decideonce_server.ledger_catalog import CatalogStore, PolicyVersionHead
from decideonce_server.requests import name_of
from decideonce_server.servicer import operation_response
from decideonce_server.wire import Context

KINDS = {
    ChangeKind.ADDED: wire.CHANGE_KIND_ADDED,
    ChangeKind.CHANGED: wire.CHANGE_KIND_CHANGED,
    ChangeKind.REMOVED: wire.CHANGE_KIND_REMOVED,
}
SUBJECTS = {
    Subject.POLICY: wire.CATALOG_SUBJECT_POLICY,
    Subject.OPERATION: wire.CATALOG_SUBJECT_OPERATION,
}
PAGE_SIZE = 100
PAGE_SIZE_MAX = 1000


class CatalogServicer(CatalogServiceServicer):
    """Publishes catalogs and tells what is published. What it tells is never older than what the store has."""

    def __init__(self, apply: Apply, store: CatalogStore, catalog: CatalogReader) -> None:
        self._apply = apply
        self._store = store
        self._catalog = catalog

    async def ApplyCatalog(self, request: wire.ApplyCatalogRequest, context: Context) -> Any:  # noqa: ARG002, N802
        """Publish a catalog, or tell what that would change."""
        caller = current_caller()
        applied = await self._apply.apply(
            source_of(request),
            applied_by=f"{caller.tenant}/{caller.name}",
            dry_run=request.dry_run,
        )
        await self._catalog.refresh()
        changes = [
            wire.CatalogChange(
                kind=KINDS[change.kind],
                subject=SUBJECTS[change.subject],
                name=change.name,
                old_version=change.old_version,
                new_version=change.new_version,
                fields=change.fields,
            )
            for change in applied.changes
        ]
        return wire.ApplyCatalogResponse(revision=applied.revision, changes=changes)

    async def GetCatalog(self, request: wire.GetCatalogRequest, context: Context) -> Any:  # noqa: ARG002, N802
        """Tell the catalog in force."""
        await self._catalog.refresh()
        catalog = self._catalog.catalog
        response = wire.GetCatalogResponse(revision=catalog.revision)
        if catalog.apply_time is not None:
            response.apply_time.FromDatetime(catalog.apply_time)
        for name in sorted(catalog.operations):
            operation = operation_response(catalog.operations[name], self._catalog.policy_of(name))
            response.operations.append(operation)
        for head in await self._store.policy_history(sorted(catalog.policies)):
            if head.version == catalog.policies[head.policy_id].version:
                response.policies.append(_policy_version(head, active=True))
        return response

    async def ListPolicyVersions(self, request: wire.ListPolicyVersionsRequest, context: Context) -> Any:  # noqa: ARG002, N802
        """List a policy's versions, newest first; a page's token is the number below which the next begins."""
        if not 0 <= request.page_size <= PAGE_SIZE_MAX:
            raise InvalidRequest([Violation("page_size", f"must be 0 to {PAGE_SIZE_MAX}")])
        if request.page_token and not request.page_token.isdecimal():
            raise InvalidRequest([Violation("page_token", "must be the next_page_token of the page before")])
        history = await self._store.policy_history([name_of(request.policy_id, "policy_id")])
        if not history:
            raise PolicyVersionNotFound
        if request.page_token:
            history = [head for head in history if head.version < int(request.page_token)]
        page = history[: request.page_size or PAGE_SIZE]
        return wire.ListPolicyVersionsResponse(
            versions=[_policy_version(head, active=await self._is_active(head)) for head in page],
            next_page_token=str(page[-1].version) if len(page) < len(history) else "",
        )

    async def GetPolicyVersion(self, request: wire.GetPolicyVersionRequest, context: Context) -> Any:  # noqa: ARG002, N802
        """Give one version with its content."""
        for head in await self._store.policy_history([name_of(request.policy_id, "policy_id")]):
            active = await self._is_active(head)
            if head.version == request.version or (not request.version and active):
                policy = await self._catalog.policy_version(head.policy_id, head.version)
                version = _policy_version(head, active=active)
                return wire.GetPolicyVersionResponse(version=version, content=policy.content)
        raise PolicyVersionNotFound

    async def _is_active(self, head: PolicyVersionHead) -> bool:
        await self._catalog.refresh()
        active = self._catalog.catalog.policies.get(head.policy_id)
        return active is not None and active.version == head.version


def _policy_version(head: PolicyVersionHead, *, active: bool) -> wire.PolicyVersion:
    version = wire.PolicyVersion(
        policy_id=head.policy_id,
        version=head.version,
        engine=head.engine,
        digest=head.digest,
        active=active,
    )
    version.create_time.FromDatetime(head.create_time)
    return version
