"""Postgres in trouble: what callers see meanwhile, and that nothing that was acknowledged is lost."""

import asyncio
import contextlib
import re
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from cluster import Cluster, cluster_directory, failover_url
from conftest import connect
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.migrate import migrate
from harness import (
    Caller,
    CallError,
    ServiceProcess,
    call_error,
    make_token,
    new_key,
    recorded,
    refused,
    table_policy,
    url_text,
    write_catalog,
)

OPERATION = "credit.check"
UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "LEDGER_UNAVAILABLE", True)
# How soon the service must answer again once Postgres does.
BACK_WITHIN_S = 5.0
CALLERS = 8
# Whether this process may mount file systems (CAP_SYS_ADMIN).
CAN_MOUNT = bool(int(re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16) >> 21 & 1)


class Load:
    """Callers that decide one key after another, and resend each until it is decided."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._over = asyncio.Event()
        self.acknowledged: dict[str, tuple[bytes, bytes]] = {}
        self.errors: list[CallError] = []
        self.unfinished = 0
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Call until told that it is over; each caller's last key is decided too."""

        async def call() -> None:
            while not self._over.is_set():
                await self._decide(new_key())

        async with asyncio.TaskGroup() as callers:
            for _ in range(CALLERS):
                callers.create_task(call())

    async def _decide(self, key: str) -> None:
        while True:
            try:
                answer = await self._caller.decide(OPERATION, key)
            except grpc.RpcError as error:
                self.errors.append(call_error(error))
                self._news.set()
                # What the service asks for; a caller of its own would do so too.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), 0.2)
                continue
            if answer.status == wire.DECISION_STATUS_SUCCEEDED:
                self.acknowledged[key] = recorded(answer)
                self._news.set()
                return
            self.unfinished += 1
            self._news.set()

    def end(self) -> None:
        """Have each caller end with the key that it is at."""
        self._over.set()

    async def until_acknowledged(self, count: int, within: float = 20.0) -> float:
        """Wait for so many more decisions, and tell how long that took, in seconds."""
        began, wanted = time.monotonic(), len(self.acknowledged) + count
        await self._until(lambda: len(self.acknowledged) >= wanted, within)
        return time.monotonic() - began

    async def until_refused(self, count: int = 1) -> None:
        """Wait for so many more errors."""
        wanted = len(self.errors) + count
        await self._until(lambda: len(self.errors) >= wanted, 20.0)

    async def until_held_up(self, count: int) -> None:
        """Wait for so many more answers that are no decision: errors, or that it is being made."""
        wanted = len(self.errors) + self.unfinished + count
        await self._until(lambda: len(self.errors) + self.unfinished >= wanted, 20.0)

    async def _until(self, is_so: Callable[[], bool], within: float) -> None:
        async with asyncio.timeout(within):
            while not is_so():
                self._news.clear()
                await self._news.wait()

    def assert_retryable(self) -> None:
        """Assert that all errors so far told the caller to come back."""
        kinds = Counter((error.code, error.reason, error.retry_after) for error in self.errors)
        assert set(kinds) <= {UNAVAILABLE}, kinds


@contextlib.asynccontextmanager
async def load(caller: Caller) -> AsyncIterator[Load]:
    """Have callers call while the block runs."""
    made = Load(caller)
    running = asyncio.ensure_future(made.run())
    try:
        await made.until_acknowledged(50)
        yield made
        made.end()
        async with asyncio.timeout(30):
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def assert_kept(caller: Caller, acknowledged: dict[str, tuple[bytes, bytes]]) -> None:
    """Assert that each key is answered with what was acknowledged."""
    for key, first in acknowledged.items():
        answer = await caller.decide(OPERATION, key)
        assert (True, first) == (answer.replayed, recorded(answer))


