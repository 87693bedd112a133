"""What a facts schema says about identity and defaults, gathered place by place.

`default`, `x-identity`, `x-unordered` and the formats of `spelling` mean something only where the schema is certain to
apply: along `properties`, `items`, `$ref` and `allOf`. Several subschemas can describe one place there, so each place
gets one Shape out of all of them. Anywhere else, whether such a word holds would depend on the facts, so it is refused.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from decideonce_server import json_schema, spelling, values
from decideonce_server.errors import Violation
from decideonce_server.values import Json, json_pointer

Path: TypeAlias = tuple[str, ...]

NESTING_MAX = 100  # of subschemas' paths; far above any real schema, below what recursion can take
SHAPES_MAX = 10_000  # subschemas that meet in ever new combinations could make exponentially many

ABSENT: Final = object()  # None is a default like any other

_ONE = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "items",
        "contains",
        "additionalProperties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contentSchema",
    ]
)
_MANY = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])
_NAMED = frozenset(["properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"])
_STORED = frozenset(["$defs", "definitions"])
_HONOURED = frozenset(["properties", "items", "$ref", "allOf"])
_SAME_PLACE = frozenset(["$ref", "allOf"])
_IN_PLACE = _SAME_PLACE | frozenset(["anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"])
_UNSUPPORTED = ("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef")
_FLAGS = ("x-identity", "x-unordered")


class Document:
    """A schema as a graph: its subschemas by their paths, and which keywords lead from each to which others."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.subschemas: dict[Path, Any] = {}
        self.edges: defaultdict[Path, list[tuple[str, Path]]] = defaultdict(list)
        self.violations: list[Violation] = []
        self._index(schema, ())
        for path, subschema in self.objects():
            self._check_words(path, subschema)
            self._add_reference(path, subschema)
        self._check_cycles()
        self._check_branches()

    def objects(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Go through the subschemas that are objects."""
        return ((path, schema) for path, schema in self.subschemas.items() if isinstance(schema, dict))

    def reach(self, starts: Iterable[Path], follow: Callable[[str], bool]) -> frozenset[Path]:
        """Find what the keywords that `follow` takes lead to, the starts among it."""
        found = set(starts)
        pending = list(found)
        while pending:
            for keyword, target in self.edges[pending.pop()]:
                if follow(keyword) and target not in found:
                    found.add(target)
                    pending.append(target)
        return frozenset(found)

    def _fault(self, path: Path, rule: str) -> None:
        self.violations.append(Violation(json_pointer(path), rule))

    def _index(self, schema: Any, path: Path) -> None:
        if len(path) > NESTING_MAX:
            self._fault(path, f"must not nest more than {NESTING_MAX} steps")
            return
        self.subschemas[path] = schema
        if isinstance(schema, dict):
            for keyword, step, subschema in _places(schema):
                self.edges[path].append((keyword, path + step))
                self._index(subschema, path + step)

    def _check_words(self, path: Path, schema: dict[str, Any]) -> None:
        for word in _UNSUPPORTED:
            if word in schema:
                self._fault((*path, word), "is not supported; refer with $ref and a JSON pointer")
        if path and "$id" in schema:
            self._fault((*path, "$id"), "must stand at the root only")
        if schema.get("$schema", json_schema.DIALECT) != json_schema.DIALECT:
            self._fault((*path, "$schema"), f"must be {json_schema.DIALECT}")
        for word in _FLAGS:
            if not isinstance(schema.get(word, True), bool):
                self._fault((*path, word), "must be true or false")
        name = schema.get("format")
        if isinstance(name, str) and not json_schema.is_format(name, spelling.CHECKS):
            self._fault((*path, "format"), "must be a format of JSON Schema 2020-12, or decimal")

    def _add_reference(self, path: Path, schema: dict[str, Any]) -> None:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return
        if reference != "#" and not reference.startswith("#/"):
            self._fault((*path, "$ref"), "must be a JSON pointer within this schema, like #/$defs/money")
            return
        steps = unquote(reference).split("/")[1:]
        target = tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)
        if target in self.subschemas:
            self.edges[path].append(("$ref", target))
        else:
            self._fault((*path, "$ref"), "must point to a subschema of this schema")

    def _check_cycles(self) -> None:
        graph = {
            path: [target for keyword, target in self.edges[path] if keyword in _IN_PLACE] for path in self.subschemas
        }
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle: list[Path] = error.args[1]
            self._fault(min(cycle), "must not apply itself to the same value again")

    def _check_branches(self) -> None:
        certain = self.reach([()], _HONOURED.__contains__)
        seen: set[Path] = set()
        for path in sorted(certain):
            for keyword, target in self.edges[path]:
                if keyword in _HONOURED or keyword in _STORED:
                    continue
                for branched in sorted(self.reach([target], lambda keyword: keyword not in _STORED) - seen):
                    seen.add(branched)
                    self._check_branched(branched, target)

    def _check_branched(self, path: Path, origin: Path) -> None:
        schema = self.subschemas.get(path)
        if not isinstance(schema, dict):
            return
        for word in ("default", *_FLAGS, "format"):
            if word in schema and (word != "format" or _is_spelled(schema)):
                rule = f"must not stand where the schema may not apply; {json_pointer(origin)} leads here"
                self._fault((*path, word), rule)


def _places(schema: dict[str, Any]) -> Iterator[tuple[str, Path, Any]]:
    for keyword, value in schema.items():
        if keyword in _ONE:
            # Beside prefixItems, items describes only the rest of the list.
            label = "prefixItems" if keyword == "items" and "prefixItems" in schema else keyword
            parts: list[tuple[Path, Any]] = [((keyword,), value)]
        elif keyword in _MANY and isinstance(value, list):
            label, parts = keyword, [((keyword, str(i)), part) for i, part in enumerate(value)]
        elif keyword in _NAMED and isinstance(value, dict):
            label, parts = keyword, [((keyword, name), part) for name, part in value.items()]
        else:
            continue
        yield from ((label, step, part) for step, part in parts if isinstance(part, dict | bool))


def _is_spelled(schema: dict[str, Any]) -> bool:
    name = schema.get("format")
    return isinstance(name, str) and name in spelling.FORMATS


@dataclass(eq=False, slots=True)
class Shape:
    """What holds at one place of the facts.

    `sources` are the subschemas that describe it, and `told` says which of them a word comes from. The members and
    items in `filled` are those where a default may be missing, those in `respelled` where identity can differ.
    """

    sources: frozenset[Path]
    told: dict[str, Path] = field(default_factory=dict)
    default: Any = ABSENT
    is_identity: bool = True
    is_unordered: bool = False
    spell: Callable[[str], str] | None = None
    types: frozenset[str] | None = None
    members: dict[str, "Shape"] = field(default_factory=dict)
    items: "Shape | None" = None
    filled: dict[str, "Shape"] = field(default_factory=dict)
    filled_items: "Shape | None" = None
    respelled: dict[str, "Shape"] = field(default_factory=dict)
    respelled_items: "Shape | None" = None


class Shapes:
    """The shapes of a document; `root` is that of the facts themselves."""

    def __init__(self, document: Document) -> None:
        self.violations: list[Violation] = []
        self._document = document
        self._known: dict[frozenset[Path], Shape] = {}
        self._pending: list[Shape] = []
        self.root = self._shape([()])
        while self._pending:
            self._describe(self._pending.pop())
        if self.root.types != frozenset(["object"]):
            self._fault((), 'must describe an object: "type": "object"')
        self._check_identity(self.root)
        _settle(self.all)

    @property
    def all(self) -> list[Shape]:
        """Every shape, once."""
        return list(self._known.values())

    def _fault(self, path: Path, rule: str) -> None:
        self.violations.append(Violation(json_pointer(path), rule))

    def _shape(self, starts: Iterable[Path]) -> Shape:
        sources = self._document.reach(starts, _SAME_PLACE.__contains__)
        shape = self._known.get(sources)
        if shape is None:
            shape = Shape(sources)
            if len(self._known) == SHAPES_MAX:
                self._fault((), f"must not combine its subschemas in more than {SHAPES_MAX} ways")
            elif len(self._known) < SHAPES_MAX:
                self._known[sources] = shape
                self._pending.append(shape)
        return shape

    def _describe(self, shape: Shape) -> None:
        default = self._word(shape, "default")
        shape.default = ABSENT if default is ABSENT else self._checked_default(shape, default)
        shape.is_identity = self._word(shape, "x-identity") is not False
        shape.is_unordered = self._word(shape, "x-unordered") is True
        name = self._word(shape, "format")
        shape.spell = None if name is ABSENT else spelling.FORMATS[name]
        shape.types = self._types(shape)
        if shape.is_unordered and "array" not in (shape.types or ()):
            self._fault((*shape.told["x-unordered"], "x-unordered"), "must stand in a schema of type array")
        self._describe_children(shape)

    def _describe_children(self, shape: Shape) -> None:
        members: defaultdict[str, list[Path]] = defaultdict(list)
        items: list[Path] = []
        for path in sorted(shape.sources):
            for keyword, target in self._document.edges[path]:
                if keyword == "properties":
                    members[target[-1]].append(target)
                elif keyword == "items":
                    items.append(target)
        shape.members = {name: self._shape(paths) for name, paths in members.items()}
        if items:
            shape.items = self._shape(items)
            self._check_identity(shape.items)

    def _word(self, shape: Shape, word: str) -> Any:
        """Find what the sources of a shape say with one word, which must be the same in all of them."""
        found: Any = ABSENT
        for path in sorted(shape.sources):
            schema = self._document.subschemas[path]
            if not isinstance(schema, dict) or word not in schema or (word == "format" and not _is_spelled(schema)):
                continue
            if found is ABSENT:
                found = schema[word]
                shape.told[word] = path
            elif _text(found) != _text(schema[word]):
                other = json_pointer((*shape.told[word], word))
                self._fault((*path, word), f"must be the same as at {other}, which describes the same value")
        return found

    def _checked_default(self, shape: Shape, default: Any) -> Json:
        try:
            return values.from_struct(values.to_struct({"default": default}))["default"]
        except values.ValueFault as fault:
            self.violations.append(Violation(json_pointer(shape.told["default"]) + fault.path, fault.rule))
            return None

    def _types(self, shape: Shape) -> frozenset[str] | None:
        types: frozenset[str] | None = None
        for path in shape.sources:
            schema = self._document.subschemas[path]
            stated = schema.get("type") if isinstance(schema, dict) else None
            if isinstance(stated, str | list):
                names = frozenset([stated] if isinstance(stated, str) else map(str, stated))
                types = names if types is None else types & names
        return types

    def _check_identity(self, shape: Shape) -> None:
        """Tell where something that is no member of an object is said to be no identity."""
        if self._word(shape, "x-identity") is False:
            self._fault((*shape.told["x-identity"], "x-identity"), "false must stand on a property")


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _settle(shapes: list[Shape]) -> None:
    filling = _reaching(shapes, lambda shape: any(child.default is not ABSENT for child in shape.members.values()))
    respelling = _reaching(
        shapes,
        lambda shape: (
            shape.spell is not None
            or shape.is_unordered
            or not all(child.is_identity for child in shape.members.values())
        ),
    )
    for shape in shapes:
        members = shape.members.items()
        shape.filled = {name: child for name, child in members if child in filling or child.default is not ABSENT}
        shape.respelled = {name: child for name, child in members if child in respelling or not child.is_identity}
        shape.filled_items = shape.items if shape.items in filling else None
        shape.respelled_items = shape.items if shape.items in respelling else None


def _reaching(shapes: list[Shape], wanted: Callable[[Shape], bool]) -> set[Shape]:
    """Find the shapes that are wanted, or have one inside."""
    found = {shape for shape in shapes if wanted(shape)}
    while more := {shape for shape in shapes if shape not in found and not found.isdisjoint(_children(shape))}:
        found |= more
    return found


def _children(shape: Shape) -> Iterable[Shape]:
    return shape.members.values() if shape.items is None else (*shape.members.values(), shape.items)
