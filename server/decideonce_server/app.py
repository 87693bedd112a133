"""The composition root: it alone knows every part, and puts them together."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
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
from decideonce_server import measures
from decideonce_server.apply import Apply
from decideonce_server.attempts import Attempts
from decideonce_server.auth import Authenticator, AuthInterceptor
from decideonce_server.callers import NO_CALLERS, Callers, read_callers
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.catalog_reader import CatalogReader
from decideonce_server.catalog_servicer import CatalogServicer
from decideonce_server.cloudevent import PayloadFormat
from decideonce_server.database import Database, DatabaseUrl, database_url
from decideonce_server.decide import Decide
from decideonce_server.due_work import BackgroundWorker, Rescuer
from decideonce_server.embedded import EmbeddedPostgres
from decideonce_server.errors import LedgerUnavailable
from decideonce_server.evaluator import Evaluators
from decideonce_server.events_url import open_sink
from decideonce_server.idempotency import IdempotencyInterceptor
from decideonce_server.identity import Role as CallerRole
from decideonce_server.leases import LeaseKeeper
from decideonce_server.ledger import Ledger
from decideonce_server.ledger_catalog import CatalogStore
from decideonce_server.ledger_tokens import TokenStore
from decideonce_server.ledger_watch import LedgerWatch
from decideonce_server.limits import Limits
from decideonce_server.migrate import check_schema, migrate
from decideonce_server.otlp import exported_traces
from decideonce_server.ports import reserved_port
from decideonce_server.publisher import Publisher
from decideonce_server.reaper import Reaper
from decideonce_server.requests import REQUEST_BYTES_MAX
from decideonce_server.reserve import Reserve
from decideonce_server.scrape import serve_metrics
from decideonce_server.servicer import DecisionServicer
from decideonce_server.sets import LedgerSets
from decideonce_server.settings import DEV_TOKEN_FILE, NO_EVENTS, InvalidSetting, Settings, address
from decideonce_server.sink import Sink
from decideonce_server.status import StatusInterceptor
from decideonce_server.stopping import SUPERVISED, Stopping
from decideonce_server.supervisor import Role, Supervisor
from decideonce_server.telemetry import TelemetryInterceptor
from decideonce_server.tls import TlsFiles, credentials
from decideonce_server.waiting import Waiters
from decideonce_server.wire import SERVICES, ParseInterceptor

DEV_TENANT = "dev"
# On top of what draining may take: for closing connections and ending evaluators.
STOP_SURPLUS = timedelta(seconds=10)
# When the last attempt has ended: for answers to leave, and for whoever watches health to hear of the stop.
ANSWERS_LEAVE_S = 1.0

# How long the loop waits for a thread that judges large facts, at each of a call's steps; Python's own is 5 ms.
SWITCH_S = 0.0005

# Calls that a process reads to their end before it sheds any; each is a request of up to 1 MiB.
CALLS_MAX = 10_000
# A call may outlive its connection's age by this: longer than any wait that an operation grants.
CONNECTION_GRACE = timedelta(minutes=6)
# What gRPC counts as for ever, and the longest that it can count at all.
MILLISECONDS_MAX = 2**31 - 1

SERVER_OPTIONS = [
    # Workers share the port.
    ("grpc.so_reuseport", 1),
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    # gRPC would cancel what waits to be read above 1,000 calls, replays too, and tell nobody when to come back.
    ("grpc.server.max_pending_requests", CALLS_MAX),
    ("grpc.server.max_pending_requests_hard_limit", CALLS_MAX),
    # A token, a trace and what proxies add; gRPC's own default, said here as it is part of the contract.
    ("grpc.max_metadata_size", 8 * 1024),
    # Pings keep a connection alive between calls, and find out about one that died. gRPC's default takes one in five
    # minutes, and ends the connection of a client that sends more.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_connection_age_grace_ms", CONNECTION_GRACE // timedelta(milliseconds=1)),
]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a serving process is made of."""

    database: Database
    evaluators: Evaluators
    tokens: TokenStore
    callers: Callers
    store: CatalogStore
    catalog: CatalogReader
    ledger: Ledger
    sets: LedgerSets
    leases: LeaseKeeper
    attempts: Attempts
    waiters: Waiters
    reserve: Reserve
    decide: Decide
    worker: BackgroundWorker
    apply: Apply


