"""The status that a call ended with, and the details of google.rpc that it carries, read and written.

The details' messages (google.rpc Status, ErrorInfo, RetryInfo and BadRequest, of googleapis' google/rpc/status.proto
and error_details.proto) are described again here, as far as they are needed, and in a pool of their own: the client
needs no other library for them, and one that registers the originals in protobuf's default pool finds them free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

DOMAIN = "decideonce"

DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"

_TYPE_URL = "type.googleapis.com/google.rpc."

# Each field's number is its place. What is repeated stands in brackets; a map is, on the wire, a list of its entries.
_MESSAGES: dict[str, dict[str, str]] = {
    "Status": {"code": "int32", "message": "string", "details": "[Any]"},
    "Any": {"type_url": "string", "value": "bytes"},
    "ErrorInfo": {"reason": "string", "domain": "string", "metadata": "[Entry]"},
    "Entry": {"key": "string", "value": "string"},
    "RetryInfo": {"retry_delay": "Duration"},
    "Duration": {"seconds": "int64", "nanos": "int32"},
    "BadRequest": {"field_violations": "[FieldViolation]"},
    "FieldViolation": {"field": "string", "description": "string"},
}


def _described() -> dict[str, Any]:
    package = "decideonce.rpc"
    file = descriptor_pb2.FileDescriptorProto(name="decideonce/rpc.proto", package=package, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto.Type
    labels = descriptor_pb2.FieldDescriptorProto.Label
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for number, (field_name, kind) in enumerate(fields.items(), 1):
            label = labels.LABEL_REPEATED if kind.startswith("[") else labels.LABEL_OPTIONAL
            kind_name = kind.strip("[]")
            added = described.field.add(name=field_name, number=number, label=label)
            if kind_name in _MESSAGES:
                added.type = kinds.TYPE_MESSAGE
                added.type_name = f".{package}.{kind_name}"
            else:
                added.type = kinds.Value(f"TYPE_{kind_name.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in _MESSAGES
    }


_CLASSES = _described()


@dataclass(frozen=True, slots=True)
class Violation:
    """A field and the rule that it breaks."""

    field: str
    rule: str


@dataclass(frozen=True, slots=True)
class CallStatus:
    """How a call ended that wasn't answered.

    `reason` is the name of an ErrorReason without its prefix, "" where the service didn't say one: then gRPC, or
    something between, speaks. `retry_delay_s` is what RetryInfo says, `pushback` the trailer as it came (gRFC A6).
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()
    retry_delay_s: float | None = None
    pushback: str | None = None


def read_status(
    code: grpc.StatusCode, message_text: str | None, trailers: Iterable[tuple[str, str | bytes]] | None
) -> CallStatus:
    """Read how a call ended. Details that can't be read are as none: anybody between may have put them there."""
    found: dict[str, Any] = dict(trailers or ())
    details = {}
    try:
        status = _CLASSES["Status"].FromString(found.get(DETAILS_TRAILER, b""))
        for packed in status.details:
            name = packed.type_url.removeprefix(_TYPE_URL)
            if name in ("ErrorInfo", "RetryInfo", "BadRequest"):
                details[name] = _CLASSES[name].FromString(packed.value)
    except message.DecodeError:
        details = {}
    info = details.get("ErrorInfo")
    if info is not None and info.domain != DOMAIN:
        info = None
    delay = details["RetryInfo"].retry_delay if "RetryInfo" in details else None
    bad = details.get("BadRequest")
    pushback = found.get(PUSHBACK_TRAILER)
    return CallStatus(
        code=code,
        message=message_text or "",
        reason="" if info is None else info.reason,
        metadata={} if info is None else {entry.key: entry.value for entry in info.metadata},
        violations=() if bad is None else tuple(Violation(v.field, v.description) for v in bad.field_violations),
        retry_delay_s=None if delay is None else max(0.0, delay.seconds + delay.nanos / 1e9),
        pushback=pushback if pushback is None else str(pushback),
    )


def write_trailers(status: CallStatus) -> tuple[tuple[str, str | bytes], ...]:
    """Write what a service adds to a status: the details, and the pushback where it has one."""
    code: tuple[int, str] = status.code.value
    written = _CLASSES["Status"](code=code[0], message=status.message)

    def add(name: str, **fields: Any) -> None:
        detail = _CLASSES[name](**fields)
        written.details.add(type_url=_TYPE_URL + name, value=detail.SerializeToString())

    if status.reason:
        metadata = [{"key": key, "value": value} for key, value in status.metadata.items()]
        add("ErrorInfo", reason=status.reason, domain=DOMAIN, metadata=metadata)
    if status.retry_delay_s is not None:
        seconds, nanos = divmod(round(status.retry_delay_s * 1e9), 10**9)
        add("RetryInfo", retry_delay={"seconds": seconds, "nanos": nanos})
    if status.violations:
        add("BadRequest", field_violations=[{"field": v.field, "description": v.rule} for v in status.violations])
    trailers: list[tuple[str, str | bytes]] = [(DETAILS_TRAILER, written.SerializeToString())]
    if status.pushback is not None:
        trailers.append((PUSHBACK_TRAILER, status.pushback))
    return tuple(trailers)
