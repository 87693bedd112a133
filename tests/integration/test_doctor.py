"""What the doctor finds in a database: each fault is planted by SQL, and found by one check alone."""

import json
from collections.abc import Mapping
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.engine import URL

from decideonce.events import RECORDED_EVENT_TYPE
from decideonce_server import doctor
from decideonce_server.database import Database
from decideonce_server.ledger import Key
from decideonce_server.ledger_doctor import LedgerDoctor

LEDGER_CHECKS = {
    "stale work",
    "answers past retention",
    "answers held by events",
    "tombstones past retention",
    "parked events",
    "early events",
    "repeated decisions",
    "excess attempts",
    "unknown versions",
    "contradictions",
}
OPERATION = "credit.approve-loan"
KEY = "0123456789abcdef"
DECISION = "01890000-0000-7000-8000-000000000000"
EARLIER_DECISION = "01880000-0000-7000-8000-000000000000"

PROCESSING = {"state": "1", "lease_expires_at": "now() + interval '10 s'", "response": "NULL", "complete_time": "NULL"}
LONG_AGO = "now() - interval '61 min'"
# Just late: within what housekeeping may take.
LATELY = "now() - interval '59 min'"
TOMBSTONE = {"state": "5", "facts": "NULL", "response": "NULL", "replayable_until": LONG_AGO}


@pytest.fixture(autouse=True)
async def versions(observer: asyncpg.Connection) -> None:
    """Publish what rows are made under."""
    await observer.execute(
        "INSERT INTO operation_version VALUES ($1, 1, 'd', $2, now())", OPERATION, json.dumps({"max_attempts": 5})
    )
    await observer.execute("INSERT INTO policy_version VALUES ('loans', 1, 'python', 'd', '', now())")


async def plant(observer: asyncpg.Connection, changes: Mapping[str, str] | None = None, key: str = KEY) -> None:
    """Write a row that is succeeded and in order but for the changes, as SQL expressions."""
    columns = {
        "bucket": str(Key("acme", OPERATION, key).bucket),
        "tenant": "'acme'",
        "operation": f"'{OPERATION}'",
        "operation_key": f"'{key}'",
        "decision_id": f"'{DECISION}'",
        "state": "2",
        "attempt": "1",
        "background": "false",
        "fingerprint_version": "1",
        "fingerprint": "decode(repeat('00', 32), 'hex')",
        "operation_version": "1",
        "policy_id": "'loans'",
        "policy_version": "1",
        "reserve_time": "now() - interval '1 day'",
        "complete_time": "now() - interval '1 day'",
        "facts": "'secret facts'",
        "response": "'secret response'",
    } | dict(changes or {})
    await observer.execute(f"INSERT INTO ledger ({', '.join(columns)}) VALUES ({', '.join(columns.values())})")


async def plant_event(
    observer: asyncpg.Connection, event_type: str = RECORDED_EVENT_TYPE, decision: str = DECISION
) -> None:
    """Write an event that waits."""
    await observer.execute(
        "INSERT INTO outbox VALUES ($1, gen_random_uuid(), 'acme', $2, $3, $2, 'acme/' || $3, $4, $5)",
        Key("acme", OPERATION, KEY).bucket,
        OPERATION,
        KEY,
        event_type,
        f"… {decision} …".encode(),
    )


async def faults(url: URL) -> dict[str, str]:
    """Examine the database, and give what is at fault."""
    findings = await doctor.examine_ledger(url)
    assert LEDGER_CHECKS == {finding.check for finding in findings}
    return {finding.check: finding.found for finding in findings if not finding.ok}


async def test_nothing_ordinary_is_a_fault(database_url: URL, observer: asyncpg.Connection) -> None:
    """Work under way and just due, answers and tombstones just past their times, and waiting events pass."""
    await plant(observer)
    await plant_event(observer)
    await plant_event(observer, "loan.approved")
    await plant(observer, {"replayable_until": LATELY, "key_retained_until": "now()"}, key="late-0123456789ab")
    await plant(observer, TOMBSTONE | {"key_retained_until": LATELY}, key="tombstone-0123456789")
    await plant(observer, TOMBSTONE, key="tombstone-for-ever-01")
    await plant(observer, PROCESSING | {"attempt": "5"}, key="processing-0123456789")
    due = {"background": "true", "attempt": "0", "lease_expires_at": "now() - interval '50 s'"}
    await plant(observer, PROCESSING | due, key="background-0123456789")
    await plant(observer, {"state": "3"}, key="failed-inline-0123456")
    await plant(observer, {"state": "3", "background": "true", "retry_at": "now()"}, key="failed-0123456789abc")
    assert {} == await faults(database_url)


@pytest.mark.parametrize(
    "changes",
    [
        PROCESSING | {"lease_expires_at": "now() - interval '61 s'"},
        {"state": "3", "background": "true", "retry_at": "now() - interval '61 s'"},
    ],
)
async def test_stale_work(database_url: URL, observer: asyncpg.Connection, changes: Mapping[str, str]) -> None:
    """Work whose lease or pause has been over for a minute is found, and how much, and an example of it."""
    await plant(observer, changes)
    await plant(observer, changes, key="another-0123456789")
    found = await faults(database_url)
    assert {"stale work": f"2 due for more than a minute, e.g. {OPERATION} {KEY}"} == found


async def test_overdue_answer(database_url: URL, observer: asyncpg.Connection) -> None:
    """An answer that has been past its retention for an hour is found; nothing of it is shown but its key."""
    await plant(observer, {"replayable_until": LONG_AGO})
    found = await faults(database_url)
    assert {"answers past retention": f"1 not purged for more than an hour, e.g. {OPERATION} {KEY}"} == found


