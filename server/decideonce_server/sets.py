"""Makes calls of one process that come at the same moment share one statement, and with it one commit.

A member that finds no set under way goes in the next lull of the event loop, which is at once where the loop has
nothing else to do, and those that come while one is under way go together in the next. So sets grow with the load, and
a lone caller is alone. Only in a crowd of attempts a set waits for company: they come one by one from the evaluators
and from Postgres, and each small set costs as much as a large one.
"""

import asyncio
import contextvars
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import takewhile
from typing import Generic, TypeVar
from uuid import UUID

from decideonce_server.database import LockTimeout
from decideonce_server.errors import LedgerUnavailable, Overloaded
from decideonce_server.ledger import Attempt, Completion, Key, Ledger, Record, Reservation
from decideonce_server.lull import Lull

# Above this a statement gains nothing more, and its rows stay locked for longer.
SIZE_MAX = 128
# A set that takes this long waits for something; what comes after it doesn't have to.
PATIENCE_S = 0.025
UNDER_WAY_MAX = 4
# With fewer attempts under way, what a set saves is less than what its members wait.
CROWD_MIN = 8
# Of a crowd's attempts, those that a set waits for.
SHARE = 0.5
# An attempt that goes on for longer is waited for by nobody: its policy takes its time.
SOON_S = 0.1
# More would wait for longer than their callers do.
WAITING_MAX = 5_000
# By then a part of what a process has to do is done: attempts take milliseconds to a second.
OVERLOAD_RETRY_AFTER = timedelta(seconds=1)

M = TypeVar("M")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class _Waiting(Generic[M, R]):
    member: M
    result: asyncio.Future[R] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(eq=False, slots=True)
class _Set(Generic[M, R]):
    members: list[_Waiting[M, R]]
    is_slow: bool = False
    # Kept here, as the loop keeps no task that nobody else does.
    sending: asyncio.Task[None] | None = None


class Sets(Generic[M, R]):
    """Forms the sets of one operation of the ledger, each of SIZE_MAX members at most, from tenants in turn.

    A member that fails for what it is fails alone: the others are sent again, each by itself. `bounded`: members may be
    shed. `crowd_size` tells how many attempts may come to share a set.
    """

    def __init__(
        self,
        operation: Callable[[Sequence[M]], Awaitable[list[R]]],
        tenant_of: Callable[[M], str],
        *,
        bounded: bool = False,
        crowd_size: Callable[[], int] = lambda: 0,
    ) -> None:
        self._operation = operation
        self._tenant_of = tenant_of
        self._bounded = bounded
        self._crowd_size = crowd_size
        # By tenant, in turn.
        self._waiting: OrderedDict[str, deque[_Waiting[M, R]]] = OrderedDict()
        self._count = 0
        self._under_way: set[_Set[M, R]] = set()
        self._lull = Lull(self._begin, self._expects_more)

    async def run(self, member: M) -> R:
        """Send a member with others, and give its result.

        Raises:
            Overloaded: too many wait already, and members may be shed.
            LedgerUnavailable, LockTimeout, ConnectionLost: see Ledger.
        """
        if self._bounded and self._count >= WAITING_MAX:
            raise Overloaded(OVERLOAD_RETRY_AFTER)
        waiting: _Waiting[M, R] = _Waiting(member)
        self._waiting.setdefault(self._tenant_of(member), deque()).append(waiting)
        self._count += 1
        self._begin_soon()
        return await waiting.result

    def _begin_soon(self) -> None:
        """Begin a set when everything that is ready to run has had its chance to join it."""
        may_begin = len(self._under_way) < UNDER_WAY_MAX and all(set_.is_slow for set_ in self._under_way)
        if self._count and may_begin:
            self._lull.ask()

    def _expects_more(self) -> bool:
        size = self._crowd_size()
        return size >= CROWD_MIN and self._count < min(size * SHARE, SIZE_MAX)

    def _begin(self) -> None:
        members = self._take()
        if not members:
            return
        set_ = _Set(members)
        self._under_way.add(set_)
        # In a context of its own: what belongs to one call isn't the set's.
        set_.sending = asyncio.get_running_loop().create_task(self._send(set_), context=contextvars.Context())

    def _take(self) -> list[_Waiting[M, R]]:
        taken: list[_Waiting[M, R]] = []
        while self._waiting and len(taken) < SIZE_MAX:
            tenant, queue = self._waiting.popitem(last=False)
            waiting = queue.popleft()
            self._count -= 1
            if queue:
                self._waiting[tenant] = queue
            # Where its caller left there is nobody to tell.
            if not waiting.result.done():
                taken.append(waiting)
        return taken

    async def _send(self, set_: _Set[M, R]) -> None:
        patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._lose_patience, set_)
        try:
            await self._settle(set_.members)
        finally:
            patience.cancel()
            self._under_way.discard(set_)
            self._begin_soon()

    def _lose_patience(self, set_: _Set[M, R]) -> None:
        set_.is_slow = True
        self._begin_soon()

    async def _settle(self, members: list[_Waiting[M, R]]) -> None:
        try:
            results = await self._operation([waiting.member for waiting in members])
        except Exception as error:  # noqa: BLE001  # whatever it is, it is for who waits
            is_of_one = isinstance(error, LockTimeout) or not isinstance(error, LedgerUnavailable)
            if is_of_one and len(members) > 1:
                await asyncio.gather(*(self._settle([waiting]) for waiting in members))
                return
            for waiting in members:
                if not waiting.result.done():
                    waiting.result.set_exception(error)
            return
        for waiting, result in zip(members, results, strict=True):
            if not waiting.result.done():
                waiting.result.set_result(result)


