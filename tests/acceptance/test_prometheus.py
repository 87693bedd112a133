"""The alert rules and the dashboard in deploy/, on a real Prometheus that scrapes a service: with `make interop`."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import grpc
import psutil
import pytest

from conftest import connect
from deployed import ALERTS, ROOT, queries, rules
from harness import Caller, new_key, url_text
from processes import children, free_address, until
from stage import LedgerView, Stage

pytestmark = pytest.mark.interop

PROGRAMS = ROOT / ".venv/interop/prometheus/usr/bin"
OPERATION, ONCE, SHORT = "watch.echo", "watch.once", "watch.short"
# Scrapes come once a second here and four times a minute there: windows and waits shrink alike.
WINDOW = "10s"
FIRES_WITHIN_S = 90


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give operations whose facts say what happens: ordinary, with a single attempt, and with a short lease."""
    return (
        {
            OPERATION: {"policy": "echo", "retention": "30d"},
            ONCE: {"policy": "echo", "max_attempts": 1},
            SHORT: {"policy": "echo", "lease": "1s"},
        },
        {"echo": "echo_policy:decide"},
    )


@pytest.fixture(scope="module")
def flags(metrics_address: str) -> list[str]:
    """Let the service run into its limits soon."""
    limits = ["--pool-size", "1", "--evaluators", "2", "--mismatches-per-minute", "300"]
    return ["--metrics", metrics_address, *limits]


