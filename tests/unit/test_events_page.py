"""docs/events.md names what there is."""

import json
import re
from pathlib import Path
from uuid import UUID

import click
import pytest

from decideonce import events
from decideonce.v1.events_pb2 import DecisionEvent
from decideonce_server import events_url, publisher
from decideonce_server.catalog import DEFAULT_TOPIC
from decideonce_server.cli import cli
from decideonce_server.cloudevent import PayloadFormat, message_of
from decideonce_server.outbox import Event
from decideonce_server.settings import NO_EVENTS
from decideonce_server.sink import Refusal
from decideonce_server.tables import outbox

PAGE = (Path(__file__).parents[2] / "docs/events.md").read_text()
URLS = r"`((?:kafka|nats|tls|log):[^`]*|none)`"


def first_cells(heading: str) -> list[str]:
    """Give the words in code quotes that stand in the first cells of the table under a heading of its first cell."""
    _, _, after = PAGE.partition(f"| {heading} |")
    rows = after.partition("\n\n")[0].splitlines()[2:]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_attributes_are_those_of_a_message() -> None:
    """The page lists the attributes that a message has, and their headers."""
    payload = DecisionEvent(event_id=str(UUID(int=0)), type="loan.approved").SerializeToString()
    event = Event(UUID(int=0), 0, "acme", "credit.approve-loan", "k" * 16, "loan.approved", payload, "t", "00-1-2-00")
    attributes = message_of(event).attributes
    assert set(attributes) == set(first_cells("attribute"))
    for name in attributes:
        kafka = "content-type" if name == "datacontenttype" else f"{events.KAFKA_PREFIX}{name}"
        assert f"| `{kafka}` | `{events.NATS_PREFIX}{name}`" in PAGE


def test_properties_are_those_that_a_url_may_have() -> None:
    """Every property that `--events` takes is on the page, and no other."""
    kafka = first_cells("property of `kafka://`")
    assert events_url.KAFKA_PROPERTIES == {name for name in kafka if "…" not in name}
    assert set(events_url.KAFKA_FAMILIES) == {name.removesuffix("…") for name in kafka if "…" in name}
    assert events_url.NATS_PROPERTIES == set(first_cells("property of `nats://` and `tls://`"))
    assert {"kafka", "nats", "tls", "log", NO_EVENTS} == {url.partition(":")[0] for url in re.findall(URLS, PAGE)}


def test_reasons_are_those_of_refusals() -> None:
    """Every reason for parking is explained."""
    assert {refusal.value for refusal in Refusal} == set(first_cells("reason"))


def test_metrics_are_the_publishers() -> None:
    """Every metric of the publisher is explained, as Prometheus has its name."""
    made = set(re.findall(r'"(outbox_\w+)"', Path(publisher.__file__).read_text()))
    assert made == {re.sub("_(total|seconds)$", "", name) for name in first_cells("metric")}


def test_commands_and_flags_are_there() -> None:
    """Every command of `decideonce outbox` on the page is one, and so is every flag."""
    group = cli.commands["outbox"]
    named = set(re.findall(r"^decideonce outbox (\w+)", PAGE, re.MULTILINE))
    assert set(group.commands) - {"list"} == named - {"list"}
    commands = [*group.commands.values(), cli.commands["serve"]]
    flags = {
        flag
        for command in commands
        for option in command.params
        if isinstance(option, click.Option)
        for flag in option.opts
    }
    assert set() == set(re.findall(r"--[a-z][a-z-]+", PAGE)) - flags
    assert f"`{DEFAULT_TOPIC}` unless given" in PAGE


def test_connector_names_columns_that_are_there() -> None:
    """The connector's settings are JSON, and the columns that they name are the outbox's."""
    settings = json.loads(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])
    router = "transforms.outbox."
    placed = settings[f"{router}table.fields.additional.placement"].split(",")
    named = {settings[f"{router}route.by.field"], *(place.split(":")[0] for place in placed)}
    assert {"topic", "type", "traceparent"} == named
    assert named <= set(outbox.columns.keys())
    assert f"CREATE PUBLICATION {settings['publication.name']} FOR TABLE outbox" in PAGE


@pytest.mark.parametrize("payload_format", PayloadFormat)
def test_formats_are_told(payload_format: PayloadFormat) -> None:
    """Each format's content type is on the page."""
    assert f"application/{payload_format.value}" in PAGE
