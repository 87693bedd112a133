"""The ledger's statements on a real Postgres."""

import asyncio
import uuid
from datetime import timedelta

import asyncpg
import pytest

from decideonce_server.database import Database, LockTimeout
from decideonce_server.errors import LedgerUnavailable
from decideonce_server.ledger import Attempt, Completion, Key, Ledger, Record, Reservation, State, bucket_of
from decideonce_server.ledger_catalog import CatalogStore
from decideonce_server.outbox import Event, Outbox

DECISION_ID = uuid.uuid4()
KEY = Key("acme", "credit.approve-loan", "0123456789abcdef")


def reservation(key: Key = KEY, **changes) -> Reservation:
    fields = {
        "key": key,
        "decision_id": DECISION_ID,
        "fingerprint_version": 1,
        "fingerprint": b"f" * 32,
        "operation_version": 1,
        "policy_id": "loan-approval",
        "policy_version": 1,
        "lease": timedelta(seconds=30),
        "background": False,
        "facts": b'{"a":1}',
    }
    return Reservation(**(fields | changes))


def completion(key: Key = KEY, **changes) -> Completion:
    fields = {
        "key": key,
        "decision_id": DECISION_ID,
        "attempt": 1,
        "state": State.SUCCEEDED,
        "response": b"response",
        "retention": timedelta(days=1),
        "tombstone_retention": timedelta(days=1),
    }
    return Completion(**(fields | changes))


def event(key: Key = KEY) -> Event:
    return Event(uuid.uuid4(), key.bucket, key.tenant, key.operation, key.operation_key, "decided", b"payload", "topic")


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database)


async def test_first_reservation_gets_attempt_one(ledger: Ledger) -> None:
    """The first to reserve a key holds its first attempt, with a whole lease."""
    (attempt,) = await ledger.reserve([reservation()])
    assert isinstance(attempt, Attempt)
    assert (State.PROCESSING, 1, timedelta(seconds=30)) == (
        attempt.record.state,
        attempt.record.attempt,
        attempt.record.lease_left,
    )


async def test_second_reservation_sees_the_first(ledger: Ledger) -> None:
    """Who comes second sees the first one's record and gets no attempt."""
    (first,) = await ledger.reserve([reservation()])
    (second,) = await ledger.reserve([reservation(decision_id=uuid.uuid4())])
    assert isinstance(second, Record)
    assert first.record.decision_id == second.decision_id


