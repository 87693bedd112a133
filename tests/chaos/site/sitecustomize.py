"""Makes this interpreter's clock wrong, or its service defective, where the environment says so."""

import os
import sys

if offset := os.environ.get("CHAOS_CLOCK_OFFSET"):
    import time

    # gRPC counts what is left of a deadline by the clock that it was set by; a wrong clock is wrong in both places.
    OF_DEADLINES = ("_deadline", "GetDecisionStatus")
    right_time = time.time

    def wrong_time() -> float:
        """Tell the wrong time."""
        return right_time() + (0 if sys._getframe(1).f_code.co_name in OF_DEADLINES else float(offset))

    time.time = wrong_time

if defect := os.environ.get("CHAOS_DEFECT"):
    import planted

    planted.plant(defect)
