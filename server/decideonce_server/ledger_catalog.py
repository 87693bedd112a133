"""The catalog's store: immutable versions of policies and operations, and the revisions that name one of each.

What was published is never changed; the database refuses it. A publication is one statement, so a reader sees all of it
or nothing, and of two publications on the same revision one is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from decideonce_server.catalog import DEFAULT_TOPIC, Catalog, Execution, OperationContract, OperationVersion
from decideonce_server.database import Database, Statement, UniqueViolation
from decideonce_server.errors import CatalogConflict
from decideonce_server.policy import PolicyVersion, content_digest

REVISION = Statement(
    # Read by every server twice a second: is there a newer catalog?
    "catalog_revision",
    "SELECT coalesce(max(revision), 0) AS revision FROM catalog",
)

LATEST = Statement(
    # The newest revision, whole.
    "catalog_latest",
    "SELECT revision, apply_time, operations, policies FROM catalog ORDER BY revision DESC LIMIT 1",
)

POLICY_VERSIONS = Statement(
    # Versions by name and number.
    "policy_versions",
    """SELECT p.policy_id, p.version, p.engine, p.digest, p.content
    FROM unnest(CAST(:names AS text[]), CAST(:versions AS integer[])) AS k (policy_id, version)
    JOIN policy_version p USING (policy_id, version)""",
)

OPERATION_VERSIONS = Statement(
    # Versions by name and number.
    "operation_versions",
    """SELECT o.operation, o.version, o.content
    FROM unnest(CAST(:names AS text[]), CAST(:versions AS integer[])) AS k (operation, version)
    JOIN operation_version o USING (operation, version)""",
)

POLICY_HISTORY = Statement(
    # All versions of some policies, newest first, without their contents.
    "policy_history",
    """SELECT p.policy_id, p.version, p.engine, p.digest, p.create_time FROM policy_version p
    WHERE p.policy_id = ANY(CAST(:names AS text[])) ORDER BY p.policy_id, p.version DESC""",
)

OPERATION_HISTORY = Statement(
    # The digest of every version of some operations, newest first.
    "operation_history",
    """SELECT o.operation, o.version, o.digest FROM operation_version o
    WHERE o.operation = ANY(CAST(:names AS text[])) ORDER BY o.operation, o.version DESC""",
)

PUBLISH = Statement(
    # New versions and the revision that brings them into force, all or nothing.
    "publish",
    """WITH policies AS (
        INSERT INTO policy_version (policy_id, version, engine, digest, content, create_time)
        SELECT n.policy_id, n.version, n.engine, n.digest, n.content, statement_timestamp()
        FROM unnest(CAST(:policy_ids AS text[]), CAST(:policy_versions AS integer[]), CAST(:engines AS text[]),
            CAST(:policy_digests AS text[]), CAST(:policy_contents AS text[]))
            AS n (policy_id, version, engine, digest, content)
    ), operations AS (
        INSERT INTO operation_version (operation, version, digest, content, create_time)
        SELECT n.operation, n.version, n.digest, n.content, statement_timestamp()
        FROM unnest(CAST(:operation_names AS text[]), CAST(:operation_versions AS integer[]),
            CAST(:operation_digests AS text[]), CAST(:operation_contents AS text[]))
            AS n (operation, version, digest, content)
    )
    INSERT INTO catalog (revision, apply_time, applied_by, operations, policies)
    VALUES (:revision, statement_timestamp(), :applied_by, :operations, :policies)""",
)


@dataclass(frozen=True, slots=True)
class PolicyVersionHead:
    """A policy's version without its content."""

    policy_id: str
    version: int
    engine: str
    digest: str
    create_time: datetime


def contract_text(contract: OperationContract) -> str:
    """Write an operation's contract as canonical JSON text: the content of its version."""
    content = {
        "operation": contract.operation,
        "policy_id": contract.policy_id,
        "policy_version": contract.policy_version,
        "execution": contract.execution,
        "default_wait_us": _microseconds(contract.default_wait),
        "max_wait_us": _microseconds(contract.max_wait),
        "lease_us": _microseconds(contract.lease),
        "time_budget_us": _microseconds(contract.time_budget),
        "max_attempts": contract.max_attempts,
        "retention_us": _microseconds(contract.retention),
        "tombstone_retention_us": _microseconds(contract.tombstone_retention),
        "facts_schema": contract.facts_schema,
    }
    # Not there where it is the default: versions that were made before there were topics stay what they are.
    if contract.topic != DEFAULT_TOPIC:
        content["topic"] = contract.topic
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _microseconds(duration: timedelta | None) -> int | None:
    return None if duration is None else duration // timedelta(microseconds=1)


