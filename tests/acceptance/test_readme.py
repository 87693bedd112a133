"""What README tells a reader to do."""

import re
import subprocess
import sys
from pathlib import Path

from harness import url_text

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def commands() -> str:
    """Give the commands of the reader's own decision."""
    return "\n".join(re.findall(r"<!-- run -->\n```sh\n(.*?)```", README, re.DOTALL))


def test_setup_commands_are_two() -> None:
    """README has exactly two set-up commands, and they are targets of the Makefile."""
    assert ["make run", "make test"] == re.findall(r"^make \w+", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in ("run", "test"))


def test_own_decision(start_service, database_url, tmp_path, monkeypatch) -> None:
    """The commands for a decision of one's own work as they stand: an original, a replay and a refusal."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "catalog/python"))
    service = start_service("--catalog", str(ROOT / "catalog"))
    created = subprocess.run(
        [
            *(sys.executable, "-m", "decideonce_server", "token", "create", "dev"),
            *("--role", "admin", "--role", "decide", "--database-url", url_text(database_url)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    for part in ("catalog", ".venv"):
        (tmp_path / part).symlink_to(ROOT / part)
    ran = subprocess.run(
        ["sh", "-e", "-c", commands()],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "DECIDEONCE_SERVER": service.address, "DECIDEONCE_TOKEN": created.stdout.strip()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert 0 == ran.returncode, ran.stdout
    shown = re.findall(r"added +operation +travel\S+|approved  \w+|OPERATION_KEY_REUSED", ran.stdout)
    assert ["added", "approved  original", "approved  replayed", "OPERATION_KEY_REUSED"] == [
        line.split(" ")[0] if line.startswith("added") else line for line in shown
    ], ran.stdout
