"""Shows where a worker's time goes, for first decisions and for replays: `make profile`.

The main thread of a worker is sampled by py-spy under load, without being stopped for it. A sample belongs to the phase
of the innermost module that has one; a sample in none is gRPC's and the event loop's own. Each phase has that share of
the CPU time that the workers' main threads took per call in the same seconds; other threads, which are gRPC's, and
evaluators are counted by the kernel. The sampled stacks stay beside the result, for a flame graph.
"""

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import psutil

from bench import tables
from bench.loader import call
from bench.subject import Subject, subject
from bench.throughput import REPLAYED, machine, write
from bench.usage import cpu_seconds

OUTPUT = Path(".bench/profile.json")
PY_SPY = Path(__file__).parents[2] / ".venv/bench/peers/bin/py-spy"
SAMPLES_PER_S = 500
SECONDS = 20
CALLERS = 64
# py-spy starts and reads the process's symbols first.
START_S = 3

# What a frame's file begins with below the packages' directory, and the phase it is in; the first that fits.
OTHER = "gRPC and event loop"
PHASES = {
    "decideonce_server/__main__.py": OTHER,
    "decideonce_server/cli": OTHER,
    "decideonce_server/app.py": OTHER,
    "decideonce_server/limits.py": "limits",
    "limits/": "limits",
    "decideonce_server/wire.py": "parse",
    "decideonce_server/requests.py": "parse",
    "decideonce_server/auth.py": "authenticate",
    "decideonce_server/callers.py": "authenticate",
    "decideonce_server/jwt_tokens.py": "authenticate",
    "decideonce_server/ledger_tokens.py": "authenticate",
    "decideonce_server/facts": "judge and fingerprint",
    "decideonce_server/json_schema.py": "judge and fingerprint",
    "decideonce_server/canonical.py": "judge and fingerprint",
    "decideonce_server/fingerprint.py": "judge and fingerprint",
    "decideonce_server/spelling.py": "judge and fingerprint",
    "decideonce_server/evaluator": "evaluate",
    "decideonce_server/policy": "evaluate",
    "decideonce_server/jdm": "evaluate",
    "decideonce_server/recording.py": "make the record",
    "decideonce_server/values.py": "make the record",
    "decideonce_server/telemetry.py": "telemetry",
    "decideonce_server/measures.py": "telemetry",
    "decideonce_server/tracing.py": "telemetry",
    "opentelemetry/": "telemetry",
    "prometheus_client/": "telemetry",
    "decideonce_server/ledger": "statements",
    "decideonce_server/outbox": "statements",
    "decideonce_server/database.py": "statements",
    "asyncpg/": "statements",
    "decideonce_server/": "the rest of the way",
}
# Which statement it is shows in the ledger's own frame.
LEDGER = "decideonce_server/ledger.py"
STATEMENTS = ("reserve", "read", "complete")
THREADS = "gRPC's own threads"
EVALUATORS = "evaluators, in processes of their own"
MAIN = "MainThread"


def phase_of(stack: str) -> str:
    """Name the phase of a sampled stack: `name (file:line);…`, the outermost frame first."""
    frames = [(name, f"/{place}") for name, _, place in (frame.rpartition(" (") for frame in stack.split(";"))]
    for _, place in reversed(frames):
        for part, phase in PHASES.items():
            if f"/{part}" not in place:
                continue
            if phase != "statements":
                return phase
            named = [
                name for frame, where in frames if LEDGER in where for name in frame.split(".") if name in STATEMENTS
            ]
            return f"{phase}: {named[0]}" if named else phase
    return OTHER


def phases(folded: str) -> Counter[str]:
    """Count the main thread's samples by phase, in py-spy's folded stacks, each of which begins with its thread.

    One without frames could not be read, as they changed meanwhile.
    """
    found: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, _, frames = stack.partition(";")
        if MAIN in thread and frames:
            found[phase_of(frames)] += int(count)
    return found


async def record(pid: int, seconds: float, file: Path) -> str:
    """Sample a process, and give its folded stacks."""
    running = await asyncio.create_subprocess_exec(
        *(PY_SPY, "record", "--pid", str(pid), "--duration", str(round(seconds)), "--rate", str(SAMPLES_PER_S)),
        *("--nonblocking", "--threads", "--format", "raw", "--full-filenames", "--output", file),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await running.communicate()
    assert not running.returncode, error.decode()
    return file.read_text()


async def profile(measured: Subject, replayed: int, seconds: float, folded_file: Path) -> dict[str, Any]:
    """Sample a worker under load, and give what each phase takes of a call, in microseconds."""
    workers = measured.target.processes()
    before, own_before = cpu_seconds(workers), _own(workers)
    calls = call(measured.target, measured.keys, callers=CALLERS, seconds=seconds + 2 * START_S, replayed=replayed)
    run, folded = await asyncio.gather(calls, record(workers[0].pid, seconds, folded_file))
    main, own = (
        (after - earlier) / run["calls"] * 1e6 for after, earlier in zip(_own(workers), own_before, strict=True)
    )
    everything = (cpu_seconds(workers) - before) / run["calls"] * 1e6
    samples = phases(folded)
    found = {phase: main * count / samples.total() for phase, count in samples.most_common()}
    found |= {THREADS: own - main, EVALUATORS: everything - own}
    return {"phases_us": found, "samples": samples.total(), "run": run}


def _own(workers: Sequence[psutil.Process]) -> tuple[float, float]:
    """Give the CPU time of the workers' main threads, and of all their threads, in seconds."""
    threads = [(worker.pid, thread) for worker in workers for thread in worker.threads()]
    main = sum(thread.user_time + thread.system_time for pid, thread in threads if thread.id == pid)
    return main, sum(thread.user_time + thread.system_time for _, thread in threads)


async def measure(workers: int, seconds: float, out: TextIO) -> dict[str, Any]:
    """Profile first decisions and replays."""
    async with subject(workers) as measured:
        await call(measured.target, measured.keys, callers=CALLERS, calls=REPLAYED)
        content = {}
        for kind, replayed in (("first", 0), ("replay", REPLAYED)):
            content[kind] = await profile(measured, replayed, seconds, OUTPUT.with_name(f"profile-{kind}.txt"))
            print(f"{kind}: {tables.run_text(content[kind]['run'])} while sampled", flush=True, file=out)
        return content


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    OUTPUT.parent.mkdir(exist_ok=True)
    content = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    content |= asyncio.run(measure(given.workers, given.seconds, sys.stderr))
    write(given.output, content)
    print(tables.profile(content))


if __name__ == "__main__":
    main()
