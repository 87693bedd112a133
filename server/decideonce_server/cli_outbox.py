"""The command line's part for events: what waits to be published, and what can't be."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import click
from google.protobuf.message import DecodeError
from rich.text import Text

from decideonce.v1 import events_pb2
from decideonce_server import console
from decideonce_server.cli_database import data_dir_setting, database_url_setting, with_database
from decideonce_server.database import Database
from decideonce_server.options import json_option
from decideonce_server.outbox import Backlog, Event, Outbox, ParkedEvent
from decideonce_server.publisher import age_s


@click.group(name="outbox")
def outbox() -> None:
    """Events that wait to be published."""


@outbox.command(name="list")
@click.option("--parked", is_flag=True, help="Those that can't be published.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@database_url_setting
@data_dir_setting
@json_option
def list_events(limit: int, database_url: str | None, data_dir: Path, *, parked: bool, as_json: bool) -> None:
    """List the oldest events that wait."""

    async def look(database: Database) -> tuple[Backlog, list[Event | ParkedEvent]]:
        outbox_ = Outbox(database)
        found = await outbox_.parked(limit) if parked else await outbox_.pending(limit)
        return await outbox_.backlog(), list(found)

    backlog, events = with_database(database_url, data_dir, look)
    count = backlog.parked if parked else backlog.pending
    if as_json:
        console.print_json({"parked" if parked else "pending": count, "events": [_fields(event) for event in events]})
        return
    headings = ["event", "type", "operation", "operation key", "topic", "reason" if parked else "says"]
    console.print_table(headings, map(_row, events), empty="no events are parked" if parked else "no events wait")
    if count > len(events):
        click.echo(f"and {count - len(events)} more")


@outbox.command(name="show")
@click.argument("event_id", type=click.UUID)
@database_url_setting
@data_dir_setting
@json_option
def show(event_id: UUID, database_url: str | None, data_dir: Path, *, as_json: bool) -> None:
    """Show one event that waits or is parked, with its payload."""
    found = with_database(database_url, data_dir, lambda database: Outbox(database).show(event_id))
    if found is None:
        console.fail(f"no event {event_id} waits or is parked", hint="it may have been published")
    fields = _fields(found)
    if as_json:
        console.print_json(fields)
    else:
        console.print_record(
            Text(f"event {fields.pop('id')}", "bold"), fields | {"payload": console.one_line(fields["payload"])}
        )


@outbox.command(name="retry")
@click.argument("event_ids", metavar="[EVENT_ID]...", type=click.UUID, nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every parked event.")
@database_url_setting
@data_dir_setting
@json_option
def retry(
    event_ids: tuple[UUID, ...],
    database_url: str | None,
    data_dir: Path,
    *,
    everything: bool,
    as_json: bool,
) -> None:
    """Publish parked events again, once what stood in their way is mended.

    Each goes out before the later events of its operation key.
    """
    if bool(event_ids) == everything:
        raise click.UsageError("give the events' ids, or --all")
    ids = None if everything else event_ids
    count = with_database(database_url, data_dir, lambda database: Outbox(database).retry(ids))
    _say(count, event_ids, "retried", as_json=as_json)


@outbox.command(name="discard")
@click.argument("event_ids", metavar="EVENT_ID...", type=click.UUID, nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Don't ask.")
@database_url_setting
@data_dir_setting
@json_option
def discard(
    event_ids: tuple[UUID, ...],
    database_url: str | None,
    data_dir: Path,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete parked events for good: nobody will hear of them.

    The later events of their operation keys are then published.
    """
    if not yes:
        click.confirm(f"Delete {len(event_ids)} parked for good?", abort=True, err=True)
    count = with_database(database_url, data_dir, lambda database: Outbox(database).discard(event_ids))
    _say(count, event_ids, "discarded", as_json=as_json)


@outbox.command(name="lag")
@database_url_setting
@data_dir_setting
@json_option
def lag(database_url: str | None, data_dir: Path, *, as_json: bool) -> None:
    """Tell how many events wait, how old the oldest is, and how many are parked."""
    backlog = with_database(database_url, data_dir, lambda database: Outbox(database).backlog())
    seconds = round(age_s(backlog.oldest), 3)
    if as_json:
        console.print_json({"pending": backlog.pending, "parked": backlog.parked, "lag_s": seconds})
    else:
        click.echo(f"{backlog.pending} wait, the oldest for {seconds} s; {backlog.parked} are parked")


def _say(count: int, event_ids: tuple[UUID, ...], done: str, *, as_json: bool) -> None:
    if count < len(event_ids):
        console.fail(f"{done} {count} of {len(event_ids)}: the others aren't parked")
    if as_json:
        console.print_json({done: count})
    else:
        click.echo(f"{done} {count}")


def _row(found: Event | ParkedEvent) -> Sequence[object]:
    event = found.event if isinstance(found, ParkedEvent) else found
    said = found.reason if isinstance(found, ParkedEvent) else _gist(event.payload)
    return event.id, event.type, event.operation, event.operation_key, event.topic, said


def _fields(found: Event | ParkedEvent) -> dict[str, Any]:
    if isinstance(found, ParkedEvent):
        return _fields(found.event) | {"reason": found.reason, "park_time": found.park_time.isoformat()}
    return console.fields_of(found) | {"payload": console.message_dict(_event(found.payload))}


def _event(payload: bytes) -> events_pb2.DecisionEvent:
    """Read a payload; what isn't one, and is parked for that, is shown as an empty one."""
    event = events_pb2.DecisionEvent()
    with contextlib.suppress(DecodeError):
        event.ParseFromString(payload)
    return event


def _gist(payload: bytes) -> str:
    event = _event(payload)
    if event.HasField("effect"):
        return console.one_line(console.message_dict(event.effect.payload))
    return event.recorded.decision.outcome or event.recorded.failure.reason
