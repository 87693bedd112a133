"""Tools that people call and load a service with: with `make interop`."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from harness import make_token, spoken_in_log
from interop.drivers import BUILT, ROOT

pytestmark = pytest.mark.interop


def commands(page: str, tool: str) -> str:
    """Give the commands of a page for a tool."""
    (found,) = re.findall(rf"<!-- run with {tool} -->\n```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return found


@pytest.fixture
async def run(start_service, database_url, tmp_path: Path):
    """Give a function that runs a page's commands for a tool on a service with the example catalog."""
    os.environ["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'catalog/python'}"
    service = start_service("--catalog", str(ROOT / "catalog"))
    token = await make_token(database_url, "dev")
    (tmp_path / ".decideonce").mkdir()
    (tmp_path / ".decideonce/dev-token").write_text(token)
    (tmp_path / "catalog").symlink_to(ROOT / "catalog")

    def run_commands(page: str, tool: str, *flags: str) -> str:
        text = commands(page, tool).replace("127.0.0.1:50051", service.address)
        if flags:
            text = text.rstrip() + " " + " ".join(flags)
        return subprocess.run(
            ["sh", "-e", "-c", text],
            cwd=tmp_path,
            env={
                "PATH": f"{BUILT / 'bin'}:/usr/bin:/bin",
                "DECIDEONCE_TOKEN": token,
                "PROTOS": str(ROOT / "protos"),
            },
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    yield run_commands
    assert [] == spoken_in_log(service.log)


def test_grpcurl(run) -> None:
    """README's commands for grpcurl work from reflection alone: the contract, a decision, and its recorded status."""
    printed = run("README.md", "grpcurl")
    contract, _, answers = printed.partition("\n{")
    assert "rpc Decide ( .decideonce.v1.DecideRequest ) returns ( .decideonce.v1.DecideResponse )" in contract
    decided, recorded = (json.loads(answer) for answer in re.split(r"(?<=\n\})\n(?=\{)", "{" + answers.strip()))
    assert "DECISION_STATUS_SUCCEEDED" == decided["status"]
    assert "loan-2026-000123" == decided["provenance"]["operation_key"]
    assert [decided[part] for part in ("status", "decision", "provenance")] == [
        recorded[part] for part in ("status", "decision", "provenance")
    ]


async def test_ghz(run, observer) -> None:
    """The page's short load with ghz decides each of its calls, under a key of its own."""
    report = json.loads(run("docs/clients.md", "ghz", "--format", "json"))
    assert (200, {"OK": 200}) == (report["count"], report["statusCodeDistribution"])
    assert 200 == await observer.fetchval("SELECT count(*) FROM ledger WHERE state = 2")
