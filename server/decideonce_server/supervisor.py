"""Keeps the processes of an instance running: one that dies is replaced at once, one that keeps dying with a pause."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import structlog
import tenacity

from decideonce_server.backoff import pause_s

# A process that lived this long had started well: its death is no sign of a fault that a new one would meet too.
STABLE_S = 10.0
PAUSE = tenacity.wait_exponential(multiplier=0.5, max=30)
log = structlog.get_logger()


class StartFailed(Exception):
    """A process ended before it was ready; its own log says why."""


@dataclass(frozen=True, slots=True)
class Role:
    """One process to keep: its name, and the arguments of the program that it runs."""

    name: str
    arguments: tuple[str, ...]


class Supervisor:
    """Starts processes, replaces those that die, and stops them all.

    Each holds the read end of a pipe of which this process holds the other: it sees the end of this process, however
    that comes, and stops too.
    """

    def __init__(self, roles: Sequence[Role], environment: Mapping[str, str]) -> None:
        self._roles = roles
        self._environment = os.environ | dict(environment)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        # Where each process that is ready serves its metrics, if it does.
        self.metrics: dict[str, str] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Start all, and wait until each is ready.

        Raises:
            StartFailed: one ended instead.
        """
        await asyncio.gather(*(self._start(role) for role in self._roles))
        self._keepers = [asyncio.create_task(self._keep(role)) for role in self._roles]

    async def _start(self, role: Role) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "decideonce_server",
            *role.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
        )
        self._processes[role.name] = process
        if self._stopping:
            process.terminate()
        # The one line that a process prints says that it is ready, and where its metrics are.
        line = b"" if process.stdout is None else await process.stdout.readline()
        if not line:
            raise StartFailed(f"{role.name} could not start: it ended with exit code {await process.wait()}")
        _, _, metrics = line.decode().rstrip().partition(" metrics on ")
        self.metrics = self.metrics | {role.name: metrics} if metrics else self.metrics

    async def _keep(self, role: Role) -> None:
        deaths = 0
        while not self._stopping:
            began = time.monotonic()
            exit_code = await self._processes[role.name].wait()
            if self._is_stopping():
                return
            deaths = 0 if time.monotonic() - began > STABLE_S else deaths + 1
            pause = pause_s(PAUSE, deaths) if deaths > 1 else 0.0
            report = log.error if deaths > 1 else log.warning
            report("a process died and is replaced", role=role.name, exit_code=exit_code, pause_seconds=pause)
            await asyncio.sleep(pause)
            try:
                await self._start(role)
            except (StartFailed, OSError) as error:
                log.error("a process could not be replaced", role=role.name, error=str(error))  # noqa: TRY400

    def _is_stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """Ask all to stop; asked again, they stop faster."""
        self._stopping = True
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)

    async def wait(self, limit: timedelta) -> None:
        """Wait until all have stopped, and kill those that have not within the limit."""
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        _, late = await asyncio.wait(waits, timeout=limit.total_seconds()) if waits else ((), ())
        for process in self._processes.values() if late else ():
            if process.returncode is None:
                log.error("a process did not stop in time and is killed", pid=process.pid)
                process.kill()
        await asyncio.gather(*waits)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
