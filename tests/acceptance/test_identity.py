"""Who is let in: by certificate, by JWT, and nobody else."""

import functools
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import jwt
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from jwt.algorithms import RSAAlgorithm

from conftest import connect
from decideonce_server.auth import PERMISSIONS
from decideonce_server.callers import InvalidCallers, read_callers
from decideonce_server.jwt_tokens import IssuerKeys
from decideonce_server.wire import method_path, methods
from harness import Caller, ServiceProcess, make_token, new_key, refused, table_policy, write_catalog
from processes import until
from stage import ALONE

OPERATION = "credit.approve-loan"
CATALOG = ({OPERATION: {"policy": "table"}}, {"table": table_policy("LOW")})
ISSUER = {"iss": "https://idp.acme.example/", "aud": "decideonce"}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def signing_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture
def start(start_service, tmp_path, authority, signing_key) -> Callable[..., ServiceProcess]:
    """Give a function that starts a service with TLS that knows the authority and the issuer."""
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    public = json.loads(RSAAlgorithm.to_jwk(signing_key.public_key())) | {"kid": "k1", "use": "sig"}
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [public]}))
    issuer = {
        "issuer": ISSUER["iss"],
        "audience": ISSUER["aud"],
        "algorithms": ["RS256"],
        "jwks": str(tmp_path / "jwks.json"),
        "tenant_claim": "tenant",
        "tenants": ["acme*"],
        "roles_claim": "roles",
    }
    checkout = {"san": "checkout.acme.example", "tenant": "acme", "roles": ["decide"], "operations": ["credit.*"]}
    (tmp_path / "callers.yaml").write_text(json.dumps({"certificates": [checkout], "jwt": [issuer]}))
    catalog = write_catalog(tmp_path / "catalog", *CATALOG)
    files = ("--tls-certificate", str(tmp_path / "server.pem"), "--tls-key", str(tmp_path / "server.key"))

    def start(*arguments: str) -> ServiceProcess:
        callers = str(tmp_path / "callers.yaml")
        return start_service("--catalog", str(catalog), ALONE, *files, "--callers", callers, *arguments)

    return start


@asynccontextmanager
async def connected(
    service: ServiceProcess, authority: trustme.CA, name: str | None = None, token: str | None = None
) -> AsyncIterator[Caller]:
    """Connect with TLS, showing the authority's certificate for a name, or none."""
    shown = None if name is None else authority.issue_cert(name)
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(),
        None if shown is None else shown.private_key_pem.bytes(),
        None if shown is None else b"".join(pem.bytes() for pem in shown.cert_chain_pems),
    )
    # Channels of one process share connections unless told otherwise.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(service.address, credentials, options) as channel:
        yield Caller(channel, token)


