"""Evaluations in processes of their own, that can be killed.

A policy that hangs, burns the CPU or crashes takes down its own evaluation and nothing else. Evaluators start on
demand; one that didn't answer in full is killed and never used again, so no answer can reach another call.

Calls whose policy is known to be quick share a question to an evaluator, most of whose cost is the question's. A set
that isn't answered soon is asked again, each call by itself: so none pays for its neighbours.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import structlog
from cachetools import LRUCache

from decideonce_server import measures
from decideonce_server.evaluator_process import (
    CARRIED_ERRORS,
    LENGTH,
    ORDER,
    ORDER_ANSWER,
    ORDER_FORK,
    message,
    question,
)
from decideonce_server.giving_way import give_way, step_aside, take_part
from decideonce_server.lull import Lull
from decideonce_server.policy import Effect, Evaluation, PolicyCrashed, PolicyError, PolicyTimeout, PolicyVersion
from decideonce_server.values import Json

# Preparing happens once per version and evaluator, and may import a policy's libraries, which takes seconds on a cold,
# busy machine; budgets are meant for decisions. It is bounded all the same: the lease is renewed while it goes on.
PREPARE_SECONDS_MAX = 10.0

# More versions than a deployment has active at once; a prepared one holds a module or a parsed document.
PREPARED_MAX = 64

# An evaluation that takes this long gives way to calls, to Postgres beside them, and to short evaluations.
LONG_S = 0.02

# Calls go together that take so much CPU time at most, in s: it is what the first of them waits for the last.
TOGETHER_S = 0.01
SIZE_MAX = 32
# What is left of a slow evaluation after the next: a policy that is slow on some facts goes on alone for a while.
FORGETTING = 0.9
# A set that takes this long has a member that isn't quick, or the machine is held up.
SET_SECONDS_MAX = 0.1

# Facts as JSON text, and what the service says of the decision.
_Input: TypeAlias = tuple[bytes, dict[str, Json]]

log = structlog.get_logger()


class Evaluators:
    """All evaluators of this process, at most `size_max`; one policy has half of them at most, so it can't take all.

    Calls of one policy are served in their order, and policies in turn. `warm` idle evaluators more than are needed are
    kept, and any above these end after `idle_max`. One instance belongs to one event loop.
    """

    def __init__(self, *, size_max: int = 16, warm: int = 2, idle_max: timedelta = timedelta(minutes=1)) -> None:
        self._size_max = size_max
        self._share = max(1, size_max // 2)
        self._warm = warm
        self._idle_max = idle_max
        self._fork_server = _ForkServer()
        # Newest last: the ones at the front are the ones that are not needed.
        self._idle: list[_Evaluator] = []
        self._alive: set[_Evaluator] = set()
        self._starting = 0
        self._busy: Counter[str] = Counter()
        # By policy, in turn: the first policy is the next to be served.
        self._waiting: OrderedDict[str, deque[_Call]] = OrderedDict()
        self._lull = Lull(self._dispatch)
        # By policy, the set of quick calls that is under way, until it takes long.
        self._quick: dict[str, _Set] = {}
        # By digest, the CPU time in s of its slow evaluations, as far as they aren't forgotten.
        self._cpu_s: LRUCache[str, float] = LRUCache(PREPARED_MAX)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._trimming: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the warm evaluators, and wait for them.

        Raises:
            OSError: no process can be started.
        """
        size = min(self._warm, self._size_max)
        await asyncio.gather(*(self._run(self._start_evaluator()) for _ in range(size)))
        self._trimming = asyncio.create_task(self._trim())

    async def close(self) -> None:
        """End all evaluators and wait until they are gone; evaluations under way or waiting are PolicyCrashed."""
        self._closed = True
        if self._trimming is not None:
            self._trimming.cancel()
        while self._waiting:
            self._fail_next("the evaluators are closed")
        for evaluator in list(self._alive):
            self._end(evaluator)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._fork_server.close()

    async def evaluate(
        self, policy: PolicyVersion, facts: bytes, decision: dict[str, Json], time_budget: timedelta
    ) -> Evaluation:
        """Evaluate one input, whose facts are a JSON text.

        The time budget starts when an evaluator that has the version prepared is asked.

        Raises:
            PolicyTimeout: it took longer than its budget, or preparing the version longer than PREPARE_SECONDS_MAX.
            PolicyCrashed: its evaluator died, or none could be started.
            PolicyFailed, InvalidResult, RetryLater: as Evaluate and Engine say.
        """
        if self._closed:
            raise PolicyCrashed("the evaluators are closed")
        call = _Call(policy, (facts, decision), time_budget.total_seconds())
        self._waiting.setdefault(policy.policy_id, deque()).append(call)
        self._lull.ask()
        try:
            with measures.phase("queue"):
                await call.begun
            with measures.phase("evaluate"):
                return await call.result
        finally:
            call.leave()

    def _dispatch(self) -> None:
        """Hand idle evaluators to those who wait, and start as many as are missing."""
        for evaluator in [evaluator for evaluator in self._idle if evaluator.is_gone]:
            self._end(evaluator)
        while self._idle and (policy_id := self._next_policy()) is not None:
            calls = self._take(policy_id)
            if calls:
                self._begin(calls)
        self._grow()

    def _begin(self, calls: "list[_Call]") -> None:
        policy = calls[0].policy
        prepared = (evaluator for evaluator in reversed(self._idle) if policy.digest in evaluator.prepared)
        # What is prepared for others is lost with an evaluator that has to be killed.
        evaluator = next(prepared, None) or min(self._idle, key=lambda idle: len(idle.prepared))
        self._idle.remove(evaluator)
        self._busy[policy.policy_id] += 1
        set_ = _Set(policy, calls)
        if self._size(calls[0]) > 1:
            self._quick[policy.policy_id] = set_
        set_.asking = self._run(self._evaluate(evaluator, set_))

    def _next_policy(self) -> str | None:
        return next((policy_id for policy_id, calls in self._waiting.items() if self._room(policy_id, calls)), None)

    def _room(self, policy_id: str, calls: "deque[_Call]") -> int:
        """Tell how many evaluators a policy may have more; those whose calls go together wait for one another."""
        free = self._share - self._busy[policy_id]
        if self._size(calls[0]) == 1:
            return free
        return 0 if policy_id in self._quick else min(1, free)

    def _size(self, call: "_Call") -> int:
        """Tell how many calls go together from this one on: as many as are known to be quick."""
        if call.is_alone or call.policy.engine != "jdm":
            return 1
        cpu_s = max(self._cpu_s.get(call.policy.digest, TOGETHER_S), TOGETHER_S / SIZE_MAX)
        return max(1, int(TOGETHER_S / cpu_s))

    def _take(self, policy_id: str) -> "list[_Call]":
        """Take the calls that go together off a policy's queue; none where they have left."""
        waiting = self._waiting[policy_id]
        first = waiting[0]
        size = self._size(first)
        taken: list[_Call] = []
        while waiting and len(taken) < size and waiting[0].goes_with(first):
            call = waiting.popleft()
            if not call.result.done():
                taken.append(call)
        self._waiting.move_to_end(policy_id)
        if not waiting:
            del self._waiting[policy_id]
        return taken

    async def _evaluate(self, evaluator: "_Evaluator", set_: "_Set") -> None:
        patience = asyncio.get_running_loop().call_later(LONG_S, self._lose_patience, set_)
        try:
            # Not before: a task that is cancelled before it runs would never give its evaluator back.
            for call in set_.calls:
                call.begin(set_)
            set_.give_up_if_left()
            await self._settle(evaluator, set_)
        finally:
            patience.cancel()
            self._lose_patience(set_)
            self._release(set_.policy.policy_id, evaluator)

    async def _settle(self, evaluator: "_Evaluator", set_: "_Set") -> None:
        try:
            is_long = self._cpu_s.get(set_.policy.digest, 0.0) > LONG_S
            await evaluator.prepare(set_.policy, is_long=is_long)
            results, cpu_s = await evaluator.evaluate(set_.policy, set_.inputs, set_.seconds_max, is_long=is_long)
        except PolicyError as error:
            if isinstance(error, PolicyTimeout) and len(set_.calls) == 1:
                self._cpu_s[set_.policy.digest] = set_.seconds_max
            if isinstance(error, PolicyCrashed):
                exit_code = await asyncio.shield(self._end(evaluator))
                error = PolicyCrashed(f"the evaluator ended with exit code {exit_code}")
            # Where it couldn't be prepared, it can't be for one of them either.
            is_prepared = set_.policy.digest in evaluator.prepared
            if is_prepared and len(set_.calls) > 1 and not self._closed:
                self._separate(set_)
            else:
                set_.settle([error] * len(set_.calls))
        else:
            slowest_s = self._cpu_s.get(set_.policy.digest, 0.0) * FORGETTING
            self._cpu_s[set_.policy.digest] = max(cpu_s / len(results), slowest_s)
            set_.settle(results)

    def _separate(self, set_: "_Set") -> None:
        for call in set_.calls:
            call.is_alone = True
        self._waiting.setdefault(set_.policy.policy_id, deque()).extendleft(reversed(set_.calls))

    def _lose_patience(self, set_: "_Set") -> None:
        """Have those that wait for a set go on without it."""
        if self._quick.get(set_.policy.policy_id) is set_:
            del self._quick[set_.policy.policy_id]
            self._lull.ask()

    def _release(self, policy_id: str, evaluator: "_Evaluator") -> None:
        self._busy -= Counter({policy_id: 1})
        if evaluator.is_clean and not self._closed:
            evaluator.idle_since = time.monotonic()
            self._idle.append(evaluator)
        else:
            self._end(evaluator)
        self._lull.ask()

    def _grow(self) -> None:
        if self._closed:
            return
        servable = sum(min(len(calls), self._room(policy_id, calls)) for policy_id, calls in self._waiting.items())
        size_wanted = min(self._size_max, self._busy.total() + servable + self._warm)
        for _ in range(size_wanted - self._busy.total() - len(self._idle) - self._starting):
            self._run(self._start_on_demand())

    async def _start_on_demand(self) -> None:
        try:
            await self._start_evaluator()
        except OSError:
            log.exception("no evaluator could be started")
            if self._waiting:
                self._fail_next("no evaluator could be started")
                self._dispatch()

    def _start_evaluator(self) -> Coroutine[Any, Any, None]:
        # Counted before the coroutine first runs, so that two dispatches don't start the same one.
        self._starting += 1

        async def start() -> None:
            try:
                evaluator = await _Evaluator.start(self._fork_server)
            finally:
                self._starting -= 1
            self._alive.add(evaluator)
            if self._closed:
                self._end(evaluator)
            else:
                self._idle.append(evaluator)
                self._dispatch()

        return start()

    def _fail_next(self, text: str) -> None:
        for call in self._take(next(iter(self._waiting))):
            call.settle(PolicyCrashed(text))

    def _end(self, evaluator: "_Evaluator") -> asyncio.Task[int | None]:
        """Kill an evaluator; the task gives its exit code when it is gone."""
        if evaluator.ending is None:
            evaluator.kill()
            self._alive.discard(evaluator)
            if evaluator in self._idle:
                self._idle.remove(evaluator)
            evaluator.ending = self._run(evaluator.reap())
        return evaluator.ending

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _trim(self) -> None:
        idle_seconds_max = self._idle_max.total_seconds()
        while True:
            await asyncio.sleep(idle_seconds_max / 2)
            before = time.monotonic() - idle_seconds_max
            for evaluator in self._idle[: max(0, len(self._idle) - self._warm)]:
                if evaluator.idle_since < before:
                    self._end(evaluator)


