"""Facts schemas, and the facts that they accept."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from decideonce_server import facts as facts_module
from decideonce_server import values
from decideonce_server.errors import InvalidFacts
from decideonce_server.facts import AcceptedFacts, FactsSchema, InvalidSchema
from decideonce_server.fingerprint import fingerprint

SECRET = "s3cret-value"


def schema(properties: dict[str, Any] | None = None, **more: Any) -> str:
    return json.dumps({"type": "object", "properties": properties or {}, **more})


def accept(schema_text: str, facts: dict[str, Any]) -> AcceptedFacts:
    return FactsSchema.compile(schema_text).accept(values.to_struct(facts))


def refused_schema(schema_text: str) -> list[tuple[str, str]]:
    with pytest.raises(InvalidSchema) as caught:
        FactsSchema.compile(schema_text)
    return [(violation.field, violation.rule) for violation in caught.value.violations]


def refused_fields(schema_text: str) -> list[str]:
    return [field for field, _ in refused_schema(schema_text)]


def refused_facts(schema_text: str, facts: dict[str, Any]) -> InvalidFacts:
    with pytest.raises(InvalidFacts) as caught:
        accept(schema_text, facts)
    return caught.value


# Schemas


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "true",
        "{",
        '{"type": "object", "type": "object"}',
        '{"type": "object", "maxProperties": NaN}',
        "[" * 9999,
    ],
)
def test_schema_must_be_json_object(text: str) -> None:
    """A text that is no JSON object, or an ambiguous one, is refused at its root."""
    assert [""] == refused_fields(text)


@pytest.mark.parametrize("text", ["{}", '{"type": ["object", "null"]}', '{"type": "array"}', '{"properties": {}}'])
def test_schema_must_describe_object(text: str) -> None:
    """Facts are an object, so their schema says so."""
    assert [("", 'must describe an object: "type": "object"')] == refused_schema(text)


def test_root_may_describe_object_through_reference() -> None:
    """What the root says through $ref and allOf counts as its own."""
    text = json.dumps({"allOf": [{"$ref": "#/$defs/root"}], "$defs": {"root": {"type": "object"}}})
    assert {} == accept(text, {}).facts


def test_all_faults_are_told_at_once() -> None:
    """One compile names every fault, each with its place in the schema."""
    text = schema(
        {
            "a": {"x-identity": "no"},
            "b": {"pattern": "(?=a)"},
            "c": {"minimum": "x"},
            "d": {"format": "dates"},
            "e": {"x-unordered": True},
            "f": {"items": {"x-identity": False}},
            "g": {"default": "\0"},
            "h": {"$ref": "https://example.com/schema"},
            "i": {"$anchor": "here"},
        }
    )
    expected = {
        "/properties/a/x-identity",
        "/properties/b/pattern",
        "/properties/c/minimum",
        "/properties/d/format",
        "/properties/e/x-unordered",
        "/properties/f/items/x-identity",
        "/properties/g/default",
        "/properties/h/$ref",
        "/properties/i/$anchor",
    }
    assert expected == set(refused_fields(text))


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "(", "(a{1000}){1000}"])
def test_pattern_without_linear_time_is_refused(pattern: str) -> None:
    """A pattern that the linear-time engine can't take is refused at publish, as value and as member name."""
    assert ["/properties/a/pattern"] == refused_fields(schema({"a": {"pattern": pattern}}))
    assert 1 == len(refused_schema(schema(patternProperties={pattern: {}})))


def test_catastrophic_pattern_is_harmless() -> None:
    """A pattern that hangs a backtracking engine is checked in linear time."""
    text = schema({"a": {"pattern": "^(a+)+$"}})
    error = refused_facts(text, {"a": "a" * 50_000 + "b"})
    assert ["facts/a"] == [violation.field for violation in error.violations]


