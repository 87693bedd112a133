"""Evaluations in processes that can be killed."""

import asyncio
import contextlib
import ctypes
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from struct import Struct
from typing import Any

import psutil
import pytest
import uvloop

from decideonce_server import evaluator, evaluator_process, policy_jdm
from decideonce_server.evaluator import Evaluators
from decideonce_server.giving_way import LONG_SLICE_NS
from decideonce_server.policy import (
    Effect,
    Evaluation,
    InvalidResult,
    PolicyCrashed,
    PolicyFailed,
    PolicyTimeout,
    PolicyVersion,
    RetryLater,
    content_digest,
)
from decideonce_server.policy_python import NAME
from decideonce_server.values import Json
from processes import until

# Production runs on uvloop; command-line programs and tests may not.
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

# What has to happen happens far sooner; a test that waits this long has failed.
LIMIT_S = 20

AMPLE = timedelta(seconds=LIMIT_S)
SHORT = timedelta(milliseconds=300)

DECISION: dict[str, Json] = {"time": "2026-03-01T08:00:00Z", "tenant": "acme", "operation": "credit.approve-loan"}


def version(body: str, policy_id: str = "suite", setup: str = "") -> PolicyVersion:
    """Give a python policy whose function has this body; it finds os, time and RetryLater."""
    head = f"import os, time\nfrom decideonce_server.policy import RetryLater\n{setup}\n"
    function = "def decide(facts, decision):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ")
    content = f"# entry_point: suite:decide\n{head}{function}\n"
    return PolicyVersion(policy_id, 1, "python", content_digest(content), content)


ECHO = version("return {'outcome': 'OK', 'n': facts.get('n'), 'pid': os.getpid(), 'parent': os.getppid()}", "echo")

# Tells that it runs, and goes on when the gate gives it a byte.
GATED = """
    with open(facts["told"], "w") as told:
        told.write(f"{os.getpid()}\\n")
    os.read(os.open(facts["gate"], os.O_RDONLY), 1)
    return {"outcome": "THROUGH", "n": facts.get("n"), "pid": os.getpid()}
"""


class Gate:
    """Lets a test see when gated policies run, and let them go on one by one."""

    def __init__(self, directory: Path) -> None:
        self.facts: dict[str, Json] = {"told": str(directory / "told"), "gate": str(directory / "gate")}
        for name in ("told", "gate"):
            os.mkfifo(directory / name)
        # Both ends of both are open here, so that no policy waits for anything but its byte.
        self._gate = os.open(directory / "gate", os.O_RDWR)
        self._told = os.fdopen(os.open(directory / "told", os.O_RDWR | os.O_NONBLOCK), "rb")
        self._reader = asyncio.StreamReader()

    async def start(self) -> asyncio.BaseTransport:
        reading = asyncio.StreamReaderProtocol(self._reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: reading, self._told)
        return transport

    async def running(self) -> int:
        """Wait until one more gated policy runs, and give its process."""
        async with asyncio.timeout(LIMIT_S):
            return int(await self._reader.readline())

    def open(self, count: int = 1) -> None:
        os.write(self._gate, b"." * count)

    def close(self) -> None:
        os.close(self._gate)


@contextlib.asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Evaluators]:
    started = Evaluators(**settings)
    await started.start()
    try:
        yield started
    finally:
        await started.close()


@pytest.fixture
async def evaluators() -> AsyncIterator[Evaluators]:
    async with running() as started:
        yield started


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Gate]:
    opened = Gate(tmp_path)
    transport = await opened.start()
    yield opened
    transport.close()
    opened.close()


async def evaluate(
    evaluators: Evaluators, policy: PolicyVersion, facts: dict[str, Json], decision: dict[str, Json], budget: timedelta
) -> Evaluation:
    return await evaluators.evaluate(policy, json.dumps(facts).encode(), decision, budget)


async def echo(evaluators: Evaluators, n: int = 0) -> dict[str, Any]:
    return (await evaluate(evaluators, ECHO, {"n": n}, DECISION, AMPLE)).outputs