async def test_key_twice_in_one_set_is_reserved_once(ledger: Ledger) -> None:
    """Of two members of a set with one key, one holds the attempt and the other sees it."""
    results = await ledger.reserve([reservation(), reservation(decision_id=uuid.uuid4())])
    assert [Attempt, Record] == sorted((type(result) for result in results), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_loser_of_a_concurrent_insert_waits_and_sees_the_winner(
    ledger: Ledger, observer: asyncpg.Connection, end: str
) -> None:
    """A reservation that meets an uncommitted one waits for it: it sees the record, or holds the key itself.

    bezhai/chiwei-platform PR#231: a concurrent insert's loser got an empty result.
    """
    await observer.execute("BEGIN")
    await insert_row(observer)
    waiting = asyncio.create_task(ledger.reserve([reservation()]))
    await blocked(observer)
    await observer.execute(end)
    (found,) = await waiting
    assert {"COMMIT": Record, "ROLLBACK": Attempt}[end] is type(found)


async def test_reservation_waits_no_longer_than_the_lock_timeout(ledger: Ledger, observer: asyncpg.Connection) -> None:
    """A reservation that meets a transaction that hangs gives up with a typed error."""
    await observer.execute("BEGIN")
    await insert_row(observer)
    with pytest.raises(LockTimeout):
        await ledger.reserve([reservation()])


async def insert_row(connection: asyncpg.Connection) -> None:
    await connection.execute(
        """INSERT INTO ledger (bucket, tenant, operation, operation_key, decision_id, state, attempt, lease_expires_at,
            background, fingerprint_version, fingerprint, operation_version, policy_id, policy_version, reserve_time,
            facts)
        VALUES ($1, $2, $3, $4, gen_random_uuid(), 1, 1,
            now() + interval '30 s', false, 1, $5, 1, 'p', 1, now(), 'x')""",
        *KEY.row,
        b"f" * 32,
    )


async def blocked(connection: asyncpg.Connection) -> None:
    """Wait until a session waits for a lock."""
    async with asyncio.timeout(5):
        while not await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            pass


async def test_completion_writes_decision_and_events_together(ledger: Ledger, database: Database) -> None:
    """A completion stores the response and its events, with lifetimes from now."""
    await ledger.reserve([reservation()])
    (done,) = await ledger.complete([completion(events=[event(), event()])])
    pending = len(await Outbox(database).pending(10))
    assert (done.state, done.response, pending) == (State.SUCCEEDED, b"response", 2)
    assert timedelta(days=1) == done.key_retained_until - done.replayable_until


async def test_completion_with_a_stale_attempt_changes_nothing(ledger: Ledger, database: Database) -> None:
    """An attempt that is no longer the key's stores no response and tells no event.

    aws-powertools/powertools-lambda-python#8049: a late owner overwrote the new owner's result.
    """
    await ledger.reserve([reservation(lease=timedelta(milliseconds=1))])
    (second,) = await take_over_when_abandoned(ledger)
    assert second.record.attempt == 2
    assert await ledger.complete([completion(events=[event()])]) == [None]
    (record,) = await ledger.read([KEY])
    assert (record.state, record.attempt) == (State.PROCESSING, 2)
    assert len(await Outbox(database).pending(1)) == 0


async def test_two_ends_of_one_key_in_one_set_are_one_end(ledger: Ledger, database: Database) -> None:
    """Of an attempt that comes late and the one that took over, in one set, one ends the key and tells its events."""
    (first,) = await ledger.reserve([reservation(lease=timedelta(0))])
    (second,) = await ledger.take_over([first.record], [timedelta(seconds=30)])
    other = Key("acme", "credit.approve-loan", "another-key-0123456")
    await ledger.reserve([reservation(other, decision_id=uuid.uuid4())])
    late, told = completion(events=[event()]), event()
    own = completion(attempt=second.record.attempt, response=b"own", events=[told])
    nobody, done, stale = await ledger.complete([late, own, completion(other)])
    assert (None, None) == (nobody, stale)
    assert (State.SUCCEEDED, b"own", 2) == (done.state, done.response, done.attempt)
    assert [told.id] == [waiting.id for waiting in await Outbox(database).waiting([KEY.bucket], 10)]


async def take_over_when_abandoned(ledger: Ledger) -> list[Attempt | None]:
    async with asyncio.timeout(5):
        while True:
            (record,) = await ledger.read([KEY])
            if record.is_abandoned:
                return await ledger.take_over([record], [timedelta(seconds=30)])


async def test_one_of_many_takes_over(ledger: Ledger) -> None:
    """Of many who see a lease run out, one gets the next attempt."""
    await ledger.reserve([reservation(lease=timedelta(milliseconds=1))])
    (record,) = await ledger.read([KEY])
    async with asyncio.timeout(5):
        while not record.is_abandoned:
            (record,) = await ledger.read([KEY])
    results = await asyncio.gather(*(ledger.take_over([record], [timedelta(seconds=30)]) for _ in range(5)))
    assert results.count([None]) == 4


async def test_lease_that_has_not_run_out_is_not_taken_over(ledger: Ledger) -> None:
    """An attempt keeps its key while its lease lasts."""
    (attempt,) = await ledger.reserve([reservation()])
    assert await ledger.take_over([attempt.record], [timedelta(seconds=30)]) == [None]


async def test_finished_key_is_never_completed_again(ledger: Ledger) -> None:
    """A second completion of the same attempt changes nothing."""
    await ledger.reserve([reservation()])
    await ledger.complete([completion()])
    assert await ledger.complete([completion(response=b"other", state=State.FAILED_FINAL)]) == [None]
    (record,) = await ledger.read([KEY])
    assert record.response == b"response"


async def test_attempt_whose_lease_lasts_is_not_ended_as_abandoned(ledger: Ledger, database: Database) -> None:
    """Who ends an attempt for another does so only where its lease is over: one renewed in time goes on, untold."""
    await ledger.reserve([reservation(lease=timedelta(milliseconds=1))])
    (record,) = await ledger.read([KEY])
    while not record.is_abandoned:
        (record,) = await ledger.read([KEY])
    exhausted = completion(state=State.FAILED_FINAL, abandoned=True, events=[event()])
    assert {KEY} == await ledger.renew([record], [timedelta(seconds=30)])
    assert [None] == await ledger.complete([exhausted])
    assert 0 == len(await Outbox(database).pending(1))
    await ledger.release([record])
    (done,) = await ledger.complete([exhausted])
    assert State.FAILED_FINAL == done.state


async def test_failed_attempt_may_be_ended_for_good(ledger: Ledger) -> None:
    """What is FAILED_RETRYABLE can be ended by whoever finds its attempts used up, and not by the attempt itself."""
    await ledger.reserve([reservation()])
    await ledger.complete([completion(state=State.FAILED_RETRYABLE)])
    final = completion(state=State.FAILED_FINAL)
    assert [None] == await ledger.complete([final])
    (done,) = await ledger.complete([completion(state=State.FAILED_FINAL, abandoned=True)])
    assert State.FAILED_FINAL == done.state


async def test_answer_past_its_retention_is_expired_at_read_time(ledger: Ledger) -> None:
    """A record past its retention is EXPIRED and without a body, though nobody has purged it."""
    await ledger.reserve([reservation()])
    await ledger.complete([completion(retention=timedelta(0))])
    (record,) = await ledger.read([KEY])
    assert (record.state, record.response) == (State.EXPIRED, None)


async def test_key_past_its_tombstone_is_new_again(ledger: Ledger) -> None:
    """A key past its tombstone's retention is absent, and can be reserved as if it had never been."""
    await ledger.reserve([reservation()])
    await ledger.complete([completion(retention=timedelta(0), tombstone_retention=timedelta(0))])
    assert await ledger.read([KEY]) == [None]
    (again,) = await ledger.reserve([reservation(decision_id=uuid.uuid4())])
    assert isinstance(again, Attempt)
    assert again.record.attempt == 1


async def test_attempt_of_a_forgotten_reservation_changes_nothing(ledger: Ledger) -> None:
    """An attempt that slept until its key was forgotten and reserved anew neither ends nor renews the new one."""
    (old,) = await ledger.reserve([reservation()])
    await ledger.complete([completion(retention=timedelta(0), tombstone_retention=timedelta(0))])
    await ledger.reserve([reservation(decision_id=uuid.uuid4(), lease=timedelta(0))])
    assert [None] == await ledger.complete([completion(response=b"of another decision")])
    assert set() == await ledger.renew([old.record], [timedelta(seconds=30)])
    assert [None] == await ledger.take_over([old.record], [timedelta(seconds=30)])


async def test_keys_that_concatenate_alike_are_different_keys(ledger: Ledger) -> None:
    """Tenants and keys that would spell the same when joined reserve apart.

    paveg/hono-idempotency#126: two callers met in one joined key.
    """
    keys = [Key("a:b", "op", "c" * 16), Key("a", "op", "b:" + "c" * 16), Key("b", "op", "c" * 16)]
    results = await ledger.reserve([reservation(key) for key in keys])
    assert [Attempt] * 3 == [type(result) for result in results]


async def test_a_row_in_the_wrong_bucket_is_refused_by_the_database(observer: asyncpg.Connection) -> None:
    """The bucket is the first byte of SHA-256 of the operation key, and the database holds it."""
    await observer.execute("BEGIN")
    with pytest.raises(asyncpg.CheckViolationError):
        await observer.execute(
            """INSERT INTO outbox VALUES ($1, gen_random_uuid(), 't', 'o', $2, 'o', 't/k', 'x', 'p')""",
            (bucket_of("0123456789abcdef") + 1) % 256,
            "0123456789abcdef",
        )


async def test_background_reservation_is_due_at_once(ledger: Ledger) -> None:
    """A background key begins before its first attempt, and is due for a worker; an inline one never is."""
    inline = Key("acme", "op", "inline-0123456789")
    (found, _) = await ledger.reserve([reservation(background=True), reservation(inline)])
    assert isinstance(found, Record)
    assert [record.key for record in await ledger.due(10, abandoned=False)] == [KEY]
    (attempt,) = await ledger.take_over([found], [timedelta(seconds=30)])
    assert (attempt.record.attempt, attempt.facts, await ledger.due(10, abandoned=True)) == (1, b'{"a":1}', [])


async def test_locked_table_is_an_outage_that_ends(
    ledger: Ledger, database: Database, observer: asyncpg.Connection
) -> None:
    """Reads that a lock on a whole table holds up are told to come back: of the ledger, and of the catalog."""
    transaction = observer.transaction()
    await transaction.start()
    await observer.execute("LOCK TABLE ledger, catalog")
    for read in (ledger.read([KEY]), CatalogStore(database).revision()):
        with pytest.raises(LedgerUnavailable):
            await read
    await transaction.rollback()
    assert [None] == await ledger.read([KEY])