async def test_answer_that_waits_for_its_event(database_url: URL, observer: asyncpg.Connection) -> None:
    """An answer past its retention that can't be purged before its event is published is told apart."""
    await plant(observer, {"replayable_until": LONG_AGO})
    await plant_event(observer)
    assert {"answers held by events"} == set(await faults(database_url))


async def test_parked_event(database_url: URL, observer: asyncpg.Connection) -> None:
    """An event that can't be published is found; its answer isn't held against retention."""
    await plant(observer, {"replayable_until": LATELY})
    await plant_event(observer)
    await observer.execute(
        """WITH parked AS (DELETE FROM outbox RETURNING *)
        INSERT INTO outbox_parked SELECT *, 'MESSAGE_TOO_LARGE', now() FROM parked"""
    )
    expected = f"1 that can't be published, with the later ones of their keys, e.g. {OPERATION} {KEY}"
    assert {"parked events": expected} == await faults(database_url)


async def test_overdue_tombstone(database_url: URL, observer: asyncpg.Connection) -> None:
    """A tombstone that has been past its own retention for an hour is found."""
    await plant(observer, TOMBSTONE | {"key_retained_until": LONG_AGO})
    assert {"tombstones past retention"} == set(await faults(database_url))


@pytest.mark.parametrize("changes", [PROCESSING, {"state": "3"}])
async def test_event_of_a_decision_that_is_not_final(
    database_url: URL, observer: asyncpg.Connection, changes: Mapping[str, str]
) -> None:
    """An event that waits though its decision may still be made is found."""
    await plant(observer, changes)
    await plant_event(observer, "loan.approved")
    assert {"early events"} == set(await faults(database_url))


async def test_decision_told_twice(database_url: URL, observer: asyncpg.Connection) -> None:
    """Two waiting events that tell one decision are found."""
    await plant(observer)
    await plant_event(observer)
    await plant_event(observer)
    assert {"repeated decisions"} == set(await faults(database_url))


@pytest.mark.parametrize("changes", [{}, PROCESSING])
async def test_event_of_a_keys_earlier_life(
    database_url: URL, observer: asyncpg.Connection, changes: Mapping[str, str]
) -> None:
    """A key that was forgotten and is new again may have an event of its earlier decision waiting."""
    await plant(observer, changes)
    await plant_event(observer, decision=EARLIER_DECISION)
    if not changes:
        await plant_event(observer)
    assert {} == await faults(database_url)


async def test_excess_attempt(database_url: URL, observer: asyncpg.Connection) -> None:
    """An attempt beyond what the operation's version allows is found."""
    await plant(observer, {"attempt": "6"})
    assert {"excess attempts"} == set(await faults(database_url))


@pytest.mark.parametrize("changes", [{"operation_version": "2"}, {"policy_id": "'absent'"}])
async def test_unknown_version(database_url: URL, observer: asyncpg.Connection, changes: Mapping[str, str]) -> None:
    """A row made under a version that isn't stored is found."""
    await plant(observer, changes)
    assert {"unknown versions"} == set(await faults(database_url))


@pytest.mark.parametrize(
    "changes",
    [
        PROCESSING | {"replayable_until": "now() + interval '1 d'"},
        {"state": "3", "key_retained_until": "now() + interval '1 d'", "replayable_until": "now() + interval '1 d'"},
        {"retry_at": "now()"},
        {"complete_time": "NULL"},
        {"attempt": "0"},
        TOMBSTONE | {"facts": "'kept'"},
        TOMBSTONE | {"replayable_until": "NULL"},
        {"replayable_until": "now() + interval '2 d'", "key_retained_until": "now() + interval '1 d'"},
        {"key_retained_until": "now() + interval '1 d'"},
    ],
)
async def test_contradiction(database_url: URL, observer: asyncpg.Connection, changes: Mapping[str, str]) -> None:
    """A row whose columns contradict its state is found."""
    await plant(observer, changes)
    assert {"contradictions"} == set(await faults(database_url))


async def test_locked_tables_are_said(database_url: URL, observer: asyncpg.Connection) -> None:
    """Where a migration holds the tables the doctor says so, and doesn't wait."""
    transaction = observer.transaction()
    await transaction.start()
    await observer.execute("LOCK TABLE ledger, outbox_parked")
    found = await faults(database_url)
    await transaction.rollback()
    assert LEDGER_CHECKS == set(found)
    assert {"another session holds a lock on the tables"} == set(found.values())


async def test_the_doctor_looks_into_the_ledger(
    database_url: URL, observer: asyncpg.Connection, tmp_path: Path
) -> None:
    """What is found in the ledger is among the doctor's findings."""
    await plant(observer, {"attempt": "6"})
    assert ["excess attempts"] == [f.check for f in await doctor.examine(database_url, tmp_path) if not f.ok]


async def test_looks_change_nothing(database: Database, observer: asyncpg.Connection) -> None:
    """Every statement of the doctor runs where nothing can be written."""
    await observer.execute(
        "ALTER DATABASE "
        + await observer.fetchval("SELECT current_database()")
        + " SET default_transaction_read_only = on"
    )
    ledger = LedgerDoctor(database, RECORDED_EVENT_TYPE)
    looks = [getattr(ledger, name) for name in dir(ledger) if not name.startswith("_")]
    assert [0] * len(LEDGER_CHECKS) == [(await look()).found for look in looks]
