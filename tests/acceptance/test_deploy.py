"""The alert rules and the dashboard in deploy/, against what a running service tells."""

import re
from pathlib import Path

import pytest

from deployed import queries, rules, selectors
from harness import Caller, make_token, new_key, refused, write_catalog
from processes import free_address, until
from scraping import scrape

PAGE = (Path(__file__).parents[2] / "docs/operations.md").read_text()
OPERATION = "deploy.echo"

# What Prometheus itself knows of a target.
OF_PROMETHEUS = {"up": {"job", "instance"}}


@pytest.fixture
async def told(database_url, start_service, connect_caller, tmp_path) -> dict[str, set[str]]:
    """Give the labels of every metric that a service tells after a few calls, by name."""
    address = free_address()
    catalog = write_catalog(tmp_path / "catalog", {OPERATION: {"policy": "echo"}}, {"echo": "echo_policy:decide"})
    service = start_service("--catalog", str(catalog), "--metrics", address, "--events", f"log:{tmp_path}/events")
    caller, key = connect_caller(service, await make_token(database_url, "acme")), new_key()
    for _ in range(2):
        await caller.decide(OPERATION, key, {"n": 1})
    await refused(caller.decide(OPERATION, key, {"n": 2}))
    await refused(Caller(caller.channel, None).decide(OPERATION, key))

    async def names() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for sample in await scrape(address):
            found.setdefault(sample.name, set()).update(sample.labels)
        return found if "ledger_stale" in found and "outbox_lag_seconds" in found else {}

    return await until(names)


async def test_every_metric_is_one_that_the_service_tells(told: dict[str, set[str]]) -> None:
    """Every rule, query and page of the documentation names metrics and labels of a running service."""
    known = {name: labels | {"job", "instance"} for name, labels in told.items()} | OF_PROMETHEUS
    asked = [(rule["alert"], rule["expr"]) for rule in rules()] + queries()
    assert 40 < len(asked)
    for where, expression in asked:
        found = list(selectors(expression))
        assert found, where
        for name, labels in found:
            assert name in known, f"{where}: {name}"
            assert labels <= known[name], f"{where}: {name} {labels}"
    named = set(re.findall(r"`([a-z_]+_(?:total|seconds|pending|parked|stale|processing|size|out))`", PAGE))
    assert 15 < len(named)
    assert set() == named - set(known) - {name.rsplit("_", 1)[0] for name in known if name.endswith("_bucket")}


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    """An alert has a severity, one line of what is seen, what it means, and what to do."""
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert {"summary", "description", "action"} == rule["annotations"].keys(), rule["alert"]
        assert rule["alert"].startswith("Decideonce")
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    assert [] == [name for name in names if name not in PAGE]
