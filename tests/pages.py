"""The pieces of code in README and docs/, and how each is tested: a comment before it says so.

<!-- run -->                    sh or python: runs, after the pieces before it, in a folder with catalog/ and .venv/
<!-- output -->                 what the piece before it prints; … stands for anything in a line, or for any lines
<!-- file: PATH -->             is written to PATH of that folder before anything runs
<!-- execute -->                sql: runs on a service's database
<!-- run with TOOL -->          sh: needs a tool that `make interop` fetches
<!-- PATH -->                   is a part of that file of the repository, as it stands
<!-- tested: NAME -->           has a test of its own
<!-- illustration: REASON -->   can't be run
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_PIECE = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^(```+)(\w*)[^\n]*\n(.*?)^\2$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """A piece of code: its mark, if it has one, what follows the mark's colon, its language and its text."""

    mark: str
    argument: str
    language: str
    text: str


def pieces(page: Path) -> list[Piece]:
    """Give a page's pieces of code."""
    found = []
    for comment, _, language, text in _PIECE.findall(page.read_text()):
        mark, _, argument = comment.partition(": ")
        found.append(Piece(mark, argument, language, text))
    return found


def name_of(page: Path) -> str:
    """Give a page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def runs(page: Path) -> bool:
    """Whether a page has something to run."""
    return any(piece.mark == "run" for piece in pieces(page))


def script(found: Sequence[Piece]) -> str:
    """Make one script of all that runs: what a piece sets holds for the next. A line with a number ends each."""
    commands = []
    for i, piece in enumerate(found):
        if piece.mark == "run":
            text = piece.text if piece.language == "sh" else f"python - <<'PYTHON'\n{piece.text}PYTHON\n"
            commands.append(f"{text}echo '--- {i} ---'\n")
    return "".join(commands)


def outputs(printed: str) -> dict[int, str]:
    """Give what each piece of a script printed, by its number."""
    parts = re.split(r"^--- (\d+) ---\n", printed, flags=re.MULTILINE)
    return {int(number): text for text, number in zip(parts[::2], parts[1::2], strict=False)}


def pattern(expected: str) -> re.Pattern[str]:
    """Make a pattern of an output as a page shows it."""
    lines = [
        r"(?:.*\n)*?" if line == "…" else r".*".join(map(re.escape, line.split("…"))) + r" *\n"
        for line in expected.splitlines()
    ]
    return re.compile("".join(lines))
