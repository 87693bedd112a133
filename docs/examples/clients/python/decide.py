"""Make one decision, and go on with it after whatever happened: decide.py WORK_FILE OPERATION FACTS_JSON."""

import json
import os
import random
import sys
import time
import uuid
from pathlib import Path

import grpc
from google.protobuf import duration_pb2, json_format
from google.rpc import error_details_pb2, status_pb2

from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceStub

SERVICE_CONFIG = Path(__file__).parents[4] / "protos/decideonce/v1/service_config.json"
DECIDE = "/decideonce.v1.DecisionService/Decide"
WITHIN_S = 60.0
POLL_WAIT_S = 10
# sysexits.h: a temporary failure, try again.
EX_TEMPFAIL = 75

Answer = wire.DecideResponse | wire.GetDecisionStatusResponse


def begin(work_file: Path, operation: str, facts: dict) -> bytes:
    """Give the request that the work file holds. Where there is none yet: make it with a new key, and keep it first."""
    if not work_file.exists():
        request = wire.DecideRequest(operation=operation, operation_key=str(uuid.uuid4()))
        json_format.ParseDict(facts, request.facts)
        unfinished = work_file.with_name(work_file.name + ".new")
        with unfinished.open("wb") as file:
            file.write(request.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(work_file)
    return work_file.read_bytes()


def finish(channel: grpc.Channel, token: str, request: bytes, within_s: float) -> Answer:
    """Ask until there is an answer that is final; raises the last error where time runs out or asking can't help."""
    end = time.monotonic() + within_s
    metadata = (("authorization", f"Bearer {token}"),)
    sent = wire.DecideRequest.FromString(request)
    status_request = wire.GetDecisionStatusRequest(
        operation=sent.operation,
        operation_key=sent.operation_key,
        max_wait=duration_pb2.Duration(seconds=POLL_WAIT_S),
    )
    # Without a serializer: the very bytes that were kept.
    decide = channel.unary_unary(DECIDE, response_deserializer=wire.DecideResponse.FromString)
    get_status = DecisionServiceStub(channel).GetDecisionStatus
    is_processing, failures = False, 0
    while True:
        left = end - time.monotonic()
        try:
            answer = (
                get_status(status_request, timeout=left, metadata=metadata)
                if is_processing
                else decide(request, timeout=left, metadata=metadata)
            )
        except grpc.RpcError as error:
            told = retry_after(error)
            failures += 1
            pause = (told or 0) + random.uniform(0, min(2.0, 0.1 * 2**failures))
            if told is None or time.monotonic() + pause > end:
                raise
        else:
            is_processing = answer.status == wire.DECISION_STATUS_PROCESSING
            if not is_processing and answer.status != wire.DECISION_STATUS_FAILED_RETRYABLE:
                return answer
            failures = 0
            pause = answer.retry_after.ToTimedelta().total_seconds()
            if time.monotonic() + pause > end:
                return answer
        time.sleep(pause)


def retry_after(error: grpc.RpcError) -> float | None:
    """Tell how many seconds to wait before the same is sent again; None where sending it again can't help."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b""))
    retry_info = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(retry_info):
            return retry_info.retry_delay.ToTimedelta().total_seconds()
    # gRPC's own: a connection was lost, or a call took too long. The decision may have been made.
    return 0.0 if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) else None


def connect(*options: tuple[str, object]) -> grpc.Channel:
    """Connect as the environment says, with the service config."""
    server = os.environ.get("DECIDEONCE_SERVER", "127.0.0.1:50051")
    settings = [("grpc.service_config", SERVICE_CONFIG.read_text()), *options]
    if authority := os.environ.get("DECIDEONCE_TLS_CA"):
        credentials = grpc.ssl_channel_credentials(Path(authority).read_bytes())
        return grpc.secure_channel(server, credentials, options=settings)
    return grpc.insecure_channel(server, options=settings)


def main(work_file: str, operation: str, facts: str) -> int:
    """Print the outcome, and give an exit code: EX_TEMPFAIL where the same command is to be run again."""
    request = begin(Path(work_file), operation, json.loads(facts))
    try:
        with connect() as channel:
            answer = finish(channel, os.environ["DECIDEONCE_TOKEN"], request, WITHIN_S)
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}", file=sys.stderr)
        return 1 if retry_after(error) is None else EX_TEMPFAIL
    if answer.status == wire.DECISION_STATUS_SUCCEEDED:
        print(answer.decision.outcome, answer.provenance.decision_id)
        return 0
    print(wire.DecisionStatus.Name(answer.status), answer.failure.reason, file=sys.stderr)
    unfinished = (wire.DECISION_STATUS_PROCESSING, wire.DECISION_STATUS_FAILED_RETRYABLE)
    return EX_TEMPFAIL if answer.status in unfinished else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
