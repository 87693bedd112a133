"""The gRPC service config beside the protos: grpc/grpc's doc/service_config.md, and gRFC A6 for retries."""

import json
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions

from decideonce.v1 import catalog_pb2, decision_service_pb2

CONFIG = json.loads((Path(__file__).parents[2] / "protos/decideonce/v1/service_config.json").read_text())
METHODS = {
    (service.full_name, method.name): method
    for module in (decision_service_pb2, catalog_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
POLICIES = [config["retryPolicy"] for config in CONFIG["methodConfig"] if "retryPolicy" in config]


def seconds(text: str) -> float:
    """Read a Duration as JSON has it."""
    return float(re.fullmatch(r"(\d+(?:\.\d{1,9})?)s", text)[1])


def names(config: dict) -> list[tuple[str, str]]:
    return [(name["service"], name["method"]) for name in config["name"]]


def is_safe(method: MethodDescriptor) -> bool:
    """Tell whether the contract says that a method may be called again."""
    return method.GetOptions().idempotency_level != MethodOptions.IDEMPOTENCY_UNKNOWN


def test_every_method_is_configured_once() -> None:
    """Each method of the contract has one entry with a timeout, and nothing else has one."""
    configured = [name for config in CONFIG["methodConfig"] for name in names(config)]
    assert sorted(METHODS) == sorted(configured)
    assert all(seconds(config["timeout"]) > 0 for config in CONFIG["methodConfig"])


def test_what_is_retried_is_what_the_contract_calls_safe() -> None:
    """Exactly the methods with an idempotency level are retried."""
    retried = {name for config in CONFIG["methodConfig"] if "retryPolicy" in config for name in names(config)}
    assert {name for name, method in METHODS.items() if is_safe(method)} == retried


@pytest.mark.parametrize("policy", POLICIES)
def test_retries_are_bounded(policy: dict) -> None:
    """A policy stays within gRPC's bounds, beyond which clients cut it down or refuse all of the config."""
    assert {"maxAttempts", "initialBackoff", "maxBackoff", "backoffMultiplier", "retryableStatusCodes"} == set(policy)
    assert 2 <= policy["maxAttempts"] <= 5
    assert 0 < seconds(policy["initialBackoff"]) <= seconds(policy["maxBackoff"])
    assert policy["backoffMultiplier"] >= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_only_what_may_help_is_retried(policy: dict) -> None:
    """RESOURCE_EXHAUSTED isn't retried: gRPC says it of requests that are too large, and can't ask for a pushback."""
    assert ["UNAVAILABLE"] == policy["retryableStatusCodes"]


def test_retries_are_throttled() -> None:
    """A client whose calls mostly fail stops retrying; the bounds are gRPC's."""
    throttling = CONFIG["retryThrottling"]
    assert 0 < throttling["maxTokens"] <= 1000
    assert 0 < throttling["tokenRatio"] < 1
    assert {"methodConfig", "retryThrottling"} == set(CONFIG)
