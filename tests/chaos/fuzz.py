"""Sends a live service mutated bytes, metadata and facts: `make chaos [INPUTS=100000] [SEED=…]`.

Whatever comes, the service answers in time, with a status and reason of the contract and never INTERNAL; it writes no
row for a call that it refused; and it has no more memory, files and processes in the end than after its first inputs.
Hypothesis makes the inputs, and the smallest that still shows a fault.
"""

import argparse
import asyncio
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import psutil
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

# Nothing is forked: gRPC's fork handlers would only warn.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import connect
from decideonce.v1 import catalog_pb2
from decideonce.v1 import decision_service_pb2 as wire
from harness import (
    ANY_FACTS,
    ServiceProcess,
    call_error,
    make_token,
    own_database,
    table_policy,
    url_text,
    write_catalog,
)

DECISIONS, CATALOG = "/decideonce.v1.DecisionService/", "/decideonce.v1.CatalogService/"
METHODS = (
    *(f"{DECISIONS}Decide",) * 6,
    f"{DECISIONS}GetDecisionStatus",
    f"{DECISIONS}GetOperation",
    f"{CATALOG}ApplyCatalog",
    f"{CATALOG}GetPolicyVersion",
)
STRICT = {
    "type": "object",
    "required": ["n"],
    "additionalProperties": False,
    "properties": {
        "n": {"type": "integer"},
        "amount": {"type": "string", "format": "decimal"},
        "at": {"type": "string", "format": "date-time"},
        "name": {"type": "string", "pattern": "^([a-z]+ ?)+$"},
        "tags": {"type": "array", "items": {"type": "string"}, "x-unordered": True},
    },
}
OPERATIONS = {
    "fuzz.strict": {"policy": "table", "facts": STRICT},
    "fuzz.any": {"policy": "reads", "facts": ANY_FACTS},
    "fuzz.code": {"policy": "echo", "facts": {"type": "object", "properties": {"do": False}}},
}
POLICIES = {
    "table": table_policy("LOW", "HIGH"),
    "reads": table_policy("A", "B", outputs={"sum": "facts.a + facts.b", "count": "len(facts.list)"}),
    "echo": "echo_policy:decide",
}
# Answers of the contract. An answer in time is no matter of luck here: no input has a policy work for long.
CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
ANSWERED_WITHIN_S = 20.0
# A field that stands again counts as it stands last: whatever became of it before, nothing is published.
DRY_RUN = catalog_pb2.ApplyCatalogRequest(dry_run=True).SerializeToString()
# So few evaluators that all are there after the first inputs; and a connection doesn't age: a call that meets its end
# is its client's to send again, and here is none that would.
FEW = ("--evaluators", "4", "--connection-age-max", "0s")
# A batch, all of which is on its way at the same moment, and comes from one example of Hypothesis.
CALLS, WAYS = 10, 8
BATCH = CALLS * WAYS
# Growth is measured from here on: pools, caches and evaluators are full.
WARM_AFTER = 0.2
GROWTH_MAX = 1.25
GROWTH_BYTES_MAX = 32 * 1024 * 1024
FILES_MAX = 16

# Which of ten draws is odd.
ODD = 7

Metadata = tuple[tuple[str, str | bytes], ...]
Input = tuple[str, bytes, Metadata]

KEYS = tuple(f"fuzz-key-{i:04}-of-many" for i in range(200))


