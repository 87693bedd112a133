"""Events of decisions while everything is killed, in small: what `delivery.py` shows with 20,000 decisions."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from bench.delivery import BROKERS, Plan, deliver
from brokers import Broker

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
