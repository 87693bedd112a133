"""How the service is measured, through the OpenTelemetry API: labels are bounded, and never a tenant or a key."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from opentelemetry import metrics

from decideonce_server import tracing

# Upper bounds in seconds: a statement takes a few milliseconds, an evaluation up to its operation's time budget.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

# Waiting for an evaluator is the queue; the other phases are named for what is done.
Phase: TypeAlias = Literal["queue", "reserve", "evaluate", "complete"]

_meter = metrics.get_meter("decideonce")
_phase_seconds = _meter.create_histogram(
    "decide_phase",
    unit="s",
    description="Time that the phases of decisions took",
    explicit_bucket_boundaries_advisory=BUCKETS_S,
)
_takeovers = _meter.create_counter(
    "takeovers",
    description="Attempts that began after one that lost its lease or failed, by which of these",
)
_attempts_exhausted = _meter.create_counter(
    "attempts_exhausted",
    description="Decisions that failed for good because every attempt was used up",
)


def gauge(name: str, description: str, value: Callable[[], float | None], unit: str = "") -> None:
    """Tell a value whenever it is asked for; nothing while it is None."""

    def observe(_options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        return [] if (now := value()) is None else [metrics.Observation(now)]

    _meter.create_observable_gauge(name, [observe], unit, description)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Measure the block as one phase of a decision; with tracing it is a span too."""
    began = time.perf_counter()
    try:
        with tracing.phase_span(name):
            yield
    finally:
        _phase_seconds.record(time.perf_counter() - began, {"phase": name})


def begin() -> None:
    """Tell counters that are 0, so that their first step is seen as one."""
    for after in ("lease", "failure"):
        _takeovers.add(0, {"after": after})
    _attempts_exhausted.add(0)


def count_takeover(*, after_failure: bool) -> None:
    """Count an attempt that took over: after one that failed, or else whose lease ran out."""
    _takeovers.add(1, {"after": "failure" if after_failure else "lease"})


def count_attempts_exhausted() -> None:
    """Count a decision that failed for good because every attempt was used up."""
    _attempts_exhausted.add(1)
