"""The JDM engine: policies as JDM documents, evaluated by zen.

A version's content is one text that holds the policy's document and every sub-decision that it reaches, so a version is
whole and never changes. How authors write such documents, and what is refused, is told in docs/policies.md.
"""

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.metadata import version
from typing import Any

import zen

from decideonce_server import jdm_expression, jdm_schema, json_schema
from decideonce_server.errors import InvalidCatalog, Violation
from decideonce_server.jdm_expression import zen_reason
from decideonce_server.jdm_rules import Rules, matched_rules, rule_label
from decideonce_server.policy import (
    EngineName,
    Evaluate,
    Evaluation,
    Input,
    PolicyError,
    PolicyFailed,
    evaluation_of,
)
from decideonce_server.values import Json

NAME = "zen-engine/" + version("zen-engine")
NODE_TYPES = frozenset({"inputNode", "outputNode", "decisionNode", "decisionTableNode", "expressionNode", "switchNode"})
INPUT_NAMES = frozenset({"facts", "decision"})


def bundle(policy_id: str, documents: Mapping[str, str]) -> str:
    """Give the content of a version: the policy's document and all sub-decisions that it reaches, as canonical JSON.

    `documents` are the JDM texts of all JDM policies by policy id. What only the editor needs (a node's position) is
    left out, so moving a node makes no new version.

    Raises:
        InvalidCatalog: a document is not readable, missing, or uses itself; `check` of every policy tells where.
    """
    found: dict[str, Any] = {}
    waiting = [policy_id]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        violations = list(_shape_violations(current, documents[current]))
        violations = violations or _sub_decision_violations(current, documents)
        if violations:
            raise InvalidCatalog(violations)
        found[current] = _essence(json.loads(documents[current]))
        waiting += _sub_decisions(found[current])
    return json.dumps(
        {"entry": policy_id, "documents": found}, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )


def check(policy_id: str, documents: Mapping[str, str]) -> list[Violation]:
    """Give the rules that one policy's own document breaks; none means that it can be published.

    Its sub-decisions are policies too and are checked on their own; here they only have to be there, and not to lead
    back. `documents` are the JDM texts of all JDM policies by policy id.
    """
    violations = list(_shape_violations(policy_id, documents[policy_id]))
    if violations:
        return violations
    document = json.loads(documents[policy_id])
    violations += _sub_decision_violations(policy_id, documents)
    violations += _duplicate_violations(policy_id, document)
    for node in document["nodes"]:
        where = f"policies/{policy_id}/{node['name']}"
        violations += [Violation(f"{where}{spot}", rule) for spot, rule in _node_faults(node)]
    return violations


def _shape_violations(policy_id: str, text: str) -> Iterator[Violation]:
    """Judge whether a document is a JDM graph of known nodes that zen can load."""
    where = f"policies/{policy_id}"
    try:
        document = json.loads(text)
    except ValueError as error:
        yield Violation(where, f"must be JSON: {error}")
        return
    except RecursionError:
        yield Violation(where, "must not be nested so deeply")
        return
    nodes = document.get("nodes") if isinstance(document, dict) else None
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes) or "blocks" in document:
        yield Violation(where, "must be a JDM document with nodes and edges")
        return
    if document.get("imports"):
        yield Violation(where, "must not import other documents; use a decision node")
    for node in nodes:
        if not isinstance(node.get("type"), str) or node["type"] not in NODE_TYPES:
            yield Violation(
                f"{where}/{node.get('name')}",
                f"must not be a {node.get('type')}, which can reach outside or is not known; use {sorted(NODE_TYPES)}",
            )
            return
    try:
        zen.ZenEngine().create_decision(text).validate()
    except RuntimeError as error:
        yield Violation(where, f"must be a JDM document that zen can load: {zen_reason(error)}")
        return
    yield from json_schema.violations(jdm_schema.VALIDATOR, document, where)


def _duplicate_violations(policy_id: str, document: Mapping[str, Any]) -> Iterator[Violation]:
    for key in ("id", "name"):
        for value, count in Counter(node[key] for node in document["nodes"]).items():
            if count > 1:
                yield Violation(f"policies/{policy_id}/{value}", f"must be the only node with this {key}")


def _sub_decisions(document: Mapping[str, Any]) -> list[str]:
    return [node["content"]["key"] for node in document["nodes"] if node["type"] == "decisionNode"]


