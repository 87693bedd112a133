"""Sends traces to a collector, by OTLP over gRPC."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from decideonce_server import tracing

# A collector that doesn't answer in time loses spans; nothing waits for it.
SEND_WITHIN_S = 5.0
# For what was not sent yet when the process stops.
FLUSH_WITHIN_S = 2.0


@asynccontextmanager
async def exported_traces(url: str | None) -> AsyncIterator[None]:
    """Make spans while the block runs, and send them to `url`, an http:// or https:// one; with None make none.

    The OTEL_… variables of OpenTelemetry's SDK and exporter hold besides: samplers, headers, certificates.
    """
    if url is None:
        yield
        return
    # Here, so that who wants no traces doesn't load all this.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    provider = TracerProvider(resource=Resource.create({"service.name": "decideonce"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=SEND_WITHIN_S)))
    tracing.begin(provider.get_tracer("decideonce"))
    try:
        yield
    finally:
        tracing.begin(None)
        # A daemon, so that a process ends in time whatever the collector does.
        flushing = threading.Thread(target=provider.shutdown, daemon=True)
        flushing.start()
        await asyncio.to_thread(flushing.join, FLUSH_WITHIN_S)
