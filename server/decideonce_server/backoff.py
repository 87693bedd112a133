"""How long to wait before another try, as the library of backoffs computes it."""

import tenacity
from tenacity.wait import wait_base


def pause_s(wait: wait_base, tries: int) -> float:
    """Give the pause after so many tries that failed, 1 or more, in seconds."""
    state = tenacity.RetryCallState(tenacity.AsyncRetrying(), None, (), {})
    state.attempt_number = tries
    return float(wait(state))