def _sub_decision_violations(policy_id: str, documents: Mapping[str, str]) -> list[Violation]:
    """Judge what the policy reaches: all of it must be there, and nothing may lead back to the policy."""
    where = f"policies/{policy_id}"
    violations = []
    seen: set[str] = set()
    waiting = [(key, key) for key in _sub_decisions(json.loads(documents[policy_id]))]
    while waiting:
        key, through = waiting.pop()
        if key == policy_id:
            violations.append(Violation(where, f"must not use itself as a sub-decision, by way of {through}"))
        elif key not in documents:
            violations.append(Violation(where, f"must use JDM policies of this catalog only, not {key}"))
        elif key not in seen:
            seen.add(key)
            if not list(_shape_violations(key, documents[key])):
                waiting += [(sub, through) for sub in _sub_decisions(json.loads(documents[key]))]
    return violations


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where an expression stands in a node, and how zen reads it there."""

    path: str
    unary: bool = False
    in_rule: bool = False


def _with_expressions(node: Mapping[str, Any], change: Callable[[_Spot, str], str]) -> dict[str, Any]:
    """Copy a node with every expression changed; the one place that knows where expressions stand."""
    changed = copy.deepcopy(dict(node))
    content = changed.get("content") or {}
    is_table = node["type"] == "decisionTableNode"
    if content.get("inputField"):
        content["inputField"] = change(_Spot("/inputField", in_rule=is_table), content["inputField"])
    for expression in content.get("expressions", []):
        if expression["value"]:
            expression["value"] = change(_Spot(f"/{expression['key']}"), expression["value"])
    for statement in content.get("statements", []):
        if statement["condition"]:
            statement["condition"] = change(_Spot(f"/{statement['id']}", in_rule=True), statement["condition"])
    if is_table:
        _change_table(content, change)
    return changed


def _change_table(content: dict[str, Any], change: Callable[[_Spot, str], str]) -> None:
    # Cells first: whether a column has a field says how its cells are read.
    for index, rule in enumerate(content["rules"]):
        for column in content["inputs"] + content["outputs"]:
            text = rule.get(column["id"], "")
            is_unary = column in content["inputs"] and bool((column.get("field") or "").strip())
            if text.strip():
                spot = _Spot(_cell_path(rule, index, column), unary=is_unary, in_rule=True)
                rule[column["id"]] = change(spot, text)
    for column in content["inputs"]:
        if (column.get("field") or "").strip():
            column["field"] = change(_Spot(f"/column {column['name']}", in_rule=True), column["field"])


def _cell_path(rule: Mapping[str, str], index: int, column: Mapping[str, str]) -> str:
    return f"/row {index + 1} ({rule_label(rule, index)})/column {column['name']}"


def _node_faults(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Give the rules that a node breaks, each with where in the node."""
    content = node.get("content") or {}
    if content.get("schema"):
        yield "", "must not have a schema: the operation's facts schema is the one contract"
    for name in _written_names(node["type"], content):
        if name.partition(".")[0] in INPUT_NAMES or name.startswith("$"):
            yield f"/{name}", "must not write facts, decision or a name with $, which are the input's"
    found: list[tuple[str, str]] = []

    def judge(spot: _Spot, text: str) -> str:
        rules = jdm_expression.faults(text, unary=spot.unary, in_rule=spot.in_rule)
        found.extend((spot.path, rule) for rule in rules)
        return text

    _with_expressions(node, judge)
    yield from found
    if node["type"] == "decisionTableNode":
        yield from _table_faults(content, compiles=not found)


def _written_names(node_type: str, content: Mapping[str, Any]) -> list[str]:
    names = [content["outputPath"]] if content.get("outputPath") else []
    if node_type == "decisionTableNode":
        names += [column["field"] for column in content["outputs"]]
    if node_type == "expressionNode":
        names += [expression["key"] for expression in content["expressions"]]
    return names


def _table_faults(content: Mapping[str, Any], *, compiles: bool) -> Iterator[tuple[str, str]]:
    if content.get("executionMode") == "loop":
        yield "", "must not loop: loop over a decision node, so that it can be told which rule matched for which item"
    labels = Counter(rule_label(rule, i) for i, rule in enumerate(content["rules"]))
    for index, rule in enumerate(content["rules"]):
        if labels[rule_label(rule, index)] > 1:
            yield f"/row {index + 1}", f"must have an _id of its own in this table, not {rule_label(rule, index)}"
        for column in content["inputs"] + content["outputs"]:
            if column["id"] not in rule:
                yield (
                    _cell_path(rule, index, column),
                    "must be there; leave it empty to match anything or write nothing",
                )
    for column in content["inputs"] if compiles else []:
        cells = [rule.get(column["id"], "") for rule in content["rules"]]
        kinds = {kind for cell in cells for kind in jdm_expression.literal_kinds(jdm_expression.tokens(cell)) or ()}
        if column.get("field") and len(kinds) > 1:
            yield f"/column {column['name']}", f"must compare with values of one type, not {', '.join(sorted(kinds))}"


