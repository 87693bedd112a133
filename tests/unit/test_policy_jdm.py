"""The JDM engine: what may be published, what a version holds, and what an evaluation gives."""

import copy
import functools
import json
import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decideonce_server import jdm_expression, policy_jdm
from decideonce_server.errors import InvalidCatalog
from decideonce_server.policy import Effect, Evaluation, InvalidResult, PolicyFailed
from harness import evaluate_one

DECISION: dict[str, Any] = {"time": "2026-03-01T12:00:00Z", "tenant": "acme", "operation": "credit.approve-loan"}


def node(name: str, kind: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"id": name.lower(), "name": name, "type": kind, "content": content or {}, "position": {"x": 1, "y": 2}}


def edge(source: str, target: str, handle: str | None = None) -> dict[str, Any]:
    return {"id": f"{source}-{target}", "sourceId": source, "targetId": target, "sourceHandle": handle}


def chain(*middle: dict[str, Any]) -> str:
    """Write a document whose nodes follow one another."""
    nodes = [node("In", "inputNode"), *middle, node("Out", "outputNode")]
    edges = [edge(a["id"], b["id"]) for a, b in pairwise(nodes)]
    return json.dumps({"nodes": nodes, "edges": edges})


def expression(*pairs: tuple[str, str], name: str = "Sum", **more: Any) -> dict[str, Any]:
    expressions = [{"id": key, "key": key, "value": value} for key, value in pairs]
    return node(name, "expressionNode", {"expressions": expressions, **more})


def table(*cells: str, field: str = "facts.x", name: str = "Table", **more: Any) -> dict[str, Any]:
    """Write a table of one column whose rows give r1, r2 and so on."""
    rules = [{"_id": f"r{i}", "c": cell, "o": f"'r{i}'"} for i, cell in enumerate(cells, 1)]
    content = {
        "hitPolicy": "first",
        "inputs": [{"id": "c", "name": "X", "field": field}],
        "outputs": [{"id": "o", "name": "Outcome", "field": "outcome"}],
        "rules": rules,
    }
    return node(name, "decisionTableNode", content | more)


def switch(condition: str) -> str:
    """Write a document that gives the outcome yes where a condition holds, else no."""
    statements = [{"id": "if", "condition": condition}, {"id": "else", "condition": ""}]
    nodes = [
        node("In", "inputNode"),
        node("Switch", "switchNode", {"hitPolicy": "first", "statements": statements}),
        expression(("outcome", "'yes'"), name="Yes"),
        expression(("outcome", "'no'"), name="No"),
    ]
    edges = [edge("in", "switch"), edge("switch", "yes", "if"), edge("switch", "no", "else")]
    return json.dumps({"nodes": nodes, "edges": edges})


def faults(document: str) -> list[tuple[str, str]]:
    return [(fault.field, fault.rule) for fault in policy_jdm.check("p", {"p": document})]


def evaluate(document: str, facts: dict[str, Any], **others: str) -> Evaluation:
    documents = {"p": document, **others}
    assert [] == [fault for policy_id in documents for fault in policy_jdm.check(policy_id, documents)]
    return evaluate_one(policy_jdm.Engine().prepare(policy_jdm.bundle("p", documents)), facts, DECISION)


def result_of(text: str, facts: dict[str, Any]) -> Any:
    """Evaluate one expression in an expression node."""
    return evaluate(chain(expression(("outcome", "'done'"), ("result", text))), facts).outputs["result"]


def test_evaluation_has_all_parts_of_a_result() -> None:
    """Outcome, reasons, effects and outputs come out of the last node's values."""
    last = expression(
        ("outcome", "'approved'"),
        ("reasons", "['a', 'b']"),
        ("effects", "[{type: 'offer.requested', payload: {amount: facts.x}}]"),
        ("limit", "facts.x * 2"),
        ("tenant", "decision.tenant"),
    )
    expected = Evaluation(
        outcome="approved",
        engine="zen-engine/2.1.3",
        reasons=("a", "b"),
        outputs={"limit": 20, "tenant": "acme"},
        effects=(Effect("offer.requested", {"amount": 10}),),
    )
    assert expected == evaluate(chain(last), {"x": 10})