class _Call:
    """A call that waits for its evaluation."""

    def __init__(self, policy: PolicyVersion, one: _Input, seconds_max: float) -> None:
        self.policy = policy
        self.input = one
        self.seconds_max = seconds_max
        # It was in a set that was not answered.
        self.is_alone = False
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.result: asyncio.Future[Evaluation] = loop.create_future()
        self._set: _Set | None = None

    def goes_with(self, other: "_Call") -> bool:
        return self.policy.digest == other.policy.digest and self.is_alone == other.is_alone

    def begin(self, set_: "_Set | None") -> None:
        self._set = set_
        if not self.begun.done():
            self.begun.set_result(None)

    def settle(self, result: Evaluation | PolicyError) -> None:
        if self.result.done():
            return
        if isinstance(result, Evaluation):
            self.result.set_result(result)
        else:
            self.result.set_exception(result)
        # It may be settled without an evaluator.
        self.begin(self._set)

    def leave(self) -> None:
        """Tell that nobody waits any more; a set that nobody waits for is given up, with its evaluator."""
        self.result.cancel()
        if self._set is not None:
            self._set.give_up_if_left()


class _Set:
    """Calls of one policy version that one evaluator is asked together."""

    def __init__(self, policy: PolicyVersion, calls: list[_Call]) -> None:
        self.policy = policy
        self.calls = calls
        self.asking: asyncio.Task[None] | None = None

    @property
    def inputs(self) -> list[_Input]:
        return [call.input for call in self.calls]

    @property
    def seconds_max(self) -> float:
        budget = min(call.seconds_max for call in self.calls)
        return budget if len(self.calls) == 1 else min(budget, SET_SECONDS_MAX)

    def settle(self, results: Sequence[Evaluation | PolicyError]) -> None:
        for call, result in zip(self.calls, results, strict=True):
            call.settle(result)

    def give_up_if_left(self) -> None:
        if self.asking is not None and all(call.result.cancelled() for call in self.calls):
            self.asking.cancel()


