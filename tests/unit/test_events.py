"""The decoder of events, on messages of confluent-kafka and nats-py."""

import traceback
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import Message
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg

from decideonce import events
from decideonce.events import JSON, PROTOBUF, MalformedEvent
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1 import events_pb2
from sample_events import EFFECT_TYPE, TRACEPARENT, attributes, body, payload

MOMENT = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
KEY = "0123456789abcdef"
SECRET = "the-applicant-owes-everybody"


def from_kafka(headers: dict[str, Any], data: bytes | None) -> events.Event:
    pairs = [(name, value.encode() if isinstance(value, str) else value) for name, value in headers.items()]
    return events.from_kafka(Message(topic="decisions", value=data, headers=pairs))


def from_nats(headers: dict[str, Any], data: bytes | None) -> events.Event:
    return events.from_nats(Msg(None, data=data or b"", headers=headers))


TRANSPORTS = {"ce_": from_kafka, "ce-": from_nats}


@pytest.mark.parametrize("content_type", [PROTOBUF, JSON, "Application/JSON; charset=utf-8"])
@pytest.mark.parametrize("prefix", TRANSPORTS)
def test_recorded_decision(prefix: str, content_type: str) -> None:
    """A recorded decision is read from both transports and both formats."""
    made = body(MOMENT, KEY)
    data = payload(made, JSON if "json" in content_type.lower() else PROTOBUF)
    event = TRANSPORTS[prefix](attributes(made, prefix, content_type), data)
    expected = events.Event(
        id=uuid.UUID(made.event_id),
        type="decideonce.decision.v1",
        tenant="acme",
        operation="credit.approve-loan",
        operation_key=KEY,
        time=MOMENT,
        decision_id=uuid.UUID(made.provenance.decision_id),
        traceparent=TRACEPARENT,
        body=made,
    )
    assert expected == event
    assert {expected} == {event}
    assert event.effect is None
    assert "approved" == event.recorded.decision.outcome


@pytest.mark.parametrize("prefix", TRANSPORTS)
def test_effect(prefix: str) -> None:
    """An effect is read with its own type and its payload."""
    made = body(MOMENT, KEY, effect={"amount": "100.00"})
    event = TRANSPORTS[prefix](attributes(made, prefix, PROTOBUF), payload(made, PROTOBUF))
    assert (EFFECT_TYPE, "100.00") == (event.type, event.effect.payload["amount"])
    assert event.recorded is None


@pytest.mark.parametrize("prefix", TRANSPORTS)
def test_names_of_headers_have_any_case(prefix: str) -> None:
    """Headers are known by their names in any case, and others' are left alone."""
    made = body(MOMENT, KEY)
    headers = {name.title(): value for name, value in attributes(made, prefix, PROTOBUF).items()}
    event = TRANSPORTS[prefix](headers | {"Nats-Msg-Id": made.event_id, "other": ""}, payload(made, PROTOBUF))
    assert made.event_id == str(event.id)


def test_values_of_nats_are_percent_encoded() -> None:
    """CloudEvents' binding to NATS lets a sender encode characters of values."""
    made = body(MOMENT, KEY)
    headers = attributes(made, "ce-", PROTOBUF) | {"ce-subject": "%30" + KEY[1:]}
    assert KEY == from_nats(headers, payload(made, PROTOBUF)).operation_key


def test_content_type_of_nats_without_prefix() -> None:
    """Senders that have the payload's type as Kafka has it are understood on NATS, too."""
    made = body(MOMENT, KEY)
    headers = attributes(made, "ce-", JSON)
    headers["Content-Type"] = headers.pop("ce-datacontenttype")
    assert KEY == from_nats(headers, payload(made, JSON)).operation_key


@pytest.mark.parametrize(
    "traceparent",
    ["", "no", f"ff{TRACEPARENT[2:]}", TRACEPARENT.upper(), TRACEPARENT.replace("b7ad6b7169203331", "0" * 16)],
)
def test_bad_traceparent_is_none(traceparent: str) -> None:
    """A trace that can't be followed stops no event: W3C Trace Context has it ignored."""
    made = body(MOMENT, KEY)
    assert events.from_payload(payload(made, PROTOBUF), PROTOBUF, traceparent).traceparent is None


