"""Events as a consumer gets them: from a message of Kafka or NATS to a typed event.

Messages are CloudEvents 1.0 in binary mode. Attributes are headers, `ce_id` in Kafka and `ce-id` in NATS, and the
payload is a `decideonce.v1.DecisionEvent`, as protobuf or as protobuf's JSON. Attributes only repeat what the payload
says, so the two must agree.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import unquote
from uuid import UUID

from google.protobuf import json_format, message, timestamp_pb2

from decideonce.keys import OPERATION_KEY_RULE, is_operation_key
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1 import events_pb2

RECORDED_EVENT_TYPE = "decideonce.decision.v1"

PROTOBUF = "application/protobuf"
JSON = "application/json"

KAFKA_PREFIX = "ce_"
NATS_PREFIX = "ce-"

# W3C Trace Context, level 1.
_TRACEPARENT = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)

_UUID_VERSION = 7


class MalformedEvent(ValueError):
    """A message isn't an event of decideonce, and no redelivery mends it.

    `field` is the header or the field of the payload that is at fault, `rule` what holds for it. Nothing of the message
    is in the text.
    """

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(field, rule)
        self.field = field
        self.rule = rule

    def __str__(self) -> str:
        return f"{self.field} {self.rule}"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: a decision became final, or its policy asked for an effect.

    `id` is a UUIDv7, the same in every delivery. `time` is when the decision was made, by the service's Postgres, in
    UTC with microseconds. `decision_id` is the same for all events of a decision. `traceparent` (W3C Trace Context) is
    None where the message has none that is well-formed. `body` is the payload; it isn't to be changed.
    """

    id: UUID
    type: str
    tenant: str
    operation: str
    operation_key: str
    time: datetime
    decision_id: UUID
    traceparent: str | None
    body: events_pb2.DecisionEvent = field(hash=False)

    @property
    def recorded(self) -> events_pb2.DecisionRecorded | None:
        """What was recorded, where the event says that a decision became final."""
        return self.body.recorded if self.body.HasField("recorded") else None

    @property
    def effect(self) -> events_pb2.Effect | None:
        """What is to be done, where the event is an effect; its kind is the event's `type`."""
        return self.body.effect if self.body.HasField("effect") else None


class KafkaMessage(Protocol):
    """What is needed of a message; confluent-kafka's `Message` has it."""

    def headers(self) -> Any:
        """Give pairs of a name and bytes, or None."""

    def value(self) -> Any:
        """Give the payload, or None."""


class NatsMessage(Protocol):
    """What is needed of a message; nats-py's `Msg` has it."""

    headers: Any
    data: bytes


def from_kafka(message: KafkaMessage) -> Event:
    """Decode a message of Kafka, such as confluent-kafka's; look at its `error()` before.

    Raises MalformedEvent.
    """
    return from_headers(message.headers() or (), message.value(), KAFKA_PREFIX)


def from_nats(message: NatsMessage) -> Event:
    """Decode a message of NATS, such as nats-py's.

    Raises MalformedEvent.
    """
    headers = message.headers or {}
    # CloudEvents' NATS binding has values percent-encoded.
    return from_headers(((name, unquote(value)) for name, value in headers.items()), message.data, NATS_PREFIX)


def from_headers(headers: Iterable[tuple[str, str | bytes | None]], payload: bytes | None, prefix: str) -> Event:
    """Decode a message of any transport: its headers in any case, and the prefix that its attributes have.

    Raises MalformedEvent.
    """
    texts = _texts(headers)
    _require(texts, f"{prefix}specversion", "1.0", "must be 1.0")
    # CloudEvents' bindings differ: Kafka's has a header of its own for the payload's type, NATS' an attribute like any.
    content_type = texts.get(f"{prefix}datacontenttype") or texts.get("content-type")
    event = from_payload(payload, content_type, texts.get(f"{prefix}traceparent"))
    for name, value, rule in (
        ("id", event.body.event_id, "must be the payload's event_id"),
        (
            "source",
            f"/decideonce/{event.tenant}/{event.operation}",
            "must be /decideonce/<tenant>/<operation> of the payload",
        ),
        ("type", event.type, "must be the payload's type"),
        ("subject", event.operation_key, "must be the payload's operation_key"),
        ("partitionkey", f"{event.tenant}/{event.operation_key}", "must be the payload's tenant and operation_key"),
    ):
        _require(texts, f"{prefix}{name}", value, rule)
    if _timestamp(texts.get(f"{prefix}time")) != event.body.event_time:
        raise MalformedEvent(f"{prefix}time", "must be the payload's event_time, as RFC 3339 has it")
    return event