def test_facts_and_decision_never_reach_the_outputs() -> None:
    """A node that passes its input through gives only what it adds."""
    passing = expression(("outcome", "'done'"), ("sum", "1 + 1"), passThrough=True)
    assert {"sum": 2} == evaluate(chain(passing), {"x": 1}).outputs


@pytest.mark.parametrize("cell", [">= 10000", "== 10000", "> 9999.5", "10000", "[10000..10001)"])
@pytest.mark.parametrize("fact", [10000, 10000.0])
def test_whole_numbers_match_however_they_are_given(cell: str, fact: float) -> None:
    """A literal and a fact are compared as numbers, given as int or as double (cel-expr/cel-go#203)."""
    assert "r1" == evaluate(chain(table(cell, "")), {"x": fact}).outcome


def test_decimal_arithmetic_is_exact() -> None:
    """0.1 + 0.2 is 0.3, and a text amount becomes an exact number."""
    assert result_of("0.1 + 0.2 == 0.3 and number('19.90') * 3 == 59.7", {}) is True


def test_first_hit_names_its_rule() -> None:
    """A table with hit policy first names the one rule that matched, by node and rule id."""
    assert ("Table/r2",) == evaluate(chain(table("> 5", "> 3", "")), {"x": 4}).matched_rules


def test_collect_names_every_rule() -> None:
    """A table with hit policy collect names all rules that matched, in the table's order."""
    collecting = table("> 5", "> 3", "", hitPolicy="collect", outputPath="hits")
    last = expression(("outcome", "hits[0].outcome"), ("count", "len(hits)"))
    found = evaluate(chain(collecting, last), {"x": 4})
    assert (("Table/r2", "Table/r3"), "r2", 2) == (found.matched_rules, found.outcome, found.outputs["count"])


def test_rule_without_an_id_is_named_by_its_row() -> None:
    """A rule that has no _id is called by its row's number."""
    nameless = table("> 5", "")
    del nameless["content"]["rules"][1]["_id"]
    assert ("Table/row 2",) == evaluate(chain(nameless), {"x": 4}).matched_rules


def test_rules_of_sub_decisions_are_named_in_order() -> None:
    """Rules that matched in sub-decisions stand where the sub-decision was evaluated."""
    inner = chain(table("> 5", "", name="Inner"))
    sub = node("Sub", "decisionNode", {"key": "inner", "outputPath": "sub", "passThrough": True})
    last = table("'r2'", "", field="sub.outcome", name="Last")
    found = evaluate(chain(table("", name="First", passThrough=True), sub, last), {"x": 1}, inner=inner)
    assert ("First/r1", "Inner/r2", "Last/r1") == found.matched_rules


def test_sub_decision_can_be_looped_over_a_list() -> None:
    """A decision node in loop mode decides for each item, and names the rules of each."""
    inner = chain(table("> 5", "", field="amount", name="Inner"))
    loop = {"key": "inner", "inputField": "facts.items", "outputPath": "subs", "executionMode": "loop"}
    last = expression(("outcome", "subs[1].outcome"))
    found = evaluate(
        chain(node("Sub", "decisionNode", loop), last), {"items": [{"amount": 1}, {"amount": 9}]}, inner=inner
    )
    assert ("r1", ("Inner/r2", "Inner/r1")) == (found.outcome, found.matched_rules)


def test_long_chains_of_sub_decisions_are_evaluated() -> None:
    """Sub-decisions may nest deeper than zen allows by default."""
    documents = {f"d{i}": chain(node("Sub", "decisionNode", {"key": f"d{i + 1}"})) for i in range(20)}
    documents["d20"] = chain(expression(("outcome", "'deep'")))
    first = documents.pop("d0")
    assert "deep" == evaluate(first, {}, **documents).outcome


def test_decision_without_outcome_is_no_result() -> None:
    """A table without a rule that matches gives no outcome, which is an error and no default."""
    with pytest.raises(InvalidResult):
        evaluate(chain(table("> 5")), {"x": 1})


def test_list_as_result_is_no_result() -> None:
    """A collecting table as the last node gives a list, which is no result."""
    with pytest.raises(InvalidResult):
        evaluate(chain(table("", hitPolicy="collect")), {"x": 1})


