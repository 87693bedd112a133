"""Starts a real service on an embedded Postgres and shows, through the command line, what it answers.

Exits with 1 where an answer isn't what it should be.
"""

import argparse
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TextIO, cast

import click

PROGRAM = ".venv/bin/decideonce"
FACTS = "catalog/facts"
READY_WITHIN_S = 60.0
STOPPED_WITHIN_S = 60.0
CALL_WITHIN_S = 60.0


class Unexpected(Exception):
    """What happened isn't what the demo shows; the text says what."""


@contextmanager
def service(listen: str, data_dir: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve the example catalog, and give the address and the process; its log is DATA_DIR/serve.log."""
    data_dir.mkdir(exist_ok=True)
    log = data_dir / "serve.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(  # noqa: S603  # our own program
            [PROGRAM, "serve", "--listen", listen, "--data-dir", data_dir, "--catalog", "catalog"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            process_group=0,  # Ctrl-C reaches it once, through us
        )
    output = cast("TextIO", process.stdout)
    try:
        line = output.readline() if select.select([output], [], [], READY_WITHIN_S)[0] else ""
        if not line:
            raise Unexpected(f"the service did not start:\n{log.read_text()}")
        yield line.split()[-1], process
    finally:
        process.terminate()
        exit_code = process.wait(STOPPED_WITHIN_S)
        output.close()
    if exit_code:
        raise Unexpected(f"the service ended with exit code {exit_code}:\n{log.read_text()}")


def say(sentence: str) -> None:
    """Print a sentence."""
    click.echo("\n" + click.style(sentence, bold=True))


def step(sentence: str, *command: str, shows: str, exit_code: int = 0) -> None:
    """Say what comes, run a command as anyone could, print what it prints, and check that."""
    say(sentence)
    click.echo(click.style(f"$ {shlex.join([PROGRAM, *command])}", fg="cyan"))
    ran = subprocess.run(  # noqa: S603  # our own program
        [PROGRAM, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=CALL_WITHIN_S,
    )
    click.echo(ran.stdout, nl=False)
    if ran.returncode != exit_code:
        raise Unexpected(f"exit code {exit_code} was expected here, and it is {ran.returncode}")
    if shows not in click.unstyle(ran.stdout):
        raise Unexpected(f'"{shows}" was expected here')


def show_loans() -> None:
    """Show an original, a replay, a conflict, and other outcomes."""
    key = str(uuid.uuid4())
    decide = ("decide", "credit.approve-loan", "--facts")
    loan = (*decide, f"{FACTS}/loan-car.json", "--key", key)
    step("A loan is decided, once.", *loan, shows="approved  original")
    step(
        "The same call again: nothing is evaluated, the recorded answer comes back.", *loan, shows="approved  replayed"
    )
    step(
        "The applicant retries from a phone. The channel is no part of the request's identity: a replay again.",
        *loan,
        *("--fact", "channel=mobile"),
        shows="approved  replayed",
    )
    step(
        "The same key for another amount is a mistake of the caller, and refused.",
        *loan,
        *("--fact", "loan.amount_minor=1500000"),
        shows="OPERATION_KEY_REUSED",
        exit_code=1,
    )
    step("Another applicant can't afford the loan.", *decide, f"{FACTS}/loan-unaffordable.json", shows="declined")
    step("A suspicion goes to a person.", *decide, f"{FACTS}/loan-fraud-suspected.json", shows="referred")
    step(
        "Facts that break the operation's schema are refused before anything is recorded; the key stays free.",
        *(*decide, f"{FACTS}/loan-car.json", "--fact", "loan.term_months=600"),
        shows="INVALID_FACTS",
        exit_code=1,
    )


def show_refunds() -> None:
    """Show a policy that is Python, and that spelling is no difference."""
    yesterday = datetime.now(UTC) - timedelta(days=1)
    captured = ("--fact", f"payment.captured_at={yesterday:%Y-%m-%dT%H:%M:%SZ}")
    decide = ("decide", "payment.authorize-refund", *captured, "--facts")
    key = ("--key", f"refund:order-4711:{uuid.uuid4()}")
    step(
        "A refund is authorized by a policy that is Python code.",
        *(*decide, f"{FACTS}/refund-damaged.json", *key),
        shows="authorized  original",
    )
    step(
        "Its retry spells things otherwise: 45.5 for 45.50, defaults written out. It is the same request.",
        *(*decide, f"{FACTS}/refund-damaged-respelled.json", *key),
        shows="authorized  replayed",
    )
    step("More than a clerk may refund alone.", *decide, f"{FACTS}/refund-over-limit.json", shows="over-limit")
    step(
        "A payment that is too old.",
        *("decide", "payment.authorize-refund", "--facts", f"{FACTS}/refund-too-late.json"),
        shows="window-closed",
    )


def show_signups() -> None:
    """Show an operation that is decided in the background."""
    for name, outcome in (("plain", "accepted"), ("emulator", "manual-review")):
        key = str(uuid.uuid4())
        step(
            "A signup is reviewed in the background: the key is reserved, and the answer is to come.",
            *("decide", "identity.review-signup", "--facts", f"{FACTS}/signup-{name}.json", "--key", key),
            shows="PROCESSING",
        )
        step(
            "Asking for it, and waiting for it.",
            *("status", "identity.review-signup", key, "--max-wait", "10s"),
            shows=outcome,
        )


def show_events(path: Path) -> None:
    """Show what was published: here to a file, as `serve` does where no broker is named."""
    say("Each decision told its events, in the same transaction, and they were published as CloudEvents.")
    wanted = "loan.offer-requested"
    click.echo(click.style(f"$ grep {wanted} {path}", fg="cyan"))
    until = time.monotonic() + CALL_WITHIN_S
    while not (lines := [line for line in _lines(path) if wanted in line]):
        if time.monotonic() > until:
            raise Unexpected(f'"{wanted}" was expected here')
        time.sleep(0.05)
    click.echo("\n".join(lines))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def show_operators_view() -> None:
    """Show what an operator sees."""
    show_events(Path(os.environ["DECIDEONCE_DATA_DIR"], "events.jsonl"))
    step("None of them waits any more.", "outbox", "lag", shows="0 wait")
    step("What is published, by version and digest.", "policy", "list", shows="loan-approval")


def show_commands_to_try() -> None:
    """Print what somebody could do next, in a second terminal."""
    say("Now it is yours. In a second terminal, in this directory:")
    for command in (
        f"decide credit.approve-loan --facts {FACTS}/loan-car.json --fact credit.score=580",
        f"decide payment.authorize-refund --facts {FACTS}/refund-too-late.json --json",
        "operation show credit.approve-loan",
        "outbox list",
        "doctor",
    ):
        click.echo(f"  {PROGRAM} {command}")
    click.echo("  README.md makes a decision of your own. Ctrl-C stops the service; what it recorded stays.")


def run(listen: str, data_dir: Path, *, keep_serving: bool) -> None:
    """Serve, show, and go on serving if asked."""
    say("Starting decideonce on a PostgreSQL of its own, with the example catalog.")
    with service(listen, data_dir) as (address, process):
        environment = {"DECIDEONCE_SERVER": address, "DECIDEONCE_DATA_DIR": str(data_dir)}
        os.environ |= environment
        if keep_serving:
            click.echo(f"It serves on {address}. Its log is {data_dir}/serve.log.")
        else:
            click.echo(f"$ export {' '.join(f'{name}={value}' for name, value in environment.items())}")
        for show in (show_loans, show_refunds, show_signups, show_operators_view):
            show()
        if keep_serving:
            show_commands_to_try()
            process.wait()
            raise Unexpected(f"the service stopped by itself; see {data_dir}/serve.log")
    say("Everything was as it should be.")


def main() -> None:
    """Run the demo as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep-serving", action="store_true", help="keep the data, and serve until Ctrl-C")
    keep_serving = parser.parse_args().keep_serving
    os.chdir(Path(__file__).parents[1])
    if sys.stdout.isatty():
        # The commands write into a pipe, and are to write colours all the same.
        os.environ.setdefault("FORCE_COLOR", "1")
    # A stop from outside is a Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if keep_serving:
            run("127.0.0.1:50051", Path(".decideonce"), keep_serving=True)
        else:
            with tempfile.TemporaryDirectory() as directory:
                run("127.0.0.1:0", Path(directory, "data"), keep_serving=False)
    except Unexpected as error:
        sys.exit(f"\nThe demo failed: {error}")
    except KeyboardInterrupt:
        click.echo("\nStopped.")
        sys.exit(0 if keep_serving else 1)


if __name__ == "__main__":
    main()
