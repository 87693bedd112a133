"""Publishes a catalog: checks all of it, gives versions to what is new, and brings it into force in one step."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from decideonce_server import policy_jdm, policy_python
from decideonce_server.catalog import (
    NAME_RULE,
    Catalog,
    CatalogSource,
    OperationContract,
    OperationVersion,
    PolicyExample,
    PolicySource,
    contract_violations,
)
from decideonce_server.errors import InvalidCatalog, Violation, utc_text
from decideonce_server.evaluator import Evaluators
from decideonce_server.facts import FactsSchema, InvalidSchema
from decideonce_server.ledger_catalog import CatalogStore, contract_text
from decideonce_server.policy import Evaluation, PolicyError, PolicyVersion, content_digest, is_name
from decideonce_server.values import Json

# Examples don't run within an operation's budget: a policy may serve several.
EXAMPLE_TIME_BUDGET = timedelta(seconds=10)
EXAMPLE_TIME = datetime(2026, 1, 1, tzinfo=UTC)


class ChangeKind(StrEnum):
    """How two catalogs differ in one place."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


class Subject(StrEnum):
    """What a change is about."""

    POLICY = "policy"
    OPERATION = "operation"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two catalogs; a version of 0 is none, `fields` are an operation's settings."""

    kind: ChangeKind
    subject: Subject
    name: str
    old_version: int
    new_version: int
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Applied:
    """The revision in force after an apply, and what it changed."""

    revision: int
    changes: tuple[Change, ...]


class Apply:
    """Publishes catalogs."""

    def __init__(self, store: CatalogStore, evaluators: Evaluators) -> None:
        self._store = store
        self._evaluators = evaluators

    async def apply(self, source: CatalogSource, *, applied_by: str, dry_run: bool = False) -> Applied:
        """Make a source the catalog in force, or with `dry_run` only tell what that would change.

        Content that was published before has its earlier version again; a source that changes nothing makes no
        revision.

        Raises:
            InvalidCatalog: parts of it are refused; nothing was published.
            CatalogConflict: another apply was faster; nothing was published.
            LedgerUnavailable: Postgres can't be reached.
        """
        contents = await self._check(source)
        current = await self._store.latest()
        policies, new_policies = await self._policy_versions(source, contents)
        operations, new_operations = await self._operation_versions(source)
        changes = (
            *_changes(Subject.POLICY, current.policies, policies),
            *_changes(Subject.OPERATION, current.operations, operations),
        )
        if dry_run or not changes:
            return Applied(current.revision, changes)
        catalog = Catalog(current.revision + 1, operations=operations, policies=policies)
        await self._store.publish(catalog, new_policies, new_operations, applied_by)
        return Applied(catalog.revision, changes)

    async def _check(self, source: CatalogSource) -> dict[str, str]:
        """Check everything that can be checked, and give the policies' contents."""
        violations = [*_duplicates(source)]
        contents: dict[str, str] = {}
        documents = {policy.policy_id: policy.text for policy in source.policies if policy.engine == "jdm"}
        published = {policy.policy_id for policy in source.policies}
        for policy in source.policies:
            found, contents[policy.policy_id] = _content(policy, documents)
            violations += found
        for contract in source.operations:
            violations += _schema_violations(contract)
            violations += contract_violations(contract) or await self._reference_violations(contract, published)
        if not violations:
            # Examples are run only where all else is well: their failures would otherwise repeat it.
            for policy in source.policies:
                violations += await self._example_violations(policy, contents[policy.policy_id])
        if violations:
            # A fault in a sub-decision is found from each policy that uses it.
            raise InvalidCatalog(list(dict.fromkeys(violations)))
        return contents

    async def _reference_violations(
        self,
        contract: OperationContract,
        published: set[str],
    ) -> list[Violation]:
        field = f"operations/{contract.operation}/policy"
        if contract.policy_id is None:
            return []
        if contract.policy_version is None:
            is_here = contract.policy_id in published
            return [] if is_here else [Violation(field, "names a policy that the catalog lacks")]
        held = await self._store.policy_versions([(contract.policy_id, contract.policy_version)])
        return [] if held else [Violation(field, "holds a version that was never published")]

    async def _example_violations(self, policy: PolicySource, content: str) -> list[Violation]:
        version = PolicyVersion(policy.policy_id, 0, policy.engine, content_digest(content), content)
        violations = []
        for example in policy.examples:
            decision: dict[str, Json] = {
                "time": utc_text(example.time or EXAMPLE_TIME),
                "tenant": "example",
                "operation": "example",
            }
            facts = json.dumps(example.facts).encode()
            try:
                found = await self._evaluators.evaluate(version, facts, decision, EXAMPLE_TIME_BUDGET)
                rule = _difference(example, found)
            except PolicyError as error:
                # Authors see what their policy said of their own examples.
                rule = f"fails: {error}"
            if rule is not None:
                violations.append(Violation(f"policies/{policy.policy_id}/examples/{example.name}", rule))
        return violations

    async def _policy_versions(
        self,
        source: CatalogSource,
        contents: Mapping[str, str],
    ) -> tuple[dict[str, PolicyVersion], list[PolicyVersion]]:
        history = await self._store.policy_history(sorted(contents))
        numbers = _Numbers((head.policy_id, head.version, head.digest) for head in history)
        versions = {}
        for policy in source.policies:
            content = contents[policy.policy_id]
            digest = content_digest(content)
            number = numbers.of(policy.policy_id, digest)
            versions[policy.policy_id] = PolicyVersion(policy.policy_id, number, policy.engine, digest, content)
        return versions, [version for name, version in versions.items() if numbers.is_new(name, version.version)]

    async def _operation_versions(
        self,
        source: CatalogSource,
    ) -> tuple[dict[str, OperationVersion], list[OperationVersion]]:
        history = await self._store.operation_history([contract.operation for contract in source.operations])
        numbers = _Numbers(history)
        versions = {}
        for contract in source.operations:
            number = numbers.of(contract.operation, content_digest(contract_text(contract)))
            versions[contract.operation] = OperationVersion(number, contract)
        return versions, [version for name, version in versions.items() if numbers.is_new(name, version.version)]


