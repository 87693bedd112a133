"""A minute of fuzzing; `make chaos` sends a number of inputs."""

import os
import re
import subprocess
import sys
from pathlib import Path

SECONDS = 60
SEED = 20261130


def test_a_minute_of_odd_inputs_harms_nothing() -> None:
    """Whatever bytes, metadata and facts come, each is answered by the contract, and a refused call writes no row."""
    program = Path(__file__).with_name("fuzz.py")
    ran = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            program,
            "--inputs",
            "1000000",
            "--seconds",
            str(SECONDS),
            "--seed",
            str(SEED),
        ],
        env=os.environ | {"GRPC_VERBOSITY": "none"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    counted = re.match(r"seed \d+: (\d+) inputs", ran.stdout)
    assert counted is not None, ran.stdout
    assert int(counted[1]) > 1_000
    # Every kind of answer came, so every part was reached.
    answers = (" OK\n", "INVALID_FACTS", "UNKNOWN_FIELD", "OPERATION_KEY_REUSED", "UNAUTHENTICATED", "INVALID_CATALOG")
    assert [] == [answer for answer in answers if answer not in ran.stdout]
