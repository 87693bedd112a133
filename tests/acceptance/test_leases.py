"""Leases: what becomes of an attempt whose process dies, stands still, or is busy."""

import asyncio
import signal
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest

from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.database import Database
from decideonce_server.leases import LeaseKeeper
from decideonce_server.ledger import Key, Ledger, Reservation
from harness import make_token, new_key, write_catalog
from processes import children, free_address, kill, until
from scraping import scrape, total
from stage import ALONE, evaluations

SUCCEEDED = wire.DECISION_STATUS_SUCCEEDED
PROCESSING = wire.DECISION_STATUS_PROCESSING
ROW = """SELECT state, attempt, (SELECT count(*) FROM outbox) AS events, count(*) OVER () AS rows
    FROM ledger WHERE operation_key = $1"""


@pytest.fixture
def start(start_service, tmp_path) -> Callable[..., object]:
    """Give a function that starts a service; each applies the same catalog."""
    echo = {"policy": "echo", "time_budget": "30s", "default_wait": "20s", "max_attempts": 3}
    operations = {
        "lease.one": echo | {"lease": "1s"},
        "lease.two": echo | {"lease": "2s"},
        "lease.background": echo | {"lease": "1s", "execution": "background"},
    }
    catalog = write_catalog(tmp_path / "catalog", operations, {"echo": "echo_policy:decide"})

    def start(*arguments: str) -> object:
        return start_service("--catalog", str(catalog), *arguments)

    return start


async def test_decision_of_a_killed_worker_is_made_though_nobody_comes_back(
    database_url, observer, start, connect_caller
) -> None:
    """A worker that is killed in the middle of an evaluation leaves a decision that is there within two leases."""
    service = start()
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key = new_key()
    await caller.decide("lease.two", key, {"mark": "one.", "do": "sleep", "seconds": 0.5}, max_wait=0)
    await until(lambda: evaluations(service, "one."))
    kill(service, "worker")
    row = await until(lambda: decided(observer, key), within=4)
    assert (2, 2, 1, 1) == tuple(row)
    assert 2 == evaluations(service, "one.")


async def decided(observer, key):
    row = await observer.fetchrow(ROW, key)
    return row if row is not None and row["state"] != 1 else None


async def test_caller_who_waits_elsewhere_gets_the_decision_of_a_killed_worker(
    database_url, observer, start, connect_caller
) -> None:
    """A duplicate that waits on another instance takes over from a worker that was killed, and gets the decision."""
    first, second = start(ALONE), start(ALONE)
    token = await make_token(database_url, "acme")
    key, facts = new_key(), {"mark": "one.", "do": "sleep", "seconds": 0.5}
    await connect_caller(first, token).decide("lease.two", key, facts, max_wait=0)
    await until(lambda: evaluations(first, "one."))
    waiting = asyncio.ensure_future(connect_caller(second, token).decide("lease.two", key, facts))
    kill(first, "worker")
    async with asyncio.timeout(4):
        answer = await waiting
    assert (SUCCEEDED, False, 2) == (answer.status, answer.replayed, answer.provenance.attempt)
    assert (2, 2, 1, 1) == tuple(await decided(observer, key))


async def test_lease_of_a_killed_worker_runs_out_and_no_sooner(
    database_url, observer, start, connect_caller, tmp_path
) -> None:
    """A retry gets PROCESSING, and when to come back, as long as the lease lasts; then it takes over.

    aws-powertools/powertools-lambda-python#1038: a timed-out owner left its record in progress for ever.
    """
    first, second = start(ALONE), start(ALONE)
    token = await make_token(database_url, "acme")
    source = tmp_path / "source"
    key, facts = new_key(), {"mark": "one.", "do": "need", "source": str(source), "fault": "sleep", "seconds": 30}
    await connect_caller(first, token).decide("lease.two", key, facts, max_wait=0)
    await until(lambda: evaluations(first, "one."))
    kill(first, "worker")
    source.touch()
    caller, waits = connect_caller(second, token), []
    left = "SELECT extract(epoch FROM lease_expires_at - clock_timestamp()) FROM ledger WHERE operation_key = $1"
    while (lease_left := float(await observer.fetchval(left, key))) > 0.5:
        answer = await caller.decide("lease.two", key, facts, max_wait=0)
        assert (PROCESSING, 1) == (answer.status, await observer.fetchval("SELECT attempt FROM ledger"))
        assert 0 < answer.retry_after.ToTimedelta().total_seconds() <= lease_left
        waits.append(lease_left)
    assert waits
    assert 2 >= max(waits)
    answer = await caller.decide("lease.two", key, facts)
    assert (SUCCEEDED, 2) == (answer.status, answer.provenance.attempt)
    assert (2, 2, 1, 1) == tuple(await decided(observer, key))


