"""How a connection's trouble reaches those who run statements."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
from sqlalchemy.engine import URL

from decideonce_server.database import CLOSE_TIMEOUT_S, ConnectionLost, Database, Statement
from decideonce_server.errors import LedgerUnavailable

ONE = Statement("one", "SELECT CAST(:one AS integer) AS one")
SESSION = Statement("session", "SELECT pg_backend_pid() AS pid")


class Relay:
    """Passes bytes between a service and its Postgres, and keeps from the service that Postgres hung up."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._writers: list[asyncio.StreamWriter] = []
        self.hung_up = asyncio.Event()

    async def start(self) -> int:
        """Listen, and give the port."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop, and cut everything."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_postgres, to_postgres = await asyncio.open_unix_connection(self._socket)
        self._writers += writer, to_postgres
        answers = asyncio.ensure_future(self._pass_on(from_postgres, writer))
        await self._pass_on(reader, to_postgres)
        to_postgres.close()
        await answers

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while passing := await reader.read(65536):
            writer.write(passing)
        self.hung_up.set()


@pytest.fixture
async def relay(database_url: URL) -> AsyncIterator[Relay]:
    """Give a relay to the test's Postgres."""
    relay = Relay("{host}/.s.PGSQL.{port}".format(**database_url.query))
    yield relay
    relay.close()


@pytest.fixture
async def relayed(relay: Relay, database_url: URL) -> AsyncIterator[Database]:
    """Give the service's own access to the test's database, through the relay."""
    url = database_url.set(host="127.0.0.1", port=await relay.start(), query={"ssl": "disable"})
    database = Database(url, pool_size=1)
    yield database
    await database.close()


async def test_session_ended_before_its_connection(
    relay: Relay, relayed: Database, observer: asyncpg.Connection
) -> None:
    """A session that Postgres ended is lost also while its connection still looks open, and the next one serves.

    asyncpg calls what it then can't do an internal error of its own.
    """
    (session,) = await relayed.run(SESSION)
    assert await observer.fetchval("SELECT pg_terminate_backend($1, 5000)", session.pid)
    async with asyncio.timeout(5):
        await relay.hung_up.wait()
    # By the time of an answer to this, what was passed on before has arrived.
    await observer.fetchval("SELECT 1")
    with pytest.raises(ConnectionLost):
        await relayed.run(SESSION)
    (other,) = await relayed.run(SESSION)
    assert session.pid != other.pid


async def test_close_beside_a_server_that_does_not_answer(relayed: Database) -> None:
    """A stop doesn't wait for ever for a server to say goodbye."""
    await relayed.run(SESSION)
    async with asyncio.timeout(2 * CLOSE_TIMEOUT_S):
        await relayed.close()


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
    assert session.pid == same.pid