BRANCHES = {
    "oneOf": ({"oneOf": [{"X": 1}, True]}, "/oneOf/0"),
    "anyOf": ({"anyOf": [{"X": 1}, True]}, "/anyOf/0"),
    "not": ({"not": {"X": 1}}, "/not"),
    "if": ({"if": {"X": 1}}, "/if"),
    "then": ({"if": True, "then": {"X": 1}}, "/then"),
    "else": ({"if": True, "else": {"X": 1}}, "/else"),
    "patternProperties": ({"patternProperties": {"^a": {"X": 1}}}, "/patternProperties/^a"),
    "additionalProperties": ({"additionalProperties": {"X": 1}}, "/additionalProperties"),
    "unevaluatedProperties": ({"unevaluatedProperties": {"X": 1}}, "/unevaluatedProperties"),
    "propertyNames": ({"propertyNames": {"X": 1}}, "/propertyNames"),
    "dependentSchemas": ({"dependentSchemas": {"a": {"X": 1}}}, "/dependentSchemas/a"),
    "prefixItems": ({"properties": {"l": {"prefixItems": [{"X": 1}]}}}, "/properties/l/prefixItems/0"),
    "rest": ({"properties": {"l": {"prefixItems": [True], "items": {"X": 1}}}}, "/properties/l/items"),
    "contains": ({"properties": {"l": {"contains": {"X": 1}}}}, "/properties/l/contains"),
    "unevaluatedItems": ({"properties": {"l": {"unevaluatedItems": {"X": 1}}}}, "/properties/l/unevaluatedItems"),
    "deeper": ({"oneOf": [{"properties": {"a": {"items": {"X": 1}}}}]}, "/oneOf/0/properties/a/items"),
    "reference": ({"oneOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"X": 1}}}, "/$defs/x"),
}


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("x-identity", False),
        ("x-unordered", True),
        ("default", "1"),
        ("format", "decimal"),
        ("format", "date-time"),
        ("format", "date"),
    ],
)
def test_word_below_branch_is_refused(branch: str, word: str, value: Any) -> None:
    """What may not apply can't say what is identity, wherever it stands and however it is reached."""
    rest, place = BRANCHES[branch]
    text = json.dumps({"type": "object", **rest}).replace('"X": 1', f'"{word}": {json.dumps(value)}')
    assert [f"{place}/{word}"] == refused_fields(text)


@pytest.mark.parametrize("branch", BRANCHES)
def test_branch_without_words_is_taken(branch: str) -> None:
    """Schemas may branch; what else they say there is checked as ever."""
    rest, _ = BRANCHES[branch]
    text = json.dumps({"type": "object", **rest}).replace('"X": 1', '"format": "uuid", "title": "a title"')
    FactsSchema.compile(text)