def assemble(url: DatabaseUrl, settings: Settings) -> Parts:
    """Make the parts; nothing is started yet.

    Raises:
        InvalidCallers: the file of callers can't be used.
    """
    database = Database(url, pool_size=settings.pool_size)
    evaluators = Evaluators(size_max=settings.evaluators)
    store = CatalogStore(database)
    catalog = CatalogReader(store)
    ledger = Ledger(database)
    sets = LedgerSets(ledger)
    attempts = Attempts()
    waiters = Waiters(ledger, settings.waiters_per_tenant)
    limits = Limits(settings, ledger)
    reserve = Reserve(ledger, sets, catalog, limits)
    leases = LeaseKeeper(Database(url, pool_size=1))
    decide = Decide(sets, catalog, evaluators, leases, limits)
    return Parts(
        database=database,
        evaluators=evaluators,
        tokens=TokenStore(database),
        callers=NO_CALLERS if settings.callers is None else read_callers(settings.callers),
        store=store,
        catalog=catalog,
        ledger=ledger,
        sets=sets,
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
        TelemetryInterceptor(parts.catalog),  # counts refusals too
        ParseInterceptor(),  # bytes above, messages below
        AuthInterceptor(Authenticator(parts.tokens, parts.callers)),  # before anything is looked up
        IdempotencyInterceptor(  # reserves for callers that may
            parts.reserve,
            parts.catalog,
            parts.attempts,
            parts.waiters,
            parts.worker,
        ),
    ]


async def serve(settings: Settings) -> None:
    """Serve with processes of their own for calls and for housekeeping, until SIGTERM or SIGINT.

    Raises:
        InvalidSetting, InvalidCallers, UnknownSchema, InvalidCatalog, LedgerUnavailable, StartFailed, OSError: it
            can't begin.
    """
    settings.check()
    stopping = Stopping()
    given = None if settings.database_url is None else database_url(settings.database_url)
    async with postgres(given, settings.data_dir) as url:
        await _prepare(url, settings)
        with reserved_port(settings.listen) as port:
            supervisor = Supervisor(_roles(settings, port), _environment(settings, url))
            try:
                if settings.metrics is not None:
                    serve_metrics(*address(settings.metrics, "--metrics"), lambda: supervisor.metrics)
                await supervisor.start()
                host, _ = address(settings.listen, "--listen")
                print(f"decideonce ready on {host}:{port}", flush=True)  # noqa: T201  # whoever started it reads this
                await stopping.asked.wait()
            finally:
                supervisor.stop()
                stopping.when_asked_again(supervisor.stop)
                await supervisor.wait(settings.drain + STOP_SURPLUS)


async def _prepare(url: DatabaseUrl, settings: Settings) -> None:
    """Do once what an instance's processes then rely on."""
    files = _tls_files(settings)
    if files is not None:
        files.read()
    if settings.events_url is not None:
        # Only to refuse a wrong one now: housekeeping would, again and again.
        await _sink(settings.events_url).close()
    parts = assemble(url, settings)
    try:
        if settings.database_url is None:
            await _make_dev_token(parts.tokens, settings.data_dir)
        if settings.catalog is not None:
            source = read_catalog(settings.catalog)
            await parts.evaluators.start()
            applied = await parts.apply.apply(source, applied_by="serve --catalog")
            log.info("catalog applied", revision=applied.revision, changes=len(applied.changes))
    finally:
        await parts.evaluators.close()
        await parts.database.close()


def _roles(settings: Settings, port: int) -> list[Role]:
    host, _ = address(settings.listen, "--listen")
    roles = [Role(f"worker {i}", ("worker", "--listen", f"{host}:{port}")) for i in range(settings.workers)]
    if settings.housekeeping:
        roles.append(Role("housekeeping", ("housekeep",)))
    if settings.metrics is None:
        return roles
    # Each has an endpoint of its own, on a port that is free, for this process to ask.
    return [replace(role, arguments=(*role.arguments, "--metrics", "127.0.0.1:0")) for role in roles]


