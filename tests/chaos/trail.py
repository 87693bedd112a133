"""Every committed change of the ledger, written down by a trigger of the driver's own, and which changes there may be.

The service knows nothing of it. Where callers can only see answers, this shows how the database came to them: that a
lease was over before somebody took it over, say.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import asyncpg

from chaos.history import Key
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.ledger import State

INSTALL = """
CREATE TABLE chaos_trail (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz, before ledger,
    after ledger);
CREATE FUNCTION chaos_trail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_trail (at, before, after) VALUES (statement_timestamp(), OLD, NEW);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_trail AFTER INSERT OR UPDATE OR DELETE ON ledger FOR EACH ROW EXECUTE FUNCTION chaos_trail();
"""
COMPLETIONS = (State.SUCCEEDED, State.FAILED_RETRYABLE, State.FAILED_FINAL)
# A lease is renewed, an attempt ends, attempts are used up, and an answer expires.
SAME_ATTEMPT = {
    *((State.PROCESSING, after) for after in (State.PROCESSING, *COMPLETIONS)),
    (State.FAILED_RETRYABLE, State.FAILED_FINAL),
    (State.SUCCEEDED, State.EXPIRED),
    (State.FAILED_FINAL, State.EXPIRED),
}


@dataclass(frozen=True)
class Version:
    """A row as it was for a time."""

    state: State
    attempt: int
    background: bool
    lease_expires_at: datetime | None
    response: bytes | None


@dataclass(frozen=True)
class Change:
    """One change of one row, at a time of Postgres's clock. None is a row that isn't there."""

    at: datetime
    before: Version | None
    after: Version | None

    def __str__(self) -> str:
        lease = self.after and self.after.lease_expires_at
        left = f", lease for {(lease - self.at).total_seconds():.3f} s" if lease else ""
        return f"ledger: {_text(self.before)} -> {_text(self.after)}{left}"


def _text(version: Version | None) -> str:
    return f"{version.state.name} attempt {version.attempt}" if version else "absent"


async def read_trail(connection: asyncpg.Connection) -> dict[Key, list[Change]]:
    """Read the changes of each key, in their order."""
    changes: defaultdict[Key, list[Change]] = defaultdict(list)
    for row in await connection.fetch("SELECT at, before, after FROM chaos_trail ORDER BY number"):
        of = row["after"] or row["before"]
        key = (of["tenant"], of["operation"], of["operation_key"])
        changes[key].append(Change(row["at"], _version(row["before"]), _version(row["after"])))
    return changes


def _version(row: Mapping[str, Any] | None) -> Version | None:
    if row is None or row["state"] is None:
        return None
    return Version(State(row["state"]), row["attempt"], row["background"], row["lease_expires_at"], row["response"])


def faults_of(change: Change, lease: timedelta | None) -> Iterator[str]:
    """Give what is wrong with a change; `lease` is the operation's, None where it isn't known."""
    before, after, at = change.before, change.after, change.at
    if after is None:
        if before is not None and before.state is not State.EXPIRED:
            yield f"a row was deleted while {before.state.name}"
        return
    if after.state is State.PROCESSING:
        yield from _lease_faults(after, at, lease)
    if before is None:
        if (after.state, after.attempt) != (State.PROCESSING, 0 if after.background else 1):
            yield f"a row began as {_text(after)}"
    elif after.attempt != before.attempt:
        yield from _takeover_faults(before, after, at)
    else:
        yield from _end_faults(before, after)


def _end_faults(before: Version, after: Version) -> Iterator[str]:
    if (before.state, after.state) not in SAME_ATTEMPT:
        yield f"{before.state.name} became {after.state.name}"
    elif after.state in COMPLETIONS and _attempt_of(after) != before.attempt:
        yield f"attempt {_attempt_of(after)} completed what attempt {before.attempt} was working on"


def _lease_faults(after: Version, at: datetime, lease: timedelta | None) -> Iterator[str]:
    if after.lease_expires_at is None:
        yield "a row is PROCESSING without a lease"
    elif after.lease_expires_at < at or (lease is not None and after.lease_expires_at > at + lease):
        yield f"a lease was given for {(after.lease_expires_at - at).total_seconds():.3f} s"


def _takeover_faults(before: Version, after: Version, at: datetime) -> Iterator[str]:
    if after.attempt != before.attempt + 1 or after.state is not State.PROCESSING:
        yield f"{_text(before)} became {_text(after)}"
    elif before.state is State.PROCESSING and before.lease_expires_at is not None and before.lease_expires_at > at:
        left = (before.lease_expires_at - at).total_seconds()
        yield f"attempt {before.attempt} was taken over {left:.3f} s before its lease was over"
    elif before.state not in (State.PROCESSING, State.FAILED_RETRYABLE):
        yield f"{before.state.name} was decided again"


def _attempt_of(version: Version) -> int:
    return wire.DecideResponse.FromString(version.response or b"").provenance.attempt