async def test_late_owner_answers_with_the_winners_decision(
    database_url, observer, start, connect_caller, tmp_path
) -> None:
    """A process that stood still for longer than its lease records nothing, and its caller gets what the winner did.

    aws-powertools/powertools-lambda-python#8049: a second run was admitted, and the first overwrote what it had done.
    """
    metrics = free_address()
    first, second = start(ALONE, "--metrics", metrics), start(ALONE)
    token = await make_token(database_url, "acme")
    source = tmp_path / "source"
    key, facts = new_key(), {"mark": "one.", "do": "need", "source": str(source), "fault": "sleep", "seconds": 0.5}
    late = asyncio.ensure_future(connect_caller(first, token).decide("lease.one", key, facts))
    await until(lambda: evaluations(first, "one."))
    (worker,) = children(first, "worker")
    worker.send_signal(signal.SIGSTOP)
    try:
        source.touch()
        winner = await connect_caller(second, token).decide("lease.one", key, facts)
    finally:
        worker.send_signal(signal.SIGCONT)
    answer = await late
    assert (SUCCEEDED, False, 2) == (winner.status, winner.replayed, winner.provenance.attempt)
    assert (SUCCEEDED, True) == (answer.status, answer.replayed)
    assert winner.provenance == answer.provenance
    assert (2, 2, 1, 1) == tuple(await decided(observer, key))
    assert 1.0 == total(await scrape(metrics), "stale_completions_total")


