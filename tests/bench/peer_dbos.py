"""DBOS behind the service's gRPC contract: a workflow with one step, by the operation key.

Runs in the bench's own environment, as one of several processes on a port: `peer_dbos.py HOST:PORT RESPONSE NUMBER`;
DBOS_SYSTEM_DATABASE_URL names its database.
"""

import asyncio
import os
import sys
from pathlib import Path

import grpc
import uvloop
from dbos import DBOS, SetWorkflowID

from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceServicer, add_DecisionServiceServicer_to_server

RESPONSE = wire.DecideResponse.FromString(Path(sys.argv[2]).read_bytes())


@DBOS.step()
async def evaluate(operation_key: str) -> bytes:
    """Give what a policy would have decided."""
    RESPONSE.provenance.operation_key = operation_key
    return RESPONSE.SerializeToString()


@DBOS.workflow()
async def decide(operation_key: str, facts: bytes) -> bytes:
    """Decide once per workflow id."""
    return await evaluate(operation_key)


class Decider(DecisionServiceServicer):
    """Answers with the workflow's result, whether it ran now or before."""

    async def Decide(self, request: wire.DecideRequest, context: object) -> wire.DecideResponse:  # noqa: N802
        """Answer a call."""
        with SetWorkflowID(request.operation_key):
            answer = await decide(request.operation_key, request.facts.SerializeToString())
        return wire.DecideResponse.FromString(answer)


async def serve(listen: str) -> None:
    """Serve until killed."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    add_DecisionServiceServicer_to_server(Decider(), server)
    server.add_insecure_port(listen)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def main() -> None:
    """Run one process of it."""
    DBOS(
        config={
            "name": "decide",
            "system_database_url": os.environ["DBOS_SYSTEM_DATABASE_URL"],
            "executor_id": sys.argv[3],
            "application_version": "bench",
            "run_admin_server": False,
            "log_level": "WARNING",
        }
    )
    DBOS.launch()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))


if __name__ == "__main__":
    main()
