"""What is counted, through the OpenTelemetry API; names and labels follow gRPC's Prometheus conventions."""

import time
from typing import Any

from opentelemetry import metrics

from decideonce_server.status import code_of
from decideonce_server.wire import Context, Proceed, UnaryInterceptor


class Telemetry:
    """The service's instruments. They cost next to nothing where no metrics endpoint is asked for."""

    def __init__(self, meter: metrics.Meter) -> None:
        self._handled = meter.create_counter("grpc_server_handled", description="Calls that ended, by status code")
        self._handling = meter.create_histogram(
            "grpc_server_handling",
            unit="s",
            description="Time from a call's request to its status",
        )
        self._stale_completions = meter.create_counter(
            "stale_completions",
            description="Attempts that ended after they had lost their lease to another; their results were discarded",
        )

    def handled(self, method: str, code: str, seconds: float) -> None:
        """Count a call that ended."""
        service, name = method.removeprefix("/").split("/")
        labels = {"grpc_service": service, "grpc_method": name}
        self._handled.add(1, labels | {"grpc_code": code})
        self._handling.record(seconds, labels)

    def stale_completion(self) -> None:
        """Count an attempt that ended too late."""
        self._stale_completions.add(1)


class TelemetryInterceptor(UnaryInterceptor):
    """Counts every call once, under the code that its caller gets."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__()
        self._telemetry = telemetry

    async def intercept(self, method: str, request: Any, context: Context, proceed: Proceed) -> Any:
        """Count a call."""
        began = time.perf_counter()
        code = "OK"
        try:
            return await proceed(request, context)
        except BaseException as error:
            code = code_of(error).name
            raise
        finally:
            self._telemetry.handled(method, code, time.perf_counter() - began)
