"""Who calls, and what they may do: asked before anything is looked up, and again on every replay.

One table says which roles may call a method. A method that is not in it is refused.
"""

import hashlib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
from cachetools import TTLCache

from decideonce_server.callers import Callers
from decideonce_server.errors import PermissionDenied, Unauthenticated
from decideonce_server.identity import Caller, Role
from decideonce_server.jwt_tokens import JwtVerifier
from decideonce_server.ledger_tokens import PREFIX, Token, TokenStore
from decideonce_server.wire import Context, Handler, Proceed, UnaryInterceptor

# A revoked token is refused everywhere after this long.
TOKEN_CACHE_S = 1.0
TOKEN_CACHE_SIZE = 10_000


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
    """Finds the caller of a bearer token (RFC 6750): a stored one, or a JWT; or else of a client certificate."""

    def __init__(self, tokens: TokenStore, callers: Callers) -> None:
        self._tokens = tokens
        self._certificates = callers.certificates
        self._jwt = JwtVerifier(callers.issuers)
        self._known: TTLCache[bytes, Caller] = TTLCache(TOKEN_CACHE_SIZE, TOKEN_CACHE_S)

    async def authenticate(
        self,
        metadata: Iterable[tuple[str, str | bytes]],
        peer: Mapping[str, Iterable[bytes]],
    ) -> Caller:
        """Find who calls. `peer` is gRPC's authentication context: what was verified of a client certificate.

        Raises:
            Unauthenticated: there is no token and no certificate that is known, or more than one token, or none that
                is valid.
            LedgerUnavailable: the token has to be looked up, and Postgres can't be reached.
        """
        values = [value for name, value in metadata if name == "authorization"]
        if not values:
            return self._of_certificate(peer)
        if len(values) != 1 or not isinstance(values[0], str) or not values[0].lower().startswith("bearer "):
            raise Unauthenticated
        text = values[0][len("bearer ") :].strip()
        # Hashed, so that the process holds no more tokens than the calls in flight.
        digest = hashlib.sha256(text.encode()).digest()
        caller: Caller | None = self._known.get(digest)
        if caller is None:
            caller = self._known[digest] = await self._of_token(text)
        return caller

    async def _of_token(self, text: str) -> Caller:
        if not text.startswith(PREFIX):
            return await self._jwt.caller(text)
        token = await self._tokens.authenticate(text)
        if token is None:
            raise Unauthenticated
        return _caller_of(token)

    def _of_certificate(self, peer: Mapping[str, Iterable[bytes]]) -> Caller:
        names = [name.decode(errors="replace") for name in peer.get("x509_subject_alternative_name", ())]
        callers = {self._certificates[name] for name in names if name in self._certificates}
        if len(callers) != 1:
            raise Unauthenticated
        return callers.pop()


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
        caller = await self._authenticator.authenticate(context.invocation_metadata() or (), context.auth_context())
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
