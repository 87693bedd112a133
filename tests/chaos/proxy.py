"""A proxy between a service and its Postgres that knows enough of the protocol to cut a connection around a commit.

The service sends each change as one statement in a transaction of its own, so a commit happens between the statement's
Bind and the ReadyForQuery behind it (PostgreSQL's documentation, "Message Flow", "Extended Query"). The statement's
name stands in a comment at the head of its text.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

HEADER = 5  # a type, and a length of four bytes that counts itself


@dataclass
class Cut:
    """A cut to be made once: around the next execution of a statement, before or after Postgres has run it."""

    statement: str
    after: bool
    # Rather than cutting, let nothing pass any more.
    holds: bool = False
    made: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """One proxy; `target` says where Postgres is, a host and port or a socket's path, and may change."""

    def __init__(self, target: Callable[[], tuple[str, int] | str]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[_Connection] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.cut: Cut | None = None
        # Whether the service isn't told that Postgres hung up, and when it would have been.
        self.hides_ends = False
        self.ended = asyncio.Event()

    async def start(self) -> int:
        """Listen, and give the port."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop, and cut everything."""
        self._open.set()
        if self._server is not None:
            self._server.close()
        self.cut_all()

    def cut_all(self) -> None:
        """Cut every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def lose_all(self) -> None:
        """Let nothing pass on the connections that there are, for ever, and tell nobody: their host is gone."""
        for connection in self._connections:
            connection.is_lost = True

    def hold_after(self, statement: str) -> None:
        """Let nothing pass any more once Postgres has run a statement."""
        self.cut = Cut(statement, after=True, holds=True)

    def black_hole(self) -> None:
        """Let nothing pass either way, and tell nobody."""
        self._open.clear()

    def let_pass(self) -> None:
        """Let everything pass again."""
        self._open.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._open.wait()
            target = self._target()
            to_reader, to_writer = await (
                asyncio.open_unix_connection(target) if isinstance(target, str) else asyncio.open_connection(*target)
            )
            self._writers.add(to_writer)
            connection = _Connection(self, writer, to_writer)
            self._connections.add(connection)
            length = await reader.readexactly(4)
            to_writer.write(length + await reader.readexactly(int.from_bytes(length) - 4))
            tasks = [
                asyncio.ensure_future(connection.pump(reader, to_writer, connection.from_service)),
                asyncio.ensure_future(connection.pump(to_reader, writer, connection.from_postgres)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.ended.set()
            if self.hides_ends:
                await tasks[0]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            connection.abort()
            self._connections.discard(connection)
            self._writers.discard(to_writer)
        except (OSError, EOFError):
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    @property
    def is_open(self) -> asyncio.Event:
        """Set while things pass."""
        return self._open


class _Connection:
    """One connection, and what was prepared on it."""

    def __init__(self, proxy: Proxy, *writers: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._writers = writers
        self._prepared: dict[bytes, str] = {}
        self._cut_when_ready: Cut | None = None
        self.is_lost = False

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: Callable[[bytes, bytes], bool]
    ) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                header = await reader.readexactly(HEADER)
                body = await reader.readexactly(int.from_bytes(header[1:]) - 4)
                if not passes(header[:1], body):
                    return
                await self._proxy.is_open.wait()
                if self.is_lost:
                    continue
                writer.write(header + body)
                await writer.drain()

    def from_service(self, kind: bytes, body: bytes) -> bool:
        """Look at a message to Postgres; False cuts the connection before it is passed on."""
        if kind == b"P":
            name, text, _ = body.split(b"\0", 2)
            self._prepared[name] = text.decode().removeprefix("/* ").partition(" */")[0]
        cut = self._proxy.cut
        if kind == b"B" and cut is not None:
            _, name, _ = body.split(b"\0", 2)
            if self._prepared.get(name) == cut.statement:
                self._proxy.cut = None
                if not cut.after:
                    cut.made.set()
                    return False
                self._cut_when_ready = cut
        return True

    def from_postgres(self, kind: bytes, body: bytes) -> bool:
        """Look at a message from Postgres; False cuts the connection before it is passed on."""
        if kind == b"Z" and self._cut_when_ready is not None:
            self._cut_when_ready.made.set()
            if not self._cut_when_ready.holds:
                return False
            self._proxy.black_hole()
        return True
