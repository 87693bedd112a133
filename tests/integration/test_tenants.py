"""No statement reaches from one tenant into another: each is tried with its tenant condition, and without it.

Two tenants have the same operation and the same operation key, in the same bucket, in the same state.
"""

import re
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta

import asyncpg
import pytest
from sqlalchemy.exc import IntegrityError

from decideonce_server import ledger as ledger_module
from decideonce_server import outbox as outbox_module
from decideonce_server.database import Database, Statement, UniqueViolation
from decideonce_server.ledger import Completion, Key, Ledger, Reservation, State
from decideonce_server.outbox import Event, Outbox
from decideonce_server.outbox_buckets import BucketLeases

OURS = Key("acme", "credit.approve-loan", "k" * 16)
THEIRS = Key("zenith", "credit.approve-loan", "k" * 16)
# The same for both, so that nothing but the tenant tells them apart.
DECISION_ID = uuid.uuid4()
MODULES = {"outbox": outbox_module, "ledger": ledger_module}
# Statements that name no tenant: of a whole table or bucket, of everyone's events by id, or for people.
WHOLE = {
    *("ledger.DUE", "ledger.REAPABLE", "ledger.MISMATCH"),
    *("outbox.PUBLISHED", "outbox.PARK", "outbox.RETRY", "outbox.DISCARD"),
    *("outbox.LIST", "outbox.PARKED", "outbox.SHOW", "outbox.BACKLOG"),
}


class Rows:
    """Both tenants' rows, and what becomes of them."""

    def __init__(self, database: Database, observer: asyncpg.Connection) -> None:
        self.database = database
        self.ledger = Ledger(database)
        self.observer = observer

    async def plant(self, *, lease: float = 60.0, end: State | None = None, lifetime: float = 60.0) -> None:
        """Reserve both keys, and end them where a state is given; times in seconds."""
        for key in (OURS, THEIRS):
            reservation = Reservation(
                key, DECISION_ID, 1, b"f" * 32, 1, "p", 1, timedelta(seconds=lease), background=False, facts=b"{}"
            )
            await self.ledger.reserve([reservation])
            if end is not None:
                await self.ledger.complete([self.end_of(key, end, lifetime)])

    def end_of(self, key: Key, state: State = State.SUCCEEDED, lifetime: float = 60.0, events: int = 0) -> Completion:
        return Completion(
            key=key,
            decision_id=DECISION_ID,
            attempt=1,
            state=state,
            response=b"response",
            retention=timedelta(seconds=lifetime),
            tombstone_retention=timedelta(seconds=lifetime),
            events=[event_of(key) for _ in range(events)],
        )

    async def of(self, key: Key) -> str | None:
        """Give a whole row, as text."""
        return await self.observer.fetchval("SELECT l::text FROM ledger l WHERE tenant = $1", key.tenant)


def event_of(key: Key) -> Event:
    return Event(uuid.uuid4(), key.bucket, key.tenant, key.operation, key.operation_key, "type", b"payload", "topic")


async def unchanged(rows: Rows, change: Callable[[], Awaitable[object]]) -> None:
    """Make a change of ours, and find theirs as it was."""
    before, ours = await rows.of(THEIRS), await rows.of(OURS)
    await change()
    assert ours != await rows.of(OURS)
    assert before == await rows.of(THEIRS)


async def read(rows: Rows) -> None:
    """Only what was asked for is read, and not merely left out afterwards."""
    await rows.plant()
    keys = {"buckets": [OURS.bucket], "tenants": [OURS.tenant], "operations": [OURS.operation]}
    found = await rows.database.run(ledger_module.READ, **keys, operation_keys=[OURS.operation_key])
    assert [OURS.tenant] == [row["tenant"] for row in found]


async def forget(rows: Rows) -> None:
    await rows.plant(end=State.SUCCEEDED, lifetime=0)
    new = Reservation(OURS, uuid.uuid4(), 1, b"f" * 32, 1, "p", 1, timedelta(1), background=False, facts=b"{}")
    await unchanged(rows, lambda: rows.ledger.reserve([new]))


async def reserve(rows: Rows) -> None:
    """Reserve a key that only another tenant has, in one set with theirs: ours is free, and theirs is found once."""
    await rows.plant()
    await rows.observer.execute("DELETE FROM ledger WHERE tenant = $1", OURS.tenant)
    both = [
        Reservation(key, uuid.uuid4(), 1, b"f" * 32, 1, "p", 1, timedelta(1), background=False, facts=b"{}")
        for key in (OURS, THEIRS)
    ]
    found: list[str] = []

    async def run() -> None:
        parameters = ledger_module.reserve_parameters(both)
        found.extend(row["tenant"] for row in await rows.database.run(ledger_module.RESERVE, **parameters))

    await unchanged(rows, run)
    assert sorted([OURS.tenant, THEIRS.tenant]) == sorted(found)


async def take_over(rows: Rows) -> None:
    await rows.plant(lease=0)
    (record,) = await rows.ledger.read([OURS])
    await unchanged(rows, lambda: rows.ledger.take_over([record], [timedelta(1)]))