def from_payload(payload: bytes | None, content_type: str | None = PROTOBUF, traceparent: str | None = None) -> Event:
    """Decode a payload alone, for pipelines that carry no attributes: the payload has all of them but `traceparent`.

    Raises MalformedEvent.
    """
    body = _body(payload, content_type)
    provenance = body.provenance
    _check(body.type, "type", "must not be empty")
    _check(provenance.tenant, "provenance.tenant", "must not be empty")
    _check(provenance.operation, "provenance.operation", "must not be empty")
    _check(is_operation_key(provenance.operation_key), "provenance.operation_key", OPERATION_KEY_RULE)
    _check_happening(body)
    return Event(
        id=_uuid(body.event_id, "event_id"),
        type=body.type,
        tenant=provenance.tenant,
        operation=provenance.operation,
        operation_key=provenance.operation_key,
        time=_time(body),
        decision_id=_uuid(provenance.decision_id, "provenance.decision_id"),
        traceparent=traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None,
        body=body,
    )


def _texts(headers: Iterable[tuple[str, str | bytes | None]]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, value in headers:
        known = name.lower()
        if known != "content-type" and not known.startswith((KAFKA_PREFIX, NATS_PREFIX)):
            continue
        _check(known not in texts, known, "must be there once")
        try:
            texts[known] = value.decode() if isinstance(value, bytes) else value or ""
        except UnicodeDecodeError:
            texts[known] = ""
        _check(texts[known], known, "must be text in UTF-8")
    return texts


def _require(texts: dict[str, str], name: str, value: str, rule: str) -> None:
    _check(texts.get(name) == value, name, rule)


def _check(holds: object, name: str, rule: str) -> None:
    if not holds:
        raise MalformedEvent(name, rule)


def _body(payload: bytes | None, content_type: str | None) -> events_pb2.DecisionEvent:
    media_type = (content_type or "").partition(";")[0].strip().lower()
    _check(media_type in (PROTOBUF, JSON), "content-type", f"must be {PROTOBUF} or {JSON}")
    body = events_pb2.DecisionEvent()
    understood = True
    try:
        if media_type == PROTOBUF:
            body.ParseFromString(payload or b"")
        else:
            json_format.Parse(payload or b"", body, ignore_unknown_fields=True)
    except (message.DecodeError, json_format.ParseError, ValueError, RecursionError):
        understood = False
    # Raised out here, where the parser's own error, which may quote the payload, is no context of it.
    _check(understood, "payload", f"must be a decideonce.v1.DecisionEvent as {media_type}")
    return body


def _check_happening(body: events_pb2.DecisionEvent) -> None:
    """Check what happened. A kind that this version doesn't know is refused: skipping it would lose it."""
    _check(body.WhichOneof("body") is not None, "body", "must be recorded or effect")
    is_recorded = body.HasField("recorded")
    of_recorded = f"must be {RECORDED_EVENT_TYPE} with recorded, and another with effect"
    _check(is_recorded == (body.type == RECORDED_EVENT_TYPE), "type", of_recorded)
    if is_recorded:
        recorded = body.recorded
        has = (recorded.HasField("decision"), recorded.HasField("failure"))
        succeeded = recorded.status == wire.DECISION_STATUS_SUCCEEDED and has == (True, False)
        failed = recorded.status == wire.DECISION_STATUS_FAILED_FINAL and has == (False, True)
        _check(succeeded or failed, "recorded", "must be SUCCEEDED with a decision, or FAILED_FINAL with a failure")


def _uuid(text: str, name: str) -> UUID:
    rule = "must be a UUIDv7 in its canonical text (RFC 9562)"
    try:
        uuid = UUID(text)
    except ValueError:
        raise MalformedEvent(name, rule) from None
    _check(uuid.version == _UUID_VERSION and str(uuid) == text, name, rule)
    return uuid


def _time(body: events_pb2.DecisionEvent) -> datetime:
    _check(body.HasField("event_time"), "event_time", "must be there")
    try:
        return body.event_time.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise MalformedEvent("event_time", "must be a time of the years 1 to 9999") from None


def _timestamp(text: str | None) -> timestamp_pb2.Timestamp | None:
    timestamp = timestamp_pb2.Timestamp()
    try:
        timestamp.FromJsonString(text or "")
    except ValueError:
        return None
    return timestamp
