"""The ledger on a real Postgres against a model of it, step by step, and with steps at the same moment."""

import asyncio
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from sqlalchemy.engine import URL

from conftest import connect
from decideonce_server import ledger as ledger_module
from decideonce_server.database import Database, Statement
from decideonce_server.ledger import Attempt, Completion, Key, Ledger, Record, Reservation, State
from decideonce_server.outbox import Event
from ledger_model import (
    MOMENT,
    Complete,
    KeyModel,
    Read,
    Renew,
    Reserve,
    Result,
    TakeOver,
    explanations,
)

# Tenants and operations share each key text, and hence a bucket; enough of them that some are new at any time.
KEYS = tuple(
    Key(tenant, operation, text * 16)
    for tenant, operation in (("acme", "a"), ("acme", "b"), ("zenith", "a"))
    for text in "km"
)

# Time passes in whole hours and everything ends at half past, so that no moment is near to another.
LEASES = st.sampled_from((0.0, 0.5, 2.5))
RETENTIONS = st.sampled_from((0.0, 0.5, 0.5, 2.5, None))
TOMBSTONE_RETENTIONS = st.sampled_from((0.0, 1.0, 1.0, 3.0, None))

# As if hours had passed: only differences to Postgres's clock count.
PASS = """UPDATE ledger SET lease_expires_at = lease_expires_at - $1::interval, retry_at = retry_at - $1::interval,
    reserve_time = reserve_time - $1::interval, complete_time = complete_time - $1::interval,
    replayable_until = replayable_until - $1::interval, key_retained_until = key_retained_until - $1::interval"""


def interval(hours: float | None) -> timedelta | None:
    return None if hours is None else timedelta(hours=hours)


def result_of(found: Attempt | Record | bool | None) -> Result:
    """Say what an operation told as the model says it."""
    if isinstance(found, Attempt):
        return "attempt", found.record.decision_id, found.record.attempt
    if isinstance(found, Record):
        return found.decision_id, found.state, found.attempt, found.is_abandoned, found.response
    return found


