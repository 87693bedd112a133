"""The one serialization of a JSON value: that of google.protobuf.Value and Struct, their members in order.

Written here and not by protobuf, whose deterministic mode is deterministic within one build only: its runtimes sort the
members of maps differently ("amount" and "amount_minor" among them), and any release may change that. Members stand in
the order of their names' UTF-8 bytes. Values are taken to satisfy the rules of `values`.
"""

from struct import Struct

from decideonce_server.values import NUMBER_ITEM_TAGS, Json

_DOUBLE = Struct("<d")
_CONSTANTS = {None: b"\x08\x00", False: b"\x20\x00", True: b"\x20\x01"}
_NUMBER = b"\x11"
_NUMBERS = (int, float)
_TEXT, _OBJECT, _LIST = 3, 5, 6
_SEVEN_BITS = 0x7F
# Most lengths are short.
_SHORT = [bytes((number,)) for number in range(_SEVEN_BITS + 1)]


def varint(number: int) -> bytes:
    """Encode a number, zero or more, as a base 128 varint."""
    if number <= _SEVEN_BITS:
        return _SHORT[number]
    encoded = bytearray()
    while number > _SEVEN_BITS:
        encoded.append(number & _SEVEN_BITS | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def sized(number: int, content: bytes) -> bytes:
    """Encode a field, its number 1 to 15, that holds a text, bytes or a message."""
    return _SHORT[number << 3 | 2] + varint(len(content)) + content


def object_bytes(members: dict[str, Json]) -> bytes:
    """Serialize an object as a Struct."""
    ordered = sorted((name.encode(), name) for name in members)
    return b"".join([sized(1, sized(1, encoded) + sized(2, value_bytes(members[name]))) for encoded, name in ordered])


def value_bytes(value: Json) -> bytes:
    """Serialize a value as a Value."""
    if value is None or isinstance(value, bool):
        return _CONSTANTS[value]
    if isinstance(value, int | float):
        return _NUMBER + _DOUBLE.pack(value)
    if isinstance(value, str):
        return sized(_TEXT, value.encode())
    if isinstance(value, dict):
        return sized(_OBJECT, object_bytes(value))
    items = [
        # Of numbers lists can have many.
        NUMBER_ITEM_TAGS + _DOUBLE.pack(item) if type(item) in _NUMBERS else sized(1, value_bytes(item))
        for item in value
    ]
    return sized(_LIST, b"".join(items))
