"""`decideonce outbox`, as an operator meets it: events that wait, and events that can't be published."""

import asyncio
import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from subprocess import CompletedProcess

import pytest
from sqlalchemy.engine import URL

from decideonce_server.database import Database
from decideonce_server.outbox import Outbox
from decideonce_server.outbox_buckets import BUCKETS, BucketLeases
from publishing import OPERATION, TOPIC, event_rows, outbox_command, parked, plant

Command = Callable[..., CompletedProcess]


@pytest.fixture
def outbox(database_url: URL) -> Command:
    """Give a function that runs a command on the test's database."""
    return lambda *arguments, **more: outbox_command(database_url, *arguments, **more)


@pytest.fixture
async def events(database: Database, observer) -> tuple[list[str], list[str]]:
    """Give the ids of two parked events and of two that wait behind each."""
    keys = [await plant(observer, event_rows(TOPIC, count=3)) for _ in range(2)]
    leases = BucketLeases(database, uuid.uuid4(), timedelta(seconds=60))
    await leases.hold()
    found = await Outbox(database).waiting(range(BUCKETS), 100)
    firsts = [event for event in found if str(event.id) in (keys[0][0], keys[1][0])]
    await Outbox(database).park(leases.holder, firsts, ["MESSAGE_TOO_LARGE", "TOPIC_NOT_FOUND"])
    return [keys[0][0], keys[1][0]], [*keys[0][1:], *keys[1][1:]]


def answered(done: CompletedProcess) -> dict:
    """Give what a command that succeeded answered in JSON."""
    assert (0, "") == (done.returncode, done.stderr)
    return json.loads(done.stdout)


def assert_failed(done: CompletedProcess, text: str, exit_code: int = 1) -> None:
    """Assert that a command failed, and said why in its own words."""
    assert (exit_code, "") == (done.returncode, done.stdout)
    assert text in done.stderr
    assert "Traceback" not in done.stderr


async def test_lists_what_waits_and_what_is_parked(outbox, events) -> None:
    """`list` tells of both kinds, oldest first, how many there are, and with --json all but the payload's bytes."""
    stuck, waiting = events
    listed = answered(outbox("list", "--json"))
    assert (4, waiting) == (listed["pending"], [event["id"] for event in listed["events"]])
    listed = answered(outbox("list", "--parked", "--json"))
    assert (2, stuck) == (listed["parked"], [event["id"] for event in listed["events"]])
    assert ["MESSAGE_TOO_LARGE", "TOPIC_NOT_FOUND"] == [event["reason"] for event in listed["events"]]
    assert {(OPERATION, TOPIC)} == {(event["operation"], event["topic"]) for event in listed["events"]}
    assert {stuck[0]} == {event["payload"]["event_id"] for event in listed["events"][:1]}
    people = outbox("list", "--parked", "--limit", "1").stdout
    assert (True, True, False) == (stuck[0] in people, "and 1 more" in people, stuck[1] in people)
    people = outbox("list").stdout
    assert all(one in people for one in waiting)


async def test_nothing_to_list(outbox, observer) -> None:
    """Where nothing waits and nothing is parked, the commands say so and succeed."""
    assert "no events wait\n" == outbox("list").stdout
    assert "no events are parked\n" == outbox("list", "--parked").stdout
    assert {"lag_s": 0.0, "parked": 0, "pending": 0} == answered(outbox("lag", "--json"))
    assert "retried 0\n" == outbox("retry", "--all").stdout


async def test_shows_one_event(outbox, events) -> None:
    """`show` finds an event that waits or is parked, with its payload, and for a parked one why."""
    (stuck, _), (waiting, *_) = events
    shown = answered(outbox("show", stuck, "--json"))
    assert (stuck, "MESSAGE_TOO_LARGE") == (shown["id"], shown["reason"])
    assert {"n": 0, "padding": ""} == shown["payload"]["effect"]["payload"]
    people = outbox("show", waiting).stdout
    assert all(text in people for text in (waiting, OPERATION, TOPIC, '"padding"'))
    assert "reason" not in people
    assert_failed(outbox("show", str(uuid.uuid4())), "waits or is parked")


async def test_retries_and_discards(outbox, events, observer) -> None:
    """`retry` and `discard` take ids of parked events, say how many they changed, and fail where one isn't parked."""
    (first, second), (waiting, *_) = events
    assert_failed(outbox("retry", waiting), "the others aren't parked")
    assert_failed(outbox("discard", "--yes", waiting), "the others aren't parked")
    assert {"retried": 1} == answered(outbox("retry", first, "--json"))
    assert [second] == [one for one, _ in await parked(observer)]
    assert {"discarded": 1} == answered(outbox("discard", "--yes", second, "--json"))
    assert [] == await parked(observer)
    lag = answered(outbox("lag", "--json"))
    assert (5, 0) == (lag["pending"], lag["parked"])
    assert 0 < lag["lag_s"] < 60
    assert "5 wait, the oldest for" in outbox("lag").stdout


async def test_retries_everything(outbox, events, observer) -> None:
    """`retry --all` sends every parked event again."""
    assert {"retried": 2} == answered(outbox("retry", "--all", "--json"))
    assert [] == await parked(observer)


async def test_discards_only_when_told_twice(outbox, events, observer) -> None:
    """`discard` asks before it deletes for good; without a yes nothing is deleted, and it fails."""
    (first, second), _ = events
    refused = outbox("discard", first, stdin="n\n")
    assert 1 == refused.returncode
    assert 2 == len(await parked(observer))
    assert 0 == outbox("discard", first, stdin="y\n").returncode
    assert [second] == [one for one, _ in await parked(observer)]


async def test_usage(outbox) -> None:
    """What can't be meant exits with 2: no ids, ids beside --all, what is no id."""
    one = str(uuid.uuid4())
    for arguments in (
        ("retry",),
        ("retry", one, "--all"),
        ("retry", "soon"),
        ("show", "soon"),
        ("discard",),
        ("show",),
    ):
        assert 2 == (await asyncio.to_thread(outbox, *arguments)).returncode, arguments
