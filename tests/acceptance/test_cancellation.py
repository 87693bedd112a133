"""Calls that end early, connections and processes that are lost around a commit, and what time takes away."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from conftest import connect
from decideonce.v1 import decision_service_pb2 as wire
from harness import make_token, new_key, recorded, refused, write_catalog
from processes import until
from proxy import Proxy
from stage import ALONE, evaluations

SUCCEEDED = wire.DECISION_STATUS_SUCCEEDED
PROCESSING = wire.DECISION_STATUS_PROCESSING
COUNTS = "SELECT (SELECT count(*) FROM ledger WHERE state = 2), (SELECT count(*) FROM outbox)"


@pytest.fixture
def start(start_service, tmp_path) -> Callable[..., object]:
    """Give a function that starts a service; each applies the same catalog."""
    echo = {"policy": "echo", "time_budget": "30s", "default_wait": "20s", "lease": "30s"}
    operations = {"cancel.echo": echo, "cancel.brief": echo | {"retention": "1s", "tombstone_retention": "2s"}}
    catalog = write_catalog(tmp_path / "catalog", operations, {"echo": "echo_policy:decide"})

    def start(*arguments: str) -> object:
        return start_service("--catalog", str(catalog), *arguments)

    return start


@pytest.fixture
async def proxy(database_url) -> AsyncIterator[Proxy]:
    """Give a proxy of the test's database."""
    async with Proxy(database_url).running() as proxy:
        yield proxy


async def start_behind(proxy, start):
    # Starting blocks, and this loop runs the proxy.
    return await asyncio.to_thread(start, ALONE, "--database-url", proxy.url)


async def test_call_that_ends_early_leaves_its_decision_to_be_made(
    database_url, observer, start, connect_caller
) -> None:
    """Calls cancelled, or out of time, at any moment: none leaves its key held, and each key is evaluated once.

    grpc/grpc.io PR#1137: a handler is cancelled at its next await, in the middle of what it does.
    """
    service = start(ALONE)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await caller.decide("cancel.echo", new_key())
    keys = {}
    for milliseconds in (0, 1, 2, 3, 5, 8, 12, 20, 50, 100, 200, 280, 290, 295, 300, 302, 304, 306, 310, 320):
        for how in (cancel, let_expire):
            key, mark = new_key(), f"{milliseconds} {how.__name__}."
            keys[key] = {"mark": mark, "do": "sleep", "seconds": 0.3}
            await how(caller, key, keys[key], milliseconds / 1000)
    for key, facts in keys.items():
        answer = await caller.decide("cancel.echo", key, facts)
        assert (SUCCEEDED, 1) == (answer.status, answer.provenance.attempt), facts
        assert 1 == evaluations(service, facts["mark"]), facts
    assert (len(keys) + 1,) * 2 == tuple(await observer.fetchrow(COUNTS))


async def cancel(caller, key, facts, after):
    call = caller.decide("cancel.echo", key, facts)
    await asyncio.wait({asyncio.ensure_future(call)}, timeout=after)
    call.cancel()


async def let_expire(caller, key, facts, after):
    (end,) = await asyncio.gather(caller.decide("cancel.echo", key, facts, timeout=after), return_exceptions=True)
    if isinstance(end, grpc.RpcError):
        assert grpc.StatusCode.DEADLINE_EXCEEDED == end.code()


@pytest.mark.parametrize("table", ["ledger", "outbox"])
async def test_call_cancelled_around_a_statement_leaves_its_decision_to_be_made(
    database_url, observer, start, connect_caller, table
) -> None:
    """A call cancelled while its key is being reserved, or its decision recorded, leaves one decision all the same."""
    service = start(ALONE)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    blocker, key, facts = await connect(database_url), new_key(), {"mark": "one."}
    await blocker.execute("BEGIN")
    await blocker.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")
    call = caller.decide("cancel.echo", key, facts)
    pending = asyncio.ensure_future(call)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    await until(lambda: observer.fetchval(waiting))
    call.cancel()
    await asyncio.wait({pending})
    await blocker.execute("ROLLBACK")
    await blocker.close()
    row = await until(lambda: observer.fetchrow("SELECT state, attempt FROM ledger WHERE state <> 1"), within=2)
    assert (2, 1) == tuple(row)
    answer = await caller.decide("cancel.echo", key, facts)
    assert (SUCCEEDED, True, 1) == (answer.status, answer.replayed, answer.provenance.attempt)
    assert 1 == evaluations(service, "one.")
    assert (1, 1) == tuple(await observer.fetchrow(COUNTS))


async def test_instance_killed_before_its_reply_has_decided(
    database_url, observer, start, connect_caller, proxy
) -> None:
    """A caller whose instance died between commit and reply gets the recorded decision from another instance.

    googleapis/google-cloud-ruby PR#1572: UNAVAILABLE was taken for "never executed".
    """
    first, second = await start_behind(proxy, start), start(ALONE)
    token = await make_token(database_url, "acme")
    key, facts = new_key(), {"mark": "one."}
    trap = proxy.set("complete", after=True, cuts=False)
    call = asyncio.ensure_future(refused(connect_caller(first, token).decide("cancel.echo", key, facts)))
    async with asyncio.timeout(20):
        await trap.sprung.wait()
    first.kill()
    assert grpc.StatusCode.UNAVAILABLE == (await call).code
    assert (1, 1) == tuple(await observer.fetchrow(COUNTS))
    answer = await connect_caller(second, token).decide("cancel.echo", key, facts)
    assert (SUCCEEDED, True, 1) == (answer.status, answer.replayed, answer.provenance.attempt)
    assert (1, 0) == (evaluations(first, "one."), evaluations(second, "one."))
    assert (1, 1) == tuple(await observer.fetchrow(COUNTS))