def _essence(document: Mapping[str, Any]) -> dict[str, Any]:
    """Give what zen reads of a document."""
    node_keys, edge_keys = ("id", "name", "type", "content"), ("id", "sourceId", "targetId", "sourceHandle")
    return {
        "nodes": [{key: node[key] for key in node_keys if key in node} for node in document["nodes"]],
        "edges": [{key: edge[key] for key in edge_keys if key in edge} for edge in document["edges"]],
    }


class Engine:
    """Evaluates JDM policies; satisfies `policy.Engine`.

    An error is never taken for "no match", see `jdm_rules`. A division by zero is no error in zen but null: ordering it
    (`1 / 0 > 5`) is an error and fails the decision; == compares it, and zen leaves an output that is null out. A text
    "now" in a date function fails the decision, see `jdm_expression.guarded`.
    """

    name: EngineName = "jdm"

    def prepare(self, content: str) -> Evaluate:
        """Load and compile a version's content, as `bundle` gives it.

        Raises:
            PolicyFailed: it is not a bundle, or zen can't load it.
        """
        try:
            whole = json.loads(content)
            documents = {key: _guarded(document) for key, document in whole["documents"].items()}
            engine = zen.ZenEngine({"loader": {"type": "static", "content": documents}})
            engine.get_decision(whole["entry"])
            rules = {key: Rules(document) for key, document in documents.items()}
        except (RuntimeError, ValueError, LookupError, TypeError, jdm_expression.UnreadableExpression) as error:
            raise PolicyFailed(f"the content can't be loaded: {zen_reason(error)}") from None
        return _Prepared(whole["entry"], engine, rules)


def _guarded(document: Mapping[str, Any]) -> dict[str, Any]:
    nodes = [_with_expressions(node, lambda _, text: jdm_expression.guarded(text)) for node in document["nodes"]]
    return {"nodes": nodes, "edges": document["edges"]}


class _Prepared:
    def __init__(self, policy_id: str, engine: "zen.ZenEngine", rules: Mapping[str, Rules]) -> None:
        self._policy_id = policy_id
        self._engine = engine
        self._rules = rules
        self._options: Any = {"trace": True, "max_depth": len(rules) + 1}

    def __call__(self, inputs: Sequence[Input]) -> list[Evaluation | PolicyError]:
        """Evaluate all in one call of zen, most of whose cost is the call's.

        What a node passes through of the input, `facts` and `decision`, is never part of the outputs; no node can
        write those names. PolicyFailed: zen failed, a rule could not be evaluated, or a fact is a number that zen can't
        hold. InvalidResult: no rule gave an outcome, or what came out is not a result.
        """
        requests: Any = [
            {"key": self._policy_id, "context": {"facts": one.facts, "decision": one.decision}} for one in inputs
        ]
        responses = self._engine.evaluate_batch(requests, self._options)
        return [self._result_of(one, response) for one, response in zip(inputs, responses, strict=True)]

    def _result_of(self, one: Input, response: Mapping[str, Any]) -> Evaluation | PolicyError:
        try:
            _check_numbers(one.facts)
            return self._evaluation(response)
        except PolicyError as error:
            return error

    def _evaluation(self, response: Mapping[str, Any]) -> Evaluation:
        if not response["success"]:
            raise PolicyFailed(_error_text(response["error"]))
        data = response["data"]
        matched = matched_rules(self._rules, self._policy_id, data["trace"])
        result: Any = data["result"]
        if isinstance(result, dict):
            result = {name: value for name, value in result.items() if name not in INPUT_NAMES}
        return evaluation_of(result, NAME, matched)


def _error_text(error: str | Mapping[str, Any]) -> str:
    return error if isinstance(error, str) else str(error.get("source", error["type"]))


def _check_numbers(value: Json) -> None:
    """Refuse a number with more decimal places than zen has, which it would take for 0 or cut off."""
    if isinstance(value, dict):
        for member in value.values():
            _check_numbers(member)
    elif isinstance(value, list):
        for member in value:
            _check_numbers(member)
    elif isinstance(value, float) and int(Decimal(repr(value)).as_tuple().exponent) < -jdm_expression.DIGITS_MAX:
        raise PolicyFailed("a number has more decimal places than zen can hold")
