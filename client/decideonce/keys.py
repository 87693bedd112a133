"""Operation keys: the caller's names for logical runs of an operation."""

import re
import uuid

OPERATION_KEY_PATTERN = "[A-Za-z0-9._~:-]{16,128}"
OPERATION_KEY_RULE = "must be 16 to 128 characters of [A-Za-z0-9._~:-]"

_GRAMMAR = re.compile(OPERATION_KEY_PATTERN, re.ASCII)


def new_operation_key() -> str:
    """Make a key for a new logical run: a UUIDv4 (RFC 9562). Make it before the first send, and keep it for resends."""
    return str(uuid.uuid4())


def is_operation_key(text: str) -> bool:
    """Tell whether a text satisfies the key grammar."""
    return _GRAMMAR.fullmatch(text) is not None
