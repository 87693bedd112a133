"""Events as CloudEvents 1.0."""

import json
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any
from urllib.parse import quote

from cloudevents.core.v1.event import CloudEvent
from google.protobuf import json_format

from decideonce.events import JSON, PROTOBUF
from decideonce.v1 import events_pb2
from decideonce_server.errors import utc_text
from decideonce_server.outbox import Event
from decideonce_server.sink import Message


class PayloadFormat(StrEnum):
    """How an event's DecisionEvent is written: as recorded, or in protobuf's JSON mapping."""

    PROTOBUF = "protobuf"
    JSON = "json"


CONTENT_TYPES = {PayloadFormat.PROTOBUF: PROTOBUF, PayloadFormat.JSON: JSON}


def message_of(event: Event, payload_format: PayloadFormat = PayloadFormat.PROTOBUF) -> Message:
    """Make the message that tells an event.

    Raises:
        google.protobuf.message.DecodeError: the payload isn't a DecisionEvent.
        ValueError, OverflowError: its time is none of the years 1 to 9999.
    """
    decision_event = events_pb2.DecisionEvent.FromString(event.payload)
    payload = event.payload
    if payload_format is PayloadFormat.JSON:
        payload = json_format.MessageToJson(decision_event, indent=None, ensure_ascii=False).encode()
    attributes = {
        "id": str(event.id),
        "source": f"/decideonce/{quote(event.tenant, safe=':')}/{quote(event.operation, safe=':')}",
        "specversion": "1.0",
        "type": event.type,
        "time": utc_text(decision_event.event_time.ToDatetime(tzinfo=UTC)),
        "subject": event.operation_key,
        "partitionkey": event.aggregate_id,
        "datacontenttype": CONTENT_TYPES[payload_format],
    }
    if event.traceparent is not None:
        attributes["traceparent"] = event.traceparent
    return Message(event.id, event.topic, event.aggregate_id, attributes, payload)


def binary_event(message: Message) -> CloudEvent:
    """Give a message as the CloudEvents library has it, with its data as bytes."""
    return CloudEvent(_attributes(message), message.payload)


def json_event(message: Message) -> CloudEvent:
    """Give a message as the CloudEvents library has it, with its data as a JSON value where it is JSON."""
    is_json = message.attributes["datacontenttype"] == CONTENT_TYPES[PayloadFormat.JSON]
    return CloudEvent(_attributes(message), json.loads(message.payload) if is_json else message.payload)


def _attributes(message: Message) -> dict[str, Any]:
    attributes: dict[str, Any] = dict(message.attributes)
    attributes["time"] = datetime.fromisoformat(attributes["time"])
    return attributes
