"""Defects that somebody could have made, each planted into the running program by its name."""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime

from decideonce_server import decide, idempotency, leases, ledger, outbox, reaper
from decideonce_server.database import Statement


def plant(name: str) -> None:
    """Plant a defect."""
    globals()[f"plant_{name}"]()


def _rewrite(statement: str, old: str, new: str) -> None:
    before = getattr(ledger, statement)
    if old not in before.sql:
        raise LookupError(old)
    setattr(ledger, statement, Statement(before.name, before.sql.replace(old, new)))


def plant_no_fence() -> None:
    """A completion doesn't compare the attempt."""
    _rewrite("COMPLETE", "AND l.decision_id = c.decision_id AND l.attempt = c.attempt\n", "\n")
    _rewrite("COMPLETE", "ELSE l.state = 1 END", "ELSE true END")


def plant_fence_on_worker() -> None:
    """A completion is fenced by the worker's name, so a worker's older attempt passes for its newer one."""
    newest: dict[ledger.Key, int] = {}
    take_over, complete = ledger.Ledger.take_over, ledger.Ledger.complete

    async def take_over_and_note(self, records, leases_):
        taken = await take_over(self, records, leases_)
        newest.update({attempt.record.key: attempt.record.attempt for attempt in taken if attempt})
        return taken

    async def complete_as_worker(self, completions):
        return await complete(self, [replace(c, attempt=newest.get(c.key, c.attempt)) for c in completions])

    ledger.Ledger.take_over, ledger.Ledger.complete = take_over_and_note, complete_as_worker
    plant_no_renewal()


def plant_no_renewal() -> None:
    """Leases aren't renewed."""

    async def nothing(self, ledger_):
        return None

    leases.LeaseKeeper._renew_due = nothing


def plant_app_clock() -> None:
    """Leases are judged by this process's clock."""
    for name in ("RESERVE", "READ", "TAKE_OVER", "RENEW"):
        before = getattr(ledger, name)
        sql = before.sql.replace("statement_timestamp()", "CAST(:app_now AS timestamptz)")
        setattr(ledger, name, Statement(before.name, sql))
    run = ledger.Database.run

    async def run_with_clock(self, statement, **parameters):
        if ":app_now" in statement.sql:
            parameters["app_now"] = datetime.fromtimestamp(time.time(), UTC)
        return await run(self, statement, **parameters)

    ledger.Database.run = run_with_clock


def plant_no_unique_constraint() -> None:
    """A reservation doesn't look for another; the test drops the primary key."""
    _rewrite("RESERVE", "ON CONFLICT (bucket, tenant, operation, operation_key) DO NOTHING", "")
    _rewrite(
        "RESERVE", "FROM n JOIN ledger l USING (bucket, tenant, operation, operation_key)", "FROM ledger l WHERE false"
    )


def plant_event_after_commit() -> None:
    """Events are written in a statement of their own, some time after the decision."""
    complete = ledger.Ledger.complete
    later = set()

    async def complete_then_tell(self, completions):
        done = await complete(self, [replace(c, events=()) for c in completions])

        async def tell():
            await asyncio.sleep(1)
            events = [event for c in completions for event in c.events]
            keys = {c.key for c in completions}
            sql = outbox.INSERT_FOR_DONE.replace("JOIN done USING (bucket, tenant, operation, operation_key)", "")
            if keys and events:
                await self._database.run(Statement("tell", sql), **outbox.insert_parameters(events))

        later.add(asyncio.create_task(tell()))
        return done

    ledger.Ledger.complete = complete_then_tell


def plant_deletes_before_acknowledged() -> None:
    """The publisher deletes events when it has read them, and sends them then."""
    waiting = outbox.Outbox.waiting

    async def take(self, buckets, limit):
        events = await waiting(self, buckets, limit)
        delete = Statement("take", "DELETE FROM outbox o WHERE o.id = ANY(CAST(:ids AS uuid[]))")
        await self._database.run(delete, ids=[event.id for event in events])
        return events

    outbox.Outbox.waiting = take


def plant_sends_in_reverse() -> None:
    """The publisher sends the newest events of a key first."""
    waiting = outbox.Outbox.waiting

    async def read_backwards(self, buckets, limit):
        return (await waiting(self, buckets, limit))[::-1]

    outbox.Outbox.waiting = read_backwards


def plant_replay_evaluates_again() -> None:
    """A finished record is taken over as if it had failed."""
    _rewrite("TAKE_OVER", "(l.state = 3 OR", "(l.state IN (2, 3) OR")
    for name in ("RESERVE", "READ"):
        _rewrite(name, "ELSE l.state END AS state", "WHEN l.state = 2 THEN 3 ELSE l.state END AS state")


def plant_loser_tells_its_own() -> None:
    """An attempt that lost its lease answers with what it came to itself."""
    complete = decide.Decide._complete

    async def complete_or_pretend(self, end, lease):
        done = await complete(self, end, lease)
        if done is None:
            record = await self._ledger.read(end.key)
            return replace(record, state=end.state, response=end.response)
        return done

    decide.Decide._complete = complete_or_pretend


def plant_sweeper_deletes_processing() -> None:
    """The reaper takes PROCESSING rows for leftovers."""
    ledger.REAPABLE = Statement("reapable", "SELECT DISTINCT bucket FROM ledger WHERE state = 1")
    ledger.PURGE = Statement(
        "purge", "DELETE FROM ledger l WHERE l.bucket = :bucket AND l.state = 1 AND :limit > 0 RETURNING 1"
    )
    reaper.Reaper.__init__.__kwdefaults__["idle_interval_s"] = 0.2


def plant_cancellation_leaves_processing() -> None:
    """A caller that leaves takes its attempt along, and the lease is renewed for ever."""

    async def own(self, running, wait):
        return await asyncio.wait_for(running.answer, wait.total_seconds())

    class Forever(dict):
        def __delitem__(self, key):
            self[key].until = float("inf")

    idempotency.IdempotencyInterceptor._own = own
    init = leases.LeaseKeeper.__init__

    def init_forever(self, database):
        init(self, database)
        self._held = Forever()

    leases.LeaseKeeper.__init__ = init_forever