def test_words_reached_both_ways_are_refused() -> None:
    """A subschema that a property and a branch share is refused for the branch."""
    text = schema(
        {"a": {"$ref": "#/$defs/x"}},
        anyOf=[{"properties": {"b": {"$ref": "#/$defs/x"}}}],
        **{"$defs": {"x": {"default": 1}}},
    )
    expected = ("/$defs/x/default", "must not stand where the schema may not apply; /anyOf/0 leads here")
    assert [expected] == refused_schema(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"default": 1}, {"default": True}),
        ({"default": None}, {"default": 0}),
        ({"x-identity": False}, {"x-identity": True}),
        ({"type": "array", "x-unordered": True}, {"x-unordered": False}),
        ({"format": "date"}, {"format": "decimal"}),
    ],
)
def test_subschemas_that_disagree_are_refused(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Subschemas of one value that say different things about it are refused, in allOf and through $ref."""
    word = next(word for word in one if word in other)
    assert [f"/properties/a/allOf/1/{word}"] == refused_fields(schema({"a": {"allOf": [one, other]}}))
    referring = schema({"a": {"$ref": "#/$defs/other", **one}}, **{"$defs": {"other": other}})
    assert 1 == len(refused_schema(referring))


def test_subschemas_that_agree_are_taken() -> None:
    """Saying the same twice, 1.0 beside 1.0, is no disagreement."""
    text = schema({"a": {"allOf": [{"default": 1.5}, {"default": 1.5, "type": "number"}]}})
    assert {"a": 1.5} == accept(text, {}).facts


@pytest.mark.parametrize(
    ("where", "rest"),
    [
        ("/x-identity", {"x-identity": False}),
        ("/$defs/x/x-identity", {"$ref": "#/$defs/x", "$defs": {"x": {"x-identity": False}}}),
        ("/properties/l/items/x-identity", {"properties": {"l": {"items": {"x-identity": False}}}}),
    ],
)
def test_no_identity_is_said_of_properties_only(where: str, rest: dict[str, Any]) -> None:
    """The facts as a whole and the items of a list can't be left out of identity."""
    assert [where] == refused_fields(json.dumps({"type": "object", **rest}))


@pytest.mark.parametrize("types", [None, "object", ["string", "null"]])
def test_unordered_must_be_array(types: Any) -> None:
    """Only a list has an order that can mean nothing."""
    typed = {} if types is None else {"type": types}
    assert ["/properties/a/x-unordered"] == refused_fields(schema({"a": {"x-unordered": True, **typed}}))


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$ref", "https://example.com/x"),
        ("$ref", "other.json"),
        ("$ref", "#name"),
        ("$ref", "#/$defs/nowhere"),
        ("$ref", "#/properties"),
        ("$dynamicRef", "#x"),
        ("$dynamicAnchor", "x"),
        ("$anchor", "x"),
        ("$id", "https://example.com/x"),
        ("$schema", "http://json-schema.org/draft-07/schema#"),
    ],
)
def test_reference_out_of_the_text_is_refused(word: str, value: str) -> None:
    """A schema refers within its own text, by JSON pointer, so nothing is ever fetched."""
    assert [f"/properties/a/{word}"] == refused_fields(schema({"a": {word: value}}))


def test_other_dialect_is_refused() -> None:
    """A root that claims another draft would be read wrongly."""
    text = schema(**{"$schema": "http://json-schema.org/draft-07/schema#"})
    assert ["/$schema"] == refused_fields(text)
    FactsSchema.compile(schema(**{"$schema": "https://json-schema.org/draft/2020-12/schema"}))


def test_reference_may_have_escapes() -> None:
    """References are JSON pointers in URI fragments, with the escapes of both."""
    text = schema({"a": {"$ref": "#/$defs/x~1y%20z~0"}}, **{"$defs": {"x/y z~": {"default": 3}}})
    assert {"a": 3} == accept(text, {}).facts


def test_recursive_schema_works() -> None:
    """A schema that describes itself applies at every level."""
    node = {
        "type": "object",
        "properties": {
            "amount": {"format": "decimal"},
            "weight": {"default": 1},
            "parts": {"type": "array", "default": [], "x-unordered": True, "items": {"$ref": "#"}},
        },
    }
    accepted = accept(json.dumps(node), {"parts": [{"amount": "2.0"}, {"amount": "1.0", "parts": [{}]}]})
    leaf = {"parts": [], "weight": 1}
    expected = {
        "parts": [{"amount": "1", "parts": [leaf], "weight": 1}, {"amount": "2", "parts": [], "weight": 1}],
        "weight": 1,
    }
    assert expected["parts"] == sorted(accepted.identity["parts"], key=lambda part: part["amount"])
    assert [{"amount": "2.0", **leaf}, {"amount": "1.0", "parts": [leaf], "weight": 1}] == accepted.facts["parts"]


@pytest.mark.parametrize(
    "rest",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    ],
)
def test_endless_schema_is_refused(rest: dict[str, Any]) -> None:
    """A schema that applies itself to the same value again has no meaning."""
    assert (
        "must not apply itself to the same value again"
        in dict(refused_schema(json.dumps({"type": "object", **rest}))).values()
    )


