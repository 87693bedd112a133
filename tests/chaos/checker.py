"""Judges a history and the database behind it: whether each answer is explained, and nothing is lost or twice.

A rule gives what it finds wrong with one key; the rules know nothing of how the service works inside. What the database
saw is judged too, change by change: see `trail`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from chaos.history import BROKER, FINAL, Call, Fault, History, Key, Result
from chaos.trail import Change, faults_of

# What a caller may be told while something is broken; it says "try again", or nothing at all.
RETRYABLE_ERRORS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED")
REUSED = "ALREADY_EXISTS OPERATION_KEY_REUSED"
KEY_EXPIRED = "FAILED_PRECONDITION OPERATION_KEY_EXPIRED"
NOT_FOUND = "NOT_FOUND DECISION_NOT_FOUND"
# How long after a fault's end an attempt may still be taken over because of it: a lease, a look, and a slow machine.
FAULT_ECHO_S = 15.0
RECORDED = "decideonce.decision.v1"
# How long before a call a fault is still told in its story.
NEAR_S = 3.0


@dataclass(frozen=True)
class Row:
    """One row of the ledger, after everything has come to rest."""

    key: Key
    state: Result
    attempt: int
    decision: str
    provenance: str
    provenance_attempt: int
    failure: str = ""


@dataclass(frozen=True)
class Event:
    """An event of a key, as a consumer applied it, or as it waits where nobody publishes; in that order.

    A decision event has digests of what it tells; `n` is the number that the decision or the effect was made on, or 0.
    """

    event_id: str
    type: str
    decision: str
    provenance: str
    failure: str = ""
    n: int = 0

    def __str__(self) -> str:
        return f"{self.type} {self.event_id}"


@dataclass(frozen=True)
class Expectations:
    """What is known of operations: whose answers expire, their effects, and the version that each outcome tells.

    `leases` are how long an attempt may hold a key; `is_refused` tells which numbers an operation's policy refuses.
    """

    expires: frozenset[str] = frozenset()
    leases: Mapping[str, timedelta] = field(default_factory=dict)
    is_refused: Callable[[str, int], bool] = lambda _operation, _n: False
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
    changes: Sequence[Change]
    events: Sequence[Event]
    expected: Expectations
    # It was asked for again and again after everything had come to rest, and did not become final.
    is_late: bool = False

    @property
    def decides(self) -> list[Call]:
        return [call for call in self.calls if call.method == "Decide"]

    @property
    def finals(self) -> list[Call]:
        return [call for call in self.calls if call.result in FINAL]

    def is_disturbed(self, began: float, ended: float) -> bool:
        return any(
            fault.began <= ended and fault.ended + FAULT_ECHO_S >= began
            for fault in self.faults
            # What befalls the broker of events is no excuse for any answer.
            if fault.where != BROKER
        )

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
    promised = [call for call in case.calls if call.is_acknowledged]
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
    if case.is_late:
        yield "it did not become final after everything had come to rest"


def answers_follow(case: Case) -> Iterator[str]:
    """After an answer has ended, no later call may be told something from before it."""
    final_since = min((call.ended for call in case.finals), default=float("inf"))
    known_since = min((call.ended for call in case.calls if call.is_acknowledged), default=float("inf"))
    for call in case.calls:
        if call.began > final_since and call.result in (Result.PROCESSING, Result.FAILED_RETRYABLE):
            yield f"{call.result} was answered after a final answer"
        if call.began > final_since and call.method == "Decide" and call.result in FINAL and not call.replayed:
            yield "a call was told that it is the original after a final answer"
        if call.began > known_since and call.error == NOT_FOUND:
            yield "nothing was found after an answer had been given"
        if call.result is Result.EXPIRED and not case.may_expire:
            yield "EXPIRED was answered for what never expires"


def errors_are_explained(case: Case) -> Iterator[str]:
    owners = {call.facts for call in case.decides if call.is_acknowledged or call.error == KEY_EXPIRED}
    if len(owners) > 1:
        yield "two different requests were answered under one key"
    for call in case.decides:
        if call.error == REUSED and (call.facts in owners or {call.facts} == {other.facts for other in case.decides}):
            yield "OPERATION_KEY_REUSED was answered to the request that owns the key"
    for call in case.calls:
        is_known = call.error in ("", REUSED, NOT_FOUND) or (call.error == KEY_EXPIRED and case.may_expire)
        if not is_known and call.error.split()[0] not in RETRYABLE_ERRORS:
            yield f"{call.error} was answered"
        if call.error.startswith("UNAVAILABLE") and not case.is_disturbed(call.began, call.ended):
            yield f"{call.error} was answered although nothing had happened"


def decisions_are_of_these_facts(case: Case) -> Iterator[str]:
    """What was decided tells which facts it was decided on, and a failure is the one that these facts lead to."""
    for call in case.calls:
        if call.failure == "INTERNAL":
            yield "an attempt ended with a defect"
        if call.method != "Decide" or call.result not in FINAL:
            continue
        if call.told and call.told != call.sent:
            yield f"a decision on {call.told} was given for {call.sent}"
        is_refused = case.expected.is_refused(case.key[1], call.sent)
        exhausted = call.failure == "ATTEMPTS_EXHAUSTED" and call.attempt > 1
        if not exhausted and call.failure != ("POLICY_FAILED" if is_refused else ""):
            yield f"{call.result} {call.failure} was answered for {call.sent}"


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
            if not case.is_disturbed(first, last):
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


def events_are_applied_once(case: Case) -> Iterator[str]:
    ids = [event.event_id for event in case.events]
    if len(set(ids)) < len(ids):
        yield "an event was applied more than once"
    # UUIDv7 ascend.
    if ids != sorted(ids):
        yield "events were applied out of their order"
    if case.events and not case.rows:
        yield "events tell of what isn't recorded"
    decisions = sum(event.type == RECORDED for event in case.events)
    for row in case.rows:
        if decisions != int(row.state in (*FINAL, Result.EXPIRED)):
            yield f"there are {decisions} decision events for {row.state}"
        effects = (case.expected.effects or {}).get(case.key[1], 0) if row.state is Result.SUCCEEDED else None
        if effects is not None and len(ids) - decisions != effects:
            yield f"there are {len(ids) - decisions} effects, and the policy asked for {effects}"


def events_are_true(case: Case) -> Iterator[str]:
    """What a decision event tells is what is recorded, or what was answered where that has expired."""
    recorded = [row for row in case.rows if row.state in FINAL] or case.finals
    true = {(known.decision, known.provenance, known.failure) for known in recorded}
    for event in case.events:
        if event.type == RECORDED and true and (event.decision, event.provenance, event.failure) not in true:
            yield "the decision event doesn't tell what is recorded"
    if len({event.n for event in case.events}) > 1:
        yield "the events of a decision don't tell of the same facts"


def changes_are_legal(case: Case) -> Iterator[str]:
    if sum(change.before is None for change in case.changes) > 1 and not case.may_expire:
        yield "a key was reserved anew"
    for change in case.changes:
        yield from faults_of(change, case.expected.leases.get(case.key[1]))


RULES: tuple[Callable[[Case], Iterator[str]], ...] = (
    one_row,
    one_outcome,
    nothing_lost,
    nothing_unfinished,
    answers_follow,
    errors_are_explained,
    decisions_are_of_these_facts,
    attempts_rise,
    attempts_are_explained,
    versions_are_true,
    tenants_are_apart,
    events_are_applied_once,
    events_are_true,
    changes_are_legal,
)


def check(
    history: History,
    rows: Sequence[Row],
    trail: Mapping[Key, Sequence[Change]],
    events: Mapping[Key, Sequence[Event]],
    expected: Expectations,
    late: Collection[Key] = (),
) -> list[Violation]:
    """Judge everything; the shortest story comes first."""
    calls: defaultdict[Key, list[Call]] = defaultdict(list)
    for call in history.calls:
        calls[call.key].append(call)
    by_key: defaultdict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        by_key[row.key].append(row)
    cases = [
        Case(
            key, calls[key], by_key[key], history.faults, trail.get(key, ()), events.get(key, ()), expected, key in late
        )
        for key in calls.keys() | by_key.keys() | trail.keys() | events.keys()
    ]
    found = [
        (len(case.calls), Violation(text, story(case, history.epoch)))
        for case in cases
        for rule in RULES
        for text in Counter(rule(case))
    ]
    return [violation for _, violation in sorted(found, key=lambda pair: pair[0])]


def is_near(fault: Fault, call: Call) -> bool:
    """Tell whether a fault may have something to do with a call."""
    return fault.began <= call.ended and fault.ended + NEAR_S >= call.began


def story(case: Case, epoch: float) -> str:
    """Tell what happened to a key, and the faults around it, in order."""
    around = [fault for fault in case.faults if any(is_near(fault, call) for call in case.calls)]
    entries = [(entry.began, str(entry)) for entry in (*case.calls, *around)]
    for change in case.changes:
        at = change.at.timestamp() - epoch
        entries.append((at, f"{at:8.3f}              {change}"))
    head = "  key " + " / ".join(case.key)
    return "\n".join(
        [
            head,
            *(f"  {line}" for _, line in sorted(entries)),
            *(f"  recorded: {row}" for row in case.rows),
            *(f"  applied: {event}" for event in case.events),
        ]
    )
