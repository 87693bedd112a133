"""Reads the catalog that a team keeps in a directory.

    operations/<operation>.yaml             an operation's contract, the JSON Schema of its facts inline
    policies/<policy_id>.json               a JDM document
    policies/<policy_id>.yaml               a python policy: its engine and entry point
    policies/<policy_id>.examples.yaml      facts, and what the policy must make of them

Files are YAML 1.2 in its core schema, so `no` and `2026-01-01` are texts, without anchors. Only the files' form and the
contracts' bounds are checked here; what stands in policies, schemas and examples is checked when they are published.
"""

import json
import math
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from jsonschema_rs import Validator
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, Event
from ruamel.yaml.resolver import VersionedResolver

from decideonce_server import json_schema, spelling, values
from decideonce_server.catalog import (
    NAME_RULE,
    CatalogSource,
    Execution,
    OperationContract,
    PolicyExample,
    PolicySource,
    contract_violations,
    operation_contract,
)
from decideonce_server.errors import InvalidCatalog, Violation
from decideonce_server.policy import NAME_PATTERN, is_name
from decideonce_server.values import Json

_DURATION = re.compile(r"(0|[1-9][0-9]{0,8})(ms|s|m|h|d)")  # nine digits: no duration overflows
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_FOREVER = "forever"
_MODULE = r"[A-Za-z_][A-Za-z0-9_]*"

_DURATION_SHAPE = {"type": "string", "pattern": f"^{_DURATION.pattern}$"}
_LIFETIME_SHAPE = {"type": "string", "pattern": f"^(?:{_DURATION.pattern}|{_FOREVER})$"}

_OPERATION = json_schema.compile_schema(
    {
        "type": "object",
        "required": ["operation", "facts"],
        "properties": {
            "operation": {"type": "string"},
            "policy": {"type": "string", "pattern": f"^{NAME_PATTERN}(?:@[1-9][0-9]{{0,9}})?$"},
            "execution": {"enum": [execution.value for execution in Execution]},
            "default_wait": _DURATION_SHAPE,
            "max_wait": _DURATION_SHAPE,
            "lease": _DURATION_SHAPE,
            "time_budget": _DURATION_SHAPE,
            "max_attempts": {"type": "integer"},
            "retention": _LIFETIME_SHAPE,
            "tombstone_retention": _LIFETIME_SHAPE,
            "topic": {"type": "string", "minLength": 1},
            "facts": {"type": "object"},
        },
        "additionalProperties": False,
    }
)
_DURATIONS = ("default_wait", "max_wait", "lease", "time_budget", "retention", "tombstone_retention")

_PYTHON_POLICY = json_schema.compile_schema(
    {
        "type": "object",
        "required": ["engine", "entry_point"],
        "properties": {
            "engine": {"const": "python"},
            "entry_point": {"type": "string", "pattern": rf"^{_MODULE}(?:\.{_MODULE})*:{_MODULE}$"},
        },
        "additionalProperties": False,
    }
)

_EXAMPLES = json_schema.compile_schema(
    {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name", "facts", "outcome"],
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "facts": {"type": "object"},
                "outcome": {"type": "string", "minLength": 1},
                "reasons": {"type": "array", "items": {"type": "string"}},
                "outputs": {"type": "object"},
                "time": {"type": "string", "format": "date-time"},
            },
            "additionalProperties": False,
        },
    },
    spelling.CHECKS,
)


def parse_duration(text: str) -> timedelta | None:
    """Read a duration as authors write it (250ms, 2s, 5m, 24h, 30d), exactly; None where it is none."""
    match = _DURATION.fullmatch(text)
    return timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else None


def read_catalog(directory: Path) -> CatalogSource:
    """Read a directory as a catalog.

    Raises:
        InvalidCatalog: its form is wrong, or a setting out of bounds; names all violations. Their fields are the
            file's path within the directory, with "#" and a JSON pointer or ":", line and column (from 1) in it.
    """
    reader = _Reader(directory)
    policies = tuple(reader.policies())
    operations = tuple(reader.operations())
    reader.check_references(operations)
    if reader.violations:
        raise InvalidCatalog(reader.violations)
    return CatalogSource(policies, operations)


