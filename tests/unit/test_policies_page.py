"""docs/policies.md shows what a policy gets."""

import json
import re
from pathlib import Path

from decideonce_server import policy_jdm
from harness import evaluate_one

PAGE = (Path(__file__).parents[2] / "docs/policies.md").read_text()


def test_input_on_the_page_is_what_a_policy_gets() -> None:
    """A policy that reads every member of the page's input gives them back as they are."""
    given = json.loads(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])
    members = [f"decision.{name}" for name in given["decision"]]
    expressions = [
        {"id": str(i), "key": f"out{i}", "value": member} for i, member in enumerate(["facts", *members])
    ] + [{"id": "outcome", "key": "outcome", "value": "decision.operation"}]
    document = {
        "nodes": [
            {"id": "in", "type": "inputNode", "name": "in"},
            {"id": "echo", "type": "expressionNode", "name": "echo", "content": {"expressions": expressions}},
            {"id": "out", "type": "outputNode", "name": "out"},
        ],
        "edges": [
            {"id": "1", "sourceId": "in", "targetId": "echo"},
            {"id": "2", "sourceId": "echo", "targetId": "out"},
        ],
    }
    prepared = policy_jdm.Engine().prepare(policy_jdm.bundle("echo", {"echo": json.dumps(document)}))
    found = evaluate_one(prepared, given["facts"], given["decision"])
    assert (given["decision"]["operation"], [given["facts"], *given["decision"].values()]) == (
        found.outcome,
        [found.outputs[f"out{i}"] for i in range(len(members) + 1)],
    )
    assert {"facts", "decision"} == set(given)
