"""What one process takes on: beyond it callers are told to come back, and what is recorded is still answered."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from decideonce_server.errors import MismatchRateLimited, Overloaded

# A full process tells callers to come back when a part of its work is done: attempts take milliseconds to a second.
OVERLOAD_RETRY_AFTER = timedelta(seconds=1)


class Limits:
    """The limits of one process, and how near it is to them."""

    def __init__(self, *, attempts_max: int, mismatches_per_minute: int) -> None:
        self._attempts_max = attempts_max
        self._attempts = 0
        self._mismatches = RateLimitItemPerMinute(mismatches_per_minute)
        self._limiter = FixedWindowRateLimiter(MemoryStorage())

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Count an attempt as long as the block runs."""
        self._attempts += 1
        try:
            yield
        finally:
            self._attempts -= 1

    def new_work(self) -> Overloaded | None:
        """Give the refusal of new work; None where there is room."""
        return Overloaded(OVERLOAD_RETRY_AFTER) if self._attempts >= self._attempts_max else None

    def mismatch(self, tenant: str) -> None:
        """Count a request that reuses a key for something else: somebody who tries many is looking for something.

        Raises:
            MismatchRateLimited: the tenant has had too many within a minute.
        """
        if not self._limiter.hit(self._mismatches, tenant):
            reset_time = self._limiter.get_window_stats(self._mismatches, tenant).reset_time
            raise MismatchRateLimited(timedelta(seconds=max(1.0, reset_time - time.time())))
