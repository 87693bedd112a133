"""DecisionService: maps a request, calls, maps the result."""

from datetime import timedelta
from typing import Any, cast

from decideonce.keys import OPERATION_KEY_PATTERN
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceServicer
from decideonce_server import answers
from decideonce_server.attempts import current_attempt
from decideonce_server.auth import current_caller
from decideonce_server.catalog import OperationVersion
from decideonce_server.catalog_reader import CatalogReader
from decideonce_server.catalog_wire import EXECUTIONS
from decideonce_server.decide import Decide
from decideonce_server.errors import DecisionNotFound, OperationNotFound
from decideonce_server.fingerprint import FINGERPRINT_VERSION
from decideonce_server.policy import PolicyVersion
from decideonce_server.recording import RESULT_BYTES_MAX
from decideonce_server.requests import REQUEST_BYTES_MAX, decision_key, name_of, wait_of
from decideonce_server.sets import LedgerSets
from decideonce_server.values import DEPTH_MAX
from decideonce_server.waiting import ANSWER_TIME, Waiters, is_settled
from decideonce_server.wire import Context

# The longest that a status call is held open: below what proxies commonly cut.
STATUS_WAIT_MAX = timedelta(seconds=30)


class DecisionServicer(DecisionServiceServicer):
    """Decides, tells what is recorded, and tells an operation's contract."""

    def __init__(self, decide: Decide, ledger: LedgerSets, catalog: CatalogReader, waiters: Waiters) -> None:
        self._decide = decide
        self._ledger = ledger
        self._catalog = catalog
        self._waiters = waiters

    async def Decide(self, request: wire.DecideRequest, context: Context) -> Any:  # noqa: ARG002, N802
        """Decide what the call has reserved."""
        record, own = await self._decide.decide(current_attempt.get())
        self._waiters.tell(record)
        return answers.answer(record, replayed=not own)

    async def GetDecisionStatus(self, request: wire.GetDecisionStatusRequest, context: Context) -> Any:  # noqa: N802
        """Tell what is recorded, when it is settled or the wait is over."""
        key = decision_key(current_caller().tenant, request)
        wait = min(wait_of(request) or timedelta(0), STATUS_WAIT_MAX)
        if (left := cast("float | None", context.time_remaining())) is not None:
            wait = min(wait, timedelta(seconds=left) - ANSWER_TIME)
        record = await self._ledger.read(key)
        if record is None:
            raise DecisionNotFound
        if not is_settled(record) and wait > timedelta(0):
            record = await self._waiters.wait(key, wait, is_settled) or record
        return answers.answer(record, replayed=False)

    async def GetOperation(self, request: wire.GetOperationRequest, context: Context) -> Any:  # noqa: ARG002, N802
        """Tell an operation's contract."""
        name = name_of(request.operation, "operation")
        operation = self._catalog.operation(name)
        if operation is None:
            raise OperationNotFound({"operation": name})
        version = OperationVersion(operation.version, operation.contract)
        return operation_response(version, self._catalog.policy_of(name))


def operation_response(operation: OperationVersion, policy: PolicyVersion | None) -> wire.GetOperationResponse:
    """Write an operation's contract as it is published."""
    contract = operation.contract
    response = wire.GetOperationResponse(
        operation=contract.operation,
        operation_version=operation.version,
        operation_key_pattern=OPERATION_KEY_PATTERN,
        execution=EXECUTIONS[contract.execution],
        max_attempts=contract.max_attempts,
        fingerprint_version=f"fp{FINGERPRINT_VERSION}",
        facts_schema=contract.facts_schema,
        request_bytes_max=REQUEST_BYTES_MAX,
        facts_depth_max=DEPTH_MAX,
        result_bytes_max=RESULT_BYTES_MAX,
    )
    response.default_wait.FromTimedelta(contract.default_wait)
    response.max_wait.FromTimedelta(contract.max_wait)
    response.lease.FromTimedelta(contract.lease)
    response.time_budget.FromTimedelta(contract.time_budget)
    if contract.retention is not None:
        response.retention.FromTimedelta(contract.retention)
    if contract.tombstone_retention is not None:
        response.tombstone_retention.FromTimedelta(contract.tombstone_retention)
    if policy is not None:
        response.policy_id = policy.policy_id
        response.policy_version = policy.version
        response.policy_digest = policy.digest
    return response
