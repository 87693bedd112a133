"""The command line, as its users meet it."""

import json
import os
import pty
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from conftest import connect
from decideonce_server.cli import cli
from decideonce_server.migrate import schema_head
from harness import ServiceProcess, make_token, new_key, table_policy, url_text, write_catalog
from stage import TENANT

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("decideonce")

# As if the attempt that decided were still at it.
PROCESSING = "state = 1, response = NULL, lease_expires_at = statement_timestamp() + interval '1 h'"


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give a small catalog."""
    facts = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0}, "note": {"type": "string"}},
        "additionalProperties": False,
    }
    operations = {"test.decide": {"policy": "table", "facts": facts}, "test.later": {"policy": "table"}}
    operations["test.later"]["execution"] = "background"
    return operations, {"table": table_policy("LOW", "HIGH")}


def run(
    *arguments: object, stdin: str = "", cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """Run the program as a user does; `environment` are DECIDEONCE_… variables by the rest of their names."""
    variables = {f"DECIDEONCE_{name.upper()}": value for name, value in environment.items()}
    return subprocess.run(
        [PROGRAM, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"]} | variables,
    )


@pytest.fixture
def call(stage, tmp_path):
    """Give a function that runs a command against the module's service, as its tenant."""

    def call(*arguments: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess:
        settings = {"server": stage.service.address, "token": stage.token} | environment
        return run(*arguments, stdin=stdin, cwd=tmp_path, **settings)

    return call


@pytest.fixture
def watch(stage) -> Iterator[Callable[..., subprocess.Popen]]:
    """Give a function that starts `status --watch`."""
    watching: list[subprocess.Popen] = []

    def start(*arguments: str) -> subprocess.Popen:
        environment = {"DECIDEONCE_SERVER": stage.service.address, "DECIDEONCE_TOKEN": stage.token}
        command = [PROGRAM, "status", "--watch", *arguments]
        watching.append(subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True))
        return watching[-1]

    yield start
    for process in watching:
        process.kill()
        process.communicate()


def test_decide_original_replay_and_conflict(call) -> None:
    """The same command twice is an original and a replay; with other facts it fails, and says why."""
    key = new_key()
    decide = ("decide", "test.decide", "--key", key)
    assert "LOW  original" in call(*decide, "--fact", "n=0").stdout
    assert "LOW  replayed" in call(*decide, "--fact", "n=0").stdout
    conflict = call(*decide, "--fact", "n=1")
    assert (1, "") == (conflict.returncode, conflict.stdout)
    assert "OPERATION_KEY_REUSED" in conflict.stderr


def test_decide_takes_facts_from_stdin_and_files(call, tmp_path) -> None:
    """Facts come from stdin or a file, and single ones beside them; a key is made and told where none is given."""
    (tmp_path / "facts.json").write_text('{"n": 1}')
    from_file = json.loads(call("decide", "test.decide", "--facts", "facts.json", "--json").stdout)
    from_stdin = json.loads(
        call("decide", "test.decide", "--facts", "-", "--fact", "note=x", "--json", stdin='{"n": 0}').stdout
    )
    assert ["HIGH", "LOW"] == [answer["decision"]["outcome"] for answer in (from_file, from_stdin)]
    assert from_file["operation_key"] != from_stdin["operation_key"]


def test_a_dotted_fact_goes_into_an_object(call) -> None:
    """`--fact a.b=1` sets b within a; where a is no object it is a usage error."""
    key = new_key()
    first = call("decide", "test.later", "--key", key, "--facts", "-", stdin='{"loan": {"amount": 5, "term": 12}}')
    same = call("decide", "test.later", "--key", key, "--fact", "loan.amount=5", "--fact", "loan.term=12")
    assert [0, 0] == [first.returncode, same.returncode], same.stderr
    assert 2 == call("decide", "test.later", "--fact", "loan=5", "--fact", "loan.term=12").returncode


def test_refused_facts_name_field_and_rule(call) -> None:
    """Facts that break the schema are refused with the field and the rule, and without their values."""
    refused = call("decide", "test.decide", "--fact", "n=-77")
    assert 1 == refused.returncode
    assert "INVALID_FACTS" in refused.stderr
    assert "facts/n" in refused.stderr
    assert "77" not in refused.stderr


