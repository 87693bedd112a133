"""Events of decisions while everything is killed, in small: what `delivery.py` shows with 20,000 decisions."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from bench.delivery import BROKERS, Plan, deliver, events_of, judge
from brokers import Broker
from decideonce.v1 import decision_service_pb2 as wire
from decideonce.v1.events_pb2 import DecisionEvent

PLANS = [
    pytest.param("nats", Plan(300, outages=1, kills=2)),
    # What Tansu has is gone when it is stopped.
    pytest.param("kafka", Plan(300, outages=0, kills=2)),
    pytest.param("apache-kafka", Plan(2_000, outages=3, kills=4), marks=pytest.mark.interop),
]


@pytest.fixture
def start_broker() -> Iterator[Callable[[str], Broker]]:
    """Give a function that starts a broker of a kind."""
    started: list[Broker] = []

    def start(kind: str) -> Broker:
        started.append(BROKERS[kind]())
        return started[-1]

    yield start
    for broker in started:
        broker.close()


@pytest.mark.parametrize(("kind", "plan"), PLANS)
async def test_every_event_is_applied_once_and_in_order(
    kind, plan, start_broker, database_url: URL, tmp_path: Path
) -> None:
    """Whatever is killed while decisions are made, the inbox's consumer has what was decided, event by event."""
    wrong = await deliver(database_url, start_broker(kind), tmp_path, plan, sys.stdout)
    assert {} == wrong


def lose(applied: list[DecisionEvent]) -> None:
    """Lose an event."""
    del applied[1]


def apply_twice(applied: list[DecisionEvent]) -> None:
    """Apply an event once more, at once."""
    applied.insert(1, applied[1])


def swap(applied: list[DecisionEvent]) -> None:
    """Apply two events of a key in the wrong order."""
    applied[1], applied[2] = applied[2], applied[1]


def change(applied: list[DecisionEvent]) -> None:
    """Tell another outcome than was decided."""
    applied[0].recorded.decision.outcome = "OTHER"


def invent(applied: list[DecisionEvent]) -> None:
    """Tell of a decision that nobody asked for."""
    applied[2].provenance.operation_key = "another"


@pytest.mark.parametrize("spoil", [None, lose, apply_twice, swap, change, invent])
def test_judge_finds_what_is_wrong(spoil: Callable[[list[DecisionEvent]], None] | None) -> None:
    """What was applied is found right where it is, and wrong in every way in which it can be wrong."""
    answer = wire.DecideResponse(status=wire.DECISION_STATUS_SUCCEEDED)
    answer.decision.outcome = "DONE"
    answer.provenance.operation_key = "key"
    told, applied = events_of(answer, 1), events_of(answer, 1)
    for number, event in enumerate(applied):
        event.event_id = f"id-{number}"
    if spoil is not None:
        spoil(applied)
    assert (spoil is not None) == bool(list(judge({"key": told}, applied)))
