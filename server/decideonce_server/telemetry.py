"""What is counted of every call, through the OpenTelemetry API; names and labels follow gRPC's Prometheus conventions.

Modules below count what they know best through the same API; `app` says where it all goes.
"""

import time
from typing import Any

from opentelemetry import metrics

from decideonce_server.status import code_of
from decideonce_server.wire import Context, Proceed, UnaryInterceptor


class TelemetryInterceptor(UnaryInterceptor):
    """Counts every call once, under the code that its caller gets."""

    def __init__(self) -> None:
        super().__init__()
        meter = metrics.get_meter("decideonce")
        self._handled = meter.create_counter("grpc_server_handled", description="Calls that ended, by status code")
        self._handling = meter.create_histogram(
            "grpc_server_handling",
            unit="s",
            description="Time from a call's request to its status",
        )

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
            service, name = method.removeprefix("/").split("/")
            labels = {"grpc_service": service, "grpc_method": name}
            self._handled.add(1, labels | {"grpc_code": code})
            self._handling.record(time.perf_counter() - began, labels)
