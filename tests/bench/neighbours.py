"""Measures what policies that run away cost the others: `make bench`.

One tenant's policies match a pattern that never ends and fold a huge list, again and again, each until its time budget
kills it. Another tenant's small decisions go on at a fixed rate (an open loop). Time with and without the first
alternates in one run.
"""

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TextIO

import grpc

from decideonce.v1 import decision_service_pb2 as wire
from harness import (
    Caller,
    ServiceProcess,
    decide_request,
    expression_policy,
    make_token,
    new_key,
    own_database,
    table_policy,
    url_text,
    write_catalog,
)

CALLS_PER_S = 40
ROUNDS = 5
TURN_S = 6.0
BUDGET = timedelta(milliseconds=500)
# What a killed evaluation may take on top of its budget until its caller knows: reserving, killing, recording.
OVERHEAD_S = 1.0
SHARE = 0.95
GOAL = 1.5

RUNAWAY = {"policy": "pattern", "time_budget": f"{BUDGET // timedelta(milliseconds=1)}ms", "max_attempts": 1}
OPERATIONS = {
    "neighbour.small": {"policy": "table"},
    "neighbour.pattern": RUNAWAY,
    "neighbour.list": RUNAWAY | {"policy": "list"},
}
POLICIES = {
    "table": table_policy("LOW", "HIGH"),
    "pattern": "runaway_policy:match",
    "list": expression_policy(outcome="'DONE'", pairs="sum(map(facts.list, sum(map($root.facts.list, # * 2))))"),
}
RUNAWAY_FACTS = (
    ("neighbour.pattern", {"text": "a" * 60 + "!"}),
    ("neighbour.list", {"list": [float(i) for i in range(20_000)]}),
)


@dataclass
class Measured:
    """How long calls took, in seconds: small ones by whether others ran away, and those that ran away."""

    small: dict[bool, list[list[float]]] = field(default_factory=lambda: {False: [], True: []})
    runaway: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median of the rounds' p95 with others that run away, over that without."""
        with_, without = (
            statistics.median(sorted(times)[int(SHARE * len(times))] for times in self.small[runs])
            for runs in (True, False)
        )
        return with_ / without


async def call_small(caller: Caller, seconds: float) -> list[float]:
    """Decide small things at a fixed rate; a call's time counts from when it was due."""
    calls = []
    due = time.monotonic()
    end = due + seconds

    async def call(due: float) -> float:
        answer = await caller.decide("neighbour.small", new_key(), {"n": 0})
        assert wire.DECISION_STATUS_SUCCEEDED == answer.status
        return time.monotonic() - due

    while due < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        calls.append(asyncio.ensure_future(call(due)))
        due += 1 / CALLS_PER_S
    return await asyncio.gather(*calls)


async def run_away(caller: Caller, request: wire.DecideRequest, taken: list[float]) -> None:
    """Have a policy run away again and again, until cancelled."""
    while True:
        request.operation_key = new_key()
        began = time.monotonic()
        answer = await caller.decide_raw(request.SerializeToString())
        taken.append(time.monotonic() - began)
        assert (wire.DECISION_STATUS_FAILED_FINAL, "ATTEMPTS_EXHAUSTED") == (answer.status, answer.failure.reason)


async def measure(address: str, tokens: tuple[str, str], rounds: int, turn_s: float) -> Measured:
    """Measure in turns."""
    measured = Measured()
    async with grpc.aio.insecure_channel(address) as channel, grpc.aio.insecure_channel(address) as other:
        small, large = Caller(channel, tokens[0]), Caller(other, tokens[1])
        await call_small(small, min(2.0, turn_s))
        # Made once: this process mustn't be busy with it while it measures.
        requests = [decide_request(operation, new_key(), facts) for operation, facts in RUNAWAY_FACTS]
        for _ in range(rounds):
            for runs in (False, True):
                loops = [
                    asyncio.ensure_future(run_away(large, request, measured.runaway)) for request in requests if runs
                ]
                measured.small[runs].append(await call_small(small, turn_s))
                for loop in loops:
                    loop.cancel()
                for ended in await asyncio.gather(*loops, return_exceptions=True):
                    assert isinstance(ended, asyncio.CancelledError), ended
    return measured


def report(measured: Measured, out: TextIO) -> None:
    """Print what was measured."""
    for runs, rounds in measured.small.items():
        p50, p95 = (
            statistics.median(sorted(times)[int(share * len(times))] for times in rounds) * 1e3
            for share in (0.5, SHARE)
        )
        where = "beside policies that run away" if runs else "alone"
        print(f"small decisions {where}: p50 {p50:.1f} ms, p95 {p95:.1f} ms", file=out)
    print(f"p95 is {measured.ratio:.2f} times as long (goal: {GOAL})", file=out)
    print(
        f"{len(measured.runaway)} evaluations ran away with a budget of {BUDGET.total_seconds():g} s: "
        f"their callers knew after {statistics.median(measured.runaway):.2f} s, {max(measured.runaway):.2f} s at most",
        file=out,
    )


def run(rounds: int, turn_s: float, out: TextIO) -> Measured:
    """Start a service of its own, measure, and report."""
    with ExitStack() as stack:
        directory, url = stack.enter_context(own_database("bench"))
        tokens = asyncio.run(make_token(url, "small")), asyncio.run(make_token(url, "large"))
        catalog = write_catalog(directory / "catalog", OPERATIONS, POLICIES)
        service = ServiceProcess(
            directory / "service.log",
            ["--database-url", url_text(url), "--catalog", str(catalog), "--no-housekeeping"],
        )
        stack.callback(service.kill)
        service.wait_until_ready()
        measured = asyncio.run(measure(service.address, tokens, rounds, turn_s))
    report(measured, out)
    return measured


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--turn", type=float, default=TURN_S, help="seconds with and without, in turn")
    given = parser.parse_args()
    run(given.rounds, given.turn, sys.stdout)


if __name__ == "__main__":
    main()
