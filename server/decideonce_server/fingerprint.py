"""The fingerprint: a digest that two requests share exactly when they ask for the same thing.

How it is made is written at CanonicalRequest in decideonce/v1/canonical_request.proto. It is made of a message of its
own and never of the request as it came, so how that was encoded can't reach it. Stored fingerprints outlive every
release: a change that alters one needs a new version, and tests/golden pins this one.
"""

import hashlib

from decideonce_server.canonical import object_bytes, sized, varint
from decideonce_server.values import Json

FINGERPRINT_VERSION = 1

_PREFIX = b"decideonce/fp1\n"
_POLICY_VERSION = b"\x10"


def fingerprint(operation: str, policy_version: int | None, identity: dict[str, Json]) -> bytes:
    """Give the 32 bytes of the digest, of `AcceptedFacts.identity` and the policy version that the caller pinned."""
    return hashlib.sha256(_PREFIX + canonical_request(operation, policy_version, identity)).digest()


def canonical_request(operation: str, policy_version: int | None, identity: dict[str, Json]) -> bytes:
    """Serialize a CanonicalRequest in its one way."""
    pinned = b"" if policy_version is None else _POLICY_VERSION + varint(policy_version)
    return sized(1, operation.encode()) + pinned + sized(3, object_bytes(identity))


def fingerprint_text(version: int, digest: bytes) -> str:
    """Write a fingerprint as callers see it: "fp1:sha256:" and 64 hex digits."""
    return f"fp{version}:sha256:{digest.hex()}"
