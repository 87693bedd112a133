"""The journal in a caller's own Postgres, over each library's connections."""

import contextlib
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import sqlalchemy
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from conftest import connect
from decideonce import errors, journal
from decideonce.client import prepare
from decideonce.journal import NotInTransaction, PostgresJournal
from decideonce.testing import DecideonceServer, Outcome, Processing
from processes import until

OPERATION = "credit.approve-loan"
LOANS = PostgresJournal("loans")

CALLER = f"""
import asyncio, sys
import asyncpg
from decideonce.client import DecisionClient, prepare
from decideonce.journal import PostgresJournal

async def main(address, token, host, port, user, database):
    connection = await asyncpg.connect(host=host, port=port, user=user, database=database)
    request = prepare("{OPERATION}", {{"amount_minor": 120_000}})
    async with connection.transaction():
        await connection.execute("INSERT INTO loans VALUES ('loan-1')")
        await PostgresJournal("loans").add(connection, request)
    async with DecisionClient(address, token=token) as client:
        await client.send(request)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
async def tables(observer: asyncpg.Connection) -> None:
    await observer.execute(journal.SCHEMA)
    await observer.execute("CREATE TABLE loans (name text NOT NULL)")


def start_caller(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", CALLER, *arguments])


class Caller:
    """A caller's transaction, on any library's connection."""

    def __init__(self, connection: Any, *, is_sync: bool = False) -> None:
        self.connection = connection
        self.is_sync = is_sync

    async def add(self, *arguments: Any) -> None:
        if self.is_sync:
            LOANS.add_sync(self.connection, *arguments)
        else:
            await LOANS.add(self.connection, *arguments)

    async def remove(self, *arguments: Any) -> None:
        if self.is_sync:
            LOANS.remove_sync(self.connection, *arguments)
        else:
            await LOANS.remove(self.connection, *arguments)

    async def unfinished(self, **options: Any) -> list[Any]:
        if self.is_sync:
            return LOANS.unfinished_sync(self.connection, **options)
        return await LOANS.unfinished(self.connection, **options)


@contextlib.asynccontextmanager
async def asyncpg_transaction(url: URL) -> AsyncIterator[Caller]:
    connection = await connect(url)
    try:
        async with connection.transaction():
            yield Caller(connection)
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def async_transaction(url: URL) -> AsyncIterator[Caller]:
    engine = create_async_engine(url)
    try:
        async with engine.begin() as connection:
            yield Caller(connection)
    finally:
        await engine.dispose()


@contextlib.asynccontextmanager
async def session_transaction(url: URL) -> AsyncIterator[Caller]:
    engine = create_async_engine(url)
    try:
        async with AsyncSession(engine) as session, session.begin():
            yield Caller(session)
    finally:
        await engine.dispose()


@contextlib.asynccontextmanager
async def sync_transaction(url: URL) -> AsyncIterator[Caller]:
    engine = sqlalchemy.create_engine(url.set(drivername="postgresql+psycopg"))
    try:
        with Session(engine) as session, session.begin():
            yield Caller(session, is_sync=True)
    finally:
        engine.dispose()


async def add_and_fail(transaction: Any, request: Any) -> None:
    async with transaction as caller:
        await caller.add(request)
        raise LookupError


@pytest.mark.parametrize("transaction", [asyncpg_transaction, async_transaction, session_transaction, sync_transaction])
async def test_requests_are_kept_with_the_callers_rows(database_url: URL, transaction) -> None:
    """A request is there exactly if its transaction is committed, comes back as it was, and goes with another."""
    kept, lost = prepare(OPERATION, {"n": 1}), prepare(OPERATION, {"n": 2})
    async with transaction(database_url) as caller:
        await caller.add(kept)
        await caller.add(kept)
    with pytest.raises(LookupError):
        await add_and_fail(transaction(database_url), lost)
    async with transaction(database_url) as caller:
        assert [kept] == await caller.unfinished()
        assert [] == await caller.unfinished(older_than_s=3600)
        await caller.remove(OPERATION, kept.operation_key)
    async with transaction(database_url) as caller:
        assert [] == await caller.unfinished()


async def test_another_request_under_a_kept_key(observer) -> None:
    """A key that is kept is kept for its request, and each journal has its own."""
    kept = prepare(OPERATION, {"n": 1})
    other = prepare(OPERATION, {"n": 2}, key=kept.operation_key)
    async with observer.transaction():
        await LOANS.add(observer, kept)
        with pytest.raises(errors.OperationKeyReused):
            await LOANS.add(observer, other)
        await PostgresJournal("cards").add(observer, other)
        assert [kept] == await LOANS.unfinished(observer)


async def test_outside_of_a_transaction(observer) -> None:
    """Without a transaction nothing is kept: it would be there before the caller's own rows."""
    with pytest.raises(NotInTransaction):
        await LOANS.add(observer, prepare(OPERATION, {}))
    assert [] == await LOANS.unfinished(observer)
    with pytest.raises(ValueError, match="name must be"):
        PostgresJournal("")


async def test_two_that_resume_share_the_work(observer, database_url: URL) -> None:
    """What one transaction resumes no other is given."""
    one, two = prepare(OPERATION, {"n": 1}), prepare(OPERATION, {"n": 2})
    async with observer.transaction():
        await LOANS.add(observer, one)
    async with observer.transaction():
        await LOANS.add(observer, two)
    async with observer.transaction():
        assert [one] == await LOANS.unfinished(observer, limit=1)
        async with asyncpg_transaction(database_url) as other:
            assert [two] == await other.unfinished()


async def test_a_caller_that_is_killed_is_finished(
    observer, database_url: URL, decideonce_server: DecideonceServer
) -> None:
    """A caller that is killed after sending left its request with its own rows, and it is finished from there."""
    decideonce_server.decides(OPERATION, Outcome("APPROVED"))
    decideonce_server.next(Processing(math.inf))
    at = [str(database_url.query[part]) for part in ("host", "port")] + [database_url.username, database_url.database]
    caller = start_caller(decideonce_server.address, decideonce_server.token, *at)
    try:
        await until(lambda: decideonce_server.calls)
    finally:
        caller.kill()
        caller.wait()
    sent = decideonce_server.calls[0]
    assert 1 == await observer.fetchval("SELECT count(*) FROM loans")
    decideonce_server.finish(OPERATION, sent.operation_key)
    async with decideonce_server.client() as client, observer.transaction():
        (request,) = await LOANS.unfinished(observer)
        decision = await client.send(request)
        await LOANS.remove(observer, request.operation, request.operation_key)
    assert (sent.operation_key, True) == (decision.operation_key, decision.replayed)
    assert {sent.request} == {call.request for call in decideonce_server.calls if call.method == "Decide"}
    assert (1, []) == (decideonce_server.decided, await LOANS.unfinished(observer))