class Crowd:
    """The attempts under way that began within SOON_S, and what may become one."""

    def __init__(self) -> None:
        # By decision, in the order of their beginning.
        self._began: dict[UUID, float] = {}

    def begin(self, decision_id: UUID) -> None:
        """Count an attempt from now on."""
        self._began[decision_id] = time.monotonic()

    def end(self, decision_id: UUID) -> None:
        """Count an attempt no more."""
        self._began.pop(decision_id, None)

    def size(self) -> int:
        """Tell how many there are."""
        oldest = time.monotonic() - SOON_S
        for decision_id in [*takewhile(lambda known: self._began[known] < oldest, self._began)]:
            del self._began[decision_id]
        return len(self._began)


class LedgerSets:
    """The ledger's operations on the way of a call, one member each; see Ledger for what they do and raise."""

    def __init__(self, ledger: Ledger) -> None:
        self._crowd = Crowd()
        self._reserve: Sets[Reservation, Attempt | Record] = Sets(
            ledger.reserve, lambda r: r.key.tenant, bounded=True, crowd_size=self._crowd.size
        )
        self._read: Sets[Key, Record | None] = Sets(ledger.read, lambda key: key.tenant, bounded=True)
        self._complete: Sets[Completion, Record | None] = Sets(
            ledger.complete, lambda c: c.key.tenant, crowd_size=self._crowd.size
        )

    async def reserve(self, reservation: Reservation) -> Attempt | Record:
        """Reserve a key, or read what is recorded under it."""
        self._crowd.begin(reservation.decision_id)
        found: Attempt | Record | None = None
        try:
            found = await self._reserve.run(reservation)
        finally:
            if not isinstance(found, Attempt):
                self._crowd.end(reservation.decision_id)
        return found

    async def read(self, key: Key) -> Record | None:
        """Read what is recorded under a key; None where nothing is, or nothing any more."""
        return await self._read.run(key)

    async def complete(self, completion: Completion) -> Record | None:
        """End an attempt, with its events; None where the attempt is no longer the key's."""
        try:
            return await self._complete.run(completion)
        finally:
            self._crowd.end(completion.decision_id)