@pytest.mark.parametrize("fact", [None, "10", True, [10], {}])
@pytest.mark.parametrize("cell", ["> 5", "[1..10]", "> facts.limit"])
def test_cell_that_fails_fails_the_decision(cell: str, fact: Any) -> None:
    """A fact of a type that a cell can't order does not fall through to the next rule (kafbat/kafka-ui#1922)."""
    with pytest.raises(PolicyFailed, match="Table/r1"):
        evaluate(chain(table(cell, "")), {"x": fact, "limit": 5})


NUMBERS = st.one_of(st.integers(-(2**53) + 1, 2**53 - 1), st.floats(-1e15, 1e15).map(lambda x: round(x, 6)))
LITERALS = {
    "number": NUMBERS.map(lambda number: f"{abs(number):.6f}" if isinstance(number, float) else str(number)),
    "text": st.sampled_from(["'a'", '"b"', "''", "'2026-01-01'", "'> 5'", "'a, b'"]),
    "boolean": st.sampled_from(["true", "false"]),
}
VALUES = {"number": NUMBERS, "text": st.text(max_size=5) | st.sampled_from(["a", "b", "now"]), "boolean": st.booleans()}
CELLS = (
    *("{}", " {} ", "{}, {}", "{},{},{}", "in [{}]", "not in [{}, {}]", "== {}", "!= {}", "> {}", "<= {}", ">= {}"),
    *("[{}..{}]", "({}..{})", "[{} .. {})", "not {}", "{} or {}", "$ == {}", "> {} and < {}"),
)


@pytest.mark.parametrize("kind", ["number", "text", "boolean"])
@given(data=st.data())
@settings(deadline=None)
def test_cell_called_plain_never_fails_on_its_kind(kind: str, data: st.DataObject) -> None:
    """Rows that are passed over, as nothing in them can fail, are of cells that zen has no error for."""
    cell = data.draw(st.sampled_from(CELLS))
    text = cell.format(*(data.draw(LITERALS[kind]) for _ in range(cell.count("{}"))))
    plain_kind = jdm_expression.plain_kind(text)
    assert plain_kind in (None, kind)
    if plain_kind is not None:
        result = jdm_expression.compiled(text, unary=True).evaluate({"$": data.draw(VALUES[kind])})
        assert isinstance(result, bool)


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        ("> 10_000", "number"),
        ("[1..10)", "number"),
        ("'a', 'b'", "text"),
        ("not in ['a', 'b']", "text"),
        ("true", "boolean"),
        ("> 'b'", None),
        ("'a', > 'b'", None),
        ("'a', 5", None),
        ("> 5 or > 'b'", None),
        ("> facts.limit", None),
        ("contains($, 'a')", None),
        ("null", None),
    ],
)
def test_cell_is_plain_where_it_compares_with_literals_of_one_kind(cell: str, kind: str | None) -> None:
    """Only what is known never to fail is passed over."""
    assert kind == jdm_expression.plain_kind(cell)


def test_cell_that_fails_after_the_match_is_not_reached() -> None:
    """A first-hit table judges no rule after the one that matched."""
    assert "r1" == evaluate(chain(table("null", "> 5", "")), {"x": None}).outcome


def test_cell_is_not_reached_after_one_that_does_not_match() -> None:
    """Cells of a row are judged from left to right, up to the first that doesn't match."""
    two = table("'a'", "")
    two["content"]["inputs"].append({"id": "d", "name": "Y", "field": "facts.y"})
    two["content"]["rules"][0]["d"] = "> 5"
    two["content"]["rules"][1]["d"] = ""
    assert "r2" == evaluate(chain(two), {"x": "b", "y": None}).outcome


def test_column_that_fails_fails_the_decision() -> None:
    """A column's expression that can't be evaluated fails the decision."""
    with pytest.raises(PolicyFailed, match="Table/r1"):
        evaluate(chain(table("> 5", "", field="facts.x + 1")), {"x": "a"})


@pytest.mark.parametrize("field", ["y = facts.x; y", "facts.x ?? 0", " facts.x ", "facts['x']"])
def test_column_may_be_any_expression(field: str) -> None:
    """Columns' values are found whatever their expressions are, and each by itself."""
    two = table("> 5", "", field=field)
    two["content"]["inputs"].append({"id": "d", "name": "Y", "field": "y"})
    two["content"]["rules"][0]["d"] = ""
    two["content"]["rules"][1]["d"] = "null"
    assert ["r1", "r2"] == [evaluate(chain(two), {"x": x}).outcome for x in (6, 5)]


