"""Shows that every event of every decision is applied once and in order, whatever is killed: `make bench`.

Decisions with effects are made by a real service. Two real publishers send their events to a real broker, which is
stopped and started meanwhile, while publishers are killed and started. A consumer applies what arrives through the
inbox, in a database of its own; at the end that is compared with what callers were told.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import asyncpg
import grpc
from sqlalchemy.engine import URL

from bench.purge import housekeeping
from brokers import ApacheKafka, Broker, Nats, Tansu
from conftest import connect
from consumer import TABLES, consumer_of
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.events_pb2 import DecisionEvent, DecisionRecorded
from decideonce_server.embedded import EmbeddedPostgres
from decideonce_server.migrate import migrate
from harness import Caller, ServiceProcess, make_token, new_key, struct, table_policy, url_text, write_catalog
from processes import until

OPERATION = "bench.decide"
TOPIC = "bench.decisions"
TENANT = "acme"
RECORDED = "decideonce.decision.v1"
EFFECTS = ("bench.first", "bench.second")
EFFECTS_COLUMN = "[{type: 'bench.first', payload: {n: facts.n}}, {type: 'bench.second', payload: {n: facts.n}}]"
CALLERS = 32
PUBLISHERS = 2
OUTAGE_S = 1.0
# Longer than the leases of a publisher that was killed last.
WITHIN_S = 180.0
BROKERS: dict[str, type[Broker]] = {"nats": Nats, "kafka": Tansu, "apache-kafka": ApacheKafka}


@dataclass(frozen=True)
class Plan:
    """How many decisions are made, and how often the broker is stopped and a publisher killed meanwhile."""

    decisions: int = 20_000
    outages: int = 5
    kills: int = 10

    @property
    def faults(self) -> list[str]:
        """What happens, in its order; evenly over the decisions."""
        faults = ["kill"] * self.kills
        for number in range(self.outages):
            faults.insert(round((number + 0.5) * len(faults) / self.outages), "outage")
        return faults


class Publisher:
    """A `decideonce housekeep` that can be killed and started."""

    def __init__(self, url: URL, broker: Broker, log: Path) -> None:
        self._arguments = (url, log, "--events", broker.url)
        self._running = ExitStack()

    def start(self) -> None:
        """Start it, and wait until it is at work."""
        self._running.enter_context(housekeeping(*self._arguments))

    def kill(self) -> None:
        """Kill it, and all that it started."""
        self._running.close()


class Callers:
    """Many callers at once, and what they were told: of each key the events that it must have made."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.told: dict[str, list[DecisionEvent]] = {}

    async def decide(self, decisions: int) -> None:
        """Make so many decisions."""
        numbers = iter(range(decisions))

        async def call() -> None:
            for n in numbers:
                key = new_key()
                self.told[key] = events_of(await self._caller.decide(OPERATION, key, {"n": n}), n)

        await asyncio.gather(*(call() for _ in range(CALLERS)))


def events_of(answer: wire.DecideResponse, n: int) -> list[DecisionEvent]:
    """Give what a decision makes known, but for the events' ids."""
    assert answer.status == wire.DECISION_STATUS_SUCCEEDED
    made = [DecisionEvent(type=RECORDED, recorded=DecisionRecorded(status=answer.status, decision=answer.decision))]
    for name in EFFECTS:
        made.append(DecisionEvent(type=name))
        made[-1].effect.payload.CopyFrom(struct({"n": n}))
    for event in made:
        event.event_time.CopyFrom(answer.provenance.evaluate_time)
        event.provenance.CopyFrom(answer.provenance)
    return made


def judge(told: Mapping[str, Sequence[DecisionEvent]], applied: Iterable[DecisionEvent]) -> Iterator[str]:
    """Give what is wrong with what a consumer applied, in its order."""
    of_key: defaultdict[str, list[DecisionEvent]] = defaultdict(list)
    for event in applied:
        of_key[event.provenance.operation_key].append(event)
    for key in told.keys() | of_key.keys():
        ids = [event.event_id for event in of_key[key]]
        # UUIDv7 ascend.
        if ids != sorted(ids):
            yield "events of a key were applied out of their order"
        if len(set(ids)) < len(ids):
            yield "an event was applied more than once"
        for event in of_key[key]:
            event.event_id = ""
        if of_key[key] != list(told.get(key, ())):
            yield "what was applied isn't what was decided"


async def disturb(plan: Plan, callers: Callers, broker: Broker, publishers: Sequence[Publisher]) -> None:
    """Stop and start the broker, and kill and start publishers in turn, while decisions are made."""
    for number, fault in enumerate(plan.faults, 1):
        due = number * plan.decisions // (len(plan.faults) + 1)
        await until(lambda due=due: len(callers.told) >= due, WITHIN_S)
        if fault == "outage":
            await asyncio.to_thread(broker.stop)
            await asyncio.sleep(OUTAGE_S)
            await asyncio.to_thread(broker.start)
        else:
            publisher = publishers[number % len(publishers)]
            await asyncio.to_thread(publisher.kill)
            await asyncio.to_thread(publisher.start)