def counting_policy() -> PolicyVersion:
    """Give a JDM policy that counts up to facts.n: it takes long where that is large, and fails where it is a text."""
    value = "len(filter([1..facts.n], # > 0))"
    expressions = [{"id": key, "key": key, "value": text} for key, text in (("outcome", "'OK'"), ("n", value))]
    nodes = [
        {"id": "in", "name": "In", "type": "inputNode"},
        {"id": "count", "name": "Count", "type": "expressionNode", "content": {"expressions": expressions}},
        {"id": "out", "name": "Out", "type": "outputNode"},
    ]
    edges = [
        {"id": "a", "sourceId": "in", "targetId": "count"},
        {"id": "b", "sourceId": "count", "targetId": "out"},
    ]
    content = policy_jdm.bundle("count", {"count": json.dumps({"nodes": nodes, "edges": edges})})
    return PolicyVersion("count", 1, "jdm", content_digest(content), content)


COUNT = counting_policy()
# Takes about 0.3 s.
SLOW_COUNT = 3_000_000


async def count(evaluators: Evaluators, n: Json, budget: timedelta = AMPLE) -> Json:
    return (await evaluate(evaluators, COUNT, {"n": n}, DECISION, budget)).outputs["n"]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the sizes of the sets that evaluators are asked from here on."""
    found: list[int] = []

    def question(digest: str, inputs: Sequence[tuple[bytes, dict[str, Any]]], seconds_max: float) -> bytes:
        found.append(len(inputs))
        return evaluator_process.question(digest, inputs, seconds_max)

    monkeypatch.setattr(evaluator, "question", question)
    return found


async def ended(pid: int) -> None:
    """Wait until a process has ended, be it reaped or not."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    seen = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, seen.set)
    try:
        async with asyncio.timeout(LIMIT_S):
            await seen.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended and was reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_an_evaluation_crosses_whole(evaluators: Evaluators) -> None:
    """Every part of an evaluation arrives as the policy gave it, and as plain values."""
    policy = version(
        """
        return {
            "outcome": Outcome.APPROVED, "reasons": ("größer", "🙂"),
            "effects": [{"type": "letter.send", "payload": facts}, {"type": "note"}],
            "decision": decision, "n": [1, 1.5, None, True, {"x": {}}, 2**53 - 1],
        }
        """,
        setup="from enum import StrEnum\nclass Outcome(StrEnum):\n    APPROVED = 'APPROVED'",
    )
    facts: dict[str, Json] = {"a": {"b": [1, "ß"]}}
    evaluation = await evaluate(evaluators, policy, facts, DECISION, AMPLE)
    expected = Evaluation(
        outcome="APPROVED",
        engine=NAME,
        reasons=("größer", "🙂"),
        outputs={"decision": DECISION, "n": [1, 1.5, None, True, {"x": {}}, 2**53 - 1]},
        effects=(Effect("letter.send", facts), Effect("note", {})),
    )
    assert expected == evaluation
    assert str is type(evaluation.outcome)


async def test_jdm_policies_are_evaluated_there_too(evaluators: Evaluators) -> None:
    """A JDM version that is no bundle fails in the evaluator, which then serves the next call."""
    broken = PolicyVersion("broken", 1, "jdm", content_digest("{"), "{")
    with pytest.raises(PolicyFailed):
        await evaluate(evaluators, broken, {}, DECISION, AMPLE)
    assert 7 == (await echo(evaluators, 7))["n"]


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ("raise RetryLater('no rates yet')", RetryLater, "no rates yet"),
        ("class Own(RetryLater): pass\nraise Own('mine')", RetryLater, "mine"),
        ("return 1 / 0", PolicyFailed, "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", PolicyFailed, "SystemExit: 3"),
        ("return {}", InvalidResult, "outcome must be a non-empty text"),
        ("return {'outcome': 'A', 'text': 'x' * (1 << 20)}", InvalidResult, "the result must not exceed 1048576 bytes"),
    ],
)
async def test_a_policys_errors_cross(evaluators: Evaluators, body: str, error: type[Exception], text: str) -> None:
    """An error arrives as itself, and its evaluator goes on serving."""
    before = (await echo(evaluators))["pid"]
    with pytest.raises(error, match=text) as caught:
        await evaluate(evaluators, version(body), {}, DECISION, AMPLE)
    assert error is type(caught.value)
    assert before == (await echo(evaluators))["pid"]


