"""Waiting for decisions that others make. Waiters hold no connection: one statement reads for all of a process."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from decideonce_server.errors import LedgerUnavailable
from decideonce_server.ledger import Key, Ledger, Record, State

# A waiter learns of another process's decision this late at most; one small statement for all waiters each time.
POLL_INTERVAL_S = 0.025
# Kept of a deadline for the answer's own way, so that the caller gets PROCESSING and not a broken call.
ANSWER_TIME = timedelta(milliseconds=30)


@dataclass(eq=False, slots=True)
class _Waiter:
    is_over: Callable[[Record], bool]
    record: asyncio.Future[Record] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def is_settled(record: Record) -> bool:
    """Whether a record says more than that an attempt is working on it."""
    return record.state is not State.PROCESSING


class Waiters:
    """The calls of this process that wait for a record to change, so many of each tenant at most."""

    def __init__(self, ledger: Ledger, per_tenant_max: int = 1000) -> None:
        self._ledger = ledger
        self._per_tenant_max = per_tenant_max
        self._waiting: Counter[str] = Counter()
        self._waiters: defaultdict[Key, set[_Waiter]] = defaultdict(set)
        self._poll: asyncio.Task[None] | None = None
        self._given_up = False

    async def wait(self, key: Key, limit: timedelta, is_over: Callable[[Record], bool]) -> Record | None:
        """Wait until a key's record is as awaited, and give it; None where it was not within the limit.

        None at once where the tenant has enough calls waiting: it is told to come back, as if the limit had passed.
        """
        if self._given_up or self._waiting[key.tenant] >= self._per_tenant_max:
            return None
        waiter = _Waiter(is_over)
        self._waiting[key.tenant] += 1
        self._waiters[key].add(waiter)
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._poll_until_nobody_waits())
        try:
            async with asyncio.timeout(limit.total_seconds()):
                return await waiter.record
        except TimeoutError:
            return None
        finally:
            self._waiting[key.tenant] -= 1
            self._waiters[key].discard(waiter)
            if not self._waiters[key]:
                del self._waiters[key]

    def tell(self, record: Record) -> None:
        """Tell the waiters of a record that is newer than what they know."""
        for waiter in self._waiters.get(record.key, ()):
            if not waiter.record.done() and waiter.is_over(record):
                waiter.record.set_result(record)

    async def _poll_until_nobody_waits(self) -> None:
        while self._waiters:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                records = await self._ledger.read(sorted(self._waiters))
            except LedgerUnavailable:
                # The waiters' own limits end their waiting; until then it may be back.
                continue
            for record in records:
                if record is not None:
                    self.tell(record)

    def give_up(self) -> None:
        """End every wait as if its limit had come, and those to come at once."""
        self._given_up = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.record.done():
                    waiter.record.set_exception(TimeoutError())

    async def close(self) -> None:
        """Stop polling."""
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