def mostly(usual: st.SearchStrategy[Any], *others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw from one strategy far more often than from all the others."""
    # Not 0: Hypothesis prefers simple values.
    return st.integers(0, 9).flatmap(lambda i: st.one_of(others) if i == ODD else usual)


keys = mostly(
    st.sampled_from(KEYS), st.text("aZ09._~:-", min_size=16, max_size=20), st.text(max_size=20), st.just("k" * 129)
)
names = mostly(
    st.sampled_from([*OPERATIONS]),
    st.sampled_from(["", "no.such", "Fuzz.Any", "fuzz..any", "x" * 300]),
    st.text(max_size=10),
)
numbers = (
    st.sampled_from([0.0, -0.0, 1.0, 2.0**53, -(2.0**53), 1e308, 5e-324, float("nan"), float("inf")]) | st.floats()
)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=12) | st.sampled_from(["1.50", "2026-11-30T09:00:00Z"])
members = st.sampled_from(["n", "a", "b", "list", "amount", "at", "name", "tags", "echo", "outcome", "effects"])
anything = st.dictionaries(
    members | st.text(max_size=5),
    st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner), max_leaves=6
    ),
    max_size=4,
)
strict = st.fixed_dictionaries(
    {"n": st.integers(-3, 3)},
    optional={
        "amount": st.decimals(allow_nan=False, allow_infinity=False, places=2).map(str),
        "at": st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat),
        "name": st.sampled_from(["a b", "a" * 5_000 + "!", ""]),
        "tags": st.lists(st.text(max_size=3), max_size=4),
    },
)
facts = anything | strict
durations = st.sampled_from([(0, 0), (0, 1), (-1, 0), (0, -1), (2**62, 0), (0, 2**31 - 1), (1, 10**9)])
mutations = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "drop", "double"]),
        st.integers(0, 2**16),
        st.sampled_from([b"\xff", b"\x00", b"\x80" * 10, b"\x1a\x00", b"\x08\x96\x01", b"\xa2\x06\x00"])
        | st.binary(max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def mutated(data: bytes, steps: Sequence[tuple[str, int, bytes]]) -> bytes:
    """Change bytes: flip a bit, cut the end off, insert, drop or double a piece."""
    for what, place, piece in steps:
        at = place % (len(data) + 1)
        if what == "flip" and data:
            at %= len(data)
            data = data[:at] + bytes([data[at] ^ (1 << place % 8)]) + data[at + 1 :]
        elif what == "cut":
            data = data[:at]
        elif what == "insert":
            data = data[:at] + piece + data[at:]
        elif what == "drop":
            data = data[:at] + data[at + len(piece) + 1 :]
        elif what == "double":
            data = data[:at] + data[at:] * 2
    return data


@st.composite
def requests(draw: st.DrawFn, method: str) -> bytes:
    """Make the bytes of a method's request, before they are changed."""
    if method.startswith(CATALOG):
        return draw(catalog_requests(method))
    request: Any
    if method.endswith("Decide"):
        request = wire.DecideRequest(operation_key=draw(keys), operation=draw(names))
        request.facts.update(draw(facts))
        if draw(st.integers(0, 9)) == 0:
            request.policy_version = draw(st.integers(0, 2**32 - 1))
    elif method.endswith("GetDecisionStatus"):
        request = wire.GetDecisionStatusRequest(operation_key=draw(keys), operation=draw(names))
    else:
        return wire.GetOperationRequest(operation=draw(names)).SerializeToString()
    if draw(st.integers(0, 9)) == 0:
        request.max_wait.seconds, request.max_wait.nanos = draw(durations)
    return request.SerializeToString()


@st.composite
def catalog_requests(draw: st.DrawFn, method: str) -> bytes:
    """Make the bytes of a catalog request; what is applied is only judged."""
    if method.endswith("GetPolicyVersion"):
        return catalog_pb2.GetPolicyVersionRequest(
            policy_id=draw(st.sampled_from([*POLICIES, "none"])), version=draw(st.integers(0, 3))
        ).SerializeToString()
    request = catalog_pb2.ApplyCatalogRequest(dry_run=True)
    policy = request.policies.add(policy_id=draw(st.sampled_from([*POLICIES, "new", ""])))
    document = draw(st.sampled_from([table_policy("LOW"), "{}", '{"nodes": []}', "[" * 200]))
    policy.jdm = mutated(document.encode(), draw(mutations)).decode(errors="replace")
    return request.SerializeToString()


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, bytes]:
    """Make a method and the bytes of a request of it."""
    method = draw(st.sampled_from(METHODS))
    return method, draw(requests(method))


printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=60)


