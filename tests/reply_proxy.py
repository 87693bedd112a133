"""A proxy between callers and a service that loses replies, and sees the requests as they were sent.

It knows the frames of HTTP/2 (RFC 9113, sections 3.4 and 4.1) and the prefix of gRPC's messages; no TLS.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Self

from decideonce.v1 import decision_service_pb2 as wire

PREFACE_BYTES = 24
HEADER_BYTES = 9
PREFIX_BYTES = 5
DATA, HEADERS = 0, 1


class Fate(Enum):
    """What becomes of a reply, and of the connection that it is on."""

    PASSES = auto()
    # The connection is reset before anything of the reply has passed.
    IS_LOST = auto()
    # The connection ends after the reply's headers: nothing below the caller may send the request again.
    IS_TORN = auto()


def scripted(*fates: Fate) -> Callable[[], Fate]:
    """Give the first replies these fates, and let the others pass."""
    left = iter(fates)
    return lambda: next(left, Fate.PASSES)


def at_random(share: float, seed: int) -> Callable[[], Fate]:
    """Lose this share of replies: four in five whole, and one torn."""
    draw = random.Random(seed)
    weights = (1 - share, share * 0.8, share * 0.2)
    return lambda: draw.choices(tuple(Fate), weights)[0]


class ReplyProxy:
    """One proxy in front of a service at HOST:PORT; it ends the first connections at once, as many as it refuses."""

    def __init__(self, service: str, fate: Callable[[], Fate] = lambda: Fate.PASSES, refuses: int = 0) -> None:
        self._service = service
        self._fate = fate
        self.refuses = refuses
        self._writers: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        # The message of each request that the service got, in the order in which they were complete.
        self.requests: list[bytes] = []
        self.cuts = 0
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    def hold(self) -> None:
        """Let no reply pass, and tell nobody."""
        self._passes.clear()

    def release(self) -> None:
        """Let replies pass again."""
        self._passes.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            self.refuses -= 1
            writer.transport.abort()
            return
        writers = {writer}
        self._writers |= writers
        try:
            to_reader, to_writer = await asyncio.open_connection(*self._service.split(":"))
            writers.add(to_writer)
            self._writers.add(to_writer)
            to_writer.write(await reader.readexactly(PREFACE_BYTES))
            pumps = [
                asyncio.ensure_future(self._pass_requests(reader, to_writer)),
                asyncio.ensure_future(self._pass_replies(to_reader, writer)),
            ]
            _, others = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in others:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, EOFError):
            pass
        finally:
            for one in writers:
                one.transport.abort()
            self._writers -= writers

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies: defaultdict[int, bytes] = defaultdict(bytes)
        while True:
            kind, stream, frame = await _read_frame(reader)
            if kind == DATA and frame[HEADER_BYTES:]:
                body = bodies[stream] = bodies[stream] + frame[HEADER_BYTES:]
                # Not at the stream's end: a service may answer before that.
                if len(body) >= PREFIX_BYTES and len(body) == PREFIX_BYTES + int.from_bytes(body[1:PREFIX_BYTES]):
                    self.requests.append(bodies.pop(stream)[PREFIX_BYTES:])
            writer.write(frame)
            await writer.drain()

    async def _pass_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun: set[int] = set()
        while True:
            kind, stream, frame = await _read_frame(reader)
            fate = Fate.PASSES
            if kind == HEADERS and stream not in begun:
                begun.add(stream)
                await self._passes.wait()
                fate = self._fate()
            self.cuts += fate is not Fate.PASSES
            if fate is Fate.IS_LOST:
                return
            writer.write(frame)
            await writer.drain()
            if fate is Fate.IS_TORN:
                writer.close()
                await writer.wait_closed()
                return


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """Read one frame: its type, its stream, and all of it."""
    header = await reader.readexactly(HEADER_BYTES)
    body = await reader.readexactly(int.from_bytes(header[:3]))
    return header[3], int.from_bytes(header[5:]) & 0x7FFFFFFF, header + body


def bodies_by_key(requests: Iterable[bytes]) -> dict[str, set[bytes]]:
    """Group the requests of Decide by their operation key: two under one key are a resend with other bytes."""
    grouped: defaultdict[str, set[bytes]] = defaultdict(set)
    for request in requests:
        # Their first two fields are the same, so GetDecisionStatusRequest is read as well.
        grouped[wire.DecideRequest.FromString(request).operation_key].add(request)
    return grouped