def test_deep_schema_is_refused() -> None:
    """A schema that nests without end is refused, not followed."""
    nested: dict[str, Any] = {}
    for _ in range(400):
        nested = {"not": nested}
    assert "must not nest more than 100 steps" in dict(refused_schema(schema(**{"not": nested}))).values()


def test_schema_that_the_validator_refuses_is_refused() -> None:
    """What only the validator itself finds, like a lone surrogate, is a refusal and no crash."""
    assert [""] == refused_fields('{"type": "object", "const": {"a": "\\ud800"}}')


# Defaults


def test_defaults_are_filled() -> None:
    """What is absent gets its default, defaults inside defaults too; what is null or given stays."""
    text = schema(
        {
            "a": {"default": 1.0},
            "b": {"default": {}, "type": "object", "properties": {"x": {"default": "y"}}},
            "c": {"default": 5},
            "d": {"default": None},
            "e": {"type": "array", "items": {"properties": {"q": {"default": False}}}},
        }
    )
    accepted = accept(text, {"c": None, "e": [{}, {"q": True}, 3]})
    expected = {"a": 1, "b": {"x": "y"}, "c": None, "d": None, "e": [{"q": False}, {"q": True}, 3]}
    assert expected == accepted.facts
    assert expected == accepted.identity
    assert sorted(expected) == list(accepted.facts)


def test_default_satisfies_required() -> None:
    """Defaults are filled before the schema is checked."""
    assert {"a": 1} == accept(schema({"a": {"default": 1}}, required=["a"]), {}).facts


def test_defaults_are_not_shared() -> None:
    """A policy that changes its facts changes no later call's."""
    compiled = FactsSchema.compile(schema({"a": {"default": {"l": []}}}))
    first = compiled.accept(struct_pb2.Struct()).facts["a"]
    assert isinstance(first, dict)
    first["l"] = "changed"
    assert {"a": {"l": []}} == compiled.accept(struct_pb2.Struct()).facts


@pytest.mark.parametrize(
    ("default", "field"),
    [
        ("x", "/properties/a/default"),
        (-1, "/properties/a/default"),
        (2**60, "/properties/a/default"),
        (1e400, "/properties/a/default"),
    ],
)
def test_default_must_satisfy_its_schema(default: Any, field: str) -> None:
    """A default that its own schema or the values' rules refuse is refused."""
    text = schema({"a": {"type": "integer", "minimum": 0, "default": default}}).replace("Infinity", "1e400")
    assert [field] == refused_fields(text)


def test_default_must_satisfy_all_subschemas() -> None:
    """A default is held against every subschema of its value, not only the one that it stands in."""
    text = schema({"a": {"allOf": [{"default": "x"}, {"type": "string", "format": "date"}]}})
    assert ("/properties/a/allOf/0/default", 'must satisfy format: "date"') in refused_schema(text)


@pytest.mark.parametrize("branches", [1, 2])
def test_default_must_not_fill_itself(branches: int) -> None:
    """A default that holds itself, once or doubled at every level, is refused."""
    members = {f"m{i}": {"$ref": "#/properties/a"} for i in range(branches)}
    text = schema({"a": {"type": "object", "default": {}, "properties": members}})
    assert ["/properties/a/default"] == refused_fields(text)


def test_default_must_not_nest_too_deep_where_it_is_filled() -> None:
    """A default that fits the schema can still not be filled below facts that nest to the limit."""
    text = json.dumps({"type": "object", "properties": {"n": {"$ref": "#"}, "d": {"default": {"x": [1]}}}})
    facts: dict[str, Any] = {"d": 0}
    for _ in range(28):
        facts = {"n": facts, "d": 0}
    accept(text, facts)
    innermost = facts
    while "n" in innermost:
        innermost = innermost["n"]
    del innermost["d"]
    error = refused_facts(text, facts)
    assert ["facts" + "/n" * 28 + "/d"] == [violation.field for violation in error.violations]


# Facts


