"""One key, one decision: many callers, several servers."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from conftest import connect
from decideonce.v1 import decision_service_pb2 as wire
from harness import make_token, new_key, refused, table_policy, write_catalog

CALLS = 200
TURNS = 20


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    """Give a catalog with a table and a policy that does what facts say."""
    operations = {
        "credit.check": {"policy": "table"},
        "echo.inline": {"policy": "echo", "time_budget": "10s", "default_wait": "20s"},
        "echo.background": {"policy": "echo", "execution": "background"},
    }
    policies = {"table": table_policy("LOW", "HIGH"), "echo": "echo_policy:decide"}
    return str(write_catalog(tmp_path / "catalog", operations, policies))


async def test_200_calls_on_two_servers_are_one_decision(
    database_url, observer, start_service, connect_caller, catalog
) -> None:
    """200 concurrent calls with one key over two servers: one evaluation, one original, no error. 20 times over."""
    services = [start_service("--catalog", catalog), start_service()]
    token = await make_token(database_url, "acme")
    callers = [connect_caller(service, token) for service in services]
    for turn in range(TURNS):
        key, facts = new_key(), {"mark": f"turn-{turn}."}
        answers = await asyncio.gather(
            *(callers[i % 2].decide("echo.inline", key, facts, max_wait=5) for i in range(CALLS))
        )
        kinds = Counter((answer.status, answer.replayed) for answer in answers)
        decided = [answer for answer in answers if answer.status == wire.DECISION_STATUS_SUCCEEDED]
        assert 1 == kinds[wire.DECISION_STATUS_SUCCEEDED, False]
        assert CALLS - 1 == (
            kinds[wire.DECISION_STATUS_SUCCEEDED, True] + kinds[wire.DECISION_STATUS_PROCESSING, False]
        )
        assert 1 == len({answer.provenance.decision_id for answer in decided})
        evaluations = sum(service.log.read_text().count(f"evaluated turn-{turn}.") for service in services)
        assert 1 == evaluations
    assert TURNS == await observer.fetchval("SELECT count(*) FROM ledger")
    assert TURNS == await observer.fetchval("SELECT count(*) FROM outbox")


async def test_no_transaction_is_open_while_policies_run(
    database_url, observer, start_service, connect_caller, catalog
) -> None:
    """While ten policies take 3 s with two connections, no session idles in a transaction; other calls are prompt."""
    service = start_service("--catalog", catalog, "--pool-size", "2")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await caller.decide("credit.check", new_key())
    slow = [
        asyncio.ensure_future(caller.decide("echo.inline", new_key(), {"do": "sleep", "seconds": 3})) for _ in range(10)
    ]
    idle, times = 0, []
    while not any(call.done() for call in slow):
        idle += await observer.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
        )
        began = time.monotonic()
        key = new_key()
        await caller.decide("credit.check", key)
        await caller.status("credit.check", key)
        times.append(time.monotonic() - began)
    answers = await asyncio.gather(*slow)
    assert [wire.DECISION_STATUS_SUCCEEDED] * 10 == [answer.status for answer in answers]
    assert 0 == idle
    assert len(times) > 10
    assert 0.3 > sorted(times)[len(times) * 9 // 10]


async def test_duplicate_waits_for_its_owner_on_another_server(
    database_url, observer, start_service, connect_caller, catalog
) -> None:
    """A duplicate that waits gets the owner's decision, though another server makes it."""
    first, second = start_service("--catalog", catalog), start_service()
    token = await make_token(database_url, "acme")
    key, facts = new_key(), {"do": "sleep", "seconds": 1}
    original = asyncio.ensure_future(connect_caller(first, token).decide("echo.inline", key, facts))
    waiting = connect_caller(second, token)
    await until_reserved(observer, key)
    duplicate = await waiting.decide("echo.inline", key, facts)
    assert (wire.DECISION_STATUS_SUCCEEDED, True) == (duplicate.status, duplicate.replayed)
    assert (await original).provenance == duplicate.provenance


async def until_reserved(observer, key):
    async with asyncio.timeout(10):
        while not await observer.fetchval("SELECT count(*) FROM ledger WHERE operation_key = $1", key):
            pass


