"""From a Decide call to a consumer: topics, payloads, traces, and retention that waits for what is untold."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
from google.protobuf import json_format

from brokers import Nats, Received
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1 import events_pb2
from decideonce_server.catalog import TOPIC_RULE
from harness import ServiceProcess, make_token, new_key, recorded, refused, write_catalog
from processes import until
from publishing import TOPIC, count, decoded, is_empty, outbox_command, parked
from sample_events import TRACEPARENT
from stage import ALONE, evaluations

LOANS, OTHERS, BRIEF, MISDIRECTED = "loan.decide", "other.decide", "brief.decide", "misdirected.decide"
LOANS_TOPIC = "credit.loan-decisions"
MISSING_TOPIC = "test.missing"
ECHO = {"policy": "echo", "time_budget": "20s", "default_wait": "20s"}
SHORT = {"retention": "1s", "tombstone_retention": "60s"}
OPERATIONS = {
    LOANS: ECHO | {"topic": LOANS_TOPIC, "lease": "1s"},
    OTHERS: ECHO,
    BRIEF: ECHO | SHORT,
    MISDIRECTED: ECHO | SHORT | {"topic": MISSING_TOPIC},
}
STATE = "SELECT state FROM ledger WHERE operation_key = $1"
EXPIRED = 5


@pytest.fixture
def nats() -> Iterator[Nats]:
    """Give a broker that has the topics of the catalog, but for one."""
    broker = Nats()
    try:
        for name in (TOPIC, LOANS_TOPIC):
            broker.make_topic(name)
        yield broker
    finally:
        broker.close()


@pytest.fixture
def serve(start_service: Callable[..., ServiceProcess], tmp_path: Path) -> Callable[..., ServiceProcess]:
    """Give a function that serves the catalog; nobody publishes, unless told to."""
    catalog = write_catalog(tmp_path / "catalog", OPERATIONS, {"echo": "echo_policy:decide"})
    return lambda *arguments: start_service("--catalog", str(catalog), *arguments)


async def state(observer: asyncpg.Connection, key: str) -> int:
    """Give the recorded state of a key."""
    return await observer.fetchval(STATE, key)


async def until_expired(observer: asyncpg.Connection, key: str) -> None:
    """Wait until a key's answer is past its retention, by Postgres's clock."""
    over = "SELECT replayable_until <= clock_timestamp() FROM ledger WHERE operation_key = $1"
    await until(lambda: observer.fetchval(over, key))


async def until_tombstoned(observer: asyncpg.Connection, key: str) -> None:
    """Wait until a key's answer is purged."""

    async def is_so() -> bool:
        return EXPIRED == await state(observer, key)

    await until(is_so)


@pytest.mark.parametrize("payload_format", ["protobuf", "json"])
async def test_a_decision_and_its_effects_arrive(database_url, nats, serve, connect_caller, payload_format) -> None:
    """The decision as it was answered, and each effect in its order, arrive at the operation's topic in either format.

    With them comes the place of the call in its caller's trace.
    """
    service = serve("--events", nats.url, "--events-format", payload_format)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    caller.metadata.append(("traceparent", TRACEPARENT))
    key = new_key()
    effects = [{"type": f"loan.step-{n}", "payload": {"n": n, "who": "Zoë"}} for n in range(3)]
    answer = await caller.decide(LOANS, key, {"effects": effects, "echo": {"amount": "10.0"}})
    messages = await asyncio.to_thread(nats.read, LOANS_TOPIC, 4)
    first, *rest = [decoded(nats, message) for message in messages]
    assert recorded(answer) == (
        first.recorded.decision.SerializeToString(deterministic=True),
        first.body.provenance.SerializeToString(deterministic=True),
    )
    assert wire.DECISION_STATUS_SUCCEEDED == first.recorded.status
    assert effects == [
        {"type": event.type, "payload": json_format.MessageToDict(event.effect.payload)} for event in rest
    ]
    assert {(TRACEPARENT, "acme", LOANS, key)} == {
        (event.traceparent, event.tenant, event.operation, event.operation_key) for event in (first, *rest)
    }
    assert first.body == parsed(messages[0], payload_format)


def parsed(message: Received, payload_format: str) -> events_pb2.DecisionEvent:
    """Read a payload as a consumer without this client does."""
    if payload_format == "json":
        return json_format.Parse(message.payload, events_pb2.DecisionEvent())
    return events_pb2.DecisionEvent.FromString(message.payload)


