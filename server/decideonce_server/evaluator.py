"""Evaluations in processes of their own, one at a time in each, that can be killed.

A policy that hangs, burns the CPU or crashes takes down its own evaluation and nothing else. Evaluators start on
demand; one that didn't answer in full is killed and never used again, so no answer can reach another call.
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
from typing import Any

import structlog

from decideonce_server import measures
from decideonce_server.evaluator_process import CARRIED_ERRORS, LENGTH, ORDER, ORDER_ANSWER, ORDER_FORK, message
from decideonce_server.policy import Effect, Evaluation, PolicyCrashed, PolicyTimeout, PolicyVersion
from decideonce_server.values import Json

# Preparing happens once per version and evaluator, and may import a policy's libraries, which takes seconds on a cold,
# busy machine; budgets are meant for decisions. It is bounded all the same: the lease is renewed while it goes on.
PREPARE_SECONDS_MAX = 10.0

# Those that this process may use; none where the system has no say in it (outside Linux).
CORES: Sequence[int] = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()

# More versions than a deployment has active at once; a prepared one holds a module or a parsed document.
PREPARED_MAX = 64

# An evaluation that takes this long goes on on half of the cores: those that run away leave the other half to calls, to
# Postgres beside them, and to short evaluations. Giving way by priority alone costs each step of a call a time slice.
LONG_S = 0.02

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
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
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
        self, policy: PolicyVersion, facts: dict[str, Json], decision: dict[str, Json], time_budget: timedelta
    ) -> Evaluation:
        """Evaluate one input; the time budget starts when an evaluator that has the version prepared is asked.

        Raises:
            PolicyTimeout: it took longer than its budget, or preparing the version longer than PREPARE_SECONDS_MAX.
            PolicyCrashed: its evaluator died, or none could be started.
            PolicyFailed, InvalidResult, RetryLater: as Evaluate and Engine say.
        """
        with measures.phase("queue"):
            evaluator = await self._acquire(policy)
        try:
            with measures.phase("evaluate"):
                return await evaluator.evaluate(policy, facts, decision, time_budget.total_seconds())
        except PolicyCrashed:
            exit_code = await asyncio.shield(self._end(evaluator))
            raise PolicyCrashed(f"the evaluator ended with exit code {exit_code}") from None
        finally:
            self._release(policy.policy_id, evaluator)

    async def _acquire(self, policy: PolicyVersion) -> "_Evaluator":
        if self._closed:
            raise PolicyCrashed("the evaluators are closed")
        waiter = _Waiter(policy.digest)
        self._waiting.setdefault(policy.policy_id, deque()).append(waiter)
        self._dispatch()
        try:
            return await waiter.evaluator
        except asyncio.CancelledError:
            if not waiter.evaluator.cancelled() and waiter.evaluator.exception() is None:
                self._release(policy.policy_id, waiter.evaluator.result())
            raise

    def _release(self, policy_id: str, evaluator: "_Evaluator") -> None:
        self._busy -= Counter({policy_id: 1})
        if evaluator.is_clean and not self._closed:
            evaluator.idle_since = time.monotonic()
            self._idle.append(evaluator)
        else:
            self._end(evaluator)
        self._dispatch()

    def _dispatch(self) -> None:
        """Hand idle evaluators to those who wait, and start as many as are missing."""
        for evaluator in [evaluator for evaluator in self._idle if evaluator.is_gone]:
            self._end(evaluator)
        while self._idle and (policy_id := self._next_policy()) is not None:
            waiter = self._pop_waiter(policy_id)
            if waiter.evaluator.done():
                continue
            prepared = (evaluator for evaluator in reversed(self._idle) if waiter.digest in evaluator.prepared)
            evaluator = next(prepared, self._idle[-1])
            self._idle.remove(evaluator)
            self._busy[policy_id] += 1
            waiter.evaluator.set_result(evaluator)
        self._grow()

    def _next_policy(self) -> str | None:
        return next((policy_id for policy_id in self._waiting if self._busy[policy_id] < self._share), None)

    def _pop_waiter(self, policy_id: str) -> "_Waiter":
        waiters = self._waiting[policy_id]
        waiter = waiters.popleft()
        self._waiting.move_to_end(policy_id)
        if not waiters:
            del self._waiting[policy_id]
        return waiter

    def _grow(self) -> None:
        if self._closed:
            return
        servable = sum(min(len(waiters), self._share - self._busy[id_]) for id_, waiters in self._waiting.items())
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
        waiter = self._pop_waiter(next(iter(self._waiting)))
        if not waiter.evaluator.done():
            waiter.evaluator.set_exception(PolicyCrashed(text))

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


class _Waiter:
    """A call that waits for an evaluator, if possible for one that has this version prepared."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.evaluator: asyncio.Future[_Evaluator] = asyncio.get_running_loop().create_future()


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
        self._cores: Sequence[int] = CORES

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

    async def evaluate(
        self, policy: PolicyVersion, facts: dict[str, Json], decision: dict[str, Json], seconds_max: float
    ) -> Evaluation:
        if policy.digest not in self.prepared:
            await self._prepare(policy)
        self.prepared.move_to_end(policy.digest)
        answer = await self._ask({"digest": policy.digest, "facts": facts, "decision": decision}, seconds_max)
        return _evaluation(answer["evaluation"])

    async def _prepare(self, policy: PolicyVersion) -> None:
        instead_of = self.prepared.popitem(last=False)[0] if len(self.prepared) >= PREPARED_MAX else None
        request = {
            "digest": policy.digest,
            "engine": policy.engine,
            "content": policy.content,
            "instead_of": instead_of,
        }
        await self._ask(request, PREPARE_SECONDS_MAX)
        self.prepared[policy.digest] = None

    async def _ask(self, request: dict[str, Any], seconds_max: float) -> dict[str, Any]:
        request_message = message({**request, "seconds_max": seconds_max})
        started = time.monotonic()
        self.is_clean = False
        self._writer.write(request_message)
        confining = asyncio.get_running_loop().call_later(LONG_S, self._confine)
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
            confining.cancel()
        # One that didn't answer is never used again, and its pid may soon be another's.
        self._set_cores(CORES)
        self.is_clean = True
        if "error" in answer:
            raise CARRIED_ERRORS[answer["error"]](answer["text"])
        return answer

    def _confine(self) -> None:
        # The last ones: where there is a choice, the kernel fills the first ones first.
        self._set_cores(CORES[-(-len(CORES) // 2) :])

    def _set_cores(self, cores: Sequence[int]) -> None:
        if cores and cores != self._cores and self.ending is None:
            self._cores = cores
            # It may be gone; its pid is its own until it is reaped.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self._pid, cores)

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


def _evaluation(content: dict[str, Any]) -> Evaluation:
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