def test_errors_are_json_for_machines(call) -> None:
    """With --json an error is JSON on stdout: reason, message, metadata and fields."""
    refused = call("decide", "test.decide", "--fact", "n=-77", "--json")
    assert (1, "") == (refused.returncode, refused.stderr)
    error = json.loads(refused.stdout)["error"]
    assert {"reason", "message", "metadata", "fields"} == set(error)
    assert "INVALID_FACTS" == error["reason"]
    assert ["facts/n"] == [field["field"] for field in error["fields"]]
    nobody = call("health", "--json", server="127.0.0.1:1")
    assert "UNAVAILABLE" == json.loads(nobody.stdout)["error"]["reason"]


def test_background_decision_is_polled(call) -> None:
    """A background decision says that it is to come, and `status` waits for it."""
    key = new_key()
    assert "PROCESSING" in call("decide", "test.later", "--key", key).stdout
    assert "HIGH" in call("status", "test.later", key, "--max-wait", "10s").stdout
    unknown = call("status", "test.later", new_key())
    assert (1, True) == (unknown.returncode, "DECISION_NOT_FOUND" in unknown.stderr)


async def test_a_decision_is_watched_to_its_end(caller, watch, view) -> None:
    """`status --watch` shows the state, each change of it, and the decision in the end; with --json one line each."""
    key = new_key()
    await caller.decide("test.decide", key, {"n": 0})
    response = await view.connection.fetchval("SELECT response FROM ledger WHERE operation_key = $1", key)
    await view.change(key, PROCESSING)
    for_people, for_machines = watch("test.decide", key), watch("test.decide", key, "--json")
    assert re.fullmatch(r"\d\d:\d\d:\d\d  PROCESSING\n", for_people.stdout.readline())
    assert "DECISION_STATUS_PROCESSING" == json.loads(for_machines.stdout.readline())["status"]
    await view.connection.execute(
        "UPDATE ledger SET state = 2, response = $2, lease_expires_at = NULL WHERE operation_key = $1", key, response
    )
    (shown, _), (line, _) = (watching.communicate(timeout=20) for watching in (for_people, for_machines))
    assert ("LOW", 0) == (shown.split()[0], for_people.returncode)
    assert ("LOW", 0) == (json.loads(line)["decision"]["outcome"], for_machines.returncode)


async def test_watching_ends_with_its_time(caller, call, view) -> None:
    """Where the state isn't final by --max-wait, `status --watch` has shown it once and exits with 1."""
    key = new_key()
    await caller.decide("test.decide", key, {"n": 0})
    await view.change(key, PROCESSING)
    watched = call("status", "test.decide", key, "--watch", "--max-wait", "100ms")
    assert (1, 1) == (watched.returncode, watched.stdout.count("PROCESSING")), watched.stdout
    # Left, it would be stale work to whoever looks for that.
    for table in ("outbox", "ledger"):
        await view.connection.execute(f"DELETE FROM {table} WHERE operation_key = $1", key)


def test_apply_says_what_would_change_and_then_changes_it(call, stage) -> None:
    """A dry run says what an apply changes, and changes nothing; the apply says the same; then nothing changes."""
    operations = {"test.decide": {"policy": "table", "facts": {"type": "object"}}, "test.new": {"policy": "table"}}
    operations["test.later"] = {"policy": "table", "execution": "background"}
    write_catalog(stage.directory / "next", operations, {"table": table_policy("LOW", "HIGH", "TOP")})
    dry_run = call("apply", stage.directory / "next", "--dry-run")
    assert 0 == dry_run.returncode, dry_run.stderr
    lines = [line.split() for line in dry_run.stdout.splitlines()]
    assert ["changed", "policy", "table", "1", "→", "2"] in lines
    assert ["changed", "operation", "test.decide", "1", "→", "2", "facts_schema"] in lines
    assert ["added", "operation", "test.new", "1"] in lines
    revision = json.loads(call("apply", stage.directory / "catalog", "--dry-run", "--json").stdout)["revision"]
    applied = json.loads(call("apply", stage.directory / "next", "--json").stdout)
    assert int(revision) + 1 == int(applied["revision"])
    assert "nothing" in call("apply", stage.directory / "next").stdout
    assert 0 == call("apply", stage.directory / "catalog").returncode


