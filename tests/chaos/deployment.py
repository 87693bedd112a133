"""What is driven: instances of the service, each behind a proxy of its own, on one Postgres cluster."""

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import asyncpg
import grpc
import psutil

from brokers import Nats
from chaos.postgres import Cluster
from chaos.proxy import Proxy
from chaos.trail import INSTALL
from consumer import TABLES, NatsConsumer
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceStub
from decideonce_server.catalog import DEFAULT_TOPIC
from decideonce_server.database import database_url
from decideonce_server.migrate import migrate
from harness import ServiceProcess, make_token, table_policy, write_catalog

TENANTS = ("acme", "globex", "initech")
SITE = Path(__file__).parent / "site"
POLICIES = Path(__file__).parents[1] / "policies"

QUICK, SLOW, BACKGROUND, BRIEF = "chaos.quick", "chaos.slow", "chaos.background", "chaos.brief"
OPERATIONS = {
    QUICK: {"policy": "quick", "lease": "2s"},
    SLOW: {"policy": "slow", "lease": "1s", "time_budget": "5s", "max_attempts": 20},
    BACKGROUND: {"policy": "slow", "execution": "background", "lease": "1s", "time_budget": "5s", "max_attempts": 20},
    BRIEF: {"policy": "quick", "lease": "2s", "retention": "3s", "tombstone_retention": "30d"},
}
VERSIONS = {"ONE": 1, "TWO": 2}
EFFECTS = {SLOW: 1, BACKGROUND: 1}
LEASES = {name: timedelta(seconds=float(settings["lease"].rstrip("s"))) for name, settings in OPERATIONS.items()}


def is_refused(operation: str, n: int) -> bool:
    """Tell which numbers `chaos_policy` refuses."""
    return operation in (SLOW, BACKGROUND) and n % 7 == 0


def write_catalogs(directory: Path) -> dict[str, Path]:
    """Write a catalog for each version of the quick policy, by its outcome."""
    return {
        outcome: write_catalog(
            directory / outcome,
            OPERATIONS,
            {"quick": table_policy(outcome, outputs={"n": "facts.n"}), "slow": "chaos_policy:decide"},
        )
        for outcome in VERSIONS
    }


@dataclass
class Instance:
    """One instance: a supervisor with workers and housekeeping. `clock_offset_s` is how wrong its clock is."""

    name: str
    workers: int
    url: str
    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    clock_offset_s: float = 0.0
    process: ServiceProcess | None = None
    channel: grpc.aio.Channel | None = None
    # All that there ever were: none is closed under a call that is still on its way.
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    async def start(self) -> None:
        """Start it, and wait until it can answer."""
        path = os.pathsep.join(map(str, (POLICIES, SITE)))
        clock = {"CHAOS_CLOCK_OFFSET": str(self.clock_offset_s)} if self.clock_offset_s else {}
        arguments = ["--database-url", self.url, "--workers", str(self.workers), "--drain", "5s", *self.arguments]
        arguments += ["--mismatches-per-minute", "100000", "--log-level", "warning"]
        log = self.directory / f"{self.name}.log"
        environment = {"PYTHONPATH": path, **clock, **self.environment}
        self.process = await asyncio.to_thread(ServiceProcess, log, arguments, environment)
        address = await asyncio.to_thread(self.process.wait_until_ready)
        # A channel that waits long before it tries again would hide how soon the service is back.
        options = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.initial_reconnect_backoff_ms", 50)]
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.channels.append(self.channel)

    @property
    def stub(self) -> DecisionServiceStub:
        """A stub of its DecisionService."""
        return DecisionServiceStub(self.channel)

    def pids(self, role: str) -> list[int]:
        """Give the pids of its processes of a role: "worker" or "housekeep"."""
        if self.process is None:
            return []
        try:
            children = psutil.Process(self.process.process.pid).children()
            return [child.pid for child in children if role in child.cmdline()]
        except psutil.NoSuchProcess:
            return []

    async def kill(self) -> None:
        """Kill its whole tree."""
        if self.process is not None:
            await asyncio.to_thread(self.process.kill)

    async def stop(self) -> int:
        """Ask it to stop, and give its exit code."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.stop)


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it is still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@dataclass
class Deployment:
    """Everything that runs."""

    cluster: Cluster
    proxies: dict[str, Proxy]
    instances: dict[str, Instance]
    catalogs: Mapping[str, Path]
    tokens: dict[str, str]
    broker: Nats
    consumer: NatsConsumer


async def deploy(root: Path) -> Deployment:
    """Start a cluster, a broker, and two instances: one with two workers, and one whose clock is ten minutes ahead."""
    cluster = Cluster(root)
    await cluster.start()
    await cluster.primary.execute("CREATE DATABASE chaos")
    url = database_url(f"postgresql://postgres@127.0.0.1:{cluster.primary.port}/chaos?ssl=disable")
    await migrate(url)
    connection = await cluster.primary.connect("chaos")
    await connection.execute(INSTALL)
    await connection.close()
    tokens = {tenant: await make_token(url, tenant) for tenant in TENANTS}
    catalogs = write_catalogs(root / "catalogs")
    broker, consumer = await start_broker(cluster)
    proxies, instances = {}, {}
    for name, workers, offset in (("a", 2, 0.0), ("b", 1, 600.0)):
        proxy = Proxy(lambda: ("127.0.0.1", cluster.primary.port))
        through = f"postgresql://postgres@127.0.0.1:{await proxy.start()}/chaos?ssl=disable"
        proxies[name] = proxy
        events = ("--events", broker.url)
        arguments = (*events, "--catalog", str(catalogs["ONE"])) if name == "a" else events
        instances[name] = Instance(name, workers, through, root, arguments=arguments, clock_offset_s=offset)
        await instances[name].start()
        instances[name].arguments = events
    return Deployment(cluster, proxies, instances, catalogs, tokens, broker, consumer)


async def start_broker(cluster: Cluster) -> tuple[Nats, NatsConsumer]:
    """Start a broker, and make a consumer with a database beside the service's."""
    broker = await asyncio.to_thread(Nats)
    # It would drop most duplicates by itself; here they are to reach the consumer.
    broker.make_topic(DEFAULT_TOPIC, duplicate_window=0.1)
    await cluster.primary.execute("CREATE DATABASE consumer")

    async def connect() -> asyncpg.Connection:
        return await cluster.primary.connect("consumer")

    connection = await connect()
    await connection.execute(TABLES)
    await connection.close()
    return broker, NatsConsumer(broker, DEFAULT_TOPIC, connect)


async def tear_down(deployment: Deployment) -> None:
    """Stop everything."""
    for instance in deployment.instances.values():
        await instance.kill()
        for channel in instance.channels:
            await channel.close()
    for proxy in deployment.proxies.values():
        await proxy.close()
    await asyncio.to_thread(deployment.cluster.stop)
    await asyncio.to_thread(deployment.broker.close)
