"""Who calls, and what they may do: asked before anything is looked up, and again on every replay.

One table says which roles may call a method. A method that is not in it is refused.
"""

import hashlib
import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

import grpc
from cachetools import TTLCache

from decideonce_server.errors import PermissionDenied, Unauthenticated
from decideonce_server.ledger_tokens import Token, TokenStore
from decideonce_server.wire import Context, Handler, Proceed, UnaryInterceptor

# A revoked token is refused everywhere after this long.
TOKEN_CACHE_S = 1.0
TOKEN_CACHE_SIZE = 10_000


# No "/": it joins tenant and operation key where events need both as one text.
_TENANT = re.compile("[A-Za-z0-9._:-]{1,64}", re.ASCII)


def is_tenant(text: str) -> bool:
    """Tell whether a text can name a tenant."""
    return _TENANT.fullmatch(text) is not None


class Role(StrEnum):
    """What a caller may do."""

    DECIDE = "decide"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `operations` are globs of the operations that it may use."""

    name: str
    tenant: str
    roles: frozenset[str]
    operations: tuple[str, ...]

    def may_use(self, operation: str) -> bool:
        """Tell whether the caller may use an operation."""
        return any(fnmatchcase(operation, glob) for glob in self.operations)


@dataclass(frozen=True, slots=True)
class Permission:
    """Which roles may call a method, and whether its request names an operation that the caller must be allowed."""

    roles: frozenset[Role]
    on_operation: bool = False


PUBLIC = Permission(frozenset())

PERMISSIONS: dict[str, Permission] = {
    "/decideonce.v1.DecisionService/Decide": Permission(frozenset({Role.DECIDE}), on_operation=True),
    "/decideonce.v1.DecisionService/GetDecisionStatus": Permission(
        frozenset({Role.DECIDE, Role.READ}), on_operation=True
    ),
    "/decideonce.v1.DecisionService/GetOperation": Permission(
        frozenset({Role.DECIDE, Role.READ, Role.ADMIN}), on_operation=True
    ),
    "/decideonce.v1.CatalogService/ApplyCatalog": Permission(frozenset({Role.ADMIN})),
    "/decideonce.v1.CatalogService/GetCatalog": Permission(frozenset({Role.ADMIN})),
    "/decideonce.v1.CatalogService/ListPolicyVersions": Permission(frozenset({Role.ADMIN})),
    "/decideonce.v1.CatalogService/GetPolicyVersion": Permission(frozenset({Role.ADMIN})),
    # Probes and tools have no credentials, and these tell nothing that the protos don't.
    "/grpc.health.v1.Health/Check": PUBLIC,
    "/grpc.health.v1.Health/List": PUBLIC,
    "/grpc.health.v1.Health/Watch": PUBLIC,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": PUBLIC,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": PUBLIC,
}

_caller: ContextVar[Caller] = ContextVar("caller")


def current_caller() -> Caller:
    """Give the caller of the call that is being handled."""
    return _caller.get()


class Authenticator:
    """Finds the caller of a bearer token (RFC 6750)."""

    def __init__(self, tokens: TokenStore) -> None:
        self._tokens = tokens
        self._known: TTLCache[bytes, Caller] = TTLCache(TOKEN_CACHE_SIZE, TOKEN_CACHE_S)

    async def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Find who calls.

        Raises:
            Unauthenticated: there is no token, more than one, or none that is valid.
            LedgerUnavailable: the token has to be looked up, and Postgres can't be reached.
        """
        values = [value for name, value in metadata if name == "authorization"]
        if len(values) != 1 or not isinstance(values[0], str) or not values[0].lower().startswith("bearer "):
            raise Unauthenticated
        text = values[0][len("bearer ") :].strip()
        # Hashed, so that the process holds no more tokens than the calls in flight.
        digest = hashlib.sha256(text.encode()).digest()
        caller: Caller | None = self._known.get(digest)
        if caller is None:
            token = await self._tokens.authenticate(text)
            if token is None:
                raise Unauthenticated
            caller = self._known[digest] = _caller_of(token)
        return caller


def _caller_of(token: Token) -> Caller:
    return Caller(token.token_id, token.tenant, frozenset(token.roles), token.operations)


class AuthInterceptor(UnaryInterceptor):
    """Lets a call pass that its caller is allowed, and makes the caller known below."""

    def __init__(self, authenticator: Authenticator) -> None:
        super().__init__()
        self._authenticator = authenticator

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Refuse streams that are not public: their requests can't be judged here."""
        if handler.unary_unary is None and PERMISSIONS.get(method) is not PUBLIC:
            return grpc.unary_unary_rpc_method_handler(_refuse)
        return super().wrap(method, handler)

    async def intercept(self, method: str, request: Any, context: Context, proceed: Proceed) -> Any:
        """Let a call pass, or refuse it."""
        permission = PERMISSIONS.get(method)
        if permission is None:
            raise PermissionDenied
        if permission is PUBLIC:
            return await proceed(request, context)
        caller = await self._authenticator.authenticate(context.invocation_metadata() or ())
        if not caller.roles & permission.roles:
            raise PermissionDenied
        if permission.on_operation and not caller.may_use(request.operation):
            raise PermissionDenied
        token = _caller.set(caller)
        try:
            return await proceed(request, context)
        finally:
            _caller.reset(token)


async def _refuse(request: bytes, context: Context) -> bytes:  # noqa: ARG001  # a handler's signature
    raise PermissionDenied
