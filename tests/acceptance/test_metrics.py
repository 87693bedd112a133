"""What an operator's Prometheus gets."""

import asyncio
import urllib.request
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from harness import make_token, new_key, write_catalog
from processes import children, free_address, until

OPERATION = "count.echo"


async def scraped(address: str) -> list:
    def scrape() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            return response.read().decode()

    text = await asyncio.to_thread(scrape)
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def processes_at(address: str) -> set[str]:
    return {sample.labels["process"] for sample in await scraped(address)}


async def test_one_endpoint_tells_of_all_processes(database_url, start_service, connect_caller, tmp_path) -> None:
    """Every sample says whose it is, every call is counted by one worker, and a worker that dies comes back into it."""
    address = free_address()
    catalog = write_catalog(tmp_path / "catalog", {OPERATION: {"policy": "echo"}}, {"echo": "echo_policy:decide"})
    service = start_service("--catalog", str(catalog), "--workers", "2", "--metrics", address)
    everyone = {"worker 0", "worker 1", "housekeeping"}
    assert everyone == await processes_at(address)
    token = await make_token(database_url, "acme")
    for _ in range(10):
        await connect_caller(service, token).decide(OPERATION, new_key())
    counted: Counter[str] = Counter()
    for sample in await scraped(address):
        if sample.name == "grpc_server_handled_total" and sample.labels["grpc_method"] == "Decide":
            counted[sample.labels["grpc_code"]] += int(sample.value)
    assert {"OK": 10} == counted
    killed = children(service, "worker")[0]
    killed.kill()
    await until(lambda: killed not in children(service, "worker") and len(children(service, "worker")) == 2)

    async def is_whole() -> bool:
        return everyone == await processes_at(address)

    await until(is_whole)
