"""The inbox on a real Postgres, over each library's connections."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
import sqlalchemy
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from conftest import connect
from decideonce import events, inbox
from decideonce.inbox import EventTooOld, Inbox, NotInTransaction
from harness import new_key
from processes import WITHIN_S, until
from sample_events import aged, body

NEW = timedelta(0)
EFFECT = "INSERT INTO applied (event_id) VALUES ('{}')"


@pytest.fixture(autouse=True)
async def tables(observer: asyncpg.Connection) -> None:
    await observer.execute(inbox.SCHEMA)
    await observer.execute("CREATE TABLE applied (event_id uuid NOT NULL)")


@pytest.fixture
async def other(database_url: URL) -> AsyncIterator[asyncpg.Connection]:
    connection = await connect(database_url)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
async def engine(database_url: URL) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url)
    try:
        yield engine
    finally:
        await engine.dispose()


async def apply(connection: Any, event: events.Event, consumer: str = "billing") -> bool:
    """Apply an event once, in the transaction that is open: its effect is a row, without a key of its own."""
    first = await Inbox(consumer).first_time(connection, event)
    if first:
        statement = EFFECT.format(event.id)
        await connection.execute(statement if is_asyncpg(connection) else sqlalchemy.text(statement))
    return first


async def apply_and_fail(begun: contextlib.AbstractAsyncContextManager[Any], event: events.Event) -> None:
    """Apply an event in a transaction that doesn't end well."""
    async with begun as connection:
        assert await apply(connection, event)
        raise LookupError


def is_asyncpg(connection: Any) -> bool:
    return isinstance(connection, asyncpg.Connection)


async def applied(observer: asyncpg.Connection, event: events.Event) -> tuple[int, int]:
    """Count the marks and the effects of an event."""
    row = await observer.fetchrow(
        "SELECT (SELECT count(*) FROM decideonce_inbox WHERE event_id = $1), (SELECT count(*) FROM applied"
        " WHERE event_id = $1)",
        event.id,
    )
    return tuple(row)


async def waits(observer: asyncpg.Connection, connection: asyncpg.Connection) -> None:
    """Wait until a session waits for another one's transaction."""
    pid = connection.get_server_pid()
    await until(lambda: observer.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid))


@contextlib.asynccontextmanager
async def transaction(kind: str, url: URL, engine: AsyncEngine) -> AsyncIterator[Any]:
    """Begin a transaction over one of the libraries."""
    async with contextlib.AsyncExitStack() as stack:
        if kind == "asyncpg":
            connection = await connect(url)
            stack.push_async_callback(connection.close)
            await stack.enter_async_context(connection.transaction())
            yield connection
        elif kind == "SQLAlchemy connection":
            yield await stack.enter_async_context(engine.begin())
        else:
            session = await stack.enter_async_context(AsyncSession(engine))
            await stack.enter_async_context(session.begin())
            yield session


@contextlib.asynccontextmanager
async def savepoint(connection: asyncpg.Connection) -> AsyncIterator[asyncpg.Connection]:
    """Set a savepoint in the transaction that is open."""
    async with connection.transaction():
        yield connection


