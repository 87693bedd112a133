"""What a pipeline that captures changes sees of the outbox: docs/events.md tells how to connect Debezium's."""

import asyncio
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import grpc
import pytest
from sqlalchemy.engine import URL

from brokers import Nats
from cluster import Cluster, cluster_directory
from decideonce.v1.events_pb2 import DecisionEvent
from decideonce_server.ledger import bucket_of
from decideonce_server.migrate import migrate
from harness import Caller, ServiceProcess, make_token, new_key, table_policy, url_text, write_catalog
from processes import until
from sample_events import uuid7_at

PAGE = (Path(__file__).parents[2] / "docs/events.md").read_text()
PUBLICATION, PURGE = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
# The topics of three operations of the same names: the broker has it, or has it later, or nobody wants it.
THERE, MISSING, UNWANTED = "test.there", "test.missing", "test.unwanted"
POLICIES = {THERE: "effects", MISSING: "effects", UNWANTED: "plain"}
EFFECTS = "[{type: 'test.first', payload: {n: facts.n}}, {type: 'test.second', payload: {n: facts.n}}]"
# Enough for several to be committed together.
MANY = 50
# What the router looks for where its settings don't say otherwise.
ROUTERS_COLUMNS = {"id": "uuid", "aggregatetype": "text", "aggregateid": "text", "type": "text", "payload": "bytea"}
PLANT = """INSERT INTO outbox (bucket, id, tenant, operation, operation_key, aggregatetype, aggregateid, type, payload)
    VALUES ($1, $2, 'acme', 'test.there', $3, 'test.there', 'acme/' || $3, 'test.first', '')"""
# A column as `test_decoding` writes it: payload[bytea]:'\x0a', quotes doubled.
COLUMN = re.compile(r"(\w+)\[([^\]]+)\]:('(?:[^']|'')*'|\S+)")


@dataclass(frozen=True)
class Change:
    """A change of the outbox, and the row's columns with their types, as text."""

    kind: str
    columns: dict[str, str]
    types: dict[str, str]

    @classmethod
    def read(cls, data: str) -> "Change":
        head, kind, rest = data.split(": ", 2)
        assert head == "table public.outbox"
        found = COLUMN.findall(rest)
        values = {name: value[1:-1].replace("''", "'") if value[0] == "'" else value for name, _, value in found}
        return cls(kind, values, {name: type_ for name, type_, _ in found})


@dataclass(frozen=True)
class Captured:
    """All changes of the outbox, and what Postgres's own plug-in makes of them for the page's publication."""

    changes: list[Change]
    published: list[bytes]

    @property
    def inserted(self) -> list[Change]:
        return [change for change in self.changes if change.kind == "INSERT"]


