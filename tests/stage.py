"""A service that the tests of a module share, and what they see of its database; each test uses keys of its own."""

from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
from sqlalchemy.engine import URL

from harness import ServiceProcess, url_text

# The tenant of a stage's token.
TENANT = "acme"

# Tests age rows by hand and look whether they stay as they are: nobody else may act on them meanwhile.
ALONE = "--no-housekeeping"


@dataclass(frozen=True)
class Stage:
    """A module's service with its database, and a token that may do everything."""

    url: URL
    service: ServiceProcess
    token: str
    directory: Path
    others: list[ServiceProcess] = field(default_factory=list)

    def start_another(self, *arguments: str) -> ServiceProcess:
        """Start another service on the same database; the module's end kills it."""
        log = self.directory / f"another-{len(self.others)}.log"
        service = ServiceProcess(log, ["--database-url", url_text(self.url), ALONE, *arguments])
        self.others.append(service)
        service.wait_until_ready()
        return service


class LedgerView:
    """What stands in the database, seen beside the service."""

    def __init__(self, connection: asyncpg.Connection, url: URL) -> None:
        self.connection = connection
        self.url = url

    async def counts(self) -> tuple[int, int]:
        """Count the rows of the ledger and of the outbox."""
        row = await self.connection.fetchrow(
            "SELECT (SELECT count(*) FROM ledger) AS ledger, (SELECT count(*) FROM outbox) AS outbox"
        )
        return row["ledger"], row["outbox"]

    async def row(self, key: str) -> str:
        """Give the whole row of a key, as text."""
        return await self.connection.fetchval("SELECT l::text FROM ledger l WHERE operation_key = $1", key)

    async def decisions(self, keys: list[str]) -> dict[str, str]:
        """Give the id of the decision of each key that is decided; no key has two."""
        rows = await self.connection.fetch(
            "SELECT operation_key, decision_id FROM ledger WHERE state = 2 AND operation_key = ANY($1)", keys
        )
        decided = {row["operation_key"]: str(row["decision_id"]) for row in rows}
        assert len(rows) == len(decided)
        return decided

    async def events(self, keys: list[str]) -> dict[str, int]:
        """Count the events of each key."""
        rows = await self.connection.fetch(
            "SELECT operation_key, count(*) FROM outbox WHERE operation_key = ANY($1) GROUP BY operation_key", keys
        )
        return {row["operation_key"]: row["count"] for row in rows}

    async def change(self, key: str, assignments: str) -> None:
        """Change the row of a key, as time or a crash would have."""
        done = await self.connection.execute(f"UPDATE ledger SET {assignments} WHERE operation_key = $1", key)
        assert "UPDATE 1" == done


def evaluations(service: ServiceProcess, mark: str) -> int:
    """Count how often a policy ran that printed this mark."""
    return service.log.read_text().count(f"evaluated {mark}\n")
