"""What tests of a whole service share: catalogs made in place, real service processes, and calls."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import duration_pb2, struct_pb2
from google.rpc import error_details_pb2, status_pb2
from sqlalchemy.engine import URL

from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceStub
from decideonce_server.database import Database
from decideonce_server.embedded import EmbeddedPostgres
from decideonce_server.ledger_tokens import TokenStore
from decideonce_server.migrate import migrate
from decideonce_server.policy import Evaluate, Evaluation, Input, PolicyError

ALL_ROLES = ("decide", "read", "admin")
READY_WITHIN_S = 30.0

# Texts of facts that are this long are looked for in what services say.
DISTINCT_CHARACTERS = 12

ANY_FACTS: dict[str, Any] = {"type": "object"}


def evaluate_one(evaluate: Evaluate, facts: dict[str, Any], decision: dict[str, Any]) -> Evaluation:
    """Evaluate one input with a policy made ready, and raise its error."""
    (result,) = evaluate([Input(facts, decision)])
    if isinstance(result, PolicyError):
        raise result
    return result


def table_policy(*outcomes: str, outputs: Mapping[str, str] | None = None) -> str:
    """Make a JDM policy: a decision table that gives the first outcome where facts.n is 0, the next where it is 1.

    And so on; the last outcome is for everything else. `outputs` are further columns, as expressions.
    """
    columns = {"outcome": None, **(outputs or {})}
    rules = []
    for i, outcome in enumerate(outcomes):
        last = i == len(outcomes) - 1
        rule = {"_id": f"rule-{i}", "in": "" if last else f"facts.n == {i}", "outcome": json.dumps(outcome)}
        rules.append(rule | dict(outputs or {}))
    table = {
        "hitPolicy": "first",
        "inputs": [{"id": "in", "name": "n"}],
        "outputs": [{"id": name, "name": name, "field": name} for name in columns],
        "rules": rules,
    }
    return _line_of("decisionTableNode", table)


def expression_policy(**expressions: str) -> str:
    """Make a JDM policy: one node of expressions, by the names of what they put out."""
    cells = [{"id": name, "key": name, "value": value} for name, value in expressions.items()]
    return _line_of("expressionNode", {"expressions": cells})


def _line_of(kind: str, content: Mapping[str, Any]) -> str:
    """Write a JDM document: the input, one node, the output."""
    return json.dumps(
        {
            "nodes": [
                {"id": "1", "type": "inputNode", "name": "request", "content": {}},
                {"id": "2", "type": kind, "name": "table", "content": content},
                {"id": "3", "type": "outputNode", "name": "response", "content": {}},
            ],
            "edges": [
                {"id": "e1", "sourceId": "1", "targetId": "2", "type": "edge"},
                {"id": "e2", "sourceId": "2", "targetId": "3", "type": "edge"},
            ],
        }
    )


def write_catalog(
    directory: Path,
    operations: Mapping[str, Mapping[str, Any]],
    policies: Mapping[str, str],
) -> Path:
    """Write a catalog: operations by name with their settings, policies by name as JDM text or an entry point."""
    for folder in ("operations", "policies"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
        for old in (directory / folder).iterdir():
            old.unlink()
    for name, settings in operations.items():
        document = {"operation": name, "facts": ANY_FACTS} | dict(settings)
        # JSON is YAML.
        (directory / "operations" / f"{name}.yaml").write_text(json.dumps(document))
    for name, text in policies.items():
        if text.startswith("{"):
            (directory / "policies" / f"{name}.json").write_text(text)
        else:
            document = {"engine": "python", "entry_point": text}
            (directory / "policies" / f"{name}.yaml").write_text(json.dumps(document))
    return directory


# What a service may say to nobody but its caller, and everything that tests use.
_secrets: set[str] = set()


def new_key() -> str:
    """Make an operation key."""
    return secret_text()


def secret_text() -> str:
    """Make a text that no log, metric, trace or error may hold."""
    text = str(uuid.uuid4())
    _secrets.add(text)
    return text


def spoken(text: str) -> list[str]:
    """Give the keys, tokens and facts of the tests that stand in a text that a service wrote."""
    return [secret for secret in _secrets if secret in text]


def spoken_in_log(log: Path) -> list[str]:
    """Give those that stand in a log, what policies print apart."""
    lines = log.read_text(errors="replace").splitlines()
    return spoken("\n".join(line for line in lines if not line.startswith("evaluated ")))


def _texts(value: Any) -> Iterator[str]:
    """Give the texts among facts that are long enough to be nobody else's."""
    if isinstance(value, str) and len(value) >= DISTINCT_CHARACTERS:
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _texts(member)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def struct(facts: Mapping[str, Any]) -> struct_pb2.Struct:
    """Make a Struct."""
    message = struct_pb2.Struct()
    message.update(facts)
    _secrets.update(_texts(facts))
    return message


def decide_request(
    operation: str, key: str, facts: Mapping[str, Any] | None = None, **fields: Any
) -> wire.DecideRequest:
    """Make a request; `max_wait` is in seconds."""
    if "max_wait" in fields:
        fields["max_wait"] = seconds(fields["max_wait"])
    return wire.DecideRequest(operation=operation, operation_key=key, facts=struct(facts or {}), **fields)


