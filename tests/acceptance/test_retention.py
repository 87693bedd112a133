"""The boundary of retention: judged when a record is read, whoever purges and whenever."""

import asyncio
from pathlib import Path

import pytest

from decideonce.v1 import decision_service_pb2 as wire
from harness import make_token, new_key, refused, write_catalog

OPERATION = "test.brief"


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    """Give a catalog whose answers are kept for two seconds, and their keys for six more."""
    settings = {"policy": "echo", "retention": "2s", "tombstone_retention": "6s", "time_budget": "20s", "lease": "20s"}
    return str(write_catalog(tmp_path / "catalog", {OPERATION: settings}, {"echo": "echo_policy:decide"}))


async def until_past(observer, column: str, key: str) -> None:
    """Wait until a row's moment has come, by Postgres's clock."""
    async with asyncio.timeout(20):
        while await observer.fetchval(
            f"SELECT count(*) FROM ledger WHERE operation_key = $1 AND {column} > clock_timestamp()", key
        ):
            pass


@pytest.mark.parametrize("housekeeping", ["--no-housekeeping", "--housekeeping"])
async def test_late_duplicate_is_no_new_decision(
    database_url, observer, start_service, connect_caller, catalog, housekeeping
) -> None:
    """A resend is a replay, then expired and not decided again, and only then, after the tombstone, a new decision.

    temporalio/temporal#3441: after retention the same id started a second run.
    """
    service = start_service("--catalog", catalog, housekeeping)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key, facts = new_key(), {"mark": "late."}
    original = await caller.decide(OPERATION, key, facts)
    assert (await caller.decide(OPERATION, key, facts)).replayed
    # Nobody publishes here: what has been told would be gone from the outbox by now.
    await observer.execute("DELETE FROM outbox")
    await until_past(observer, "replayable_until", key)
    expired = await refused(caller.decide(OPERATION, key, facts))
    assert ("OPERATION_KEY_EXPIRED", original.provenance.decision_id) == (
        expired.reason,
        expired.metadata["decision_id"],
    )
    assert "OPERATION_KEY_REUSED" == (await refused(caller.decide(OPERATION, key, {"mark": "other."}))).reason
    assert wire.DECISION_STATUS_EXPIRED == (await caller.status(OPERATION, key)).status
    assert 1 == service.log.read_text().count("evaluated late.")
    assert 0 == await observer.fetchval("SELECT count(*) FROM outbox")
    await until_past(observer, "key_retained_until", key)
    assert "DECISION_NOT_FOUND" == (await refused(caller.status(OPERATION, key))).reason
    again = await caller.decide(OPERATION, key, facts)
    assert (wire.DECISION_STATUS_SUCCEEDED, False, 1) == (again.status, again.replayed, again.provenance.attempt)
    assert original.provenance.decision_id != again.provenance.decision_id


async def test_what_is_open_or_untold_is_never_purged(
    database_url, observer, start_service, connect_caller, catalog
) -> None:
    """The reaper takes no PROCESSING row, however old, and no decision whose events wait; it takes what is told."""
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    untold, told, open_key = new_key(), new_key(), new_key()
    for key in (untold, told):
        await caller.decide(OPERATION, key)
    await caller.decide(OPERATION, open_key, {"do": "sleep", "seconds": 12}, max_wait=0)
    await observer.execute("DELETE FROM outbox WHERE operation_key = $1", told)
    async with asyncio.timeout(20):
        while 5 != await observer.fetchval("SELECT state FROM ledger WHERE operation_key = $1", told):
            pass
    rows = {
        row["operation_key"]: (row["state"], row["response"] is None, row["facts"] is None)
        for row in await observer.fetch("SELECT operation_key, state, response, facts FROM ledger")
    }
    assert {untold: (2, False, False), told: (5, True, True), open_key: (1, True, False)} == rows
    async with asyncio.timeout(20):
        while await observer.fetchval("SELECT count(*) FROM ledger WHERE operation_key = $1", told):
            pass
    assert 2 == await observer.fetchval("SELECT count(*) FROM ledger")
