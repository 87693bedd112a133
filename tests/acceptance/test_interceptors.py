"""The interceptor chain: its order, what it lets pass, what it protects, and what it counts."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from urllib.parse import quote

import grpc
import pytest
from google.protobuf.descriptor_pb2 import MethodOptions
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from decideonce.v1 import catalog_pb2, decision_service_pb2
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.catalog_pb2_grpc import CatalogServiceStub
from decideonce_server import app
from decideonce_server.auth import PERMISSIONS, PUBLIC, AuthInterceptor
from decideonce_server.idempotency import IdempotencyInterceptor
from decideonce_server.settings import Settings
from decideonce_server.status import StatusInterceptor
from decideonce_server.telemetry import TelemetryInterceptor
from decideonce_server.wire import ParseInterceptor, idempotent_methods, method_path, methods
from harness import Caller, make_token, new_key, refused, table_policy
from scraping import scrape
from stage import TENANT, LedgerView, Stage

OPERATION = "test.strict"
TEXTS = "test.texts"
SERVICE = "decideonce.v1.DecisionService"


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give an operation with a strict schema, and one whose facts are texts of any name."""
    strict = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    return (
        {OPERATION: {"policy": "table", "facts": strict}, TEXTS: {"policy": "table", "facts": texts}},
        {"table": table_policy("LOW")},
    )


@pytest.fixture(scope="module")
def flags(metrics_address: str) -> list[str]:
    """Let the service tell what it counts."""
    return ["--metrics", metrics_address]


async def test_order_of_the_chain(database_url) -> None:
    """Status maps every error, telemetry counts refusals too, auth comes before any look-up, and idempotency last."""
    parts = app.assemble(database_url, Settings())
    chain = [type(interceptor) for interceptor in app.interceptors(parts)]
    await parts.database.close()
    order = [StatusInterceptor, TelemetryInterceptor, ParseInterceptor, AuthInterceptor, IdempotencyInterceptor]
    assert order == chain


