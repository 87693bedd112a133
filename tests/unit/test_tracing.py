"""Spans: none without tracing, and where they belong with it."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from decideonce_server import tracing
from decideonce_server.settings import InvalidSetting, Settings

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"


@pytest.fixture
def exporter():
    """Trace into memory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.begin(provider.get_tracer("test"))
    yield exporter
    tracing.begin(None)


def test_off_makes_no_span() -> None:
    """Without tracing every span is one and the same nothing, and the caller's place stays as it was given."""
    nothing = tracing.phase_span("reserve")
    assert nothing is tracing.call_span("/a.B/C", [("traceparent", CALLER)])
    assert nothing is tracing.attempt_span(CALLER, "credit.approve-loan", "key", 1)
    with nothing as span:
        assert span is None
        assert not trace.get_current_span().get_span_context().is_valid
        assert CALLER == tracing.traceparent(CALLER)


def test_attempt_is_below_the_call_that_reserved_and_linked_to_the_one_that_makes_it(exporter) -> None:
    """A call of another trace takes over: the attempt stays in the decision's own, with a link to that call."""
    with tracing.call_span("/a.B/C", [("traceparent", OTHER)]), tracing.attempt_span(CALLER, "o.o", "key", 2):
        pass
    attempt, call = exporter.get_finished_spans()
    assert CALLER == f"00-{attempt.context.trace_id:032x}-{attempt.parent.span_id:016x}-01"
    assert [call.context.span_id] == [link.context.span_id for link in attempt.links]


def test_attempt_of_the_call_itself_has_no_link(exporter) -> None:
    """The call that reserved and makes the attempt is its parent."""
    with (
        tracing.call_span("/a.B/C", [("traceparent", CALLER)]),
        tracing.attempt_span(tracing.traceparent(None), "o.o", "key", 1),
    ):
        pass
    attempt, call = exporter.get_finished_spans()
    assert (call.context.span_id, ()) == (attempt.parent.span_id, tuple(attempt.links))


@pytest.mark.parametrize("given", [(), (("traceparent", "00-0-0-01"),), (("traceparent", CALLER),) * 2])
def test_a_call_without_a_usable_place_begins_a_trace(exporter, given) -> None:
    """A malformed traceparent counts as none."""
    with tracing.call_span("/a.B/C", given):
        assert tracing.traceparent(None) != CALLER
    (call,) = exporter.get_finished_spans()
    assert call.parent is None


def test_an_exception_leaves_no_text_in_a_span(exporter) -> None:
    """What an exception says may be anybody's facts."""
    with pytest.raises(ValueError, match="secret"), tracing.phase_span("evaluate"):
        raise ValueError("secret")
    (span,) = exporter.get_finished_spans()
    assert ((), None) == (span.events, span.status.description)


@pytest.mark.parametrize("url", ["collector:4317", "http://", "grpc://collector:4317", ""])
def test_otlp_is_a_url(url: str) -> None:
    """Anything else is refused at start, and not repeated: it may hold a secret."""
    with pytest.raises(InvalidSetting, match=r"^--otlp must be http://HOST:PORT, or https://HOST:PORT for TLS$"):
        Settings(otlp=url).check()
