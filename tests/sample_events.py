"""Events as the service makes them, and the messages that they travel in."""

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf import json_format

from decideonce import events
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1 import events_pb2
from harness import new_key, struct

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EFFECT_TYPE = "loan.offer-requested"


def uuid7_at(moment: datetime) -> uuid.UUID:
    """Make a UUIDv7 of a moment."""
    milliseconds = int(moment.timestamp() * 1000)
    rest = uuid.uuid4().int & ((1 << 80) - 1)
    return uuid.UUID(int=milliseconds << 80 | rest & ~(0xF << 76) | 7 << 76)


def body(
    moment: datetime | None = None, key: str | None = None, effect: dict[str, Any] | None = None
) -> events_pb2.DecisionEvent:
    """Make an event's payload: an effect where there is one, or else a decision that was recorded."""
    moment = moment or datetime.now(UTC)
    made = events_pb2.DecisionEvent(
        event_id=str(uuid7_at(moment)),
        type=events.RECORDED_EVENT_TYPE if effect is None else EFFECT_TYPE,
        provenance=wire.Provenance(
            decision_id=str(uuid7_at(moment)),
            tenant="acme",
            operation="credit.approve-loan",
            operation_key=key or new_key(),
        ),
    )
    made.event_time.FromDatetime(moment)
    made.provenance.evaluate_time.CopyFrom(made.event_time)
    if effect is None:
        made.recorded.status = wire.DECISION_STATUS_SUCCEEDED
        made.recorded.decision.outcome = "approved"
    else:
        made.effect.payload.CopyFrom(struct(effect))
    return made


def aged(age: timedelta) -> events.Event:
    """Make an event that is this old."""
    return events.from_payload(body(datetime.now(UTC) - age).SerializeToString())


def attributes(made: events_pb2.DecisionEvent, prefix: str, content_type: str) -> dict[str, str]:
    """Give the headers of an event."""
    provenance = made.provenance
    return {
        f"{prefix}specversion": "1.0",
        f"{prefix}id": made.event_id,
        f"{prefix}source": f"/decideonce/{provenance.tenant}/{provenance.operation}",
        f"{prefix}type": made.type,
        f"{prefix}time": made.event_time.ToJsonString(),
        f"{prefix}subject": provenance.operation_key,
        f"{prefix}partitionkey": f"{provenance.tenant}/{provenance.operation_key}",
        f"{prefix}traceparent": TRACEPARENT,
        "content-type" if prefix == events.KAFKA_PREFIX else f"{prefix}datacontenttype": content_type,
    }


def payload(made: events_pb2.DecisionEvent, content_type: str) -> bytes:
    """Serialize a payload."""
    if content_type == events.JSON:
        return json_format.MessageToJson(made).encode()
    return made.SerializeToString(deterministic=True)