def test_apply_refuses_a_broken_catalog_whole(call, tmp_path) -> None:
    """Every fault of a catalog is named, with its file, and nothing of it is published."""
    directory = write_catalog(tmp_path / "broken", {"test.decide": {"policy": "absent", "lease": "9h"}}, {})
    refused = call("apply", directory)
    assert 1 == refused.returncode
    assert "operations/test.decide.yaml" in refused.stderr
    assert "lease" in refused.stderr


def test_what_is_published_can_be_read(call) -> None:
    """Operations and policies can be shown, listed and compared."""
    assert "[A-Za-z0-9._~:-]{16,128}" in call("operation", "show", "test.decide").stdout
    assert "table" in call("policy", "list").stdout
    versions = json.loads(call("policy", "list", "table", "--json").stdout)
    assert [1] == [version["version"] for version in versions if version.get("active")]
    assert '"hitPolicy": "first"' in call("policy", "show", "table").stdout
    assert "no difference" in call("policy", "diff", "table", "1", "1").stdout


def test_versions_of_a_policy_can_be_compared(call, stage, tmp_path) -> None:
    """The difference between two versions is shown line by line, as text and as JSON."""
    operations = {"test.decide": {"policy": "table"}, "test.later": {"policy": "table", "execution": "background"}}
    before = json.loads(call("policy", "list", "table", "--json").stdout)[0]["version"]
    write_catalog(tmp_path / "next", operations, {"table": table_policy("LOW", "COMPARED")})
    assert 0 == call("apply", tmp_path / "next").returncode
    after = json.loads(call("policy", "list", "table", "--json").stdout)[0]["version"]
    assert 0 == call("apply", stage.directory / "catalog").returncode
    assert before < after
    diff = call("policy", "diff", "table", before, after).stdout
    assert re.search(r"^-.*HIGH", diff, re.MULTILINE)
    assert re.search(r"^\+.*COMPARED", diff, re.MULTILINE)
    as_json = json.loads(call("policy", "diff", "table", before, after, "--json").stdout)
    assert (before, after, diff.splitlines()) == (as_json["old_version"], as_json["new_version"], as_json["diff"])


def test_tokens_take_effect(call, stage) -> None:
    """A new token works, its list has no secret, and a revoked one is refused."""
    database = ("--database-url", url_text(stage.url))
    text = call("token", "create", "other", "--role", "decide", "--operation", "test.*", *database).stdout.strip()
    as_json = json.loads(call("token", "create", "third", "--role", "read", "--json", *database).stdout)
    assert f"do_{as_json['token_id']}_" == as_json["token"][: len(as_json["token_id"]) + 4]
    assert 0 == call("decide", "test.decide", "--fact", "n=0", token=text).returncode
    denied = call("apply", stage.directory / "catalog", token=text)
    assert (1, True) == (denied.returncode, "PERMISSION_DENIED" in denied.stderr)
    listed = json.loads(call("token", "list", "--json", *database).stdout)
    (token_id,) = (token["token_id"] for token in listed if token["tenant"] == "other")
    assert text.split("_")[2] not in json.dumps(listed)
    assert 0 == call("token", "revoke", token_id, *database).returncode
    assert 1 == call("token", "revoke", token_id, *database).returncode
    for _ in range(100):
        refused = call("decide", "test.decide", "--fact", "n=0", token=text)
        if refused.returncode:
            break
    assert "UNAUTHENTICATED" in refused.stderr


def test_callers_are_told_what_is_missing(call, stage) -> None:
    """Without a token, with a wrong one, and where nobody serves, the error says so in one line."""
    no_token = call("decide", "test.decide", token="")
    wrong = call("decide", "test.decide", token="do_x_y")
    nobody = call("decide", "test.decide", server="127.0.0.1:1")
    assert [1, 1, 1] == [ran.returncode for ran in (no_token, wrong, nobody)]
    assert "UNAUTHENTICATED" in no_token.stderr
    assert "DECIDEONCE_TOKEN" in no_token.stderr
    assert "UNAUTHENTICATED" in wrong.stderr
    assert "not valid" in wrong.stderr
    assert "127.0.0.1:1" in nobody.stderr
    assert "decideonce serve" in nobody.stderr
    assert all("Traceback" not in ran.stderr for ran in (no_token, wrong, nobody))