class _Evaluator:
    """The main process's side of one evaluator."""

    def __init__(
        self, fork_server: "_ForkServer", pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._fork_server = fork_server
        self._pid = pid
        self._reader = reader
        self._writer = writer
        # By digest, the one used last at the end. The main process decides what the evaluator keeps.
        self.prepared: OrderedDict[str, None] = OrderedDict()
        # No request is without its full answer.
        self.is_clean = True
        self.idle_since = time.monotonic()
        self.ending: asyncio.Task[int | None] | None = None
        # As the fork server is: a new one is aside until it has prepared what it is asked first.
        self._is_aside = True

    @classmethod
    async def start(cls, fork_server: "_ForkServer") -> "_Evaluator":
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = await fork_server.fork(theirs)
                reader, writer = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
        return cls(fork_server, pid, reader, writer)

    @property
    def is_gone(self) -> bool:
        """Tell whether it ended while nothing was asked of it."""
        return self._reader.at_eof() or self._reader.exception() is not None

    async def prepare(self, policy: PolicyVersion, *, is_long: bool) -> None:
        """Have a version ready; one that is known to take long gives way from the start."""
        if policy.digest in self.prepared:
            self.prepared.move_to_end(policy.digest)
            return
        instead_of = self.prepared.popitem(last=False)[0] if len(self.prepared) >= PREPARED_MAX else None
        request = {
            "digest": policy.digest,
            "engine": policy.engine,
            "content": policy.content,
            "instead_of": instead_of,
        }
        ordered = message({**request, "seconds_max": PREPARE_SECONDS_MAX})
        said = await self._ask(ordered, PREPARE_SECONDS_MAX, is_long=is_long)
        (answer,) = said["answers"]
        if "error" in answer:
            raise _error(answer)
        self.prepared[policy.digest] = None

    async def evaluate(
        self, policy: PolicyVersion, inputs: Sequence[_Input], seconds_max: float, *, is_long: bool
    ) -> tuple[list[Evaluation | PolicyError], float]:
        """Give what came of each input, and the CPU time of all, in s."""
        said = await self._ask(question(policy.digest, inputs, seconds_max), seconds_max, is_long=is_long)
        results = [_error(answer) if "error" in answer else _evaluation(answer) for answer in said["answers"]]
        return results, said["cpu_s"]

    async def _ask(self, request: bytes, seconds_max: float, *, is_long: bool) -> dict[str, Any]:
        if is_long:
            self._give_way()
        started = time.monotonic()
        self.is_clean = False
        self._writer.write(request)
        giving_way = asyncio.get_running_loop().call_later(LONG_S, self._give_way)
        try:
            async with asyncio.timeout(seconds_max):
                length = await self._reader.readexactly(LENGTH.size)
                answer: dict[str, Any] = json.loads(await self._reader.readexactly(*LENGTH.unpack(length)))
        except TimeoutError:
            raise PolicyTimeout(f"it did not end within {seconds_max:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            # While this process was held up, the evaluator's own timer may have been the one that went off.
            if time.monotonic() - started >= seconds_max:
                raise PolicyTimeout(f"it did not end within {seconds_max:g} s") from None
            raise PolicyCrashed("the evaluator ended") from None
        finally:
            giving_way.cancel()
        # One that didn't answer is never used again, and its pid may soon be another's.
        if self._is_aside and self.ending is None:
            take_part(self._pid)
            self._is_aside = False
        self.is_clean = True
        return answer

    def _give_way(self) -> None:
        # Its pid is its own until it is reaped. An engine may have begun more threads since.
        if self.ending is None:
            give_way(self._pid)
            self._is_aside = True

    def kill(self) -> None:
        # The pid is this evaluator's until the fork server reaps it, which it does only when asked.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    async def reap(self) -> int | None:
        """Wait for the killed process to be gone; give its exit code, or None if the fork server was gone before it."""
        self._writer.close()
        # Closing tells of a connection that broke, which is what a killed process leaves.
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        return await self._fork_server.reap(self._pid)


def _error(answer: dict[str, Any]) -> PolicyError:
    error: PolicyError = CARRIED_ERRORS[answer["error"]](answer["text"])
    return error


def _evaluation(answer: dict[str, Any]) -> Evaluation:
    content = answer["evaluation"]
    return Evaluation(
        outcome=content["outcome"],
        engine=content["engine"],
        reasons=tuple(content["reasons"]),
        outputs=content["outputs"],
        effects=tuple(Effect(**effect) for effect in content["effects"]),
        matched_rules=tuple(content["matched_rules"]),
    )


class _ForkServer:
    """The main process's side of the fork server; starts it on first use, and again should it have died."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    async def fork(self, theirs: socket.socket) -> int:
        """Start an evaluator that has its end of a socket pair, and give its pid.

        Raises:
            OSError: the process can't be started.
        """
        async with self._turn:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return await self._order(ORDER_FORK, [theirs.fileno()])

    async def reap(self, pid: int) -> int | None:
        """Wait for an evaluator's end, and give its exit code; None where the fork server that had it is gone."""
        async with self._turn:
            try:
                return await self._order(pid, [])
            except OSError:
                return None

    async def close(self) -> None:
        """End the fork server and wait for it."""
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)

    def _start(self) -> None:
        if self._orders is not None:
            self._orders.close()
        self._orders, theirs = socket.socketpair()
        self._orders.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 all of it is ours
                [sys.executable, "-P", "-m", "decideonce_server.evaluator_process", str(theirs.fileno())],
                env=_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        # Each evaluator that is killed costs a new one, a few milliseconds that calls beside it would wait for.
        step_aside(self._process.pid)

    async def _order(self, order: int, descriptors: list[int]) -> int:
        if self._orders is None:
            raise ConnectionResetError("the fork server was never started")
        socket.send_fds(self._orders, [ORDER.pack(order)], descriptors)
        answer = await asyncio.get_running_loop().sock_recv(self._orders, ORDER_ANSWER.size)
        if len(answer) < ORDER_ANSWER.size:
            raise ConnectionResetError("the fork server ended")
        error_number, value = ORDER_ANSWER.unpack(answer)
        if error_number:
            raise OSError(error_number, os.strerror(error_number))
        return int(value)


def _environment() -> dict[str, str]:
    """Give evaluators the path to the same modules, and none of the server's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DECIDEONCE_")}
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    # A policy that lists a set, or reads a time without a zone, does so alike in every attempt on every machine.
    return {**kept, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "TZ": "UTC"}