class _Numbers:
    """Gives content the version that it had before, or the next one."""

    def __init__(self, history: Iterable[tuple[str, int, str]]) -> None:
        self._by_digest: dict[tuple[str, str], int] = {}
        self._newest: dict[str, int] = {}
        for name, version, digest in history:
            self._by_digest[name, digest] = version
            self._newest[name] = max(version, self._newest.get(name, 0))

    def of(self, name: str, digest: str) -> int:
        return self._by_digest.get((name, digest), self._newest.get(name, 0) + 1)

    def is_new(self, name: str, version: int) -> bool:
        return version > self._newest.get(name, 0)


def _duplicates(source: CatalogSource) -> Iterator[Violation]:
    for kind, names in (
        ("policies", [policy.policy_id for policy in source.policies]),
        ("operations", [contract.operation for contract in source.operations]),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                yield Violation(f"{kind}/{name}", "must stand once")


def _content(policy: PolicySource, documents: Mapping[str, str]) -> tuple[list[Violation], str]:
    """Give what is wrong with a policy, and where nothing is, its content."""
    field = f"policies/{policy.policy_id}"
    if not is_name(policy.policy_id):
        return [Violation(field, NAME_RULE)], ""
    if policy.engine == "jdm":
        violations = policy_jdm.check(policy.policy_id, documents)
        try:
            return violations, "" if violations else policy_jdm.bundle(policy.policy_id, documents)
        except InvalidCatalog as error:
            return list(error.violations), ""
    try:
        content = policy_python.read_source(policy.text)
    except InvalidCatalog as error:
        return [Violation(f"{field}/{fault.field}", fault.rule) for fault in error.violations], ""
    return [Violation(f"{field}/{fault.field}", fault.rule) for fault in policy_python.check(content)], content


def _schema_violations(contract: OperationContract) -> list[Violation]:
    try:
        FactsSchema.compile(contract.facts_schema)
    except InvalidSchema as error:
        return [
            Violation(f"operations/{contract.operation}/facts{fault.field}", fault.rule) for fault in error.violations
        ]
    return []


def _difference(example: PolicyExample, found: Evaluation) -> str | None:
    """Tell where an evaluation differs from what its example says; None where it doesn't."""
    if found.outcome != example.outcome:
        return f"must give the outcome {example.outcome!r} and gives {found.outcome!r}"
    if example.reasons and found.reasons != example.reasons:
        return f"must give the reasons {list(example.reasons)} and gives {list(found.reasons)}"
    for name, value in (example.outputs or {}).items():
        if found.outputs.get(name) != value:
            return f"must give {value!r} as {name} and gives {found.outputs.get(name)!r}"
    return None


def _changes(
    subject: Subject,
    old: Mapping[str, PolicyVersion | OperationVersion],
    new: Mapping[str, PolicyVersion | OperationVersion],
) -> Iterator[Change]:
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before is None and after is not None:
            yield Change(ChangeKind.ADDED, subject, name, 0, after.version)
        elif after is None and before is not None:
            yield Change(ChangeKind.REMOVED, subject, name, before.version, 0)
        elif before is not None and after is not None and before.version != after.version:
            yield Change(ChangeKind.CHANGED, subject, name, before.version, after.version, _fields(before, after))


def _fields(before: PolicyVersion | OperationVersion, after: PolicyVersion | OperationVersion) -> tuple[str, ...]:
    if isinstance(before, OperationVersion) and isinstance(after, OperationVersion):
        names = (field.name for field in fields(OperationContract))
        return tuple(n for n in names if getattr(before.contract, n) != getattr(after.contract, n))
    return ()
