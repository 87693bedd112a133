"""The measurement of runaway policies, in short."""

import io

from bench.neighbours import BUDGET, OVERHEAD_S, run


def test_policies_that_run_away_end_in_their_budget_and_others_go_on() -> None:
    """A pattern that never ends and a fold over a huge list are killed in time, while small decisions are made."""
    told = io.StringIO()
    measured = run(1, 2.0, told)
    assert "times as long" in told.getvalue()
    assert 2 <= len(measured.runaway)
    budget_s = BUDGET.total_seconds()
    assert budget_s <= min(measured.runaway) <= budget_s + OVERHEAD_S
