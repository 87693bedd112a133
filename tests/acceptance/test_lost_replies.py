"""Connections that end around a commit, and servers around their answer: one decision, and everybody learns it."""

import asyncio
from pathlib import Path

import asyncpg
import grpc
import pytest

from chaos.proxy import Cut, Proxy
from decideonce.v1 import decision_service_pb2 as wire
from harness import make_token, new_key, recorded, write_catalog

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


async def test_server_that_is_killed_between_commit_and_reply(
    database_url, observer, start_service, connect_caller, catalog, proxy
) -> None:
    """A caller whose server dies after the commit and before its reply learns the recorded decision from another.

    googleapis/google-cloud-ruby PR#1572: UNAVAILABLE was taken for "never executed".
    """
    cutter, port = proxy
    arguments = ("--database-url", through(database_url, port), "--catalog", catalog, "--no-housekeeping")
    first = await asyncio.to_thread(start_service, *arguments)
    token = await make_token(database_url, "acme")
    key = new_key()
    await connect_caller(first, token).decide(OPERATION, new_key())
    cutter.hold_after("complete")
    lost = asyncio.ensure_future(connect_caller(first, token).decide(OPERATION, key))
    async with asyncio.timeout(20):
        while (2, 2) != await counts(observer):
            pass
    first.kill()
    with pytest.raises(grpc.RpcError) as ended:
        await lost
    assert grpc.StatusCode.UNAVAILABLE == ended.value.code()
    second = start_service("--no-housekeeping")
    answer = await connect_caller(second, token).decide(OPERATION, key)
    assert (wire.DECISION_STATUS_SUCCEEDED, True) == (answer.status, answer.replayed)
    assert (2, 2) == await counts(observer)
