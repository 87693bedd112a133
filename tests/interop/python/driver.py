"""The interop driver: reads commands as JSON lines, WORKERS at a time on a connection each, answers with JSON lines."""

import base64
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceStub

sys.path.append(str(Path(__file__).parents[3] / "docs/examples/clients/python"))

import decide as example

TOKEN = os.environ["DECIDEONCE_TOKEN"]
METADATA = (("authorization", f"Bearer {TOKEN}"),)

_writing = threading.Lock()


class Receiving:
    """A channel to make a stub of, which gives an answer together with its bytes as they came."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, *, response_deserializer: Callable[[bytes], Any], **options: Any) -> Any:
        """Make a call whose answer is bytes and message."""
        return self._channel.unary_unary(
            method, response_deserializer=lambda data: (data, response_deserializer(data)), **options
        )


def run(channel: grpc.Channel, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out a command."""
    stub = DecisionServiceStub(Receiving(channel))
    request = base64.b64decode(command["request"])
    try:
        match command["do"]:
            case "decide":
                data, answer = stub.Decide(wire.DecideRequest.FromString(request), metadata=METADATA)
                return said(answer, data) | {"replayed": answer.replayed}
            case "status":
                message = wire.GetDecisionStatusRequest.FromString(request)
                data, answer = stub.GetDecisionStatus(message, metadata=METADATA)
                return said(answer, data)
            case "finish":
                return said(example.finish(channel, TOKEN, request, command["within_s"]), b"")
            case "health":
                asked = health_pb2.HealthCheckRequest.FromString(request)
                status = health_pb2_grpc.HealthStub(channel).Check(asked).status
                return {"code": 0, "status": health_pb2.HealthCheckResponse.ServingStatus.Name(status)}
            case other:
                raise ValueError(other)
    except grpc.RpcError as error:
        return failed(error)


def said(answer: wire.DecideResponse | wire.GetDecisionStatusResponse, data: bytes) -> dict[str, Any]:
    """Write an answer down."""
    return {
        "code": 0,
        "status": wire.DecisionStatus.Name(answer.status),
        "outcome": answer.decision.outcome,
        "decision_id": answer.provenance.decision_id,
        "reason": answer.failure.reason,
        "retry_after_ms": answer.retry_after.ToMilliseconds(),
        "raw": base64.b64encode(data).decode(),
    }


def failed(error: grpc.RpcError) -> dict[str, Any]:
    """Write an error down."""
    answer = {"code": error.code().value[0], "message": error.details()}
    status = status_pb2.Status.FromString(dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b""))
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            answer["error"] = {"reason": info.reason, "domain": info.domain, "metadata": dict(info.metadata)}
    return answer


def work(commands: SimpleQueue[dict[str, Any] | None]) -> None:
    """Carry out commands until there are no more."""
    with example.connect(("grpc.use_local_subchannel_pool", 1)) as channel:
        while (command := commands.get()) is not None:
            answer = run(channel, command) | {"id": command["id"]}
            with _writing:
                print(json.dumps(answer), flush=True)


def main(workers: int) -> None:
    """Read commands until stdin ends."""
    commands: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    threads = [threading.Thread(target=work, args=(commands,)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for line in sys.stdin:
        commands.put(json.loads(line))
    for _ in threads:
        commands.put(None)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]))
