"""Fingerprints that are stored for ever: `fingerprints.json` pins them.

Run as a program, this module prints the fingerprint of every vector as the service makes it, as one JSON object.
"""

import base64
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import struct_pb2
from google.protobuf.internal import api_implementation

from decideonce.v1.canonical_request_pb2 import CanonicalRequest
from decideonce_server import values
from decideonce_server.facts import FactsSchema
from decideonce_server.fingerprint import FINGERPRINT_VERSION, canonical_request, fingerprint, fingerprint_text

GOLDEN = json.loads(Path(__file__).with_name("fingerprints.json").read_text("utf-8"))
VECTORS = {vector["name"]: vector for vector in GOLDEN["vectors"]}
SUBPROCESS_TIMEOUT_S = 60


def facts_of(vector: dict[str, Any]) -> struct_pb2.Struct:
    if "facts_base64" in vector:
        return struct_pb2.Struct.FromString(base64.b64decode(vector["facts_base64"]))
    return values.to_struct(vector["facts"])


def identity_of(vector: dict[str, Any]) -> dict[str, Any]:
    schema = FactsSchema.compile(json.dumps(GOLDEN["schemas"][vector["schema"]]))
    return schema.accept(facts_of(vector)).identity


def fingerprint_of(vector: dict[str, Any]) -> str:
    digest = fingerprint(vector["operation"], vector["policy_version"], identity_of(vector))
    return fingerprint_text(FINGERPRINT_VERSION, digest)


def varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(high) if high else bytes([low])


def sized(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def struct_bytes(members: dict[str, Any]) -> bytes:
    """Encode a Struct by hand, from the protobuf encoding's own page rather than through protobuf."""
    ordered = sorted((name.encode(), value) for name, value in members.items())
    return b"".join(sized(1, sized(1, name) + sized(2, value_bytes(value))) for name, value in ordered)


def value_bytes(value: Any) -> bytes:
    match value:
        case None:
            return b"\x08\x00"
        case bool():
            return bytes([0x20, value])
        case int() | float():
            return b"\x11" + struct.pack("<d", value)
        case str():
            return sized(3, value.encode())
        case dict():
            return sized(5, struct_bytes(value))
        case _:
            return sized(6, b"".join(sized(1, value_bytes(item)) for item in value))


def fingerprint_by_hand(vector: dict[str, Any]) -> str:
    pinned = vector["policy_version"]
    canonical = sized(1, vector["operation"].encode())
    canonical += b"" if pinned is None else b"\x10" + varint(pinned)
    canonical += sized(3, struct_bytes(vector["identity"]))
    return "fp1:sha256:" + hashlib.sha256(b"decideonce/fp1\n" + canonical).hexdigest()


def test_vectors_are_told_apart_by_name() -> None:
    """Every vector has a name of its own, and there are enough of them to hold the form."""
    assert len(GOLDEN["vectors"]) == len(VECTORS)
    assert len(VECTORS) >= 30


@pytest.mark.parametrize("name", VECTORS)
def test_fingerprint_is_pinned(name: str) -> None:
    """A vector's facts give the identity and the fingerprint that were stored once (powertools-lambda-python#638)."""
    vector = VECTORS[name]
    assert vector["identity"] == identity_of(vector)
    assert vector["fingerprint"] == fingerprint_of(vector)


@pytest.mark.parametrize("name", VECTORS)
def test_fingerprint_can_be_made_without_protobuf(name: str) -> None:
    """The pinned fingerprint follows from the documented bytes alone (protocolbuffers/protobuf#5668).

    protobuf's own deterministic mode is no such thing: its runtimes order members differently (#26621 there).
    """
    assert VECTORS[name]["fingerprint"] == fingerprint_by_hand(VECTORS[name])


@pytest.mark.parametrize("group", GOLDEN["same"], ids=" = ".join)
def test_same_requests_share_a_fingerprint(group: list[str]) -> None:
    """Requests that differ in their spelling only have one fingerprint (protocolbuffers/protobuf#7062 for -0.0)."""
    assert len({fingerprint_of(VECTORS[name]) for name in group}) == 1


@pytest.mark.parametrize("group", GOLDEN["different"], ids=" ~ ".join)
def test_other_requests_have_another_fingerprint(group: list[str]) -> None:
    """Requests that say something else have fingerprints that differ pairwise (powertools-lambda-python#638)."""
    assert len({fingerprint_of(VECTORS[name]) for name in group}) == len(group)


@pytest.mark.parametrize("runtime", ["upb", "python"])
@pytest.mark.parametrize(("seed", "locale"), [("1", "C"), ("4242", "tr_TR.UTF-8")])
def test_fingerprints_depend_on_no_process(runtime: str, seed: str, locale: str) -> None:
    """Both protobuf runtimes, any hash seed and any locale give the same (erpipe-org/mcp-odoo#48)."""
    env = {
        **os.environ,
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": runtime,
        "PYTHONHASHSEED": seed,
        "LANG": locale,
        "LC_ALL": locale,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    printed = subprocess.run(
        [sys.executable, __file__], env=env, check=True, capture_output=True, timeout=SUBPROCESS_TIMEOUT_S
    )
    expected = {"runtime": runtime, **{name: vector["fingerprint"] for name, vector in VECTORS.items()}}
    assert expected == json.loads(printed.stdout)


@pytest.mark.parametrize("name", VECTORS)
def test_canonical_request_is_a_message(name: str) -> None:
    """What the digest is of can be read by protobuf as the CanonicalRequest that it stands for."""
    vector = VECTORS[name]
    parts = vector["operation"], vector["policy_version"], vector["identity"]
    expected = CanonicalRequest(operation=parts[0], policy_version=parts[1], facts=values.to_struct(parts[2]))
    assert expected == CanonicalRequest.FromString(canonical_request(*parts))


def test_fingerprint_needs_32_bytes() -> None:
    """The digest is the whole SHA-256, and its text names the version that made it."""
    digest = fingerprint("a.b", None, {})
    assert len(digest) == 32
    assert f"fp1:sha256:{digest.hex()}" == fingerprint_text(1, digest)


if __name__ == "__main__":
    made = {name: fingerprint_of(vector) for name, vector in VECTORS.items()}
    sys.stdout.write(json.dumps({"runtime": api_implementation.Type(), **made}))
