"""Who may call besides the holders of stored tokens: client certificates and JWTs, as a file maps them to tenants.

    certificates:
      - san: spiffe://acme.example/checkout    # a URI or DNS name in the certificate, exactly
        tenant: acme
        roles: [decide]
        operations: ["credit.*"]               # globs; all if left out
    jwt:
      - issuer: https://idp.acme.example/
        audience: decideonce
        algorithms: [RS256]                    # pinned: the token has no say in it
        jwks: https://idp.acme.example/jwks    # or a file
        tenant_claim: tenant                   # the claim that names the tenant
        tenants: [acme]                        # globs of the tenants that this issuer may name; all if left out
        roles: [decide]                        # or roles_claim: roles
        operations: ["credit.*"]

Whatever isn't mapped is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from decideonce_server import json_schema
from decideonce_server.errors import Violation
from decideonce_server.identity import TENANT_PATTERN, Caller, Role, is_tenant

# Signatures that the issuer alone can make; with a shared secret every service that checks could.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")

_TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_ROLES = {"type": "array", "items": {"enum": [role.value for role in Role]}, "minItems": 1, "uniqueItems": True}

_SHAPE = json_schema.compile_schema(
    {
        "type": "object",
        "properties": {
            "certificates": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["san", "tenant", "roles"],
                    "properties": {
                        "san": _TEXT,
                        "tenant": {"type": "string", "pattern": f"^{TENANT_PATTERN}$"},
                        "roles": _ROLES,
                        "operations": _TEXTS,
                    },
                    "additionalProperties": False,
                },
            },
            "jwt": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["issuer", "audience", "algorithms", "jwks", "tenant_claim"],
                    "properties": {
                        "issuer": _TEXT,
                        "audience": _TEXT,
                        "algorithms": {"type": "array", "items": {"enum": list(ALGORITHMS)}, "minItems": 1},
                        "jwks": _TEXT,
                        "tenant_claim": _TEXT,
                        "tenants": _TEXTS,
                        "roles": _ROLES,
                        "roles_claim": _TEXT,
                        "operations": _TEXTS,
                    },
                    "oneOf": [{"required": ["roles"]}, {"required": ["roles_claim"]}],
                    "additionalProperties": False,
                },
            },
        },
        "additionalProperties": False,
    }
)


class InvalidCallers(Exception):
    """The file of callers can't be used; `violations` says all that is wrong."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("The file of callers can't be used.")
        self.violations = tuple(violations)


@dataclass(frozen=True, slots=True)
class Issuer:
    """One issuer of JWTs, and what its tokens are worth. `jwks` is an https URL or a file."""

    issuer: str
    audience: str
    algorithms: tuple[str, ...]
    jwks: str
    tenant_claim: str
    tenants: tuple[str, ...]
    roles: frozenset[str]
    roles_claim: str | None
    operations: tuple[str, ...]

    def caller(self, claims: Mapping[str, Any]) -> Caller | None:
        """Give the caller that verified claims stand for; None where they stand for none."""
        tenant = claims.get(self.tenant_claim)
        if not isinstance(tenant, str) or not is_tenant(tenant):
            return None
        if not any(fnmatchcase(tenant, glob) for glob in self.tenants):
            return None
        roles = self.roles if self.roles_claim is None else _roles(claims.get(self.roles_claim))
        return Caller(f"jwt:{claims.get('sub', '')}", tenant, roles, self.operations)


def _roles(claimed: object) -> frozenset[str]:
    """Read the roles that a claim names, in a list or with spaces between; what is none of ours counts for nothing."""
    named = claimed.split() if isinstance(claimed, str) else claimed
    return frozenset(role.value for role in Role if isinstance(named, list) and role.value in named)


@dataclass(frozen=True, slots=True)
class Callers:
    """The callers that a file maps: by subject alternative name, and by issuer."""

    certificates: Mapping[str, Caller]
    issuers: Mapping[str, Issuer]


NO_CALLERS = Callers({}, {})


def read_callers(path: Path) -> Callers:
    """Read the file of callers.

    Raises:
        InvalidCallers: it can't be used.
    """
    try:
        document = YAML(typ="safe", pure=True).load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        raise InvalidCallers([Violation(path.name, "must be a file of UTF-8 text that can be read")]) from None
    except YAMLError:
        raise InvalidCallers([Violation(path.name, "must be one well-formed YAML 1.2 document")]) from None
    violations = list(json_schema.violations(_SHAPE, document, f"{path.name}#"))
    if not violations:
        violations = _faults(document, f"{path.name}#")
    if violations:
        raise InvalidCallers(violations)
    return Callers(
        certificates={entry["san"]: _certificate(entry) for entry in document.get("certificates", ())},
        issuers={entry["issuer"]: _issuer(entry) for entry in document.get("jwt", ())},
    )


def _faults(document: Mapping[str, Any], root: str) -> list[Violation]:
    violations = []
    for kind, name in (("certificates", "san"), ("jwt", "issuer")):
        entries = [entry[name] for entry in document.get(kind, ())]
        for i, value in enumerate(entries):
            if value in entries[:i]:
                violations.append(Violation(f"{root}/{kind}/{i}/{name}", "must stand in one entry only"))
    for i, entry in enumerate(document.get("jwt", ())):
        if not entry["jwks"].startswith("https://") and not Path(entry["jwks"]).is_file():
            violations.append(Violation(f"{root}/jwt/{i}/jwks", "must be an https:// URL, or a file that is there"))
    return violations


def _certificate(entry: Mapping[str, Any]) -> Caller:
    operations = tuple(entry.get("operations", ["*"]))
    return Caller(f"certificate:{entry['san']}", entry["tenant"], frozenset(entry["roles"]), operations)


def _issuer(entry: Mapping[str, Any]) -> Issuer:
    return Issuer(
        issuer=entry["issuer"],
        audience=entry["audience"],
        algorithms=tuple(entry["algorithms"]),
        jwks=entry["jwks"],
        tenant_claim=entry["tenant_claim"],
        tenants=tuple(entry.get("tenants", ["*"])),
        roles=frozenset(entry.get("roles", ())),
        roles_claim=entry.get("roles_claim"),
        operations=tuple(entry.get("operations", ["*"])),
    )
