"""The callers' tokens: who may call, as whom, and for which operations. Secrets are stored hashed only."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from decideonce_server.database import Database, Row, Statement, UniqueViolation

# A token is this, its name, "_" and its secret: scanners can find a leaked one, and its name can be told without it.
PREFIX = "do_"
# 256 bits: nothing to guess, so a plain SHA-256 of it is safe to store.
SECRET_BYTES = 32

CREATE = Statement(
    # A new token.
    "token_create",
    """INSERT INTO token (token_id, secret_hash, tenant, roles, operations, description, create_time)
    VALUES (:token_id, :secret_hash, :tenant, CAST(:roles AS text[]), CAST(:operations AS text[]), :description,
        statement_timestamp())""",
)

FIND = Statement(
    # Tokens by name, unless revoked.
    "token_find",
    """SELECT t.token_id, t.secret_hash, t.tenant, t.roles, t.operations, t.description, t.create_time, t.revoke_time
    FROM unnest(CAST(:token_ids AS text[])) AS k (token_id) JOIN token t USING (token_id)
    WHERE t.revoke_time IS NULL""",
)

LIST = Statement(
    # Every token, without what could authenticate.
    "token_list",
    """SELECT token_id, NULL AS secret_hash, tenant, roles, operations, description, create_time, revoke_time
    FROM token ORDER BY create_time, token_id""",
)

REVOKE = Statement(
    # Once only; the row count tells whether it was this call.
    "token_revoke",
    """UPDATE token SET revoke_time = statement_timestamp() WHERE token_id = :token_id AND revoke_time IS NULL
    RETURNING token_id""",
)


@dataclass(frozen=True, slots=True)
class Token:
    """What a token says of its bearer. `operations` are globs of operation names."""

    token_id: str
    tenant: str
    roles: tuple[str, ...]
    operations: tuple[str, ...]
    description: str
    create_time: datetime
    revoke_time: datetime | None


def _token(row: Row) -> Token:
    return Token(
        token_id=row["token_id"],
        tenant=row["tenant"],
        roles=tuple(row["roles"]),
        operations=tuple(row["operations"]),
        description=row["description"],
        create_time=row["create_time"],
        revoke_time=row["revoke_time"],
    )


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class TokenStore:
    """The tokens in Postgres. Every operation raises LedgerUnavailable where Postgres can't be reached."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self,
        tenant: str,
        roles: Sequence[str],
        operations: Sequence[str],
        description: str = "",
        text: str | None = None,
    ) -> str:
        """Store a new token and give its text, which can't be read again.

        With `text` it is that token; storing one that is stored already changes nothing.
        """
        text = text or f"{PREFIX}{secrets.token_hex(8)}_{secrets.token_urlsafe(SECRET_BYTES)}"
        token_id, secret = _split(text)
        try:
            await self._database.run(
                CREATE,
                token_id=token_id,
                secret_hash=_hash(secret),
                tenant=tenant,
                roles=list(roles),
                operations=list(operations),
                description=description,
            )
        except UniqueViolation:
            if await self.authenticate(text) is None:
                raise
        return text

    async def authenticate(self, text: str) -> Token | None:
        """Give the token of this text, or None where there is none, or it is revoked, or its secret is wrong."""
        token_id, secret = _split(text)
        rows = await self._database.run(FIND, token_ids=[token_id])
        # Hashed and compared also where there is no such name, so that both take the same time.
        expected = rows[0]["secret_hash"] if rows else bytes(32)
        return _token(rows[0]) if hmac.compare_digest(expected, _hash(secret)) and rows else None

    async def list(self) -> list[Token]:
        """List every token, revoked ones too, oldest first."""
        return [_token(row) for row in await self._database.run(LIST)]

    async def revoke(self, token_id: str) -> bool:
        """Revoke a token; False where there is none of this name, or it was revoked before."""
        return len(await self._database.run(REVOKE, token_id=token_id)) == 1


def _split(text: str) -> tuple[str, str]:
    token_id, _, secret = text.removeprefix(PREFIX).partition("_")
    return token_id, secret
