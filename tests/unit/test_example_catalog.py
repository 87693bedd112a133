"""The example catalog: it can be published, and every example gives what it says."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decideonce_server import policy_jdm, policy_python
from decideonce_server.apply import EXAMPLE_TIME
from decideonce_server.catalog import PolicyExample
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.errors import utc_text
from decideonce_server.facts import FactsSchema
from decideonce_server.policy import Evaluation, evaluation_of
from decideonce_server.values import to_struct
from harness import evaluate_one

ROOT = Path(__file__).parents[2] / "catalog"
CATALOG = read_catalog(ROOT)
POLICIES = {policy.policy_id: policy for policy in CATALOG.policies}
DOCUMENTS = {policy_id: policy.text for policy_id, policy in POLICIES.items() if policy.engine == "jdm"}
OPERATIONS = {contract.operation: contract for contract in CATALOG.operations}


def examples() -> Iterator[Any]:
    for policy in POLICIES.values():
        for example in policy.examples:
            yield pytest.param(policy.policy_id, example, id=f"{policy.policy_id}: {example.name}")


def decision_of(example: PolicyExample) -> dict[str, Any]:
    return {"time": utc_text(example.time or EXAMPLE_TIME), "tenant": "example", "operation": "example"}


def evaluate(policy_id: str, example: PolicyExample) -> Evaluation:
    decision = decision_of(example)
    if policy_id in DOCUMENTS:
        prepared = policy_jdm.Engine().prepare(policy_jdm.bundle(policy_id, DOCUMENTS))
        return evaluate_one(prepared, example.facts, decision)
    module, _, function = POLICIES[policy_id].text.partition(":")
    decide = runpy.run_path(str(ROOT / "python" / f"{module}.py"))[function]
    return evaluation_of(decide(example.facts, decision), policy_python.NAME)


@pytest.mark.parametrize(("policy_id", "example"), list(examples()))
def test_example_gives_what_it_says(policy_id: str, example: PolicyExample) -> None:
    """Each example's facts give its outcome, and the reasons and outputs that it names."""
    found = evaluate(policy_id, example)
    reasons = found.reasons if example.reasons else ()
    outputs = found.outputs if example.outputs is not None else None
    assert (example.outcome, example.reasons, example.outputs) == (found.outcome, reasons, outputs)


@pytest.mark.parametrize("policy_id", sorted(DOCUMENTS))
def test_document_can_be_published(policy_id: str) -> None:
    """No JDM document of the example catalog breaks a rule."""
    assert [] == policy_jdm.check(policy_id, DOCUMENTS)


@pytest.mark.parametrize("policy_id", sorted(DOCUMENTS))
def test_examples_reach_every_rule(policy_id: str) -> None:
    """Each rule of a policy's own tables is matched by one of its examples."""
    document = json.loads(DOCUMENTS[policy_id])
    tables = [node for node in document["nodes"] if node["type"] == "decisionTableNode"]
    rules = {f"{node['name']}/{rule['_id']}" for node in tables for rule in node["content"]["rules"]}
    matched = {rule for example in POLICIES[policy_id].examples for rule in evaluate(policy_id, example).matched_rules}
    assert set() == rules - matched


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_examples_satisfy_their_operation(operation: str) -> None:
    """The facts of a policy's examples are facts that its operation accepts, with all defaults already there."""
    contract = OPERATIONS[operation]
    schema = FactsSchema.compile(contract.facts_schema)
    policy = POLICIES[contract.policy_id or ""]
    for example in policy.examples:
        assert example.facts == schema.accept(to_struct(example.facts)).facts


def test_python_policy_gives_the_same_from_its_stored_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The python policy can be published, and its stored source gives what its module gives."""
    monkeypatch.syspath_prepend(str(ROOT / "python"))
    policy = POLICIES["refund-authorization"]
    content = policy_python.read_source(policy.text)
    assert [] == policy_python.check(content)
    prepared = policy_python.Engine().prepare(content)
    for example in policy.examples:
        assert evaluate(policy.policy_id, example) == evaluate_one(prepared, example.facts, decision_of(example))
