"""Postgres in trouble: what callers see meanwhile, and that nothing that was acknowledged is lost."""

import asyncio
import contextlib
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from cluster import Cluster, cluster_directory, failover_url
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
    table_policy,
    url_text,
    write_catalog,
)

OPERATION = "credit.check"
UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "LEDGER_UNAVAILABLE", True)
# How soon the service must answer again once Postgres does.
BACK_WITHIN_S = 5.0
CALLERS = 8


class Load:
    """Callers that decide one key after another, and resend each until it is decided."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._is_over = False
        self.acknowledged: dict[str, tuple[bytes, bytes]] = {}
        self.errors: list[CallError] = []
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Call until told that it is over; each caller's last key is decided too."""

        async def call() -> None:
            while not self._is_over:
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
                await asyncio.sleep(0.2)
                continue
            if answer.status == wire.DECISION_STATUS_SUCCEEDED:
                self.acknowledged[key] = recorded(answer)
                self._news.set()
                return

    def end(self) -> None:
        """Have each caller end with the key that it is at."""
        self._is_over = True

    async def until_acknowledged(self, count: int, within: float = 20.0) -> float:
        """Wait for so many more decisions, and tell how long that took, in seconds."""
        began, wanted = time.monotonic(), len(self.acknowledged) + count
        await self._until(lambda: len(self.acknowledged) >= wanted, within)
        return time.monotonic() - began

    async def until_refused(self, count: int = 1) -> None:
        """Wait for so many more errors."""
        wanted = len(self.errors) + count
        await self._until(lambda: len(self.errors) >= wanted, 20.0)

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


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[None]:
    """Put a file system of this size at a directory."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)
