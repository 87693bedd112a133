"""Traces, as a collector gets them."""

import asyncio
import signal
from collections import Counter

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.logs import key_hash
from harness import Caller, make_token, new_key, refused, secret_text, spoken, write_catalog
from processes import children, free_address, until
from stage import ALONE, evaluations

OPERATION = "trace.echo"
CALL = "decideonce.v1.DecisionService/Decide"
TRACE, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SUCCEEDED = wire.DECISION_STATUS_SUCCEEDED


@pytest.fixture
def start(start_service, tmp_path):
    """Give a function that starts a service with the operation."""
    catalog = write_catalog(
        tmp_path / "catalog",
        {OPERATION: {"policy": "echo", "lease": "1s", "default_wait": "10s", "time_budget": "5s"}},
        {"echo": "echo_policy:decide"},
    )
    return lambda *flags: start_service("--catalog", str(catalog), *flags)


def traced(caller: Caller, flags: str = "01") -> Caller:
    """Let a caller say its place in a trace."""
    caller.metadata = [*caller.metadata, ("traceparent", f"00-{TRACE}-{CALLER_SPAN}-{flags}")]
    return caller


async def traceparents(observer) -> tuple[str, str]:
    """Give those of the only record and of its only event."""
    row = await observer.fetchrow("SELECT l.traceparent, o.traceparent AS told FROM ledger l CROSS JOIN outbox o")
    return row["traceparent"], row["told"]


def place(span: Span) -> str:
    return f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"


async def test_one_trace_leads_from_the_caller_to_the_event(
    database_url, observer, start, connect_caller, collector
) -> None:
    """A call, its phases and its event are of the caller's trace, each below what began it, and name no key or fact."""
    service = start(ALONE, "--otlp", f"http://{collector.address}")
    token = await make_token(database_url, "acme")
    key, facts = new_key(), {"echo": {"iban": secret_text()}}
    answer = await traced(connect_caller(service, token)).decide(OPERATION, key, facts)
    assert SUCCEEDED == answer.status
    await until(lambda: CALL in [span.name for span in collector.spans])
    call, attempt, complete = (collector.named(name) for name in (CALL, "attempt", "complete"))
    assert (TRACE, CALLER_SPAN) == (call.trace_id.hex(), call.parent_span_id.hex())
    assert {TRACE} == {span.trace_id.hex() for span in collector.spans}
    assert {"reserve": call.span_id, "attempt": call.span_id} == {
        name: collector.named(name).parent_span_id for name in ("reserve", "attempt")
    }
    assert {attempt.span_id} == {collector.named(name).parent_span_id for name in ("queue", "evaluate", "complete")}
    assert (place(call), place(complete)) == await traceparents(observer)
    values = {attribute.key: attribute.value.string_value for attribute in call.attributes}
    assert (OPERATION, key_hash(key)) == (values["decideonce.operation"], values["decideonce.key"])
    assert [] == spoken(collector.sent)
    assert token.split("_", 2)[2] not in collector.sent


async def test_a_rescuer_goes_on_with_the_trace(
    database_url, observer, start, connect_caller, collector, tmp_path
) -> None:
    """An attempt of another process is of the trace of the call that reserved the key, and so is its event."""
    otlp = ("--otlp", f"http://{collector.address}")
    first, source = start(ALONE, *otlp), tmp_path / "source"
    token = await make_token(database_url, "acme")
    facts = {"mark": "one.", "do": "need", "source": str(source), "fault": "sleep", "seconds": 0.5}
    call = asyncio.ensure_future(traced(connect_caller(first, token)).decide(OPERATION, new_key(), facts))
    await until(lambda: evaluations(first, "one."))
    (worker,) = children(first, "worker")
    worker.send_signal(signal.SIGSTOP)
    try:
        source.touch()
        start(*otlp)
        await until(lambda: observer.fetchval("SELECT count(*) FROM ledger WHERE state = 2"))
    finally:
        worker.send_signal(signal.SIGCONT)
    assert (True, 2) == ((answer := await call).replayed, answer.provenance.attempt)
    # Each process sends its own.
    await until(lambda: {CALL: 1, "attempt": 2}.items() <= Counter(span.name for span in collector.spans).items())
    assert {TRACE} == {span.trace_id.hex() for span in collector.spans}
    attempts = [span for span in collector.spans if span.name == "attempt"]
    assert {collector.named(CALL).span_id} == {span.parent_span_id for span in attempts}
    reserved, told = await traceparents(observer)
    assert place(collector.named(CALL)) == reserved
    (complete,) = [span for span in collector.spans if place(span) == told]
    (rescue,) = [span for span in attempts if span.span_id == complete.parent_span_id]
    assert [2] == [a.value.int_value for a in rescue.attributes if a.key == "decideonce.attempt"]


async def test_what_a_caller_does_not_sample_is_not_sent(
    database_url, observer, start, connect_caller, collector
) -> None:
    """A trace that its caller doesn't sample goes on to the event, and makes no spans; the next call's are sent."""
    service = start(ALONE, "--otlp", f"http://{collector.address}")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await traced(connect_caller(service, caller.metadata[0][1].removeprefix("Bearer ")), "00").decide(
        OPERATION, new_key()
    )
    for traceparent in await traceparents(observer):
        assert (f"00-{TRACE}", "00") == (traceparent[:35], traceparent[-2:])
    await refused(caller.status(OPERATION, new_key()))
    await until(lambda: collector.spans)
    assert ["decideonce.v1.DecisionService/GetDecisionStatus"] == [span.name for span in collector.spans]


async def test_without_tracing_the_event_has_the_callers_place(database_url, observer, start, connect_caller) -> None:
    """A service that makes no spans hands on what it was given."""
    service = start(ALONE)
    await traced(connect_caller(service, await make_token(database_url, "acme"))).decide(OPERATION, new_key())
    given = f"00-{TRACE}-{CALLER_SPAN}-01"
    assert (given, given) == await traceparents(observer)


async def test_a_collector_that_is_away_holds_nobody_up(database_url, start, connect_caller) -> None:
    """Decisions are made, and the service stops in time, where nobody takes the spans."""
    service = start("--otlp", f"http://{free_address()}")
    caller = connect_caller(service, await make_token(database_url, "acme"))
    assert SUCCEEDED == (await caller.decide(OPERATION, new_key())).status
    assert 0 == await asyncio.to_thread(service.stop)
