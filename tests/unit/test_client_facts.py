"""Facts are frozen exactly, or refused before they are sent, by name."""

import datetime as dt
import decimal
import enum
import fractions
import math
import uuid
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decideonce import errors, facts, results
from decideonce.requests import prepare
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server import values

OPERATION = "credit.approve-loan"
KEY = "8d7f1b9e-0c0a-4a53-9f7e-2f4f6f0a1c11"


def nested(levels: int) -> Any:
    """Nest lists, the innermost empty."""
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "path", "rule"),
    [
        (2**53, "facts.a", "2^53-1"),
        (-(2**53), "facts.a", "as text"),
        (10**400, "facts.a", "2^53-1"),
        (1e300, "facts.a", "2^53-1"),
        (math.nan, "facts.a", "finite"),
        (-math.inf, "facts.a", "finite"),
        ("\ud800", "facts.a", "surrogates"),
        ("a\0b", "facts.a", "U+0000"),
        ({"limits": [1, 2, 3, math.nan]}, "facts.a.limits[3]", "finite"),
        ({"odd name": [{"b\ud800": 1}]}, 'facts.a["odd name"][0]["b\\ud800"]', "in its name"),
        ({1: 2}, "facts.a", "type int"),
        ({None: 2}, "facts.a", "type NoneType"),
        (nested(30), "facts.a" + "[0]" * 29, "30 levels"),
        (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "facts.a", "isoformat"),
        (dt.date(2026, 1, 2), "facts.a", "isoformat"),
        (dt.time(1, 2), "facts.a", "isoformat"),
        (dt.timedelta(1), "facts.a", "total_seconds"),
        (decimal.Decimal("1.1"), "facts.a", "str(value)"),
        (fractions.Fraction(1, 3), "facts.a", "Fraction"),
        (b"x", "facts.a", "base64"),
        (bytearray(b"x"), "facts.a", "base64"),
        (uuid.UUID(int=0), "facts.a", "str(value)"),
        ({1, 2}, "facts.a", "sorted"),
        (frozenset(), "facts.a", "sorted"),
        (object(), "facts.a", "type object"),
        (1j, "facts.a", "type complex"),
        (range(3), "facts.a", "type range"),
    ],
)
def test_what_cannot_be_sent_exactly_is_named(value: Any, path: str, rule: str) -> None:
    """A value that would not arrive as it is is refused by its path, with what to give instead."""
    with pytest.raises(errors.InvalidFacts) as raised:
        prepare(OPERATION, {"a": value}, key=KEY)
    (violation,) = raised.value.violations
    assert path == violation.field
    assert rule in violation.rule
    assert ("INVALID_FACTS", None) == (raised.value.reason, raised.value.code)


def test_facts_must_be_a_mapping() -> None:
    """Anything else than an object is refused."""
    with pytest.raises(errors.InvalidFacts, match="facts must be a mapping"):
        prepare(OPERATION, [1], key=KEY)  # type: ignore[arg-type]


def test_json_values_of_any_type_are_taken() -> None:
    """Mappings, tuples and subclasses of JSON's types are sent as what they are."""
    given_facts = MappingProxyType(
        {
            "none": None,
            "flag": True,
            "most": 2**53 - 1,
            "share": 0.1,
            "text": "東京 \U0001f600",
            "colour": Colour.RED,
            "list": (1, [2.5]),
            "object": OrderedDict(b={}, a=[]),
            "deep": nested(29),
        }
    )
    request = wire.DecideRequest.FromString(prepare(OPERATION, given_facts, key=KEY).body)
    expected = dict(given_facts) | {"colour": "red", "list": [1, [2.5]], "object": {"b": {}, "a": []}}
    assert expected == results.plain(request.facts)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats()
    | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3))
def test_client_and_service_take_the_same(given_facts: dict[str, Any]) -> None:
    """What the client freezes the service reads as it was, and what one refuses the other does."""
    try:
        struct = facts.freeze(given_facts)
    except errors.InvalidFacts:
        with pytest.raises(values.ValueFault):
            values.to_struct(given_facts)
        return
    assert values.from_struct(values.to_struct(given_facts)) == values.from_struct(struct)
    assert results.plain(struct) == values.from_struct(struct)


def test_mutation_does_not_reach_what_was_frozen() -> None:
    """Facts that change after they were frozen leave the request as it is."""
    given_facts = {"limits": [1, 2]}
    request = prepare(OPERATION, given_facts, key=KEY)
    before = request.body
    given_facts["limits"].append(3)
    given_facts["more"] = 1
    assert before == request.body == prepare(OPERATION, {"limits": [1, 2]}, key=KEY).body


def test_the_same_facts_are_the_same_bytes() -> None:
    """The order of an object's members doesn't reach the bytes."""
    assert prepare(OPERATION, {"a": 1, "b": 2}, key=KEY) == prepare(OPERATION, {"b": 2, "a": 1}, key=KEY)


def test_a_key_is_made_where_none_is_given() -> None:
    """Without a key, each request has a UUIDv4 of its own (RFC 9562)."""
    one, other = prepare(OPERATION, {}), prepare(OPERATION, {})
    assert one.operation_key != other.operation_key
    assert 4 == uuid.UUID(one.operation_key).version
    assert one.operation_key == wire.DecideRequest.FromString(one.body).operation_key


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"key": "short"}, "key"),
        ({"key": "sixteen chars: ü"}, "key"),
        ({"key": 16 * 1}, "key"),
        ({"operation": ""}, "operation"),
        ({"operation": "a\ud800"}, "operation"),
        ({"policy_version": 0}, "policy_version"),
        ({"policy_version": 2**32}, "policy_version"),
        ({"policy_version": True}, "policy_version"),
        ({"policy_version": 1.0}, "policy_version"),
        ({"max_wait": -1}, "max_wait"),
        ({"max_wait": math.nan}, "max_wait"),
        ({"max_wait": math.inf}, "max_wait"),
        ({"max_wait": dt.timedelta(days=400)}, "max_wait"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], field: str) -> None:
    """An argument that can't be sent is refused by its name, as a ValueError too."""
    arguments = {"operation": OPERATION, "facts": {}} | arguments
    with pytest.raises(ValueError, match="must") as raised:
        prepare(**arguments)
    assert isinstance(raised.value, errors.InvalidRequest)
    assert [field] == [violation.field for violation in raised.value.violations]


def test_waits_are_seconds_or_timedeltas() -> None:
    """Half a second is half a second however it is given."""
    texts = {prepare(OPERATION, {}, key=KEY, max_wait=wait).body for wait in (0.5, dt.timedelta(milliseconds=500))}
    assert 1 == len(texts)
    assert 500 == wire.DecideRequest.FromString(texts.pop()).max_wait.ToMilliseconds()
