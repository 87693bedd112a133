"""Others that do something once per key, under the same load on the same machine; each may be absent.

`make bench` installs them into `.venv/bench`. What a peer promises and what it lacks stands beside its numbers: none of
them does the same as another.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from google.protobuf.json_format import MessageToDict

from bench.echo import DECIDE
from bench.loader import PLACEHOLDER, Target, environment
from bench.subject import FACTS, OPERATION, Subject
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.ports import reserved_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FETCHED = ROOT / ".venv/bench"
PYTHON = FETCHED / "peers/bin/python"
CONFIG = HERE / "peer_restate.toml"
READY_WITHIN_S = 60.0

Process = asyncio.subprocess.Process


class PeerMissing(Exception):
    """A peer can't be measured here; the text says why."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of calls of a peer; `replayed` keys are sent again in turn, or each is new where that is 0."""

    target: Target
    replayed: int = 0


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A peer that runs: its processes, and its kinds of calls by name."""

    roots: Sequence[psutil.Process]
    kinds: Mapping[str, Kind]


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer, and what it promises to who calls it with a key, and what not."""

    promises: str
    lacks: str
    start: Callable[[Subject, int], AbstractAsyncContextManager[RunningPeer]]


@asynccontextmanager
async def dbos(measured: Subject, processes: int) -> AsyncIterator[RunningPeer]:
    """Run DBOS behind the service's own gRPC contract, on a database of its own of the same Postgres."""
    if not PYTHON.exists():
        raise PeerMissing("its Python packages could not be installed")
    await measured.observer.execute("CREATE DATABASE dbos")
    where = measured.postgres.url("dbos").query
    url = f"postgresql://postgres@/dbos?host={where['host']}&port={where['port']}"
    async with AsyncExitStack() as stack:
        port = stack.enter_context(reserved_port("127.0.0.1:0"))
        started = []
        for number in range(processes):
            process = await _start(
                stack,
                [PYTHON, HERE / "peer_dbos.py", f"127.0.0.1:{port}", measured.response, str(number)],
                measured.directory / "dbos.log",
                DBOS_SYSTEM_DATABASE_URL=url,
                PYTHONPATH=str(ROOT / "client"),
            )
            # One after the other: the first makes the tables.
            await _told_ready(process, measured.directory / "dbos.log")
            started.append(psutil.Process(process.pid))
        first = Target(f"127.0.0.1:{port}", DECIDE, measured.target.request, processes=lambda: started)
        again = replace(first, marks_replays=False)
        yield RunningPeer(started, {"first": Kind(first), "replay": Kind(again, replayed=1_000)})


# In Restate's namespace; says when it has been told of the service.
REGISTER = """
import json, time, urllib.request
request = urllib.request.Request("http://127.0.0.1:9070/deployments", headers={"content-type": "application/json"},
    data=json.dumps({"uri": "http://127.0.0.1:9080"}).encode())
for _ in range(300):
    try:
        urllib.request.urlopen(request, timeout=10).read()
        print("ready", flush=True)
        break
    except OSError:
        time.sleep(0.1)
"""


@asynccontextmanager
async def restate(measured: Subject, processes: int) -> AsyncIterator[RunningPeer]:
    """Run Restate and a service of its Python SDK in a network namespace of their own, which leads nowhere."""
    server = next(FETCHED.glob("restate/node_modules/@restatedev/restate-server-*/bin/restate-server"), None)
    if server is None or not PYTHON.exists():
        raise PeerMissing("it could not be installed")
    async with AsyncExitStack() as stack:
        log = measured.directory / "restate.log"
        within = await _namespace(stack, log)
        handlers = await _start(
            stack,
            [*within, PYTHON, "-m", "hypercorn", "--config", CONFIG, "--workers", str(processes), "peer_restate:app"],
            log,
            PYTHONPATH=str(HERE),
            PEER_RESPONSE=json.dumps(MessageToDict(wire.DecideResponse.FromString(measured.response.read_bytes()))),
        )
        running = await _start(
            stack,
            [*within, server, "--base-dir", measured.directory / "restate"],
            log,
            RESTATE_DISABLE_TELEMETRY="true",
            DO_NOT_TRACK="1",
            RESTATE_LOG_FILTER="warn",
        )
        await _told_ready(await _start(stack, [*within, PYTHON, "-c", REGISTER], log), log)
        roots = [psutil.Process(running.pid), psutil.Process(handlers.pid)]
        request = measured.directory / "restate.json"
        request.write_text(json.dumps({"operationKey": PLACEHOLDER, "operation": OPERATION, "facts": FACTS}))
        headers = ("content-type:application/json", f"idempotency-key:{PLACEHOLDER}")
        first = Target("127.0.0.1:8080", "/Decider/decide", request, headers, plain=True, within=within)
        step = replace(first, path="/Decider/step")
        yield RunningPeer(roots, {"first": Kind(first), "step": Kind(step), "replay": Kind(first, replayed=5_000)})


async def _namespace(stack: AsyncExitStack, log: Path) -> tuple[str, ...]:
    """Make a network namespace with a loopback interface and nothing else; give what runs a command in it."""
    as_user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    try:
        keeper = await _start(
            stack,
            ["unshare", "--net", *as_user, "sh", "-c", "ip link set lo up && echo ready && exec sleep infinity"],
            log,
        )
        await _told_ready(keeper, log)
    except (OSError, AssertionError) as error:
        raise PeerMissing("no network namespace can be made here, and it is to reach nothing outside") from error
    enter_user = ("--user", "--preserve-credentials") if as_user else ()
    return ("nsenter", "--net", *enter_user, "--target", str(keeper.pid))


async def _start(stack: AsyncExitStack, command: Sequence[str | Path], log: Path, **variables: str) -> Process:
    """Start a process that the stack's end kills."""
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=stderr, env=environment(**variables)
        )

    async def end() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            for one in (root, *root.children(recursive=True)):
                one.kill()
        await process.wait()

    stack.push_async_callback(end)
    return process


async def _told_ready(process: Process, log: Path) -> None:
    async with asyncio.timeout(READY_WITHIN_S):
        line = await process.stdout.readline()
    assert b"ready\n" == line, log.read_text()


PEERS = {
    "DBOS": Peer(
        promises="the result of a workflow with one step, once per workflow id, in Postgres; one interrupted goes on",
        lacks="a look at whether a known key comes with other input, a policy, events, tenants",
        start=dbos,
    ),
    "Restate": Peer(
        promises="the result of a handler, once per idempotency key, in its own log on the disk, for a day or as long "
        "as it is told; one interrupted goes on",
        lacks="a look at whether a known key comes with other input, a policy, events, tenants, Postgres",
        start=restate,
    ),
}