class _Reader:
    """Reads one directory and collects what is wrong in it."""

    def __init__(self, directory: Path) -> None:
        self.violations: list[Violation] = []
        self._directory = directory
        self._policy_ids: set[str] = set()

    def operations(self) -> Iterator[OperationContract]:
        for path in self._files("operations", (".yaml",)):
            contract = self._operation(path)
            if contract is not None:
                yield contract

    def policies(self) -> Iterator[PolicySource]:
        paths = self._files("policies", (".examples.yaml", ".json", ".yaml"))
        examples = {_stem(path): path for path in paths if path.name.endswith(".examples.yaml")}
        for path in paths:
            policy_id = _stem(path)
            if path == examples.get(policy_id):
                continue
            if policy_id in self._policy_ids:
                self._fault(path, f"must be one file only; there are {policy_id}.json and {policy_id}.yaml")
            self._policy_ids.add(policy_id)
            text = self._text(path) if path.suffix == ".json" else self._entry_point(path)
            found = self._examples(examples[policy_id]) if policy_id in examples else ()
            if text is not None:
                yield PolicySource(policy_id, "jdm" if path.suffix == ".json" else "python", text, found)
        for policy_id, path in examples.items():
            if policy_id not in self._policy_ids:
                self._fault(path, f"must have its policy beside it, {policy_id}.json or {policy_id}.yaml")

    def check_references(self, operations: tuple[OperationContract, ...]) -> None:
        """Tell which operations name a policy that is not here. A held version may outlive its policy's file."""
        for contract in operations:
            is_held = contract.policy_version is not None
            if contract.policy_id is not None and not is_held and contract.policy_id not in self._policy_ids:
                field = f"operations/{contract.operation}.yaml#/policy"
                self.violations.append(Violation(field, "must name a policy that stands in policies"))

    def _fault(self, path: Path, rule: str, place: str = "") -> None:
        self.violations.append(Violation(path.relative_to(self._directory).as_posix() + place, rule))

    def _files(self, folder: str, suffixes: tuple[str, ...]) -> list[Path]:
        """List the files of a folder that are named as they must be."""
        root = self._directory / folder
        if folder == "policies" and not root.exists():
            return []
        if not root.is_dir():
            self._fault(root, "must be a folder")
            return []
        paths = []
        for path in sorted(root.iterdir()):
            if path.name == "README.md":
                continue
            if not path.is_file() or not path.name.endswith(suffixes):
                named = " or ".join(f"<name>{suffix}" for suffix in suffixes)
                self._fault(path, f"must be a file named {named}, or README.md")
            elif not is_name(_stem(path)):
                self._fault(path, f"its name {NAME_RULE}")
            else:
                paths.append(path)
        return paths

    def _operation(self, path: Path) -> OperationContract | None:
        settings = self._document(path, _OPERATION)
        if settings is None:
            return None
        if settings["operation"] != _stem(path):
            self._fault(path, "must be the file's name without .yaml", "#/operation")
        policy_id, _, held = settings.get("policy", "").partition("@")
        contract = operation_contract(
            operation=settings["operation"],
            policy_id=policy_id or None,
            policy_version=int(held) if held else None,
            execution=Execution(settings.get("execution", Execution.INLINE)),
            max_attempts=int(settings["max_attempts"]) if "max_attempts" in settings else None,
            topic=settings.get("topic"),
            facts_schema=json.dumps(settings["facts"], sort_keys=True, separators=(",", ":"), ensure_ascii=False),
            **{name: parse_duration(settings[name]) for name in _DURATIONS if name in settings},
        )
        self.violations += contract_violations(contract, f"{path.relative_to(self._directory).as_posix()}#")
        return contract

    def _entry_point(self, path: Path) -> str | None:
        policy = self._document(path, _PYTHON_POLICY)
        return None if policy is None else str(policy["entry_point"])

    def _examples(self, path: Path) -> tuple[PolicyExample, ...]:
        examples = self._document(path, _EXAMPLES) or []
        return tuple(
            PolicyExample(
                name=example["name"],
                facts=self._object(path, i, example, "facts"),
                outcome=example["outcome"],
                reasons=tuple(example.get("reasons", ())),
                outputs=self._object(path, i, example, "outputs") if "outputs" in example else None,
                time=self._time(path, i, example["time"]) if "time" in example else None,
            )
            for i, example in enumerate(examples)
        )

    def _object(self, path: Path, i: int, example: dict[str, Any], name: str) -> dict[str, Json]:
        try:
            return values.from_struct(values.to_struct(example[name]))
        except values.ValueFault as fault:
            self._fault(path, fault.rule, f"#/{i}/{name}{fault.path}")
            return {}

    def _time(self, path: Path, i: int, text: str) -> datetime | None:
        try:
            return datetime.fromisoformat(spelling.date_time_spelling(text))
        except ValueError:
            self._fault(path, "must not be a leap second", f"#/{i}/time")
            return None

    def _document(self, path: Path, schema: Validator) -> Any:
        """Read a YAML file that must satisfy a schema; None where it doesn't."""
        before = len(self.violations)
        text = self._text(path)
        document = None if text is None else self._parsed(path, text)
        if len(self.violations) == before:
            for place, rule in _kind_faults(document, ()):
                self._fault(path, rule, "#" + values.json_pointer(place))
        if len(self.violations) == before:
            field = path.relative_to(self._directory).as_posix() + "#"
            self.violations += json_schema.violations(schema, document, field)
        return document if len(self.violations) == before else None

    def _text(self, path: Path) -> str | None:
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError:
            self._fault(path, "must be UTF-8")
        except OSError:
            self._fault(path, "must be readable")
        return None

    def _parsed(self, path: Path, text: str) -> Any:
        try:
            # An alias can blow a small file up without end, a tag can make what JSON doesn't have.
            foreign = [event for event in _yaml().parse(text) if isinstance(event, AliasEvent) or _is_tagged(event)]
            for event in foreign:
                self._fault(path, "must not use an alias or a tag", _line(event.start_mark))
            return None if foreign else _yaml().load(text)
        except DuplicateKeyError as error:
            self._fault(path, "must not repeat a key", _line(error.problem_mark))
        except MarkedYAMLError as error:
            self._fault(path, "must be one well-formed YAML 1.2 document", _line(error.problem_mark))
        except (YAMLError, ValueError, RecursionError):  # ValueError: a number too long to read
            self._fault(path, "must be one well-formed YAML 1.2 document")
        return None


