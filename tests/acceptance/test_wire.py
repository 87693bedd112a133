"""Requests as bytes: what is one request and what is another, and what is refused before a row is written."""

import asyncio
import hashlib
import os
import string
import struct as binary
import subprocess
import sys

import grpc
import pytest
from google.protobuf.json_format import MessageToJson

from decideonce.v1 import decision_service_pb2 as wire
from harness import Caller, decide_request, make_token, new_key, recorded, refused, struct
from stage import LedgerView, Stage

OPERATION = "test.echo"


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give an operation whose policy echoes, and one whose answers are kept for a second."""
    settings = {"policy": "echo", "time_budget": "10s", "default_wait": "10s"}
    return {OPERATION: settings, "test.short-lived": settings | {"retention": "1s"}}, {"echo": "echo_policy:decide"}


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def field(number: int, content: bytes | str | int) -> bytes:
    """Encode one field: a text, a message, or a number."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    data = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(data)) + data


def member(name: str, value: bytes) -> bytes:
    """Encode one member of a Struct."""
    return field(1, field(1, name) + field(2, value))


def double(number: float) -> bytes:
    """Encode a Value that is a number."""
    return b"\x11" + binary.pack("<d", number)


def request(key: str, facts: bytes, *, more: bytes = b"") -> bytes:
    """Encode a DecideRequest."""
    return field(1, key) + field(2, OPERATION) + field(3, facts) + more


async def test_order_of_fields_is_no_part_of_a_request(caller: Caller) -> None:
    """The same fields and members in another order on the wire are the same request."""
    key, parts = new_key(), [member("x", double(1)), member("y", double(2))]
    first = await caller.decide_raw(request(key, b"".join(parts)))
    turned = field(3, b"".join(reversed(parts))) + field(2, OPERATION) + field(1, key)
    again = await caller.decide_raw(turned)
    assert (False, True, recorded(first)) == (first.replayed, again.replayed, recorded(again))


async def test_max_wait_is_no_part_of_a_request(caller: Caller) -> None:
    """The same request with another wait is a replay."""
    key = new_key()
    first = await caller.decide(OPERATION, key, {"n": 1})
    again = await caller.decide(OPERATION, key, {"n": 1}, max_wait=3)
    assert (True, recorded(first)) == (again.replayed, recorded(again))


async def test_last_of_repeated_members_counts(caller: Caller) -> None:
    """A member that stands twice on the wire is the one that stands last, as protobuf says of maps."""
    key = new_key()
    first = await caller.decide(OPERATION, key, {"n": 2})
    again = await caller.decide_raw(request(key, member("n", double(1)) + member("n", double(2))))
    other = await refused(caller.decide_raw(request(key, member("n", double(2)) + member("n", double(1)))))
    assert (True, recorded(first)) == (again.replayed, recorded(again))
    assert "OPERATION_KEY_REUSED" == other.reason


async def test_fields_that_stand_twice_are_merged(caller: Caller) -> None:
    """Of a text that stands twice the last counts, and messages are merged: the request is what was parsed."""
    key = new_key()
    first = await caller.decide(OPERATION, key, {"a": 1, "b": 2})
    split = field(1, new_key()) + request(key, member("a", double(1)), more=field(3, member("b", double(2))))
    again = await caller.decide_raw(split)
    assert (True, recorded(first)) == (again.replayed, recorded(again))


@pytest.mark.parametrize("first_zero", [0.0, -0.0])
async def test_negative_zero_is_zero(caller: Caller, first_zero: float) -> None:
    """0.0 and -0.0 are one request, and what a policy echoes of it is the same bytes.

    protocolbuffers/protobuf#7062: implementations differ on whether -0.0 is a default value.
    """
    key = new_key()

    def encoded(zero: float) -> bytes:
        return request(key, member("echo", field(5, member("delta", double(zero)))))

    first = await caller.decide_raw(encoded(first_zero))
    again = await caller.decide_raw(encoded(-first_zero))
    assert (False, True, recorded(first)) == (first.replayed, again.replayed, recorded(again))
    echoed = first.decision.outputs.fields["echo"].struct_value.fields["delta"].number_value
    assert bytes(8) == binary.pack("<d", echoed)


NESTED = {"a": {"x": 1, "y": 2}, "list": [1, 2], "n": 1}


