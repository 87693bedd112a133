"""What an event looks like as a CloudEvent."""

import json
import uuid

import pytest
from google.protobuf.message import DecodeError

from decideonce.v1 import events_pb2
from decideonce_server.cloudevent import PayloadFormat, binary_event, json_event, message_of
from decideonce_server.outbox import Event

EVENT_ID = uuid.UUID("019e0000-0000-7000-8000-000000000001")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def event(tenant: str = "acme", time: str = "2026-11-30T08:15:30.120Z", traceparent: str | None = None) -> Event:
    payload = events_pb2.DecisionEvent(event_id=str(EVENT_ID), type="decideonce.decision.v1")
    payload.event_time.FromJsonString(time)
    payload.recorded.decision.outcome = "APPROVE"
    return Event(
        EVENT_ID,
        7,
        tenant,
        "credit.approve-loan",
        "order~2026:0000001",
        "decideonce.decision.v1",
        payload.SerializeToString(),
        "decisions",
        traceparent,
    )


def test_attributes_are_those_of_the_event() -> None:
    """Each attribute comes from the event, and the payload is the recorded bytes."""
    message = message_of(event(traceparent=TRACEPARENT))
    expected = {
        "id": "019e0000-0000-7000-8000-000000000001",
        "source": "/decideonce/acme/credit.approve-loan",
        "specversion": "1.0",
        "type": "decideonce.decision.v1",
        "time": "2026-11-30T08:15:30.120000Z",
        "subject": "order~2026:0000001",
        "partitionkey": "acme/order~2026:0000001",
        "datacontenttype": "application/protobuf",
        "traceparent": TRACEPARENT,
    }
    assert expected == message.attributes
    assert (EVENT_ID, "decisions", "acme/order~2026:0000001", event().payload) == (
        message.id,
        message.topic,
        message.key,
        message.payload,
    )


def test_traceparent_may_be_absent() -> None:
    """Without a trace there is no such attribute."""
    assert "traceparent" not in message_of(event()).attributes


@pytest.mark.parametrize(
    ("tenant", "source"),
    [
        ("acme:eu", "/decideonce/acme:eu/credit.approve-loan"),
        ("a/b c", "/decideonce/a%2Fb%20c/credit.approve-loan"),
        ("zoë", "/decideonce/zo%C3%AB/credit.approve-loan"),
    ],
)
def test_source_is_a_uri_reference(tenant: str, source: str) -> None:
    """What a URI can't hold is percent-encoded, and a tenant is always one segment."""
    assert source == message_of(event(tenant)).attributes["source"]


@pytest.mark.parametrize(
    ("time", "written"),
    [
        ("2026-11-30T08:15:30Z", "2026-11-30T08:15:30Z"),
        ("2026-11-30T08:15:30.000001Z", "2026-11-30T08:15:30.000001Z"),
        ("2026-11-30T17:15:30+09:00", "2026-11-30T08:15:30Z"),
    ],
)
def test_time_is_rfc3339_in_utc(time: str, written: str) -> None:
    """The time is the event's, to the microsecond."""
    assert written == message_of(event(time=time)).attributes["time"]


def test_json_payload_is_protobufs_mapping() -> None:
    """With JSON the payload is what protobuf's JSON mapping makes of it, and says so."""
    message = message_of(event(), PayloadFormat.JSON)
    expected = {
        "eventId": "019e0000-0000-7000-8000-000000000001",
        "type": "decideonce.decision.v1",
        "eventTime": "2026-11-30T08:15:30.120Z",
        "recorded": {"decision": {"outcome": "APPROVE"}},
    }
    assert expected == json.loads(message.payload)
    assert "application/json" == message.attributes["datacontenttype"]


def test_library_takes_every_message() -> None:
    """The CloudEvents library finds the attributes valid, in both forms."""
    message = message_of(event(traceparent=TRACEPARENT), PayloadFormat.JSON)
    assert message.payload == binary_event(message).get_data()
    assert json.loads(message.payload) == json_event(message).get_data()


def test_payload_of_something_else_is_an_error() -> None:
    """A payload that isn't a DecisionEvent makes no message."""
    broken = Event(EVENT_ID, 7, "acme", "credit.approve-loan", "order~2026:0000001", "any", b"\xff\xff", "decisions")
    with pytest.raises(DecodeError):
        message_of(broken)