def _environment(settings: Settings, url: DatabaseUrl) -> dict[str, str]:
    """Hand the settings on; through the environment, which other users of the machine can't read."""
    values = {
        "DECIDEONCE_DATABASE_URL": url.render_as_string(hide_password=False),
        "DECIDEONCE_TLS_CERTIFICATE": settings.tls_certificate,
        "DECIDEONCE_TLS_KEY": settings.tls_key,
        "DECIDEONCE_TLS_CLIENT_CA": settings.tls_client_ca,
        "DECIDEONCE_CALLERS": settings.callers,
        "DECIDEONCE_ALLOW_PLAINTEXT": "1" if settings.allow_plaintext else None,
        "DECIDEONCE_CONNECTION_AGE_MAX": f"{settings.connection_age_max // timedelta(milliseconds=1)}ms",
        "DECIDEONCE_POOL_SIZE": settings.pool_size,
        "DECIDEONCE_EVALUATORS": settings.evaluators,
        "DECIDEONCE_ATTEMPTS_MAX": settings.attempts_max,
        "DECIDEONCE_ATTEMPTS_PER_TENANT": settings.attempts_per_tenant,
        "DECIDEONCE_WAITERS_PER_TENANT": settings.waiters_per_tenant,
        "DECIDEONCE_NEW_KEYS_PER_SECOND": settings.new_keys_per_second,
        "DECIDEONCE_MISMATCHES_PER_MINUTE": settings.mismatches_per_minute,
        "DECIDEONCE_EVENTS": settings.events_url or NO_EVENTS,
        "DECIDEONCE_EVENTS_FORMAT": settings.events_format,
        "DECIDEONCE_OTLP": settings.otlp,
        "DECIDEONCE_DRAIN": f"{settings.drain // timedelta(milliseconds=1)}ms",
        SUPERVISED: "1",
    }
    return {name: str(value) for name, value in values.items() if value is not None}


async def work(settings: Settings) -> None:
    """Answer calls and decide background operations, until asked to stop; one process of an instance."""
    stopping = Stopping()
    sys.setswitchinterval(SWITCH_S)
    measured = _measure(settings)
    async with exported_traces(settings.otlp), _running(settings) as parts:
        # Left before attempts are ended: what is given back then is for others to take up.
        async with _loops(parts.catalog.run(), parts.worker.run()):
            server, healthy = await _start_server(parts, settings)
            print(f"decideonce worker ready{measured}", flush=True)  # noqa: T201  # the supervisor reads this
            await stopping.asked.wait()
            await healthy.enter_graceful_shutdown()
        parts.waiters.give_up()
        # Takes no new connections from here on; calls go on.
        closing = asyncio.create_task(server.stop(settings.drain.total_seconds() + ANSWERS_LEAVE_S))
        await _end_attempts(parts, settings, stopping)
        # Not for long: a client watches health as long as it is connected.
        await asyncio.wait({closing}, timeout=ANSWERS_LEAVE_S)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await server.stop(None)


async def housekeep(settings: Settings) -> None:
    """Rescue stale work, apply retention and publish events, until asked to stop.

    Raises:
        InvalidSetting, UnknownSchema, DatabaseUnreachable, LedgerUnavailable: it can't begin.
    """
    settings.check()
    stopping = Stopping()
    if settings.database_url is not None and not os.environ.get(SUPERVISED):
        # A supervisor did so before; and it goes on where the next version's migration has come meanwhile.
        await check_schema(database_url(settings.database_url))
    measured = _measure(settings)
    async with exported_traces(settings.otlp), _running(settings) as parts:
        rescuer = Rescuer(parts.ledger, parts.reserve, parts.decide, parts.attempts, parts.waiters)
        async with (
            _publishing(parts.database, settings, stopping),
            _loops(
                parts.catalog.run(),
                rescuer.run(),
                Reaper(parts.ledger).run(),
                LedgerWatch(parts.database).run(),
            ),
        ):
            print(f"decideonce housekeeping ready{measured}", flush=True)  # noqa: T201  # the supervisor reads this
            await stopping.asked.wait()
        await _end_attempts(parts, settings, stopping)


