"""What is answered from a record.

The recorded bytes are sent as they are; what depends on the moment is added behind them, which protobuf reads as one
message.
"""

from datetime import timedelta

from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.ledger import Record, State

# Often enough that a caller learns of a decision soon, rarely enough that polling costs little.
RETRY_AFTER = timedelta(milliseconds=250)
# A due date that is past is still not now: the caller's next call has to travel.
RETRY_AFTER_MIN = timedelta(milliseconds=20)


def answer(record: Record, *, replayed: bool) -> bytes:
    """Give the DecideResponse of a record; a GetDecisionStatusResponse is the same bytes with `replayed` false."""
    rest = wire.DecideResponse(replayed=replayed)
    if record.state in (State.PROCESSING, State.EXPIRED):
        rest.status = wire.DecisionStatus.ValueType(record.state)
    if record.state in (State.PROCESSING, State.FAILED_RETRYABLE):
        rest.retry_after.FromTimedelta(_retry_after(record))
    if record.state.is_final and record.key_retained_until is not None:
        rest.key_retained_until.FromDatetime(record.key_retained_until)
    if record.state in (State.SUCCEEDED, State.FAILED_FINAL) and record.replayable_until is not None:
        rest.replayable_until.FromDatetime(record.replayable_until)
    return (record.response or b"") + rest.SerializeToString(deterministic=True)


def processing(retry_after: timedelta) -> bytes:
    """Give the answer where another call holds the key and nothing can be read of it yet."""
    response = wire.DecideResponse(status=wire.DECISION_STATUS_PROCESSING)
    response.retry_after.FromTimedelta(retry_after)
    return response.SerializeToString(deterministic=True)


def _retry_after(record: Record) -> timedelta:
    if record.state is State.FAILED_RETRYABLE:
        return max(record.retry_left or RETRY_AFTER, RETRY_AFTER_MIN)
    if record.lease_left is None or record.lease_left <= timedelta(0):
        return RETRY_AFTER
    # Never longer than the lease that is left: after that the caller's next call can take over.
    return min(record.lease_left, RETRY_AFTER)