async def test_an_errors_text_is_bounded(evaluators: Evaluators) -> None:
    """A policy can't flood anyone with its error's text."""
    with pytest.raises(RetryLater) as caught:
        await evaluate(evaluators, version("raise RetryLater('x' * 100_000)"), {}, DECISION, AMPLE)
    assert evaluator_process.ERROR_TEXT_LENGTH_MAX == len(str(caught.value))


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "time.sleep(600)",
        "sum(range(10**15))",
        "while True:\n    try: time.sleep(600)\n    except BaseException: pass",
    ],
)
async def test_a_policy_that_does_not_end_is_killed(evaluators: Evaluators, body: str) -> None:
    """Past its budget an evaluation is PolicyTimeout at once, its process is gone, and the next call is served.

    agno-agi/agno#9512: work that burns the CPU starved what kept its owner alive.
    """
    started = time.monotonic()
    with pytest.raises(PolicyTimeout):
        await evaluate(evaluators, version(body), {}, DECISION, SHORT)
    assert SHORT.total_seconds() <= time.monotonic() - started < SHORT.total_seconds() + 2
    assert 7 == (await echo(evaluators, 7))["n"]


async def test_a_killed_evaluator_is_gone(evaluators: Evaluators, gate: Gate) -> None:
    """The process of an evaluation that ran out of its budget is killed and reaped."""
    with pytest.raises(PolicyTimeout):
        await evaluate(evaluators, version(GATED), gate.facts, DECISION, timedelta(seconds=1))
    killed = await gate.running()
    await ended(killed)
    await evaluators.close()
    assert is_gone(killed)


async def test_a_crash_takes_down_its_own_evaluation_only(evaluators: Evaluators, gate: Gate) -> None:
    """A policy that ends its process is PolicyCrashed, and an evaluation beside it gives its result.

    vectorize-io/hindsight#2675: a job that killed its worker took the worker's other jobs along.
    """
    neighbour = asyncio.create_task(evaluate(evaluators, version(GATED), gate.facts, DECISION, AMPLE))
    await gate.running()
    for _ in range(3):
        with pytest.raises(PolicyCrashed, match="exit code 137"):
            await evaluate(evaluators, version("os._exit(137)"), {}, DECISION, AMPLE)
    gate.open()
    assert "THROUGH" == (await neighbour).outcome
    assert 7 == (await echo(evaluators, 7))["n"]


async def test_a_signal_that_ends_an_evaluator_is_a_crash(evaluators: Evaluators) -> None:
    """A segmentation fault, or the kernel short of memory, is PolicyCrashed with the signal as a negative exit code."""
    with pytest.raises(PolicyCrashed, match="exit code -11"):
        await evaluate(evaluators, version("os.kill(os.getpid(), 11)"), {}, DECISION, AMPLE)


async def test_policies_that_burn_the_cpu_leave_others_prompt(evaluators: Evaluators) -> None:
    """While one policy burns all CPUs, calls of another are answered promptly."""
    burning = version("while True: pass", "burning")
    budget = timedelta(seconds=3)
    burns = [asyncio.create_task(evaluate(evaluators, burning, {}, DECISION, budget)) for _ in range(8)]
    for n in range(20):
        async with asyncio.timeout(1):
            assert n == (await echo(evaluators, n))["n"]
    assert not any(burn.done() for burn in burns)
    assert [PolicyTimeout] * 8 == [type(end) for end in await asyncio.gather(*burns, return_exceptions=True)]


