"""What the role that a service connects as can do in the database, and what it can't."""

import subprocess
import sys

import asyncpg
import pytest
from sqlalchemy.engine import URL

from conftest import connect
from harness import make_token, new_key, url_text, write_catalog
from processes import until

OPERATION = "role.echo"


def decideonce(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "decideonce_server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
async def role(observer: asyncpg.Connection, database_url: URL) -> str:
    """Give a role that has what `migrate` gives it."""
    name = f"service {database_url.database}"
    await observer.execute(f'CREATE ROLE "{name}" LOGIN')
    ran = decideonce("migrate", "--database-url", url_text(database_url), "--service-role", name)
    assert 0 == ran.returncode, ran.stderr
    yield name
    await observer.execute(f'DROP OWNED BY "{name}"')
    await observer.execute(f'DROP ROLE "{name}"')


async def test_service_needs_no_more_than_its_role_has(
    database_url, observer, start_service, connect_caller, tmp_path, role
) -> None:
    """A service that connects as that role applies a catalog, decides, publishes, and purges."""
    catalog = write_catalog(
        tmp_path / "catalog",
        {OPERATION: {"policy": "echo", "retention": "1s", "tombstone_retention": "1s"}},
        {"echo": "echo_policy:decide"},
    )
    token = await make_token(database_url, "acme")
    arguments = ["--catalog", str(catalog), "--events", f"log:{tmp_path}/events.jsonl"]
    service = start_service(*arguments, "--database-url", url_text(database_url.set(username=role)))
    key = new_key()
    await connect_caller(service, token).decide(OPERATION, key)
    await until(lambda: observer.fetchval("SELECT NOT EXISTS (SELECT FROM ledger)"), within=20)
    assert key in (tmp_path / "events.jsonl").read_text()
    assert 0 == service.stop()
    assert "defect" not in service.log.read_text()


FORBIDDEN = [
    "ALTER TABLE ledger ADD COLUMN x int",
    "DROP TRIGGER policy_version_immutable ON policy_version",
    "ALTER TABLE policy_version DISABLE TRIGGER ALL",
    "UPDATE policy_version SET content = ''",
    "DELETE FROM operation_version",
    "TRUNCATE catalog",
    "UPDATE outbox SET payload = ''",
    "INSERT INTO token SELECT * FROM token",
    "UPDATE token SET tenant = 'acme'",
    "DELETE FROM bucket_lease",
    "UPDATE alembic_version SET version_num = ''",
    "CREATE TABLE x ()",
]


async def test_role_can_not_change_what_is_not_the_services(database_url: URL, role: str) -> None:
    """The schema, published versions, tokens and written events are beyond the role."""
    connection = await connect(database_url.set(username=role))
    for statement in FORBIDDEN:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)
    await connection.close()


async def test_doctor_says_which_role_it_is(database_url: URL, role: str) -> None:
    """The doctor tells a role that owns the schema from one that can't alter it."""
    owner = decideonce("doctor", "--database-url", url_text(database_url))
    service = decideonce("doctor", "--database-url", url_text(database_url.set(username=role)))
    assert (0, 0) == (owner.returncode, service.returncode), owner.stdout + service.stdout
    assert "it owns the schema" in owner.stdout
    assert "it can't alter the schema" in service.stdout


async def test_unknown_role_is_said(database_url: URL) -> None:
    """A role that isn't there is an error that says what to do."""
    ran = decideonce("migrate", "--database-url", url_text(database_url), "--service-role", "nobody")
    assert 1 == ran.returncode
    assert "CREATE ROLE" in ran.stderr
