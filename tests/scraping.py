"""What an operator's Prometheus gets of a service."""

import asyncio
import urllib.request
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from harness import spoken


async def scrape(address: str) -> list[Sample]:
    """Give every sample that is served there."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            return response.read().decode()

    text = await asyncio.to_thread(read)
    assert [] == spoken(text)
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """Add up the samples of a name that have these labels."""
    return sum(
        sample.value for sample in samples if sample.name == name and labels.items() <= dict(sample.labels).items()
    )
