"""The facts of one operation version: its JSON Schema, and the canonical form that the schema is the source of.

Facts are accepted in four steps: the values' own rules, the schema's defaults filled, the schema itself, and then what
is business identity in them (which the fingerprint is made of): members with "x-identity": false left out, lists with
"x-unordered": true as multisets, each decimal, date-time and date in its one spelling.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

from google.protobuf import struct_pb2
from jsonschema_rs import Draft202012Validator

from decideonce_server import json_schema, spelling, values
from decideonce_server.canonical import value_bytes
from decideonce_server.errors import InvalidFacts, Violation
from decideonce_server.facts_shape import ABSENT, Document, Shape, Shapes
from decideonce_server.values import Json

VIOLATIONS_MAX = 100  # collected; more are counted only
DEFAULT_LENGTH_MAX = 64 * 1024  # as JSON text; small defaults inside defaults can grow without end

Path = tuple[str | int, ...]


class InvalidSchema(Exception):
    """A text that is no facts schema; `violations` are all its faults, their fields JSON pointers into it."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("the facts schema is refused")
        self.violations = tuple(violations)


@dataclass(frozen=True, slots=True)
class AcceptedFacts:
    """Facts that satisfy their schema.

    `facts` is what the policy sees: as given, the defaults filled, the members of each object in the order of their
    names. `identity` is what the fingerprint is made of; it shares parts with `facts`, so neither may be changed while
    the other is used.
    """

    facts: dict[str, Json]
    identity: dict[str, Json]


class FactsSchema:
    """A compiled facts schema; made by `compile`."""

    def __init__(self, validator: Draft202012Validator, root: Shape) -> None:
        self._validator = validator
        self._root = root

    @classmethod
    def compile(cls, schema_text: str) -> "FactsSchema":
        """Compile the JSON Schema (2020-12) of an operation's facts. Reads nothing but the text.

        Raises:
            InvalidSchema: it is none, or uses something that can't be honoured; names all faults.
        """
        schema = _parsed(schema_text)
        document = Document(schema)
        shapes = Shapes(document)
        try:
            found = [*json_schema.schema_violations(schema), *document.violations, *shapes.violations]
            _refuse_if(found)
            validator = json_schema.compile_schema(schema, spelling.CHECKS)
        except (ValueError, RecursionError):
            raise InvalidSchema([Violation("", "must be a schema that the validator can compile")]) from None
        _refuse_if(_complete_defaults(shapes.all))
        _refuse_if(_default_violations(schema, shapes.all))
        return cls(validator, shapes.root)

    def accept(self, facts: struct_pb2.Struct) -> AcceptedFacts:
        """Check facts and give them their canonical form. The Struct is not changed.

        Raises:
            InvalidFacts: they break a rule of `values` or of the schema; its violations quote no value.
        """
        try:
            given = values.from_struct(facts)
            _fill(given, self._root, ())
        except values.ValueFault as fault:
            raise InvalidFacts([Violation("facts" + fault.path, fault.rule)]) from None
        if not self._validator.is_valid(given):
            self._refuse(given)
        return AcceptedFacts(given, _object_identity(given, self._root))

    def _refuse(self, given: dict[str, Json]) -> NoReturn:
        found = json_schema.violations(self._validator, given, "facts")
        collected = list(islice(found, VIOLATIONS_MAX))
        raise InvalidFacts(collected, total=len(collected) + sum(1 for _ in found))


def _fill(value: Json, shape: Shape, path: Path) -> None:
    """Fill the defaults inside a value that stands at a path.

    Raises:
        ValueFault: what was filled nests too deep there.
    """
    if isinstance(value, dict):
        missing = [name for name, child in shape.filled.items() if name not in value and child.default is not ABSENT]
        for name, child in shape.filled.items():
            if name in value:
                _fill(value[name], child, (*path, name))
        for name in missing:
            value[name] = _copied_default(shape.filled[name], (*path, name))
        if missing:
            # Whoever reads the stored facts gets them in this order, and a policy must see one order always.
            ordered = sorted(value.items())
            value.clear()
            value.update(ordered)
    elif isinstance(value, list) and shape.filled_items is not None:
        for i, item in enumerate(value):
            _fill(item, shape.filled_items, (*path, i))


def _copied_default(shape: Shape, path: Path) -> Json:
    if len(path) + _height(shape.default) > values.DEPTH_MAX:
        raise values.ValueFault(path, values.DEPTH_RULE)
    default: Json = copy.deepcopy(shape.default)
    return default


def _height(value: Json) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_height, value.values()), default=0)
    return 1 + max(map(_height, value), default=0) if isinstance(value, list) else 0


def _identity(value: Json, shape: Shape) -> Json:
    if isinstance(value, str):
        return value if shape.spell is None else shape.spell(value)
    if isinstance(value, dict):
        return _object_identity(value, shape)
    if isinstance(value, list):
        inner = shape.respelled_items
        items = value if inner is None else [_identity(item, inner) for item in value]
        return sorted(items, key=value_bytes) if shape.is_unordered else items
    return value


def _object_identity(value: dict[str, Json], shape: Shape) -> dict[str, Json]:
    if not shape.respelled:
        return value
    canonical = dict(value)
    for name, child in shape.respelled.items():
        if name in canonical:
            if child.is_identity:
                canonical[name] = _identity(canonical[name], child)
            else:
                del canonical[name]
    return canonical


def _refuse_if(found: list[Violation]) -> None:
    if found:
        raise InvalidSchema(list(dict.fromkeys(found)))


def _parsed(schema_text: str) -> dict[str, Any]:
    rule = "must be a JSON object without repeated names, NaN or Infinity"
    try:
        schema = json.loads(schema_text, object_pairs_hook=_unrepeated, parse_constant=_refused_constant)
    except (ValueError, RecursionError):
        raise InvalidSchema([Violation("", rule)]) from None
    if not isinstance(schema, dict):
        raise InvalidSchema([Violation("", rule)])
    return schema


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name is repeated")
    return members


def _refused_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _complete_defaults(shapes: list[Shape]) -> list[Violation]:
    """Fill the defaults inside each default, until nothing is missing in any of them."""
    pending = [shape for shape in shapes if isinstance(shape.default, dict | list)]
    while pending:
        changed = []
        for shape in pending:
            before = _json_text(shape.default)
            default = copy.deepcopy(shape.default)
            try:
                _fill(default, shape, ())
                after = _json_text(default)
            except values.ValueFault:
                return [_default_violation(shape, "must not nest too deep once the defaults inside it are filled")]
            if len(after) > DEFAULT_LENGTH_MAX:
                return [_default_violation(shape, "must not exceed 64 KiB once the defaults inside it are filled")]
            shape.default = default
            if after != before:
                changed.append(shape)
        pending = changed
    return []


def _default_violations(schema: dict[str, Any], shapes: list[Shape]) -> list[Violation]:
    with_default = [shape for shape in shapes if shape.default is not ABSENT]
    if not with_default:
        return []
    validators = json_schema.compile_subschemas(schema, spelling.CHECKS)
    return [
        violation
        for shape in with_default
        for path in sorted(shape.sources)
        if (validator := validators.get("#" + values.json_pointer(path))) is not None
        for violation in json_schema.violations(validator, shape.default, _default_pointer(shape))
    ]


def _default_pointer(shape: Shape) -> str:
    return values.json_pointer((*shape.told["default"], "default"))


def _default_violation(shape: Shape, rule: str) -> Violation:
    return Violation(_default_pointer(shape), rule)


def _json_text(value: Json) -> str:
    return json.dumps(value, sort_keys=True)
