"""The image, as far as it can be made without Docker: its steps are run, and what it names exists."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from ruamel.yaml import YAML

from decideonce_server.cli import cli

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = YAML(typ="safe").load((ROOT / "deploy/compose.yaml").read_text())


def instructions(name: str) -> list[str]:
    """Give an instruction's arguments, each time it stands."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def settings_of(command: click.Command) -> set[str]:
    """Give the variables that a command reads."""
    return {parameter.envvar for parameter in command.params if isinstance(parameter.envvar, str)}


def test_steps_make_a_program_that_works(tmp_path: Path) -> None:
    """The build stage's steps, run in an empty directory, give a program that knows its version and is healthy."""
    prefix = tmp_path / "opt"
    for source in instructions("COPY")[:4]:
        *names, target = source.split()
        for name in names:
            into = tmp_path / "src" / target / ("" if (ROOT / name).is_dir() else Path(name).name)
            into.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, into)
    build_stage = DOCKERFILE.split("\nFROM ")[1]
    for step in re.findall(r"^RUN (.*)$", build_stage, re.MULTILINE):
        here = step.replace("/opt/decideonce", str(prefix)).replace("--no-cache-dir ", "")
        here = re.sub(r"^python ", f"{sys.executable} ", here)
        subprocess.run(["sh", "-ec", here], cwd=tmp_path / "src", check=True, capture_output=True)
    for arguments in (["--version"], ["doctor"]):
        ran = subprocess.run(
            [prefix / "bin/decideonce", *arguments],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == ran.returncode, ran.stdout + ran.stderr


def test_image_is_small_safe_and_checked() -> None:
    """The image has a slim base, no root, a health check, and only commands that the program has."""
    assert all("-slim" in base for base in instructions("FROM"))
    assert ["decideonce"] == instructions("USER")
    commands = re.findall(r'\["decideonce", "(\w+)"\]', DOCKERFILE) + re.findall(
        r'^CMD \["(\w+)"\]', DOCKERFILE, re.MULTILINE
    )
    assert ["health", "serve"] == commands
    assert set(commands) <= set(cli.commands)
    variables = set(re.findall(r"DECIDEONCE_\w+", DOCKERFILE))
    assert variables <= settings_of(cli.commands["serve"]) | settings_of(cli.commands["health"])


@pytest.mark.parametrize("service", ["migrate", "decideonce"])
def test_compose_file_names_what_exists(service: str) -> None:
    """The compose file's commands, flags and variables are the program's."""
    name, *arguments = COMPOSE["services"][service]["command"]
    command = cli.commands[name]
    flags = {option for parameter in command.params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= flags
    variables = {v for v in COMPOSE["services"][service]["environment"] if v.startswith("DECIDEONCE_")}
    assert variables <= settings_of(cli.commands["serve"])
