"""Events to a file: a line of CloudEvents' JSON format for each."""

import asyncio
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import structlog
from cloudevents.core.formats.json import JSONFormat

from decideonce_server.cloudevent import json_event
from decideonce_server.sink import Delivery, Message, Receipt

log = structlog.get_logger()

FORMAT = JSONFormat()


class LogSink:
    """A file that sets of events are appended to, each set on the disk before it is acknowledged.

    It is opened for each set, so that it can be rotated; several processes may append to the same file. Where the disk
    was full or the machine crashed, a part of a line may stand on a line of its own: what isn't JSON is to be skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def send(self, messages: Sequence[Message]) -> list[Delivery]:
        """Append a set; nothing of it is acknowledged where the file or its disk can't take all."""
        try:
            await asyncio.to_thread(self._append, messages)
        except OSError as error:
            log.warning("the events' file can't be written", error=error.strerror)
            return [Receipt.NOT_ACKNOWLEDGED] * len(messages)
        return [Receipt.ACKNOWLEDGED] * len(messages)

    async def close(self) -> None:
        """Do nothing: no file is open between sets."""

    def _append(self, messages: Sequence[Message]) -> None:
        lines = b"".join(FORMAT.write(json_event(message)) + b"\n" for message in messages)
        with self._path.open("a+b", buffering=0) as file:
            # A write that goes on is seen page by page: its end so far would look like a line that was broken off.
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    lines = b"\n" + lines
            written = file.write(lines)
            fcntl.flock(file, fcntl.LOCK_UN)
            if written != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
