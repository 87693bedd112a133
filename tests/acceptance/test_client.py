"""The published client against a real service, whose connections live for a second only."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import grpc
import psutil
import pytest

from decideonce import errors
from decideonce.channel import CHANNEL_OPTIONS
from decideonce.client import DecisionClient, DecisionStatus, Execution, RetryPolicy, SyncDecisionClient
from decideonce_server import app
from harness import new_key
from processes import until
from stage import LedgerView, Stage, evaluations

OPERATION = "test.echo"
CALLS = 200
# A service with gRPC's defaults ends the connection at the fourth ping, after two minutes.
IDLE_S = 130.0


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give an operation for each case."""
    operations = {
        OPERATION: {"policy": "echo", "time_budget": "10s", "default_wait": "1s"},
        "test.background": {"policy": "echo", "execution": "background"},
    }
    return operations, {"echo": "echo_policy:decide"}


@pytest.fixture(scope="module")
def flags() -> list[str]:
    """Let connections live for a second."""
    return ["--connection-age-max", "1s"]


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[DecisionClient]:
    """Give a client of the module's service."""
    async with DecisionClient(stage.service.address, token=stage.token) as client:
        yield client


def ports_to(stage: Stage) -> set[int]:
    """Give the ports from which this process is connected to the service."""
    port = int(stage.service.address.rpartition(":")[2])
    connections = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in connections if one.raddr and one.raddr.port == port}


async def test_connections_that_are_given_up_cost_no_call(stage: Stage, client: DecisionClient, view) -> None:
    """A service that ends its connections (GOAWAY) under load leaves every caller with its one decision."""
    before = await view.counts()
    ports: set[int] = set()
    keys = iter([new_key() for _ in range(CALLS)])

    async def decide_all() -> list[bool]:
        replayed = []
        for key in keys:
            decision = await client.decide(OPERATION, {"do": "sleep", "seconds": 0.05}, key=key)
            replayed.append(decision.replayed)
            ports.update(ports_to(stage))
        return replayed

    answers = await asyncio.gather(*[decide_all() for _ in range(4)])
    assert [False] * CALLS == [replayed for part in answers for replayed in part]
    assert [before[0] + CALLS, before[1] + CALLS] == list(await view.counts())
    assert len(ports) >= 2


async def test_fault_that_is_over_before_the_call_is(
    stage: Stage, client: DecisionClient, view: LedgerView, tmp_path: Path
) -> None:
    """A policy whose source is down is asked again by the same call until it decides, and then replayed as it was.

    ikyriak/IdempotentAPI#37: after a fault the same key kept getting the cached failure.
    """
    source, key = tmp_path / "source", new_key()
    facts = {"do": "need", "source": str(source), "mark": f"need {key}."}
    deciding = asyncio.ensure_future(client.decide(OPERATION, facts, key=key))
    await until(lambda: evaluations(stage.service, facts["mark"]))
    source.touch()
    decided = await deciding
    assert not decided.replayed
    assert 2 <= decided.provenance.attempt == evaluations(stage.service, facts["mark"])
    again = await client.decide(OPERATION, facts, key=key)
    assert (True, decided.provenance, decided.outcome) == (again.replayed, again.provenance, again.outcome)


async def test_failure_that_is_final(stage: Stage, client: DecisionClient) -> None:
    """A policy that refuses is asked once; each call raises what is recorded, and corrected facts need a new key."""
    key = new_key()
    facts = {"do": "fail", "mark": f"fail {key}."}
    failures = []
    for _ in range(3):
        with pytest.raises(errors.DecisionFailed) as raised:
            await client.decide(OPERATION, facts, key=key)
        failures.append(raised.value)
    assert [False, True, True] == [failure.replayed for failure in failures]
    assert {("POLICY_FAILED", key)} == {(failure.reason, failure.operation_key) for failure in failures}
    assert 1 == evaluations(stage.service, facts["mark"])
    with pytest.raises(errors.OperationKeyReused, match="use a new key"):
        await client.decide(OPERATION, facts | {"do": "decide"}, key=key)


async def test_decision_that_outlasts_a_wait(stage: Stage, client: DecisionClient) -> None:
    """A decision that takes longer than the service waits, or that a worker makes, is polled to its end."""
    slow, background = await asyncio.gather(
        client.decide(OPERATION, {"do": "sleep", "seconds": 1.5}), client.decide("test.background", {})
    )
    assert ["DONE", "DONE"] == [slow.outcome, background.outcome]
    with pytest.raises(errors.StillProcessing) as raised:
        await client.decide(OPERATION, {"do": "sleep", "seconds": 0.3}, max_wait=0)
    recorded = await client.status(OPERATION, raised.value.operation_key, max_wait=timedelta(seconds=10))
    assert (DecisionStatus.SUCCEEDED, "DONE") == (recorded.status, recorded.decision.outcome)


def test_sync_client_is_the_same(stage: Stage) -> None:
    """The client that blocks decides, is refused and tells an operation's contract."""
    with SyncDecisionClient(stage.service.address, token=stage.token) as client:
        decision = client.decide(OPERATION, {"outcome": "APPROVED", "reasons": ["fine"], "echo": {"n": 1.5}})
        assert ("APPROVED", ("fine",), {"n": 1.5}) == (decision.outcome, decision.reasons, decision.outputs["echo"])
        assert decision == client.status(OPERATION, decision.operation_key).decision
        contract = client.operation("test.background")
        assert (Execution.BACKGROUND, 1, None) == (contract.execution, contract.policy_version, contract.retention)
        with pytest.raises(errors.OperationNotFound):
            client.decide("test.absent", {})


def test_service_permits_the_keepalive_that_is_shipped() -> None:
    """A client's pings are no more frequent than the service takes them."""
    shipped, permitted = dict(CHANNEL_OPTIONS), dict(app.SERVER_OPTIONS)
    assert shipped["grpc.keepalive_time_ms"] >= 2 * permitted["grpc.http2.min_ping_interval_without_data_ms"]
    assert permitted["grpc.keepalive_permit_without_calls"] >= shipped["grpc.keepalive_permit_without_calls"]


@pytest.mark.interop
async def test_idle_connection_is_kept(start_service, database_url) -> None:
    """A client that is idle for more than two minutes keeps its connection: its pings are none too many."""
    service = start_service("--no-housekeeping")
    async with grpc.aio.insecure_channel(service.address, options=CHANNEL_OPTIONS) as channel:
        client = DecisionClient(channel, retry=RetryPolicy(tries_max=1))
        with pytest.raises(errors.Unauthenticated):
            await client.operation(OPERATION)
        assert grpc.ChannelConnectivity.READY is channel.get_state()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), IDLE_S)
        assert grpc.ChannelConnectivity.READY is channel.get_state()
        with pytest.raises(errors.Unauthenticated):
            await client.operation(OPERATION)