def test_column_may_be_an_assignment() -> None:
    """A column whose expression assigns can be published, and then is loaded and looked up too."""
    assert "r2" == evaluate(chain(table("5", "", field="y = facts.x")), {"x": 6}).outcome


def test_output_that_fails_fails_the_decision() -> None:
    """A rule that matches but whose output can't be evaluated fails the decision."""
    failing = table("> 5", "")
    failing["content"]["rules"][0]["o"] = "upper(facts.y)"
    with pytest.raises(PolicyFailed, match="Table/r1"):
        evaluate(chain(failing), {"x": 6, "y": None})


def test_error_in_a_sub_decision_fails_the_decision() -> None:
    """A rule that fails inside a sub-decision fails the whole decision."""
    with pytest.raises(PolicyFailed, match="Inner/r1"):
        evaluate(chain(node("Sub", "decisionNode", {"key": "inner"})), {}, inner=chain(table("> 5", "", name="Inner")))


def test_expression_that_fails_fails_the_decision() -> None:
    """An expression node's error fails the decision, told without a backtrace."""
    with pytest.raises(PolicyFailed) as caught:
        result_of("facts.x + 1", {"x": "a"})
    assert "Stack backtrace" not in str(caught.value)


def test_switch_follows_its_condition() -> None:
    """A switch takes the branch of the first condition that holds."""
    document = switch("facts.x > 5")
    assert ("yes", "no") == (evaluate(document, {"x": 6}).outcome, evaluate(document, {"x": 5}).outcome)


@pytest.mark.parametrize("condition", ["facts.x > 5", "facts.x", "facts.y"])
def test_condition_that_is_not_true_or_false_fails_the_decision(condition: str) -> None:
    """A switch whose condition fails, or gives neither true nor false, doesn't take its default branch."""
    with pytest.raises(PolicyFailed, match="Switch/if"):
        evaluate(switch(condition), {"x": "a"})


def test_division_by_zero_is_null() -> None:
    """A division by zero is null, which is left out of the outputs and fails the decision where it is ordered."""
    assert result_of("(1 / facts.x) == null", {"x": 0}) is True
    assert {} == evaluate(chain(expression(("outcome", "'done'"), ("share", "1 / facts.x"))), {"x": 0}).outputs
    with pytest.raises(PolicyFailed):
        evaluate(chain(table("> 5", "", field="1 / facts.x")), {"x": 0})


@pytest.mark.parametrize("fact", [1e-30, -1e-29, [1.5e-40]])
def test_fact_below_the_precision_fails_the_decision(fact: Any) -> None:
    """A number that zen would take for 0 fails the decision."""
    with pytest.raises(PolicyFailed, match="decimal places"):
        evaluate(chain(table("> 0", "")), {"x": fact})


def test_largest_numbers_are_exact() -> None:
    """2^53-1 and its negative come through unchanged."""
    assert 2**53 - 1 == result_of("facts.x", {"x": 2**53 - 1})
    assert 1 - 2**53 == result_of("facts.x", {"x": 1 - 2**53})


CLOCK_READERS = [
    "d()",
    "d('now')",
    "d('UTC')",
    "d(facts.x)",
    "d ( facts.x )",
    "d('2026-01-01').isBefore(facts.x)",
    "facts.x.isToday()",
    "rand(5)",
    "`${rand(5)}`",
    "map([1], rand(#))",
    "date('now')",
    'time("now")',
    "year('now')",
    "startOf('now', 'day')",
    "keys(facts)",
    "values(facts)",
]


@pytest.mark.parametrize("text", CLOCK_READERS)
def test_impure_expression_is_refused(text: str) -> None:
    """What reads the clock or the time zone, is random, or has no defined order is refused, wherever it stands."""
    cell = table("", "")
    cell["content"]["rules"][0]["o"] = text
    for document in (chain(expression(("outcome", text))), chain(cell), chain(table("", field=text)), switch(text)):
        assert any("must not call" in rule for _, rule in faults(document)), document


def test_names_in_texts_are_not_calls() -> None:
    """A text that mentions a refused function is only a text."""
    assert [] == faults(chain(expression(("outcome", "'rand(5) ' + \"d()\" + `now()`"))))


