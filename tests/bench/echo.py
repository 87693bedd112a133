"""What gRPC in Python does at most: the service's messages, the same number of processes, and nothing in between.

Started as a program it is one process of it: it answers every Decide with one recorded response, under the key that it
was asked for.
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import psutil
import uvloop

from bench.loader import GRPC_HEADERS, Target, environment
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceServicer, add_DecisionServiceServicer_to_server
from decideonce_server.ports import reserved_port

TESTS = Path(__file__).parents[1]
DECIDE = "/decideonce.v1.DecisionService/Decide"


class Echo(DecisionServiceServicer):
    """Answers with a recorded response."""

    def __init__(self, response: wire.DecideResponse) -> None:
        self._response = response

    async def Decide(self, request: wire.DecideRequest, context: object) -> wire.DecideResponse:  # noqa: N802
        """Answer a call."""
        # Nothing else runs before gRPC has serialized it.
        self._response.provenance.operation_key = request.operation_key
        return self._response


async def serve(listen: str, response: wire.DecideResponse) -> None:
    """Serve until killed."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    add_DecisionServiceServicer_to_server(Echo(response), server)
    server.add_insecure_port(listen)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


@contextmanager
def echoing(request: Path, response: Path, processes: int, headers: tuple[str, ...] = GRPC_HEADERS) -> Iterator[Target]:
    """Run the echo's processes; `request` and `response` are files of a serialized message each."""
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port("127.0.0.1:0"))
        started = []
        for _ in range(processes):
            process = subprocess.Popen(
                [sys.executable, __file__, "--listen", f"127.0.0.1:{port}", "--response", str(response)],
                stdout=subprocess.PIPE,
                env=environment(PYTHONPATH=str(TESTS)),
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.stdout.readline() == b"ready\n"
        tree = [psutil.Process(process.pid) for process in started]
        yield Target(f"127.0.0.1:{port}", DECIDE, request, headers, lambda: tree)


def main() -> None:
    """Run one process of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--listen", required=True)
    parser.add_argument("--response", required=True, type=Path)
    given = parser.parse_args()
    response = wire.DecideResponse.FromString(given.response.read_bytes())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(given.listen, response))


if __name__ == "__main__":
    main()
