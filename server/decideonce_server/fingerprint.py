"""The fingerprint: a digest that two requests share exactly when they ask for the same thing.

How it is made is written at CanonicalRequest in decideonce/v1/canonical_request.proto. It is made of a message of its
own and never of the request as it came, so how that was encoded can't reach it. Stored fingerprints outlive every
release: a change that alters one needs a new version, and tests/golden pins this one.
"""

import hashlib

from decideonce.v1 import canonical_request_pb2

from decideonce_server import values
from decideonce_server.values import Json

FINGERPRINT_VERSION = 1

_PREFIX = b"decideonce/fp1\n"


def fingerprint(operation: str, policy_version: int | None, identity: dict[str, Json]) -> bytes:
    """Give the 32 bytes of the digest, of `AcceptedFacts.identity` and the policy version that the caller pinned."""
    canonical = canonical_request_pb2.CanonicalRequest(
        operation=operation, policy_version=policy_version, facts=values.to_struct(identity)
    )
    return hashlib.sha256(_PREFIX + canonical.SerializeToString(deterministic=True)).digest()


def fingerprint_text(version: int, digest: bytes) -> str:
    """Write a fingerprint as callers see it: "fp1:sha256:" and 64 hex digits."""
    return f"fp{version}:sha256:{digest.hex()}"