async def test_busy_policy_keeps_its_lease(database_url, observer, start, connect_caller) -> None:
    """A policy that burns the CPU for three leases is evaluated once; statuses and other decisions stay prompt.

    agno-agi/agno PR#9512: heartbeats shared a loop with the work; it starved them, and the work ran twice.
    """
    service, other = start(), start()
    token = await make_token(database_url, "acme")
    caller, elsewhere = connect_caller(service, token), connect_caller(other, token)
    for one in (caller, elsewhere):
        await one.decide("lease.one", new_key())
    key = new_key()
    busy = asyncio.ensure_future(caller.decide("lease.one", key, {"mark": "one.", "do": "burn", "seconds": 10}))
    await until(lambda: evaluations(service, "one."))
    statuses, times, began = set(), [], time.monotonic()
    while not busy.done():
        for one in (caller, elsewhere):
            asked = time.monotonic()
            statuses.add((await one.status("lease.one", key)).status)
            answered = time.monotonic()
            await one.decide("lease.one", new_key())
            times.append((answered - asked, time.monotonic() - answered))
    answer = await busy
    assert time.monotonic() - began > 1.5
    assert (SUCCEEDED, False, 1) == (answer.status, answer.replayed, answer.provenance.attempt)
    assert 1 == evaluations(service, "one.") + evaluations(other, "one.")
    assert PROCESSING in statuses
    status_times, decide_times = (sorted(column) for column in zip(*times, strict=True))
    assert 0.3 > status_times[len(times) * 9 // 10]
    assert 0.5 > decide_times[len(times) * 9 // 10]


async def test_policy_that_crashes_is_tried_so_many_times_and_no_more(
    database_url, observer, start, connect_caller
) -> None:
    """A policy that crashes every time uses its attempts up; then the failure is final, replayed, and told once.

    vectorize-io/hindsight#2675: a job that killed its worker was tried 54 times.
    """
    service = start()
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key, facts = new_key(), {"mark": "one.", "do": "crash"}
    answers = [await caller.decide("lease.one", key, facts) for _ in range(6)]
    retryable, final = wire.DECISION_STATUS_FAILED_RETRYABLE, wire.DECISION_STATUS_FAILED_FINAL
    assert [retryable, retryable, final, final, final, final] == [answer.status for answer in answers]
    assert ["POLICY_CRASHED"] * 2 + ["ATTEMPTS_EXHAUSTED"] * 4 == [answer.failure.reason for answer in answers]
    assert [False] * 3 + [True] * 3 == [answer.replayed for answer in answers]
    assert 3 == evaluations(service, "one.")
    assert (final, 3, 1, 1) == tuple(await decided(observer, key))
    other = await caller.decide("lease.one", new_key())
    assert (SUCCEEDED, 1) == (other.status, other.provenance.attempt)


async def test_background_policy_that_crashes_is_tried_so_many_times_and_no_more(
    database_url, observer, start, connect_caller
) -> None:
    """Workers and the rescuer try a background decision as often as an operation allows, and not once more."""
    service = start()
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key = new_key()
    await caller.decide("lease.background", key, {"mark": "one.", "do": "crash"})
    row = await until(lambda: final(observer, key))
    assert (wire.DECISION_STATUS_FAILED_FINAL, 3, 1, 1) == tuple(row)
    assert 3 == evaluations(service, "one.")
    status = await caller.status("lease.background", key)
    assert "ATTEMPTS_EXHAUSTED" == status.failure.reason


async def final(observer, key):
    row = await observer.fetchrow(ROW, key)
    return row if row["state"] in (2, 4) else None


async def test_decision_that_kills_its_process_every_time_is_given_up(
    database_url, observer, start, connect_caller
) -> None:
    """Where whoever decides a key dies of it, each death uses an attempt up, and what follows them gives the key up."""
    service = start()
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key = new_key()
    await caller.decide("lease.one", key, {"mark": "one.", "do": "sleep", "seconds": 30}, max_wait=0)
    for attempt, command in ((1, "worker"), (2, "housekeep"), (3, "housekeep")):
        await until(lambda attempt=attempt: evaluations(service, "one.") == attempt)
        kill(service, command)
    assert (wire.DECISION_STATUS_FAILED_FINAL, 3, 1, 1) == tuple(await until(lambda: final(observer, key)))
    assert 3 == evaluations(service, "one.")


async def test_lease_is_renewed_while_the_loop_is_blocked(database) -> None:
    """A process whose event loop is blocked for several leases keeps the lease of its attempt."""
    ledger, lease = Ledger(database), timedelta(milliseconds=300)
    (attempt,) = await ledger.reserve([reservation(lease=lease)])
    leases = LeaseKeeper(Database(database.url, pool_size=1))
    leases.start()
    try:
        with leases.renewing(attempt.record, lease, timedelta(seconds=10)):
            end = time.monotonic() + 4 * lease.total_seconds()
            while time.monotonic() < end:
                pass
            (record,) = await ledger.read([attempt.record.key])
    finally:
        await leases.close()
    assert not record.is_abandoned


async def test_lease_begins_when_its_statement_does(observer) -> None:
    """A lease is counted from the reservation's own moment, though its transaction began long before.

    sourcegraph/sourcegraph-public-snapshot PR#10751: now() stood still in a transaction.
    """
    lease = timedelta(seconds=2)
    async with observer.transaction():
        await observer.execute("SELECT pg_sleep(1)")
        await Ledger(_Session(observer)).reserve([reservation(lease=lease)])
        left = await observer.fetchval("SELECT lease_expires_at - clock_timestamp() FROM ledger")
    assert timedelta(seconds=1.9) < left <= lease


class _Session:
    """Runs statements on one connection."""

    def __init__(self, connection) -> None:
        self._connection = connection

    async def run(self, statement, **parameters):
        sql, names = statement.compiled
        return await self._connection.fetch(sql, *[parameters[name] for name in names])


def reservation(lease: timedelta) -> Reservation:
    return Reservation(
        key=Key("acme", "lease.one", new_key()),
        decision_id=uuid.uuid4(),
        fingerprint_version=1,
        fingerprint=b"f" * 32,
        operation_version=1,
        policy_id="echo",
        policy_version=1,
        lease=lease,
        background=False,
        facts=b"{}",
    )