async def _end_attempts(parts: Parts, settings: Settings, stopping: Stopping) -> None:
    """Let attempts end, as far as there is time; what is left gives its lease back, for others to take over at once."""
    await stopping.unless_asked_again(parts.attempts.drain(settings.drain))
    left = parts.leases.records
    await parts.attempts.cancel()
    # A renewal that is on its way must not come after the release.
    await parts.leases.close()
    if left:
        try:
            await parts.ledger.release(left)
        except LedgerUnavailable:
            log.warning("leases not given back: the ledger can't be reached; they run out", attempts=len(left))
            return
    log.info("stopped", attempts_released=len(left))


@asynccontextmanager
async def _publishing(database: Database, settings: Settings, stopping: Stopping) -> AsyncIterator[None]:
    """Publish events beside the block, where they are to be; at its end what is being sent has time to arrive."""
    if settings.events_url is None:
        yield
        return
    is_file = settings.events_url.startswith("log:")
    given = settings.events_format or (PayloadFormat.JSON if is_file else PayloadFormat.PROTOBUF)
    publisher = Publisher(database, _sink(settings.events_url), PayloadFormat(given))
    async with _loops(publisher.run()) as (publishing,):
        yield
        publisher.stop()
        await stopping.unless_asked_again(asyncio.wait({publishing}, timeout=settings.drain.total_seconds()))


def _sink(url: str) -> Sink:
    try:
        return open_sink(url)
    except ValueError as error:
        raise InvalidSetting(str(error)) from None


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


def _measure(settings: Settings) -> str:
    """Serve this process's metrics, if they are asked for, and say where as the supervisor reads it."""
    if settings.metrics is None:
        return ""
    host, port = address(settings.metrics, "--metrics")
    server, _ = start_http_server(port, host)
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader(scope_info_enabled=False)]))
    measures.begin()
    return f" metrics on {host}:{server.server_port}"


@asynccontextmanager
async def _running(settings: Settings) -> AsyncIterator[Parts]:
    """Give the parts of one process, started; the database is ready, as `serve` or an operator made it."""
    if settings.database_url is None:
        raise InvalidSetting("--database-url must be given")
    parts = assemble(database_url(settings.database_url), settings)
    parts.database.measure_use()
    try:
        await parts.evaluators.start()
        parts.leases.start()
        await parts.catalog.refresh()
        # All that is there now stays. A collection that looks through it holds up every call, by tens of milliseconds.
        gc.collect()
        gc.freeze()
        yield parts
    finally:
        await parts.waiters.close()
        await parts.leases.close()
        await parts.evaluators.close()
        await parts.database.close()


@asynccontextmanager
async def _loops(*loops: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run loops beside the block; a defect in one asks the process to stop, so that it is replaced."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a loop ended with a defect", exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    tasks = [asyncio.create_task(loop) for loop in loops]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tls_files(settings: Settings) -> TlsFiles | None:
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return TlsFiles(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)


async def _start_server(parts: Parts, settings: Settings) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    age_ms = settings.connection_age_max // timedelta(milliseconds=1) or MILLISECONDS_MAX
    options = [*SERVER_OPTIONS, ("grpc.max_connection_age_ms", min(age_ms, MILLISECONDS_MAX))]
    server = grpc.aio.server(interceptors=interceptors(parts), options=options)
    add_DecisionServiceServicer_to_server(
        DecisionServicer(parts.decide, parts.sets, parts.catalog, parts.waiters), server
    )
    add_CatalogServiceServicer_to_server(CatalogServicer(parts.apply, parts.store, parts.catalog), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    names = [service.full_name for service in SERVICES]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    files = _tls_files(settings)
    if files is not None:
        server.add_secure_port(settings.listen, credentials(files))
    else:
        server.add_insecure_port(settings.listen)
    await server.start()
    for name in ("", *names):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, healthy


async def _make_dev_token(tokens: TokenStore, data_dir: Path) -> None:
    """Give the embedded mode's only user a token: made once, readable by its owner alone."""
    path = data_dir / DEV_TOKEN_FILE
    known = path.read_text().strip() if path.exists() else None
    text = await tokens.create(DEV_TENANT, [role.value for role in CallerRole], ["*"], "embedded mode", known)
    if known is None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: ASYNC230, PTH123
            file.write(text + "\n")
