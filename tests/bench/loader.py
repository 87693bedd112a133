"""The load generator that measurements share: `load.c`, which `make bench` builds, and what it is told."""

import asyncio
import itertools
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PROGRAM = Path(__file__).parents[2] / ".venv/bench/load"
# What stands in a request where each call has its key.
PLACEHOLDER = "00000000-0000-4000-8000-000000000000"
GRPC_HEADERS = ("content-type:application/grpc", "te:trailers", "grpc-timeout:20S")
# Of each process that shares a port. More are opened, as the kernel deals them out by chance.
CONNECTIONS_PER_PROCESS = 4
OPENED_PER_PROCESS = 16
ROUNDS_OF_DEALING = 5


class LoadFailed(Exception):
    """An answer was wrong, or the load generator could not run; the text tells what it said."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is called: where and how, and the processes that share its port; none where one process has it.

    `within` is a command that runs another one where the target is.
    """

    address: str
    path: str
    request: Path
    headers: Sequence[str] = GRPC_HEADERS
    processes: Callable[[], Sequence[psutil.Process]] = tuple
    plain: bool = False
    marks_replays: bool = True
    within: Sequence[str] = ()

    @property
    def arguments(self) -> list[str]:
        """The load generator's arguments that name it."""
        headers = itertools.chain.from_iterable(("--header", header) for header in self.headers)
        arguments = ["--address", self.address, "--path", self.path, "--request", str(self.request), *headers]
        return [*arguments, "--plain"] if self.plain else arguments


@dataclass(slots=True)
class Keys:
    """Where operation keys come from: a seed of this run's own, how many were used so far, and how often some again."""

    seed: int = field(default_factory=lambda: secrets.randbits(63))
    used: int = 0
    used_again: int = 0


async def call(
    target: Target,
    keys: Keys,
    *,
    callers: int = 1,
    seconds: float = 0.0,
    calls: int = 0,
    rate: float = 0.0,
    replayed: int = 0,
) -> dict[str, Any]:
    """Make calls for a time, or so many of them, and give what was measured.

    Without a rate it is a closed loop. With `replayed` the first so many keys are sent again, in turn, and every answer
    must be a replay; otherwise every key is new, and so must every answer be.

    Raises:
        LoadFailed: an answer wasn't as it must be.
    """
    processes = target.processes()
    connections = min(callers, CONNECTIONS_PER_PROCESS * max(1, len(processes)))
    options = ["--callers", str(callers), "--seconds", str(seconds), "--calls", str(calls), "--rate", str(rate)]
    options += ["--seed", str(keys.seed), "--first", str(0 if replayed else keys.used), "--keys", str(replayed)]
    options += ["--skip", str(keys.used_again)]
    options += ["--replayed"] if replayed and target.marks_replays else []
    for _ in range(ROUNDS_OF_DEALING):
        measured = await _run(target, options, connections, processes)
        if measured is not None:
            if replayed:
                keys.used_again += measured["calls"]
            else:
                keys.used += measured["calls"]
            return measured
    raise LoadFailed("the kernel gave a process of the target no connection, again and again")


async def _run(
    target: Target, options: Sequence[str], connections: int, processes: Sequence[psutil.Process]
) -> dict[str, Any] | None:
    opened = max(connections, OPENED_PER_PROCESS * len(processes)) if processes else connections
    running = await asyncio.create_subprocess_exec(
        *target.within,
        PROGRAM,
        *target.arguments,
        *options,
        "--connections",
        str(opened),
        *(["--balance"] if processes else []),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        kept = b""
        if processes:
            ports = {int(port) for port in (await running.stdout.readline()).split()}
            chosen = deal(ports, processes, connections)
            if chosen is None:
                return None
            kept = f"{' '.join(map(str, chosen))}\n".encode()
        output, error = await running.communicate(kept)
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    if running.returncode:
        raise LoadFailed(f"{target.path}: {output.decode()}{error.decode()}")
    return json.loads(output)


def deal(ports: set[int], processes: Sequence[psutil.Process], connections: int) -> list[int] | None:
    """Choose as many of these ports for each process that answers there; None where the kernel gave one too few."""
    of_process = [
        [c.raddr.port for c in process.net_connections("tcp") if c.raddr and c.raddr.port in ports]
        for process in processes
    ]
    chosen = [port for turn in itertools.zip_longest(*of_process) for port in turn][:connections]
    return None if None in chosen or len(chosen) < connections else chosen


async def keys_of(keys: Keys, count: int) -> bytes:
    """Use so many new keys, and give them, a line each."""
    running = await asyncio.create_subprocess_exec(
        *(PROGRAM, "--list", "--seed", str(keys.seed), "--first", str(keys.used), "--calls", str(count)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await running.communicate()
    assert not running.returncode
    keys.used += count
    return output


def environment(**variables: str) -> dict[str, str]:
    """Give this process's environment with these variables."""
    return os.environ | variables
