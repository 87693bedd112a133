"""README and docs/: each piece of code is tested, and what is named in a text is there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import click
import pytest

from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1 import error_reason_pb2 as reasons
from decideonce_server import recording, status
from decideonce_server.cli import cli
from pages import PAGES, ROOT, Piece, name_of, pattern, pieces

TESTS = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
CONTRACT = (ROOT / "docs/contract.md").read_text()


def unindented(text: str) -> str:
    """Give a text without its lines' indentation: what is a part of something stands further in there."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def fault(before: Piece | None, piece: Piece) -> str | None:
    """Tell what is wrong with how a piece says that it is tested."""
    mark, argument = piece.mark, piece.argument
    is_right = {
        "run": piece.language in {"sh", "python"},
        "output": before is not None and before.mark == "run",
        "file": bool(argument),
        "execute": piece.language == "sql",
        "tested": f"def {argument}(" in TESTS,
        "illustration": len(argument) > 10,
    }
    if mark in is_right:
        return None if is_right[mark] else f"{mark}: {argument}"
    if mark.startswith("run with "):
        return None if f'"{mark.removeprefix("run with ")}"' in TESTS else f"no test runs it: {mark}"
    if mark and (ROOT / mark).is_file():
        return None if unindented(piece.text) in unindented((ROOT / mark).read_text()) else f"isn't in {mark}"
    return f"nothing tests it: {piece.text[:60]}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_piece_of_code_is_tested(page: Path) -> None:
    """Each piece of code has a mark that says how it is tested, and is of the kind that the mark is for."""
    found = pieces(page)
    assert page.read_text().count("\n```") == 2 * len(found)
    befores = [None, *found[:-1]] if found else []
    assert [] == [said for before, piece in zip(befores, found, strict=True) if (said := fault(before, piece))]


def test_outputs_are_compared() -> None:
    """An output matches where it differs in what … stands for, and nowhere else."""
    shown = pattern("one  …  three\n…\nend\n")
    assert shown.fullmatch("one  two  three\nend\n")
    assert shown.fullmatch("one  two  three   \nmore\nand more\nend\n")
    assert not shown.fullmatch("one  two  four\nend\n")
    assert not shown.fullmatch("one  two  three\nend\nmore\n")


def commands_named(text: str) -> Iterator[list[str]]:
    for quoted in re.findall(r"`decideonce ([^`…]+?)`", text):
        yield shlex.split(quoted)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_a_text_names_are_there(page: Path) -> None:
    """Every `decideonce …` in a page's text is a command, and its flags are that command's."""
    for words in commands_named(page.read_text()):
        command: click.Command = cli
        for word in words:
            if isinstance(command, click.Group) and not word.startswith("-"):
                assert word in command.commands, words
                command = command.commands[word]
        parameters = command.get_params(click.Context(command))
        flags = {flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= flags, words


def rows(heading: str) -> list[list[str]]:
    """Give the rows of the contract's table under a heading of its first cell."""
    _, _, after = CONTRACT.partition(f"| {heading} |")
    lines = after.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_contract_tells_every_error() -> None:
    """The page has every reason with the code that it travels with, and every failure."""
    codes = {recording.reason_name(reason): code.name for reason, code in status.CODES.items()}
    assert codes == {row[0]: row[1] for row in rows("reason")}
    failures = {recording.reason_name(reason) for reason in recording.FAILURE_MESSAGES}
    told = set(re.findall(r"`([A-Z_]+)`", CONTRACT.partition("## Failures")[2].partition("##")[0]))
    assert failures == told


def test_contract_tells_the_metadata_of_errors() -> None:
    """What the page says of an error's metadata is what the protos say."""
    proto = (ROOT / "protos/decideonce/v1/error_reason.proto").read_text()
    comments = {
        name: " ".join(comment.replace("//", "").split())
        for comment, name in re.findall(r"((?:  //.*\n)+)  ERROR_REASON_(\w+) =", proto)
    }
    for reason, _, metadata, _ in rows("reason"):
        said = re.search(r"Metadata: (.*?)\.", comments[reason])
        named = set() if said is None else set(re.findall(r"\b[a-z]+(?:_[a-z]+)*\b(?=[,. (]|$)", said[1]))
        assert set(re.findall(r"\w+", metadata)) <= named, reason
        assert bool(metadata) == (said is not None), reason


def test_words_of_the_contract_are_the_protos() -> None:
    """Every status and reason that the contract's page names is in the protos, or a word of gRPC's own."""
    known = {name.removeprefix("ERROR_REASON_") for name in reasons.ErrorReason.DESCRIPTOR.values_by_name}
    known |= {name.removeprefix("DECISION_STATUS_") for name in wire.DecisionStatus.DESCRIPTOR.values_by_name}
    known |= {"IDEMPOTENT", "NO_SIDE_EFFECTS", "FILE"}
    assert set() == set(re.findall(r"`([A-Z][A-Z_]+)`", CONTRACT)) - known


def test_diagram_has_the_states() -> None:
    """The diagram of the states has those of the contract, and the key before it has one."""
    root = ET.parse(ROOT / "docs/states.svg").getroot()  # our own file
    named = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "name"}
    states = {name.removeprefix("DECISION_STATUS_") for name in wire.DecisionStatus.keys()}  # noqa: SIM118  # an enum
    assert (states - {"UNSPECIFIED"}) | {"a new key"} == named
