"""docs/security.md names what there is."""

import json
import re
from pathlib import Path

import click
import pytest
from ruamel.yaml import YAML

from decideonce_server import callers
from decideonce_server.cli import cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def test_tests_that_the_page_names_are_there() -> None:
    """Each threat is shown by tests that can be found."""
    texts = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+(?:\.py)?)`", PAGE))
    assert len(named) > 10
    missing = [
        name for name in named if name not in texts and not any(f"def {name}(" in text for text in texts.values())
    ]
    assert [] == missing


def test_flags_that_the_page_names_are_there() -> None:
    """Every flag on the page is one of `serve`'s or `migrate`'s."""
    flags = {
        flag
        for name in ("serve", "migrate")
        for parameter in cli.commands[name].params
        if isinstance(parameter, click.Option)
        for flag in parameter.opts
    }
    assert set() == set(re.findall(r"--[a-z][a-z-]+", PAGE)) - flags


def test_file_of_callers_on_the_page_can_be_used(tmp_path: Path) -> None:
    """The example is read without a fault, and one without its audience is not."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "callers.yaml"
    path.write_text(text)
    assert {"checkout.acme.example"} == set(callers.read_callers(path).certificates)
    document = YAML(typ="safe", pure=True).load(text)
    del document["jwt"][0]["audience"]
    path.write_text(json.dumps(document))
    with pytest.raises(callers.InvalidCallers):
        callers.read_callers(path)
