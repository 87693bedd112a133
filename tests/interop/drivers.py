"""One driver per language: a program that calls a service as it is told, with stubs of its language's own tools.

It reads commands from stdin and writes answers to stdout, a JSON object per line, and connects like the examples in
docs/examples/clients, whose code it is built with. Its one argument says how many commands it works on at a time, each
on a connection of its own.
"""

import asyncio
import base64
import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from decideonce.v1 import decision_service_pb2 as wire

ROOT = Path(__file__).parents[2]
BUILT = ROOT / ".venv/interop"
EXAMPLES = ROOT / "docs/examples/clients"
JAVA = f"{BUILT}/java/target/classes:{BUILT}/java/target/lib/*"

DRIVERS: dict[str, list[str | Path]] = {
    "go": [BUILT / "go/driver.bin"],
    "java": ["java", "-cp", JAVA, "decide.Driver"],
    "python": [sys.executable, ROOT / "tests/interop/python/driver.py"],
    "typescript": ["node", BUILT / "typescript/build/driver.js"],
}
PROGRAMS: dict[str, list[str | Path]] = {
    "go": [BUILT / "go/decide.bin"],
    "java": ["java", "-cp", JAVA, "decide.Decide"],
    "python": [sys.executable, EXAMPLES / "python/decide.py"],
    "typescript": ["node", BUILT / "typescript/build/main.js"],
}
LANGUAGES = sorted(DRIVERS)


def environment(address: str, token: str, authority: Path | None = None) -> dict[str, str]:
    """Give the variables that tell an example or a driver which service to call, and as whom."""
    told = {"DECIDEONCE_SERVER": address, "DECIDEONCE_TOKEN": token}
    return os.environ | told | ({"DECIDEONCE_TLS_CA": str(authority)} if authority else {})


def _recorded_parts() -> Any:
    """Make a message that reads the decision and the provenance of an answer as the bytes that they are on the wire."""
    file = descriptor_pb2.FileDescriptorProto(name="interop.proto", package="interop", syntax="proto3")
    message = file.message_type.add(name="RecordedParts")
    for name in ("decision", "provenance"):
        number = wire.DecideResponse.DESCRIPTOR.fields_by_name[name].number
        message.field.add(name=name, number=number, type="TYPE_BYTES", label="LABEL_OPTIONAL")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("interop.RecordedParts"))


RecordedParts = _recorded_parts()


@dataclass(frozen=True)
class Said:
    """What a driver answered: gRPC's code by its number, and what else its command gives."""

    answer: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.answer[name]

    @property
    def recorded(self) -> tuple[bytes, bytes]:
        """The decision's and the provenance's bytes, as they came."""
        parts = RecordedParts.FromString(base64.b64decode(self.answer["raw"]))
        return parts.decision, parts.provenance


class Driver:
    """One running driver."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Said]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, language: str, variables: dict[str, str], workers: int = 1) -> Self:
        """Start a language's driver."""
        process = await asyncio.create_subprocess_exec(
            *DRIVERS[language],
            str(workers),
            env=variables,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(process)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = json.loads(line)
            self._asked.pop(answer.pop("id")).set_result(Said(answer))
        for asked in self._asked.values():
            asked.set_exception(EOFError("the driver ended"))

    def ask(self, do: str, request: Message, **more: Any) -> asyncio.Future[Said]:
        """Send a command with a request, as bytes in base64, and give what becomes its answer."""
        assert self._process.stdin is not None
        number = next(self._numbers)
        data = request.SerializeToString(deterministic=True)
        command = {"id": number, "do": do, "request": base64.b64encode(data).decode(), **more}
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._asked[number] = asked = asyncio.get_running_loop().create_future()
        return asked

    async def close(self) -> None:
        """End it, and wait until it has ended well."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert 0 == await self._process.wait()
        await self._reading
