"""Renews the leases of the attempts that run in this process, from a thread with a loop and a connection of its own.

Neither a blocked event loop nor a busy interpreter starves it: the thread gets its turn within milliseconds. It ends
with the process and stands still when that does, so that nobody renews for a process that can't answer. An attempt that
has had far more time than it needs is not renewed any more: it hangs, and another may take over.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import structlog

from decideonce_server.database import Database
from decideonce_server.errors import LedgerUnavailable
from decideonce_server.ledger import Ledger, Record

# Two renewals may fail before a lease runs out.
RENEWALS_PER_LEASE = 3
# On top of its time budget, an attempt may wait for an evaluator, have its policy prepared, and retry its completion.
SURPLUS_S = 60.0
# How often the thread looks where nothing is due sooner; an attempt with a shorter lease wakes it.
IDLE_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 0.1

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _Held:
    record: Record
    lease: timedelta
    renew_at: float
    until: float


class LeaseKeeper:
    """The thread, and what it renews."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._held: dict[int, _Held] = {}
        self._next_look = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="leases", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def close(self) -> None:
        """Stop the thread, and wait for it."""
        self._stopping = True
        self._wake_up()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    @contextmanager
    def renewing(self, record: Record, lease: timedelta, time_budget: timedelta) -> Iterator[None]:
        """Renew an attempt's lease as long as the block runs, but not for ever."""
        now = time.monotonic()
        period = lease.total_seconds() / RENEWALS_PER_LEASE
        held = _Held(record, lease, now + period, now + time_budget.total_seconds() + SURPLUS_S)
        self._held[id(held)] = held
        if held.renew_at < self._next_look:
            self._wake_up()
        try:
            yield
        finally:
            del self._held[id(held)]

    @property
    def records(self) -> list[Record]:
        """The records whose attempts run in this process now."""
        return [held.record for held in self._held.values()]

    def _wake_up(self) -> None:
        if self._loop is not None and self._wake is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _run(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        ledger = Ledger(self._database)
        try:
            while not self._stopping:
                self._wake.clear()
                await self._renew_due(ledger)
                now = time.monotonic()
                self._next_look = min([now + IDLE_INTERVAL_S, *(h.renew_at for h in list(self._held.values()))])
                try:
                    async with asyncio.timeout(max(0.0, self._next_look - now)):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            self._loop = None
            await self._database.close()

    async def _renew_due(self, ledger: Ledger) -> None:
        now = time.monotonic()
        due = [held for held in list(self._held.values()) if held.renew_at <= now]
        for held in due:
            held.renew_at = now + held.lease.total_seconds() / RENEWALS_PER_LEASE if now < held.until else float("inf")
        due = [held for held in due if now < held.until]
        if not due:
            return
        try:
            renewed = await ledger.renew([held.record for held in due], [held.lease for held in due])
        except LedgerUnavailable:
            log.warning("leases not renewed: the ledger can't be reached", attempts=len(due))
            for held in due:
                held.renew_at = time.monotonic() + RETRY_INTERVAL_S
            return
        for held in due:
            if held.record.key not in renewed:
                held.renew_at = float("inf")
