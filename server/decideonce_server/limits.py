"""What one process takes on, and how much of it one tenant gets: beyond it callers are told to come back.

What is recorded is still answered: limits are asked about new work alone.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from cachetools import LRUCache

from decideonce_server.database import LockTimeout
from decideonce_server.errors import MismatchRateLimited, Overloaded
from decideonce_server.ledger import Ledger
from decideonce_server.sets import OVERLOAD_RETRY_AFTER
from decideonce_server.settings import Settings

# A tenant that is forgotten may have a second's new keys again, as after a second without any.
TENANTS_MAX = 100_000


class Limits:
    """How near this process and its tenants are to what the settings allow.

    Attempts and new keys are counted by each process, mismatches by all of them together.
    """

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings = settings
        self._ledger = ledger
        # By tenant.
        self._attempts: Counter[str] = Counter()
        self._reserving: Counter[str] = Counter()
        # How many new keys each tenant might have, and when that was: more with time, a second's at most.
        self._new_keys: LRUCache[str, tuple[float, float]] = LRUCache(TENANTS_MAX)
        # Until when a tenant has had its mismatches, by this process's monotonic clock.
        self._limited_until: dict[str, float] = {}

    def begin_attempt(self, tenant: str) -> None:
        """Count an attempt, until it ends: from its reservation on, so that no call finds room where there is none."""
        self._attempts[tenant] += 1

    @contextmanager
    def ending_attempt(self, tenant: str) -> Iterator[None]:
        """Count an attempt no more when the block ends."""
        try:
            yield
        finally:
            _discount(self._attempts, tenant)

    @contextmanager
    def reserving(self, tenant: str) -> Iterator[None]:
        """Count what may become an attempt: of many at the same moment no more begin than there is room for."""
        with _counted(self._reserving, tenant), _counted(self._attempts, tenant):
            yield

    def new_work(self, tenant: str) -> Overloaded | None:
        """Give the refusal of new work; None where there is room for it."""
        is_full = self._attempts.total() >= self._settings.attempts_max
        is_full = is_full or self._attempts[tenant] >= self._settings.attempts_per_tenant
        return Overloaded(OVERLOAD_RETRY_AFTER) if is_full else None

    def new_key(self, tenant: str) -> Overloaded | None:
        """Give the refusal of a new key, to one that is reserving; None where the tenant may have one."""
        return None if self._reserving[tenant] <= self._new_keys_left(tenant) else Overloaded(OVERLOAD_RETRY_AFTER)

    def count_new_key(self, tenant: str) -> None:
        """Count a key that was reserved."""
        self._new_keys[tenant] = (self._new_keys_left(tenant) - 1, time.monotonic())

    def _new_keys_left(self, tenant: str) -> float:
        rate = self._settings.new_keys_per_second
        left, since = self._new_keys.get(tenant, (rate, 0.0))
        return min(rate, left + rate * (time.monotonic() - since))

    async def mismatch(self, tenant: str) -> None:
        """Count a request that reuses a key for something else: somebody who tries many is looking for something.

        Raises:
            MismatchRateLimited: the tenant has had too many within this minute of Postgres's clock.
            LedgerUnavailable: they can't be counted.
        """
        left = self._limited_until.get(tenant, 0.0) - time.monotonic()
        if left <= 0:
            try:
                count, left = await self._ledger.count_mismatch(tenant)
            except LockTimeout:
                # Others of this tenant are being counted, by commits that take long: that says nothing of this key.
                return
            if count <= self._settings.mismatches_per_minute:
                return
            self._limited_until[tenant] = time.monotonic() + left
        raise MismatchRateLimited(timedelta(seconds=max(1.0, left)))


@contextmanager
def _counted(counter: Counter[str], tenant: str) -> Iterator[None]:
    counter[tenant] += 1
    try:
        yield
    finally:
        _discount(counter, tenant)


def _discount(counter: Counter[str], tenant: str) -> None:
    counter[tenant] -= 1
    if not counter[tenant]:
        del counter[tenant]