async def assert_clean(cluster: Cluster) -> None:
    """Assert that the service has sessions, and that none of them idles in a transaction."""
    observer = await cluster.connect()
    states = [
        row["state"]
        for row in await observer.fetch("SELECT state FROM pg_stat_activity WHERE application_name = 'decideonce'")
    ]
    await observer.close()
    assert states
    assert not [state for state in states if state.startswith("idle in")]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Give a directory for clusters."""
    with cluster_directory() as made:
        yield made


@pytest.fixture
def cluster(directory: Path) -> Iterator[Cluster]:
    """Give a server of the test's own, with the schema."""
    made = Cluster.create(directory / "primary")
    try:
        asyncio.run(migrate(made.url))
        yield made
    finally:
        made.destroy()


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    """Give a catalog of one plain operation and one that does what facts say."""
    operations = {
        # A key whose reservation got lost on the way back is free when its lease is over.
        OPERATION: {"policy": "table", "lease": "2s"},
        "echo.inline": {"policy": "echo", "time_budget": "10s", "default_wait": "20s", "lease": "1s"},
    }
    return write_catalog(tmp_path / "catalog", operations, {"table": table_policy("LOW"), "echo": "echo_policy:decide"})


@pytest.fixture
def serve(tmp_path: Path, catalog: Path) -> Iterator[Callable[..., ServiceProcess]]:
    """Give a function that starts a service on a database: `serve(url, "--flag", …)`."""
    services: list[ServiceProcess] = []

    def start(url, *flags: str) -> ServiceProcess:
        arguments = ["--database-url", url_text(url), "--catalog", str(catalog), *flags]
        services.append(ServiceProcess(tmp_path / f"service-{len(services)}.log", arguments))
        services[-1].wait_until_ready()
        return services[-1]

    try:
        yield start
    finally:
        for service in services:
            service.kill()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_restart_under_load(cluster, serve, connect_caller, mode) -> None:
    """A restart of Postgres, in good order or not, costs callers retries and loses nothing that they were told."""
    caller = connect_caller(serve(cluster.url), await make_token(cluster.url, "acme"))
    async with load(caller) as calls:
        await asyncio.to_thread(cluster.stop, mode)
        await calls.until_refused()
        await asyncio.to_thread(cluster.start)
        assert BACK_WITHIN_S > await calls.until_acknowledged(CALLERS)
    calls.assert_retryable()
    await assert_kept(caller, calls.acknowledged)
    await assert_clean(cluster)


async def test_read_only_server(cluster, serve, connect_caller) -> None:
    """A server that refuses writes is an outage that ends by itself; what is recorded can be read meanwhile."""
    caller = connect_caller(serve(cluster.url), await make_token(cluster.url, "acme"))
    done = new_key()
    first = await caller.decide(OPERATION, done)
    observer = await cluster.connect()
    async with load(caller) as calls:
        await observer.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await observer.execute("SELECT pg_reload_conf()")
        await calls.until_refused(CALLERS)
        status = await caller.status(OPERATION, done)
        assert recorded(first) == recorded(status)
        await observer.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await observer.execute("SELECT pg_reload_conf()")
        assert BACK_WITHIN_S > await calls.until_acknowledged(CALLERS)
    await observer.close()
    calls.assert_retryable()
    await assert_kept(caller, calls.acknowledged)
    await assert_clean(cluster)


@pytest.mark.parametrize("is_frozen", [False, True])
async def test_failover_to_a_synchronous_standby(directory, cluster, serve, connect_caller, is_frozen) -> None:
    """A primary that dies, or hangs, and its standby's promotion lose no acknowledged decision.

    A host that hangs takes connections still, and answers nothing.
    """
    standby = cluster.standby(directory / "standby")
    try:
        caller = connect_caller(serve(failover_url(cluster, standby)), await make_token(cluster.url, "acme"))
        async with load(caller) as calls:
            if is_frozen:
                cluster.freeze()
            else:
                await asyncio.to_thread(cluster.stop, "immediate")
                await calls.until_refused()
            await asyncio.to_thread(standby.promote)
            # What hangs is given up by the service's own clock.
            assert (15.0 if is_frozen else BACK_WITHIN_S) > await calls.until_acknowledged(CALLERS)
            await calls.until_acknowledged(100)
        calls.assert_retryable()
        await assert_kept(caller, calls.acknowledged)
        await assert_clean(standby)
    finally:
        standby.destroy()