class LedgerMachine(RuleBasedStateMachine):
    """Steps that anybody may make at any moment, with what they saw however long ago."""

    url: URL

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.models = dict.fromkeys(KEYS, KeyModel())
        self.now = 0.0
        # All that anybody ever saw of a key.
        self.seen: dict[Key, list[Record]] = {key: [] for key in KEYS}
        self.runner.run(self._open())

    async def _open(self) -> None:
        self.database = Database(self.url, pool_size=4)
        self.ledger = Ledger(self.database)
        self.observer = await connect(self.url)
        await self.observer.execute("TRUNCATE ledger, outbox")

    def teardown(self) -> None:
        self.runner.run(self.observer.close())
        self.runner.run(self.database.close())
        self.runner.close()

    @rule(data=st.data())
    def one_set(self, data: st.DataObject) -> None:
        """One operation on several keys at once."""
        kind = data.draw(st.sampled_from((Reserve, Read, TakeOver, Complete, Renew)))
        keys = data.draw(st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
        self._make([[(key, self._draw(data, kind, key)) for key in keys]])

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def a_decision(self, data: st.DataObject, key: Key) -> None:
        """Make a whole decision, where the key is free: histories of retention need many."""
        self._make([[(key, Reserve(uuid.uuid4(), background=False, lease=0.5))]])
        seen = self.seen[key][-1]
        self._make([[(key, self._draw_end(data, seen.decision_id, seen.attempt))]])

    @rule(data=st.data(), count=st.integers(2, 4))
    def at_the_same_moment(self, data: st.DataObject, count: int) -> None:
        """Several operations on one key, each on a connection of its own."""
        key = data.draw(st.sampled_from(KEYS))
        kinds = data.draw(st.tuples(*[st.sampled_from((Reserve, Read, TakeOver, Complete, Renew))] * count))
        self._make([[(key, self._draw(data, kind, key))] for kind in kinds])

    @rule(hours=st.integers(1, 4))
    def time_passes(self, hours: int) -> None:
        self.now += hours
        self.runner.run(self.observer.execute(PASS, timedelta(hours=hours)))

    @rule(key=st.sampled_from(KEYS))
    def publish(self, key: Key) -> None:
        """Have a key's events go out."""
        sql = "DELETE FROM outbox WHERE (bucket, tenant, operation, operation_key) = ($1, $2, $3, $4)"
        deleted = self.runner.run(self.observer.execute(sql, *key.row))
        assert f"DELETE {self.models[key].events}" == deleted
        self.models[key] = KeyModel(self.models[key].row)

    @rule()
    def reap(self) -> None:
        """Retention is applied: bodies go, then keys, and nothing that has an event waiting."""
        self.runner.run(self._reap())

    async def _reap(self) -> None:
        with_work = set(await self.ledger.reapable())
        for bucket in {key.bucket for key in KEYS}:
            changed = await self.ledger.tombstone(bucket, 100) + await self.ledger.purge(bucket, 100)
            assert not changed or bucket in with_work
        sql = "SELECT tenant, operation, operation_key, state, facts IS NULL AS is_tombstone FROM ledger"
        rows = {Key(r[0], r[1], r[2]): (State(r[3]), r[4]) for r in await self.observer.fetch(sql)}
        for key, model in self.models.items():
            judged = model.at(self.now).row
            if model.events:
                assert rows.get(key, (None, False))[0] is not State.EXPIRED
                assert judged is None or key in rows
            else:
                assert (judged and (judged.state, judged.state is State.EXPIRED)) == rows.get(key)

    @rule(abandoned=st.booleans())
    def list_due(self, abandoned: bool) -> None:
        """Workers are told of what no attempt holds, and of nothing else."""
        due = self.runner.run(self.ledger.due(10, abandoned=abandoned))
        expected = {
            key for key, model in self.models.items() if model.at(self.now).is_due(self.now, abandoned=abandoned)
        }
        assert expected == {record.key for record in due}

    def _draw(self, data: st.DataObject, kind: type, key: Key) -> Any:
        """Draw a step, by one who saw something of the key at any time before, or guesses.

        What is drawn never depends on what was seen: of steps at the same moment that can differ from run to run.
        """
        past, again, lease = data.draw(st.integers(0, 5)), data.draw(st.booleans()), data.draw(LEASES)
        seen = self.seen[key][-1 - past :]
        decision_id, attempt = (seen[0].decision_id, seen[0].attempt) if seen else (uuid.uuid4(), 1)
        if kind is Complete:
            return self._draw_end(data, decision_id, attempt)
        if kind is Reserve:
            return Reserve(decision_id if again else uuid.uuid4(), data.draw(st.booleans()), lease)
        return Read() if kind is Read else kind(decision_id, attempt, lease)

    @staticmethod
    def _draw_end(data: st.DataObject, decision_id: uuid.UUID, attempt: int) -> Complete:
        state = data.draw(st.sampled_from((State.SUCCEEDED, State.FAILED_RETRYABLE, State.FAILED_FINAL)))
        is_final = state is not State.FAILED_RETRYABLE
        return Complete(
            decision_id,
            attempt,
            state,
            uuid.uuid4().bytes,
            data.draw(RETENTIONS),
            data.draw(TOMBSTONE_RETENTIONS),
            None if is_final else data.draw(st.sampled_from((None, 0.0, 1.5))),
            data.draw(st.sampled_from((0, 0, 1, 2))) if is_final else 0,
            data.draw(st.booleans()),
        )

    def _make(self, sets: Sequence[Sequence[tuple[Key, Any]]]) -> None:
        """Make sets of steps at the same moment, and find the orders that explain what they told."""
        told = self.runner.run(self._tell(sets))
        began, self.now = self.now, self.now + 2 * MOMENT
        for key in {key for members in sets for key, _ in members}:
            observed = [(step, result) for found, step, result in told if found == key]
            became = set(explanations(self.models[key], began, observed))
            # Orders that tell the same can differ in what they leave; a read and the events tell which it was.
            left = self.runner.run(self._left(key))
            fitting = [m for m in became if left == (Read()(m.at(self.now), self.now)[1], m.events)]
            assert fitting, f"no order explains {observed} of {self.models[key]}, which left {left}"
            self.models[key] = fitting[0]

    async def _left(self, key: Key) -> tuple[Result, int]:
        (record,) = await self.ledger.read([key])
        sql = "SELECT count(*) FROM outbox WHERE (bucket, tenant, operation, operation_key) = ($1, $2, $3, $4)"
        return result_of(record), await self.observer.fetchval(sql, *key.row)

    async def _tell(self, sets: Sequence[Sequence[tuple[Key, Any]]]) -> list[tuple[Key, Any, Result]]:
        results = await asyncio.gather(*(self._run(members) for members in sets))
        told = []
        for members, found in zip(sets, results, strict=True):
            for (key, step), result in zip(members, found, strict=True):
                if isinstance(result, Attempt | Record):
                    self.seen[key].append(result.record if isinstance(result, Attempt) else result)
                told.append((key, step, result_of(result)))
        return told

    async def _run(self, members: Sequence[tuple[Key, Any]]) -> Sequence[Attempt | Record | bool | None]:
        """Have the ledger do what the steps of one kind say."""
        keys = [key for key, _ in members]
        steps = [step for _, step in members]
        match steps[0]:
            case Reserve():
                return await self.ledger.reserve([reservation(key, step) for key, step in members])
            case Read():
                return await self.ledger.read(keys)
            case Complete():
                return await self.ledger.complete([completion(key, step) for key, step in members])
        records = [self._record_of(key, step.decision_id, step.attempt) for key, step in members]
        leases = [timedelta(hours=step.lease) for step in steps]
        if isinstance(steps[0], TakeOver):
            return await self.ledger.take_over(records, leases)
        renewed = await self.ledger.renew(records, leases)
        return [key in renewed for key in keys]

    def _record_of(self, key: Key, decision_id: uuid.UUID, attempt: int) -> Record:
        for record in self.seen[key]:
            if (record.decision_id, record.attempt) == (decision_id, attempt):
                return record
        return a_record(key, decision_id, attempt)


def a_record(key: Key, decision_id: uuid.UUID, attempt: int) -> Record:
    """Give a record that nobody saw: only what names it counts."""
    fields = dict.fromkeys(Record.__dataclass_fields__)
    return Record(**(fields | {"key": key, "decision_id": decision_id, "attempt": attempt}))


def reservation(key: Key, step: Reserve) -> Reservation:
    return Reservation(
        key, step.decision_id, 1, b"f" * 32, 1, "policy", 1, timedelta(hours=step.lease), step.background, b"{}"
    )


def completion(key: Key, step: Complete) -> Completion:
    events = [
        Event(uuid.uuid4(), key.bucket, key.tenant, key.operation, key.operation_key, "type", b"payload", "topic")
        for _ in range(step.events)
    ]
    return Completion(
        key=key,
        decision_id=step.decision_id,
        attempt=step.attempt,
        state=step.state,
        response=step.response,
        retention=interval(step.retention),
        tombstone_retention=interval(step.tombstone_retention),
        retry_after=interval(step.retry_after),
        events=events,
        abandoned=step.abandoned,
    )


def run(url: URL, examples: int, *, derandomize: bool = False) -> None:
    machine = type("Machine", (LedgerMachine,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            derandomize=derandomize,
            stateful_step_count=25,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            # Steps at the same moment need not fail twice, so there is little to shrink by.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_ledger_does_what_the_model_says(database_url: URL) -> None:
    """Whatever steps are made, also at the same moment, the ledger tells and keeps what the model does."""
    run(database_url, 60)


DEFECTS = {
    "a completion compares no attempt": ("COMPLETE", " AND l.attempt = c.attempt", ""),
    "a completion compares no decision": ("COMPLETE", " AND l.decision_id = c.decision_id", ""),
    "a completion compares no state": ("COMPLETE", "ELSE l.state = 1 END", "ELSE true END"),
    "a living attempt is ended as abandoned": (
        "COMPLETE",
        "l.state = 1 AND l.lease_expires_at <= ",
        "l.state = 1 OR now() = ",
    ),
    "a takeover compares no lease": (
        "TAKE_OVER",
        "l.state = 1 AND l.lease_expires_at <= statement_timestamp()",
        "l.state = 1",
    ),
    "a takeover compares no attempt": ("TAKE_OVER", " AND l.attempt = t.attempt", ""),
    "a renewal compares no attempt": ("RENEW", " AND l.attempt = t.attempt", ""),
    "a tombstone that is over still counts": (
        "READ",
        "WHERE l.key_retained_until IS NULL",
        "WHERE true OR l.key_retained_until IS NULL",
    ),
    "an answer past its retention is replayed": (
        "READ",
        "CASE WHEN l.replayable_until <= statement_timestamp() THEN 5",
        "CASE WHEN false THEN 5",
    ),
    "retention takes bodies whose events wait": ("TOMBSTONE", "o.bucket = :bucket", "o.bucket = :bucket AND false"),
    "the reaper takes keys that are retained": ("PURGE", "<= statement_timestamp()", "IS NOT NULL"),
    "the reaper takes bodies that are replayable": ("TOMBSTONE", "<= statement_timestamp()", "IS NOT NULL"),
    "work that is held is due": ("DUE", "coalesce(d.lease_expires_at, d.retry_at) <= statement_timestamp()", "true"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_model_finds_a_planted_defect(database_url: URL, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    """A statement that leaves out one condition is found out."""
    name, old, new = DEFECTS[defect]
    statement = getattr(ledger_module, name)
    assert old in statement.sql
    monkeypatch.setattr(ledger_module, name, Statement(statement.name, statement.sql.replace(old, new)))
    # Of steps at the same moment one run can find at an earlier step what another found later.
    with pytest.raises((AssertionError, Flaky)):
        run(database_url, 300, derandomize=True)