async def test_certificate_is_a_caller(start, authority, database_url, tmp_path) -> None:
    """A certificate that is mapped decides for its tenant; one that isn't, and none at all, are refused."""
    service = start("--tls-client-ca", str(tmp_path / "ca.pem"))
    async with connected(service, authority, "checkout.acme.example") as caller:
        assert "acme" == (await caller.decide(OPERATION, new_key(), {"n": 1})).provenance.tenant
        error = await refused(caller.decide("payment.authorize-refund", new_key()))
        assert (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED") == (error.code, error.reason)
    async with connected(service, authority, "stranger.acme.example") as caller:
        error = await refused(caller.decide(OPERATION, new_key()))
        assert (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED") == (error.code, error.reason)
    async with connected(service, authority) as caller:
        with pytest.raises(grpc.RpcError) as caught:
            await caller.decide(OPERATION, new_key())
        assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
    async with connected(service, trustme.CA(), "checkout.acme.example") as caller:
        with pytest.raises(grpc.RpcError):
            await caller.decide(OPERATION, new_key())
    token = await make_token(database_url, "zenith")
    async with connected(service, authority, "checkout.acme.example", token) as caller:
        # A token says more than the connection that it comes on.
        assert "zenith" == (await caller.decide(OPERATION, new_key(), {"n": 1})).provenance.tenant


async def test_new_certificate_is_taken_up_without_a_restart(start, authority, tmp_path, database_url) -> None:
    """The next handshake after the files changed sees the new certificate; one that can't be used changes nothing."""
    service = start()
    token = await make_token(database_url, "acme")
    async with connected(service, authority, token=token) as caller:
        await caller.decide(OPERATION, new_key(), {"n": 1})
    (tmp_path / "server.key").write_text("half a ke")
    async with connected(service, authority, token=token) as caller:
        await caller.decide(OPERATION, new_key(), {"n": 1})
    successor = trustme.CA()
    certificate = successor.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")

    async def is_new() -> bool:
        async with connected(service, successor, token=token) as caller:
            try:
                await caller.decide(OPERATION, new_key(), {"n": 1})
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
            return True

    await until(is_new)
    assert "the old ones go on" in service.log.read_text()


def claims(**changes) -> dict:
    """Make the claims of a token that is let in; None takes one out."""
    made = ISSUER | {"sub": "checkout", "tenant": "acme", "roles": ["decide"], "exp": time.time() + 600} | changes
    return {name: value for name, value in made.items() if value is not None}


async def test_jwt_is_a_caller(start, authority, signing_key) -> None:
    """A token of the issuer decides for the tenant that it names, with its roles, and every other one is refused."""
    service = start()
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public_pem = signing_key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )

    def sign(key=signing_key, algorithm="RS256", kid="k1", **changes) -> str:
        return jwt.encode(claims(**changes), key, algorithm, headers={"kid": kid})

    async def answer(token: str) -> str:
        async with connected(service, authority, token=token) as caller:
            return (await caller.decide(OPERATION, new_key(), {"n": 1})).provenance.tenant

    assert "acme" == await answer(sign())
    assert "acme-eu" == await answer(sign(tenant="acme-eu", roles="read decide"))
    wrong = {
        "expired": sign(exp=time.time() - 60),
        "not yet": sign(nbf=time.time() + 60),
        "without an end": sign(exp=None),
        "an end that is no number": sign(exp="never"),
        "an end beyond all numbers": sign(exp=float("inf")),
        "another audience": sign(aud="ledger"),
        "another issuer": sign(iss="https://idp.zenith.example/"),
        "no signature": jwt.encode(claims(), None, "none", headers={"kid": "k1"}),
        "another key": sign(key=other),
        "an unknown key": sign(kid="k2"),
        "another algorithm": sign(algorithm="PS256"),
        "no tenant": sign(tenant=None),
        "a tenant that isn't the issuer's": sign(tenant="zenith"),
        "a tenant that can't be one": sign(tenant="acme/eu"),
        "no text for a tenant": sign(tenant=["acme"]),
        "cut": sign()[:-8],
        "signed with the public key": forged(public_pem),
        "not a token": "e30",
    }
    for what, token in wrong.items():
        async with connected(service, authority, token=token) as caller:
            error = await refused(caller.decide(OPERATION, new_key()))
            assert (what, grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED") == (what, error.code, error.reason)
    for roles in (["read"], ["root"], [{"decide": True}, ["decide"]], {"decide": True}, None, 7):
        async with connected(service, authority, token=sign(roles=roles)) as caller:
            error = await refused(caller.decide(OPERATION, new_key()))
            assert (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED") == (error.code, error.reason)


def forged(public_pem: bytes) -> str:
    """Sign with what everybody knows, as if it were a shared secret."""
    header, payload, _ = jwt.encode(claims(), "x" * 32, "HS256", headers={"kid": "k1"}).split(".")
    algorithm = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    signature = algorithm.sign(f"{header}.{payload}".encode(), public_pem)
    return f"{header}.{payload}.{jwt.utils.base64url_encode(signature).decode()}"


async def test_wrong_callers_are_refused_before_any_statement(
    start, authority, signing_key, postgres, database_url
) -> None:
    """With Postgres out of reach every wrong caller of every method is refused as ever; a right one would need it."""
    service = start()
    admin = await connect(postgres.url("postgres"))
    await admin.execute(f"ALTER DATABASE {database_url.database} WITH ALLOW_CONNECTIONS false")
    await admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", database_url.database
    )
    await admin.close()

    def sign(**changes) -> str:
        return jwt.encode(claims(**changes), signing_key, "RS256", headers={"kid": "k1"})

    async def answer(method: MethodDescriptor, token: str | None) -> tuple[str, str]:
        request = GetMessageClass(method.input_type)()
        if "operation" in method.input_type.fields_by_name:
            request.operation = OPERATION
        if "operation_key" in method.input_type.fields_by_name:
            request.operation_key = new_key()
        async with connected(service, authority, token=token) as caller:
            call = caller.channel.unary_unary(method_path(method))
            error = await refused(call(request.SerializeToString(), metadata=caller.metadata, timeout=10))
            return error.code.name, error.reason

    unknown = {
        "nobody": None,
        "expired": sign(exp=time.time() - 60),
        "for another service": sign(aud="ledger"),
        "unsigned": jwt.encode(claims(), None, "none", headers={"kid": "k1"}),
        "of no tenant": sign(tenant=None),
    }
    for method in methods():
        for who, token in unknown.items():
            assert (who, "UNAUTHENTICATED", "UNAUTHENTICATED") == (who, *await answer(method, token))
        allowed = {role.value for role in PERMISSIONS[method_path(method)].roles}
        for role in {"decide", "read", "admin"} - allowed:
            assert (role, "PERMISSION_DENIED", "PERMISSION_DENIED") == (role, *await answer(method, sign(roles=[role])))
    decide = next(method for method in methods() if method.name == "Decide")
    assert ("UNAVAILABLE", "LEDGER_UNAVAILABLE") == await answer(decide, sign())


async def test_keys_are_read_from_an_https_url(
    start, authority, signing_key, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys come from an address whose certificate is trusted, and a caller is let in by them."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            callers = json.loads((tmp_path / "callers.yaml").read_text())
            callers["jwt"][0]["jwks"] = f"https://localhost:{server.server_port}/jwks.json"
            (tmp_path / "callers.yaml").write_text(json.dumps(callers))
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
            token = jwt.encode(claims(), signing_key, "RS256", headers={"kid": "k1"})
            async with connected(start(), authority, token=token) as caller:
                assert "acme" == (await caller.decide(OPERATION, new_key(), {"n": 1})).provenance.tenant
        finally:
            server.shutdown()
            serving.join()


async def test_keys_of_an_issuer_are_followed(tmp_path: Path, signing_key) -> None:
    """A new key is found, one that was withdrawn is refused, and an outage of the issuer changes nothing."""
    public = json.loads(RSAAlgorithm.to_jwk(signing_key.public_key()))
    path = tmp_path / "jwks.json"

    def publish(*key_ids: str) -> None:
        path.write_text(json.dumps({"keys": [public | {"kid": key_id} for key_id in key_ids]}))

    publish("old")
    keys = IssuerKeys(str(path), refresh_interval_s=0, age_max_s=0)
    assert await keys.key("old") is not None
    publish("old", "new")
    assert await keys.key("new") is not None
    path.write_text("out of order")
    assert await keys.key("old") is not None
    publish("new")
    assert await keys.key("old") is None
    assert await keys.key("new") is not None


async def test_keys_are_not_asked_for_by_every_call(tmp_path: Path) -> None:
    """Whoever makes up key ids has an issuer asked once, and not again before some time has passed."""
    path = tmp_path / "jwks.json"
    keys = IssuerKeys(str(path))
    assert await keys.key("made-up") is None
    path.write_text(json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "made-up"}]}))
    assert await keys.key("made-up") is None


