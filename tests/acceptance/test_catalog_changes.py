"""The catalog changes between an original and its resend: the resend is a replay all the same."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import asyncpg
import grpc
import pytest

from decideonce.v1 import catalog_pb2
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.catalog_pb2_grpc import CatalogServiceStub
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.catalog_wire import request_of
from harness import Caller, new_key, recorded, refused, table_policy, write_catalog
from stage import LedgerView, Stage

OPERATION = "test.operation"
RELOAD_WITHIN_S = 2.0

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "region": {"type": "string", "default": "EU"}},
}
FACTS = {"n": 1}


def catalog_of(policy: str = "table", facts: dict | None = None, **settings) -> tuple[dict, dict]:
    operation = {"policy": policy, "facts": SCHEMA if facts is None else facts} | settings
    return {OPERATION: operation}, {"table": table_policy("LOW", "HIGH"), "other": table_policy("OTHER")}


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give the catalog before any change."""
    return catalog_of()


@pytest.fixture
async def apply(stage: Stage, caller: Caller, tmp_path: Path) -> Callable:
    """Give a function that applies a catalog to the running service; each test begins with the first one."""
    stub = CatalogServiceStub(caller.channel)

    async def apply_catalog(operations: dict, policies: dict) -> catalog_pb2.ApplyCatalogResponse:
        source = read_catalog(write_catalog(tmp_path / "catalog", operations, policies))
        return await stub.ApplyCatalog(request_of(source, dry_run=False), metadata=caller.metadata, timeout=20)

    await apply_catalog(*catalog_of())
    return apply_catalog


