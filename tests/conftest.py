"""Fixtures that several kinds of test share: a PostgreSQL of the run's own, and a fresh database per test."""

import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest
from sqlalchemy.engine import URL

from decideonce_server import migrate
from decideonce_server.database import Database
from decideonce_server.embedded import EmbeddedPostgres
from harness import Caller, ServiceProcess, url_text

POLICIES = Path(__file__).parent / "policies"
TEMPLATE = "template_decideonce"

# Nothing is to survive a crash of the machine here, so nothing waits for its disk.
FAST = ("fsync = off", "full_page_writes = off", "synchronous_commit = off")


def pytest_configure() -> None:
    """Let every process of a test find the tests' policies, evaluators too."""
    os.environ["PYTHONPATH"] = str(POLICIES)


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """Give a PostgreSQL of this run's own."""
    # Not under pytest's own directory: that is closed to the user whom the server runs as where the tests run as root.
    with tempfile.TemporaryDirectory(prefix="decideonce-") as directory:
        Path(directory).chmod(0o755)
        server = EmbeddedPostgres(Path(directory))
        try:
            yield server
        finally:
            server.stop()


async def connect(url: URL) -> asyncpg.Connection:
    """Connect beside the service, as an observer would."""
    return await asyncpg.connect(
        user=url.username,
        database=url.database,
        host=str(url.query["host"]),
        port=str(url.query["port"]),
    )


@pytest.fixture(scope="session")
def template(postgres: EmbeddedPostgres) -> str:
    """Give the name of a database that has the schema and nothing else."""

    async def make() -> None:
        admin = await connect(postgres.url("postgres"))
        for assignment in FAST:
            await admin.execute(f"ALTER SYSTEM SET {assignment}")
        await admin.execute("SELECT pg_reload_conf()")
        await admin.execute(f"CREATE DATABASE {TEMPLATE}")
        await admin.close()
        await migrate.migrate(postgres.url(TEMPLATE))

    asyncio.run(make())
    return TEMPLATE


_numbers = itertools.count()


@pytest.fixture
async def database_url(postgres: EmbeddedPostgres, template: str) -> AsyncIterator[URL]:
    """Give a fresh database with the schema."""
    name = f"test_{next(_numbers)}"
    admin = await connect(postgres.url("postgres"))
    await admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield postgres.url(name)
    finally:
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()


@pytest.fixture
async def database(database_url: URL) -> AsyncIterator[Database]:
    """Give the service's own access to a fresh database."""
    database = Database(database_url, pool_size=5)
    try:
        yield database
    finally:
        await database.close()


@pytest.fixture
async def observer(database_url: URL) -> AsyncIterator[asyncpg.Connection]:
    """Give a session beside the service's, to see what it wrote."""
    connection = await connect(database_url)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
async def start_service(database_url: URL, tmp_path: Path) -> AsyncIterator[Callable[..., ServiceProcess]]:
    """Give a function that starts a real service process on the test's database: `start_service("--flag", …)`."""
    services: list[ServiceProcess] = []

    def start(*arguments: str, **environment: str) -> ServiceProcess:
        log = tmp_path / f"service-{len(services)}.log"
        service = ServiceProcess(log, ["--database-url", url_text(database_url), *arguments], environment)
        services.append(service)
        service.wait_until_ready()
        return service

    try:
        yield start
    finally:
        for service in services:
            service.kill()


@pytest.fixture
async def connect_caller() -> AsyncIterator[Callable[..., Caller]]:
    """Give a function that makes a caller of a service: `connect_caller(service, token)`."""
    async with contextlib.AsyncExitStack() as channels:

        def connect(service: ServiceProcess, token: str | None) -> Caller:
            channel = grpc.aio.insecure_channel(service.address)
            channels.push_async_callback(channel.close)
            return Caller(channel, token)

        yield connect


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[Any], Any]]:
    """Give a function that gives the broker of a kind, started when it is first asked for."""
    brokers: dict[Any, Any] = {}

    def broker(kind: Any) -> Any:
        if kind not in brokers:
            brokers[kind] = kind()
        return brokers[kind]

    try:
        yield broker
    finally:
        for one in brokers.values():
            one.close()
