"""docs/clients.md shows the examples as they are, and leaves no answer out."""

import re
from pathlib import Path
from textwrap import indent

from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.status import CODES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clients.md").read_text()
# What only ApplyCatalog and an operator see.
NOT_OF_DECISIONS = {"ABORTED"}


def test_code_on_the_page_is_the_examples() -> None:
    """Every piece of code on the page stands in the file that it is said to be of."""
    shown = re.findall(r"<!-- (\S+) -->\n```(\w+)\n(.*?)```", PAGE, re.DOTALL)
    assert PAGE.count("```") == 2 * (len(shown) + PAGE.count("<!-- run with "))
    assert {"go", "java", "python", "sh", "typescript"} == {kind for _, kind, _ in shown}
    strange = [
        code
        for name, _, code in shown
        if not any(form in (ROOT / name).read_text() for form in (code, indent(code, " " * 4)))
    ]
    assert [] == strange


def test_every_answer_has_a_row() -> None:
    """The table names every status that is recorded and every code that a call can end with."""
    rows = "\n".join(re.findall(r"^\| (.+?) \|", PAGE, re.MULTILINE))
    statuses = {name.removeprefix("DECISION_STATUS_") for name in wire.DecisionStatus.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    codes = {code.name for code in CODES.values()} - NOT_OF_DECISIONS
    assert set() == {name for name in statuses | codes if f"`{name}`" not in rows}


def test_links_lead_somewhere() -> None:
    """Every file that the page links to is there."""
    links = re.findall(r"\]\(([^):#]+)\)", PAGE)
    assert [] == [link for link in links if not (ROOT / "docs" / link).exists()]
