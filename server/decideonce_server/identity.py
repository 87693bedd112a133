"""A caller: whose it is, and what it may do."""

import re
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

# No "/": it joins tenant and operation key where events need both as one text.
TENANT_PATTERN = "[A-Za-z0-9._:-]{1,64}"
_TENANT = re.compile(TENANT_PATTERN, re.ASCII)


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