async def complete(rows: Rows) -> None:
    """End ours: the decision is ours, and so are the events that are told."""
    await rows.plant()
    await unchanged(rows, lambda: rows.ledger.complete([rows.end_of(OURS)]))
    foreign = rows.end_of(THEIRS, events=1)
    await rows.ledger.complete([foreign])
    await rows.observer.execute("DELETE FROM outbox")
    # Theirs is done: its event is told no second time, whoever else ends in the same set.
    await rows.observer.execute("DELETE FROM ledger WHERE tenant = $1", OURS.tenant)
    new = Reservation(OURS, DECISION_ID, 1, b"f" * 32, 1, "p", 1, timedelta(1), background=False, facts=b"{}")
    await rows.ledger.reserve([new])
    await rows.ledger.complete([rows.end_of(OURS, events=1), foreign])
    assert [OURS.tenant] == [row["tenant"] for row in await rows.observer.fetch("SELECT tenant FROM outbox")]


async def renew(rows: Rows) -> None:
    await rows.plant()
    (record,) = await rows.ledger.read([OURS])
    await unchanged(rows, lambda: rows.ledger.renew([record], [timedelta(1)]))


async def tombstone(rows: Rows) -> None:
    """Take one in a set of one; another tenant's waiting event holds back nothing of ours."""
    await rows.plant(end=State.SUCCEEDED, lifetime=0)
    assert 1 == await rows.ledger.tombstone(OURS.bucket, 1)
    await rows.observer.execute("TRUNCATE ledger")
    await rows.plant()
    await rows.ledger.complete([rows.end_of(OURS, lifetime=0), rows.end_of(THEIRS, lifetime=0, events=1)])
    assert 1 == await rows.ledger.tombstone(OURS.bucket, 10)
    await rows.observer.execute("TRUNCATE ledger, outbox")
    await rows.plant()
    await rows.ledger.complete([rows.end_of(OURS, lifetime=0), rows.end_of(THEIRS, lifetime=0, events=1)])
    await park_all(rows)
    assert 1 == await rows.ledger.tombstone(OURS.bucket, 10)


async def purge(rows: Rows) -> None:
    await rows.plant(end=State.SUCCEEDED, lifetime=0)
    await rows.ledger.tombstone(OURS.bucket, 10)
    assert 1 == await rows.ledger.purge(OURS.bucket, 1)


async def waiting(rows: Rows) -> None:
    """Another tenant's parked event holds back none of ours."""
    await rows.plant()
    await rows.ledger.complete([rows.end_of(THEIRS, events=1)])
    await park_all(rows)
    await rows.ledger.complete([rows.end_of(OURS, events=1)])
    assert [OURS.tenant] == [event.tenant for event in await Outbox(rows.database).waiting([OURS.bucket], 10)]


async def park_all(rows: Rows) -> None:
    leases = BucketLeases(rows.database, uuid.uuid4(), timedelta(minutes=1))
    await leases.hold()
    outbox = Outbox(rows.database)
    events = await outbox.waiting([OURS.bucket], 10)
    assert {event.id for event in events} == await outbox.park(leases.holder, events, ["REFUSED"] * len(events))
    await leases.release()


SCENARIOS = {
    "ledger.READ": read,
    "ledger.FORGET": forget,
    "ledger.RESERVE": reserve,
    "ledger.TAKE_OVER": take_over,
    "ledger.COMPLETE": complete,
    "ledger.RENEW": renew,
    "ledger.TOMBSTONE": tombstone,
    "ledger.PURGE": purge,
    "outbox.WAITING": waiting,
}

# The forms in which a statement keeps to a tenant.
CONDITION = re.compile(r" AND [a-z]+\.tenant = [a-z]+\.tenant|(?<=USING \(bucket, )tenant, ")
# A comparison of rows has the tenant on both sides.
IN_ROWS = re.compile(r"[a-z]\.tenant, (?=[a-z]\.operation, [a-z]\.operation_key(?:\) NOT IN| FROM (?:outbox|known)))")


def without_tenant(sql: str) -> list[str]:
    """Give the statement once for each place where it keeps to a tenant, without that."""
    made = [sql[: match.start()] + sql[match.end() :] for match in CONDITION.finditer(sql)]
    if IN_ROWS.search(sql):
        made.append(IN_ROWS.sub("", sql))
    return made


def statements() -> dict[str, Statement]:
    return {
        f"{module_name}.{name}": value
        for module_name, module in MODULES.items()
        for name, value in vars(module).items()
        if isinstance(value, Statement)
    }


MUTANTS = [(name, sql) for name in SCENARIOS for sql in without_tenant(statements()[name].sql)]


def test_every_statement_is_tried() -> None:
    """Each named statement keeps to the tenant of each member and is tried here, or names no tenant."""
    assert set(statements()) == set(SCENARIOS) | WHOLE
    assert set(SCENARIOS) == {name for name, _ in MUTANTS}


@pytest.mark.parametrize("name", SCENARIOS)
async def test_statement_keeps_to_its_tenant(database: Database, observer: asyncpg.Connection, name: str) -> None:
    """What a statement does for one tenant leaves another's row under the same key as it was."""
    await SCENARIOS[name](Rows(database, observer))


@pytest.mark.parametrize(("name", "sql"), MUTANTS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(MUTANTS)])
async def test_statement_without_its_tenant_is_found_out(
    database: Database, observer: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, name: str, sql: str
) -> None:
    """The same statement with one tenant condition taken out doesn't pass."""
    module_name, constant = name.split(".")
    statement = statements()[name]
    monkeypatch.setattr(MODULES[module_name], constant, Statement(statement.name, sql))
    with pytest.raises((AssertionError, UniqueViolation, IntegrityError, KeyError)):
        await SCENARIOS[name](Rows(database, observer))
