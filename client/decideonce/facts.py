"""Facts as a caller has them, frozen into what is sent: exactly, or not at all.

A number is finite and within ±(2^53-1), as every reader of JSON holds it exactly (RFC 7493, section 2.2); a text is
valid Unicode without U+0000; values nest 30 levels at most. These are the service's own rules. What they refuse is
refused here first, and named: `facts.customer.limits[3]`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NoReturn

from google.protobuf import struct_pb2

from decideonce.errors import InvalidFacts, Violation

NUMBER_MAX = 2**53 - 1
DEPTH_MAX = 30

# What isn't JSON has more than one spelling, and only the caller knows which one its operation's schema means.
_INSTEAD = {
    "Decimal": "give it as text, str(value), for a schema's format decimal",
    "Fraction": "give it as text, or round it to a number",
    "datetime": "give it as text with its offset, value.isoformat(), for a schema's format date-time",
    "date": "give it as text, value.isoformat(), for a schema's format date",
    "time": "give it as text, value.isoformat()",
    "timedelta": "give it as a number in a unit that its name says, such as value.total_seconds()",
    "bytes": "give it as text, such as base64",
    "bytearray": "give it as text, such as base64",
    "UUID": "give it as text, str(value)",
    "set": "give it as a list in an order of its own, such as sorted(value)",
    "frozenset": "give it as a list in an order of its own, such as sorted(value)",
}


def freeze(facts: Mapping[str, object]) -> struct_pb2.Struct:
    """Copy facts into a Struct, which later changes of them don't reach.

    Facts are None, bool, int, float, str, lists or tuples, and mappings whose keys are texts.

    Raises InvalidFacts.
    """
    struct = struct_pb2.Struct()
    if not isinstance(facts, Mapping):
        _refuse("facts", _kind_rule(facts, "must be a mapping"))
    _fill_struct(struct, facts, "facts", 1)
    return struct


def text_fault(text: str) -> str | None:
    """Tell which rule a text breaks, if it breaks one."""
    if "\0" in text:
        return "must not contain U+0000"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "must be valid Unicode without lone surrogates"
    return None


def _fill_struct(struct: struct_pb2.Struct, facts: Mapping[str, object], path: str, depth: int) -> None:
    for name, value in facts.items():
        if not isinstance(name, str):
            _refuse(path, f"must have texts as names of its members, and has one of type {type(name).__name__}")
        inner = f"{path}.{name}" if name.isidentifier() else f"{path}[{json.dumps(name)}]"
        if (fault := text_fault(name)) is not None:
            _refuse(inner, f"{fault}, in its name")
        _fill(struct.fields[name], value, inner, depth)


def _fill(into: struct_pb2.Value, value: object, path: str, depth: int) -> None:
    if not isinstance(value, Mapping | list | tuple):
        _fill_single(into, value, path)
    elif depth >= DEPTH_MAX:
        _refuse(path, f"must not nest more than {DEPTH_MAX} levels")
    elif isinstance(value, Mapping):
        into.struct_value.SetInParent()
        _fill_struct(into.struct_value, value, path, depth + 1)
    else:
        into.list_value.SetInParent()
        for i, item in enumerate(value):
            _fill(into.list_value.values.add(), item, f"{path}[{i}]", depth + 1)


def _fill_single(into: struct_pb2.Value, value: object, path: str) -> None:
    if value is None:
        into.null_value = struct_pb2.NULL_VALUE
    elif isinstance(value, bool):
        into.bool_value = value
    elif isinstance(value, str):
        if (fault := text_fault(value)) is not None:
            _refuse(path, fault)
        into.string_value = value
    elif isinstance(value, int | float):
        # Compared as it is: an int may be too large for a float to hold at all.
        if isinstance(value, float) and not math.isfinite(value):
            _refuse(path, "must be a finite number")
        if abs(value) > NUMBER_MAX:
            _refuse(path, "must be within ±(2^53-1) as a number: give larger ones as text")
        into.number_value = value
    else:
        _refuse(path, _kind_rule(value, "must be a JSON value"))


def _kind_rule(value: object, rule: str) -> str:
    name = type(value).__name__
    return f"{rule}, and is of type {name}: {_INSTEAD.get(name, 'give what is in it, as mappings, lists and texts')}"


def _refuse(path: str, rule: str) -> NoReturn:
    raise InvalidFacts("the facts can't be sent", violations=(Violation(path, rule),), reason="INVALID_FACTS")
