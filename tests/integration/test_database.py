"""How a connection's trouble reaches those who run statements."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
from sqlalchemy.engine import URL

from chaos.proxy import Proxy
from decideonce_server.database import CLOSE_TIMEOUT_S, ConnectionLost, Database, Statement
from decideonce_server.errors import LedgerUnavailable

ONE = Statement("one", "SELECT CAST(:one AS integer) AS one")
SESSION = Statement("session", "SELECT pg_backend_pid() AS pid")


@pytest.fixture
async def proxy(database_url: URL) -> AsyncIterator[Proxy]:
    """Give a proxy of the test's Postgres."""
    proxy = Proxy(lambda: "{host}/.s.PGSQL.{port}".format(**database_url.query))
    yield proxy
    await proxy.close()


@pytest.fixture
async def proxied(proxy: Proxy, database_url: URL) -> AsyncIterator[Database]:
    """Give the service's own access to the test's database, through the proxy."""
    database = Database(database_url.set(host="127.0.0.1", port=await proxy.start(), query={"ssl": "disable"}))
    yield database
    proxy.cut_all()
    await database.close()


async def test_session_ended_before_its_connection(
    proxy: Proxy, proxied: Database, observer: asyncpg.Connection
) -> None:
    """A session that Postgres ended is lost also while its connection still looks open, and the next one serves.

    asyncpg calls what it then can't do an internal error of its own.
    """
    proxy.hides_ends = True
    (session,) = await proxied.run(SESSION)
    assert await observer.fetchval("SELECT pg_terminate_backend($1, 5000)", session["pid"])
    async with asyncio.timeout(5):
        await proxy.ended.wait()
    # By the time of an answer to this, what was passed on before has arrived.
    await observer.fetchval("SELECT 1")
    with pytest.raises(ConnectionLost):
        await proxied.run(SESSION)
    (other,) = await proxied.run(SESSION)
    assert session["pid"] != other["pid"]


async def test_close_beside_a_server_that_does_not_answer(proxy: Proxy, proxied: Database) -> None:
    """A stop doesn't wait for ever for a server to say goodbye."""
    await proxied.run(SESSION)
    proxy.black_hole()
    async with asyncio.timeout(2 * CLOSE_TIMEOUT_S):
        await proxied.close()


async def test_connections_that_end_as_soon_as_they_are_made(database_url: URL) -> None:
    """A server that ends each new connection at once is an outage, and no defect."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    database = Database(database_url.set(host="127.0.0.1", port=port, query={"ssl": "disable"}))
    with pytest.raises(LedgerUnavailable):
        await database.run(SESSION)
    await database.close()
    server.close()


async def test_value_that_no_statement_can_take(database: Database) -> None:
    """A value of a wrong type is a defect, which no retry would mend, and its connection serves on."""
    (session,) = await database.run(SESSION)
    with pytest.raises(asyncpg.DataError):
        await database.run(ONE, one="two")
    (same,) = await database.run(SESSION)
    assert session["pid"] == same["pid"]