@pytest.mark.parametrize(
    ("facts", "is_same"),
    [
        ({"n": 1, "list": [1, 2], "a": {"y": 2, "x": 1}}, True),
        (NESTED | {"n": 1.0}, True),
        (NESTED | {"list": [2, 1]}, False),
        (NESTED | {"n": "1"}, False),
        (NESTED | {"n": True}, False),
        (NESTED | {"more": None}, False),
        (NESTED | {"a": {"x": 1}}, False),
    ],
    ids=["members turned", "1.0", "list turned", "text", "bool", "null", "member gone"],
)
async def test_equal_facts_are_one_request(caller: Caller, view: LedgerView, facts: dict, is_same: bool) -> None:
    """The order of members and the spelling of a number don't count; the order of lists, types and null do.

    erpipe-org/mcp-odoo PR#48: equal payloads had different hashes.
    """
    key = new_key()
    first = await caller.decide(OPERATION, key, NESTED)
    if is_same:
        again = await caller.decide(OPERATION, key, facts)
        assert (True, recorded(first)) == (again.replayed, recorded(again))
    else:
        assert "OPERATION_KEY_REUSED" == (await refused(caller.decide(OPERATION, key, facts))).reason
    assert 1 == await view.connection.fetchval("SELECT fingerprint_version FROM ledger WHERE operation_key = $1", key)


ANOTHER_PROCESS = """
import os, sys
import grpc
from google.protobuf.internal import api_implementation
from google.protobuf.json_format import Parse
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceStub
assert api_implementation.Type() == "python", api_implementation.Type()
address, token, request = sys.argv[1:]
with grpc.insecure_channel(address) as channel:
    response = DecisionServiceStub(channel).Decide(
        Parse(request, wire.DecideRequest()), metadata=[("authorization", f"Bearer {token}")], timeout=20
    )
print(response.replayed, response.provenance.decision_id)
"""


async def test_another_runtime_sends_the_same_request(stage: Stage, caller: Caller) -> None:
    """A process with another hash seed, locale and implementation of protobuf gets the replay.

    antonio-ivanovski/spliit-cloud PR#68: a sort by locale made the stored hash depend on the runtime.
    """
    key = new_key()
    members = ["amount", "amount_minor", "Ärger", "z", "ä", "\U0001f600", "\ufb01"]
    facts = {name: dict.fromkeys(members, i) for i, name in enumerate(members)}
    first = await caller.decide(OPERATION, key, facts)
    another = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        ANOTHER_PROCESS,
        stage.service.address,
        stage.token,
        MessageToJson(decide_request(OPERATION, key, facts)),
        env=os.environ
        | {
            "PYTHONHASHSEED": "4711",
            "LANG": "tr_TR.UTF-8",
            "LC_ALL": "C",
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",
        },
        stdout=subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        output, _ = await another.communicate()
    assert f"True {first.provenance.decision_id}\n" == output.decode()


UNKNOWN = field(1000, 7)