@pytest.mark.parametrize(
    "text",
    [
        "date(facts.x)",
        "date (facts.x)",
        "time(facts.x)",
        "year(lower(facts.upper))",
        "date(`now`)",
        "dayOfWeek('n' + 'ow')",
        "endOf(facts.x, 'day')",
        "map([facts.x], date(#))",
        "`${dateString(facts.x)}`",
        "date(facts.list[0])",
    ],
)
def test_clock_word_that_arrives_as_a_fact_fails_the_decision(text: str) -> None:
    """The text "now" in a date function fails the evaluation and does not read the clock, however it came about."""
    facts = {"x": "now", "upper": "NOW", "list": ["now"]}
    with pytest.raises(PolicyFailed):
        result_of(text, facts)
    with pytest.raises(PolicyFailed):
        evaluate(chain(table("> 5", "", field=text)), facts)


def test_guarded_date_functions_give_what_they_gave() -> None:
    """The guard changes nothing for any other text."""
    facts = {"at": "2026-03-01T21:30:00+09:00", "day": "2026-03-01"}
    expected = {
        "date(facts.at)": 1772368200,
        "date(facts.day)": 1772323200,
        "year(facts.day) * 100 + monthOfYear(facts.day)": 202603,
        "startOf(facts.at, 'month')": 1772323200,
        "map([facts.day], dayOfMonth(#))": [1],
        "date(decision.time) - duration('90d')": 1764590400,
        "weekdayString(facts.day) + `-${monthString(facts.day)}`": "Sun-Mar",
    }
    assert expected == {text: result_of(text, facts) for text in expected}


@pytest.mark.parametrize("kind", ["functionNode", "customNode", "httpNode", "", None])
def test_node_that_can_reach_outside_is_refused(kind: str | None) -> None:
    """Function nodes, custom nodes and unknown ones are refused, named with their policy and node."""
    outside = {**node("Call", "functionNode", {"source": "export const handler = () => ({})"}), "type": kind}
    [(field, rule)] = faults(chain(outside))
    assert "policies/p/Call" == field
    assert f"must not be a {kind}" in rule


@pytest.mark.parametrize("cell", ["> ", "foo(1)", "> 'b'", "not null", "1 +", "'open", "len()", "$.a"])
def test_cell_that_cannot_hold_is_refused(cell: str) -> None:
    """A cell that doesn't compile or can't be true for a value of any type is refused, named by row and column."""
    assert ["policies/p/Table/row 2 (r2)/column X"] == [field for field, _ in faults(chain(table("", cell)))]


@pytest.mark.parametrize("cell", ["'a', 'b'", "> 5 and < 7", "not in ['a']", "$ != null", "[1..3)", "true", "-5", ""])
def test_cell_in_any_unary_form_is_accepted(cell: str) -> None:
    """All forms of cells that zen knows can be published."""
    assert [] == faults(chain(table(cell)))


def test_column_with_values_of_two_types_is_refused() -> None:
    """A column that is compared with numbers in one row and texts in another can't be type-checked."""
    [(field, rule)] = faults(chain(table("> 5", "'high'")))
    assert ("policies/p/Table/column X", True) == (field, "one type" in rule)


@pytest.mark.parametrize("text", ["[" * 50_000 + "]" * 50_000, "(" * 16_385])
def test_expression_that_zen_may_not_survive_is_refused(text: str) -> None:
    """Deep enough, an expression takes the process down with it: none may be so long."""
    assert [("policies/p/Sum/outcome", "must have 16384 characters at most")] == faults(
        chain(expression(("outcome", text)))
    )


@pytest.mark.parametrize("text", ["[" * 8_192 + "]" * 8_192, "(" * 8_191 + "01" + ")" * 8_191])
def test_longest_expressions_are_survived(text: str) -> None:
    """What is as long and as deep as it may be is compiled and evaluated."""
    policy_jdm.Engine().prepare(policy_jdm.bundle("p", {"p": chain(expression(("outcome", text)))}))
    assert [] == faults(chain(expression(("outcome", text))))


