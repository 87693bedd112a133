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

from decideonce_server.errors import Violation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as one JSON text."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def fields_of(value: "DataclassInstance") -> dict[str, Any]:
    """Give a dataclass's fields by name, leaving out bytes."""
    named = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: part for name, part in named.items() if not isinstance(part, bytes)}


def message_dict(message: Message) -> dict[str, Any]:
    """Give a message as JSON's parts, with the contract's field names."""
    parts: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return parts


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    """Print rows under their columns, or `empty` where there is none."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    out.print(table if table.row_count else empty)


def print_record(title: str, fields: Mapping[str, object]) -> None:
    """Print one thing: a title, and what is known of it; empty fields are left out."""
    out.print(title)
    shown = {name: value for name, value in fields.items() if value not in ("", None, [], {})}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        lines = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        for i, line in enumerate(lines):
            out.print(f"  [dim]{name if i == 0 else '':<{width}}[/]  {_escaped(line)}")


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def fail(text: str, violations: Iterable[Violation] = ()) -> NoReturn:
    """Say on stderr what went wrong, and exit with 1."""
    err.print(f"[bold red]error[/] {_escaped(text)}")
    for violation in violations:
        err.print(f"  {_escaped(violation.field)}: {_escaped(violation.rule)}")
    raise SystemExit(1)
