"""The catalog: which operations there are, and which policy version decides each.

Versions are immutable. A catalog in force is one revision that names a version for every operation and policy, so that a
reader sees all of an apply or nothing of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from decideonce_server.policy import EngineName, PolicyVersion
from decideonce_server.values import Json


class Execution(StrEnum):
    """Who evaluates an operation's policy."""

    INLINE = "inline"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class OperationContract:
    """What an operation's version holds: its policy, its lifetimes and the JSON Schema of its facts, as JSON text.

    Lifetimes that are None are for ever. `policy_version` is set where the operation holds a version of its policy. An
    operation without a policy publishes its contract ahead of it: it is known, and can't decide yet.
    """

    operation: str
    policy_id: str | None
    policy_version: int | None
    execution: Execution
    default_wait: timedelta
    max_wait: timedelta
    lease: timedelta
    time_budget: timedelta
    max_attempts: int
    retention: timedelta | None
    tombstone_retention: timedelta | None
    facts_schema: str


@dataclass(frozen=True, slots=True)
class OperationVersion:
    """One immutable version of an operation."""

    version: int
    contract: OperationContract


@dataclass(frozen=True, slots=True)
class PolicyExample:
    """Facts, and what a policy must make of them; None and empty reasons are not compared."""

    name: str
    facts: dict[str, Json]
    outcome: str
    reasons: tuple[str, ...] = ()
    outputs: dict[str, Json] | None = None
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class PolicySource:
    """A policy as its authors give it: `text` is the JDM document, or the entry point "package.module:function"."""

    policy_id: str
    engine: EngineName
    text: str
    examples: tuple[PolicyExample, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogSource:
    """A whole catalog as its authors give it."""

    policies: tuple[PolicySource, ...]
    operations: tuple[OperationContract, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """The catalog that is in force; revision 0 is the empty one before the first apply."""

    revision: int = 0
    apply_time: datetime | None = None
    operations: Mapping[str, OperationVersion] = field(default_factory=dict)
    policies: Mapping[str, PolicyVersion] = field(default_factory=dict)
