"""What a policy is, what it sees and what it must answer, whichever engine evaluates it.

A policy sees {"facts": …, "decision": {"time", "tenant", "operation"}} and reads nothing else: no clock, no randomness,
no network. So every attempt at one decision gives the same result. It answers with an object that has `outcome` (a
non-empty text), and may have `reasons` (texts) and `effects` (objects of `type` and `payload`, each becomes an event);
everything else in it are the decision's outputs.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from decideonce_server import values
from decideonce_server.values import Json

EngineName: TypeAlias = Literal["jdm", "python"]

NAME_PATTERN = "[a-z0-9]+(?:[.-][a-z0-9]+)*"
NAME_LENGTH_MAX = 100

_NAME = re.compile(NAME_PATTERN, re.ASCII)


def is_name(text: str) -> bool:
    """Tell whether a text can name an operation, a policy or an effect's type."""
    return len(text) <= NAME_LENGTH_MAX and _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One immutable version of a policy; `content` is what `digest` is of and all that its engine needs."""

    policy_id: str
    version: int
    engine: EngineName
    digest: str
    content: str


def content_digest(content: str) -> str:
    """Give the digest that names a policy's content: "sha256:" and 64 hex digits."""
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Effect:
    """Something that a policy wants done outside; it becomes an event of this type."""

    type: str
    payload: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation gave, checked; `engine` names the engine and its version, like "zen-engine/2.1.3"."""

    outcome: str
    engine: str
    reasons: tuple[str, ...] = ()
    outputs: dict[str, Json] = field(default_factory=dict)
    effects: tuple[Effect, ...] = ()
    matched_rules: tuple[str, ...] = ()


class PolicyError(Exception):
    """An evaluation that gave no result. Its text may quote facts: it is for the policy's authors, not for callers."""


class PolicyFailed(PolicyError):
    """The evaluation itself failed; another attempt would fail alike."""


class InvalidResult(PolicyError):
    """The policy gave something that is no result."""


class RetryLater(PolicyError):
    """Raised by a python policy that can't decide yet: this attempt failed, and another may succeed."""


class PolicyTimeout(PolicyError):
    """The evaluation did not end within its time budget; its evaluator was killed."""


class PolicyCrashed(PolicyError):
    """The evaluator died during the evaluation."""


@dataclass(frozen=True, slots=True)
class Input:
    """What a policy decides on: a request's facts, and what the service says of the decision."""

    facts: dict[str, Json]
    decision: dict[str, Json]


class Evaluate(Protocol):
    """A policy made ready: evaluates inputs, each by itself.

    Gives for each its evaluation or its error: PolicyFailed where the evaluation failed, RetryLater where the policy
    asks to be tried again, InvalidResult where what it gave is no result.
    """

    def __call__(self, inputs: Sequence[Input]) -> list[Evaluation | PolicyError]:
        """Evaluate."""
        ...


class Engine(Protocol):
    """Evaluates the policies of one kind. Used inside an evaluator process, one call at a time."""

    name: EngineName

    def prepare(self, content: str) -> Evaluate:
        """Make a version's content ready to be evaluated many times.

        Raises:
            PolicyFailed: the content is not of this engine's kind, or can't be loaded here.
        """
        ...


def evaluation_of(result: Any, engine: str, matched_rules: tuple[str, ...] = ()) -> Evaluation:
    """Check what a policy gave, and give it its form.

    Raises:
        InvalidResult: it has no outcome, or a part of it is not of its form. The text names the part and the rule.
    """
    if not isinstance(result, dict):
        raise InvalidResult("the result must be an object")
    rest = dict(result)
    outcome = rest.pop("outcome", None)
    if not isinstance(outcome, str) or not outcome:
        raise InvalidResult("outcome must be a non-empty text")
    reasons = _optional_list(rest.pop("reasons", None), "reasons", lambda reason: isinstance(reason, str))
    effects = _optional_list(rest.pop("effects", None), "effects", _is_effect)
    evaluation = Evaluation(
        outcome=outcome,
        engine=engine,
        reasons=tuple(reasons),
        outputs=rest,
        effects=tuple(Effect(effect["type"], effect.get("payload") or {}) for effect in effects),
        matched_rules=matched_rules,
    )
    _check_values(evaluation)
    return evaluation


def _optional_list(value: Any, name: str, is_member: Callable[[Any], bool]) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(is_member(member) for member in value):
        raise InvalidResult(f"{name} must be a list of " + ("texts" if name == "reasons" else "effects"))
    return list(value)


def _is_effect(effect: Any) -> bool:
    return (
        isinstance(effect, dict)
        and effect.keys() <= {"type", "payload"}
        and isinstance(effect.get("type"), str)
        and is_name(effect["type"])
        and not effect["type"].startswith("decideonce.")
        and isinstance(effect.get("payload", {}), dict | None)
    )


def _check_values(evaluation: Evaluation) -> None:
    whole: dict[str, Json] = {
        "outcome": evaluation.outcome,
        "reasons": list(evaluation.reasons),
        "outputs": evaluation.outputs,
        "effects": [effect.payload for effect in evaluation.effects],
    }
    try:
        for name, part in whole.items():
            values.to_struct(part if name == "outputs" and isinstance(part, dict) else {name: part})
    except values.ValueFault as fault:
        raise InvalidResult(f"{fault.path or 'outputs'} {fault.rule}") from None