def test_payload_alone() -> None:
    """Without attributes the payload gives the same event, but for its trace."""
    made = body(MOMENT, KEY)
    headers = attributes(made, "ce_", PROTOBUF)
    del headers["ce_traceparent"]
    assert from_kafka(headers, payload(made, PROTOBUF)) == events.from_payload(payload(made, PROTOBUF))


def test_later_fields_are_no_fault() -> None:
    """Fields that a newer service adds don't stop an older consumer."""
    made = body(MOMENT, KEY)
    newer = payload(made, PROTOBUF) + bytes.fromhex("a2060161")
    as_json = json_format.MessageToJson(made)[:-2] + ',"later": {"x": 1}}'
    expected = events.from_payload(payload(made, PROTOBUF))
    assert expected.id == events.from_payload(newer).id
    assert expected == events.from_payload(as_json.encode(), JSON)


@pytest.mark.parametrize("prefix", TRANSPORTS)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("specversion", [None, "0.3", ""]),
        ("id", [None, "", str(uuid.uuid4()), SECRET]),
        ("source", [None, "/decideonce/acme/credit.other", "/decideonce/other/credit.approve-loan"]),
        ("type", [None, "loan.offer-requested"]),
        ("subject", [None, "0123456789abcdeg"]),
        ("partitionkey", [None, f"other/{KEY}", KEY]),
        ("time", [None, "2026-03-01T12:00:00.123457Z", "2026-03-01T12:00:00.123456", SECRET]),
    ],
)
def test_attributes_that_disagree(prefix: str, name: str, wrong: list[str | None]) -> None:
    """An attribute that is absent or isn't what the payload says is a fault that names the header."""
    made = body(MOMENT, KEY)
    for value in wrong:
        headers = attributes(made, prefix, PROTOBUF) | {f"{prefix}{name}": value}
        if value is None:
            del headers[f"{prefix}{name}"]
        with pytest.raises(MalformedEvent) as caught:
            TRANSPORTS[prefix](headers, payload(made, PROTOBUF))
        assert f"{prefix}{name}" == caught.value.field
        assert str(caught.value).startswith(f"{prefix}{name} must be ")
        assert SECRET not in str(caught.value)


def test_time_with_another_offset_agrees() -> None:
    """A time is compared as a time: RFC 3339 has several spellings of it."""
    made = body(MOMENT, KEY)
    headers = attributes(made, "ce_", PROTOBUF) | {"ce_time": "2026-03-01T21:00:00.123456000+09:00"}
    assert from_kafka(headers, payload(made, PROTOBUF)).time == MOMENT


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/cloudevents+json"])
def test_other_content_types(content_type: str | None) -> None:
    """Payloads of another type are refused unread."""
    with pytest.raises(MalformedEvent) as caught:
        events.from_payload(payload(body(MOMENT, KEY), PROTOBUF), content_type)
    assert "content-type must be application/protobuf or application/json" == str(caught.value)


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ([("ce_id", b"1"), ("CE_ID", b"1")], "ce_id"),
        ([("ce_id", b"\xff")], "ce_id"),
        ([("ce_id", None)], "ce_id"),
        ([], "ce_specversion"),
        (None, "ce_specversion"),
    ],
)
def test_headers_that_are_none(headers: Any, field: str) -> None:
    """Headers that are there twice, not at all, or aren't text are a fault."""
    with pytest.raises(MalformedEvent) as caught:
        events.from_kafka(Message(topic="decisions", value=b"", headers=headers))
    assert field == caught.value.field


def test_nats_message_without_headers() -> None:
    """A message of NATS that has no headers at all is a fault like any."""
    with pytest.raises(MalformedEvent) as caught:
        events.from_nats(Msg(None))
    assert "ce-specversion must be 1.0" == str(caught.value)


