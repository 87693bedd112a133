"""Events to a file: a line of CloudEvents' JSON format for each."""

import asyncio
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import structlog
from cloudevents.core.formats.json import JSONFormat

from decideonce_server.cloudevent import json_event
from decideonce_server.sink import Message, Outcome, Receipt

log = structlog.get_logger()


class LogSink:
    """A file that sets of events are appended to, each set on the disk before it is acknowledged.

    It is opened for each set, so that it can be rotated. Several processes may append to the same file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def send(self, messages: Sequence[Message]) -> list[Outcome]:
        """Append a set: all of it, or nothing where the file or its disk can't take it."""
        try:
            await asyncio.to_thread(self._append, messages)
        except OSError as error:
            log.warning("the events' file can't be written", error=error.strerror)
            return [Receipt.NOT_ACKNOWLEDGED] * len(messages)
        return [Receipt.ACKNOWLEDGED] * len(messages)

    async def close(self) -> None:
        """Do nothing: no file is open between sets."""

    def _append(self, messages: Sequence[Message]) -> None:
        lines = b"".join(JSONFormat().write(json_event(message)) + b"\n" for message in messages)
        with self._path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _cut_torn_line(file)
            end = file.tell()
            try:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise


def _cut_torn_line(file: IO[bytes]) -> None:
    """Remove what a crash left of a set that wasn't acknowledged: a last line without its end."""
    end = file.seek(0, os.SEEK_END)
    kept = end
    while kept:
        start = max(kept - 65_536, 0)
        file.seek(start)
        newline = file.read(kept - start).rfind(b"\n")
        kept = start + newline + 1 if newline >= 0 else start
        if newline >= 0:
            break
    if kept != end:
        file.truncate(kept)
    file.seek(kept)
