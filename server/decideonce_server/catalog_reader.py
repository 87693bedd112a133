"""The catalog as a running server holds it: the one in force, whole, and any older version on demand."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from decideonce_server.catalog import POLICY_VERSION_MAX, Catalog, OperationContract
from decideonce_server.errors import LedgerUnavailable, PolicyVersionNotFound
from decideonce_server.facts import FactsSchema
from decideonce_server.ledger_catalog import CatalogStore
from decideonce_server.policy import PolicyVersion

# An apply is in force everywhere within 2 s; a look at one row is cheap.
REFRESH_INTERVAL_S = 0.5

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Operation:
    """One version of an operation, made ready to judge facts."""

    version: int
    contract: OperationContract
    schema: FactsSchema


@dataclass(frozen=True, slots=True)
class _Snapshot:
    catalog: Catalog = field(default_factory=Catalog)
    operations: Mapping[str, Operation] = field(default_factory=dict)
    # By operation: the version that decides its new keys.
    policies: Mapping[str, PolicyVersion] = field(default_factory=dict)


class CatalogReader:
    """Reads the catalog; `run` keeps it fresh. What one call reads before its first await is of one revision."""

    def __init__(self, store: CatalogStore) -> None:
        self._store = store
        self._snapshot = _Snapshot()
        # Versions are immutable and few, so they are kept for good.
        self._operations: dict[tuple[str, int], Operation] = {}
        self._policies: dict[tuple[str, int], PolicyVersion] = {}

    @property
    def catalog(self) -> Catalog:
        """The catalog in force, as of the last refresh."""
        return self._snapshot.catalog

    def operation(self, name: str) -> Operation | None:
        """Give the version in force of an operation."""
        return self._snapshot.operations.get(name)

    def policy_of(self, operation: str) -> PolicyVersion | None:
        """Give the policy version that decides an operation's new keys."""
        return self._snapshot.policies.get(operation)

    async def operation_version(self, name: str, version: int) -> Operation:
        """Give one version of an operation, in force or not.

        Raises:
            LedgerUnavailable: it has to be read, and Postgres can't be reached.
            KeyError: there is no such version.
        """
        if (name, version) not in self._operations:
            for found in await self._store.operation_versions([(name, version)]):
                schema = FactsSchema.compile(found.contract.facts_schema)
                self._operations[name, version] = Operation(found.version, found.contract, schema)
        return self._operations[name, version]

    async def policy_version(self, policy_id: str, version: int) -> PolicyVersion:
        """Give one version of a policy, in force or not.

        Raises:
            PolicyVersionNotFound: there is no such version.
            LedgerUnavailable: it has to be read, and Postgres can't be reached.
        """
        if (policy_id, version) not in self._policies and version <= POLICY_VERSION_MAX:
            for found in await self._store.policy_versions([(policy_id, version)]):
                self._policies[policy_id, version] = found
        if (policy_id, version) not in self._policies:
            raise PolicyVersionNotFound({"policy_version": str(version)})
        return self._policies[policy_id, version]

    async def refresh(self) -> None:
        """Take over the newest revision, if there is a newer one, in one step.

        Raises:
            LedgerUnavailable: Postgres can't be reached; the catalog is as before.
        """
        if await self._store.revision() == self._snapshot.catalog.revision:
            return
        catalog = await self._store.latest()
        operations: dict[str, Operation] = {}
        policies: dict[str, PolicyVersion] = {}
        for name, found in catalog.operations.items():
            operations[name] = await self.operation_version(name, found.version)
            policy = await self._deciding_policy(catalog, found.contract)
            if policy is not None:
                policies[name] = policy
        self._snapshot = _Snapshot(catalog, operations, policies)
        log.info("catalog in force", revision=catalog.revision, operations=len(operations))

    async def _deciding_policy(self, catalog: Catalog, contract: OperationContract) -> PolicyVersion | None:
        if contract.policy_id is None:
            return None
        if contract.policy_version is not None:
            return await self.policy_version(contract.policy_id, contract.policy_version)
        return catalog.policies.get(contract.policy_id)

    async def run(self) -> None:
        """Refresh twice a second until cancelled; while Postgres can't be reached, the catalog stays as it is."""
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            try:
                await self.refresh()
            except LedgerUnavailable:
                log.warning("catalog not refreshed: the ledger can't be reached")