async def test_no_server_that_takes_writes(cluster, serve, connect_caller) -> None:
    """With a failover URL, the time in which no server takes writes is an outage that ends by itself.

    jackc/pgx#1831
    """
    url = failover_url(cluster, cluster)
    caller = connect_caller(serve(url), await make_token(cluster.url, "acme"))
    observer = await cluster.connect()
    async with load(caller) as calls:
        await observer.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await observer.execute("SELECT pg_reload_conf()")
        await calls.until_refused(3 * CALLERS)
        await observer.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await observer.execute("SELECT pg_reload_conf()")
        assert BACK_WITHIN_S > await calls.until_acknowledged(CALLERS)
    await observer.close()
    calls.assert_retryable()
    await assert_kept(caller, calls.acknowledged)


@pytest.mark.parametrize("wal_segment", ["1", "16"])
async def test_disk_full(directory, serve, connect_caller, wal_segment) -> None:
    """A full disk is an outage, whether Postgres survives it or not; with room again, the service goes on.

    With small segments of the WAL, it is that for which there is no room, and Postgres goes down.
    """
    with small_disk(directory) as disk:
        cluster = Cluster.create(disk / "data", "--wal-segsize", wal_segment)
        try:
            await migrate(cluster.url)
            caller = connect_caller(serve(cluster.url), await make_token(cluster.url, "acme"))
            async with load(caller) as calls:
                ballast = disk / "ballast"
                fill(ballast)
                # Where there is still room for reservations, callers are told that their decisions are being made.
                await calls.until_held_up(CALLERS)
                ballast.unlink()
                if not cluster.is_running:
                    await asyncio.to_thread(cluster.start)
                assert BACK_WITHIN_S > await calls.until_acknowledged(CALLERS)
            calls.assert_retryable()
            assert "No space left on device" in cluster.log.read_text()
            await assert_kept(caller, calls.acknowledged)
            await assert_clean(cluster)
        finally:
            cluster.destroy()


if not CAN_MOUNT:
    # The next shows the same, of one table.
    del test_disk_full


async def test_disk_full_for_events(cluster, serve, connect_caller) -> None:
    """Where there is no room for its events, a decision isn't recorded; with room again, the same call makes it."""
    observer = await cluster.connect()
    table = cluster.directory / await observer.fetchval("SELECT pg_relation_filepath('outbox')")
    await observer.close()
    cluster.stop()
    assert 0 == table.stat().st_size
    empty = table.rename(table.with_suffix(".empty"))
    table.symlink_to("/dev/full")
    cluster.start()
    caller = connect_caller(serve(cluster.url), await make_token(cluster.url, "acme"))
    key = new_key()
    error = await refused(caller.decide(OPERATION, key, max_wait=10))
    assert UNAVAILABLE == (error.code, error.reason, error.retry_after)
    assert "No space left on device" in cluster.log.read_text()
    await asyncio.to_thread(cluster.stop)
    empty.rename(table)
    await asyncio.to_thread(cluster.start)
    began = time.monotonic()
    answer = None
    while answer is None or answer.status != wire.DECISION_STATUS_SUCCEEDED:
        with contextlib.suppress(grpc.RpcError):
            answer = await caller.decide(OPERATION, key)
        assert BACK_WITHIN_S > time.monotonic() - began
    observer = await cluster.connect()
    assert 1 == await observer.fetchval("SELECT count(*) FROM outbox")
    await observer.close()


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Give a directory on a file system of its own, with little room."""
    disk = directory / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m,mode=777", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def fill(file: Path) -> None:
    """Make a file that takes all the room that is left."""
    with file.open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))


async def slow_down(observer, event: str, seconds: float) -> None:
    """Have the ledger's statements take this long."""
    await observer.execute(
        f"""CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_sleep({seconds}); RETURN NEW; END $$"""
    )
    await observer.execute(f"CREATE TRIGGER slow BEFORE {event} ON ledger FOR EACH ROW EXECUTE FUNCTION slow()")


