"""How Postgres plans the service's statements on a large ledger."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg

from bench.purge import plant
from decideonce_server import ledger, ledger_catalog, ledger_tokens, ledger_watch, outbox, outbox_buckets
from decideonce_server.database import SETTINGS, Statement

ROWS = 20_000
LARGE = {"ledger", "outbox", "outbox_parked"}
EVENTS = """INSERT INTO outbox (bucket, id, tenant, operation, operation_key, aggregatetype, aggregateid, type, payload,
        topic)
    SELECT l.bucket, gen_random_uuid(), l.tenant, l.operation, l.operation_key, 'a', 'a', 'decision.recorded', '', 't'
    FROM ledger l"""

# What an operator asks for, of everything that waits or is parked.
ASKED_FOR_ALL = {"outbox.LIST", "outbox.PARKED", "outbox.RETRY"}

STATEMENTS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": statement
    for module in (ledger, ledger_catalog, ledger_tokens, ledger_watch, outbox, outbox_buckets)
    for name, statement in vars(module).items()
    if isinstance(statement, Statement)
}


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give every node of a plan."""
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


async def test_no_statement_reads_a_whole_table(database_url, observer) -> None:
    """On a large ledger without open work, which is how ANALYZE sees most, each statement goes by indexes alone."""
    await plant(observer, ROWS, timedelta(days=1))
    await observer.execute(EVENTS)
    await observer.execute("VACUUM ANALYZE")
    host, port = database_url.query["host"], database_url.query["port"]
    settings = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items() if name != "application_name")
    conninfo = psycopg.conninfo.make_conninfo(
        host=host, port=port, user=database_url.username, dbname=database_url.database, options=settings
    )
    found = {}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for name, statement in STATEMENTS.items():
            sql, _ = statement.compiled
            ((text,),) = connection.execute(f"EXPLAIN (GENERIC_PLAN, FORMAT JSON) {sql}").fetchall()
            plan = text if isinstance(text, list) else json.loads(text)
            whole = {node["Relation Name"] for node in nodes(plan[0]["Plan"]) if node["Node Type"] == "Seq Scan"}
            found[name] = whole & LARGE
    assert {} == {name: tables for name, tables in found.items() if tables and name not in ASKED_FOR_ALL}
    assert len(found) > 20
