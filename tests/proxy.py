"""A proxy between a service and its Postgres that stops a connection at a given statement, before or after it ran.

It knows enough of the protocol for that: a statement's Bind goes to Postgres, and the ReadyForQuery behind it comes
back when its transaction is committed (PostgreSQL's documentation, "Message Flow", "Extended Query"). The statement's
name stands in a comment at the head of its text.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from sqlalchemy.engine import URL

HEADER = 5  # a type, and a length of four bytes that counts itself


@dataclass
class Trap:
    """What happens once, to the connection on which a statement is sent next.

    `after` is whether Postgres ran it, and only its answer is lost; `cuts` is whether the connection ends, or hangs.
    """

    statement: str
    after: bool
    cuts: bool = True
    sprung: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """A proxy for one database; `url` is what a service is given."""

    def __init__(self, target: URL) -> None:
        self._socket = f"{target.query['host']}/.s.PGSQL.{target.query['port']}"
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""
        self.trap: Trap | None = None

    def set(self, statement: str, *, after: bool, cuts: bool = True) -> Trap:
        """Set a trap."""
        self.trap = Trap(statement, after, cuts)
        return self.trap

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        """Listen as long as the block runs."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.url = f"postgresql://{self._target.username}@127.0.0.1:{port}/{self._target.database}?ssl=disable"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_unix_connection(self._socket)
        connection = _Connection(self)
        pumps: list[asyncio.Task[None]] = []
        try:
            with contextlib.suppress(EOFError):
                length = await reader.readexactly(4)
                to_writer.write(length + await reader.readexactly(int.from_bytes(length) - 4))
            pumps = [
                asyncio.create_task(_pump(reader, to_writer, connection.from_service)),
                asyncio.create_task(_pump(to_reader, writer, connection.from_postgres)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, to_writer):
                end.transport.abort()


class _Connection:
    """One connection, and what was prepared on it."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._prepared: dict[bytes, str] = {}
        self._sprung: Trap | None = None

    async def from_service(self, kind: bytes, body: bytes) -> bool:
        """Look at a message to Postgres; False cuts the connection before it is passed on."""
        if kind == b"P":
            name, text, _ = body.split(b"\0", 2)
            self._prepared[name] = text.decode().removeprefix("/* ").partition(" */")[0]
        trap = self._proxy.trap
        if kind == b"B" and trap is not None and self._prepared.get(body.split(b"\0", 2)[1]) == trap.statement:
            self._proxy.trap = None
            if not trap.after:
                return await _spring(trap)
            self._sprung = trap
        return True

    async def from_postgres(self, kind: bytes, _: bytes) -> bool:
        """Look at a message from Postgres; False cuts the connection before it is passed on."""
        return True if kind != b"Z" or self._sprung is None else await _spring(self._sprung)


async def _spring(trap: Trap) -> bool:
    trap.sprung.set()
    if not trap.cuts:
        await asyncio.Event().wait()
    return False


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: Callable[[bytes, bytes], Awaitable[bool]]
) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            header = await reader.readexactly(HEADER)
            body = await reader.readexactly(int.from_bytes(header[1:]) - 4)
            if not await passes(header[:1], body):
                return
            writer.write(header + body)
            await writer.drain()