def test_violations_name_place_and_rule() -> None:
    """Each violation has the value's place and the schema's own rule."""
    text = schema(
        {
            "a": {"type": "string", "maxLength": 3},
            "b": {"minimum": 10},
            "c": {"enum": ["x", "y"]},
            "d": {"items": {"format": "decimal"}},
            "e": False,
        },
        required=["z"],
        additionalProperties=False,
    )
    facts = {"a": SECRET, "b": 1, "c": SECRET, "d": ["1", SECRET], "e": SECRET, "un/known": SECRET}
    expected = {
        ("facts/a", "must satisfy maxLength: 3"),
        ("facts/b", "must satisfy minimum: 10"),
        ("facts/c", 'must satisfy enum: ["x", "y"]'),
        ("facts/d/1", 'must satisfy format: "decimal"'),
        ("facts/e", "must not be given"),
        ("facts/un~1known", "must not be given; the schema does not name it"),
        ("facts", 'must satisfy required: "z"'),
    }
    assert expected == {(violation.field, violation.rule) for violation in refused_facts(text, facts).violations}


@pytest.mark.parametrize(
    "rule",
    [
        {"const": 1},
        {"enum": [1, 2]},
        {"type": "integer"},
        {"minLength": 100},
        {"maxLength": 1},
        {"pattern": "^$"},
        {"format": "uuid"},
        {"format": "date-time"},
        {"format": "decimal"},
        {"not": {"type": "string"}},
        {"anyOf": [{"const": 1}, {"maxLength": 1}]},
        {"oneOf": [True, True]},
        {"if": True, "then": {"maxLength": 1}},
        {"allOf": [{"maxLength": 1}]},
        False,
    ],
    ids=json.dumps,
)
def test_violations_quote_no_value(rule: Any) -> None:
    """No keyword's violation carries what the caller sent."""
    error = refused_facts(schema({"a": rule}), {"a": SECRET})
    assert error.violations
    assert SECRET not in str(error) + str(error.violations) + str(error.metadata)


@pytest.mark.parametrize(
    "rule",
    [
        {"uniqueItems": True},
        {"contains": {"const": 1}},
        {"unevaluatedItems": False},
        {"maxItems": 1},
        {"items": {"const": 1}},
    ],
    ids=json.dumps,
)
def test_violations_of_lists_quote_no_value(rule: Any) -> None:
    """No keyword for lists carries an item."""
    error = refused_facts(schema({"a": rule}), {"a": [SECRET, SECRET]})
    assert error.violations
    assert SECRET not in str(error.violations)


def test_name_of_member_is_judged_at_its_place() -> None:
    """A name that the schema refuses is told by its place."""
    error = refused_facts(schema(propertyNames={"maxLength": 2}), {"abc": SECRET})
    assert [("facts/abc", "its name must satisfy maxLength: 2")] == [(v.field, v.rule) for v in error.violations]


def test_violations_are_collected_up_to_a_limit() -> None:
    """Of many violations some are named and all are counted."""
    error = refused_facts(schema({"l": {"items": {"type": "string"}}}), {"l": list(range(1000))})
    assert facts_module.VIOLATIONS_MAX == len(error.violations)
    assert {"violations": "1000"} == error.metadata


def test_long_rule_is_cut() -> None:
    """A rule that quotes a long part of the schema stays short."""
    error = refused_facts(schema({"a": {"enum": ["x" * 5000]}}), {"a": 1})
    assert [200] == [len(violation.rule) for violation in error.violations]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 2.0**53])
def test_number_that_is_not_exact_is_refused(number: float) -> None:
    """Numbers that a reader could round are refused before the schema is asked."""
    struct = struct_pb2.Struct()
    struct.fields["a"].list_value.values.add().number_value = number
    with pytest.raises(InvalidFacts) as caught:
        FactsSchema.compile(schema()).accept(struct)
    assert ["facts/a/0"] == [violation.field for violation in caught.value.violations]


