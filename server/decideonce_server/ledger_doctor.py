"""What is wrong in a database, as far as its rows show it: work that is left lying, and rows that can't be.

Only what no ordinary run leaves behind is reported; a decision that is under way, or due this moment, is no fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from decideonce_server.database import Database, Statement

# A key's operation and its own name, as an example of what was found. No statement reads facts or responses.
_FOUND = "count(*) AS found, min(l.operation || ' ' || l.operation_key) AS example"

STALE_WORK = Statement(
    # No attempt holds it and no process took it up, though processes look several times a second. The index of due
    # work serves it.
    "doctor_stale_work",
    f"""SELECT {_FOUND} FROM ledger l
    WHERE coalesce(l.lease_expires_at, l.retry_at) < statement_timestamp() - interval '1 minute'""",
)

OVERDUE_ANSWERS = Statement(
    # What the reaper should long have taken. An answer whose events wait is not its to take.
    "doctor_overdue_answers",
    f"""SELECT {_FOUND} FROM ledger l
    WHERE l.bucket = :bucket AND l.state IN (2, 4) AND l.replayable_until < statement_timestamp() - interval '1 hour'
        AND (l.tenant, l.operation, l.operation_key) NOT IN (
            SELECT o.tenant, o.operation, o.operation_key FROM outbox o WHERE o.bucket = :bucket
            UNION ALL
            SELECT p.tenant, p.operation, p.operation_key FROM outbox_parked p WHERE p.bucket = :bucket)""",
)

HELD_ANSWERS = Statement(
    # The events of these should long have been published.
    "doctor_held_answers",
    f"""SELECT {_FOUND} FROM ledger l
    WHERE l.bucket = :bucket AND l.state IN (2, 4) AND l.replayable_until < statement_timestamp() - interval '1 hour'
        AND (l.tenant, l.operation, l.operation_key) IN (
            SELECT o.tenant, o.operation, o.operation_key FROM outbox o WHERE o.bucket = :bucket
            UNION ALL
            SELECT p.tenant, p.operation, p.operation_key FROM outbox_parked p WHERE p.bucket = :bucket)""",
)

OVERDUE_TOMBSTONES = Statement(
    # What the reaper should long have deleted.
    "doctor_overdue_tombstones",
    f"""SELECT {_FOUND} FROM ledger l
    WHERE l.bucket = :bucket AND l.state = 5 AND l.key_retained_until < statement_timestamp() - interval '1 hour'""",
)

# An event of the decision that is recorded now: a key that was new again may still have events of its earlier life.
# Every event names its decision, and no policy knows that name, so nothing else in a payload can be it.
_EVENTS_OF_DECISION = """outbox o JOIN ledger l USING (bucket, tenant, operation, operation_key)
    WHERE l.bucket = :bucket AND position(convert_to(l.decision_id::text, 'UTF8') IN o.payload) > 0"""

EARLY_EVENTS = Statement(
    # An event is written by the statement that makes its decision final.
    "doctor_early_events",
    f"SELECT {_FOUND} FROM {_EVENTS_OF_DECISION} AND l.state IN (1, 3)",
)

REPEATED_DECISIONS = Statement(
    # One decision is told once: a second event would say that it was completed twice.
    "doctor_repeated_decisions",
    f"""SELECT {_FOUND} FROM (
        SELECT operation, operation_key FROM {_EVENTS_OF_DECISION} AND o.type = :recorded_event_type
        GROUP BY tenant, operation, operation_key HAVING count(*) > 1
    ) l""",
)

EXCESS_ATTEMPTS = Statement(
    # Nobody begins an attempt beyond what the operation allows.
    "doctor_excess_attempts",
    f"""WITH allowed AS MATERIALIZED (
        SELECT operation, version AS operation_version,
            CAST(CAST(content AS jsonb) ->> 'max_attempts' AS integer) AS attempts
        FROM operation_version
    )
    SELECT {_FOUND} FROM ledger l JOIN allowed a USING (operation, operation_version)
    WHERE l.bucket = :bucket AND l.attempt > a.attempts""",
)

UNKNOWN_VERSIONS = Statement(
    # What a row was made under is immutable and never deleted; without it no resend can be judged.
    "doctor_unknown_versions",
    f"""SELECT {_FOUND} FROM ledger l
    LEFT JOIN operation_version v ON v.operation = l.operation AND v.version = l.operation_version
    LEFT JOIN policy_version p ON p.policy_id = l.policy_id AND p.version = l.policy_version
    WHERE l.bucket = :bucket AND (v.version IS NULL OR p.version IS NULL)""",
)

CONTRADICTIONS = Statement(
    # Lifetimes begin when a decision is final; an attempt that ended had begun; a tombstone has no facts.
    "doctor_contradictions",
    f"""SELECT {_FOUND} FROM ledger l
    WHERE l.bucket = :bucket AND (
        l.state IN (1, 3) AND (l.replayable_until IS NOT NULL OR l.key_retained_until IS NOT NULL)
        OR l.state <> 3 AND l.retry_at IS NOT NULL
        OR l.state <> 1 AND (l.complete_time IS NULL OR l.attempt < 1)
        OR l.state = 5 AND (l.replayable_until IS NULL OR l.facts IS NOT NULL)
        OR l.key_retained_until < l.replayable_until
        OR l.key_retained_until IS NOT NULL AND l.replayable_until IS NULL)""",
)


PARKED_EVENTS = Statement(
    # Until an operator helps, they and the later events of their keys are published to nobody.
    "doctor_parked_events",
    f"SELECT {_FOUND} FROM outbox_parked l",
)


@dataclass(frozen=True, slots=True)
class Symptom:
    """What one statement found: how many, and the operation and operation key of one of them."""

    found: int = 0
    example: str | None = None


class LedgerDoctor:
    """Looks for faults in the database. Reads only.

    Each look raises LedgerUnavailable and LockTimeout as the ledger does. What reads more than an index goes bucket by
    bucket, so that no statement runs for long, however large the ledger is.
    """

    def __init__(self, database: Database, recorded_event_type: str) -> None:
        self._database = database
        self._recorded_event_type = recorded_event_type

    async def stale_work(self) -> Symptom:
        """Look for work that was due more than a minute ago."""
        (row,) = await self._database.run(STALE_WORK)
        return Symptom(row["found"], row["example"])

    async def overdue_answers(self) -> Symptom:
        """Look for answers that could have been purged more than an hour ago."""
        return await self._in_all_buckets(OVERDUE_ANSWERS)

    async def held_answers(self) -> Symptom:
        """Look for answers more than an hour past their retention whose events still wait."""
        return await self._in_all_buckets(HELD_ANSWERS)

    async def overdue_tombstones(self) -> Symptom:
        """Look for tombstones that could have been deleted more than an hour ago."""
        return await self._in_all_buckets(OVERDUE_TOMBSTONES)

    async def parked_events(self) -> Symptom:
        """Look for events that can't be published."""
        (row,) = await self._database.run(PARKED_EVENTS)
        return Symptom(row["found"], row["example"])

    async def early_events(self) -> Symptom:
        """Look for waiting events of decisions that are not final."""
        return await self._in_all_buckets(EARLY_EVENTS)

    async def repeated_decisions(self) -> Symptom:
        """Look for decisions of which more than one event waits that tells the decision itself."""
        return await self._in_all_buckets(REPEATED_DECISIONS, recorded_event_type=self._recorded_event_type)

    async def excess_attempts(self) -> Symptom:
        """Look for more attempts at a key than its operation version allows."""
        return await self._in_all_buckets(EXCESS_ATTEMPTS)

    async def unknown_versions(self) -> Symptom:
        """Look for rows that name a version of an operation or a policy that is not stored."""
        return await self._in_all_buckets(UNKNOWN_VERSIONS)

    async def contradictions(self) -> Symptom:
        """Look for rows whose columns contradict their state."""
        return await self._in_all_buckets(CONTRADICTIONS)

    async def _in_all_buckets(self, statement: Statement, **parameters: str) -> Symptom:
        rows = [row for b in range(256) for row in await self._database.run(statement, bucket=b, **parameters)]
        return Symptom(sum(row["found"] for row in rows), _first([row["example"] for row in rows]))


def _first(examples: Sequence[str | None]) -> str | None:
    return min((example for example in examples if example is not None), default=None)