@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        (PROTOBUF, b"\xff\xff"),
        (PROTOBUF, b"\x0a\x02\xff\xff"),
        (JSON, SECRET.encode()),
        (JSON, b""),
        (JSON, b"1"),
        (JSON, b"null"),
        (JSON, b'{"eventId": {"a": 1}}'),
        (JSON, b'{"eventTime": "' + SECRET.encode() + b'"}'),
        (JSON, b'{"eventId": "a", "eventId": "b"}'),
        (JSON, b"\xff\xfe"),
        (JSON, b'{"a":' * 100_000),
    ],
)
def test_payloads_that_cannot_be_parsed(content_type: str, data: bytes) -> None:
    """A payload that can't be parsed is a fault, and nothing of it is in the error or in what led to it."""
    with pytest.raises(MalformedEvent) as caught:
        events.from_payload(data, content_type)
    assert f"payload must be a decideonce.v1.DecisionEvent as {content_type}" == str(caught.value)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in "".join(traceback.format_exception_only(error))
        error = error.__context__


def changed(**fields: Any) -> events_pb2.DecisionEvent:
    made = body(MOMENT, KEY)
    for path, value in fields.items():
        *parents, name = path.split("__")
        target = made
        for parent in parents:
            target = getattr(target, parent)
        if value is None:
            target.ClearField(name)
        else:
            setattr(target, name, value)
    return made


@pytest.mark.parametrize(
    ("field", "made"),
    [
        ("event_id", changed(event_id="")),
        ("event_id", changed(event_id=str(uuid.uuid4()))),
        ("event_id", changed(event_id=body(MOMENT).event_id.upper())),
        ("event_id", changed(event_id=SECRET)),
        ("type", changed(type="")),
        ("type", changed(type="loan.offer-requested")),
        ("event_time", changed(event_time=None)),
        ("event_time", changed(event_time__seconds=1 << 60)),
        ("event_time", changed(event_time__nanos=-1)),
        ("provenance.tenant", changed(provenance=None)),
        ("provenance.tenant", changed(provenance__tenant="")),
        ("provenance.operation", changed(provenance__operation="")),
        ("provenance.operation_key", changed(provenance__operation_key="short")),
        ("provenance.decision_id", changed(provenance__decision_id=str(uuid.uuid4()))),
        ("body", changed(recorded=None)),
        ("recorded", changed(recorded__status=wire.DECISION_STATUS_PROCESSING)),
        ("recorded", changed(recorded__status=wire.DECISION_STATUS_FAILED_FINAL)),
        ("recorded", changed(recorded__decision=None)),
        ("recorded", changed(recorded__failure__reason="POLICY_FAILED")),
    ],
)
def test_payloads_that_are_no_event(field: str, made: events_pb2.DecisionEvent) -> None:
    """A payload without what every event has is a fault that names the field."""
    with pytest.raises(MalformedEvent) as caught:
        events.from_payload(payload(made, PROTOBUF))
    assert field == caught.value.field
    assert SECRET not in str(caught.value)


def test_effect_of_the_services_own_type() -> None:
    """An effect can't pass for a recorded decision."""
    made = body(MOMENT, KEY, effect={})
    made.type = events.RECORDED_EVENT_TYPE
    with pytest.raises(MalformedEvent) as caught:
        events.from_payload(payload(made, PROTOBUF))
    assert "type" == caught.value.field


def test_failure_is_recorded_too() -> None:
    """A decision that failed for good is an event like any."""
    failed = {"status": wire.DECISION_STATUS_FAILED_FINAL, "decision": None, "failure__reason": "POLICY_FAILED"}
    made = changed(**{f"recorded__{name}": value for name, value in failed.items()})
    assert "POLICY_FAILED" == events.from_payload(payload(made, PROTOBUF)).recorded.failure.reason


@given(data=st.binary(max_size=200), content_type=st.sampled_from([PROTOBUF, JSON]))
def test_any_payload_is_an_event_or_malformed(data: bytes, content_type: str) -> None:
    """No payload leads to another error."""
    with pytest.raises(MalformedEvent):
        events.from_payload(data, content_type)


@given(cut=st.integers(0, 300), content_type=st.sampled_from([PROTOBUF, JSON]), byte=st.integers(0, 255))
def test_any_changed_byte_is_an_event_or_malformed(cut: int, content_type: str, byte: int) -> None:
    """An event with a byte changed is an event or malformed."""
    data = bytearray(payload(body(MOMENT, KEY), content_type))
    data[cut % len(data)] = byte
    try:
        event = events.from_payload(bytes(data), content_type)
    except MalformedEvent:
        return
    assert timedelta(0) == event.time.utcoffset()
