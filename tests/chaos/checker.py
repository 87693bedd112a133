"""Judges a history and the database behind it: whether each answer is explained, and nothing is lost or twice.

A rule gives what it finds wrong with one key; the rules know nothing of how the service works inside.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chaos.history import FINAL, Call, Fault, History, Key, Result

# What a caller may be told while something is broken; it says "try again", or nothing at all.
RETRYABLE_ERRORS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED")
REUSED = "ALREADY_EXISTS OPERATION_KEY_REUSED"
KEY_EXPIRED = "FAILED_PRECONDITION OPERATION_KEY_EXPIRED"
NOT_FOUND = "NOT_FOUND DECISION_NOT_FOUND"
# How long after a fault's end an attempt may still be taken over because of it: a lease, a look, and a slow machine.
FAULT_ECHO_S = 15.0


@dataclass(frozen=True)
class Row:
    """One row of the ledger, after everything has come to rest."""

    key: Key
    state: Result
    attempt: int
    decision: str
    provenance: str
    provenance_attempt: int
    # Its decision events and effects in the outbox.
    decision_events: int
    effect_events: int


@dataclass(frozen=True)
class Expectations:
    """What is known of operations: whose answers expire, their effects, and the version that each outcome tells."""

    expires: frozenset[str] = frozenset()
    effects: Mapping[str, int] | None = None
    versions: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Violation:
    """A broken rule, and the story of its key."""

    rule: str
    story: str

    def __str__(self) -> str:
        return f"{self.rule}\n{self.story}"


@dataclass(frozen=True)
class Case:
    """All that is known of one key."""

    key: Key
    calls: Sequence[Call]
    rows: Sequence[Row]
    faults: Sequence[Fault]
    expected: Expectations

    @property
    def decides(self) -> list[Call]:
        return [call for call in self.calls if call.method == "Decide"]

    @property
    def finals(self) -> list[Call]:
        return [call for call in self.calls if call.result in FINAL]

    @property
    def may_expire(self) -> bool:
        return self.key[1] in self.expected.expires


def one_row(case: Case) -> Iterator[str]:
    if len(case.rows) > 1:
        yield f"there are {len(case.rows)} rows for one key"


def one_outcome(case: Case) -> Iterator[str]:
    told = {(call.result, call.decision, call.provenance) for call in case.finals}
    if len(told) > 1:
        yield f"{len(told)} different final answers were given"
    if sum(not call.replayed for call in case.finals if call.method == "Decide") > 1:
        yield "two calls were told that they are the original"


def nothing_lost(case: Case) -> Iterator[str]:
    promised = [call for call in case.calls if call.result is not Result.ERROR]
    if promised and not case.rows:
        yield "an answer was given, and nothing is recorded"
    for row in case.rows:
        for call in case.finals:
            if row.state in FINAL and (row.decision, row.provenance) != (call.decision, call.provenance):
                yield "what is recorded is not what was answered"
                return
            if row.state not in FINAL and not (case.may_expire and row.state is Result.EXPIRED):
                yield f"a final answer was given, and {row.state} is recorded"
                return


def nothing_unfinished(case: Case) -> Iterator[str]:
    for row in case.rows:
        if row.state is Result.PROCESSING:
            yield "it is still PROCESSING after everything has come to rest"


def answers_follow(case: Case) -> Iterator[str]:
    """After an answer has ended, no later call may be told something from before it."""
    final_since = min((call.ended for call in case.finals), default=float("inf"))
    known_since = min((c.ended for c in case.decides if c.result is not Result.ERROR), default=float("inf"))
    for call in case.calls:
        if call.began > final_since and call.result in (Result.PROCESSING, Result.FAILED_RETRYABLE):
            yield f"{call.result} was answered after a final answer"
        if call.began > known_since and call.error == NOT_FOUND:
            yield "nothing was found after an answer had been given"
        if call.result is Result.EXPIRED and not case.may_expire:
            yield "EXPIRED was answered for what never expires"


def errors_are_explained(case: Case) -> Iterator[str]:
    owners = {call.facts for call in case.decides if call.result is not Result.ERROR or call.error == KEY_EXPIRED}
    if len(owners) > 1:
        yield "two different requests were answered under one key"
    for call in case.decides:
        if call.error == REUSED and (call.facts in owners or {call.facts} == {other.facts for other in case.decides}):
            yield "OPERATION_KEY_REUSED was answered to the request that owns the key"
    for call in case.calls:
        is_known = call.error in ("", REUSED, NOT_FOUND) or (call.error == KEY_EXPIRED and case.may_expire)
        if not is_known and call.error.split()[0] not in RETRYABLE_ERRORS:
            yield f"{call.error} was answered"


def attempts_rise(case: Case) -> Iterator[str]:
    seen = 0
    for call in sorted(case.calls, key=lambda call: call.began):
        earlier = [c.attempt for c in case.calls if c.ended < call.began and c.attempt]
        seen = max(earlier, default=0)
        if call.attempt and call.attempt < seen:
            yield f"attempt {call.attempt} was answered after attempt {seen}"
    for row in case.rows:
        if row.state in FINAL and row.attempt != row.provenance_attempt:
            yield f"attempt {row.provenance_attempt} is recorded as what attempt {row.attempt} decided"


def attempts_are_explained(case: Case) -> Iterator[str]:
    """A lease that runs out under a living attempt needs a fault; a failure that may be tried again needs none."""
    failed = sum(call.result is Result.FAILED_RETRYABLE for call in case.calls)
    for row in case.rows:
        if row.attempt > 1 and not failed and case.calls:
            first, last = min(c.began for c in case.calls), max(c.ended for c in case.calls)
            if not any(fault.began <= last and fault.ended + FAULT_ECHO_S >= first for fault in case.faults):
                yield f"attempt {row.attempt} was made although nothing had happened to the one before"


def versions_are_true(case: Case) -> Iterator[str]:
    for call in case.finals:
        expected = (case.expected.versions or {}).get(call.outcome)
        if expected is not None and expected != call.policy_version:
            yield f"version {call.policy_version} is recorded, and version {expected} decided"


def tenants_are_apart(case: Case) -> Iterator[str]:
    for call in case.calls:
        if call.provenance and call.provenance_tenant != call.tenant:
            yield f"the tenant {call.tenant} was told of {call.provenance_tenant}"


def events_are_told_once(case: Case) -> Iterator[str]:
    for row in case.rows:
        is_final = row.state in (*FINAL, Result.EXPIRED)
        if row.decision_events != int(is_final):
            yield f"there are {row.decision_events} decision events for {row.state}"
        effects = (case.expected.effects or {}).get(case.key[1], 0) if row.state is Result.SUCCEEDED else None
        if effects is not None and row.effect_events != effects:
            yield f"there are {row.effect_events} effects, and the policy asked for {effects}"


RULES: tuple[Callable[[Case], Iterator[str]], ...] = (
    one_row,
    one_outcome,
    nothing_lost,
    nothing_unfinished,
    answers_follow,
    errors_are_explained,
    attempts_rise,
    attempts_are_explained,
    versions_are_true,
    tenants_are_apart,
    events_are_told_once,
)


def check(history: History, rows: Sequence[Row], expected: Expectations) -> list[Violation]:
    """Judge everything; the shortest story comes first."""
    calls: defaultdict[Key, list[Call]] = defaultdict(list)
    for call in history.calls:
        calls[call.key].append(call)
    by_key: defaultdict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        by_key[row.key].append(row)
    cases = [Case(key, calls[key], by_key[key], history.faults, expected) for key in calls.keys() | by_key.keys()]
    found = [
        (len(case.calls), Violation(text, story(case)))
        for case in cases
        for rule in RULES
        for text in Counter(rule(case))
    ]
    return [violation for _, violation in sorted(found, key=lambda pair: pair[0])]


def story(case: Case) -> str:
    """Tell what happened to a key, and the faults around it, in order."""
    first = min((call.began for call in case.calls), default=0.0)
    last = max((call.ended for call in case.calls), default=0.0)
    around = [fault for fault in case.faults if fault.ended + FAULT_ECHO_S >= first and fault.began <= last]
    lines = sorted([*case.calls, *around], key=lambda entry: entry.began)
    head = "  key " + " / ".join(case.key)
    return "\n".join([head, *(f"  {line}" for line in lines), *(f"  recorded: {row}" for row in case.rows)])
