"""JSON values as google.protobuf.Struct holds them, and the rules that keep every one of them exact.

A number is finite and no further from zero than 2^53-1, so that no reader rounds it (RFC 7493, section 2.2); -0.0 is
0.0 and 1.0 is 1. A text has no U+0000, which Postgres and C strings cannot hold. Values nest 30 levels at most: 33 is
where protobuf's own parsers give up.
"""

import math
from typing import TypeAlias

from google.protobuf import struct_pb2

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

NUMBER_MAX = 2**53 - 1
DEPTH_MAX = 30

FINITE_RULE = "must be a finite number"
RANGE_RULE = "must be within ±(2^53-1) as a number; give larger ones as text"
TEXT_RULE = "must not contain U+0000"
UNICODE_RULE = "must be valid Unicode without lone surrogates"
DEPTH_RULE = f"must not nest more than {DEPTH_MAX} levels"
KIND_RULE = "must be a JSON value"


class ValueFault(Exception):
    """A value that breaks a rule: `path` is a JSON pointer (RFC 6901) to it, `rule` what it must satisfy."""

    def __init__(self, parts: tuple[str | int, ...], rule: str) -> None:
        super().__init__(rule)
        self.parts = parts
        self.rule = rule

    @property
    def path(self) -> str:
        """Where the value stands."""
        return json_pointer(self.parts)

    def below(self, part: str | int) -> "ValueFault":
        """Give the same fault as seen from a level above."""
        return ValueFault((part, *self.parts), self.rule)


def json_pointer(path: tuple[str | int, ...]) -> str:
    """Write a path as a JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def from_struct(struct: struct_pb2.Struct) -> dict[str, Json]:
    """Read a Struct as a JSON object.

    Raises:
        ValueFault: a value breaks one of the rules above, or has no kind.
    """
    return _from_members(struct, 1)


def _from_members(struct: struct_pb2.Struct, depth: int) -> dict[str, Json]:
    members: dict[str, Json] = {}
    for key, value in sorted(struct.fields.items()):
        try:
            members[_checked_text(key, ())] = _from_value(value, depth)
        except ValueFault as fault:
            raise fault.below(key) from None
    return members


def _from_value(value: struct_pb2.Value, depth: int) -> Json:
    # Where a value stands is told by the levels above, and only of one that is at fault: most are not.
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        return _checked_text(value.string_value, ())
    if kind == "number_value":
        return checked_number(value.number_value, ())
    if kind == "bool_value":
        return value.bool_value
    if kind == "null_value":
        return None
    if kind is None:
        raise ValueFault((), KIND_RULE)
    if depth >= DEPTH_MAX:
        raise ValueFault((), DEPTH_RULE)
    if kind == "struct_value":
        return _from_members(value.struct_value, depth + 1)
    items: list[Json] = []
    try:
        items.extend(_from_value(item, depth + 1) for item in value.list_value.values)
    except ValueFault as fault:
        raise fault.below(len(items)) from None
    return items


def to_struct(value: dict[str, Json]) -> struct_pb2.Struct:
    """Write a JSON object as a Struct.

    Raises:
        ValueFault: a value breaks one of the rules above, or is none of JSON's kinds.
    """
    struct = struct_pb2.Struct()
    _fill_struct(struct, value, (), 1)
    return struct


def _fill_struct(struct: struct_pb2.Struct, value: dict[str, Json], path: tuple[str | int, ...], depth: int) -> None:
    for key, item in value.items():
        if not isinstance(key, str):
            raise ValueFault(path, KIND_RULE)
        _fill_value(struct.fields[_checked_text(key, (*path, key))], item, (*path, key), depth)


def _fill_value(into: struct_pb2.Value, value: Json, path: tuple[str | int, ...], depth: int) -> None:
    if isinstance(value, str):
        into.string_value = _checked_text(value, path)
    elif isinstance(value, bool):
        into.bool_value = value
    elif isinstance(value, int | float):
        into.number_value = checked_number(value, path)
    elif value is None:
        into.null_value = struct_pb2.NULL_VALUE
    elif not isinstance(value, dict | list):
        raise ValueFault(path, KIND_RULE)
    elif depth >= DEPTH_MAX:
        raise ValueFault(path, DEPTH_RULE)
    elif isinstance(value, list):
        into.list_value.SetInParent()
        for i, item in enumerate(value):
            _fill_value(into.list_value.values.add(), item, (*path, i), depth + 1)
    else:
        into.struct_value.SetInParent()
        _fill_struct(into.struct_value, value, path, depth + 1)


def checked_number(number: float, path: tuple[str | int, ...]) -> int | float:
    """Give the number in its one form: an int where it has no fraction, else a float; never -0.0.

    Raises:
        ValueFault: it is not finite, or further from zero than 2^53-1.
    """
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueFault(path, FINITE_RULE)
    if abs(number) > NUMBER_MAX:
        raise ValueFault(path, RANGE_RULE)
    return int(number) if isinstance(number, int) or number.is_integer() else number


def _checked_text(text: str, path: tuple[str | int, ...]) -> str:
    if "\0" in text:
        raise ValueFault(path, TEXT_RULE)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueFault(path, UNICODE_RULE) from None
    return text