async def test_connection_lost_around_a_commit_is_one_decision(
    database_url, observer, start, connect_caller, proxy
) -> None:
    """A connection lost before a statement ran, or before its answer came: one decision, one event, no defect.

    jruby/activerecord-jdbc-adapter PR#1216: a COMMIT that was sent again on a new connection lost what was written.
    """
    service = await start_behind(proxy, start)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await caller.decide("cancel.echo", new_key())
    cases = [(statement, after) for statement in ("complete", "reserve") for after in (False, True)]
    for n, (statement, after) in enumerate(cases, start=2):
        key, facts = new_key(), {"mark": f"{statement} {after}."}
        trap = proxy.set(statement, after=after)
        answer = await caller.decide("cancel.echo", key, facts)
        assert trap.sprung.is_set(), facts
        assert (SUCCEEDED, False, 1) == (answer.status, answer.replayed, answer.provenance.attempt), facts
        assert 1 == evaluations(service, facts["mark"]), facts
        assert (n, n) == tuple(await observer.fetchrow(COUNTS)), facts
        replay = await caller.decide("cancel.echo", key, facts)
        assert (True, recorded(answer)) == (replay.replayed, recorded(replay)), facts


async def test_pool_is_whole_after_cancelled_calls(database_url, observer, start, connect_caller) -> None:
    """50 calls cancelled at random moments take no connection of two with them, and leave no transaction open.

    sqlalchemy/sqlalchemy#13381: a cancelled task gave its connection back with a transaction open.
    """
    service = start(ALONE, "--pool-size", "2")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await caller.decide("cancel.echo", new_key())
    moments = random.Random(1)
    keys = [new_key() for _ in range(50)]
    await asyncio.gather(*(cancel(caller, key, {}, moments.uniform(0, 0.05)) for key in keys))
    answers = await asyncio.gather(*(caller.decide("cancel.echo", new_key()) for _ in range(50)))
    assert [SUCCEEDED] * 50 == [answer.status for answer in answers]
    again = await asyncio.gather(*(caller.decide("cancel.echo", key) for key in keys))
    assert [(SUCCEEDED, 1)] * 50 == [(answer.status, answer.provenance.attempt) for answer in again]
    assert (101, 101) == tuple(await observer.fetchrow(COUNTS))
    sessions = await observer.fetch(
        """SELECT state FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'decideonce' AND pid <> pg_backend_pid()"""
    )
    assert {"idle"} == {session["state"] for session in sessions}
    # The pool's two, and the one of the thread that renews leases.
    assert 3 >= len(sessions)


async def test_key_past_its_retention_is_judged_when_it_is_read(database_url, observer, start, connect_caller) -> None:
    """With nobody to apply retention, a late duplicate is refused once the answer is past it; much later it is new.

    temporalio/documentation PR#3014: after retention the same id began a second run.
    """
    service = start(ALONE)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key, facts = new_key(), {"mark": "one."}
    first = await caller.decide("cancel.brief", key, facts)
    assert (await caller.decide("cancel.brief", key, facts)).replayed
    await until(lambda: is_expired(caller, key))
    error = await refused(caller.decide("cancel.brief", key, facts))
    assert (grpc.StatusCode.FAILED_PRECONDITION, "OPERATION_KEY_EXPIRED") == (error.code, error.reason)
    assert first.provenance.decision_id == error.metadata["decision_id"]
    assert 1 == evaluations(service, "one.")
    assert (1, 1) == tuple(await observer.fetchrow(COUNTS))
    await until(lambda: is_forgotten(caller, key))
    again = await caller.decide("cancel.brief", key, facts)
    assert (SUCCEEDED, False, 1) == (again.status, again.replayed, again.provenance.attempt)
    assert first.provenance.decision_id != again.provenance.decision_id
    assert 2 == evaluations(service, "one.")
    assert (1, 2) == tuple(await observer.fetchrow(COUNTS))


async def is_expired(caller, key):
    return wire.DECISION_STATUS_EXPIRED == (await caller.status("cancel.brief", key)).status


async def is_forgotten(caller, key):
    try:
        await caller.status("cancel.brief", key)
    except grpc.RpcError as error:
        return grpc.StatusCode.NOT_FOUND == error.code()
    return False


async def test_housekeeping_keeps_what_is_not_told_or_not_done(database_url, observer, start, connect_caller) -> None:
    """Answers past retention lose their bodies, except where an event is still to be published; open work stays."""
    service = start()
    caller = connect_caller(service, await make_token(database_url, "acme"))
    told, untold, working = new_key(), new_key(), new_key()
    await caller.decide("cancel.brief", working, {"do": "sleep", "seconds": 25}, max_wait=0)
    await caller.decide("cancel.brief", untold, {"mark": "one."})
    await caller.decide("cancel.brief", told, {"mark": "one."})
    await observer.execute("DELETE FROM outbox WHERE operation_key = $1", told)
    gone = "SELECT count(*) = 0 FROM ledger WHERE operation_key = $1"
    await until(lambda: observer.fetchval(gone, told))
    rows = await observer.fetch("SELECT operation_key, state, response IS NULL, facts IS NULL FROM ledger")
    assert {(untold, 2, False, False), (working, 1, True, False)} == {tuple(row) for row in rows}
    assert 1 == await observer.fetchval("SELECT count(*) FROM outbox")
    # For callers both are alike: the clock judges.
    for key in (told, untold):
        again = await caller.decide("cancel.brief", key, {"mark": "one."})
        assert (SUCCEEDED, False) == (again.status, again.replayed)