def status_request(operation: str, key: str, max_wait: float | None = None) -> wire.GetDecisionStatusRequest:
    """Make a request; `max_wait` is in seconds."""
    return wire.GetDecisionStatusRequest(
        operation=operation,
        operation_key=key,
        max_wait=None if max_wait is None else seconds(max_wait),
    )


def seconds(number: float) -> duration_pb2.Duration:
    """Make a Duration."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(number * 1e9))
    return duration


def recorded(response: wire.DecideResponse | wire.GetDecisionStatusResponse) -> tuple[bytes, bytes]:
    """Give the parts of an answer that are the same in every answer, as bytes."""
    return (
        response.decision.SerializeToString(deterministic=True),
        response.provenance.SerializeToString(deterministic=True),
    )


@dataclass(frozen=True)
class CallError:
    """A gRPC error, decoded."""

    code: grpc.StatusCode
    reason: str
    metadata: dict[str, str]
    fields: list[str]
    retry_after: bool
    text: str
    trailers: dict[str, Any]


def call_error(error: grpc.RpcError) -> CallError:
    """Decode a gRPC error."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    details = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in details.details:
        assert detail.Unpack(info) or detail.Unpack(bad) or detail.Unpack(retry)
    assert info.domain in ("decideonce", "")
    assert [] == spoken(f"{error.details()} {details}")
    return CallError(
        code=error.code(),
        reason=info.reason,
        metadata=dict(info.metadata),
        fields=[violation.field for violation in bad.field_violations],
        retry_after=retry.HasField("retry_delay"),
        text=error.details(),
        trailers=trailers,
    )


async def refused(call: Any) -> CallError:
    """Make a call that must fail, and give its error."""
    try:
        answer = await call
    except grpc.RpcError as error:
        return call_error(error)
    raise AssertionError(f"the call was answered: {answer}")


class Caller:
    """A caller with a token, on a channel."""

    def __init__(self, channel: grpc.aio.Channel, token: str | None) -> None:
        self._stub = DecisionServiceStub(channel)
        self.channel = channel
        self.metadata = [("authorization", f"Bearer {token}")] if token is not None else []

    def decide(self, *args: Any, timeout: float | None = 20.0, **fields: Any) -> Any:
        """Call Decide."""
        return self._stub.Decide(decide_request(*args, **fields), metadata=self.metadata, timeout=timeout)

    def decide_raw(self, data: bytes, timeout: float | None = 20.0) -> Any:
        """Call Decide with these very bytes."""
        call = self.channel.unary_unary(
            "/decideonce.v1.DecisionService/Decide",
            request_serializer=None,
            response_deserializer=wire.DecideResponse.FromString,
        )
        return call(data, metadata=self.metadata, timeout=timeout)

    def status(self, *args: Any, timeout: float | None = 20.0, **fields: Any) -> Any:
        """Call GetDecisionStatus."""
        return self._stub.GetDecisionStatus(status_request(*args, **fields), metadata=self.metadata, timeout=timeout)

    def operation(self, name: str) -> Any:
        """Call GetOperation."""
        return self._stub.GetOperation(wire.GetOperationRequest(operation=name), metadata=self.metadata, timeout=20.0)


class ServiceProcess:
    """A real `decideonce serve`."""

    def __init__(self, log: Path, arguments: list[str], environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "decideonce_server", "serve", "--listen", "127.0.0.1:0", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                # One, unless a test is about several: what a process keeps to itself is then there for every call.
                env={"DECIDEONCE_WORKERS": "1", **os.environ, **(environment or {})},
                text=True,
                start_new_session=True,
            )
        self.address = ""

    def wait_until_ready(self) -> str:
        """Wait for the line that says where it serves, and give that."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("decideonce ready on "):
            self.process.wait(READY_WITHIN_S)
            raise AssertionError(f"it did not start: {line}{self.log.read_text()}")
        self.address = line.removeprefix("decideonce ready on ").strip()
        return self.address

    def stop(self) -> int:
        """Ask it to stop, and give its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(READY_WITHIN_S)

    def kill(self) -> None:
        """Kill it, and everything that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(READY_WITHIN_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        assert [] == spoken_in_log(self.log)


@contextmanager
def own_database(purpose: str) -> Iterator[tuple[Path, URL]]:
    """Give a program a folder, and a database with the schema on a PostgreSQL of its own."""
    with tempfile.TemporaryDirectory(prefix=f"decideonce-{purpose}-") as temporary:
        directory = Path(temporary)
        # The server runs as a user of its own where this runs as root.
        directory.chmod(0o755)
        postgres = EmbeddedPostgres(directory / "data")
        try:
            url = asyncio.run(postgres.create_database())
            asyncio.run(migrate(url))
            yield directory, url
        finally:
            postgres.stop()


def url_text(url: URL) -> str:
    """Write a database's URL as a setting."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


async def make_token(
    url: URL, tenant: str, roles: tuple[str, ...] = ALL_ROLES, operations: tuple[str, ...] = ("*",)
) -> str:
    """Store a token."""
    database = Database(url, pool_size=1)
    try:
        token = await TokenStore(database).create(tenant, roles, operations)
        _secrets.add(token)
        return token
    finally:
        await database.close()