STRICTER = SCHEMA | {"required": ["n", "iban"]}
CHANGES = {
    "stricter schema": catalog_of(facts=STRICTER),
    "facts refused": catalog_of(facts={"type": "object", "additionalProperties": False}),
    "another type": catalog_of(facts=SCHEMA | {"properties": {"n": {"type": "string"}}}),
    "new default": catalog_of(facts=SCHEMA | {"properties": {"n": {}, "region": {"type": "string", "default": "US"}}}),
    "more defaults": catalog_of(facts=SCHEMA | {"properties": {"n": {}, "limit": {"type": "integer", "default": 5}}}),
    "identity gone": catalog_of(facts=SCHEMA | {"properties": {"n": {"x-identity": False}}}),
    "another policy": catalog_of("other"),
    "new version": (catalog_of()[0], {"table": table_policy("NEW"), "other": table_policy("OTHER")}),
    "shorter retention": catalog_of(retention="1s", tombstone_retention="1s"),
    "background": catalog_of(execution="background"),
    "no policy": ({OPERATION: {"facts": SCHEMA}}, {}),
    "operation gone": ({}, {}),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_resend_is_a_replay_whatever_changes(caller: Caller, view: LedgerView, apply, change: str) -> None:
    """A resend is judged by what its record was made under: the same bytes; and another request is refused as ever."""
    key = new_key()
    first = await caller.decide(OPERATION, key, FACTS)
    assert "HIGH" == first.decision.outcome
    row = await view.row(key)
    assert len((await apply(*CHANGES[change])).changes) > 0
    again = await caller.decide(OPERATION, key, FACTS)
    spelled_out = await caller.decide(OPERATION, key, FACTS | {"region": "EU"})
    for answer in (again, spelled_out):
        assert (wire.DECISION_STATUS_SUCCEEDED, True) == (answer.status, answer.replayed)
        assert recorded(first) == recorded(answer)
        assert not answer.HasField("replayable_until")
    assert recorded(first) == recorded(await caller.status(OPERATION, key))
    for facts in ({"n": 2}, {}, {"n": 1, "region": "US"}, {"n": 1, "iban": "x"}, {"n": "1"}):
        error = await refused(caller.decide(OPERATION, key, facts))
        assert (grpc.StatusCode.ALREADY_EXISTS, "OPERATION_KEY_REUSED") == (error.code, error.reason)
    assert row == await view.row(key)


async def test_failures_are_replayed_whatever_changes(caller: Caller, apply) -> None:
    """A final failure stays what it is when the policy that would mend it comes.

    ietf-wg-httpapi/idempotency#46: which failures are replayed has to be defined.
    """
    failing = (catalog_of()[0], {"table": table_policy("")})
    await apply(*failing)
    key = new_key()
    first = await caller.decide(OPERATION, key, FACTS)
    assert wire.DECISION_STATUS_FAILED_FINAL == first.status
    await apply(*catalog_of())
    again = await caller.decide(OPERATION, key, FACTS)
    assert (first.status, True, recorded(first)) == (again.status, again.replayed, recorded(again))
    assert first.failure == again.failure


async def test_new_key_follows_the_new_catalog(caller: Caller, view: LedgerView, apply) -> None:
    """Only a new key is judged by today's catalog: its schema, its policy, its lifetimes, its operations."""
    await apply(*CHANGES["stricter schema"])
    assert "INVALID_FACTS" == (await refused(caller.decide(OPERATION, new_key(), FACTS))).reason
    await apply(*CHANGES["another policy"])
    assert "OTHER" == (await caller.decide(OPERATION, new_key(), FACTS)).decision.outcome
    await apply(*CHANGES["new version"])
    answer = await caller.decide(OPERATION, new_key(), FACTS)
    assert "NEW" == answer.decision.outcome
    assert answer.provenance.policy_version > 1
    await apply(*CHANGES["new default"])
    key = new_key()
    first = await caller.decide(OPERATION, key, FACTS)
    again = await caller.decide(OPERATION, key, FACTS | {"region": "US"})
    assert (True, recorded(first)) == (again.replayed, recorded(again))
    await apply(*CHANGES["shorter retention"])
    assert (await caller.decide(OPERATION, new_key(), FACTS)).HasField("replayable_until")
    await apply(*CHANGES["no policy"])
    assert "NO_ACTIVE_POLICY" == (await refused(caller.decide(OPERATION, new_key(), FACTS))).reason
    await apply(*CHANGES["operation gone"])
    assert "OPERATION_NOT_FOUND" == (await refused(caller.decide(OPERATION, new_key(), FACTS))).reason


async def test_pinned_version_decides_and_is_replayed(caller: Caller, apply) -> None:
    """A caller may pin an earlier version, and its resends are replays after further changes."""
    await apply(*CHANGES["new version"])
    key = new_key()
    first = await caller.decide(OPERATION, key, FACTS, policy_version=1)
    assert ("HIGH", 1) == (first.decision.outcome, first.provenance.policy_version)
    await apply(*CHANGES["another policy"])
    again = await caller.decide(OPERATION, key, FACTS, policy_version=1)
    assert (True, recorded(first)) == (again.replayed, recorded(again))


async def test_held_version_decides(caller: Caller, apply) -> None:
    """An operation that holds a version of its policy is decided under it, whatever version the catalog has."""
    operations, policies = CHANGES["new version"]
    await apply(operations, policies)
    await apply({OPERATION: operations[OPERATION] | {"policy": "table@1"}}, policies)
    answer = await caller.decide(OPERATION, new_key(), FACTS)
    assert ("HIGH", 1) == (answer.decision.outcome, answer.provenance.policy_version)


async def test_attempts_of_one_decision_have_one_version(caller: Caller, view: LedgerView, apply) -> None:
    """A takeover decides under the version that the reservation pinned, though another is active since."""
    key = new_key()
    first = await caller.decide(OPERATION, key, FACTS)
    await view.change(key, "state = 1, response = NULL, lease_expires_at = statement_timestamp()")
    await apply(*CHANGES["new version"])
    second = await caller.decide(OPERATION, key, FACTS)
    assert (False, 2, "HIGH", 1) == (
        second.replayed,
        second.provenance.attempt,
        second.decision.outcome,
        second.provenance.policy_version,
    )
    assert first.provenance.policy_digest == second.provenance.policy_digest


async def test_other_servers_reload_within_two_seconds(stage: Stage, apply) -> None:
    """What one server publishes is in force on another within 2 s."""
    another = stage.start_another()
    async with grpc.aio.insecure_channel(another.address) as channel:
        caller = Caller(channel, stage.token)
        assert "HIGH" == (await caller.decide(OPERATION, new_key(), FACTS)).decision.outcome
        await apply(*CHANGES["another policy"])
        async with asyncio.timeout(RELOAD_WITHIN_S):
            while (await caller.decide(OPERATION, new_key(), FACTS)).decision.outcome != "OTHER":
                pass
        await apply(*catalog_of())
        async with asyncio.timeout(RELOAD_WITHIN_S):
            while (await caller.decide(OPERATION, new_key(), FACTS)).decision.outcome != "HIGH":
                pass


CALLERS = 8
CALLS_PER_PHASE = 100


async def test_activation_under_load_never_mixes_versions(stage: Stage, caller: Caller, apply) -> None:
    """While versions are activated and rolled back, each decision's outcome is that of the version it names.

    open-policy-agent/opa#2365: a decision log named a bundle that was no longer loaded.
    """
    operation = "test.steady"
    versions = [
        ({operation: {"policy": "switched"}}, {"switched": table_policy(outcome)}) for outcome in ("DENY", "ALLOW")
    ]
    await apply(*versions[0])
    another = stage.start_another()
    answers: dict[str, wire.DecideResponse] = {}
    stopping = asyncio.Event()

    async def call(on: Caller) -> None:
        while not stopping.is_set():
            key = new_key()
            answers[key] = await on.decide(operation, key)

    async def phase() -> None:
        """Let calls go on until there are enough more of them."""
        enough = len(answers) + CALLS_PER_PHASE
        while len(answers) < enough:
            done, _ = await asyncio.wait(calls, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            assert not done, [task.exception() for task in done]

    async with grpc.aio.insecure_channel(another.address) as channel, asyncio.timeout(60):
        callers = [caller, Caller(channel, stage.token)]
        calls = [asyncio.create_task(call(callers[i % 2])) for i in range(CALLERS)]
        for version in (0, 1, 0, 1):
            await apply(*versions[version])
            await phase()
        stopping.set()
        await asyncio.gather(*calls)
        earlier = list(answers)[:: max(1, len(answers) // 100)]
        for key in earlier:
            again = await callers[1].decide(operation, key)
            assert (True, recorded(answers[key])) == (again.replayed, recorded(again))
    kinds = Counter(
        (answer.decision.outcome, answer.provenance.policy_version, answer.provenance.policy_digest)
        for answer in answers.values()
    )
    assert {("DENY", 1), ("ALLOW", 2)} == {kind[:2] for kind in kinds}
    assert 2 == len({digest for _, _, digest in kinds}) == len(kinds)
    assert [False] * len(answers) == [answer.replayed for answer in answers.values()]


@pytest.mark.parametrize("table", ["policy_version", "operation_version", "catalog"])
@pytest.mark.parametrize("statement", ["UPDATE {} SET {} = {}", "DELETE FROM {}", "TRUNCATE {}"])
async def test_what_was_published_cannot_be_changed(view: LedgerView, table: str, statement: str) -> None:
    """The database refuses to change or delete a version, so what a record names stays what it was."""
    column = "apply_time" if table == "catalog" else "create_time"
    assert await view.connection.fetchval(f"SELECT count(*) FROM {table}") > 0
    with pytest.raises(asyncpg.RestrictViolationError, match="immutable"):
        await view.connection.execute(statement.format(table, column, column))


async def test_unchanged_catalog_makes_no_revision(apply) -> None:
    """Applying what is in force changes nothing; going back gives the earlier versions their numbers again."""
    first = await apply(*catalog_of())
    assert (await apply(*catalog_of())) == catalog_pb2.ApplyCatalogResponse(revision=first.revision)
    forth = await apply(*CHANGES["another policy"])
    back = await apply(*catalog_of())
    assert first.revision + 2 == back.revision
    assert [(c.new_version, c.old_version) for c in forth.changes] == [
        (c.old_version, c.new_version) for c in back.changes
    ]