def test_all_faults_of_the_callers_file_are_told_at_once(tmp_path: Path) -> None:
    """Each fault is told with its place and rule, all of them together."""
    path = tmp_path / "callers.yaml"
    entry = {"san": "a.example", "tenant": "acme/eu", "roles": ["decide"]}
    issuer = {"issuer": "i", "audience": "a", "algorithms": ["HS256"], "jwks": "https://i", "tenant_claim": "t"}
    path.write_text(json.dumps({"certificates": [entry, {"san": "b.example"}], "jwt": [issuer], "ldap": []}))
    with pytest.raises(InvalidCallers) as caught:
        read_callers(path)
    places = {violation.field for violation in caught.value.violations}
    expected = {"certificates/0/tenant", "certificates/1", "jwt/0/algorithms/0", "jwt/0", ""}
    assert {f"callers.yaml#/{place}".removesuffix("/") for place in expected} == {
        p.removesuffix("/ldap") for p in places
    }


@pytest.mark.parametrize(
    ("document", "place", "rule"),
    [
        ({"certificates": [{"san": "a", "tenant": "t", "roles": ["read"]}] * 2}, "certificates/1/san", "one entry"),
        (
            {
                "jwt": [
                    {
                        "issuer": "i",
                        "audience": "a",
                        "algorithms": ["RS256"],
                        "jwks": "http://i",
                        "tenant_claim": "t",
                        "roles": ["read"],
                    }
                ]
            },
            "jwt/0/jwks",
            "https://",
        ),
    ],
)
def test_what_a_shape_can_not_say_is_refused_too(tmp_path: Path, document: dict, place: str, rule: str) -> None:
    """A name that stands in two entries, and keys that anybody on the way could change, are refused."""
    path = tmp_path / "callers.yaml"
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidCallers) as caught:
        read_callers(path)
    (violation,) = caught.value.violations
    assert f"callers.yaml#/{place}" == violation.field
    assert rule in violation.rule
