"""The service as it is measured: everything on, on a PostgreSQL of its own that waits for its disk at every commit.

Callers show a token; facts are judged by their schema and fingerprinted; the example catalog's largest policy decides;
each decision writes its provenance and its events into the outbox, and metrics are kept and served. Nobody takes the
events out, unless they are told to be published.
"""

import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import grpc
import psutil
from sqlalchemy.engine import URL

from bench.echo import DECIDE
from bench.loader import GRPC_HEADERS, PLACEHOLDER, Keys, Target, environment
from bench.usage import Meter
from conftest import connect
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.embedded import EmbeddedPostgres
from decideonce_server.migrate import migrate
from harness import Caller, ServiceProcess, decide_request, make_token, new_key, url_text
from processes import children

CATALOG = Path(__file__).parents[2] / "catalog"
# The example catalog's largest policy, with two sub-decisions; on these facts it tells an event of its own.
OPERATION = "credit.approve-loan"
POLICY = "loan-approval"
FACTS = json.loads((CATALOG / "facts/loan-car.json").read_text())
TENANT = "acme"
# A client of pgbench has a connection of its own.
CONNECTIONS_MAX = 500
# The limits that keep a tenant from flooding a service are no part of what is measured.
NO_LIMITS = ("--new-keys-per-second", "1000000", "--attempts-max", "10000", "--attempts-per-tenant", "10000")


@dataclass(frozen=True)
class Subject:
    """A running service, and what measurements need of it."""

    url: URL
    postgres: EmbeddedPostgres
    observer: asyncpg.Connection
    meter: Meter
    service: ServiceProcess
    target: Target
    directory: Path
    token: str
    # The file of an answer, under a key of its own.
    response: Path
    keys: Keys = field(default_factory=Keys)

    @property
    def root(self) -> psutil.Process:
        """The process under which all of the service runs."""
        return psutil.Process(self.service.process.pid)

    async def settle(self) -> None:
        """Empty the outbox, as a publisher would have."""
        await self.observer.execute("TRUNCATE outbox")


@asynccontextmanager
async def subject(workers: int, *arguments: str) -> AsyncIterator[Subject]:
    """Run a service with so many workers; `arguments` are further ones of `serve`."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decideonce-bench-")))
        # The server runs as a user of its own where this runs as root.
        directory.chmod(0o755)
        postgres = await _postgres(directory / "data")
        stack.callback(postgres.stop)
        url = await postgres.create_database()
        await migrate(url)
        observer = await connect(url)
        stack.push_async_callback(observer.close)
        yield await measured_on(stack, postgres, url, observer, directory, workers, arguments)


async def _postgres(data: Path) -> EmbeddedPostgres:
    """Start a PostgreSQL with its own defaults, but for how many may connect: that holds from the next start on."""
    postgres = EmbeddedPostgres(data)
    admin = await connect(postgres.url("postgres"))
    await admin.execute(f"ALTER SYSTEM SET max_connections = {CONNECTIONS_MAX}")
    await admin.close()
    postgres.stop()
    return EmbeddedPostgres(data)


async def measured_on(
    stack: AsyncExitStack,
    postgres: EmbeddedPostgres,
    url: URL,
    observer: asyncpg.Connection,
    directory: Path,
    workers: int,
    arguments: Sequence[str] = (),
) -> Subject:
    """Start the service on a database that is there; the stack's end stops it."""
    token = await make_token(url, TENANT, ("decide",))
    request = directory / "request.bin"
    request.write_bytes(decide_request(OPERATION, PLACEHOLDER, FACTS).SerializeToString())
    service = ServiceProcess(
        directory / "service.log",
        [
            *("--database-url", url_text(url), "--catalog", str(CATALOG), "--workers", str(workers)),
            *("--metrics", "127.0.0.1:0", "--events", "none", *NO_LIMITS, *arguments),
        ],
        environment(PYTHONPATH=str(CATALOG / "python")),
    )
    stack.callback(service.kill)
    address = service.wait_until_ready()
    headers = (*GRPC_HEADERS, f"authorization:Bearer {token}")
    target = Target(address, DECIDE, request, headers, lambda: children(service, "worker"))
    response = directory / "response.bin"
    response.write_bytes(await _decide_once(address, token))
    return Subject(url, postgres, observer, await Meter.of(observer), service, target, directory, token, response)


async def _decide_once(address: str, token: str) -> bytes:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await Caller(channel, token).decide(OPERATION, new_key(), FACTS)
    assert wire.DECISION_STATUS_SUCCEEDED == answer.status, answer
    return answer.SerializeToString()