async def outbox_command(url: URL, *arguments: str) -> None:
    """Run `decideonce outbox`."""
    command = [sys.executable, "-m", "decideonce_server", "outbox", *arguments, "--database-url", url_text(url)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    assert 0 == await process.wait()


async def live_through_everything(cluster: Cluster, broker: Nats, directory: Path) -> Captured:
    """Decide, publish, park, retry and discard, and give what slots have of it."""
    await migrate(cluster.url)
    observer = await cluster.connect()
    await observer.execute(PUBLICATION)
    for slot, plugin in (("all_changes", "test_decoding"), ("published", "pgoutput")):
        await observer.execute("SELECT pg_create_logical_replication_slot($1, $2)", slot, plugin)
    catalog = write_catalog(
        directory / "catalog",
        {topic: {"policy": policy, "topic": topic} for topic, policy in POLICIES.items()},
        {"effects": table_policy("DONE", outputs={"effects": EFFECTS}), "plain": table_policy("DONE")},
    )
    arguments = ["--database-url", url_text(cluster.url), "--catalog", str(catalog), "--events", broker.url]
    service = ServiceProcess(directory / "service.log", arguments)
    try:
        service.wait_until_ready()
        async with grpc.aio.insecure_channel(service.address) as channel:
            caller = Caller(channel, await make_token(cluster.url, "acme"))
            await asyncio.gather(*(caller.decide(THERE, new_key(), {"n": n}) for n in range(MANY)))
            await asyncio.gather(*(caller.decide(topic, new_key(), {"n": 0}) for topic in (MISSING, UNWANTED)))
        parked = "SELECT id FROM outbox_parked WHERE topic = $1"
        missing, unwanted = [await until(lambda t=t: observer.fetchval(parked, t)) for t in (MISSING, UNWANTED)]
        broker.make_topic(MISSING)
        await outbox_command(cluster.url, "retry", str(missing))
        await outbox_command(cluster.url, "discard", "--yes", str(unwanted))
        await until(lambda: observer.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))
    finally:
        service.kill()
    changes = await observer.fetch("SELECT data FROM pg_logical_slot_get_changes('all_changes', NULL, NULL)")
    published = await observer.fetch(
        """SELECT data FROM pg_logical_slot_get_binary_changes('published', NULL, NULL,
            'proto_version', '1', 'publication_names', 'decideonce_outbox')"""
    )
    await observer.close()
    of_outbox = [row["data"] for row in changes if row["data"].startswith("table public.outbox:")]
    return Captured([Change.read(data) for data in of_outbox], [row["data"] for row in published])


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    """Give what was captured of an outbox's life."""
    broker = Nats()
    try:
        broker.make_topic(THERE)
        with cluster_directory() as directory:
            cluster = Cluster.create(directory / "server")
            try:
                cluster.set("wal_level", "logical")
                cluster.restart()
                yield asyncio.run(live_through_everything(cluster, broker, tmp_path_factory.mktemp("captured")))
            finally:
                cluster.destroy()
    finally:
        broker.close()


def test_outbox_sees_inserts_and_deletes_alone(captured: Captured) -> None:
    """Through deciding, publishing, parking, retrying and discarding no row of the outbox is ever updated."""
    # One more each where an event was parked and sent again.
    rows = 3 * MANY + 3 + 1 + 1
    assert Counter(INSERT=rows, DELETE=rows) == Counter(change.kind for change in captured.changes)


def test_rows_are_as_the_router_expects_them(captured: Captured) -> None:
    """Each row has the outbox router's default columns, and further ones that the page's settings name."""
    for change in captured.inserted:
        assert ROUTERS_COLUMNS == {name: change.types[name] for name in ROUTERS_COLUMNS}
        row = change.columns
        event = DecisionEvent.FromString(bytes.fromhex(row["payload"].removeprefix("\\x")))
        provenance = event.provenance
        assert (event.event_id, event.type) == (row["id"], row["type"])
        assert (provenance.operation, f"acme/{provenance.operation_key}") == (row["aggregatetype"], row["aggregateid"])
    assert {THERE, MISSING, UNWANTED} == {change.columns["topic"] for change in captured.inserted}


def test_log_has_events_of_a_key_in_order(captured: Captured) -> None:
    """Rows come in each key's order, also where many decisions were committed together."""
    of_key = defaultdict(list)
    for change in captured.inserted:
        of_key[change.columns["aggregateid"]].append(change.columns["id"])
    # UUIDv7 ascend.
    assert [] == [ids for ids in of_key.values() if list(dict.fromkeys(ids)) != sorted(set(ids))]
    assert MANY + 2 == len(of_key)


def test_publication_has_inserts_alone(captured: Captured) -> None:
    """The page's publication leaves deletes out, and tells the columns' names."""
    kinds = Counter(message[:1] for message in captured.published)
    assert {b"B", b"C", b"R", b"I"} == kinds.keys()
    assert len(captured.inserted) == kinds[b"I"]
    (relation,) = {message for message in captured.published if message[:1] == b"R"}
    assert [] == [name for name in ROUTERS_COLUMNS if name.encode() + b"\0" not in relation]


async def test_page_purges_what_was_captured(observer: asyncpg.Connection) -> None:
    """The page's statement deletes events of more than a day ago, and no newer ones."""
    now = datetime.now(UTC)
    old, new = uuid7_at(now - timedelta(days=1, minutes=1)), uuid7_at(now - timedelta(hours=23))
    for event_id in (old, new):
        key = new_key()
        await observer.execute(PLANT, bucket_of(key), event_id, key)
    assert "DELETE 1" == await observer.execute(PURGE)
    assert new == await observer.fetchval("SELECT id FROM outbox")