async def test_a_slow_policy_has_half_of_the_evaluators(evaluators: Evaluators, gate: Gate) -> None:
    """Ten slow evaluations of one policy run eight at a time, in order, and another policy is answered meanwhile."""
    slow = version(GATED, "slow")
    calls = [
        asyncio.create_task(evaluate(evaluators, slow, {**gate.facts, "n": n}, DECISION, AMPLE)) for n in range(10)
    ]
    pids = {await gate.running() for _ in range(8)}
    assert 8 == len(pids)
    started = time.monotonic()
    assert 7 == (await echo(evaluators, 7))["n"]
    assert time.monotonic() - started < 0.3
    assert not any(call.done() for call in calls)
    for _ in range(2):
        gate.open()
        # One that waited has the evaluator of the one that ended, and no other.
        assert await gate.running() in pids
    assert [True, True, False, False] == sorted((call.done() for call in calls), reverse=True)[:4]
    gate.open(8)
    assert list(range(10)) == [(await call).outputs["n"] for call in calls]


# Earlier kernels don't let a process choose how long its slices of time are.
HAS_SLICES = tuple(map(int, platform.release().split(".")[:2])) >= (6, 12)
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}[platform.machine()]


def slice_ns(pid: int) -> int:
    """Tell how long the slices of a process are, in ns."""
    attributes = Struct("<IIQiIQQQ")
    read = ctypes.create_string_buffer(attributes.size)
    assert 0 == ctypes.CDLL(None).syscall(SCHED_GETATTR, pid, read, attributes.size, 0)
    return attributes.unpack(read.raw)[5]