async def test_caller_that_does_not_wait_gets_processing(database_url, start_service, connect_caller, catalog) -> None:
    """With max_wait 0 the owner and its duplicates get PROCESSING at once, and a poll gets the decision."""
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key, facts = new_key(), {"do": "sleep", "seconds": 0.5}
    owner = await caller.decide("echo.inline", key, facts, max_wait=0)
    duplicate = await caller.decide("echo.inline", key, facts, max_wait=0)
    for answer in (owner, duplicate):
        assert (wire.DECISION_STATUS_PROCESSING, False) == (answer.status, answer.replayed)
        assert 0 < answer.retry_after.ToTimedelta().total_seconds() <= 30
    status = await caller.status("echo.inline", key, max_wait=5)
    assert wire.DECISION_STATUS_SUCCEEDED == status.status


async def test_deadline_ends_the_wait_before_the_call(database_url, start_service, connect_caller, catalog) -> None:
    """A caller whose deadline is short gets PROCESSING within it, and not a broken call."""
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    answer = await caller.decide("echo.inline", new_key(), {"do": "sleep", "seconds": 2}, max_wait=10, timeout=0.5)
    assert wire.DECISION_STATUS_PROCESSING == answer.status


async def test_background_operation_is_decided_by_a_worker(
    database_url, start_service, connect_caller, catalog
) -> None:
    """A background operation answers PROCESSING, and a poll gets the decision that a worker made."""
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key, facts = new_key(), {"outcome": "REVIEWED"}
    assert wire.DECISION_STATUS_PROCESSING == (await caller.decide("echo.background", key, facts)).status
    status = await caller.status("echo.background", key, max_wait=5)
    assert ("REVIEWED", 1) == (status.decision.outcome, status.provenance.attempt)
    replay = await caller.decide("echo.background", key, facts)
    assert (True, status.provenance) == (replay.replayed, replay.provenance)


async def test_reservation_that_hangs_elsewhere_is_processing(
    database_url, observer, start_service, connect_caller, catalog
) -> None:
    """A call that meets another's uncommitted reservation waits shortly, then answers PROCESSING.

    rudderlabs/rudder-server PR#4241: the loser of a concurrent insert got an empty result.
    """
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    template, key = new_key(), new_key()
    await caller.decide("credit.check", template, {"n": 1})
    blocker = await connect(database_url)
    await blocker.execute("BEGIN")
    await blocker.execute(
        """INSERT INTO ledger SELECT (l).* FROM (
            SELECT jsonb_populate_record(l, jsonb_build_object('operation_key', $1::text,
                'bucket', get_byte(sha256(convert_to($1, 'UTF8')), 0))) AS l
            FROM ledger l WHERE operation_key = $2) AS copies""",
        key,
        template,
    )
    answer = await caller.decide("credit.check", key, {"n": 1})
    await blocker.execute("ROLLBACK")
    await blocker.close()
    assert wire.DECISION_STATUS_PROCESSING == answer.status
    assert 0.3 == answer.retry_after.ToTimedelta().total_seconds()
    again = await caller.decide("credit.check", key, {"n": 1})
    assert (wire.DECISION_STATUS_SUCCEEDED, False) == (again.status, again.replayed)


async def test_completion_that_fails_stores_nothing(
    database_url, observer, start_service, connect_caller, catalog
) -> None:
    """Where the events can't be stored the decision isn't either; the call says so, and the next makes the decision.

    erleans/pgo PR#131: a COMMIT that was a ROLLBACK passed for a success.
    """
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await observer.execute(
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE unique_violation; END $$"""
    )
    await observer.execute("CREATE TRIGGER refuse BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION refuse()")
    key = new_key()
    error = await refused(caller.decide("echo.inline", key))
    assert "INTERNAL" == error.reason
    status = await caller.status("echo.inline", key)
    assert (wire.DECISION_STATUS_FAILED_RETRYABLE, "INTERNAL") == (status.status, status.failure.reason)
    assert 0 == await observer.fetchval("SELECT count(*) FROM outbox")
    await observer.execute("DROP TRIGGER refuse ON outbox")
    again = await caller.decide("echo.inline", key)
    assert (wire.DECISION_STATUS_SUCCEEDED, 2) == (again.status, again.provenance.attempt)
    assert 1 == await observer.fetchval("SELECT count(*) FROM outbox")
