"""When a call that wasn't answered is sent again, and how long after.

Sent again is what the service, or gRPC, says can be overcome: UNAVAILABLE; RESOURCE_EXHAUSTED where the answer says
when to come back; and a try that took too long, while the call has time left. Everything else ends the call.

A pause is what the service asks for, plus a random part of a backoff that doubles with each failure ("full jitter", of
Marc Brooker's "Exponential Backoff and Jitter", AWS Architecture Blog, 2015): calls that failed together come back
apart from each other. The service's `grpc-retry-pushback-ms` outranks its RetryInfo; one that is negative or no number
says that the call isn't to be sent again (gRFC A6).
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass

import grpc

from decideonce._status import CallStatus

_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
_PUSHBACK = re.compile("[0-9]{1,10}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How calls are tried again. Raises ValueError for a value out of its range.

    `tries_max` (1 or more) is how many tries in a row may fail until a call does. `try_timeout_s` (more than 0) is how
    long one may take, on top of the time that the service is asked to wait. `backoff_initial_s` and `backoff_max_s` (0
    or more) are the first and the longest backoff.

    `tokens_max` and `tokens_per_success` (0 or more) are the channel's retry budget (gRFC A6, "Throttling Retry
    Attempts and Hedged RPCs"): a failed try takes a token, one that is answered gives so much of one back, and while
    half of the tokens or less are left nothing is tried again. The default lets 249 calls that are in flight on a
    connection that breaks be sent again, and one try in three fail for good; a service that is down soon gets first
    tries alone.
    """

    tries_max: int = 10
    try_timeout_s: float = 10.0
    backoff_initial_s: float = 0.1
    backoff_max_s: float = 5.0
    tokens_max: float = 500.0
    tokens_per_success: float = 0.5

    def __post_init__(self) -> None:
        if self.tries_max < 1 or self.try_timeout_s <= 0:
            raise ValueError("tries_max must be 1 or more, and try_timeout_s more than 0")
        if min(self.backoff_initial_s, self.backoff_max_s, self.tokens_max, self.tokens_per_success) < 0:
            raise ValueError("backoffs and tokens must be 0 or more")

    def backoff_s(self, failures: int) -> float:
        """Give the longest pause after so many failures in a row, 1 or more."""
        # Past 60 doublings, any backoff is longer than the longest.
        return min(self.backoff_max_s, self.backoff_initial_s * 2.0 ** min(failures - 1, 60))


class RetryBudget:
    """The tokens of a channel; calls of any thread may share it."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._tokens = policy.tokens_max
        self._lock = threading.Lock()

    def earn(self) -> None:
        """Count a call that was answered."""
        with self._lock:
            self._tokens = min(self._policy.tokens_max, self._tokens + self._policy.tokens_per_success)

    def spend(self) -> bool:
        """Count a try that failed, and tell whether another may follow."""
        with self._lock:
            self._tokens = max(0.0, self._tokens - 1)
            return self._tokens > self._policy.tokens_max / 2


def asked_pause_s(status: CallStatus) -> float | None:
    """Tell how long the service asks to wait until the next try, 0 where it doesn't say; None: there is to be none."""
    if status.code not in _RETRIED:
        return None
    if status.pushback is not None:
        return int(status.pushback) / 1000 if _PUSHBACK.fullmatch(status.pushback) else None
    if status.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return status.retry_delay_s
    return status.retry_delay_s or 0.0
