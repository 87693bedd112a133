"""The processes of a service as an operator sees them, and waiting for what they do."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from harness import ServiceProcess

WITHIN_S = 20.0


def children(service: ServiceProcess, command: str) -> list[psutil.Process]:
    """Give the processes of a service that run a command of the program: "worker" or "housekeep"."""
    return [process for process in psutil.Process(service.process.pid).children() if command in arguments_of(process)]


def arguments_of(process: psutil.Process) -> list[str]:
    """Give a process's arguments; none where it is gone."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def kill(service: ServiceProcess, command: str) -> None:
    """Kill the only process of a service that runs a command, and wait until it is gone."""
    (process,) = children(service, command)
    process.kill()


async def until(condition: Callable[[], Awaitable[Any] | Any], within: float = WITHIN_S) -> Any:
    """Wait until a condition gives something true, and give that; conditions may be coroutine functions."""
    async with asyncio.timeout(within):
        while True:
            result = condition()
            if isinstance(result, Awaitable):
                result = await result
            if result:
                return result
            await asyncio.sleep(0.01)


def free_address() -> str:
    """Give an address of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