# A text of seven bytes is serialized as long as a number, and one of two numbers as long as two of them.
ITEMS = st.floats() | st.integers(-(2**53), 2**53) | st.sampled_from(["1234567", None, True, [1.5], -0.0, 2.0**53])


def read(item: Any) -> Any:
    """Read an item, and give its value, or where it is at fault and the rule that it breaks."""
    struct = struct_pb2.Struct()
    struct.update({"item": item})
    try:
        return values.from_struct(struct)["item"]
    except values.ValueFault as fault:
        return fault.path, fault.rule


@given(st.lists(ITEMS, max_size=6) | st.lists(st.floats(), min_size=1))
def test_list_is_read_as_its_items_are(items: list[Any]) -> None:
    """Each item of a list is read as by itself, also where all are numbers; the first at fault is named."""
    alone = [read(item) for item in items]
    faults = [(f"/item/{place}", one[1]) for place, one in enumerate(alone) if isinstance(one, tuple)]
    assert repr(faults[0] if faults else alone) == repr(read(items))


def test_policy_sees_integers_as_integers() -> None:
    """1.0 is seen as 1 and -0.0 as 0, so that rules with whole numbers match (google/cel-go#203, protobuf#7062)."""
    struct = struct_pb2.Struct()
    struct.update({"one": 1.0, "zero": -0.0, "half": 0.5})
    accepted = FactsSchema.compile(schema({"one": {"type": "integer"}})).accept(struct)
    assert {"half": "0.5", "one": "1", "zero": "0"} == {name: repr(value) for name, value in accepted.facts.items()}
    assert repr(accepted.facts) == repr(accepted.identity)


def test_policy_sees_facts_as_given() -> None:
    """Only identity is respelled; the policy sees each text, each order and what is no identity."""
    text = schema(
        {
            "amount": {"format": "decimal"},
            "note": {"x-identity": False},
            "tags": {"type": "array", "x-unordered": True},
        }
    )
    facts = {"amount": "10.00", "note": "n", "tags": ["b", "a"]}
    accepted = accept(text, facts)
    assert facts == accepted.facts
    assert {"amount": "10", "tags": ["a", "b"]} == accepted.identity


def test_given_struct_stays_as_it_is() -> None:
    """Accepting changes nothing in the request."""
    struct = values.to_struct({"l": [2, 1]})
    before = struct.SerializeToString(deterministic=True)
    FactsSchema.compile(schema({"a": {"default": 1}, "l": {"type": "array", "x-unordered": True}})).accept(struct)
    assert before == struct.SerializeToString(deterministic=True)


@pytest.mark.parametrize("value", [5, None, True, [1], {"x": 1}])
@pytest.mark.parametrize("name", ["decimal", "date-time", "date"])
def test_format_leaves_other_kinds_alone(name: str, value: Any) -> None:
    """A format says something of texts only."""
    assert {"a": value} == accept(schema({"a": {"format": name}}), {"a": value}).identity


def test_word_for_a_list_leaves_other_kinds_alone() -> None:
    """A value that may be a list or null is canonical either way."""
    text = schema({"a": {"type": ["array", "null"], "x-unordered": True}})
    assert {"a": None} == accept(text, {"a": None}).identity


# Properties

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
SCALARS = (
    st.none() | st.booleans() | TEXTS | st.integers(-(2**53 - 1), 2**53 - 1) | st.floats(-(2.0**53 - 1), 2.0**53 - 1)
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4))
OBJECTS = st.dictionaries(TEXTS, JSON, max_size=5)

