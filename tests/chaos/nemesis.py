"""Faults, at random times that a seed makes the same again."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc

from chaos.deployment import Deployment, Instance, send_signal
from chaos.history import BROKER, Fault, History
from chaos.proxy import Cut
from decideonce.v1.catalog_pb2_grpc import CatalogServiceStub
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.catalog_wire import request_of

# Longer than every lease of the chaos catalog.
PAUSE_S = 3.0
BLACK_HOLE_S = 3.0
CUT_WITHIN_S = 3.0
BROKER_AWAY_S = 3.0
# Events flow for most of the time.
BROKER_FAULT_PAUSE_S = 8.0


class Nemesis:
    """Injects one fault after the other, and heals it."""

    def __init__(self, deployment: Deployment, history: History, now: Callable[[], float], seed: int) -> None:
        self._deployment = deployment
        self._history = history
        self._now = now
        self._random = random.Random(seed)
        # Of its own, so that neither's turns change the other's.
        self._brokers_random = random.Random(seed)
        self._next_outcome = "TWO"
        self.kinds: dict[str, Callable[[Instance], Awaitable[bool | None]]] = {
            "worker killed": self._kill_worker,
            "instance killed": self._kill_instance,
            "housekeeping killed": self._kill_housekeeping,
            "worker paused": self._pause_worker,
            "cut before commit": self._cut_before,
            "cut after commit": self._cut_after,
            "connections cut": self._cut_all,
            "connections lost": self._lose_all,
            "black hole": self._black_hole,
            "postgres restarted": self._restart_postgres,
            "failover": self._fail_over,
            "clock changed": self._change_clock,
            "catalog applied": self._apply,
        }
        self.broker_kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "broker stopped": self._stop_broker,
            "broker frozen": self._freeze_broker,
        }
        # Those that keep the deployment busy for long stand once, the others more often.
        self._often = [
            "worker killed",
            "housekeeping killed",
            "cut before commit",
            "cut after commit",
            "connections cut",
        ]
        self._often += ["catalog applied", "cut before commit", "cut after commit", "worker paused"]

    async def run(self, until: float, pause: float) -> None:
        """Go through all kinds in a random order, again and again, until a time of the history; the broker's beside."""
        await asyncio.gather(self._disturb_service(until, pause), self._disturb_broker(until))

    async def _disturb_broker(self, until: float) -> None:
        kinds = list(self.broker_kinds)
        while True:
            self._brokers_random.shuffle(kinds)
            for kind in kinds:
                await asyncio.sleep(self._brokers_random.uniform(0.5, 1.5) * BROKER_FAULT_PAUSE_S)
                if self._now() > until:
                    return
                fault = Fault(kind, BROKER, self._now())
                self._history.faults.append(fault)
                await self.broker_kinds[kind]()
                fault.ended = self._now()

    async def _stop_broker(self) -> None:
        await asyncio.to_thread(self._deployment.broker.stop)
        await asyncio.sleep(self._brokers_random.uniform(0, BROKER_AWAY_S))
        await asyncio.to_thread(self._deployment.broker.start)

    async def _freeze_broker(self) -> None:
        await asyncio.to_thread(self._deployment.broker.freeze)
        await asyncio.sleep(BROKER_AWAY_S)
        self._deployment.broker.thaw()

    async def _disturb_service(self, until: float, pause: float) -> None:
        often: list[str] = []
        while True:
            round_ = [*self.kinds, *often]
            often = self._often
            self._random.shuffle(round_)
            for kind in round_:
                await asyncio.sleep(self._random.uniform(0.5, 1.5) * pause)
                if self._now() > until:
                    return
                await self.inject(kind)

    async def inject(self, kind: str) -> None:
        """Inject one fault somewhere, and heal it; one that didn't come about is forgotten."""
        name = self._random.choice(sorted(self._deployment.instances))
        fault = Fault(kind, name, self._now())
        self._history.faults.append(fault)
        happened = await self.kinds[kind](self._deployment.instances[name])
        fault.ended = self._now()
        if happened is False:
            self._history.faults.remove(fault)

    async def _kill(self, instance: Instance, role: str) -> bool:
        pids = await asyncio.to_thread(instance.pids, role)
        if pids:
            send_signal(self._random.choice(sorted(pids)), signal.SIGKILL)
        return bool(pids)

    async def _kill_worker(self, instance: Instance) -> bool:
        return await self._kill(instance, "worker")

    async def _kill_housekeeping(self, instance: Instance) -> bool:
        return await self._kill(instance, "housekeep")

    async def _kill_instance(self, instance: Instance) -> None:
        await instance.kill()
        await instance.start()

    async def _pause_worker(self, instance: Instance) -> bool:
        pids = await asyncio.to_thread(instance.pids, "worker")
        if pids:
            pid = self._random.choice(sorted(pids))
            send_signal(pid, signal.SIGSTOP)
            await asyncio.sleep(PAUSE_S)
            send_signal(pid, signal.SIGCONT)
        return bool(pids)

    async def _cut(self, instance: Instance, *, after: bool) -> bool:
        proxy = self._deployment.proxies[instance.name]
        # Some statements pass seldom; a completion does every moment.
        for statement in (self._random.choice(["reserve", "complete", "take_over", "renew"]), "complete"):
            cut = proxy.cut = Cut(statement, after)
            with suppress(TimeoutError):
                await asyncio.wait_for(cut.made.wait(), CUT_WITHIN_S)
            proxy.cut = None
            if cut.made.is_set():
                return True
        return False

    async def _cut_before(self, instance: Instance) -> bool:
        return await self._cut(instance, after=False)

    async def _cut_after(self, instance: Instance) -> bool:
        return await self._cut(instance, after=True)

    async def _cut_all(self, instance: Instance) -> None:
        self._deployment.proxies[instance.name].cut_all()

    async def _lose_all(self, instance: Instance) -> None:
        self._deployment.proxies[instance.name].lose_all()

    async def _black_hole(self, instance: Instance) -> None:
        proxy = self._deployment.proxies[instance.name]
        proxy.black_hole()
        await asyncio.sleep(BLACK_HOLE_S)
        proxy.let_pass()

    async def _restart_postgres(self, _instance: Instance) -> None:
        await self._deployment.cluster.restart()

    async def _fail_over(self, _instance: Instance) -> None:
        await self._deployment.cluster.fail_over()
        # What was connected to the old primary is gone with it.
        for proxy in self._deployment.proxies.values():
            proxy.cut_all()
        await self._deployment.cluster.add_standby()

    async def _change_clock(self, _instance: Instance) -> None:
        instance = self._deployment.instances["b"]
        instance.clock_offset_s = -instance.clock_offset_s
        await instance.kill()
        await instance.start()

    async def _apply(self, instance: Instance) -> bool:
        source = read_catalog(self._deployment.catalogs[self._next_outcome])
        token = next(iter(self._deployment.tokens.values()))
        with suppress(grpc.RpcError, grpc.aio.UsageError):
            await CatalogServiceStub(instance.channel).ApplyCatalog(
                request_of(source, dry_run=False), metadata=[("authorization", f"Bearer {token}")], timeout=10
            )
            self._next_outcome = "ONE" if self._next_outcome == "TWO" else "TWO"
            return True
        return False
