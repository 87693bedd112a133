"""What deploy/ asks of Prometheus: alert rules, and the queries of the dashboard."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
ALERTS = ROOT / "deploy/alerts.yaml"
DASHBOARD = ROOT / "deploy/grafana-dashboard.json"

# A name and its matchers, if it has some; what "(" follows is a function.
SELECTOR = re.compile(r"([a-z_:][a-zA-Z0-9_:]*)(\{[^}]*\})?(?!\w|\s*\()")
MATCHER = re.compile(r'([a-z_]+)(?:=~|!~|!=|=)"[^"]*"')
OPERATORS = {"or", "and", "unless"}


def rules() -> list[dict[str, Any]]:
    """Give every alert rule."""
    return [rule for group in YAML(typ="safe").load(ALERTS)["groups"] for rule in group["rules"]]


def queries() -> list[tuple[str, str]]:
    """Give the dashboard's queries, each with its panel's title."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Give the metrics that an expression reads, each with the labels that it selects by."""
    bare = re.sub(r"\b(by|without)\s*\([^)]*\)|\[[^\]]*\]", "", expression)
    for name, matchers in SELECTOR.findall(bare):
        if name not in OPERATORS:
            yield name, set(MATCHER.findall(matchers))