OPEN = FactsSchema.compile(schema())
RICH = FactsSchema.compile(
    schema(
        {
            "amount": {"type": "string", "format": "decimal"},
            "at": {"type": "string", "format": "date-time"},
            "note": {"x-identity": False},
            "tags": {"type": "array", "x-unordered": True, "items": {"type": "string", "format": "decimal"}},
            "level": {"type": "integer", "default": 1},
            "more": {
                "type": "object",
                "default": {},
                "properties": {"x": {"default": [1]}, "y": {"x-identity": False}},
            },
        },
        additionalProperties=False,
    )
)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, places=3).map(lambda number: f"{number:f}")
EARLY, LATE = datetime(2, 1, 1, tzinfo=UTC), datetime(9998, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
MOMENTS = st.integers(0, (LATE - EARLY) // MICROSECOND).map(lambda count: EARLY + count * MICROSECOND)


def clock_text(moment: datetime) -> str:
    return moment.isoformat().removesuffix("+00:00")


RICH_FACTS = st.fixed_dictionaries(
    {},
    optional={
        "amount": DECIMALS,
        "at": MOMENTS.map(lambda moment: clock_text(moment) + "+03:30"),
        "note": JSON,
        "tags": st.lists(DECIMALS, max_size=4),
        "level": st.integers(0, 9),
        "more": st.dictionaries(st.sampled_from(["x", "y", "z"]), JSON, max_size=3),
    },
)


def digest(compiled: FactsSchema, facts: dict[str, Any]) -> bytes:
    return fingerprint("a.b", None, compiled.accept(values.to_struct(facts)).identity)


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: reordered(item) for name, item in reversed(value.items())}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def exact(value: Any) -> Any:
    """Tell values apart as identity does: 1 is 1.0, and neither is True."""
    if isinstance(value, dict):
        return {name: exact(item) for name, item in value.items()}
    if isinstance(value, list):
        return [exact(item) for item in value]
    return (isinstance(value, bool), value)


@given(OBJECTS)
def test_order_of_members_never_matters(facts: dict[str, Any]) -> None:
    """Members in another order, at every level, are the same facts (powertools-lambda-python#638)."""
    assert digest(OPEN, facts) == digest(OPEN, reordered(facts))


@given(OBJECTS, OBJECTS)
def test_identity_is_exactly_equality(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two fact sets share a fingerprint exactly where they are equal, kinds told apart."""
    assert (exact(one) == exact(other)) == (digest(OPEN, one) == digest(OPEN, other))


@given(OBJECTS, TEXTS, JSON)
def test_any_change_of_identity_is_seen(facts: dict[str, Any], name: str, value: Any) -> None:
    """A member that is set to another value changes the fingerprint, and one set to its own doesn't."""
    changed = {**facts, name: value}
    unchanged = name in facts and exact(facts[name]) == exact(value)
    assert unchanged == (digest(OPEN, facts) == digest(OPEN, changed))


@given(RICH_FACTS)
def test_accepted_facts_are_a_fixed_point(facts: dict[str, Any]) -> None:
    """Accepting what the policy saw, or the identity, gives the same identity again."""
    accepted = RICH.accept(values.to_struct(facts))
    again = RICH.accept(values.to_struct(accepted.facts))
    assert accepted == again
    assert list(accepted.facts) == list(again.facts)
    assert accepted.identity == RICH.accept(values.to_struct(accepted.identity)).identity


@given(RICH_FACTS, JSON, st.randoms(use_true_random=False))
def test_what_is_no_identity_never_matters(facts: dict[str, Any], note: Any, random: Any) -> None:
    """Another note, and the tags in another order, are the same request."""
    tags = list(facts.get("tags", []))
    random.shuffle(tags)
    other = {**facts, "note": note} | ({"tags": tags} if "tags" in facts else {})
    assert digest(RICH, facts) == digest(RICH, other)


@given(MOMENTS, st.integers(-23 * 60, 23 * 60))
def test_offset_never_matters(moment: datetime, minutes: int) -> None:
    """One moment has one identity, whatever offset it is told with."""
    sign, (hours, rest) = "-" if minutes < 0 else "+", divmod(abs(minutes), 60)
    spelled = f"{clock_text(moment + timedelta(minutes=minutes))}{sign}{hours:02}:{rest:02}"
    assert digest(RICH, {"at": clock_text(moment) + "Z"}) == digest(RICH, {"at": spelled})
