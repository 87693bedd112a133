"""Traces, through the OpenTelemetry API: one from the caller through reserve, evaluate and complete to the event.

Off until `begin`: then no span is made, and events carry on the caller's place in its trace as it came. No span has
facts, outputs, tokens or keys; a key is named as in logs.
"""

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from decideonce_server.logs import key_hash

TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

_FORMAT = TraceContextTextMapPropagator()
_OFF: AbstractContextManager[Span | None] = nullcontext()


class _Tracing:
    tracer: Tracer | None = None


def begin(tracer: Tracer | None) -> None:
    """Make spans with this tracer from now on; none with None."""
    _Tracing.tracer = tracer


def caller_traceparent(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Find the caller's place in its trace; one that is malformed counts as none (W3C Trace Context, 3.2.2)."""
    given = [value for name, value in metadata if name == "traceparent"]
    is_usable = len(given) == 1 and isinstance(given[0], str) and TRACEPARENT.fullmatch(given[0])
    return str(given[0]) if is_usable else None


def traceparent(otherwise: str | None) -> str | None:
    """Give the place in the trace that is reached, for others to carry on; `otherwise` where tracing is off."""
    if _Tracing.tracer is None:
        return otherwise
    carrier: dict[str, str] = {}
    _FORMAT.inject(carrier)
    return carrier.get("traceparent", otherwise)


def call_span(method: str, metadata: Iterable[tuple[str, str | bytes]]) -> AbstractContextManager[Span | None]:
    """Make the span of a call, below its caller's; None where tracing is off."""
    if _Tracing.tracer is None:
        return _OFF
    context = _context_of(caller_traceparent(metadata))
    return _Tracing.tracer.start_as_current_span(
        method.removeprefix("/"),
        context,
        SpanKind.SERVER,
        record_exception=False,
        set_status_on_exception=False,
    )


def attempt_span(
    parent: str | None, operation: str, operation_key: str, attempt: int
) -> AbstractContextManager[object]:
    """Make the span of an attempt, below the call that reserved the key, whoever makes the attempt.

    A call of another trace that makes it is linked.
    """
    if _Tracing.tracer is None:
        return _OFF
    context = _context_of(parent) if parent is not None else None
    current = trace.get_current_span().get_span_context()
    is_elsewhere = parent is not None and current.is_valid and f"{current.span_id:016x}" not in parent
    return _Tracing.tracer.start_as_current_span(
        "attempt",
        context,
        attributes=attributes_of(operation, operation_key) | {"decideonce.attempt": attempt},
        links=[Link(current)] if is_elsewhere else [],
        record_exception=False,
        set_status_on_exception=False,
    )


def phase_span(name: str) -> AbstractContextManager[object]:
    """Make the span of a part of what the current one does."""
    if _Tracing.tracer is None:
        return _OFF
    return _Tracing.tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False)


def attributes_of(operation: str, operation_key: str) -> dict[str, str | int]:
    """Say in a span what it is about."""
    return {"decideonce.operation": operation, "decideonce.key": key_hash(operation_key)}


def _context_of(parent: str | None) -> Context:
    return _FORMAT.extract({} if parent is None else {"traceparent": parent}, Context())
