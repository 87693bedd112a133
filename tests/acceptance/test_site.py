"""The documentation site, as `make docs` builds it."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest

from decideonce.v1 import catalog_pb2, decision_service_pb2, error_reason_pb2, events_pb2
from decideonce_server.cli import cli

ROOT = Path(__file__).parents[2]

# Builds the site, and ends where anything asks for a network.
BUILD = """
import sys
def refuse(event, arguments):
    assert event not in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"), (event, arguments)
sys.addaudithook(refuse)
from mkdocs.__main__ import cli
cli(["build", "--quiet", "--config-file", sys.argv[1]])
"""
# What a browser loads by itself: by tag, the attribute that says from where.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}


class Loads(HTMLParser):
    """Collects what a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if named.get(LOADED.get(tag, "")) and named.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(named[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Give the site, built in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    subprocess.run([sys.executable, ROOT / "tools/pages.py", folder / "build/pages"], check=True)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, folder / "mkdocs.yml"],
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "", "") == (built.returncode, built.stdout, built.stderr)
    return folder / "build/site"


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """Pages and style sheets load files of the site alone, and no page has what would load a script later."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        text = page.read_text()
        loads = Loads()
        loads.feed(text)
        assert [] == [address for address in loads.addresses if re.match(r"(\w+:)?//", address)], page
        assert [] == [a for a in loads.addresses if page.name != "404.html" and not (page.parent / a).is_file()], page
        assert 'class="mermaid' not in text
    for sheet in site.rglob("*.css"):
        assert [] == re.findall(r"(?:url\(|@import\s*)[\"']?(?:\w+:)?//[^)]*", sheet.read_text()), sheet


def test_reference_has_every_element_of_the_protos(site: Path) -> None:
    """Every message, field, enum value and rpc stands in the reference."""
    page = (site / "reference/protos.html").read_text()
    names = set()
    for module in (catalog_pb2, decision_service_pb2, error_reason_pb2, events_pb2):
        file = module.DESCRIPTOR
        for message in file.message_types_by_name.values():
            names |= {message.name, *message.fields_by_name}
        for enum in file.enum_types_by_name.values():
            names |= {enum.name, *enum.values_by_name}
        for service in file.services_by_name.values():
            names |= {service.name, *service.methods_by_name}
    assert [] == sorted(name for name in names if f">{name}<" not in page)


def test_reference_has_every_setting(site: Path) -> None:
    """Every flag and variable of every command stands in the reference."""
    page = (site / "reference/commands.html").read_text()

    def check(command: click.Command) -> None:
        for child in command.commands.values() if isinstance(command, click.Group) else ():
            check(child)
        if command.hidden:
            return
        for option in command.params:
            if isinstance(option, click.Option) and not isinstance(command, click.Group):
                assert all(f"<code>{name}</code>" in page for name in (*option.opts, *option.secondary_opts))
                assert option.envvar is None or f"<code>{option.envvar}</code>" in page

    check(cli)
