"""JSON Schema 2020-12 as the service uses it: compiled without a network, told as violations that quote no value.

Patterns run in linear time, so that none can hang the service; in return they have no lookaround and no
back-references. Formats are checked, and one that is not known is refused, since it would check nothing.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jsonschema_rs import (
    Draft202012Validator,
    RegexOptions,
    ValidationError,
    ValidationErrorKind,
    Validator,
    ValidatorMap,
    validator_map_for,
)

from decideonce_server.errors import Violation
from decideonce_server.values import json_pointer

DIALECT = "https://json-schema.org/draft/2020-12/schema"
RULE_LENGTH_MAX = 200

Formats = Mapping[str, Callable[[str], bool]]

_OPTIONS: dict[str, Any] = {
    "validate_formats": True,
    "ignore_unknown_formats": False,
    "pattern_options": RegexOptions(),
    "offline": True,
    "mask": "the value",
}

# The keywords whose errors carry the schema's own value. What the others carry may be the instance's.
_TELLING = frozenset(
    [
        "additionalItems",
        "const",
        "contentEncoding",
        "contentMediaType",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "required",
        "type",
    ]
)


def compile_schema(schema: dict[str, Any], formats: Formats | None = None) -> Draft202012Validator:
    """Compile a schema, with further formats beside those of the standard or in their place.

    Raises:
        ValueError: it is none; `schema_violations` tells why.
    """
    return Draft202012Validator(schema, formats=dict(formats or {}), **_OPTIONS)


def compile_subschemas(schema: dict[str, Any], formats: Formats | None = None) -> ValidatorMap:
    """Compile every subschema of a schema by itself; the keys are "#" and its JSON pointer.

    Raises:
        ValueError: the schema is none; `schema_violations` tells why.
    """
    return validator_map_for(schema, formats=dict(formats or {}), **_OPTIONS)


def is_format(name: str, formats: Formats | None = None) -> bool:
    """Tell whether a format is known."""
    return _compiles({"format": name}, formats)


def _is_pattern(text: str) -> bool:
    return _compiles({"pattern": text})


def _compiles(schema: dict[str, Any], formats: Formats | None = None) -> bool:
    try:
        compile_schema(schema, formats)
    except ValidationError:
        return False
    return True


_META = compile_schema({"$ref": DIALECT}, {"regex": _is_pattern})


def schema_violations(schema: Any) -> list[Violation]:
    """Tell where a schema breaks the rules of JSON Schema itself; the fields are JSON pointers into it."""
    return list(dict.fromkeys(violations(_META, schema)))


def violations(validator: Validator, instance: Any, field: str = "") -> Iterator[Violation]:
    """Tell where an instance breaks its schema.

    Each field is `field` and a JSON pointer, each rule the keyword with the schema's own value. Members' names are
    places and are named; values never are.

    Raises:
        ValueError: the instance is no JSON value.
    """
    for error in validator.iter_errors(instance):
        yield from _told(error, field)


def _told(error: ValidationError, field: str) -> Iterator[Violation]:
    place = field + json_pointer(tuple(error.instance_path))
    match error.kind:
        case ValidationErrorKind.AdditionalProperties(names) | ValidationErrorKind.UnevaluatedProperties(names):
            for name in names:
                yield Violation(place + json_pointer((name,)), "must not be given; the schema does not name it")
        case ValidationErrorKind.PropertyNames(cause):
            yield Violation(place + json_pointer((str(cause.instance),)), f"its name {_rule(cause.kind)}")
        case ValidationErrorKind.FalseSchema():
            yield Violation(place, "must not be given")
        case kind:
            yield Violation(place, _rule(kind))


def _rule(kind: ValidationErrorKind) -> str:
    if kind.name not in _TELLING:
        return f"must satisfy {kind.name}"
    value = kind.value[0] if isinstance(kind.value, list) and len(kind.value) == 1 else kind.value
    rule = f"must satisfy {kind.name}: {json.dumps(value, ensure_ascii=False, default=str)}"
    return rule if len(rule) <= RULE_LENGTH_MAX else rule[: RULE_LENGTH_MAX - 1] + "…"