@pytest.mark.parametrize("literal", ["9007199254740992", "1e16", "0.00000000000000000000000000001", "1e-30", "1e40"])
def test_number_that_zen_cannot_hold_is_refused(literal: str) -> None:
    """Literals past 2^53-1 or with more than 28 decimal places are refused."""
    assert [] != faults(chain(expression(("outcome", literal))))


@pytest.mark.parametrize("literal", ["9007199254740991", "1e-28", "1.5e3", "10_000"])
def test_number_that_zen_holds_is_accepted(literal: str) -> None:
    """Literals up to the limits can be published."""
    assert [] == faults(chain(expression(("outcome", literal))))


def test_template_with_an_object_is_refused() -> None:
    """A template whose end could be read in two ways is refused."""
    assert [] != faults(chain(expression(("outcome", "`${ {a: 1} }`"))))


@pytest.mark.parametrize("name", ["facts", "facts.x", "decision.time", "$nodes"])
def test_node_that_overwrites_the_input_is_refused(name: str) -> None:
    """No node can write what the policy's input is."""
    assert [f"policies/p/Sum/{name}"] == [field for field, _ in faults(chain(expression((name, "1"))))]
    assert [] != faults(chain(table("", outputPath=name)))


@pytest.mark.parametrize("text", ["$nodes.In.facts.x > 1", "$root.facts.x > 1"])
def test_rule_that_reads_other_nodes_is_refused(text: str) -> None:
    """Rules read their own input only, so that they can be evaluated again."""
    assert [] != faults(chain(table("", field=text)))
    assert [] != faults(switch(text))
    assert [] == faults(chain(expression(("outcome", "$nodes.In.facts.x"))))


def test_table_without_a_cell_is_refused() -> None:
    """A rule that lacks a column's cell would never match in zen."""
    lacking = table("", "")
    del lacking["content"]["rules"][1]["c"]
    assert ["policies/p/Table/row 2 (r2)/column X"] == [field for field, _ in faults(chain(lacking))]


def test_ambiguous_names_are_refused() -> None:
    """Rule ids are unique in a table, and names of nodes in a document, so that matched rules can be told apart."""
    twice = table("", "")
    twice["content"]["rules"][1]["_id"] = "r1"
    assert ["policies/p/Table/row 1", "policies/p/Table/row 2"] == [field for field, _ in faults(chain(twice))]
    other = {**table(""), "id": "other"}
    assert ["policies/p/Table"] == [field for field, _ in faults(chain(table(""), other))]


def test_table_that_loops_is_refused() -> None:
    """A table in loop mode is refused, since zen doesn't tell which items matched nothing."""
    assert [] != faults(chain(table("", executionMode="loop", inputField="facts.items")))


def test_schema_in_a_node_is_refused() -> None:
    """The operation's facts schema is the one contract."""
    with_schema = json.loads(chain(expression(("outcome", "'x'"))))
    with_schema["nodes"][0]["content"]["schema"] = "{}"
    assert ["policies/p/In"] == [field for field, _ in faults(json.dumps(with_schema))]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "1",
        '{"nodes": []}',
        '{"nodes": [], "edges": []}',
        '{"nodes": 1, "edges": []}',
        '{"nodes": [1], "edges": []}',
        '{"blocks": []}',
        '{"nodes": [{"type": "inputNode"}], "edges": []}',
        "[" * 100_000,
    ],
)
def test_text_that_is_no_graph_is_refused(text: str) -> None:
    """What isn't JSON or no graph that zen can load is refused, not crashed on."""
    assert ["policies/p"] == [field for field, _ in faults(text)]
    with pytest.raises(InvalidCatalog):
        policy_jdm.bundle("p", {"p": text})


PARTS: tuple[Any, ...] = (None, 0, 1.5, "", "x", [], {}, True, 10**30, [1], {"a": 1}, "first", "null")