@pytest.mark.parametrize(
    ("make", "path", "number"),
    [
        (lambda key: request(key, b"", more=field(20, "eu")), "20", "20"),
        (lambda key: request(key, member("a", double(1)) + UNKNOWN), "facts.1000", "1000"),
        (lambda key: request(key, member("a", double(1) + UNKNOWN)), "facts.fields.a.1000", "1000"),
        (
            lambda key: request(key, member("a", field(6, field(1, double(1)) + field(1, double(2) + UNKNOWN)))),
            "facts.fields.a.list_value.values[1].1000",
            "1000",
        ),
        (
            lambda key: request(key, member("a", field(5, member("b", double(1)) + UNKNOWN))),
            "facts.fields.a.struct_value.1000",
            "1000",
        ),
        (lambda key: request(key, b"", more=field(5, field(1, 1) + UNKNOWN)), "max_wait.1000", "1000"),
    ],
    ids=["top", "Struct", "Value", "list's Value", "nested Struct", "Duration"],
)
async def test_unknown_fields_are_refused(caller: Caller, view: LedgerView, make, path: str, number: str) -> None:
    """A field that the contract doesn't know is refused wherever it stands, and no row is written.

    protocolbuffers/protobuf#29551: unknown fields can't be made canonical without their schema.
    """
    key, before = new_key(), await view.counts()
    error = await refused(caller.decide_raw(make(key)))
    assert (grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_FIELD") == (error.code, error.reason)
    assert ({"field_number": number}, [path]) == (error.metadata, error.fields)
    assert before == await view.counts()


async def test_unknown_field_in_a_member_is_refused(caller: Caller, view: LedgerView) -> None:
    """A member with more than its name and value is refused, though protobuf has no message for it."""
    before = await view.counts()
    odd = field(1, field(1, "a") + field(2, double(1)) + field(3, "more"))
    error = await refused(caller.decide_raw(request(new_key(), odd)))
    assert (grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_FIELD") == (error.code, error.reason)
    assert before == await view.counts()


async def test_unknown_fields_in_any_order_have_one_answer(caller: Caller, view: LedgerView) -> None:
    """Two unknown fields are refused in either order; there is never a decision and then a reused key.

    protocolbuffers/protobuf#29551: the same content with its unknown fields swapped gave other bytes.
    """
    key, before = new_key(), await view.counts()
    one, two = bytes.fromhex("a20103776562"), bytes.fromhex("aa01026575")
    answers = [await refused(caller.decide_raw(request(key, b"", more=more))) for more in (one + two, two + one)]
    assert ["UNKNOWN_FIELD"] * 2 == [answer.reason for answer in answers]
    assert before == await view.counts()


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff", field(1, "k" * 20)[:-1], field(1, b"\xff" * 20), b"\x0b", b"\x0f"],
    ids=["no tag", "cut", "no UTF-8", "open group", "no wire type"],
)
async def test_malformed_bytes_are_refused(caller: Caller, view: LedgerView, data: bytes) -> None:
    """What is no message of its type is an answer like any other."""
    before = await view.counts()
    error = await refused(caller.decide_raw(data))
    assert (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST") == (error.code, error.reason)
    assert (["request"], {}) == (error.fields, error.metadata)
    assert before == await view.counts()


def nested(levels: int) -> bytes:
    """Encode facts that nest this many levels, the facts themselves being one."""
    value = double(1)
    for _ in range(levels - 1):
        value = field(5, member("a", value))
    return member("a", value)


@pytest.mark.parametrize(
    ("facts", "pointer"),
    [
        (member("a", b""), "facts/a"),
        (member("a", double(float("nan"))), "facts/a"),
        (member("a", double(float("inf"))), "facts/a"),
        (member("a", double(float("-inf"))), "facts/a"),
        (member("a", double(2.0**53)), "facts/a"),
        (member("a", double(-(2.0**53))), "facts/a"),
        (member("a", field(6, field(1, double(1e300)))), "facts/a/0"),
        (member("a", field(3, "x\0y")), "facts/a"),
        (member("a\0", double(1)), "facts/a\0"),
        (nested(31), "facts" + "/a" * 30),
        (nested(33), "facts" + "/a" * 30),
    ],
    ids=["no kind", "NaN", "inf", "-inf", "2^53", "-2^53", "1e300", "U+0000", "name", "31 levels", "33 levels"],
)
async def test_values_that_are_not_exact_are_refused(
    caller: Caller, view: LedgerView, facts: bytes, pointer: str
) -> None:
    """What some reader would lose or change is refused, its place is named, and the key stays free."""
    key, before = new_key(), await view.counts()
    error = await refused(caller.decide_raw(request(key, facts)))
    assert (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FACTS") == (error.code, error.reason)
    assert ({"violations": "1"}, [pointer]) == (error.metadata, error.fields)
    assert before == await view.counts()
    assert not (await caller.decide(OPERATION, key)).replayed


@pytest.mark.parametrize("facts", [member("a", double(2.0**53 - 1)), nested(30)], ids=["2^53-1", "30 levels"])
async def test_values_at_the_limit_are_accepted(caller: Caller, facts: bytes) -> None:
    """The largest number and the deepest nesting are decided."""
    answer = await caller.decide_raw(request(new_key(), facts))
    assert wire.DECISION_STATUS_SUCCEEDED == answer.status


async def test_nesting_that_no_parser_takes_is_refused(caller: Caller, view: LedgerView) -> None:
    """Facts that nest deeper than parsers go are a malformed request."""
    before = await view.counts()
    error = await refused(caller.decide_raw(request(new_key(), nested(60))))
    assert (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST") == (error.code, error.reason)
    assert before == await view.counts()


@pytest.mark.parametrize(
    "key",
    [
        "",
        "   ",
        "k" * 15,
        "k" * 129,
        "k" * 256,
        # Digits of hashes: as good as random, and the same on every run.
        "".join(hashlib.sha256(str(i).encode()).hexdigest() for i in range(43))[:2700],
        "k" * 200_000,
        "é" * 100,
        "k" * 16 + "\n",
        "k/k" * 6,
        "٣" * 16,
    ],
    ids=["empty", "blank", "15", "129", "256", "2700", "200000", "accents", "newline", "slash", "digits"],
)
async def test_keys_outside_the_grammar_are_refused(caller: Caller, view: LedgerView, key: str) -> None:
    """A missing, oversized or odd key is refused in code, before a row is written, by every method that takes one.

    aws-powertools/powertools-lambda-typescript#1501: without a key, all requests got the first one's answer.
    """
    before = await view.counts()
    for call in (caller.decide(OPERATION, key), caller.status(OPERATION, key)):
        error = await refused(call)
        assert (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_OPERATION_KEY") == (error.code, error.reason)
        assert (["operation_key"], {}) == (error.fields, error.metadata)
    assert before == await view.counts()


@pytest.mark.parametrize("length", [16, 128])
async def test_keys_at_the_limit_are_accepted(caller: Caller, length: int) -> None:
    """The shortest and the longest key are accepted, with every character that the grammar has."""
    characters = string.ascii_letters + string.digits + "._~:-"
    key = (new_key().replace("-", "")[:16] + characters * 2)[:length]
    answer = await caller.decide(OPERATION, key)
    assert (wire.DECISION_STATUS_SUCCEEDED, key) == (answer.status, answer.provenance.operation_key)


@pytest.mark.parametrize("facts", [{"limit": 10}, {"limit": 99}], ids=["same facts", "other facts"])
async def test_same_key_of_two_tenants_is_two_decisions(stage: Stage, facts: dict) -> None:
    """Two tenants may use the same key, with the same facts or others; keys that join alike are not the same.

    irzix/nestjs-agentic#126: a key without its tenant gave one tenant another's answer.
    """
    key = new_key()
    async with grpc.aio.insecure_channel(stage.service.address) as channel:
        answers = [
            await Caller(channel, await make_token(stage.url, tenant)).decide(OPERATION, its_key, its_facts)
            for tenant, its_key, its_facts in (
                ("t1", key, {"limit": 10}),
                ("t2", key, facts),
                ("a:b", f"{key}", {"limit": 10}),
                ("a", f"b:{key}", facts),
            )
        ]
    assert [False] * 4 == [answer.replayed for answer in answers]
    assert ["t1", "t2", "a:b", "a"] == [answer.provenance.tenant for answer in answers]
    assert 4 == len({answer.provenance.decision_id for answer in answers})


SLEEP = {"do": "sleep", "seconds": 0.5}
STATES = {
    "PROCESSING": (SLEEP, None),
    "SUCCEEDED": ({"n": 1}, None),
    "FAILED_RETRYABLE": ({"do": "retry"}, None),
    "FAILED_FINAL": ({"do": "fail"}, None),
    "lease over": (
        {"n": 1},
        "state = 1, response = NULL, lease_expires_at = statement_timestamp()",
    ),
}
AFTER = {
    "PROCESSING": (wire.DECISION_STATUS_SUCCEEDED, True, 1),
    "SUCCEEDED": (wire.DECISION_STATUS_SUCCEEDED, True, 1),
    "FAILED_RETRYABLE": (wire.DECISION_STATUS_FAILED_RETRYABLE, False, 2),
    "FAILED_FINAL": (wire.DECISION_STATUS_FAILED_FINAL, True, 1),
    "lease over": (wire.DECISION_STATUS_SUCCEEDED, False, 2),
}


@pytest.mark.parametrize("state", STATES)
async def test_other_facts_are_refused_in_every_state(caller: Caller, view: LedgerView, state: str) -> None:
    """Another request under a used key is refused whatever is recorded, and changes nothing; the same one goes on.

    aws-powertools/powertools-lambda-typescript#2058: a shortcut returned the record without comparing the payload.
    """
    key, (facts, change) = new_key(), STATES[state]
    await caller.decide(OPERATION, key, facts, max_wait=0 if state == "PROCESSING" else 10)
    if change is not None:
        await view.change(key, change)
    before = await view.row(key)
    error = await refused(caller.decide(OPERATION, key, facts | {"other": 1}))
    assert before == await view.row(key)
    assert (grpc.StatusCode.ALREADY_EXISTS, "OPERATION_KEY_REUSED", {}) == (error.code, error.reason, error.metadata)
    again = await caller.decide(OPERATION, key, facts)
    assert AFTER[state] == (again.status, again.replayed, again.provenance.attempt)


async def test_other_facts_are_refused_after_expiry(caller: Caller, view: LedgerView) -> None:
    """Another request under an expired key is refused as reused, and the same one as expired.

    aws-powertools/powertools-lambda-typescript#1499: the stored hash was not compared on one of the paths.
    """
    key, operation = new_key(), "test.short-lived"
    await caller.decide(operation, key, {"n": 1})
    while (await caller.status(operation, key)).status != wire.DECISION_STATUS_EXPIRED:
        pass
    before = await view.row(key)
    other = await refused(caller.decide(operation, key, {"n": 2}))
    same = await refused(caller.decide(operation, key, {"n": 1}))
    assert ["OPERATION_KEY_REUSED", "OPERATION_KEY_EXPIRED"] == [other.reason, same.reason]
    assert before == await view.row(key)


async def test_another_pinned_version_is_another_request(caller: Caller) -> None:
    """Pinning a policy version is part of the request, also where it is the one that would have decided."""
    key = new_key()
    await caller.decide(OPERATION, key)
    assert "OPERATION_KEY_REUSED" == (await refused(caller.decide(OPERATION, key, policy_version=1))).reason


def test_struct_and_bytes_are_one_encoding() -> None:
    """What these tests encode by hand is what protobuf makes of the same facts."""
    key = new_key()
    by_hand = request(key, member("a", field(6, field(1, double(1)))))
    assert decide_request(OPERATION, key, {"a": [1]}) == wire.DecideRequest.FromString(by_hand)
    assert struct({"a": 1}).SerializeToString() == member("a", double(1))