KINDS = ["asyncpg", "SQLAlchemy connection", "SQLAlchemy session"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_event_is_applied_once(kind: str, database_url: URL, engine: AsyncEngine, observer) -> None:
    """The first delivery is applied, and the second is known."""
    event = aged(NEW)
    answers = []
    for _ in range(2):
        async with transaction(kind, database_url, engine) as connection:
            answers.append(await apply(connection, event))
    assert [True, False] == answers
    assert (1, 1) == await applied(observer, event)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rollback_takes_the_mark_along(kind: str, database_url: URL, engine: AsyncEngine, observer) -> None:
    """An event whose effects are rolled back is applied by the next delivery."""
    event = aged(NEW)
    with pytest.raises(LookupError):
        await apply_and_fail(transaction(kind, database_url, engine), event)
    assert (0, 0) == await applied(observer, event)
    async with transaction(kind, database_url, engine) as connection:
        assert await apply(connection, event)
    assert (1, 1) == await applied(observer, event)


@pytest.mark.parametrize("kind", KINDS)
async def test_old_events_are_refused(kind: str, database_url: URL, engine: AsyncEngine, observer) -> None:
    """An event past the horizon isn't applied, whether it was or not; its transaction can go on. Before, it is."""
    old, not_yet, new = aged(inbox.HORIZON), aged(inbox.HORIZON - timedelta(minutes=1)), aged(NEW)
    async with transaction(kind, database_url, engine) as connection:
        with pytest.raises(EventTooOld) as caught:
            await apply(connection, old)
        assert [True, True] == [await apply(connection, not_yet), await apply(connection, new)]
    assert [(0, 0), (1, 1), (1, 1)] == [await applied(observer, event) for event in (old, not_yet, new)]
    assert f"event {old.id} of {old.time.isoformat()} is past the horizon of 7 days, 0:00:00" == str(caught.value)


async def test_pooled_connections(database_url: URL, observer) -> None:
    """A connection of asyncpg's pool is one of asyncpg's."""
    event = aged(NEW)
    options = {"user": database_url.username, "database": database_url.database, **database_url.query}
    async with asyncpg.create_pool(min_size=1, max_size=1, **options) as pool, pool.acquire() as connection:
        with pytest.raises(NotInTransaction):
            await Inbox("billing").first_time(connection, event)
        async with connection.transaction():
            assert await Inbox("billing").first_time(connection, event)
    assert (1, 0) == await applied(observer, event)


@pytest.mark.parametrize("as_session", [False, True])
async def test_a_driver_that_is_not_async(as_session: bool, database_url: URL, observer) -> None:
    """SQLAlchemy's connections and sessions that aren't async have the same: once, rolled back, too old, purged."""
    event, old = aged(NEW), aged(inbox.HORIZON)
    billing = Inbox("billing")
    await plant(observer, "billing", [inbox.HORIZON + inbox.MARGIN * 2])

    def run() -> list[Any]:
        engine = sqlalchemy.create_engine(database_url.set(drivername="postgresql+psycopg"))
        answers: list[Any] = []
        for ends in ("rollback", "commit", "commit"):
            with Session(engine) if as_session else engine.connect() as connection:
                answers.append(billing.first_time_sync(connection, event))
                with pytest.raises(EventTooOld):
                    billing.first_time_sync(connection, old)
                getattr(connection, ends)()
        with Session(engine) if as_session else engine.connect() as connection:
            answers.append(billing.purge_sync(connection))
            connection.commit()
        engine.dispose()
        return answers

    assert [True, True, False, 1] == await asyncio.to_thread(run)
    assert (1, 0) == await applied(observer, event)


async def test_of_many_deliveries_at_once_one_is_first(database_url: URL, observer) -> None:
    """Deliveries that meet are told apart: one is the first."""
    event = aged(NEW)
    deliveries = 10
    together = asyncio.Barrier(deliveries)

    async def deliver() -> bool:
        connection = await connect(database_url)
        try:
            async with connection.transaction():
                await together.wait()
                return await apply(connection, event)
        finally:
            await connection.close()

    async with asyncio.timeout(WITHIN_S):
        answers = await asyncio.gather(*(deliver() for _ in range(deliveries)))
    assert [False] * (deliveries - 1) + [True] == sorted(answers)
    assert (1, 1) == await applied(observer, event)


@pytest.mark.parametrize(("ends", "second"), [("COMMIT", False), ("ROLLBACK", True)])
async def test_a_delivery_waits_for_another(ends: str, second: bool, database_url: URL, observer, other) -> None:
    """While one transaction applies an event, another's answer waits for how that ends."""
    event = aged(NEW)
    holder = await connect(database_url)
    try:
        await holder.execute("BEGIN")
        assert await apply(holder, event)
        async with other.transaction():
            waiting = asyncio.create_task(apply(other, event))
            await waits(observer, other)
            await holder.execute(ends)
            async with asyncio.timeout(WITHIN_S):
                assert second == await waiting
    finally:
        await holder.close()
    assert (1, 1) == await applied(observer, event)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_stricter_isolation(isolation: str, observer, other) -> None:
    """A transaction that began before another applied the event fails, and knows the event when begun anew."""
    event = aged(NEW)
    begun = other.transaction(isolation=isolation)
    await begun.start()
    await other.fetchval("SELECT count(*) FROM applied")
    async with observer.transaction():
        assert await apply(observer, event)
    with pytest.raises(asyncpg.SerializationError):
        await apply(other, event)
    await begun.rollback()
    async with other.transaction(isolation=isolation):
        assert not await apply(other, event)
    assert (1, 1) == await applied(observer, event)


CRASHING = """
import asyncio, sys
import asyncpg
from decideonce import events
from decideonce.inbox import Inbox

async def main(user, database, host, port, payload):
    event = events.from_payload(bytes.fromhex(payload))
    connection = await asyncpg.connect(user=user, database=database, host=host, port=port)
    async with connection.transaction():
        assert await Inbox("billing").first_time(connection, event)
        await connection.execute("INSERT INTO applied (event_id) VALUES ($1)", event.id)
        print("applied, not committed", flush=True)
        sys.stdin.read()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_crash_before_the_commit(database_url: URL, observer, other) -> None:
    """A consumer that is killed between mark and commit leaves neither, and the next delivery is applied."""
    made = body()
    event = events.from_payload(made.SerializeToString())
    url = (database_url.username, database_url.database, database_url.query["host"], database_url.query["port"])
    arguments = ("-c", CRASHING, *url, made.SerializeToString().hex())
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    consumer = await asyncio.create_subprocess_exec(sys.executable, *arguments, **pipes)
    try:
        async with asyncio.timeout(WITHIN_S):
            assert b"applied, not committed\n" == await consumer.stdout.readline()
        assert (0, 0) == await applied(observer, event)
    finally:
        consumer.kill()
        await consumer.wait()
    async with other.transaction():
        assert await apply(other, event)
    assert (1, 1) == await applied(observer, event)


async def test_a_late_duplicate(observer) -> None:
    """An event that comes again after later ones of its key is known."""
    key = new_key()
    first, second = (events.from_payload(body(key=key, effect=effect).SerializeToString()) for effect in (None, {}))
    answers = []
    for event in (first, second, first):
        async with observer.transaction():
            answers.append(await apply(observer, event))
    assert [True, True, False] == answers


async def test_consumers_are_told_apart(observer) -> None:
    """Each consumer applies an event once, whatever others that share the table do."""
    event = aged(NEW)
    async with observer.transaction():
        answers = [await apply(observer, event, consumer) for consumer in ("billing", "letters", "billing")]
    assert [True, True, False] == answers


async def test_a_savepoint_takes_the_mark_along(observer) -> None:
    """A mark that a savepoint's rollback undoes isn't there."""
    event = aged(NEW)
    async with observer.transaction():
        with pytest.raises(LookupError):
            await apply_and_fail(savepoint(observer), event)
        assert await apply(observer, event)
    assert (1, 1) == await applied(observer, event)


async def test_outside_of_a_transaction(observer, engine: AsyncEngine, database_url: URL) -> None:
    """Without a transaction the inbox refuses and writes nothing: the mark would be committed before the effects."""
    event, billing = aged(NEW), Inbox("billing")
    with pytest.raises(NotInTransaction):
        await billing.first_time(observer, event)
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(NotInTransaction):
            await billing.first_time(connection, event)
    always = create_async_engine(database_url, isolation_level="AUTOCOMMIT")
    async with AsyncSession(always) as session:
        with pytest.raises(NotInTransaction):
            await billing.first_time(session, event)
    await always.dispose()
    assert (0, 0) == await applied(observer, event)


async def test_what_is_no_connection(engine: AsyncEngine) -> None:
    """What the inbox can't work with is refused by its type."""
    event, billing = aged(NEW), Inbox("billing")
    for wrong in (engine, None, sqlalchemy.create_engine("postgresql+psycopg://")):
        with pytest.raises(TypeError, match="needed is a connection of asyncpg, or an async"):
            await billing.first_time(wrong, event)
        with pytest.raises(TypeError, match="SQLAlchemy that isn't async"):
            billing.purge_sync(wrong)
    async with engine.connect() as connection, AsyncSession(engine) as session:
        for wrong in (connection, session):
            with pytest.raises(TypeError, match="SQLAlchemy that isn't async"):
                billing.first_time_sync(wrong, event)


@pytest.mark.parametrize(
    ("consumer", "horizon"), [("", NEW), ("c" * 129, inbox.HORIZON), ("billing", NEW), ("billing", -inbox.HORIZON)]
)
def test_settings_that_make_no_sense(consumer: str, horizon: timedelta) -> None:
    """A consumer needs a name, and a horizon that something is within."""
    with pytest.raises(ValueError, match="must be"):
        Inbox(consumer, horizon)


async def test_an_event_with_a_new_time_keeps_its_age(observer) -> None:
    """An old event that was given a new time is judged by when its id was made."""
    made = body(datetime.now(UTC) - inbox.HORIZON)
    made.event_time.FromDatetime(datetime.now(UTC))
    with pytest.raises(EventTooOld):
        async with observer.transaction():
            await apply(observer, events.from_payload(made.SerializeToString()))


async def test_a_long_transaction_does_not_stop_the_clock(observer) -> None:
    """An event is judged when it is applied, and not by when its transaction began."""
    async with observer.transaction():
        await until(lambda: observer.fetchval("SELECT clock_timestamp() > now() + interval '10 ms'"))
        event = aged(timedelta(milliseconds=2))
        assert event.time > await observer.fetchval("SELECT now()")
        with pytest.raises(EventTooOld):
            await Inbox("billing", timedelta(milliseconds=1)).first_time(observer, event)
        assert await Inbox("billing", timedelta(minutes=1)).first_time(observer, event)


async def plant(observer: asyncpg.Connection, consumer: str, ages: list[timedelta]) -> None:
    """Plant the marks of events of these ages, as time would have left them."""
    await observer.executemany(
        "INSERT INTO decideonce_inbox (consumer, event_id, event_time, apply_time)"
        " VALUES ($1, gen_random_uuid(), now() - $2::interval, now())",
        [(consumer, age) for age in ages],
    )


async def marks(observer: asyncpg.Connection, consumer: str) -> list[int]:
    """Give the ages of a consumer's marks, in minutes."""
    rows = await observer.fetch(
        "SELECT extract(epoch FROM now() - event_time) AS age FROM decideonce_inbox WHERE consumer = $1 ORDER BY 1",
        consumer,
    )
    return [round(row["age"] / 60) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
async def test_purge_keeps_what_could_still_come(kind: str, database_url: URL, engine: AsyncEngine, observer) -> None:
    """Marks go in batches, oldest first, a day after their events are refused, and each consumer's apart."""
    minute, hour = timedelta(minutes=1), timedelta(hours=1)
    ages = [NEW, hour - minute, hour + minute, hour + inbox.MARGIN - minute, hour + inbox.MARGIN + minute]
    ages += [inbox.HORIZON, inbox.HORIZON * 2]
    for consumer in ("billing", "letters"):
        await plant(observer, consumer, ages)
    billing, purged, left = Inbox("billing", hour), [], []
    for _ in range(3):
        async with transaction(kind, database_url, engine) as connection:
            purged.append(await billing.purge(connection, limit=2))
        left.append(await marks(observer, "billing"))
    minutes = [age // minute for age in ages]
    assert [2, 1, 0] == purged
    assert [minutes[:5], minutes[:4], minutes[:4]] == left
    assert minutes == await marks(observer, "letters")


async def test_purge_changes_no_answer(observer) -> None:
    """Whatever was applied is either known or refused after a purge, at every age."""
    horizon = timedelta(hours=1)
    billing = Inbox("billing", horizon)
    for age in (NEW, horizon / 2, horizon - timedelta(minutes=1), horizon, horizon + inbox.MARGIN, horizon * 50):
        event = aged(age)
        await observer.execute(
            "INSERT INTO decideonce_inbox VALUES ('billing', $1, $2, $2)",
            event.id,
            event.time,
        )
        await billing.purge(observer)
        async with observer.transaction():
            try:
                answer = await billing.first_time(observer, event)
            except EventTooOld:
                answer = False
        assert not answer


async def test_purges_do_not_wait_for_each_other(observer, other) -> None:
    """A purge passes over what another one is deleting."""
    await plant(observer, "billing", [inbox.HORIZON * 2] * 3)
    async with observer.transaction():
        assert 2 == await Inbox("billing").purge(observer, limit=2)
        async with asyncio.timeout(WITHIN_S):
            assert 1 == await Inbox("billing").purge(other, limit=2)


async def test_purge_of_nothing_is_refused(observer) -> None:
    """A limit is at least 1."""
    with pytest.raises(ValueError, match="limit must be 1 or more"):
        await Inbox("billing").purge(observer, limit=0)


async def test_the_schema_can_be_executed_again(observer) -> None:
    """A consumer may execute the schema at each start."""
    await observer.execute(inbox.SCHEMA)
    assert 0 == await observer.fetchval("SELECT count(*) FROM decideonce_inbox")
