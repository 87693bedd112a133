"""The journal: requests that are kept before they are first sent, so that a process that dies loses none.

What is kept is the operation key and the very bytes. A process that starts sends again what it finds, and gets the
decision, whoever made it meanwhile. There are two forms. `Journal` is a file of SQLite, which a client keeps by itself:

    journal = Journal("decisions.journal")
    async for resumed in client.resume(journal): ...          # at start
    await client.decide("credit.approve-loan", facts, journal=journal)

`PostgresJournal` is a table in the caller's own Postgres, and is written in the caller's own transactions, on a
connection of asyncpg or SQLAlchemy: the intent to decide is then there exactly if the caller's rows are, and forgotten
exactly if what was made of the decision is:

    request = prepare("credit.approve-loan", facts)
    async with connection.transaction():
        ...                                                   # the caller's own rows
        await journal.add(connection, request)
    decision = await client.send(request)                     # not before: the transaction may still be rolled back
    async with connection.transaction():
        ...                                                   # what is made of the decision
        await journal.remove(connection, request.operation, request.operation_key)

Neither asyncpg nor SQLAlchemy is imported unless it is used.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from decideonce import _postgres
from decideonce._postgres import NotInTransaction, Statement
from decideonce.errors import JournalFull, OperationKeyReused
from decideonce.requests import DecisionRequest
from decideonce.v1 import decision_service_pb2 as wire

if TYPE_CHECKING:
    from decideonce._postgres import AsyncConnection, SyncConnection

__all__ = ["ENTRIES_MAX", "SCHEMA", "Journal", "JournalFull", "NotInTransaction", "PostgresJournal"]

# Far more than a service has under way: more are a sign that nobody resumes.
ENTRIES_MAX = 10_000

# How long a process waits for another that writes the same file.
_BUSY_S = 10.0


class Journal:
    """A journal in a file, which is made when it isn't there; any number of threads and processes may share it.

    An entry is on the disk before its request is sent (`synchronous = EXTRA`). `entries_max` (1 or more) is how many
    there may be. The file must be on a local disk: SQLite's locks don't hold on network file systems.

    Raises ValueError, and sqlite3.Error where the file can't be used.
    """

    def __init__(self, path: str | PathLike[str], *, entries_max: int = ENTRIES_MAX) -> None:
        if entries_max < 1:
            raise ValueError("entries_max must be 1 or more")
        self.path = path
        self.entries_max = entries_max
        with self._transaction() as file:
            file.execute(
                "CREATE TABLE IF NOT EXISTS journal (operation TEXT NOT NULL, operation_key TEXT NOT NULL,"
                " request BLOB NOT NULL, add_time REAL NOT NULL, PRIMARY KEY (operation, operation_key))"
            )

    def add(self, request: DecisionRequest) -> None:
        """Keep a request; one that is kept already stays as it is.

        Raises OperationKeyReused where another request is kept under its key, JournalFull, and sqlite3.Error.
        """
        with self._transaction() as file:
            kept = file.execute(
                "SELECT request FROM journal WHERE operation = ? AND operation_key = ?",
                (request.operation, request.operation_key),
            ).fetchone()
            if kept is not None:
                check_same(kept[0], request)
                return
            (entries,) = file.execute("SELECT count(*) FROM journal").fetchone()
            if entries >= self.entries_max:
                raise JournalFull(f"the journal has {entries} requests, as many as it may; nothing was sent")
            file.execute(
                "INSERT INTO journal VALUES (?, ?, ?, ?)",
                (request.operation, request.operation_key, request.body, time.time()),
            )

    def remove(self, operation: str, operation_key: str) -> None:
        """Forget a request, if it is there: its end is known, or is no longer wanted.

        Raises sqlite3.Error.
        """
        with self._transaction() as file:
            file.execute("DELETE FROM journal WHERE operation = ? AND operation_key = ?", (operation, operation_key))

    def unfinished(self, older_than_s: float = 0.0) -> list[DecisionRequest]:
        """Give the requests that were kept so long ago, oldest first.

        Raises sqlite3.Error.
        """
        with self._transaction() as file:
            rows = file.execute(
                "SELECT operation, operation_key, request FROM journal WHERE add_time <= ? ORDER BY add_time, rowid",
                # Without an age all of them, also one that was added before the clock was set back.
                (time.time() - older_than_s if older_than_s else math.inf,),
            ).fetchall()
        return [DecisionRequest(*row) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        # A connection for each: none has to be closed, none is in two threads or survives a fork, which SQLite forbids.
        with closing(sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)) as file:
            file.execute("PRAGMA synchronous = EXTRA")
            file.execute("BEGIN IMMEDIATE")
            try:
                yield file
            except BaseException:
                file.execute("ROLLBACK")
                raise
            file.execute("COMMIT")


def check_same(kept: bytes, request: DecisionRequest) -> None:
    """Check that a request is the one that is kept under its key; how long it waits may differ.

    Raises OperationKeyReused.
    """
    one, other = wire.DecideRequest.FromString(kept), wire.DecideRequest.FromString(request.body)
    for message in (one, other):
        message.ClearField("max_wait")
    if one != other:
        raise OperationKeyReused(
            "the journal has another request under this operation key; use a new key for a new request",
            reason="OPERATION_KEY_REUSED",
        )


SCHEMA = """\
CREATE TABLE IF NOT EXISTS decideonce_journal (
    journal text NOT NULL,
    operation text NOT NULL,
    operation_key text NOT NULL,
    request bytea NOT NULL,
    add_time timestamptz NOT NULL,
    PRIMARY KEY (journal, operation, operation_key)
);
CREATE INDEX IF NOT EXISTS decideonce_journal_add_time ON decideonce_journal (journal, add_time);
"""
"""The table of `PostgresJournal`: PostgreSQL 12 or newer, in the caller's own schema. Put it into your migrations."""

