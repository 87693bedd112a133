"""docs/operations.md names what there is."""

import re
from pathlib import Path

import click

from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1 import error_reason_pb2 as reasons
from decideonce_server import cli_outbox, doctor
from decideonce_server.cli import cli

PAGE = (Path(__file__).parents[2] / "docs/operations.md").read_text()


def test_flags_that_the_page_names_are_there() -> None:
    """Every flag on the page is one of `serve`'s, `housekeep`'s or `outbox list`'s."""
    flags = {
        flag
        for command in (cli.commands["serve"], cli.commands["housekeep"], cli_outbox.list_events)
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    assert set() == set(re.findall(r"--[a-z][a-z-]+", PAGE)) - flags - {"--help"}


def test_words_that_callers_see_are_the_contracts() -> None:
    """Every status and reason on the page is in the protos, or a code of gRPC or of its health protocol."""
    known = {name.removeprefix("ERROR_REASON_") for name in reasons.ErrorReason.DESCRIPTOR.values_by_name}
    known |= {name.removeprefix("DECISION_STATUS_") for name in wire.DecisionStatus.DESCRIPTOR.values_by_name}
    known |= {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS", "INTERNAL"}
    # Variables of OpenTelemetry's own are no words of ours.
    named = {name for name in re.findall(r"`([A-Z][A-Z_]+)`", PAGE) if not name.startswith("OTEL_")}
    assert named
    assert set() == named - known


def test_page_tells_of_every_check_of_the_ledger() -> None:
    """What the doctor may find in a database is explained."""
    assert [] == [check for check, *_ in doctor.LEDGER_CHECKS if check not in PAGE]
