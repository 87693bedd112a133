"""A minute of chaos; `make chaos` makes ten."""

import subprocess
import sys
from pathlib import Path

MINUTES = 1
SEED = 20261130
KINDS = (
    "worker killed",
    "instance killed",
    "housekeeping killed",
    "worker paused",
    "cut before commit",
    "cut after commit",
    "connections cut",
    "connections lost",
    "black hole",
    "postgres restarted",
    "failover",
    "clock changed",
    "catalog applied",
    "broker stopped",
    "broker frozen",
)


def test_a_minute_of_chaos_breaks_no_promise() -> None:
    """Under a minute of faults of every kind each answer is explained, and nothing is lost, twice, or left over.

    Nor is any event: a consumer has applied each once and in order.
    """
    program = Path(__file__).with_name("run.py")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", program, "--minutes", str(MINUTES), "--seed", str(SEED)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    assert "\n0 violations" in ran.stdout
    assert [] == [kind for kind in KINDS if kind not in ran.stdout]
