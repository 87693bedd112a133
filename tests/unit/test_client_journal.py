"""The journal in a file: what a caller sent is finished with the same key and bytes, whoever died."""

import asyncio
import math
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from decideonce import errors
from decideonce.client import Journal, RetryPolicy, prepare
from decideonce.requests import DecisionRequest
from decideonce.testing import DecideonceServer, LostReply, Outcome, Processing
from processes import until

OPERATION = "credit.approve-loan"

CALLER = f"""
import sys
from decideonce.client import Journal, SyncDecisionClient

address, token, path = sys.argv[1:]
with SyncDecisionClient(address, token=token) as client:
    client.decide("{OPERATION}", {{"amount_minor": 120_000}}, journal=Journal(path))
"""


def requests(count: int) -> list[DecisionRequest]:
    return [prepare(OPERATION, {"n": n}) for n in range(count)]


def start_caller(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", CALLER, *arguments])


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


def test_what_is_kept_is_given_back(journal: Journal) -> None:
    """Requests come back as they were, oldest first, in any process that opens the file; what is removed is gone."""
    first, second, third = kept = requests(3)
    for request in kept:
        journal.add(request)
    journal.add(second)
    assert kept == Journal(journal.path).unfinished()
    for _ in range(2):
        journal.remove(OPERATION, second.operation_key)
    assert [first, third] == journal.unfinished()
    assert [] == journal.unfinished(older_than_s=3600)


def test_another_request_under_a_kept_key(journal: Journal) -> None:
    """A key that is kept is kept for its request: another is refused, and how long it waits makes no other."""
    (kept,) = requests(1)
    journal.add(kept)
    with pytest.raises(errors.OperationKeyReused):
        journal.add(prepare(OPERATION, {"n": 1}, key=kept.operation_key))
    journal.add(prepare(OPERATION, {"n": 0}, key=kept.operation_key, max_wait=1.0))
    journal.add(prepare("credit.other", {"n": 1}, key=kept.operation_key))
    assert kept == journal.unfinished()[0]


def test_a_journal_that_is_full(tmp_path: Path) -> None:
    """A journal takes so many requests and no more, until some are finished."""
    journal = Journal(tmp_path / "journal", entries_max=2)
    first, second, third = requests(3)
    journal.add(first)
    journal.add(second)
    with pytest.raises(errors.JournalFull, match="2 requests"):
        journal.add(third)
    journal.add(first)
    journal.remove(OPERATION, first.operation_key)
    journal.add(third)
    assert [second, third] == journal.unfinished()


def test_a_journal_that_cannot_be_used(tmp_path: Path) -> None:
    """A file that is no journal, or can't be made, is told at once."""
    (tmp_path / "text").write_text("no database, but rather long for a text that is none" * 20)
    for path in (tmp_path / "text", tmp_path / "no" / "such"):
        with pytest.raises(sqlite3.Error):
            Journal(path)
    with pytest.raises(ValueError, match="entries_max"):
        Journal(tmp_path / "journal", entries_max=0)


def test_many_write_one_journal(journal: Journal) -> None:
    """Callers that share a file lose nothing to each other."""
    kept = requests(16)

    def write(part: int) -> None:
        own = Journal(journal.path)
        for request in kept[part::4]:
            own.add(request)
        for request in kept[part:8:4]:
            own.remove(OPERATION, request.operation_key)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert {request.operation_key for request in kept[8:]} == {r.operation_key for r in journal.unfinished()}


async def test_a_request_is_kept_before_it_is_sent(journal: Journal, decideonce_server: DecideonceServer) -> None:
    """A call that is under way stands in the journal, and is gone from it with its answer."""
    decideonce_server.decides(OPERATION, Outcome("APPROVED"))
    decideonce_server.next(Processing(math.inf))
    async with decideonce_server.client() as client:
        deciding = asyncio.ensure_future(client.decide(OPERATION, {}, journal=journal))
        await until(lambda: decideonce_server.calls)
        (request,) = journal.unfinished()
        assert decideonce_server.calls[0].request == request.body
        decideonce_server.finish(OPERATION, request.operation_key)
        await deciding
    assert [] == journal.unfinished()


async def test_a_caller_that_is_killed_is_finished(journal: Journal, decideonce_server: DecideonceServer) -> None:
    """A caller that is killed after sending leaves its request, and whoever resumes gets the decision that was made."""
    decideonce_server.decides(OPERATION, Outcome("APPROVED"))
    decideonce_server.next(Processing(math.inf))
    caller = start_caller(decideonce_server.address, decideonce_server.token, str(journal.path))
    try:
        await until(lambda: decideonce_server.calls)
    finally:
        caller.kill()
        caller.wait()
    (sent,) = [call for call in decideonce_server.calls if call.method == "Decide"]
    decideonce_server.finish(OPERATION, sent.operation_key)
    decideonce_server.next(LostReply())
    async with decideonce_server.client(retry=RetryPolicy(backoff_initial_s=0.01)) as client:
        (resumed,) = [one async for one in client.resume(journal)]
    assert (sent.operation_key, True) == (resumed.decision.operation_key, resumed.decision.replayed)
    assert {sent.request} == {call.request for call in decideonce_server.calls if call.method == "Decide"}
    assert (1, []) == (decideonce_server.decided, journal.unfinished())
