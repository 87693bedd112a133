"""How the service is reached: what a channel is set to, and what is sent along with each call."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

from decideonce import requests

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    # Finds a connection that died silently, and keeps one alive that a NAT or balancer would forget. The service
    # permits a ping every 10 s, without calls too; a server with gRPC's defaults would answer with too_many_pings.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC sends again by itself what surely reached no server (gRFC A6, "transparent retries"). Everything else is
    # this library's to send again, so a service config from DNS may not say so, too.
    ("grpc.enable_retries", 1),
    ("grpc.service_config_disable_resolution", 1),
    # A server that starts again is found within seconds; gRPC's default grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Details of errors may have 8 KB, and gRPC's default refuses some of that once base64 has made it 11.
    ("grpc.max_metadata_size", 32 * 1024),
)
"""The options of each channel that a client makes, and good ones for a channel of your own."""

Metadata = tuple[tuple[str, str | bytes], ...]
Token = str | Callable[[], str]

# What the service and every proxy take, all together.
METADATA_BYTES_MAX = 4 * 1024

_NAME = re.compile("[a-z0-9_.-]{1,100}", re.ASCII)
_VALUE = re.compile("[ -~]*", re.ASCII)
_TOKEN = re.compile("[A-Za-z0-9._~+/=-]+", re.ASCII)  # RFC 6750, section 2.1, and what others put into theirs


def check_plaintext(target: str, *, has_token: bool, allowed: bool) -> None:
    """Refuse to send a token readable to everybody between.

    Raises InvalidRequest.
    """
    if has_token and not allowed and not is_loopback(target):
        requests.refuse(
            "credentials",
            "must be given with a token, unless the service is on this machine or allow_plaintext_token is set",
        )


def is_loopback(target: str) -> bool:
    """Tell whether only this machine can be behind a target (gRPC Name Resolution, "Name Syntax")."""
    scheme, _, rest = target.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if scheme in ("ipv4", "ipv6"):
        return all(_is_loopback(address) for address in rest.split(","))
    return _is_loopback(rest.rpartition("/")[2] if scheme == "dns" else target)


def _is_loopback(address: str) -> bool:
    for host in (address, address.rpartition(":")[0]):
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            continue
    return False


def checked_metadata(given: Mapping[str, str | bytes] | None) -> Metadata:
    """Check what a caller wants to be sent along.

    Raises InvalidRequest.
    """
    metadata = tuple((given or {}).items())
    for name, value in metadata:
        _check(name, value)
    if sum(len(name) + len(value) for name, value in metadata) > METADATA_BYTES_MAX:
        requests.refuse("metadata", f"must have {METADATA_BYTES_MAX} bytes at most")
    return metadata


def with_token(metadata: Metadata, token: Token | None) -> Metadata:
    """Add a bearer token (RFC 6750).

    Raises InvalidRequest, and what a token's function raises.
    """
    if token is None:
        return metadata
    text = token if isinstance(token, str) else token()
    if _TOKEN.fullmatch(text) is None:
        requests.refuse("token", "must be letters, digits and ._~+/=- only")
    return (*metadata, ("authorization", f"Bearer {text}"))


def _check(name: object, value: object) -> None:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        requests.refuse("metadata", "must have names of [a-z0-9_.-] only, 100 characters at most")
    path = f"metadata.{name}"
    if name.startswith("grpc-") or name == "authorization":
        requests.refuse(path, "is not to be given: gRPC and `token` make it")
    if name.endswith("-bin"):
        if not isinstance(value, bytes):
            requests.refuse(path, "must be bytes, as its name ends with -bin")
    elif not isinstance(value, str) or _VALUE.fullmatch(value) is None:
        requests.refuse(path, "must be text of printable ASCII; for anything else give bytes under a name with -bin")
