"""One service for all tests of a module that do not disturb each other, and publishers for those that need some.

A module that wants it has a module-scoped fixture `catalog`: operations and policies, as `write_catalog` takes them.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from sqlalchemy.engine import URL

from collector import Collector
from conftest import connect
from decideonce_server.embedded import EmbeddedPostgres
from harness import Caller, ServiceProcess, make_token, url_text, write_catalog
from processes import free_address
from publishing import PublisherProcess
from stage import ALONE, TENANT, LedgerView, Stage

_numbers = itertools.count()


@pytest.fixture(scope="module")
def flags() -> list[str]:
    """Give the flags that a module's service has besides; a module may have its own."""
    return []


@pytest.fixture(scope="module")
def metrics_address() -> str:
    """Give a free address."""
    return free_address()


@pytest.fixture(scope="module")
def stage(
    postgres: EmbeddedPostgres,
    template: str,
    tmp_path_factory: pytest.TempPathFactory,
    catalog: tuple[dict, dict],
    flags: list[str],
) -> Iterator[Stage]:
    """Give a module's service."""
    name = f"module_{next(_numbers)}"
    url = postgres.url(name)
    directory = tmp_path_factory.mktemp(name)

    async def execute(statement: str) -> None:
        admin = await connect(postgres.url("postgres"))
        await admin.execute(statement)
        await admin.close()

    async def make() -> str:
        await execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return await make_token(url, TENANT)

    token = asyncio.run(make())
    write_catalog(directory / "catalog", *catalog)
    arguments = ["--database-url", url_text(url), "--catalog", str(directory / "catalog"), ALONE, *flags]
    service = ServiceProcess(directory / "service.log", arguments)
    made = Stage(url, service, token, directory)
    try:
        service.wait_until_ready()
        yield made
    finally:
        for process in (service, *made.others):
            process.kill()
        asyncio.run(execute(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
async def caller(stage: Stage) -> AsyncIterator[Caller]:
    """Give a caller of the module's service that may do everything."""
    async with grpc.aio.insecure_channel(stage.service.address) as channel:
        yield Caller(channel, stage.token)


@pytest.fixture
async def view(stage: Stage) -> AsyncIterator[LedgerView]:
    """Give a view of what the module's service wrote."""
    connection = await connect(stage.url)
    try:
        yield LedgerView(connection, stage.url)
    finally:
        await connection.close()


@pytest.fixture
async def publish(database_url: URL, tmp_path: Path) -> AsyncIterator[Callable[..., PublisherProcess]]:
    """Give a function that starts a publisher on the test's database: `publish("nats://…", "--flag")`.

    It is `decideonce housekeep`, or with `lease` a publisher alone, whose lease has so many seconds.
    """
    processes: list[PublisherProcess] = []

    def start(events_url: str, *arguments: str, lease: float | None = None) -> PublisherProcess:
        log = tmp_path / f"publisher-{len(processes)}.log"
        processes.append(PublisherProcess(database_url, log, "--events", events_url, *arguments, lease=lease))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """Give a collector, to which services send what they have at once."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