async def test_topics_are_the_operations(database_url, observer, nats, serve, connect_caller) -> None:
    """An operation's events go to the topic in its contract, those of one that names none to the default."""
    caller = connect_caller(serve("--events", nats.url), await make_token(database_url, "acme"))
    for operation in (LOANS, OTHERS):
        await caller.decide(operation, new_key())
    for operation, topic in ((LOANS, LOANS_TOPIC), (OTHERS, TOPIC)):
        messages = await asyncio.to_thread(nats.read, topic, 1)
        assert [operation] == [decoded(nats, message).operation for message in messages]


def test_an_invalid_topic_is_refused(database_url, start_service, tmp_path) -> None:
    """A catalog whose topic no broker could have isn't published; the field and its rule are told."""
    catalog = write_catalog(
        tmp_path / "wrong", {LOANS: ECHO | {"topic": "credit loans"}}, {"echo": "echo_policy:decide"}
    )
    with pytest.raises(AssertionError) as failed:
        start_service("--catalog", str(catalog))
    assert f"operations/{LOANS}.yaml#/topic: {TOPIC_RULE}" in str(failed.value)


async def test_a_rescued_decision_keeps_its_trace(
    database_url, observer, nats, serve, connect_caller, publish, tmp_path
) -> None:
    """A decision that a rescuer finished after its server died has the trace of the call that began it."""
    service = serve(ALONE)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    caller.metadata.append(("traceparent", TRACEPARENT))
    key, source = new_key(), tmp_path / "source"
    facts = {"mark": "one.", "do": "need", "source": str(source), "fault": "sleep", "seconds": 100}
    call = asyncio.ensure_future(refused(caller.decide(LOANS, key, facts)))
    await until(lambda: evaluations(service, "one."))
    service.kill()
    await call
    source.touch()
    publish(nats.url)
    (message,) = await asyncio.to_thread(nats.read, LOANS_TOPIC, 1)
    event = decoded(nats, message)
    assert (TRACEPARENT, key, 2) == (event.traceparent, event.operation_key, event.body.provenance.attempt)


async def test_what_is_untold_outlasts_retention(database_url, observer, nats, serve, connect_caller, publish) -> None:
    """With no publisher for longer than retention the answer expires, is kept, and its events still go out.

    Only then is it purged.
    """
    service = serve("--housekeeping")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    untold, told = new_key(), new_key()
    facts = {"effects": [{"type": "brief.step", "payload": {}}]}
    for key in (untold, told):
        await caller.decide(BRIEF, key, facts)
    await observer.execute("DELETE FROM outbox WHERE operation_key = $1", told)
    await until_expired(observer, untold)
    await until_tombstoned(observer, told)
    assert wire.DECISION_STATUS_EXPIRED == (await caller.status(BRIEF, untold)).status
    assert "OPERATION_KEY_EXPIRED" == (await refused(caller.decide(BRIEF, untold, facts))).reason
    assert (wire.DECISION_STATUS_SUCCEEDED, 2) == (await state(observer, untold), await count(observer))
    publish(nats.url)
    messages = await asyncio.to_thread(nats.read, TOPIC, 2)
    assert [untold] * 2 == [decoded(nats, message).operation_key for message in messages]
    await until_tombstoned(observer, untold)
    assert await is_empty(observer)


async def test_a_parked_event_keeps_its_decision(database_url, observer, nats, serve, connect_caller) -> None:
    """A decision whose event is parked is not purged, however old, until the event is sent or discarded."""
    service = serve("--events", nats.url)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    stuck, told = new_key(), new_key()
    await caller.decide(MISDIRECTED, stuck)
    await until(lambda: parked(observer))
    await until_expired(observer, stuck)
    await caller.decide(BRIEF, told)
    await until_tombstoned(observer, told)
    assert wire.DECISION_STATUS_SUCCEEDED == await state(observer, stuck)
    ((event_id, reason),) = await parked(observer)
    assert "TOPIC_NOT_FOUND" == reason
    discarded = await asyncio.to_thread(outbox_command, database_url, "discard", "--yes", event_id)
    assert (0, "discarded 1\n") == (discarded.returncode, discarded.stdout)
    await until_tombstoned(observer, stuck)
