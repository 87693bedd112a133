"""What a service says of its calls, in every way that it has: no facts, no keys, no tokens, no secrets of its own."""

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server.cli import cli
from decideonce_server.logs import key_hash
from harness import (
    Caller,
    make_token,
    new_key,
    refused,
    secret_text,
    spoken,
    spoken_in_log,
    table_policy,
    write_catalog,
)
from processes import free_address, until

STRICT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "kind": {"enum": ["a", "b"]}},
}
OPERATIONS = {
    "silent.code": {"policy": "echo", "max_attempts": 2, "time_budget": "500ms"},
    "silent.later": {"policy": "echo", "execution": "background"},
    "silent.strict": {"policy": "table", "facts": STRICT},
    "silent.rules": {"policy": "rules"},
}
POLICIES = {
    "echo": "echo_policy:decide",
    "table": table_policy("LOW"),
    # Adds a text to a number, which fails with a text that quotes it.
    "rules": table_policy("LOW", outputs={"sum": "facts.name + 1"}),
}


async def test_whatever_happens_nothing_is_said_of_it(
    database_url, start_service, connect_caller, collector, tmp_path
) -> None:
    """Logs, traces, metrics and errors hold neither facts nor keys nor tokens, however a call ends."""
    catalog, metrics = write_catalog(tmp_path / "catalog", OPERATIONS, POLICIES), free_address()
    # Nobody listens there: events wait, and the publisher has something to complain of.
    flags = ("--metrics", metrics, "--otlp", f"http://{collector.address}", "--events", f"nats://{free_address()}")
    service = start_service("--catalog", str(catalog), "--mismatches-per-minute", "2", "--log-level", "debug", *flags)
    token = await make_token(database_url, "acme")
    caller = connect_caller(service, token)
    decided = await call_in_every_way(caller)
    wrong = secret_text()
    for metadata in (f"Bearer do_{wrong}_{secret_text()}", f"Bearer {wrong}", f"Basic {wrong}"):
        stranger = Caller(caller.channel, None)
        stranger.metadata = [("authorization", metadata)]
        assert "UNAUTHENTICATED" == (await refused(stranger.decide("silent.code", new_key()))).reason
    hashed = key_hash(decided)
    await until(lambda: hashed in collector.sent)

    def read() -> str:
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as response:
            return response.read().decode()

    told = await asyncio.to_thread(read)
    assert "decide_calls_total" in told
    assert "policy failed" in service.log.read_text()
    assert [] == spoken_in_log(service.log) + spoken(told) + spoken(collector.sent)


async def call_in_every_way(caller: Caller) -> str:
    """Have calls end in many ways, and give a key that was decided; errors are looked at as they come."""
    decided = new_key()
    facts = {"echo": {"iban": secret_text()}}
    await caller.decide("silent.code", decided, facts)
    await caller.decide("silent.code", decided, facts)
    for _ in range(3):
        await refused(caller.decide("silent.code", decided, {"echo": {"iban": secret_text()}}))
    for todo in ("fail", "retry", "crash", "nothing"):
        await caller.decide("silent.code", new_key(), {"do": todo, "name": secret_text()})
    await caller.decide("silent.code", new_key(), {"do": "sleep", "seconds": 5, "name": secret_text()})
    await caller.decide("silent.code", new_key(), {"echo": {"x": secret_text() * 20_000}})
    effect = {"type": "silent.told", "payload": {"name": secret_text()}}
    await caller.decide("silent.later", new_key(), {"effects": [effect]}, max_wait=5)
    answer = await caller.decide("silent.rules", new_key(), {"name": secret_text()})
    assert wire.DECISION_STATUS_FAILED_FINAL == answer.status
    await refused(caller.decide("silent.strict", new_key(), {"name": secret_text(), "kind": secret_text()}))
    await refused(caller.decide("silent.unknown", new_key()))
    await refused(caller.decide("silent.strict", new_key() + "/"))
    await refused(caller.decide_raw(new_key().encode()))
    await refused(caller.status("silent.code", new_key()))
    await refused(caller.operation("silent.unknown"))
    return decided


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Name every command of the program."""
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def test_help_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command's help shows what its settings are."""
    secret = secret_text()
    monkeypatch.setenv("DECIDEONCE_DATABASE_URL", f"postgresql://decideonce:{secret}@127.0.0.1:1/decideonce")
    monkeypatch.setenv("DECIDEONCE_TOKEN", secret)
    every = list(commands(cli))
    assert len(every) > 15
    for path in every:
        shown = CliRunner().invoke(cli, [*path, "--help"])
        assert (0, []) == (shown.exit_code, spoken(shown.output)), path


def test_failing_shows_no_secret() -> None:
    """A program that can't reach its database or its service says so, and not with which password."""
    secret = secret_text()
    environment = os.environ | {
        "DECIDEONCE_DATABASE_URL": f"postgresql://decideonce:{secret}@127.0.0.1:1/decideonce",
        "DECIDEONCE_TOKEN": secret,
        "DECIDEONCE_SERVER": "127.0.0.1:1",
    }
    programs = {
        command: subprocess.Popen(
            [sys.executable, "-m", "decideonce_server", *command.split()],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in ("serve", "doctor", "migrate", "token list", "outbox lag", "health")
    }
    for command, program in programs.items():
        said, _ = program.communicate(timeout=60)
        assert (command, 1, []) == (command, program.returncode, spoken(said))
        assert "" != said
        assert "Traceback" not in said