def test_every_method_has_a_permission() -> None:
    """The table of permissions has each method of the contract, and besides only probes and tools, which are public."""
    contract = {
        f"/{service.full_name}/{method.name}"
        for file in (decision_service_pb2, catalog_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert contract == {method_path(method) for method in methods()}
    assert set() == {method for method in contract if PERMISSIONS.get(method, PUBLIC) is PUBLIC}
    health = {method_path(method) for method in health_pb2.DESCRIPTOR.services_by_name["Health"].methods}
    (reflection,) = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].methods
    # The same service before and after it became stable; which one is served is the library's choice.
    tools = {method_path(reflection), method_path(reflection).replace("v1alpha", "v1")}
    assert contract | health | tools == set(PERMISSIONS)
    assert all(PERMISSIONS[method] is PUBLIC for method in health | tools)


async def test_probes_and_tools_need_no_token(caller: Caller) -> None:
    """Health and reflection answer without credentials."""
    health = health_pb2_grpc.HealthStub(caller.channel)
    for name in ("", SERVICE):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert health_pb2.HealthCheckResponse.SERVING == answer.status
    listing = reflection_pb2_grpc.ServerReflectionStub(caller.channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
    )
    names = {service.name async for answer in listing for service in answer.list_services_response.service}
    assert {SERVICE, "decideonce.v1.CatalogService", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("path", ["/decideonce.v1.DecisionService/Drop", "/decideonce.v1.Other/Decide"])
async def test_methods_outside_the_contract(caller: Caller, path: str) -> None:
    """What the contract doesn't have is not implemented, whoever asks."""
    with pytest.raises(grpc.RpcError) as caught:
        await caller.channel.unary_unary(path)(b"", metadata=caller.metadata, timeout=10)
    assert grpc.StatusCode.UNIMPLEMENTED == caught.value.code()


def test_idempotent_methods_are_those_of_the_contract() -> None:
    """Exactly the methods whose idempotency_level is IDEMPOTENT are protected by their operation key."""
    declared = {
        method.name
        for method in decision_service_pb2.DESCRIPTOR.services_by_name["DecisionService"].methods
        if method.GetOptions().idempotency_level == MethodOptions.IDEMPOTENT
    }
    assert {"Decide"} == declared
    assert {f"/{SERVICE}/Decide"} == idempotent_methods()


async def test_only_protected_methods_reserve(caller: Caller, view: LedgerView) -> None:
    """Each method that isn't protected leaves the ledger as it was; the protected one writes its row."""
    before = await view.counts()
    key = new_key()
    await refused(caller.status(OPERATION, key))
    await caller.operation(OPERATION)
    stub = CatalogServiceStub(caller.channel)
    await stub.GetCatalog(catalog_pb2.GetCatalogRequest(), metadata=caller.metadata)
    for call, request in (
        (stub.ListPolicyVersions, catalog_pb2.ListPolicyVersionsRequest(policy_id="table")),
        (stub.GetPolicyVersion, catalog_pb2.GetPolicyVersionRequest(policy_id="table")),
    ):
        await call(request, metadata=caller.metadata)
    assert before == await view.counts()
    await caller.decide(OPERATION, key)
    assert (before[0] + 1, before[1] + 1) == await view.counts()


async def test_catalog_is_for_admins(stage: Stage, caller: Caller) -> None:
    """Every method of the catalog is refused to who is no admin."""
    token = await make_token(stage.url, TENANT, ("decide", "read"))
    stub, metadata = CatalogServiceStub(caller.channel), [("authorization", f"Bearer {token}")]
    for call, request in (
        (stub.ApplyCatalog, catalog_pb2.ApplyCatalogRequest()),
        (stub.ApplyCatalog, catalog_pb2.ApplyCatalogRequest(dry_run=True)),
        (stub.GetCatalog, catalog_pb2.GetCatalogRequest()),
        (stub.ListPolicyVersions, catalog_pb2.ListPolicyVersionsRequest(policy_id="table")),
        (stub.GetPolicyVersion, catalog_pb2.GetPolicyVersionRequest(policy_id="table")),
    ):
        error = await refused(call(request, metadata=metadata, timeout=10))
        assert (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED") == (error.code, error.reason)


async def handled(address: str) -> dict[tuple[str, str], float]:
    """Give how many calls of the decision service ended, by method and code."""
    return {
        (sample.labels["grpc_method"], sample.labels["grpc_code"]): sample.value
        for sample in await scrape(address)
        if sample.name == "grpc_server_handled_total" and sample.labels["grpc_service"] == SERVICE
    }


async def used_key(caller: Caller) -> str:
    key = new_key()
    await caller.decide(OPERATION, key, {"n": 1})
    return key


async def reused_key(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    key = await used_key(caller)
    return lambda: caller.decide(OPERATION, key, {"n": 2})


async def invalid_facts(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: caller.decide(OPERATION, new_key(), {"n": "x"})


async def invalid_key(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: caller.decide(OPERATION, "short")


async def unknown_field(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: caller.decide_raw(b"\xa2\x01\x00")


async def malformed(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: caller.decide_raw(b"\xff")


async def defect(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    """Name a version that was never published: looking it up is a KeyError inside the interceptor."""
    key = await used_key(caller)
    await view.change(key, "operation_version = 4711")
    return lambda: caller.decide(OPERATION, key, {"n": 1})


async def no_token(caller: Caller, view: LedgerView) -> Callable[[], Awaitable]:
    return lambda: Caller(caller.channel, None).decide(OPERATION, new_key())


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (reused_key, ("ALREADY_EXISTS", "OPERATION_KEY_REUSED")),
        (invalid_facts, ("INVALID_ARGUMENT", "INVALID_FACTS")),
        (invalid_key, ("INVALID_ARGUMENT", "INVALID_OPERATION_KEY")),
        (unknown_field, ("INVALID_ARGUMENT", "UNKNOWN_FIELD")),
        (malformed, ("INVALID_ARGUMENT", "INVALID_REQUEST")),
        (no_token, ("UNAUTHENTICATED", "UNAUTHENTICATED")),
        (defect, ("INTERNAL", "INTERNAL")),
    ],
)
async def test_refusals_are_counted_once_under_their_code(
    caller: Caller, view: LedgerView, metrics_address: str, prepare, expected: tuple[str, str]
) -> None:
    """A refusal reaches the caller with its code and reason, is counted once under that code, and changes no row.

    lchenn/py-grpc-prometheus PR#37: calls that were aborted were never counted.
    """
    call = await prepare(caller, view)
    rows = await view.connection.fetch("SELECT l::text FROM ledger l ORDER BY operation_key")
    counts = await view.counts()
    before = await handled(metrics_address)
    error = await refused(call())
    assert expected == (error.code.name, error.reason)
    after = await handled(metrics_address)
    grown = {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
    assert {("Decide", expected[0]): 1} == grown
    assert rows == await view.connection.fetch("SELECT l::text FROM ledger l ORDER BY operation_key")
    assert counts == await view.counts()


async def test_answers_are_counted_once(caller: Caller, metrics_address: str) -> None:
    """A decision and its replay are two calls that ended OK."""
    before = await handled(metrics_address)
    key = await used_key(caller)
    await caller.decide(OPERATION, key, {"n": 1})
    after = await handled(metrics_address)
    assert 2 == after["Decide", "OK"] - before.get(("Decide", "OK"), 0)


@pytest.mark.parametrize("name", ["größe-", "a", "😀" * 20, "x" * 300])
async def test_400_violations_arrive_as_what_they_are(caller: Caller, view: LedgerView, name: str) -> None:
    """Facts that break 400 rules are INVALID_FACTS with the total and as many places as there is room for.

    lakehq/sail PR#1859: details over the trailers' limit turned an error into another one.
    """
    before = await view.counts()
    error = await refused(caller.decide(TEXTS, new_key(), {f"{name}{i}": i for i in range(400)}))
    assert (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FACTS") == (error.code, error.reason)
    assert {"violations": "400"} == error.metadata
    assert 0 < len(error.fields) < 400
    assert all(field.startswith("facts/") and "\ufffd" not in field for field in error.fields)
    details = error.trailers["grpc-status-details-bin"]
    assert len(details) * 4 // 3 + len(quote(error.text)) < 8000
    assert "grpc-retry-pushback-ms" not in error.trailers
    assert before == await view.counts()


async def test_details_are_of_three_types_at_most(caller: Caller) -> None:
    """An error's status has the call's own code and text, one ErrorInfo, and one BadRequest with rules."""
    error = await refused(caller.decide(OPERATION, new_key(), {"n": "x"}))
    status = status_pb2.Status.FromString(error.trailers["grpc-status-details-bin"])
    assert (error.code.value[0], error.text) == (status.code, status.message)
    assert ["google.rpc.ErrorInfo", "google.rpc.BadRequest"] == [detail.TypeName() for detail in status.details]
    bad_request = error_details_pb2.BadRequest()
    status.details[1].Unpack(bad_request)
    assert ['must satisfy type: "integer"'] == [v.description for v in bad_request.field_violations]


async def test_a_call_that_waits_is_counted_when_it_ends(caller: Caller, metrics_address: str) -> None:
    """A status call with a wait is answered at once where the state is final."""
    key = await used_key(caller)
    before = await handled(metrics_address)
    async with asyncio.timeout(timedelta(seconds=5).total_seconds()):
        answer = await caller.status(OPERATION, key, max_wait=20)
    assert wire.DECISION_STATUS_SUCCEEDED == answer.status
    after = await handled(metrics_address)
    assert 1 == after["GetDecisionStatus", "OK"] - before.get(("GetDecisionStatus", "OK"), 0)
