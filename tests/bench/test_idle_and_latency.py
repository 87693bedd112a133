"""What `idle_and_latency.py` measures, in small: that it measures, and that nothing is far off."""

import io
from collections.abc import Iterator

import pytest

from bench.idle_and_latency import OPERATION, Idle, Latencies, measure_idle, measure_latency, report
from brokers import Nats
from harness import make_token, new_key, table_policy, write_catalog
from publishing import TOPIC

# Far above the goals: other tests run beside this one.
IDLE_PERCENT_MAX = 10.0
LATENCY_MS_MAX = 5_000.0


@pytest.fixture
def nats() -> Iterator[Nats]:
    """Give a broker with the topic."""
    broker = Nats()
    try:
        broker.make_topic(TOPIC)
        yield broker
    finally:
        broker.close()


async def test_idle_housekeeping_is_measured(database_url, nats, tmp_path) -> None:
    """Idle housekeeping takes a small part of a core, whether it publishes or not."""
    idle = await measure_idle(database_url, nats, tmp_path, measured_s=2.0, settle_s=1.0)
    assert 0 < idle.silent < IDLE_PERCENT_MAX
    assert 0 < idle.publishing < IDLE_PERCENT_MAX


async def test_latency_is_measured(database_url, observer, nats, start_service, connect_caller, tmp_path) -> None:
    """Each call's event comes to the consumer after its commit and soon, and the report says how soon."""
    catalog = write_catalog(tmp_path / "catalog", {OPERATION: {"policy": "table"}}, {"table": table_policy("LOW")})
    service = start_service("--catalog", str(catalog), "--events", nats.url)
    caller = connect_caller(service, await make_token(database_url, "acme"))
    await caller.decide(OPERATION, new_key(), {"n": 0})
    latencies = await measure_latency(observer, caller, nats, calls=10, rate=5.0)
    assert 10 == len(latencies.since_complete) == len(latencies.since_answer)
    assert 0 < latencies.since_complete[0] <= latencies.since_complete[-1] < LATENCY_MS_MAX
    out = io.StringIO()
    report(Idle(0.5, 0.25), Latencies([1.0, 2.0, 3.0], [0.5, 1.0, 1.5]), out)
    assert "0.50% of a core, 0.25% without publishing" in out.getvalue()
    assert "complete_time to consumer, 3 events: p50 2 ms, p99 3 ms" in out.getvalue()
