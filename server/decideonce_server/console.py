"""What people read: tables and records on a terminal, or JSON for machines."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from decideonce_server.errors import Violation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# So wide that nothing is ever cut: names and keys are there to be copied.
_WIDTH = 100_000

_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}

out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=_WIDTH)
err = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=_WIDTH, stderr=True)


def print_json(value: Any) -> None:
    """Print a value as one JSON text, names in order: a Struct's own order differs from answer to answer."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True, default=str))


def print_json_line(value: Any) -> None:
    """Print a value as JSON in one line, for what goes on."""
    click.echo(json.dumps(value, ensure_ascii=False, sort_keys=True, default=str))


def fields_of(value: "DataclassInstance") -> dict[str, Any]:
    """Give a dataclass's fields by name, leaving out bytes."""
    named = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: part for name, part in named.items() if not isinstance(part, bytes)}


def message_dict(message: Message) -> dict[str, Any]:
    """Give a message as JSON's parts, with the contract's field names; whole numbers have no fraction."""
    parts: dict[str, Any] = _plain_numbers(MessageToDict(message, preserving_proto_field_name=True))
    return parts


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def one_line(value: Any) -> str:
    """Write a JSON value in one line, objects in the order of their names; nothing where it is empty."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True) if value else ""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    """Print rows under their columns, or `empty` where there is none."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else _text(cell) for cell in row))
    out.print(table if table.row_count else empty)


def print_record(title: Text, fields: Mapping[str, object]) -> None:
    """Print one thing: a title, and what is known of it; empty fields are left out."""
    out.print(title)
    shown = {name: value for name, value in fields.items() if value not in ("", None, [], {})}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        for i, line in enumerate(value if isinstance(value, list) else [value]):
            out.print(Text.assemble("  ", (f"{name if i == 0 else '':<{width}}", "dim"), "  ", _text(line)))


def print_diff(lines: Sequence[str]) -> None:
    """Print a unified diff, or that there is none."""
    for line in lines:
        out.print(Text(_text(line).plain, _DIFF_STYLES.get(line[:1], "")))
    if not lines:
        out.print("no difference")


def _text(value: object) -> Text:
    """Make a text of what may come from a caller: nothing in it can steer the terminal."""
    return Text("".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in str(value)))


def fail(text: str, violations: Iterable[Violation] = (), hint: str = "") -> NoReturn:
    """Say on stderr what went wrong and what may help, and exit with 1."""
    err.print(Text.assemble(("error", "bold red"), " ", _text(text)))
    for violation in violations:
        err.print(Text.assemble("  ", _text(violation.field), ": ", _text(violation.rule)))
    if hint:
        err.print(Text.assemble("  ", _text(hint)))
    raise SystemExit(1)
