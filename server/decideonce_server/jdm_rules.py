"""Which rules matched in an evaluation, and the proof that none was skipped because of an error.

zen takes an error in a decision table's row or a switch's condition for "no match" and goes on, so that a fact of the
wrong type (`null > 5`, `5 > "a"`) could fall through to the last, most general rule. That would be a wrong decision,
not a failed one. So every cell and condition that zen found not to match is evaluated once more, with the input that
zen's trace shows, in the same order and as far as zen went; the first error fails the evaluation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import zen

from decideonce_server.jdm_expression import (
    compiled,
    is_literal,
    member_path,
    plain_kind,
    reads_only_its_column,
    tokens,
    zen_reason,
)
from decideonce_server.policy import PolicyFailed


def rule_label(rule: Mapping[str, str], index: int) -> str:
    """Give the name of a table's rule: its `_id`, or "row" and its number from 1."""
    return rule.get("_id") or f"row {index + 1}"


def matched_rules(documents: "Mapping[str, Rules]", policy_id: str, trace: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the rules that matched, as "<node name>/<rule>", in the order of evaluation; sub-decisions' rules too.

    Raises:
        PolicyFailed: a rule or condition could not be evaluated, which zen took for "no match".
    """
    rules = documents[policy_id]
    matched: list[str] = []
    for node in sorted(trace.values(), key=lambda node: int(node["order"])):
        table, switch = rules.tables.get(node["id"]), rules.switches.get(node["id"])
        if table is not None:
            matched += table.matched(node["input"], node["traceData"])
        elif switch is not None:
            switch.prove(node["input"])
        elif node["id"] in rules.sub_decisions:
            loops = node["traceData"] if isinstance(node["traceData"], list) else [node["traceData"]]
            for loop in loops:
                matched += matched_rules(documents, rules.sub_decisions[node["id"]], loop)
    return tuple(matched)


class Rules:
    """What of one JDM document has rules or conditions, made ready to be evaluated again."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.tables: dict[str, _Table] = {}
        self.switches: dict[str, _Switch] = {}
        self.sub_decisions: dict[str, str] = {}
        for node in document["nodes"]:
            if node["type"] == "decisionTableNode":
                self.tables[node["id"]] = _Table(node["name"], node["content"])
            elif node["type"] == "switchNode":
                self.switches[node["id"]] = _Switch(node["name"], node["content"])
            elif node["type"] == "decisionNode":
                self.sub_decisions[node["id"]] = node["content"]["key"]


@dataclass(frozen=True, slots=True)
class _Cell:
    column: str
    field: "zen.Expression | None"
    expression: "zen.Expression"
    needs_scope: bool


# The cells of a row that can't fail on values of these kinds, by column.
_PlainRow: TypeAlias = tuple[tuple[str, str], ...]
_KINDS: Mapping[type, str] = {int: "number", float: "number", str: "text", bool: "boolean"}


class _Table:
    def __init__(self, name: str, content: Mapping[str, Any]) -> None:
        self._name = name
        self._is_first = content["hitPolicy"] == "first"
        self._input_field = _optional(content.get("inputField"))
        fields = {column["id"]: _optional(column.get("field")) for column in content["inputs"]}
        paths = {column["id"]: member_path(column.get("field") or "") for column in content["inputs"]}
        self._paths = {column: path for column, path in paths.items() if path is not None}
        self._plain_rows = [_plain_row(rule, content, fields) for rule in content["rules"]]
        self._labels = [rule_label(rule, i) for i, rule in enumerate(content["rules"])]
        self._rows = [
            [
                _cell(column["id"], fields[column["id"]], rule[column["id"]])
                for column in content["inputs"]
                if rule[column["id"]].strip()
            ]
            for rule in content["rules"]
        ]
        self._outputs = [
            [compiled(rule[column["id"]], unary=False) for column in content["outputs"] if rule[column["id"]].strip()]
            for rule in content["rules"]
        ]

    def matched(self, scope: Any, hits: Any) -> list[str]:
        indices = [hit["index"] for hit in ([hits] if isinstance(hits, dict) else hits or [])]
        if self._input_field is not None:
            scope = _evaluated(self._input_field, scope, f"{self._name}/inputField")
        if not isinstance(scope, dict):
            raise PolicyFailed(f"{self._name}: the input of a table must be an object")
        values = self._column_values(scope)
        kinds = {column: _KINDS.get(type(value)) for column, value in values.items()}
        for index in range(indices[0] if self._is_first and indices else len(self._rows)):
            plain = self._plain_rows[index]
            can_fail = plain is None or any(kinds.get(column) != kind for column, kind in plain)
            if can_fail and index not in indices:
                self._prove(index, scope, values)
        return [f"{self._name}/{self._labels[index]}" for index in indices]

    def _column_values(self, scope: Any) -> dict[str, Any]:
        """Give the values of columns that only read a member that is there; of others zen knows more."""
        found = {}
        for column, path in self._paths.items():
            value = scope
            for name in path:
                if not isinstance(value, dict) or name not in value:
                    break
                value = value[name]
            else:
                found[column] = value
        return found

    def _prove(self, index: int, scope: Any, values: dict[str, Any]) -> None:
        """Evaluate a row that zen didn't take; `values` keeps the columns' values, which all rows share."""
        where = f"{self._name}/{self._labels[index]}"
        for cell in self._rows[index]:
            if cell.field is None:
                is_match = _condition(cell.expression, scope, where)
            else:
                if cell.column not in values:
                    values[cell.column] = _evaluated(cell.field, scope, where)
                value = {"$": values[cell.column]}
                is_match = _evaluated(cell.expression, {**scope, **value} if cell.needs_scope else value, where)
            if not is_match:
                return
        for output in self._outputs[index]:
            _evaluated(output, scope, where)


def _plain_row(
    rule: Mapping[str, str], content: Mapping[str, Any], fields: "Mapping[str, zen.Expression | None]"
) -> _PlainRow | None:
    outputs = [rule[column["id"]] for column in content["outputs"] if rule[column["id"]].strip()]
    if not all(is_literal(output) for output in outputs):
        return None
    found = []
    for column in (column["id"] for column in content["inputs"]):
        if rule[column].strip():
            kind = plain_kind(rule[column])
            if kind is None or fields[column] is None:
                return None
            found.append((column, kind))
    return tuple(found)


def _cell(column: str, field: "zen.Expression | None", text: str) -> _Cell:
    is_unary = field is not None
    return _Cell(column, field, compiled(text, unary=is_unary), is_unary and not reads_only_its_column(tokens(text)))


class _Switch:
    def __init__(self, name: str, content: Mapping[str, Any]) -> None:
        self._is_first = content.get("hitPolicy", "first") == "first"
        self._conditions = [
            (f"{name}/{statement['id']}", _optional(statement["condition"])) for statement in content["statements"]
        ]

    def prove(self, scope: Any) -> None:
        for where, condition in self._conditions:
            if (condition is None or _condition(condition, scope, where)) and self._is_first:
                return


def _optional(text: str | None) -> "zen.Expression | None":
    return compiled(text, unary=False) if text and text.strip() else None


def _condition(expression: "zen.Expression", scope: Any, where: str) -> bool:
    result = _evaluated(expression, scope, where)
    if not isinstance(result, bool):
        raise PolicyFailed(f"{where}: a condition must give true or false")
    return result


def _evaluated(expression: "zen.Expression", scope: Any, where: str) -> Any:
    try:
        return expression.evaluate(scope)
    except RuntimeError as error:
        raise PolicyFailed(f"{where}: {zen_reason(error)}") from None
