"""What every engine does alike. Each engine states the policies of this suite in its own language."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from decideonce_server import policy_jdm, policy_python
from decideonce_server.policy import Effect, Engine, Evaluation, InvalidResult, PolicyFailed
from decideonce_server.values import Json
from harness import evaluate_one

DECISION: dict[str, Json] = {"time": "2026-03-01T08:00:00Z", "tenant": "acme", "operation": "credit.approve-loan"}

JDM: dict[str, dict[str, str]] = {
    "whole": {
        "outcome": "facts.amount > 1000 ? 'REVIEW' : 'APPROVED'",
        "reasons": "['AMOUNT', facts.name]",
        "effects": "[{type: 'letter.send', payload: {amount: facts.amount}}, {type: 'note'}]",
        "limit": "facts.amount * 2",
        "terms": "{months: [12, 24], insured: true, agent: null, rate: {text: '1.5'}}",
    },
    "outcome only": {"outcome": "'APPROVED'"},
    "decision": {
        "outcome": "'APPROVED'",
        "time": "decision.time",
        "tenant": "decision.tenant",
        "operation": "decision.operation",
    },
    "no outcome": {"limit": "1"},
    "outcome null": {"outcome": "null"},
    "outcome empty": {"outcome": "''"},
    "outcome number": {"outcome": "1"},
    "reasons text": {"outcome": "'APPROVED'", "reasons": "'AMOUNT'"},
    "reasons numbers": {"outcome": "'APPROVED'", "reasons": "[1]"},
    "effects text": {"outcome": "'APPROVED'", "effects": "'letter.send'"},
    "effect without type": {"outcome": "'APPROVED'", "effects": "[{payload: {}}]"},
    "effect of ours": {"outcome": "'APPROVED'", "effects": "[{type: 'decideonce.decided'}]"},
    "effect with more": {"outcome": "'APPROVED'", "effects": "[{type: 'letter.send', to: 'x'}]"},
    "effect payload text": {"outcome": "'APPROVED'", "effects": "[{type: 'letter.send', payload: 'x'}]"},
    "error": {"outcome": "number(facts.text) > 1 ? 'REVIEW' : 'APPROVED'"},
    "compare": {"outcome": "facts.amount > 1000 ? 'REVIEW' : 'APPROVED'"},
    "numbers": {
        "outcome": "'APPROVED'",
        "at_least": "facts.amount_minor >= 10000",
        "equal": "facts.amount_minor == 10000",
        "above": "facts.amount_minor > 9999.5",
        "tier": "facts.tier == 1",
    },
    "unicode": {"outcome": "facts.word", "reasons": "['größer', facts.word]", "同": "facts.word"},
    "times ten": {"outcome": "'APPROVED'", "product": "facts.amount * 10"},
    "give facts": {"outcome": "'APPROVED'", "given": "facts.items"},
}

PYTHON: dict[str, str] = {
    "whole": """
        {
            "outcome": "REVIEW" if facts["amount"] > 1000 else "APPROVED",
            "reasons": ["AMOUNT", facts["name"]],
            "effects": [{"type": "letter.send", "payload": {"amount": facts["amount"]}}, {"type": "note"}],
            "limit": facts["amount"] * 2,
            "terms": {"months": [12, 24], "insured": True, "agent": None, "rate": {"text": "1.5"}},
        }""",
    "outcome only": '{"outcome": "APPROVED"}',
    "decision": '{"outcome": "APPROVED", **decision}',
    "no outcome": '{"limit": 1}',
    "outcome null": '{"outcome": None}',
    "outcome empty": '{"outcome": ""}',
    "outcome number": '{"outcome": 1}',
    "reasons text": '{"outcome": "APPROVED", "reasons": "AMOUNT"}',
    "reasons numbers": '{"outcome": "APPROVED", "reasons": [1]}',
    "effects text": '{"outcome": "APPROVED", "effects": "letter.send"}',
    "effect without type": '{"outcome": "APPROVED", "effects": [{"payload": {}}]}',
    "effect of ours": '{"outcome": "APPROVED", "effects": [{"type": "decideonce.decided"}]}',
    "effect with more": '{"outcome": "APPROVED", "effects": [{"type": "letter.send", "to": "x"}]}',
    "effect payload text": '{"outcome": "APPROVED", "effects": [{"type": "letter.send", "payload": "x"}]}',
    "error": '{"outcome": "REVIEW" if int(facts["text"]) > 1 else "APPROVED"}',
    "compare": '{"outcome": "REVIEW" if facts["amount"] > 1000 else "APPROVED"}',
    "numbers": """
        {
            "outcome": "APPROVED",
            "at_least": facts["amount_minor"] >= 10000,
            "equal": facts["amount_minor"] == 10000,
            "above": facts["amount_minor"] > 9999.5,
            "tier": facts["tier"] == 1,
        }""",
    "unicode": '{"outcome": facts["word"], "reasons": ["größer", facts["word"]], "同": facts["word"]}',
    "times ten": '{"outcome": "APPROVED", "product": facts["amount"] * 10}',
    "give facts": '{"outcome": "APPROVED", "given": facts["items"]}',
}


def jdm_document(expressions: Mapping[str, str]) -> str:
    cells = [{"id": key, "key": key, "value": value} for key, value in expressions.items()]
    nodes = [
        {"id": "in", "name": "in", "type": "inputNode", "content": {}},
        {"id": "rules", "name": "rules", "type": "expressionNode", "content": {"expressions": cells}},
        {"id": "out", "name": "out", "type": "outputNode", "content": {}},
    ]
    ways = [("in", "rules"), ("rules", "out")]
    edges = [{"id": f"{a}-{b}", "type": "edge", "sourceId": a, "targetId": b} for a, b in ways]
    return json.dumps({"nodes": nodes, "edges": edges})


def jdm_content(behaviour: str) -> str:
    return policy_jdm.bundle("suite", {"suite": jdm_document(JDM[behaviour])})


def python_content(behaviour: str) -> str:
    return f"# entry_point: suite:decide\ndef decide(facts, decision):\n    return {PYTHON[behaviour].strip()}\n"


@dataclass(frozen=True)
class Port:
    engine: Engine
    name: str
    content: Callable[[str], str]

    def evaluate(self, behaviour: str, facts: dict[str, Json]) -> Evaluation:
        return evaluate_one(self.engine.prepare(self.content(behaviour)), facts, DECISION)


PORTS = [
    Port(policy_jdm.Engine(), policy_jdm.NAME, jdm_content),
    Port(policy_python.Engine(), policy_python.NAME, python_content),
]


@pytest.fixture(params=PORTS, ids=lambda port: port.engine.name)
def port(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_both_engines_state_every_policy() -> None:
    """The two engines are held to the same behaviours."""
    assert list(JDM) == list(PYTHON)


@pytest.mark.parametrize("behaviour", JDM)
def test_policies_of_the_suite_can_be_published(behaviour: str) -> None:
    """What the suite evaluates is what publishing accepts."""
    documents = {"suite": jdm_document(JDM[behaviour])}
    assert [] == policy_jdm.check("suite", documents)
    assert [] == policy_python.check(python_content(behaviour))


def test_a_result_has_its_parts(port: Port) -> None:
    """Outcome, reasons and effects are taken out of the result, and everything else is its outputs."""
    expected = Evaluation(
        outcome="APPROVED",
        engine=port.name,
        reasons=("AMOUNT", "Ada"),
        outputs={
            "limit": 1800,
            "terms": {"months": [12, 24], "insured": True, "agent": None, "rate": {"text": "1.5"}},
        },
        effects=(Effect("letter.send", {"amount": 900}), Effect("note", {})),
    )
    assert expected == port.evaluate("whole", {"amount": 900, "name": "Ada"})
    assert port.evaluate("whole", {"amount": 1001, "name": "Ada"}).outcome == "REVIEW"


def test_an_outcome_is_enough(port: Port) -> None:
    """Reasons, effects and outputs are optional."""
    assert Evaluation(outcome="APPROVED", engine=port.name) == port.evaluate("outcome only", {})


def test_a_policy_sees_the_decision(port: Port) -> None:
    """Time, tenant and operation of the decision are there for the policy."""
    assert port.evaluate("decision", {}).outputs == DECISION


@pytest.mark.parametrize(
    ("behaviour", "part"),
    [
        ("no outcome", "outcome"),
        ("outcome null", "outcome"),
        ("outcome empty", "outcome"),
        ("outcome number", "outcome"),
        ("reasons text", "reasons"),
        ("reasons numbers", "reasons"),
        ("effects text", "effects"),
        ("effect without type", "effects"),
        ("effect of ours", "effects"),
        ("effect with more", "effects"),
        ("effect payload text", "effects"),
    ],
)
def test_what_is_no_result_is_refused(port: Port, behaviour: str, part: str) -> None:
    """A missing outcome or a part of a wrong type is an InvalidResult that names the part, never a default."""
    with pytest.raises(InvalidResult, match=f"^{part} must be "):
        port.evaluate(behaviour, {})


def test_an_error_is_a_failure(port: Port) -> None:
    """An evaluation that fails is PolicyFailed, never a rule that did not match."""
    with pytest.raises(PolicyFailed):
        port.evaluate("error", {"text": "many"})


@pytest.mark.parametrize("facts", [{}, {"amount": "many"}, {"amount": {}}], ids=["missing", "text", "object"])
def test_a_comparison_that_makes_no_sense_is_a_failure(port: Port, facts: dict[str, Json]) -> None:
    """A fact that is missing or of another type fails the evaluation; it is no mismatch (cel-expr/cel-go#203)."""
    with pytest.raises(PolicyFailed):
        port.evaluate("compare", facts)


@pytest.mark.parametrize("facts", [{"amount_minor": 10000, "tier": 1}, {"amount_minor": 10000.0, "tier": 1.0}])
def test_integers_and_doubles_compare_alike(port: Port, facts: dict[str, Json]) -> None:
    """A rule's number matches a fact however it is spelled (cel-expr/cel-go#203)."""
    expected = {"at_least": True, "equal": True, "above": True, "tier": True}
    assert expected == port.evaluate("numbers", facts).outputs


def test_rules_on_numbers_can_fail_to_match(port: Port) -> None:
    """The rules of the test above tell numbers apart."""
    expected = {"at_least": False, "equal": False, "above": False, "tier": False}
    assert expected == port.evaluate("numbers", {"amount_minor": 9999.5, "tier": 2}).outputs


@pytest.mark.parametrize("word", ["größer", "決定", "🙂", "e\u0301", "\u00e9", "\u202etxt"])
def test_text_is_kept_as_it_is(port: Port, word: str) -> None:
    """Text of any script passes through unchanged, in its own Unicode form."""
    expected = Evaluation(outcome=word, engine=port.name, reasons=("größer", word), outputs={"同": word})
    assert expected == port.evaluate("unicode", {"word": word})


@pytest.mark.parametrize("amount", [2**53 // 5, -(2**53) // 5])
def test_a_number_past_the_exact_ones_is_refused(port: Port, amount: int) -> None:
    """A result with an integer that a double can't hold exactly is an InvalidResult that names its place."""
    with pytest.raises(InvalidResult, match=r"^/product must be within"):
        port.evaluate("times ten", {"amount": amount})


def test_the_largest_exact_number_is_kept(port: Port) -> None:
    """Numbers up to the limit stay exact."""
    assert port.evaluate("times ten", {"amount": (2**53 - 8) // 10}).outputs == {"product": (2**53 - 8) // 10 * 10}


def test_two_evaluations_give_the_same(port: Port) -> None:
    """A prepared version gives one result for one input, however often it is asked, and so does a fresh one."""
    facts: dict[str, Json] = {"amount": 900, "name": "Ada"}
    evaluate = port.engine.prepare(port.content("whole"))
    first = evaluate_one(evaluate, facts, DECISION)
    evaluate_one(evaluate, {"amount": 5000, "name": "Bob"}, DECISION)
    assert first == evaluate_one(evaluate, facts, DECISION)
    assert first == port.evaluate("whole", facts)


def test_facts_stay_as_they_are(port: Port) -> None:
    """An evaluation changes neither its facts nor the decision, and its result doesn't share them."""
    facts: dict[str, Json] = {"items": [{"price": 1.5}, {"price": 2}]}
    before = copy.deepcopy(facts)
    given = port.evaluate("give facts", facts).outputs["given"]
    assert isinstance(given, list)
    assert before["items"] == given
    given.clear()
    assert before == facts


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "# entry_point: x", "# entry_point: x:y\n)"])
def test_content_of_another_kind_is_refused(port: Port, content: str) -> None:
    """A content that the engine can't load is PolicyFailed when it is prepared."""
    with pytest.raises(PolicyFailed):
        port.engine.prepare(content)
