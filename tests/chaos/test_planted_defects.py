"""The checker can fail: each planted defect is reported, and the same scenario without it is clean."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

import asyncpg
import pytest

from brokers import Nats
from chaos.checker import Expectations, check
from chaos.deployment import Deployment, Instance, send_signal
from chaos.history import Call, Fault, History, Result
from chaos.run import read_events, read_rows, until_delivered
from chaos.trail import INSTALL, read_trail
from chaos.workload import Run, Workload
from conftest import connect
from consumer import TABLES, Consumer, NatsConsumer
from decideonce_server.catalog import DEFAULT_TOPIC
from harness import make_token, new_key, url_text, write_catalog
from processes import until

OPERATION = "chaos.once"
CHANCE = random.Random(0)
WAITING = "SELECT payload FROM outbox ORDER BY bucket, id"
APPLIED = "SELECT payload FROM applied ORDER BY number"


@dataclass
class Scene:
    """One or two instances, and what is recorded of the calls to them."""

    workload: Workload
    history: History
    instances: dict[str, Instance]
    observer: asyncpg.Connection
    run: Run
    broker: Nats | None = None
    consumer: Consumer | None = None

    async def decide(self, name: str, timeout: float = 10.0) -> Call:
        """Call one of the instances."""
        self.workload._deployment.instances = {name: self.instances[name]}
        return await self.workload.decide(self.run, 0, CHANCE, timeout)

    def begin(self, name: str, timeout: float = 10.0) -> "asyncio.Task[Call]":
        """Begin a call."""
        return asyncio.create_task(self.decide(name, timeout))

    async def until(self, condition: str) -> None:
        """Wait until a row is as it must be."""
        async with asyncio.timeout(20):
            while not await self.observer.fetchval(f"SELECT count(*) FROM ledger WHERE {condition}"):
                pass

    async def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the worker of an instance."""
        (pid,) = await asyncio.to_thread(self.instances[name].pids, "worker")
        send_signal(pid, number)
        self.history.faults.append(Fault("signal", name, self.workload.now(), self.workload.now() + 5))


async def late_owner(scene: Scene) -> None:
    """A worker is paused in mid-evaluation longer than its lease; another instance decides; the worker comes back."""
    late = scene.begin("a")
    await scene.until("state = 1")
    await scene.signal("a", signal.SIGSTOP)
    await scene.until("lease_expires_at < clock_timestamp()")
    await scene.decide("b")
    await scene.signal("a", signal.SIGCONT)
    await late
    await scene.decide("b")


async def slow_attempt_and_retry(scene: Scene) -> None:
    """A duplicate comes after the time of a lease, while the first attempt is still at work in the same worker."""
    first = scene.begin("a")
    await scene.until("state = 1 AND reserve_time < clock_timestamp() - interval '1200 ms'")
    await asyncio.gather(scene.decide("a"), first)
    await scene.decide("a")


async def duplicate_elsewhere(scene: Scene) -> None:
    """A duplicate comes to the instance whose clock is wrong, while the first is at work."""
    first = scene.begin("a")
    await scene.until("state = 1")
    await asyncio.gather(scene.decide("b"), first)


async def many_at_once(scene: Scene) -> None:
    """Many callers send one key at once."""
    await asyncio.gather(*(scene.decide("a") for _ in range(20)))


async def killed_after_answer(scene: Scene) -> None:
    """The worker is killed right after its answer."""
    await scene.decide("a")
    await scene.signal("a", signal.SIGKILL)
    await scene.decide("b")


async def replay(scene: Scene) -> None:
    """A caller sends the same once more."""
    await scene.decide("a")
    await scene.decide("a")


async def poll(scene: Scene) -> None:
    """A caller polls for what takes a while."""
    first = scene.begin("a", timeout=0.5)
    await scene.until("state = 1")
    call = await scene.decide("a")
    await first
    scene.workload._deployment.instances = {"a": scene.instances["a"]}
    while call.result is Result.PROCESSING:
        call = await scene.workload.status(scene.run, CHANCE)


async def give_up(scene: Scene) -> None:
    """A caller hangs up in mid-evaluation, and nobody comes back."""
    await scene.decide("a", timeout=0.5)
    try:
        await scene.until("state IN (2, 4)")
    except TimeoutError:
        return


async def broker_away(scene: Scene) -> None:
    """The broker is away when a decision is made, and longer than the publisher waits for it."""
    await asyncio.to_thread(scene.broker.stop)
    await scene.decide("a")
    log = scene.instances["a"].process.log
    await until(lambda: "events not published" in log.read_text())
    await asyncio.to_thread(scene.broker.start)
    await until_delivered(scene.observer, scene.consumer, within=5.0)


async def delivered_again(scene: Scene) -> None:
    """The broker is started anew, and its consumer begins from a little before its last position."""
    await scene.decide("a")
    await until_delivered(scene.observer, scene.consumer)
    await asyncio.to_thread(scene.broker.stop)
    await asyncio.to_thread(scene.broker.start)
    await until(lambda: scene.consumer.delivered_again)


async def decision_and_effect(scene: Scene) -> None:
    """A decision with an effect is made."""
    await scene.decide("a")
    await until_delivered(scene.observer, scene.consumer)


