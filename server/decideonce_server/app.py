"""The composition root: it alone knows every part, and puts them together."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server

from decideonce.v1.catalog_pb2_grpc import add_CatalogServiceServicer_to_server
from decideonce.v1.decision_service_pb2_grpc import add_DecisionServiceServicer_to_server
from decideonce_server.apply import Apply
from decideonce_server.attempts import Attempts
from decideonce_server.auth import Authenticator, AuthInterceptor, Role
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.catalog_reader import CatalogReader
from decideonce_server.catalog_servicer import CatalogServicer
from decideonce_server.database import Database, DatabaseUrl, database_url
from decideonce_server.decide import Decide
from decideonce_server.due_work import BackgroundWorker
from decideonce_server.embedded import EmbeddedPostgres
from decideonce_server.evaluator import Evaluators
from decideonce_server.idempotency import IdempotencyInterceptor
from decideonce_server.leases import LeaseKeeper
from decideonce_server.ledger import Ledger
from decideonce_server.ledger_catalog import CatalogStore
from decideonce_server.ledger_tokens import TokenStore
from decideonce_server.migrate import check_schema, migrate
from decideonce_server.reserve import Reserve
from decideonce_server.servicer import DecisionServicer
from decideonce_server.settings import DEV_TOKEN_FILE, Settings, address
from decideonce_server.status import StatusInterceptor
from decideonce_server.telemetry import TelemetryInterceptor
from decideonce_server.waiting import Waiters
from decideonce_server.wire import SERVICES

DEV_TENANT = "dev"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a serving process is made of."""

    database: Database
    evaluators: Evaluators
    tokens: TokenStore
    store: CatalogStore
    catalog: CatalogReader
    ledger: Ledger
    leases: LeaseKeeper
    attempts: Attempts
    waiters: Waiters
    reserve: Reserve
    decide: Decide
    worker: BackgroundWorker
    apply: Apply


def assemble(url: DatabaseUrl, settings: Settings) -> Parts:
    """Make the parts; nothing is started yet."""
    database = Database(url, pool_size=settings.pool_size)
    evaluators = Evaluators(size_max=settings.evaluators)
    store = CatalogStore(database)
    catalog = CatalogReader(store)
    ledger = Ledger(database)
    attempts = Attempts()
    waiters = Waiters(ledger)
    reserve = Reserve(ledger, catalog)
    leases = LeaseKeeper(Database(url, pool_size=1))
    decide = Decide(ledger, catalog, evaluators, leases)
    return Parts(
        database=database,
        evaluators=evaluators,
        tokens=TokenStore(database),
        store=store,
        catalog=catalog,
        ledger=ledger,
        leases=leases,
        attempts=attempts,
        waiters=waiters,
        reserve=reserve,
        decide=decide,
        worker=BackgroundWorker(ledger, reserve, decide, attempts, waiters),
        apply=Apply(store, evaluators),
    )


def interceptors(parts: Parts) -> list[grpc.aio.ServerInterceptor]:
    """Give the interceptor chain, the outermost first."""
    return [
        StatusInterceptor(),  # whatever is raised below becomes a status
        TelemetryInterceptor(),  # counts refusals too
        AuthInterceptor(Authenticator(parts.tokens)),  # before anything is looked up
        IdempotencyInterceptor(  # reserves for callers that may
            parts.reserve,
            parts.catalog,
            parts.attempts,
            parts.waiters,
            parts.worker,
        ),
    ]


def _serve_metrics(listen: str) -> None:
    host, port = address(listen, "--metrics")
    start_http_server(port, host)
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then drain and stop.

    Raises:
        InvalidSetting, UnknownSchema, InvalidCatalog, LedgerUnavailable: it can't begin.
    """
    settings.check()
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    if settings.metrics is not None:
        _serve_metrics(settings.metrics)
    given_url = None if settings.database_url is None else database_url(settings.database_url)
    async with postgres(given_url, settings.data_dir) as url:
        parts = assemble(url, settings)
        async with _running(parts, settings):
            server, port, healthy = await _start_server(parts, settings)
            print(f"decideonce ready on {address(settings.listen, '--listen')[0]}:{port}", flush=True)  # noqa: T201  # whoever started it reads this
            await stopping.wait()
            log.info("stopping", drain_seconds=settings.drain.total_seconds())
            await healthy.enter_graceful_shutdown()
            await server.stop(settings.drain.total_seconds())
            left = await parts.attempts.drain(settings.drain)
            log.info("stopped", attempts_left=left)


@asynccontextmanager
async def postgres(given: DatabaseUrl | None, data_dir: Path) -> AsyncIterator[DatabaseUrl]:
    """Give the database's URL: the given one, checked, or the embedded one's, brought up to date.

    Raises:
        UnknownSchema: the given one doesn't have the schema that this program needs.
        OSError: it can't be reached.
    """
    if given is not None:
        await check_schema(given)
        yield given
        return
    embedded = await asyncio.to_thread(EmbeddedPostgres, data_dir)
    try:
        url = await embedded.create_database()
        await migrate(url)
        yield url
    finally:
        await asyncio.to_thread(embedded.stop)


@asynccontextmanager
async def _running(parts: Parts, settings: Settings) -> AsyncIterator[None]:
    """Run what runs beside the server."""
    loops: list[asyncio.Task[None]] = []
    try:
        await parts.evaluators.start()
        parts.leases.start()
        if settings.database_url is None:
            await _make_dev_token(parts.tokens, settings.data_dir)
        if settings.catalog is not None:
            applied = await parts.apply.apply(read_catalog(settings.catalog), applied_by="serve --catalog")
            log.info("catalog applied", revision=applied.revision, changes=len(applied.changes))
        await parts.catalog.refresh()
        loops = [_forever(parts.catalog.run()), _forever(parts.worker.run())]
        yield
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await parts.waiters.close()
        await parts.leases.close()
        await parts.evaluators.close()
        await parts.database.close()


def _forever(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a loop that must not end; a defect in it ends the process, so that whoever supervises it knows."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a loop ended with a defect", exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task


async def _start_server(parts: Parts, settings: Settings) -> tuple[grpc.aio.Server, int, health.aio.HealthServicer]:
    server = grpc.aio.server(interceptors=interceptors(parts), options=[("grpc.so_reuseport", 0)])
    add_DecisionServiceServicer_to_server(
        DecisionServicer(parts.decide, parts.ledger, parts.catalog, parts.waiters), server
    )
    add_CatalogServiceServicer_to_server(CatalogServicer(parts.apply, parts.store, parts.catalog), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    names = [service.full_name for service in SERVICES]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    if settings.tls_certificate is not None and settings.tls_key is not None:
        pair = (settings.tls_key.read_bytes(), settings.tls_certificate.read_bytes())
        port = server.add_secure_port(settings.listen, grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port(settings.listen)
    await server.start()
    for name in ("", *names):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, port, healthy


async def _make_dev_token(tokens: TokenStore, data_dir: Path) -> None:
    """Give the embedded mode's only user a token: made once, readable by its owner alone."""
    path = data_dir / DEV_TOKEN_FILE
    known = path.read_text().strip() if path.exists() else None
    text = await tokens.create(DEV_TENANT, [role.value for role in Role], ["*"], "embedded mode", known)
    if known is None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: ASYNC230, PTH123
            file.write(text + "\n")