def places(part: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Give where a document's parts stand."""
    for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
        yield (*path, key)
        yield from places(part[key], (*path, key))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_document_with_a_part_in_place_of_another_is_judged(data: st.DataObject) -> None:
    """Whatever is missing or of another kind is refused, or what is left can be loaded; nothing is crashed on."""
    whole = json.loads(chain(table("> 5", "'a', 'b'"), expression(("outcome", "'x'"))))
    whole["nodes"] += json.loads(switch("facts.x"))["nodes"] + [node("Sub", "decisionNode", {"key": "q"})]
    for _ in range(data.draw(st.integers(1, 2))):
        *above, last = data.draw(st.sampled_from(sorted(places(whole), key=repr)))
        around = functools.reduce(operator.getitem, above, whole)
        if data.draw(st.booleans()):
            del around[last]
        else:
            # A copy: the next part may be put into it.
            around[last] = copy.deepcopy(data.draw(st.sampled_from(PARTS)))
    documents = {"p": json.dumps(whole), "q": chain(expression(("outcome", "'x'")))}
    if not policy_jdm.check("p", documents):
        policy_jdm.Engine().prepare(policy_jdm.bundle("p", documents))


def test_graph_with_a_cycle_is_refused() -> None:
    """Nodes that lead back to themselves are refused."""
    looping = json.loads(chain(table("")))
    looping["edges"].append(edge("table", "table"))
    assert ["policies/p"] == [field for field, _ in faults(json.dumps(looping))]


def sub(key: str) -> str:
    return chain(node("Sub", "decisionNode", {"key": key}))


def test_sub_decisions_that_are_missing_or_lead_back_are_reported() -> None:
    """Missing sub-decisions and cycles are violations of each policy in them."""
    documents = {"a": sub("b"), "b": sub("a"), "c": sub("nowhere"), "d": sub("b")}
    rules = {policy_id: [fault.rule for fault in policy_jdm.check(policy_id, documents)] for policy_id in documents}
    expected = {
        "a": ["must not use itself as a sub-decision, by way of b"],
        "b": ["must not use itself as a sub-decision, by way of a"],
        "c": ["must use JDM policies of this catalog only, not nowhere"],
        "d": [],
    }
    assert expected == rules
    for policy_id in documents:
        with pytest.raises(InvalidCatalog):
            policy_jdm.bundle(policy_id, documents)


def test_version_holds_exactly_what_it_reaches() -> None:
    """The content has the sub-decisions that are reached, also by way of others, and nothing else."""
    leaf = chain(expression(("outcome", "'x'")))
    documents = {"a": sub("b"), "b": sub("c"), "c": leaf, "unused": leaf}
    assert ["a", "b", "c"] == sorted(json.loads(policy_jdm.bundle("a", documents))["documents"])


def test_changed_sub_decision_changes_the_content() -> None:
    """Another sub-decision makes another version of the policies that use it."""
    before = {"a": sub("b"), "b": chain(table("> 5", ""))}
    after = before | {"b": chain(table("> 6", ""))}
    assert policy_jdm.bundle("a", before) != policy_jdm.bundle("a", after)


def test_what_only_the_editor_needs_changes_nothing() -> None:
    """Moving a node, or writing the JSON otherwise, makes the same content."""
    document = json.loads(chain(table("> 5", "")))
    moved = copy.deepcopy(document)
    moved["contentType"] = "application/vnd.gorules.decision"
    for one in moved["nodes"]:
        one["position"] = {"x": 500, "y": -1}
    moved["edges"][0]["type"] = "edge"
    same = json.dumps(dict(reversed(moved.items())), indent=4)
    assert policy_jdm.bundle("p", {"p": json.dumps(document)}) == policy_jdm.bundle("p", {"p": same})


def test_content_is_canonical() -> None:
    """The content is JSON with sorted keys and nothing between its parts, and keeps letters as they are."""
    content = policy_jdm.bundle("p", {"p": chain(expression(("outcome", "'gewährt'")))})
    expected = json.dumps(json.loads(content), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert (expected, True) == (content, "gewährt" in content)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"entry":"a","documents":{}}', '{"entry":"a","documents":{"a":{}}}']
)
def test_content_that_is_no_bundle_fails(content: str) -> None:
    """What isn't a version's content can't be prepared."""
    with pytest.raises(PolicyFailed):
        policy_jdm.Engine().prepare(content)


def test_prepared_policy_is_evaluated_many_times_alike() -> None:
    """One evaluation leaves nothing behind for the next."""
    prepared = policy_jdm.Engine().prepare(policy_jdm.bundle("p", {"p": switch("facts.x > 5")}))
    assert ["yes", "no", "yes"] == [evaluate_one(prepared, {"x": x}, DECISION).outcome for x in (6, 5, 6)]
