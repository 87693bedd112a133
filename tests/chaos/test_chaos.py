"""A minute of chaos; `make chaos` makes ten."""

import tempfile
from pathlib import Path

from chaos.run import drive

SECONDS = 60.0
SEED = 20261130


async def test_a_minute_of_chaos_breaks_no_promise() -> None:
    """Under a minute of faults every answer is explained, and nothing is lost, twice, or left over."""
    with tempfile.TemporaryDirectory(prefix="decideonce-chaos-", ignore_cleanup_errors=True) as directory:
        history, violations = await drive(SECONDS, SEED, Path(directory))
    assert [] == [str(violation) for violation in violations]
    assert len(history.calls) > 0
    assert len(history.faults) > 0