async def test_a_long_evaluation_gives_way_to_others(evaluators: Evaluators, gate: Gate) -> None:
    """An evaluation that goes on for long is held to half of the cores, in long slices; what comes after it is not."""
    call = asyncio.create_task(evaluate(evaluators, version(GATED), gate.facts, DECISION, AMPLE))
    process = psutil.Process(await gate.running())
    every = process.cpu_affinity()
    half = every[-(-len(every) // 2) :] or every
    usual_ns = slice_ns(process.pid)
    await until(lambda: half == process.cpu_affinity())
    assert (LONG_SLICE_NS if HAS_SLICES else usual_ns) == slice_ns(process.pid)
    gate.open()
    await call
    assert (every, usual_ns) == (process.cpu_affinity(), slice_ns(process.pid))


async def test_an_engine_that_works_in_threads_is_held_with_all_of_them(evaluators: Evaluators) -> None:
    """It isn't only an evaluator's first thread that is held to half of the cores."""
    await count(evaluators, 1)
    every = sorted(os.sched_getaffinity(0))
    half = set(every[-(-len(every) // 2) :] or every)
    (fork_server,) = psutil.Process().children()

    def is_held(process: psutil.Process) -> bool:
        threads = [thread.id for thread in process.threads()]
        return len(threads) > 1 and all(half == os.sched_getaffinity(thread) for thread in threads)

    call = asyncio.create_task(count(evaluators, 30 * SLOW_COUNT))
    await until(lambda: any(map(is_held, fork_server.children())))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_new_evaluator_is_made_aside_and_then_takes_part(evaluators: Evaluators) -> None:
    """What replaces a killed one is forked on the half that it ran on; whatever it is asked, it then has all cores."""
    (fork_server,) = psutil.Process().children()
    every = psutil.Process().cpu_affinity()
    half = every[-(-len(every) // 2) :] or every
    made = fork_server.children()
    assert [half] * len(made) == [process.cpu_affinity() for process in made]
    await count(evaluators, 1)
    assert every in [process.cpu_affinity() for process in made]
    assert half == fork_server.cpu_affinity()
    usual_ns = slice_ns(os.getpid())
    assert {usual_ns} == {slice_ns(process.pid) for process in (fork_server, *made)}


async def test_policy_that_ran_away_begins_on_half_of_the_cores(evaluators: Evaluators) -> None:
    """What is known to take long leaves the others their half from its first moment."""
    body = """
        while facts["burns"]:
            pass
        return {"outcome": "OK", "cores": sorted(os.sched_getaffinity(0))}
    """
    burning = version(body)
    every = (await evaluate(evaluators, burning, {"burns": False}, DECISION, AMPLE)).outputs["cores"]
    with pytest.raises(PolicyTimeout):
        await evaluate(evaluators, burning, {"burns": True}, DECISION, SHORT)
    half = every[-(-len(every) // 2) :] or every
    assert half == (await evaluate(evaluators, burning, {"burns": False}, DECISION, AMPLE)).outputs["cores"]


async def test_what_is_prepared_for_others_is_spared(gate: Gate) -> None:
    """A version that no evaluator has ready gets the one that has the least ready: it may have to be killed."""
    async with running(size_max=4, warm=2) as evaluators:
        first = await echo(evaluators)
        with pytest.raises(PolicyTimeout):
            await evaluate(evaluators, version(GATED), gate.facts, DECISION, SHORT)
        assert first["pid"] == (await echo(evaluators))["pid"]


async def test_policies_are_served_in_turn(gate: Gate) -> None:
    """One policy's queue doesn't hold back the first call of another."""
    async with running(size_max=1, warm=1) as evaluators:
        served: list[str] = []

        async def call(policy_id: str) -> None:
            await evaluate(evaluators, version("return {'outcome': 'A'}", policy_id), {}, DECISION, AMPLE)
            served.append(policy_id)

        held = asyncio.create_task(evaluate(evaluators, version(GATED), gate.facts, DECISION, AMPLE))
        await gate.running()
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as calls:
            for policy_id in ("a", "a", "a", "b"):
                calls.create_task(call(policy_id))
            gate.open()
        assert ["a", "b", "a", "a"] == served
        await held


async def test_a_cancelled_call_ends_its_evaluator(evaluators: Evaluators, gate: Gate) -> None:
    """The evaluator of a call that was cancelled is killed, and no later call meets it."""
    call = asyncio.create_task(evaluate(evaluators, version(GATED), gate.facts, DECISION, AMPLE))
    pid = await gate.running()
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()
    await ended(pid)
    assert pid != (await echo(evaluators))["pid"]


async def test_no_call_gets_the_answer_of_a_cancelled_one(evaluators: Evaluators) -> None:
    """Whenever a call is cancelled, before, while or after it is answered, the next has its own answer."""
    for n in range(60):
        call = asyncio.create_task(echo(evaluators, -n))
        await asyncio.wait({call}, timeout=n * 0.00002)
        call.cancel()
        assert n == (await echo(evaluators, n))["n"]
        await asyncio.wait({call})


async def test_a_call_can_be_cancelled_while_it_waits(gate: Gate) -> None:
    """A cancelled call gives up its place, and those behind it are served."""
    async with running(size_max=2, warm=1) as evaluators:
        policy = version(GATED)
        first, second, third = (
            asyncio.create_task(evaluate(evaluators, policy, {**gate.facts, "n": n}, DECISION, AMPLE)) for n in range(3)
        )
        await gate.running()
        second.cancel()
        await asyncio.wait({second})
        gate.open(2)
        assert [0, 2] == [(await call).outputs["n"] for call in (first, third)]


async def test_a_call_cancelled_as_it_is_served_gives_its_evaluator_back(gate: Gate) -> None:
    """A call that is cancelled in the moment in which an evaluator became its own takes none along."""
    async with running(size_max=1, warm=1) as evaluators, asyncio.timeout(LIMIT_S):

        async def hold() -> None:
            await evaluate(evaluators, version(GATED), gate.facts, DECISION, AMPLE)
            # The evaluator was just handed on, and the call that it went to has not run since.
            call.cancel()

        held = asyncio.create_task(hold())
        await gate.running()
        call = asyncio.create_task(echo(evaluators))
        # Both calls of one policy, so that they are served in this order.
        waiting = asyncio.create_task(echo(evaluators, 7))
        gate.open()
        await held
        assert 7 == (await waiting)["n"]
        assert call.cancelled()


async def test_preparing_is_not_charged_to_the_budget(evaluators: Evaluators) -> None:
    """A version that takes longer to load than its budget is evaluated all the same."""
    slow_to_load = version("return {'outcome': 'A'}", setup="time.sleep(0.6)")
    assert "A" == (await evaluate(evaluators, slow_to_load, {}, DECISION, SHORT)).outcome


async def test_preparing_has_a_limit(evaluators: Evaluators, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that never finishes loading is PolicyTimeout."""
    monkeypatch.setattr(evaluator, "PREPARE_SECONDS_MAX", 0.3)
    with pytest.raises(PolicyTimeout):
        await evaluate(evaluators, version("return {}", setup="time.sleep(600)"), {}, DECISION, AMPLE)


async def test_prepared_versions_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluator keeps the versions used last, and prepares one anew that it had to let go."""
    monkeypatch.setattr(evaluator, "PREPARED_MAX", 2)
    async with running(size_max=1, warm=1) as evaluators:
        counting = {
            name: version(f"calls.append(1)\nreturn {{'outcome': '{name}', 'calls': len(calls)}}", setup="calls = []")
            for name in "abc"
        }
        seen = []
        for name in "aabacabb":
            evaluation = await evaluate(evaluators, counting[name], {}, DECISION, AMPLE)
            seen.append((evaluation.outcome, evaluation.outputs["calls"]))
    assert [("a", 1), ("a", 2), ("b", 1), ("a", 3), ("c", 1), ("a", 4), ("b", 1), ("b", 2)] == seen


async def test_evaluators_that_are_not_needed_end(gate: Gate) -> None:
    """After a while without work only the warm ones are left."""
    async with running(size_max=8, warm=1, idle_max=timedelta(milliseconds=50)) as evaluators:
        calls = [
            asyncio.create_task(evaluate(evaluators, version(GATED), gate.facts, DECISION, AMPLE)) for _ in range(4)
        ]
        pids = [await gate.running() for _ in range(4)]
        gate.open(4)
        await asyncio.gather(*calls)
        ends = [asyncio.create_task(ended(pid)) for pid in pids]
        while sum(end.done() for end in ends) < 3:
            await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
        assert 7 == (await echo(evaluators, 7))["n"]
    await asyncio.gather(*ends)


async def test_an_idle_evaluator_that_died_is_replaced(evaluators: Evaluators) -> None:
    """A process that the kernel ended while it was idle costs no call its result."""
    pid = (await echo(evaluators))["pid"]
    os.kill(pid, signal.SIGKILL)
    await ended(pid)
    assert pid != (await echo(evaluators))["pid"]


async def test_a_fork_server_that_died_is_replaced(evaluators: Evaluators) -> None:
    """Should the fork server end, calls go on, and evaluators start again."""
    parent = (await echo(evaluators))["parent"]
    os.kill(parent, signal.SIGKILL)
    await ended(parent)
    for _ in range(4):
        with pytest.raises(PolicyCrashed):
            await evaluate(evaluators, version("os._exit(1)"), {}, DECISION, AMPLE)
    assert parent != (await echo(evaluators))["parent"]


async def test_a_machine_that_starts_no_process_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no evaluator can be started, start says so, and a call is PolicyCrashed rather than waiting for ever."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    evaluators = Evaluators()
    with pytest.raises(OSError, match="/nonexistent/python"):
        await evaluators.start()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(PolicyCrashed, match="could be started"):
            await echo(evaluators)
        await evaluators.close()


async def test_close_leaves_no_process(evaluators: Evaluators, gate: Gate) -> None:
    """After close all processes are gone and reaped; what was under way, waits or comes later is PolicyCrashed."""
    idle = await echo(evaluators)
    calls = [asyncio.create_task(evaluate(evaluators, version(GATED), gate.facts, DECISION, AMPLE)) for _ in range(10)]
    pids = [await gate.running() for _ in range(8)]
    async with asyncio.timeout(LIMIT_S):
        await evaluators.close()
    assert [PolicyCrashed] * 10 == [type(end) for end in await asyncio.gather(*calls, return_exceptions=True)]
    assert [] == [pid for pid in (*pids, idle["pid"], idle["parent"]) if not is_gone(pid)]
    with pytest.raises(PolicyCrashed):
        await echo(evaluators)


async def test_evaluators_are_alike_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluators list sets in one order, are in UTC, and see none of the server's settings."""
    monkeypatch.setenv("DECIDEONCE_TOKEN", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    policy = version(
        """
        names = sorted(name for name in os.environ if name.startswith("DECIDEONCE_"))
        order = list({"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"})
        return {"outcome": "A", "names": names, "zone": time.tzname[0], "order": order}
        """
    )
    outputs = []
    for _ in range(2):
        async with running(warm=1) as evaluators:
            outputs.append((await evaluate(evaluators, policy, {}, DECISION, AMPLE)).outputs)
    assert ([], "UTC") == (outputs[0]["names"], outputs[0]["zone"])
    assert outputs[0] == outputs[1]


PROGRAM = """
import asyncio, signal, sys
from datetime import timedelta
from decideonce_server.evaluator import Evaluators
from decideonce_server.policy import PolicyVersion

async def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    evaluators = Evaluators()
    await evaluators.start()
    evaluation = await evaluators.evaluate(
        PolicyVersion("p", 1, "python", "sha256:p", sys.argv[1]), b"{}", {}, timedelta(seconds=float(sys.argv[2]))
    )
    print(evaluation.outcome)
    await evaluators.close()

asyncio.run(main())
"""


@pytest.fixture
def programs() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for program in started:
        program.kill()
        program.communicate(timeout=LIMIT_S)


def start_program(programs: list[subprocess.Popen[bytes]], body: str, budget_s: float) -> subprocess.Popen[bytes]:
    """Start a main process of its own group, and wait until its policy prints that it runs."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, version(f"print('running')\n{body}").content, str(budget_s)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Nothing is read ahead, so that communicate has all the rest.
        bufsize=0,
        start_new_session=True,
    )
    programs.append(program)
    assert program.stderr is not None
    assert b"running\n" == program.stderr.readline()
    return program


@pytest.mark.parametrize("burn", ["while True: pass", "sum(range(10**15))"])
def test_a_killed_main_process_leaves_no_process(programs: list[subprocess.Popen[bytes]], burn: str) -> None:
    """When the main process is killed, all of its evaluators end by themselves, even one that burns the CPU in C."""
    program = start_program(programs, burn, budget_s=2)
    program.kill()
    # All its processes write to one stderr, which ends when the last of them has.
    assert (b"", b"") == program.communicate(timeout=LIMIT_S)


def test_fork_server_ends_with_a_main_process_that_is_killed_while_it_answers() -> None:
    """An answer that nobody is there to read ends the fork server like any end of the main process."""
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(evaluator_process.ORDER.pack(os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})))
        evaluator_process.run_fork_server(theirs)


def test_signals_to_the_group_leave_evaluations_alone(programs: list[subprocess.Popen[bytes]]) -> None:
    """Ctrl-C and SIGTERM, which reach all processes, leave it to the main process to end evaluations."""
    program = start_program(programs, "time.sleep(1)\nreturn {'outcome': 'THROUGH'}", LIMIT_S)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        os.killpg(program.pid, number)
    assert (b"THROUGH\n", b"") == program.communicate(timeout=LIMIT_S)


def test_what_a_policy_prints_stays_out_of_stdout(programs: list[subprocess.Popen[bytes]]) -> None:
    """A policy that prints, in Python or below it, breaks no answer, and its text goes to stderr."""
    body = "print('x' * 100_000)\nos.write(1, b'raw\\n')\nreturn {'outcome': 'THROUGH'}"
    program = start_program(programs, body, LIMIT_S)
    assert (b"THROUGH\n", b"x" * 100_000 + b"\nraw\n") == program.communicate(timeout=LIMIT_S)


async def test_quick_calls_go_together(evaluators, sizes) -> None:
    """Calls of a policy that is known to be quick share questions; each gets its own answer."""
    assert 3 == await count(evaluators, 3)
    results = await asyncio.gather(*(count(evaluators, n) for n in range(1, 201)))
    assert list(range(1, 201)) == results
    assert 201 == sum(sizes)
    assert len(sizes) < 50
    assert max(sizes) <= evaluator.SIZE_MAX


async def test_lone_call_waits_for_nobody(evaluators, sizes) -> None:
    """Calls that come one after another are asked one by one."""
    assert [1, 2, 3] == [await count(evaluators, n) for n in (1, 2, 3)]
    assert [1, 1, 1] == sizes


async def test_member_that_fails_fails_alone(evaluators, sizes) -> None:
    """An input that the policy can't decide on is its own caller's failure."""
    await count(evaluators, 1)
    results = await asyncio.gather(*(count(evaluators, n) for n in (1, "many", 2, "more", 3)), return_exceptions=True)
    assert [1, PolicyFailed, 2, PolicyFailed, 3] == [r if isinstance(r, int) else type(r) for r in results]
    assert [1, 5] == sizes


async def test_slow_member_is_asked_again_alone(evaluators, sizes) -> None:
    """A member that isn't quick holds up its neighbours for a moment, and its own budget is its own."""
    await count(evaluators, 1)
    neighbours = [asyncio.create_task(count(evaluators, n)) for n in range(1, 4)]
    slow = asyncio.create_task(count(evaluators, SLOW_COUNT))
    hopeless = asyncio.create_task(count(evaluators, 30 * SLOW_COUNT, timedelta(seconds=1)))
    assert list(range(1, 4)) == await asyncio.gather(*neighbours)
    assert not hopeless.done()
    assert SLOW_COUNT == await slow
    with pytest.raises(PolicyTimeout, match="1 s"):
        await hopeless
    assert [1, 5, *[1] * 5] == sizes


async def test_policy_that_was_slow_goes_on_alone(evaluators, sizes) -> None:
    """What was slow on some facts is no longer asked in sets, so that the next slow one holds up nobody."""
    await count(evaluators, SLOW_COUNT)
    assert list(range(1, 9)) == await asyncio.gather(*(count(evaluators, n) for n in range(1, 9)))
    assert [1] * 9 == sizes


async def test_callers_that_leave_take_nobody_along(evaluators, sizes) -> None:
    """A set goes on for those who are left in it; one that nobody waits for any more is given up."""
    await count(evaluators, 1)
    calls = [asyncio.create_task(count(evaluators, n)) for n in range(1, 5)]
    await until(lambda: len(sizes) > 1, LIMIT_S)
    for call in calls[:2]:
        call.cancel()
    assert [3, 4] == await asyncio.gather(*calls[2:])
    left = [asyncio.create_task(count(evaluators, 30 * SLOW_COUNT)) for _ in range(3)]
    await until(lambda: len(sizes) > 2, LIMIT_S)
    for call in left:
        call.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert [1, 4, 3] == sizes
    assert 1 == await count(evaluators, 1)


async def test_evaluator_that_dies_with_a_set_costs_nobody_a_decision(sizes) -> None:
    """Where an evaluator dies with several calls, each is asked again."""
    async with running(size_max=1, warm=1) as evaluators:
        await count(evaluators, 1)
        calls = [asyncio.create_task(count(evaluators, n)) for n in (1, 2, SLOW_COUNT)]
        await until(lambda: len(sizes) > 1, LIMIT_S)
        (fork_server,) = psutil.Process().children()
        (only,) = fork_server.children()
        only.kill()
        assert [1, 2, SLOW_COUNT] == await asyncio.gather(*calls)
    assert [1, 3, 1, 1, 1] == sizes
