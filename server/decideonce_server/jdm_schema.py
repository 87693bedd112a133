"""The shape of a JDM document, as far as it is read here; zen lets parts be missing that have to be there."""

from typing import Any

from decideonce_server import json_schema

_TEXT: dict[str, Any] = {"type": "string"}
_OPTIONAL_TEXT: dict[str, Any] = {"type": ["string", "null"]}
_COLUMN = {
    "type": "object",
    "required": ["id", "name"],
    "properties": {"id": _TEXT, "name": _TEXT, "field": _OPTIONAL_TEXT},
}

_EXPRESSIONS = {
    "required": ["expressions"],
    "properties": {
        "expressions": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "key", "value"],
                "properties": {"id": _TEXT, "key": _TEXT, "value": _TEXT},
            },
        },
    },
}
_TABLE = {
    "required": ["hitPolicy", "inputs", "outputs", "rules"],
    "properties": {
        "hitPolicy": {"enum": ["first", "collect"]},
        "inputs": {"type": "array", "items": _COLUMN},
        "outputs": {"type": "array", "items": {**_COLUMN, "required": ["id", "name", "field"]}},
        "rules": {"type": "array", "items": {"type": "object", "additionalProperties": _TEXT}},
    },
}
_SWITCH = {
    "required": ["statements"],
    "properties": {
        "hitPolicy": {"enum": ["first", "collect"]},
        "statements": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "condition"],
                "properties": {"id": _TEXT, "condition": _TEXT},
            },
        },
    },
}
_DECISION = {"required": ["key"], "properties": {"key": _TEXT}}
_ANY_CONTENT = {
    "type": ["object", "null"],
    "properties": {"inputField": _OPTIONAL_TEXT, "outputPath": _OPTIONAL_TEXT, "executionMode": _OPTIONAL_TEXT},
}


def _content_of(node_type: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "if": {"properties": {"type": {"const": node_type}}},
        "then": {"required": ["content"], "properties": {"content": {"type": "object", **content}}},
    }


VALIDATOR = json_schema.compile_schema(
    {
        "type": "object",
        "required": ["nodes", "edges"],
        "properties": {
            "nodes": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["id", "name", "type"],
                    "properties": {"id": _TEXT, "name": _TEXT, "type": _TEXT, "content": _ANY_CONTENT},
                    "allOf": [
                        _content_of("expressionNode", _EXPRESSIONS),
                        _content_of("decisionTableNode", _TABLE),
                        _content_of("switchNode", _SWITCH),
                        _content_of("decisionNode", _DECISION),
                    ],
                },
            },
            "edges": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["id", "sourceId", "targetId"],
                    "properties": {"id": _TEXT, "sourceId": _TEXT, "targetId": _TEXT, "sourceHandle": _OPTIONAL_TEXT},
                },
            },
        },
    }
)