def _contract(text: str) -> OperationContract:
    content = json.loads(text)
    durations = {
        name.removesuffix("_us"): None if value is None else timedelta(microseconds=value)
        for name, value in content.items()
        if name.endswith("_us")
    }
    rest = {name: value for name, value in content.items() if not name.endswith("_us")}
    return OperationContract(**(rest | durations | {"execution": Execution(content["execution"])}))


class CatalogStore:
    """The catalog in Postgres. Every operation raises LedgerUnavailable where Postgres can't be reached."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def revision(self) -> int:
        """Give the newest revision's number; 0 before the first."""
        return int((await self._database.run(REVISION))[0]["revision"])

    async def latest(self) -> Catalog:
        """Read the catalog that is in force."""
        rows = await self._database.run(LATEST)
        if not rows:
            return Catalog()
        (row,) = rows
        operations = await self.operation_versions(list(json.loads(row["operations"]).items()))
        policies = await self.policy_versions(list(json.loads(row["policies"]).items()))
        return Catalog(
            revision=row["revision"],
            apply_time=row["apply_time"],
            operations={operation.contract.operation: operation for operation in operations},
            policies={policy.policy_id: policy for policy in policies},
        )

    async def policy_versions(self, names: Sequence[tuple[str, int]]) -> list[PolicyVersion]:
        """Read those of these versions that exist."""
        return [PolicyVersion(**dict(row)) for row in await self._database.run(POLICY_VERSIONS, **_pairs(names))]

    async def operation_versions(self, names: Sequence[tuple[str, int]]) -> list[OperationVersion]:
        """Read those of these versions that exist."""
        rows = await self._database.run(OPERATION_VERSIONS, **_pairs(names))
        return [OperationVersion(row["version"], _contract(row["content"])) for row in rows]

    async def policy_history(self, policy_ids: Sequence[str]) -> list[PolicyVersionHead]:
        """List every version of these policies, newest first."""
        rows = await self._database.run(POLICY_HISTORY, names=list(policy_ids))
        return [PolicyVersionHead(**dict(row)) for row in rows]

    async def operation_history(self, operations: Sequence[str]) -> list[tuple[str, int, str]]:
        """List every version of these operations, newest first: name, version, digest."""
        rows = await self._database.run(OPERATION_HISTORY, names=list(operations))
        return [(row["operation"], row["version"], row["digest"]) for row in rows]

    async def publish(
        self,
        catalog: Catalog,
        new_policies: Sequence[PolicyVersion],
        new_operations: Sequence[OperationVersion],
        applied_by: str,
    ) -> None:
        """Bring a catalog into force, with those of its versions that are new.

        Raises:
            CatalogConflict: another catalog of this revision was published first.
        """
        contents = [contract_text(operation.contract) for operation in new_operations]
        try:
            await self._database.run(
                PUBLISH,
                policy_ids=[policy.policy_id for policy in new_policies],
                policy_versions=[policy.version for policy in new_policies],
                engines=[policy.engine for policy in new_policies],
                policy_digests=[policy.digest for policy in new_policies],
                policy_contents=[policy.content for policy in new_policies],
                operation_names=[operation.contract.operation for operation in new_operations],
                operation_versions=[operation.version for operation in new_operations],
                operation_digests=[content_digest(content) for content in contents],
                operation_contents=contents,
                revision=catalog.revision,
                applied_by=applied_by,
                operations=_versions(catalog.operations),
                policies=_versions(catalog.policies),
            )
        except UniqueViolation:
            raise CatalogConflict from None


def _pairs(names: Sequence[tuple[str, int]]) -> dict[str, list[Any]]:
    return {"names": [name for name, _ in names], "versions": [version for _, version in names]}


def _versions(named: Mapping[str, PolicyVersion | OperationVersion]) -> str:
    return json.dumps({name: named[name].version for name in sorted(named)})