NAME_MAX = 128

_ADD = Statement(
    # Waits for another transaction that adds the same key. What was there is given, to be compared.
    """\
/* decideonce_journal_add */ INSERT INTO decideonce_journal (journal, operation, operation_key, request, add_time)
VALUES (CAST(:journal AS text), CAST(:operation AS text), CAST(:operation_key AS text), CAST(:request AS bytea),
    statement_timestamp())
ON CONFLICT (journal, operation, operation_key) DO UPDATE SET add_time = decideonce_journal.add_time
RETURNING request""",
    ("journal", "operation", "operation_key", "request"),
)

_REMOVE = Statement(
    """\
/* decideonce_journal_remove */ DELETE FROM decideonce_journal
WHERE journal = CAST(:journal AS text) AND operation = CAST(:operation AS text)
    AND operation_key = CAST(:operation_key AS text)""",
    ("journal", "operation", "operation_key"),
)

_UNFINISHED = Statement(
    # Leaves to another transaction what that one is at.
    """\
/* decideonce_journal_unfinished */ SELECT operation, operation_key, request FROM decideonce_journal
WHERE journal = CAST(:journal AS text) AND (CAST(:age AS double precision) = 0
    OR add_time <= statement_timestamp() - make_interval(secs => CAST(:age AS double precision)))
ORDER BY add_time LIMIT CAST(:limit AS bigint)
FOR UPDATE SKIP LOCKED""",
    ("journal", "age", "limit"),
)


class PostgresJournal:
    """A journal in a table of the caller's; see SCHEMA.

    `name`, 1 to 128 characters, is whose it is: a caller's processes share the name. Raises ValueError.

    Connections are asyncpg's, or async connections and sessions of SQLAlchemy; the methods with `_sync` take those of
    SQLAlchemy that aren't async. Each raises what the connection raises, and TypeError for what is no such connection.
    """

    def __init__(self, name: str) -> None:
        if not 1 <= len(name) <= NAME_MAX:
            raise ValueError(f"name must be 1 to {NAME_MAX} characters")
        self.name = name

    async def add(self, connection: AsyncConnection, request: DecisionRequest) -> None:
        """Keep a request, in the transaction that the connection is in; send it when that is committed.

        Raises OperationKeyReused where another request is kept under its key, and NotInTransaction.
        """
        rows = await _postgres.rows(connection, _ADD, self._added(request), in_transaction=True)
        check_same(bytes(rows[0][0]), request)

    def add_sync(self, connection: SyncConnection, request: DecisionRequest) -> None:
        """Do what `add` does."""
        rows = _postgres.rows_sync(connection, _ADD, self._added(request), in_transaction=True)
        check_same(bytes(rows[0][0]), request)

    async def remove(self, connection: AsyncConnection, operation: str, operation_key: str) -> None:
        """Forget a request, if it is there: its end is known, or is no longer wanted."""
        await _postgres.rows(connection, _REMOVE, (self.name, operation, operation_key))

    def remove_sync(self, connection: SyncConnection, operation: str, operation_key: str) -> None:
        """Do what `remove` does."""
        _postgres.rows_sync(connection, _REMOVE, (self.name, operation, operation_key))

    async def unfinished(
        self, connection: AsyncConnection, *, older_than_s: float = 0.0, limit: int = 1000
    ) -> list[DecisionRequest]:
        """Give up to `limit` (1 or more) requests that were kept so long ago, oldest first.

        Within a transaction they are this transaction's until it ends, and other transactions are given others.
        """
        return _requests(await _postgres.rows(connection, _UNFINISHED, (self.name, older_than_s, limit)))

    def unfinished_sync(
        self, connection: SyncConnection, *, older_than_s: float = 0.0, limit: int = 1000
    ) -> list[DecisionRequest]:
        """Do what `unfinished` does."""
        return _requests(_postgres.rows_sync(connection, _UNFINISHED, (self.name, older_than_s, limit)))

    def _added(self, request: DecisionRequest) -> tuple[Any, ...]:
        return self.name, request.operation, request.operation_key, request.body


def _requests(rows: Sequence[Any]) -> list[DecisionRequest]:
    return [DecisionRequest(operation, key, bytes(body)) for operation, key, body in rows]
