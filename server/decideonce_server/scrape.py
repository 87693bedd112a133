"""One Prometheus endpoint for all processes of an instance: each sample says by `process` whose it is."""

import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# A process that stands still has no say in what the others tell.
ANSWER_WITHIN_S = 2.0


class Processes(Collector):
    """Collects what the processes of an instance tell; `addresses` gives each one's HOST:PORT by name."""

    def __init__(self, addresses: Callable[[], Mapping[str, str]]) -> None:
        self._addresses = addresses

    def collect(self) -> Iterable[Metric]:
        """Ask every process at once; those that don't answer are left out."""
        addresses = self._addresses()
        if not addresses:
            return []
        merged: dict[str, Metric] = {}
        with ThreadPoolExecutor(max_workers=len(addresses)) as pool:
            for process, text in zip(addresses, pool.map(_ask, addresses.values()), strict=True):
                for family in text_string_to_metric_families(text):
                    metric = merged.setdefault(
                        family.name, Metric(family.name, family.documentation, family.type, family.unit)
                    )
                    for sample in family.samples:
                        metric.add_sample(sample.name, sample.labels | {"process": process}, sample.value)
        return merged.values()


def _ask(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=ANSWER_WITHIN_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError):
        return ""


def serve_metrics(host: str, port: int, addresses: Callable[[], Mapping[str, str]]) -> None:
    """Serve the endpoint, from a thread of its own.

    Raises:
        OSError: nothing can be served there.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Processes(addresses))
    start_http_server(port, host, registry)
