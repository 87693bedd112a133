"""What `make demo` and `make run` show."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
# The example catalog's python policy is importable, as the Makefile has it.
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": "catalog/python"}


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Give the script as a module."""
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("demo", ROOT / "tools/demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_demo_shows_every_kind_of_answer() -> None:
    """It starts a service, shows an original, a replay, a conflict, work in progress and events, and exits with 0.

    Each command stands there as it can be run, and without a terminal there are no colours.
    """
    ran = subprocess.run(
        [sys.executable, "tools/demo.py"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    for shown in (
        "original",
        "replayed",
        "OPERATION_KEY_REUSED",
        "INVALID_FACTS",
        "PROCESSING",
        "loan.offer-requested",
    ):
        assert shown in ran.stdout
    operations = set(re.findall(r"^\$ \.venv/bin/decideonce decide (\S+)", ran.stdout, re.MULTILINE))
    assert {path.stem for path in (ROOT / "catalog/operations").glob("*.yaml")} == operations
    assert "\x1b" not in ran.stdout


@pytest.mark.parametrize(("shows", "exit_code"), [("another text", 0), ("decideonce", 1)])
def test_demo_tells_what_is_not_as_it_should_be(demo: ModuleType, shows: str, exit_code: int) -> None:
    """A command that prints something else, or ends otherwise, fails the demo."""
    with pytest.raises(demo.Unexpected):
        demo.step("The version.", "--version", shows=shows, exit_code=exit_code)


def test_demo_notices_a_service_that_does_not_start(demo: ModuleType, tmp_path: Path) -> None:
    """A service that can't start fails the demo, with the reason from its log."""
    with pytest.raises(demo.Unexpected, match="--listen"), demo.service("nowhere", tmp_path):
        pass