SCENARIOS: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "no_fence": late_owner,
    "loser_tells_its_own": late_owner,
    "fence_on_worker": slow_attempt_and_retry,
    "app_clock": duplicate_elsewhere,
    "no_unique_constraint": many_at_once,
    "event_after_commit": killed_after_answer,
    "replay_evaluates_again": replay,
    "sweeper_deletes_processing": poll,
    "cancellation_leaves_processing": give_up,
    "deletes_before_acknowledged": broker_away,
    "applies_without_inbox": delivered_again,
    "sends_in_reverse": decision_and_effect,
}
# Those that are the program's; the others are the driver's own.
DEFECTS = SCENARIOS.keys() - {"applies_without_inbox"}
WITH_BROKER = (broker_away, delivered_again, decision_and_effect)


class ForgetfulConsumer(NatsConsumer):
    """Takes every event for a new one: it has no inbox."""

    async def is_new(self, connection, event) -> bool:
        return True


@pytest.fixture
async def consume(database_url, observer) -> AsyncIterator[Callable[[type[NatsConsumer]], Awaitable[NatsConsumer]]]:
    """Give a function that starts a broker and a consumer of a kind, whose table is in the test's database."""
    consuming: list[asyncio.Task[None]] = []
    brokers: list[Nats] = []

    async def start(kind: type[NatsConsumer]) -> NatsConsumer:
        brokers.append(await asyncio.to_thread(Nats))
        brokers[0].make_topic(DEFAULT_TOPIC)
        await observer.execute(TABLES)
        consumer = kind(brokers[0], DEFAULT_TOPIC, lambda: connect(database_url))
        consuming.append(asyncio.create_task(consumer.run()))
        return consumer

    yield start
    for task in consuming:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    for broker in brokers:
        broker.close()


@pytest.fixture
async def make_scene(database_url, observer, tmp_path, consume) -> AsyncIterator[Callable[..., Awaitable[Scene]]]:
    """Give a function that starts the instances, with a defect or none."""
    instances: dict[str, Instance] = {}

    async def make(defect: str | None, scenario: Callable[..., object]) -> Scene:
        settings = {"policy": "impure", "lease": "1s", "time_budget": "5s", "default_wait": "8s"}
        entry_point = "decide" if scenario in WITH_BROKER else "decide_impurely"
        catalog = write_catalog(tmp_path / "catalog", {OPERATION: settings}, {"impure": f"chaos_policy:{entry_point}"})
        token = await make_token(database_url, "acme")
        await observer.execute(INSTALL)
        environment = {"CHAOS_DEFECT": defect} if defect in DEFECTS else {}
        two = scenario in (late_owner, duplicate_elsewhere, killed_after_answer)
        # A rescuer would hide what is left behind; the reaper is what one defect is in.
        housekeeping = () if scenario is poll or scenario in WITH_BROKER else ("--no-housekeeping",)
        broker = consumer = None
        if scenario in WITH_BROKER:
            consumer = await consume(ForgetfulConsumer if defect == "applies_without_inbox" else NatsConsumer)
            broker = consumer.broker
            housekeeping = ("--events", broker.url)
        for name, offset in (("a", 0.0), ("b", 600.0))[: 2 if two else 1]:
            arguments = (*housekeeping, *(("--catalog", str(catalog)) if name == "a" else ()))
            instances[name] = Instance(name, 1, url_text(database_url), tmp_path, environment, arguments, offset)
            await instances[name].start()
        history = History()
        deployment = Deployment(None, {}, instances, {}, {"acme": token}, broker, consumer)
        seconds = 2.5 if scenario in (slow_attempt_and_retry, poll, give_up) else 1.0
        facts = {"file": str(tmp_path / "evaluations"), "seconds": seconds, "n": 1}
        run = Run("acme", OPERATION, new_key(), (facts, facts))
        workload = Workload(deployment, history, 0, 1.0)
        return Scene(workload, history, dict(instances), observer, run, broker, consumer)

    yield make
    for instance in instances.values():
        await instance.kill()
        for channel in instance.channels:
            await channel.close()


CASES = [*SCENARIOS.items(), *((None, scenario) for scenario in dict.fromkeys(SCENARIOS.values()))]


@pytest.mark.parametrize(("defect", "scenario"), CASES, ids=[f"{d or 'clean'}-{s.__name__}" for d, s in CASES])
async def test_checker_reports(make_scene, observer, defect, scenario) -> None:
    """Each defect is reported in the scenario that brings it out, and each scenario without a defect is clean."""
    scene = await make_scene(defect, scenario)
    if defect == "no_unique_constraint":
        await observer.execute("ALTER TABLE ledger DROP CONSTRAINT ledger_pkey")
    await scenario(scene)
    effects = {OPERATION: 1 if scenario in WITH_BROKER else 0}
    expected = Expectations(leases={OPERATION: timedelta(seconds=1)}, effects=effects)
    rows, trail = await read_rows(observer), await read_trail(observer)
    events = await read_events(observer, APPLIED if scenario in WITH_BROKER else WAITING)
    violations = check(scene.history, rows, trail, events, expected)
    assert (defect is not None) == bool(violations), "\n".join(map(str, violations))
