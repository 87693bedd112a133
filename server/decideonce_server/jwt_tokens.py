"""Verifies JWTs (RFC 7519) as RFC 8725 advises: issuer, audience and algorithms are pinned, and expiry is required."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
import structlog

from decideonce_server.callers import Issuer
from decideonce_server.errors import Unauthenticated
from decideonce_server.identity import Caller

# Clocks of issuers differ a little.
LEEWAY_S = 30
# A token names a key that isn't known: its issuer may have new ones. Asked no more often than this, whoever calls.
REFRESH_INTERVAL_S = 30.0
# A key that its issuer has withdrawn is refused everywhere after this long.
KEYS_AGE_MAX_S = 300.0
FETCH_WITHIN_S = 3.0
# Larger ones are nobody's: gRPC's own limit of all metadata is 8 KB.
TOKEN_LENGTH_MAX = 8192

log = structlog.get_logger()


# What the library raises for a token that can't be right; the last three for numbers and types that JSON allows.
INVALID_TOKEN = (jwt.PyJWTError, OverflowError, TypeError, ValueError)


class IssuerKeys:
    """The keys of one issuer, from its URL or file: read anew now and then, and when a token names an unknown one.

    While they can't be read those that are known go on, so that an issuer's outage isn't ours.
    """

    def __init__(
        self,
        source: str,
        refresh_interval_s: float = REFRESH_INTERVAL_S,
        age_max_s: float = KEYS_AGE_MAX_S,
    ) -> None:
        self._source = source
        self._refresh_interval_s = refresh_interval_s
        self._age_max_s = age_max_s
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def key(self, key_id: str | None) -> jwt.PyJWK | None:
        """Give the key of this id; None where the issuer has none."""
        if self._is_due(key_id):
            async with self._reading:
                if self._is_due(key_id):
                    await self._read()
        return self._keys.get(key_id)

    def _is_due(self, key_id: str | None) -> bool:
        age_s = time.monotonic() - self._read_at
        return age_s >= (self._age_max_s if key_id in self._keys else self._refresh_interval_s)

    async def _read(self) -> None:
        self._read_at = time.monotonic()
        try:
            found = await asyncio.to_thread(self._load)
        except (jwt.PyJWTError, OSError, ValueError) as error:
            log.warning("the keys of an issuer can't be read", source=self._source, error=type(error).__name__)
            return
        self._keys = {key.key_id: key for key in found.keys}

    def _load(self) -> jwt.PyJWKSet:
        if self._source.startswith("https://"):
            return jwt.PyJWKClient(self._source, cache_jwk_set=False, timeout=FETCH_WITHIN_S).get_jwk_set()
        return jwt.PyJWKSet.from_json(Path(self._source).read_text("utf-8"))


class JwtVerifier:
    """Finds the caller of a JWT."""

    def __init__(self, issuers: Mapping[str, Issuer]) -> None:
        self._issuers = issuers
        self._keys = {name: IssuerKeys(issuer.jwks) for name, issuer in issuers.items()}

    async def caller(self, token: str) -> Caller:
        """Verify a token.

        Raises:
            Unauthenticated: it isn't valid, or stands for nobody who may call.
        """
        issuer, key_id = self._claimed(token)
        key = await self._keys[issuer.issuer].key(key_id)
        if key is None:
            raise Unauthenticated
        try:
            claims = jwt.decode(
                token,
                key.key,
                algorithms=list(issuer.algorithms),
                audience=issuer.audience,
                issuer=issuer.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except INVALID_TOKEN:
            raise Unauthenticated from None
        caller = issuer.caller(claims)
        if caller is None:
            raise Unauthenticated
        return caller

    def _claimed(self, token: str) -> tuple[Issuer, str | None]:
        """Read whose token it says it is, and by which key; nothing of it is believed yet."""
        if len(token) > TOKEN_LENGTH_MAX:
            raise Unauthenticated
        try:
            header: dict[str, Any] = jwt.get_unverified_header(token)
            claims: dict[str, Any] = jwt.decode(token, options={"verify_signature": False})
        except INVALID_TOKEN:
            raise Unauthenticated from None
        issuer = claims.get("iss")
        key_id = header.get("kid")
        if not isinstance(issuer, str) or issuer not in self._issuers or not isinstance(key_id, str | None):
            raise Unauthenticated
        return self._issuers[issuer], key_id
