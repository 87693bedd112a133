"""What is counted and traced of every call, through the OpenTelemetry API.

Names and labels of `grpc_server_…` follow gRPC's Prometheus conventions. Modules below count what they know best
through the same API; `app` says where it all goes.
"""

import time
from contextlib import nullcontext
from typing import Any

import grpc
from opentelemetry import metrics
from opentelemetry.trace import Span, StatusCode

from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server import tracing
from decideonce_server.catalog_reader import CatalogReader
from decideonce_server.errors import OperationKeyExpired
from decideonce_server.measures import BUCKETS_S
from decideonce_server.status import code_of
from decideonce_server.wire import (
    Context,
    Proceed,
    UnaryInterceptor,
    current_request,
    idempotent_methods,
    method_path,
    methods,
)

# What a caller may make up is no label.
UNKNOWN_OPERATION = "unknown"

RESULTS: dict[int, str] = {
    wire.DECISION_STATUS_PROCESSING: "processing",
    wire.DECISION_STATUS_SUCCEEDED: "original",
    wire.DECISION_STATUS_FAILED_RETRYABLE: "retryable",
    wire.DECISION_STATUS_FAILED_FINAL: "final",
    wire.DECISION_STATUS_EXPIRED: "key_expired",
}
REPLAYABLE = (wire.DECISION_STATUS_SUCCEEDED, wire.DECISION_STATUS_FAILED_FINAL)

# "refused" is what the service won't begin: for who calls, or for what its catalog has not.
REFUSALS: dict[grpc.StatusCode, str] = {
    grpc.StatusCode.ALREADY_EXISTS: "key_reused",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.UNAUTHENTICATED: "refused",
    grpc.StatusCode.PERMISSION_DENIED: "refused",
    grpc.StatusCode.NOT_FOUND: "refused",
    grpc.StatusCode.FAILED_PRECONDITION: "refused",
    grpc.StatusCode.DEADLINE_EXCEEDED: "refused",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "limited",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.ABORTED: "unavailable",
    grpc.StatusCode.INTERNAL: "defect",
    grpc.StatusCode.CANCELLED: "cancelled",
}
# Whose fault a failed call is (OpenTelemetry's conventions for gRPC servers): with these the service's own.
SERVER_FAULTS = ("UNAVAILABLE", "INTERNAL")


class TelemetryInterceptor(UnaryInterceptor):
    """Counts every call once, under the code and the result that its caller gets."""

    def __init__(self, catalog: CatalogReader) -> None:
        super().__init__()
        self._catalog = catalog
        self._decided = idempotent_methods()
        # Probes come often and tell nothing.
        self._traced = frozenset(map(method_path, methods()))
        meter = metrics.get_meter("decideonce")
        self._handled = meter.create_counter("grpc_server_handled", description="Calls that ended, by status code")
        self._handling = meter.create_histogram(
            "grpc_server_handling",
            unit="s",
            description="Time from a call's request to its status",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        )
        # Told before the first, so that the first is seen as a step.
        for path in self._traced:
            self._handled.add(0, _labels(path) | {"grpc_code": "INTERNAL"})
        self._calls = meter.create_counter("decide_calls", description="Calls of Decide, by operation and result")

    async def intercept(self, method: str, request: Any, context: Context, proceed: Proceed) -> Any:
        """Count a call."""
        began = time.perf_counter()
        code, result = "OK", ""
        metadata = context.invocation_metadata() or ()
        with tracing.call_span(method, metadata) if method in self._traced else nullcontext() as span:
            try:
                response = await proceed(request, context)
                if method in self._decided:
                    result = result_of(wire.DecideResponse.FromString(response))
            except BaseException as error:
                code, result = code_of(error).name, refusal_of(error)
                raise
            else:
                return response
            finally:
                labels = _labels(method)
                self._handled.add(1, labels | {"grpc_code": code})
                self._handling.record(time.perf_counter() - began, labels)
                if method in self._decided:
                    self._calls.add(1, {"operation": self._operation(), "result": result})
                if span is not None:
                    self._describe(span, code)

    def _operation(self) -> str:
        name = getattr(current_request.get(), "operation", "")
        return UNKNOWN_OPERATION if self._catalog.operation(name) is None else name

    def _describe(self, span: Span, code: str) -> None:
        span.set_attributes({"rpc.system": "grpc", "rpc.grpc.status_code": getattr(grpc.StatusCode, code).value[0]})
        if operation_key := getattr(current_request.get(), "operation_key", ""):
            span.set_attributes(tracing.attributes_of(self._operation(), operation_key))
        if code in SERVER_FAULTS:
            span.set_status(StatusCode.ERROR)


def _labels(method: str) -> dict[str, str]:
    service, name = method.removeprefix("/").split("/")
    return {"grpc_service": service, "grpc_method": name}


def result_of(response: wire.DecideResponse) -> str:
    """Name the result of a call that was answered."""
    return "replayed" if response.replayed and response.status in REPLAYABLE else RESULTS[response.status]


def refusal_of(error: BaseException) -> str:
    """Name the result of a call that ended with an error."""
    return "key_expired" if isinstance(error, OperationKeyExpired) else REFUSALS[code_of(error)]