async def test_exhausted_pool(database_url, observer, serve, connect_caller) -> None:
    """A call that gets no connection within 3 s is told to come back; the others go on, and so does the service."""
    caller = connect_caller(serve(database_url, "--pool-size", "1"), await make_token(database_url, "acme"))
    await caller.decide(OPERATION, new_key())
    await slow_down(observer, "INSERT", 4)
    results = await asyncio.gather(
        *(caller.decide(OPERATION, new_key(), max_wait=0) for _ in range(4)), return_exceptions=True
    )
    errors = [call_error(result) for result in results if isinstance(result, grpc.RpcError)]
    assert {UNAVAILABLE} == {(error.code, error.reason, error.retry_after) for error in errors}
    assert 0 < len(errors) < len(results)
    await observer.execute("DROP TRIGGER slow ON ledger")
    answer = await caller.decide(OPERATION, new_key())
    assert wire.DECISION_STATUS_SUCCEEDED == answer.status


async def test_statement_timeout(database_url, observer, serve, connect_caller) -> None:
    """A statement that runs for more than 5 s is ended, its call told to come back; the same call then decides."""
    caller = connect_caller(serve(database_url), await make_token(database_url, "acme"))
    await slow_down(observer, "INSERT", 60)
    key = new_key()
    error = await refused(caller.decide(OPERATION, key))
    assert UNAVAILABLE == (error.code, error.reason, error.retry_after)
    assert 0 == await observer.fetchval("SELECT count(*) FROM ledger")
    await observer.execute("DROP TRIGGER slow ON ledger")
    answer = await caller.decide(OPERATION, key)
    assert (wire.DECISION_STATUS_SUCCEEDED, False) == (answer.status, answer.replayed)


@pytest.mark.parametrize("is_held_on", [False, True])
async def test_lock_timeout_while_completing(database_url, observer, serve, connect_caller, is_held_on) -> None:
    """A decision whose row somebody locks is recorded when the lock is gone, or left to the next attempt if it stays.

    The lease is 1 s: an attempt that can't record within it tells its caller to come back.
    """
    caller = connect_caller(serve(database_url, "--no-housekeeping"), await make_token(database_url, "acme"))
    key, facts = new_key(), {"do": "sleep", "seconds": 1}
    call = asyncio.ensure_future(caller.decide("echo.inline", key, facts))
    blocker = await connect(database_url)
    transaction = blocker.transaction()
    async with asyncio.timeout(10):
        while not await blocker.fetchval("SELECT count(*) FROM ledger WHERE operation_key = $1", key):
            pass
    await transaction.start()
    await blocker.execute("SELECT FROM ledger WHERE operation_key = $1 FOR UPDATE", key)
    if is_held_on:
        error = await refused(call)
        assert UNAVAILABLE == (error.code, error.reason, error.retry_after)
        await transaction.rollback()
        answer = await caller.decide("echo.inline", key, facts)
        assert (wire.DECISION_STATUS_SUCCEEDED, 2) == (answer.status, answer.provenance.attempt)
    else:
        async with asyncio.timeout(10):
            while not await observer.fetchval(WAITS_TO_COMPLETE):
                pass
        await transaction.rollback()
        answer = await call
        assert (wire.DECISION_STATUS_SUCCEEDED, 1) == (answer.status, answer.provenance.attempt)
    await blocker.close()
    assert 1 == await observer.fetchval("SELECT count(*) FROM outbox")


WAITS_TO_COMPLETE = """SELECT count(*) FROM pg_stat_activity
    WHERE wait_event_type = 'Lock' AND query LIKE '/* complete */%'"""
