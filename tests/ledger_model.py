"""A model of the ledger: what each operation does to one key, as DESIGN's state machine says it, without a database.

Times are hours by the model's own clock. A step takes no time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from uuid import UUID

from decideonce_server.ledger import State


@dataclass(frozen=True)
class Row:
    """What is recorded under a key."""

    decision_id: UUID
    background: bool
    state: State
    attempt: int
    lease_until: float | None = None
    retry_at: float | None = None
    replayable_until: float | None = None
    retained_until: float | None = None
    response: bytes | None = None


@dataclass(frozen=True)
class KeyModel:
    """One key: its row, or None where it is new, and how many of its events wait to be published."""

    row: Row | None = None
    events: int = 0

    def at(self, now: float) -> "KeyModel":
        """Judge it by a clock: past its retention the body is gone, past the tombstone's the key is new."""
        row = self.row
        if row is None or not passed(row.replayable_until, now):
            return self
        expired = replace(row, state=State.EXPIRED, response=None)
        return replace(self, row=None if passed(row.retained_until, now) else expired)

    def is_due(self, now: float, *, abandoned: bool) -> bool:
        """Whether no attempt holds it, and a worker may take it."""
        row = self.row
        if row is None or not (row.background or abandoned):
            return False
        return passed(row.lease_until if row.state is State.PROCESSING else row.retry_at, now)


def row_of(key: KeyModel, decision_id: UUID, attempt: int) -> Row | None:
    """Give the row if it is still what somebody names: that decision, at that attempt."""
    row = key.row
    return row if row is not None and (row.decision_id, row.attempt) == (decision_id, attempt) else None


def passed(moment: float | None, now: float) -> bool:
    """Whether a moment that may never come has come."""
    return moment is not None and moment <= now


# What a caller can see of a record: decision, state, attempt, whether it is abandoned, the response.
View = tuple[UUID, State, int, bool, bytes | None]
# What an operation tells of one key: an attempt's decision and number, a record, whether it took effect, or nothing.
Result = tuple[str, UUID, int] | View | bool | None
Step = Callable[[KeyModel, float], tuple[KeyModel, Result]]


def view(row: Row, now: float) -> View:
    """Give what a caller can see of a row."""
    return row.decision_id, row.state, row.attempt, passed(row.lease_until, now), row.response


@dataclass(frozen=True)
class Reserve:
    """A call asks for the key."""

    decision_id: UUID
    background: bool
    lease: float

    def __call__(self, key: KeyModel, now: float) -> tuple[KeyModel, Result]:
        row = key.row
        if row is None:
            lease_until = now if self.background else now + self.lease
            row = Row(self.decision_id, self.background, State.PROCESSING, 0 if self.background else 1, lease_until)
            key = replace(key, row=row)
        is_own = (row.decision_id, row.attempt, row.state) == (self.decision_id, 1, State.PROCESSING)
        if is_own and not row.background:
            return key, ("attempt", row.decision_id, 1)
        return key, view(row, now)


@dataclass(frozen=True)
class Read:
    """A call asks what is recorded."""

    def __call__(self, key: KeyModel, now: float) -> tuple[KeyModel, Result]:
        return key, view(key.row, now) if key.row else None


@dataclass(frozen=True)
class TakeOver:
    """Somebody wants the attempt after the one that was seen."""

    decision_id: UUID
    attempt: int
    lease: float

    def __call__(self, key: KeyModel, now: float) -> tuple[KeyModel, Result]:
        row = row_of(key, self.decision_id, self.attempt)
        if row is None:
            return key, None
        if row.state is not State.FAILED_RETRYABLE and not is_abandoned(row, now):
            return key, None
        attempt = row.attempt + 1
        begun = Row(row.decision_id, row.background, State.PROCESSING, attempt, now + self.lease)
        return replace(key, row=begun), ("attempt", row.decision_id, attempt)


@dataclass(frozen=True)
class Complete:
    """An attempt ends, or somebody ends it who found it abandoned."""

    decision_id: UUID
    attempt: int
    state: State
    response: bytes
    retention: float | None
    tombstone_retention: float | None
    retry_after: float | None
    events: int
    abandoned: bool

    def __call__(self, key: KeyModel, now: float) -> tuple[KeyModel, Result]:
        row = row_of(key, self.decision_id, self.attempt)
        if row is None:
            return key, None
        is_open = row.state is State.PROCESSING
        if self.abandoned:
            is_open = row.state is State.FAILED_RETRYABLE or is_abandoned(row, now)
        if not is_open:
            return key, None
        done = Row(row.decision_id, row.background, self.state, row.attempt, response=self.response)
        if self.state is State.FAILED_RETRYABLE:
            done = replace(done, retry_at=later(now, self.retry_after))
        else:
            replayable_until = later(now, self.retention)
            done = replace(
                done,
                replayable_until=replayable_until,
                retained_until=later(replayable_until, self.tombstone_retention),
            )
        ended = KeyModel(done, key.events + self.events)
        seen = replace(ended, row=replace(done, retained_until=None)).at(now).row
        assert seen is not None
        return ended, view(seen, now)


@dataclass(frozen=True)
class Renew:
    """An attempt asks for more time; with none it gives up what is left."""

    decision_id: UUID
    attempt: int
    lease: float

    def __call__(self, key: KeyModel, now: float) -> tuple[KeyModel, Result]:
        row = row_of(key, self.decision_id, self.attempt)
        if row is None or row.state is not State.PROCESSING:
            return key, False
        return replace(key, row=replace(row, lease_until=now + self.lease)), True


def is_abandoned(row: Row, now: float) -> bool:
    """Whether an attempt's lease ran out."""
    return row.state is State.PROCESSING and passed(row.lease_until, now)


def later(moment: float | None, after: float | None) -> float | None:
    """Add two times of which either may be for ever."""
    return None if moment is None or after is None else moment + after


# Far below all that is waited for.
MOMENT = 1e-6


def explanations(key: KeyModel, now: float, observed: Sequence[tuple[Step, Result]]) -> Iterator[KeyModel]:
    """Give what the key can have become by steps made at the same moment, if their results came from some order.

    Each reads the clock when it begins, and may take effect after one that began later.
    """
    clocks = product(*[(now, now + MOMENT)] * len(observed))
    for order, times in product(permutations(observed), list(clocks)):
        became = key
        for (step, result), clock in zip(order, times, strict=True):
            became, expected = step(became.at(clock), clock)
            if expected != result:
                break
        else:
            yield became
