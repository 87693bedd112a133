"""The catalog: which operations there are, and which policy version decides each.

Versions are immutable. A catalog in force is one revision that names a version for every operation and policy, so that
a reader sees all of an apply or nothing of it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from decideonce_server.errors import Violation
from decideonce_server.policy import NAME_LENGTH_MAX, EngineName, PolicyVersion, is_name
from decideonce_server.values import Json

NAME_RULE = f'must be parts of [a-z0-9]+ joined by "." or "-", {NAME_LENGTH_MAX} characters at most'
DEFAULT_TOPIC = "decideonce.events"
# What a topic of Kafka and a subject of NATS both can be.
TOPIC_LENGTH_MAX = 249
TOPIC_PATTERN = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
TOPIC_RULE = f'must be parts of [A-Za-z0-9_-]+ joined by ".", {TOPIC_LENGTH_MAX} characters at most'
POLICY_VERSION_MAX = 2**31 - 1  # a Postgres integer
MAX_ATTEMPTS_MAX = 100
MAX_WAIT = timedelta(minutes=5)  # proxies and load balancers cut calls that say nothing for longer

# What each duration may be, both ends included, and how that is said.
_LIFETIME = (timedelta(seconds=1), timedelta(days=36500), "1s to 36500d, or forever")
_BOUNDS = {
    # Shorter, a lease would run out before it could be renewed; longer, a crash would hold up its key all that time.
    "lease": (timedelta(milliseconds=100), timedelta(hours=1), "100ms to 1h"),
    # Shorter, a hand-over to an evaluator alone could use it up; an evaluation that takes longer is no decision.
    "time_budget": (timedelta(milliseconds=10), timedelta(minutes=10), "10ms to 10m"),
    "max_wait": (timedelta(0), MAX_WAIT, "0s to 5m"),
    # A hundred years: what needs longer is meant for ever, and no date computed from it leaves Postgres's range.
    "retention": _LIFETIME,
    "tombstone_retention": _LIFETIME,
}


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
    topic: str = DEFAULT_TOPIC


def operation_contract(  # noqa: PLR0913 - one per setting, by name only
    *,
    operation: str,
    facts_schema: str,
    policy_id: str | None = None,
    policy_version: int | None = None,
    execution: Execution = Execution.INLINE,
    default_wait: timedelta | None = None,
    max_wait: timedelta | None = None,
    lease: timedelta | None = None,
    time_budget: timedelta | None = None,
    max_attempts: int | None = None,
    retention: timedelta | None = None,
    tombstone_retention: timedelta | None = None,
    topic: str | None = None,
) -> OperationContract:
    """Make a contract; what is None has the default that OperationDefinition in catalog.proto documents."""
    if default_wait is None:
        default_wait = timedelta(seconds=2 if execution is Execution.INLINE else 0)
    return OperationContract(
        operation=operation,
        policy_id=policy_id,
        policy_version=policy_version,
        execution=execution,
        default_wait=default_wait,
        max_wait=min(max(timedelta(seconds=30), default_wait), MAX_WAIT) if max_wait is None else max_wait,
        lease=timedelta(seconds=30) if lease is None else lease,
        time_budget=timedelta(seconds=1) if time_budget is None else time_budget,
        max_attempts=5 if max_attempts is None else max_attempts,
        retention=retention,
        tombstone_retention=tombstone_retention,
        facts_schema=facts_schema,
        topic=topic or DEFAULT_TOPIC,
    )


def contract_violations(contract: OperationContract, field: str | None = None) -> list[Violation]:
    """Tell which settings of a contract are out of bounds; the facts schema is `facts`' to check.

    Fields are `field`, or "operations/" and the operation's name, with "/" and the setting's name.
    """
    held = contract.policy_version
    limits = [
        ("operation", is_name(contract.operation), NAME_RULE),
        ("policy", contract.policy_id is None or is_name(contract.policy_id), NAME_RULE),
        ("policy", held is None or contract.policy_id is not None, "must name the policy whose version it holds"),
        ("policy", held is None or 1 <= held <= POLICY_VERSION_MAX, "must hold a version from 1 to 2^31-1"),
        ("max_attempts", 1 <= contract.max_attempts <= MAX_ATTEMPTS_MAX, f"must be 1 to {MAX_ATTEMPTS_MAX}"),
        ("topic", is_topic(contract.topic), TOPIC_RULE),
        ("default_wait", timedelta(0) <= contract.default_wait <= contract.max_wait, "must be 0s to max_wait"),
    ]
    for name, (least, most, text) in _BOUNDS.items():
        duration: timedelta | None = getattr(contract, name)
        limits.append((name, duration is None or least <= duration <= most, f"must be {text}"))
    root = f"operations/{contract.operation}" if field is None else field
    return [Violation(f"{root}/{name}", rule) for name, is_kept, rule in limits if not is_kept]


def is_topic(text: str) -> bool:
    """Tell whether events can be sent to a topic of this name."""
    return len(text) <= TOPIC_LENGTH_MAX and TOPIC_PATTERN.fullmatch(text) is not None


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