@pytest.fixture(scope="module")
def housekeeping(stage: Stage) -> Iterator[psutil.Popen]:
    """Give a housekeeping apart, whose broker is away."""
    command = ["housekeep", "--database-url", url_text(stage.url), "--events", f"nats://{free_address()}"]
    with (stage.directory / "housekeep.log").open("ab") as log:
        process = psutil.Popen(
            [sys.executable, "-m", "decideonce_server", *command, "--metrics", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass(frozen=True)
class Prometheus:
    """A real Prometheus, asked by its HTTP API."""

    address: str

    async def get(self, path: str, **parameters: str) -> list[dict]:
        """Give the list that an API call answers with."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"

        def read() -> dict:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]

        data = await asyncio.to_thread(read)
        return data["alerts"] if path == "alerts" else data["result"]

    async def firing(self) -> set[str]:
        """Name the alerts that fire."""
        return {alert["labels"]["alertname"] for alert in await self.get("alerts") if alert["state"] == "firing"}

    async def is_ready(self) -> bool:
        """Tell whether it answers, and has scraped both processes."""
        with suppress(OSError):
            up = await self.get("query", query="up == 1")
            return len(up) == 2
        return False


@pytest.fixture(scope="module")
def prometheus(metrics_address: str, housekeeping: psutil.Popen, stage: Stage) -> Iterator[Prometheus]:
    """Give a Prometheus that scrapes the service and its housekeeping, and judges the rules in short."""
    directory = stage.directory / "prometheus"
    directory.mkdir()
    rules_in_short = re.sub(r"\[\d+m\]", f"[{WINDOW}]", re.sub(r"for: \d+m", "for: 1s", ALERTS.read_text()))
    (directory / "alerts.yaml").write_text(rules_in_short)
    others = housekeeping.stdout.readline().rstrip().partition(" metrics on ")[2]
    every_second = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration = {
        "global": every_second,
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [
            {"job_name": "decideonce", "static_configs": [{"targets": [metrics_address, others]}]},
        ],
    }
    # JSON is YAML.
    (directory / "prometheus.yaml").write_text(json.dumps(configuration))
    address = free_address()
    arguments = ["--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [PROGRAMS / "prometheus", *arguments], cwd=directory, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield Prometheus(address)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def site(
    stage: Stage, caller: Caller, view: LedgerView, housekeeping: psutil.Popen, prometheus: Prometheus
) -> "Site":
    """Give all that a fault may need, with Prometheus at work."""
    await until(prometheus.is_ready)
    return Site(stage, caller, view, housekeeping)


@dataclass(frozen=True)
class Site:
    """The service with its surroundings."""

    stage: Stage
    caller: Caller
    view: LedgerView
    housekeeping: psutil.Popen
    # The alert was seen: what was done for it is to be undone.
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def decide(self, operation: str = OPERATION, key: str | None = None, **facts: object) -> None:
        """Make a call, whatever comes of it."""
        with suppress(grpc.RpcError):
            await self.caller.decide(operation, key or new_key(), facts)

    async def decided(self, count: int = 1) -> list[str]:
        """Give keys that are decided, whose events wait."""
        keys = [new_key() for _ in range(count)]
        for key in keys:
            await self.caller.decide(OPERATION, key)
        return keys


async def housekeeping_stands_still(site: Site) -> None:
    site.housekeeping.suspend()
    try:
        await site.over.wait()
    finally:
        site.housekeeping.resume()


async def process_is_gone(site: Site) -> None:
    site.housekeeping.kill()
    await site.over.wait()


async def no_session_is_let_in(site: Site) -> None:
    name = await site.view.connection.fetchval("SELECT current_database()")
    admin = await connect(site.view.url.set(database="postgres"))
    sessions = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1 AND application_name = $2"
    try:
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        await admin.execute(sessions, name, "decideonce")
        await site.decide()
    finally:
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        await admin.close()


async def version_is_gone(site: Site) -> None:
    (key,) = await site.decided()
    await site.view.change(key, "operation_version = 4711")
    await site.decide(key=key)
    await site.view.connection.execute("DELETE FROM ledger WHERE operation_version = 4711")


async def somebody_holds_what_is_due(site: Site) -> None:
    """Let housekeeping stand still until the row is locked: it would be quicker."""
    (key,) = await site.decided()
    somebody = await connect(site.view.url)
    site.housekeeping.suspend()
    try:
        due = "state = 1, response = NULL, lease_expires_at = now() - interval '1 hour'"
        await site.view.change(key, due)
        async with somebody.transaction():
            await somebody.execute("SELECT FROM ledger WHERE operation_key = $1 FOR UPDATE", key)
            site.housekeeping.resume()
            await site.over.wait()
    finally:
        site.housekeeping.resume()
        await somebody.close()


async def many_leases_end(site: Site) -> None:
    left = "state = 1, attempt = 1, response = NULL, lease_expires_at = now()"
    keys = await site.decided(20)
    await site.view.connection.execute(f"UPDATE ledger SET {left} WHERE operation_key = ANY($1)", keys)
    await until(lambda: none_is_processing(site))


async def none_is_processing(site: Site) -> bool:
    return not await site.view.connection.fetchval("SELECT count(*) FROM ledger WHERE state = 1")


async def worker_stands_still(site: Site) -> None:
    key = new_key()
    call = asyncio.ensure_future(site.decide(SHORT, key, do="sleep", seconds=0.5))
    of_key = "SELECT state FROM ledger WHERE operation_key = $1"
    await until(lambda: site.view.connection.fetchval(of_key, key))
    (worker,) = children(site.stage.service, "worker")
    worker.send_signal(signal.SIGSTOP)
    try:

        async def is_rescued() -> bool:
            return await site.view.connection.fetchval(of_key, key) == 2

        await until(is_rescued)
    finally:
        worker.send_signal(signal.SIGCONT)
    await call


async def policy_never_decides(site: Site) -> None:
    await site.decide(ONCE, do="retry")


async def key_is_reused(site: Site) -> None:
    key, *_ = await site.decided(20)
    await site.decide(key=key, n=2)


async def keys_are_reused_all_the_time(site: Site) -> None:
    (key,) = await site.decided()
    await asyncio.gather(*(site.decide(key=key, n=n) for n in range(30)))


async def caller_has_no_token(site: Site) -> None:
    with suppress(grpc.RpcError):
        await Caller(site.caller.channel, None).decide(OPERATION, new_key())


async def callers_ask_again(site: Site) -> None:
    (key,) = await site.decided()
    await site.decide(key=key)


async def ledger_is_locked(site: Site) -> None:
    async with site.view.connection.transaction():
        await site.view.connection.execute("LOCK TABLE ledger")
        await asyncio.gather(*(site.decide() for _ in range(8)))


async def evaluators_are_busy(site: Site) -> None:
    await asyncio.gather(*(site.decide(do="sleep", seconds=0.3) for _ in range(6)))


async def event_is_old(site: Site) -> None:
    await site.decided()
    hour_ago = int((time.time() - 3600) * 1000)
    old = UUID(int=hour_ago << 80 | 7 << 76 | 2 << 62 | random.getrandbits(62))
    await site.view.connection.execute(
        "UPDATE outbox SET id = $1 WHERE (bucket, id) IN (SELECT bucket, id FROM outbox LIMIT 1)", old
    )
    try:
        await site.over.wait()
    finally:
        await site.view.connection.execute("DELETE FROM outbox WHERE id = $1", old)


async def event_is_parked(site: Site) -> None:
    await site.decided()
    await site.view.connection.execute(
        """INSERT INTO outbox_parked (bucket, id, tenant, operation, operation_key, aggregatetype, aggregateid, type,
            payload, topic, reason, park_time)
        SELECT bucket, id, tenant, operation, operation_key, aggregatetype, aggregateid, type, payload, topic,
            'MESSAGE_TOO_LARGE', now()
        FROM outbox LIMIT 1"""
    )
    try:
        await site.over.wait()
    finally:
        await site.view.connection.execute("DELETE FROM outbox_parked")


async def answer_is_held_by_its_event(site: Site) -> None:
    (key,) = await site.decided()
    await site.view.change(key, "replayable_until = now() - interval '2 hours'")
    try:
        await site.over.wait()
    finally:
        await site.view.change(key, "replayable_until = NULL")


FAULTS: dict[str, Callable[[Site], Awaitable[None]]] = {
    "DecideonceLedgerUnavailable": no_session_is_let_in,
    "DecideonceDefects": version_is_gone,
    "DecideonceStaleWork": somebody_holds_what_is_due,
    "DecideonceTakeovers": many_leases_end,
    "DecideonceLateResults": worker_stands_still,
    "DecideonceAttemptsExhausted": policy_never_decides,
    "DecideonceKeyReuse": key_is_reused,
    "DecideonceShedding": keys_are_reused_all_the_time,
    "DecideonceRefusals": caller_has_no_token,
    "DecideonceLostReplies": callers_ask_again,
    "DecideoncePoolExhausted": ledger_is_locked,
    "DecideonceLedgerSlow": ledger_is_locked,
    "DecideonceQueueing": evaluators_are_busy,
    "DecideonceOutboxLag": event_is_old,
    "DecideonceOutboxParked": event_is_parked,
    "DecideoncePurgeDelay": answer_is_held_by_its_event,
    "DecideonceUnwatched": housekeeping_stands_still,
    # The last: it doesn't come back.
    "DecideonceDown": process_is_gone,
}


@asynccontextmanager
async def provoked(fault: Callable[[Site], Awaitable[None]], site: Site) -> AsyncIterator[asyncio.Task]:
    """Make a fault again and again beside the block."""

    async def again_and_again() -> None:
        while not site.over.is_set():
            await fault(site)

    task = asyncio.create_task(again_and_again())
    try:
        yield task
    finally:
        site.over.set()
        await task


@pytest.mark.parametrize("file", [ALERTS, Path("deploy/prometheus.yaml")], ids=["rules", "config"])
def test_prometheus_takes_what_is_in_deploy(file: Path) -> None:
    """Prometheus's own tool finds no fault in the rules and in the configuration."""
    kind = "rules" if file is ALERTS else "config"
    subprocess.run([PROGRAMS / "promtool", "check", kind, ROOT / file], check=True, env=os.environ)


async def test_every_query_of_the_dashboard_has_data(site: Site, prometheus: Prometheus) -> None:
    """After calls of a few kinds, every panel of the dashboard shows something."""

    async def some_calls(site: Site) -> None:
        await callers_ask_again(site)
        await key_is_reused(site)
        await caller_has_no_token(site)

    async with provoked(some_calls, site):
        for title, query in queries():
            asked = query.replace("$__rate_interval", WINDOW).replace("$instance", ".*")

            async def has_data(asked: str = asked) -> bool:
                return bool(await prometheus.get("query", query=asked))

            try:
                await until(has_data)
            except TimeoutError:
                raise AssertionError(f"{title}: {asked}") from None


def test_every_alert_has_a_fault() -> None:
    """No alert is left out below."""
    assert {rule["alert"] for rule in rules()} == set(FAULTS)


@pytest.mark.parametrize("alert", FAULTS)
async def test_alert_fires_under_its_fault(site: Site, prometheus: Prometheus, alert: str) -> None:
    """An alert that is silent fires while what it is for goes on."""

    async def fires() -> bool:
        assert not task.done() or await task
        return alert in await prometheus.firing()

    async def is_silent() -> bool:
        return alert not in await prometheus.firing()

    # The broker is away for all of the run: what waits is not to be old before its turn.
    await site.view.connection.execute("DELETE FROM outbox")
    await until(is_silent, FIRES_WITHIN_S)
    async with provoked(FAULTS[alert], site) as task:
        await until(fires, FIRES_WITHIN_S)