async def deliver(url: URL, broker: Broker, directory: Path, plan: Plan, out: TextIO) -> Counter[str]:
    """Make decisions, disturb everything, and give what is wrong in the end: how often each."""
    # NATS would drop most duplicates by itself; here they are to reach the consumer.
    broker.make_topic(TOPIC, **({"duplicate_window": 0.1} if isinstance(broker, Nats) else {}))
    async with AsyncExitStack() as stack:
        observer = await connect(url)
        stack.push_async_callback(observer.close)
        consumers_url = await stack.enter_async_context(database_beside(url, observer))
        results = await connect(consumers_url)
        stack.push_async_callback(results.close)
        await results.execute(TABLES)
        callers = Callers(await stack.enter_async_context(serving(url, directory)))
        publishers = [Publisher(url, broker, directory / f"publisher-{n}.log") for n in range(PUBLISHERS)]
        for publisher in publishers:
            stack.callback(publisher.kill)
            await asyncio.to_thread(publisher.start)
        consumer = consumer_of(broker, TOPIC, lambda: connect(consumers_url))
        consuming = asyncio.create_task(consumer.run())
        stack.callback(consuming.cancel)
        began = time.monotonic()
        await asyncio.gather(callers.decide(plan.decisions), disturb(plan, callers, broker, publishers))
        decided_s = time.monotonic() - began
        await until_delivered(observer, results, consuming, (1 + len(EFFECTS)) * plan.decisions)
        print(
            f"{plan.decisions} decisions in {decided_s:.0f} s, {plan.outages} outages of the broker, {plan.kills} "
            f"publishers killed; all is applied after {time.monotonic() - began:.0f} s: {consumer}",
            flush=True,
            file=out,
        )
        wrong = Counter(judge(callers.told, await read_applied(results)))
        recorded = await observer.fetchval("SELECT count(*) FROM ledger WHERE state = 2")
        wrong["a decision isn't in the ledger, or was made for nobody"] = abs(plan.decisions - recorded)
        wrong["an event is parked"] = await observer.fetchval("SELECT count(*) FROM outbox_parked")
        return +wrong


@asynccontextmanager
async def database_beside(url: URL, admin: asyncpg.Connection) -> AsyncIterator[URL]:
    """Give a database for a consumer, on the same server."""
    name = f"{url.database}_consumer"
    await admin.execute(f"CREATE DATABASE {name}")
    try:
        yield url.set(database=name)
    finally:
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@asynccontextmanager
async def serving(url: URL, directory: Path) -> AsyncIterator[Caller]:
    """Run a service that publishes nothing itself, and give a caller of it."""
    policy = table_policy("DONE", outputs={"effects": EFFECTS_COLUMN})
    catalog = write_catalog(directory / "catalog", {OPERATION: {"policy": "table", "topic": TOPIC}}, {"table": policy})
    arguments = ["--database-url", url_text(url), "--catalog", str(catalog), "--no-housekeeping"]
    service = ServiceProcess(directory / "service.log", arguments)
    try:
        service.wait_until_ready()
        async with grpc.aio.insecure_channel(service.address) as channel:
            yield Caller(channel, await make_token(url, TENANT))
    finally:
        service.kill()


async def until_delivered(
    observer: asyncpg.Connection, results: asyncpg.Connection, consuming: asyncio.Task[None], count: int
) -> None:
    """Wait until nothing is to be published any more and so many events are applied; what is missing is judged."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if consuming.done():
            consuming.result()
        waiting = await observer.fetchval("SELECT count(*) FROM outbox")
        if not waiting and await results.fetchval("SELECT count(DISTINCT event_id) FROM applied") >= count:
            return
        await asyncio.sleep(0.2)


async def read_applied(connection: asyncpg.Connection) -> list[DecisionEvent]:
    """Read what a consumer applied, in its order."""
    rows = await connection.fetch("SELECT payload FROM applied ORDER BY number")
    return [DecisionEvent.FromString(row["payload"]) for row in rows]


async def run(kind: str, plan: Plan, out: TextIO) -> bool:
    """Run with a broker of a kind, print what is wrong, and tell whether nothing is."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decideonce-bench-")))
        # The server runs as a user of its own where this runs as root.
        directory.chmod(0o755)
        postgres = EmbeddedPostgres(directory / "data")
        stack.callback(postgres.stop)
        url = await postgres.create_database()
        await migrate(url)
        broker = BROKERS[kind]()
        stack.callback(broker.close)
        print(f"{kind}:", flush=True, file=out)
        wrong = await deliver(url, broker, directory, plan, out)
        for what, count in wrong.items():
            print(f"{count} times: {what}", file=out)
        print(f"{wrong.total()} violations", flush=True, file=out)
        return not wrong


def main() -> None:
    """Run as a program; exit with 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--decisions", type=int, default=Plan.decisions)
    parser.add_argument("--broker", action="append", choices=BROKERS, help="nats and kafka, where none is given")
    given = parser.parse_args()
    are_right = []
    for kind in given.broker or ("nats", "kafka"):
        # What Tansu has is gone when it is stopped.
        outages = Plan.outages if BROKERS[kind].keeps_data else 0
        are_right.append(asyncio.run(run(kind, Plan(given.decisions, outages), sys.stdout)))
    raise SystemExit(not all(are_right))


if __name__ == "__main__":
    main()