class _CoreResolver(VersionedResolver):
    """Resolves plain texts as the core schema of YAML 1.2 does, which knows no dates and no merge keys."""

    _TEXTS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("timestamp", "merge", "value"))

    @property
    def processing_version(self) -> tuple[int, int]:
        return (1, 2)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        return self.DEFAULT_SCALAR_TAG if str(tag) in self._TEXTS else tag


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _CoreResolver
    return yaml


def _is_tagged(event: Event) -> bool:
    return getattr(event, "tag", None) is not None


def _line(mark: Any) -> str:
    return "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"


def _stem(path: Path) -> str:
    return path.name.removesuffix(".examples.yaml" if path.name.endswith(".examples.yaml") else path.suffix)


def _kind_faults(value: Any, place: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Tell where YAML gave what JSON doesn't have. Numbers may be large: a schema can name such bounds."""
    match value:
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    yield (*place, str(key)), "its name must be a text"
                else:
                    yield from _text_faults(key, (*place, key))
                yield from _kind_faults(item, (*place, str(key)))
        case list():
            for i, item in enumerate(value):
                yield from _kind_faults(item, (*place, i))
        case str():
            yield from _text_faults(value, place)
        case float() if not math.isfinite(value):
            yield place, values.FINITE_RULE


def _text_faults(text: str, place: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    try:
        text.encode()
    except UnicodeEncodeError:
        yield place, values.UNICODE_RULE