@st.composite
def metadata(draw: st.DrawFn, token: str) -> Metadata:
    """Make metadata, mostly such that a call is let in."""
    good = (("authorization", f"Bearer {token}"),)
    match draw(st.integers(0, 19)):
        case 5:
            return tuple(("authorization", value) for value in draw(st.lists(printable, max_size=2)))
        case 6:
            changed = mutated(token.encode(), draw(mutations)).decode("ascii", "ignore")
            return (("authorization", "Bearer " + "".join(filter(str.isprintable, changed))),)
        case 7:
            return (*good, ("traceparent", draw(st.sampled_from(["", "00-", "00-" + "g" * 52, "x" * 500]))))
        case 8:
            return (*good, ("junk-bin", draw(st.binary(max_size=200))))
        case 9:
            return (*good, ("junk", "j" * draw(st.sampled_from([1, 4_000, 7_000, 9_000, 20_000]))))
    return good


@st.composite
def batches(draw: st.DrawFn, token: str) -> list[Input]:
    """Make a batch: some calls, each as it is and changed in ways; drawing each would take ten times as long."""
    some = draw(st.lists(calls(), min_size=CALLS, max_size=CALLS))
    changes = draw(st.lists(mutations, min_size=WAYS // 2, max_size=WAYS // 2))
    # The same call several times at once is what it is all about.
    ways = [*changes, *((),) * (WAYS - len(changes))]
    sides = draw(st.lists(metadata(token), min_size=CALLS, max_size=CALLS))
    batch = []
    for i, (method, data) in enumerate(some):
        for j, steps in enumerate(ways):
            changed = mutated(data, steps) + (DRY_RUN if method.endswith("ApplyCatalog") else b"")
            batch.append((method, changed, sides[(i + j) % CALLS]))
    return batch


@dataclass(frozen=True)
class Use:
    """What the processes of a service use.

    Of each kind of process, memory and files are its largest's: an evaluator that first has work late grows to what
    others have.
    """

    memory: int
    files: int
    processes: int


def use_of(service: ServiceProcess) -> Use:
    """Measure a service: bytes (what processes share counted once), open files, and processes."""
    tree = [psutil.Process(service.process.pid)]
    tree += tree[0].children(recursive=True)
    memory: Counter[tuple[str, ...]] = Counter()
    files: Counter[tuple[str, ...]] = Counter()
    for process in tree:
        # `-m decideonce_server worker`, `-P -m decideonce_server.evaluator_process`
        kind = tuple(process.cmdline()[1:4])
        memory[kind] = max(memory[kind], process.memory_full_info().pss)
        files[kind] = max(files[kind], process.num_fds())
    return Use(memory.total(), files.total(), len(tree))


class Fuzzing:
    """Sends batches of inputs, and keeps what came back."""

    def __init__(self, service: ServiceProcess, token: str, url: Any) -> None:
        self.service = service
        self.token = token
        self.answers: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._channel = self._loop.run_until_complete(self._connect())
        # Of calls that were answered: each has a row, and nothing else has one.
        self._keys: set[tuple[str, str]] = set()

    async def _connect(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.service.address)

    def send(self, batch: Sequence[Input]) -> None:
        """Send a batch, and judge each answer.

        Raises:
            AssertionError: an answer is none of the contract.
        """
        self._loop.run_until_complete(asyncio.wait_for(self._send(batch), 2 * ANSWERED_WITHIN_S))

    async def _send(self, batch: Sequence[Input]) -> None:
        await asyncio.gather(*(self._call(*one) for one in batch))

    async def _call(self, method: str, data: bytes, metadata: Metadata) -> None:
        began = time.monotonic()
        try:
            answer = await self._channel.unary_unary(method)(data, metadata=metadata, timeout=ANSWERED_WITHIN_S)
        except grpc.aio.AioRpcError as error:
            self._judge(call_error(error))
        else:
            self._count("OK", method, data, answer)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _judge(self, error: Any) -> None:
        self.answers[f"{error.code.name} {error.reason}".strip()] += 1
        assert error.code in CODES, (error.code, error.text)
        # gRPC itself refuses metadata that is too large, before anything of ours.
        is_of_grpc = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "metadata" in error.text
        assert error.reason or is_of_grpc, (error.code, error.text)

    def _count(self, code: str, method: str, data: bytes, answer: bytes) -> None:
        self.answers[code] += 1
        if method.endswith("Decide"):
            request = wire.DecideRequest.FromString(data)
            self._keys.add((request.operation, request.operation_key))
            assert wire.DecideResponse.FromString(answer).status != wire.DECISION_STATUS_UNSPECIFIED

    def check_rows(self) -> int:
        """See that exactly the calls that were answered have rows, and give how many rows there are."""

        async def read() -> set[tuple[str, str]]:
            connection = await connect(self._url)
            try:
                return {tuple(row) for row in await connection.fetch("SELECT operation, operation_key FROM ledger")}
            finally:
                await connection.close()

        rows = self._loop.run_until_complete(read())
        assert self._keys == rows, (sorted(rows - self._keys)[:3], sorted(self._keys - rows)[:3])
        return len(rows)

    def close(self) -> None:
        """Close the channel."""
        self._loop.run_until_complete(self._channel.close())
        self._loop.close()


def send_batches(fuzzing: Fuzzing, times: int, begin: int) -> None:
    """Have Hypothesis make so many batches, and send them."""

    @seed(begin)
    @settings(
        max_examples=times,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(batches(fuzzing.token))
    def run(batch: list[Input]) -> None:
        fuzzing.send(batch)

    run()


def fuzz(service: ServiceProcess, token: str, url: Any, *, count: int, seconds: float, begin: int) -> None:
    """Send so many inputs, or for so long, whichever ends first; print what came back.

    Raises:
        AssertionError: the service did what it must not.
    """
    fuzzing = Fuzzing(service, token, url)
    began, before, turn = time.monotonic(), None, 0
    try:
        while (sent := fuzzing.answers.total()) < count and time.monotonic() - began < seconds:
            # A Hypothesis run keeps what it has seen: many of them stay small.
            send_batches(fuzzing, min(100, -(-(count - sent) // BATCH)), begin + turn)
            turn += 1
            if turn % 20 == 0:
                print(f"{fuzzing.answers.total()} inputs so far", file=sys.stderr, flush=True)
            done = max(fuzzing.answers.total() / count, (time.monotonic() - began) / seconds)
            if before is None and done >= WARM_AFTER:
                before = use_of(service)
        rows = fuzzing.check_rows()
    finally:
        fuzzing.close()
        defects = [line for line in service.log.read_text().splitlines() if "defect" in line]
        for defect in defects[:3]:
            print(defect)
    after = use_of(service)
    took = time.monotonic() - began
    print(f"seed {begin}: {fuzzing.answers.total()} inputs in {took:.0f} s, slowest answer {fuzzing.slowest_s:.2f} s")
    for answer, times in fuzzing.answers.most_common():
        print(f"{times:>10}  {answer}")
    print(f"{rows} rows, each of a call that was answered; {before} after the first inputs, {after} after the last")
    assert before is not None
    assert after.memory <= max(before.memory * GROWTH_MAX, before.memory + GROWTH_BYTES_MAX)
    assert after.files <= before.files + FILES_MAX
    assert after.processes <= before.processes
    assert service.process.poll() is None
    assert [] == defects


def main() -> None:
    """Make a service of its own, and fuzz it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time at the latest")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    given_ = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "policies")
    with ExitStack() as stack:
        directory, url = stack.enter_context(own_database("fuzz"))
        token = asyncio.run(make_token(url, "acme"))
        catalog = write_catalog(directory / "catalog", OPERATIONS, POLICIES)
        service = ServiceProcess(
            directory / "service.log",
            ["--database-url", url_text(url), "--catalog", str(catalog), "--events", "none", *FEW],
        )
        stack.callback(service.kill)
        service.wait_until_ready()
        fuzz(service, token, url, count=given_.inputs, seconds=given_.seconds, begin=given_.seed)


if __name__ == "__main__":
    main()
