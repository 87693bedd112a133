"""Connections that end around a commit, and servers around their answer: one decision, and everybody learns it."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest

from chaos.proxy import Cut, Proxy
from decideonce import results
from decideonce.channel import CHANNEL_OPTIONS
from decideonce.client import DecisionClient, RetryPolicy
from decideonce.v1 import decision_service_pb2 as wire
from harness import make_token, new_key, recorded, write_catalog
from processes import until

OPERATION = "test.echo"


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    """Give a catalog with an operation that waits long for its result."""
    operations = {OPERATION: {"policy": "echo", "time_budget": "10s", "default_wait": "15s"}}
    return str(write_catalog(tmp_path / "catalog", operations, {"echo": "echo_policy:decide"}))


@pytest.fixture
async def proxy(postgres):
    """Give a proxy in front of the tests' Postgres, which listens on a socket only, and its port."""
    url = postgres.url()
    path = f"{url.query['host']}/.s.PGSQL.{url.query['port']}"
    proxy = Proxy(lambda: path)
    port = await proxy.start()
    yield proxy, port
    await proxy.close()


def through(url, port: int) -> str:
    """Give a database's URL through the proxy."""
    return f"postgresql://{url.username}@127.0.0.1:{port}/{url.database}?ssl=disable"


async def counts(observer: asyncpg.Connection) -> tuple[int, int]:
    """Count decisions and events."""
    return (
        await observer.fetchval("SELECT count(*) FROM ledger WHERE state = 2"),
        await observer.fetchval("SELECT count(*) FROM outbox"),
    )


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("statement", ["reserve", "complete"])
async def test_connection_that_is_cut_around_a_commit(
    database_url, observer, start_service, connect_caller, catalog, proxy, statement, after
) -> None:
    """A connection that is cut before or after a commit costs no decision, makes no second, and no caller notices.

    fredrik/rekorderlig#111: a commit was sent again on a new connection, where it was empty and succeeded.
    """
    cutter, port = proxy
    arguments = ("--database-url", through(database_url, port), "--catalog", catalog, "--no-housekeeping")
    # In a thread: the proxy needs this loop while the service starts.
    service = await asyncio.to_thread(start_service, *arguments)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await caller.decide(OPERATION, new_key())
    cutter.cut = cut = Cut(statement, after)
    key, facts = new_key(), {"mark": "around."}
    answer = await caller.decide(OPERATION, key, facts)
    assert cut.made.is_set()
    assert (wire.DECISION_STATUS_SUCCEEDED, False, 1) == (answer.status, answer.replayed, answer.provenance.attempt)
    again = await caller.decide(OPERATION, key, facts)
    assert (True, recorded(answer)) == (again.replayed, recorded(again))
    assert (2, 2) == await counts(observer)
    assert 1 == service.log.read_text().count("evaluated around.")


class Recorder(grpc.aio.UnaryUnaryClientInterceptor):
    """Keeps what a client sends, and the code that each call ends with."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, grpc.StatusCode]] = []

    async def intercept_unary_unary(self, continuation, client_call_details, request: bytes) -> Any:
        call = await continuation(client_call_details, request)
        self.sent.append((request, await call.code()))
        return call


async def test_server_that_is_killed_between_commit_and_reply(
    database_url, observer, start_service, connect_caller, catalog, proxy
) -> None:
    """A caller whose server dies after the commit and before its reply is told the recorded decision by another.

    googleapis/google-cloud-ruby PR#1572: UNAVAILABLE was taken for "never executed", or the key was made within the
    retry loop. Here the caller gives no key, and changes its facts between sends.
    """
    cutter, port = proxy
    arguments = ("--database-url", through(database_url, port), "--catalog", catalog, "--no-housekeeping")
    first = await asyncio.to_thread(start_service, *arguments)
    second = await asyncio.to_thread(start_service, "--no-housekeeping")
    token = await make_token(database_url, "acme")
    facts: dict[str, Any] = {"mark": "killed.", "changes": []}

    def changing_token() -> str:
        facts["changes"].append("changed")
        return token

    await connect_caller(first, token).decide(OPERATION, new_key())
    cutter.hold_after("complete")
    recorder, begun = Recorder(), time.monotonic()
    both = f"ipv4:{first.address},{second.address}"
    async with grpc.aio.insecure_channel(both, options=CHANNEL_OPTIONS, interceptors=[recorder]) as channel:
        client = DecisionClient(channel, token=changing_token)
        deciding = asyncio.ensure_future(client.decide(OPERATION, facts, deadline=20.0))
        await until(lambda: counted(observer, (2, 2)))
        first.kill()
        decision = await deciding
    assert time.monotonic() - begun < 20.0
    bodies, codes = zip(*recorder.sent, strict=True)
    assert (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK) == (codes[0], codes[-1])
    assert len(bodies) <= RetryPolicy().tries_max
    sent = wire.DecideRequest.FromString(*set(bodies))
    assert (decision.operation_key, []) == (sent.operation_key, results.plain(sent.facts)["changes"])
    stored = await connect_caller(second, token).status(OPERATION, decision.operation_key)
    assert (True, results.recorded_of(stored).decision) == (decision.replayed, replace(decision, replayed=False))
    assert (2, 2) == await counts(observer)
    assert 1 == first.log.read_text().count("evaluated killed.")


async def counted(observer: asyncpg.Connection, expected: tuple[int, int]) -> bool:
    """Tell whether there are so many decisions and events."""
    return expected == await counts(observer)