async def test_words_that_are_nearly_right_are_corrected(call, stage) -> None:
    """A misspelled command or operation is answered with what it may have meant, if the caller may read the catalog."""
    assert "'status'" in CliRunner().invoke(cli, ["statsu"]).output
    decider = await make_token(stage.url, TENANT, roles=("decide",))
    asked = [call("decide", "test.decid", token=token).stderr for token in (stage.token, decider)]
    assert all("OPERATION_NOT_FOUND" in text for text in asked)
    assert [True, False] == ["did you mean test.decide?" in text for text in asked]


def test_a_shell_completes_commands_and_flags() -> None:
    """What `completion bash` prints makes a real bash complete; there is a script for zsh and one for fish, too."""
    script = """
        eval "$(decideonce completion bash)"
        function=$(complete -p decideonce | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        for line in "decideonce pol" "decideonce status --wa"; do
            COMPREPLY=() COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); "$function" decideonce
            echo "${COMPREPLY[@]}"
        done
    """
    environment = {"PATH": f"{PROGRAM.parent}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ("policy\n--watch\n", "") == (ran.stdout, ran.stderr)
    scripts = [CliRunner().invoke(cli, ["completion", shell]).output for shell in ("zsh", "fish")]
    assert all("_DECIDEONCE_COMPLETE" in text for text in scripts)


def test_a_terminal_gets_colours(stage) -> None:
    """On a terminal there are colours."""
    environment = {"DECIDEONCE_SERVER": stage.service.address, "DECIDEONCE_TOKEN": stage.token, "TERM": "xterm"}
    ours, its = pty.openpty()
    subprocess.run([PROGRAM, "policy", "list"], env=os.environ | environment, stdout=its, check=True)
    os.close(its)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "\x1b[32mactive" in shown


def test_a_wait_longer_than_any_is_granted(call) -> None:
    """A wait beyond what gRPC can count is cut, not taken for no time at all."""
    key = new_key()
    call("decide", "test.decide", "--key", key, "--fact", "n=0")
    assert "LOW" in call("status", "test.decide", key, "--max-wait", "99999d").stdout


@pytest.mark.parametrize("command", [("serve",), ("housekeep",), ("migrate",), ("token", "list"), ("doctor",)])
def test_a_database_that_cannot_be_reached_is_said_shortly(call, command: tuple[str, ...]) -> None:
    """Where Postgres doesn't answer a command says so, and exits with 1."""
    failed = call(*command, "--database-url", "postgresql://nobody@127.0.0.1:1/nothing")
    assert 1 == failed.returncode
    assert "can't be reached" in failed.stdout + failed.stderr
    assert "Traceback" not in failed.stderr


def test_no_embedded_postgres_is_made_by_a_look(call, tmp_path) -> None:
    """Listing where no embedded Postgres is doesn't make one."""
    for command in (("token", "list"), ("outbox", "list")):
        failed = call(*command, "--data-dir", tmp_path / "absent")
        assert (1, True) == (failed.returncode, "--database-url" in failed.stderr)
    assert not (tmp_path / "absent").exists()


def leaf_commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaf_commands(command, *path, name)
        else:
            yield (*path, name)


def parameters(path: tuple[str, ...]) -> dict[str, click.Parameter]:
    command = cli
    for name in path:
        command = command.commands[name]
    return {parameter.name: parameter for parameter in command.params}


@pytest.mark.parametrize("path", list(leaf_commands(cli)), ids=" ".join)
def test_settings_are_flags_and_variables(path: tuple[str, ...]) -> None:
    """Every setting of what runs is a flag and a variable of the same name, and whatever answers can answer in JSON."""
    found = parameters(path)
    if path == ("completion",):
        # A script for a shell to read.
        assert {"shell"} == set(found)
    elif path in (("serve",), ("worker",), ("housekeep",)):
        assert {name: f"DECIDEONCE_{name.upper()}" for name in found} == {n: p.envvar for n, p in found.items()}
    else:
        assert "as_json" in found
    for shared in {"database_url", "data_dir", "server", "token", "tls_ca"} & set(found):
        assert f"DECIDEONCE_{shared.upper()}" == found[shared].envvar


def test_usage_errors_exit_with_2(call) -> None:
    """What the command line can't read exits with 2."""
    for arguments in (("decide",), ("status", "test.decide", "short"), ("serve", "--drain", "soon"), ("nothing",)):
        assert 2 == call(*arguments).returncode, arguments


def test_outbox_list_and_doctor(call, stage) -> None:
    """The events that wait can be listed, and a database that is in order passes the doctor."""
    call("decide", "test.decide", "--fact", "n=0")
    database = ("--database-url", url_text(stage.url))
    listed = json.loads(call("outbox", "list", "--json", *database).stdout)
    assert {"decideonce.decision.v1"} == {event["type"] for event in listed["events"]}
    assert 0 == call("doctor", *database).returncode
    assert 0 == call("doctor").returncode


def test_doctor_finds_a_database_without_schema(call, postgres) -> None:
    """A database that was never migrated doesn't pass."""
    examined = call("doctor", "--json", "--database-url", url_text(postgres.url("postgres")))
    assert 1 == examined.returncode
    assert [False] == [finding["ok"] for finding in json.loads(examined.stdout) if "schema" in finding["check"]]


def test_health(call) -> None:
    """`health` tells by its exit code whether a service is serving."""
    assert 0 == call("health").returncode
    assert 1 == call("health", server="127.0.0.1:1").returncode


async def test_migrate_and_serve(postgres, tmp_path) -> None:
    """An empty database is refused until it is migrated, which may be done twice; an unknown schema is refused too."""
    name = f"empty_{os.getpid()}"
    admin = await connect(postgres.url("postgres"))
    await admin.execute(f"CREATE DATABASE {name}")
    url = postgres.url(name)
    serve = ("serve", "--listen", "127.0.0.1:0", "--database-url", url_text(url))
    for command in (serve, ("housekeep", "--database-url", url_text(url))):
        refused = run(*command)
        assert (1, "") == (refused.returncode, refused.stdout)
        assert "decideonce migrate" in refused.stderr
        assert "Traceback" not in refused.stderr
    for _ in range(2):
        migrated = run("migrate", "--json", database_url=url_text(url))
        assert {"schema": schema_head()} == json.loads(migrated.stdout), migrated.stderr
    database = await connect(url)
    await database.execute("UPDATE alembic_version SET version_num = '9999_pre'")
    refused = run(*serve)
    assert 1 == refused.returncode
    assert "9999_pre" in refused.stderr
    await database.close()
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


def test_plaintext_is_for_loopback(database_url) -> None:
    """Another address than loopback needs TLS or an explicit word."""
    refused = run("serve", "--listen", "0.0.0.0:0", "--database-url", url_text(database_url))
    assert 2 == refused.returncode
    assert "--allow-plaintext" in refused.stderr


def test_port_that_is_taken_is_refused(stage, database_url) -> None:
    """A port where somebody listens is not shared with them."""
    refused = run("serve", "--listen", stage.service.address, "--database-url", url_text(database_url))
    assert 1 == refused.returncode
    assert stage.service.address in refused.stderr


@pytest.fixture
def data() -> Iterator[Path]:
    """Give a directory that the embedded Postgres can reach: under root it runs as a user of its own."""
    with tempfile.TemporaryDirectory(prefix="decideonce-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory, "data")


def test_embedded_data_survive_a_restart(tmp_path, data) -> None:
    """In embedded mode data and token survive a restart; the token is readable by its owner alone."""
    catalog = write_catalog(tmp_path / "catalog", {"test.decide": {"policy": "table"}}, {"table": table_policy("ONE")})
    key = new_key()
    outputs = []
    for start in range(2):
        service = ServiceProcess(tmp_path / f"{start}.log", ["--data-dir", str(data), "--catalog", str(catalog)])
        try:
            address = service.wait_until_ready()
            decide = ("decide", "test.decide", "--key", key, "--data-dir", data)
            outputs.append(run(*decide, server=address).stdout)
            assert 0 == service.stop()
            # The line that said that it is ready was the only one.
            assert "" == service.process.stdout.read()
        finally:
            service.kill()
    assert 0o600 == stat.S_IMODE((data / "dev-token").stat().st_mode)
    assert ["original", "replayed"] == [re.search("original|replayed", output)[0] for output in outputs]


async def test_a_tenant_sees_its_own_only(call, stage) -> None:
    """A key of one tenant doesn't exist for another."""
    key = new_key()
    call("decide", "test.decide", "--key", key, "--fact", "n=0")
    other = await make_token(stage.url, f"not-{TENANT}")
    assert "DECISION_NOT_FOUND" in call("status", "test.decide", key, token=other).stderr
