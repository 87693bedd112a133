"""Catalogs read from a directory."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from decideonce_server.catalog import (
    CatalogSource,
    Execution,
    OperationContract,
    PolicyExample,
    PolicySource,
    contract_violations,
    operation_contract,
)
from decideonce_server.catalog_dir import parse_duration, read_catalog
from decideonce_server.errors import InvalidCatalog

OPERATION = "operations/credit.approve-loan.yaml"
MINIMAL = "operation: credit.approve-loan\nfacts: {type: object}\n"
PYTHON = "engine: python\nentry_point: package.module:function\n"

Read = Callable[[dict[str, str | bytes]], CatalogSource]
Refused = Callable[[dict[str, str | bytes]], list[tuple[str, str]]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Give a reader of files, which are given by their paths in the directory."""

    def read_files(files: dict[str, str | bytes]) -> CatalogSource:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_catalog(tmp_path)

    return read_files


@pytest.fixture
def refused(read: Read) -> Refused:
    """Give a reader of files that must be refused; it gives the violations."""

    def read_refused(files: dict[str, str | bytes]) -> list[tuple[str, str]]:
        with pytest.raises(InvalidCatalog) as caught:
            read(files)
        return [(violation.field, violation.rule) for violation in caught.value.violations]

    return read_refused


def test_whole_catalog_is_read(read: Read) -> None:
    """Every setting, both kinds of policy and examples come out as they were written."""
    source = read(
        {
            OPERATION: """\
operation: credit.approve-loan
policy: loan-approval@3
execution: background
default_wait: 250ms
max_wait: 5m
lease: 1h
time_budget: 10m
max_attempts: 7
retention: 30d
tombstone_retention: forever
facts:
  type: object
  properties:
    country: {enum: [no, se]}
    amount: {minimum: 1.5}
""",
            "operations/a.yaml": "operation: a\npolicy: score\nfacts: {type: object}",
            "operations/README.md": "about",
            "policies/README.md": "about",
            "policies/loan-approval.json": '{"nodes": []}\n',
            "policies/score.yaml": PYTHON,
            "policies/score.examples.yaml": """\
- name: a rich one
  facts: {amount: 1.0, country: no, since: 2020-01-31}
  outcome: approved
  reasons: [RICH]
  outputs: {limit: 5}
  time: 2026-02-03T09:00:00.5+09:00
- {name: a bare one, facts: {}, outcome: no}
""",
        }
    )
    loan = OperationContract(
        operation="credit.approve-loan",
        policy_id="loan-approval",
        policy_version=3,
        execution=Execution.BACKGROUND,
        default_wait=timedelta(milliseconds=250),
        max_wait=timedelta(minutes=5),
        lease=timedelta(hours=1),
        time_budget=timedelta(minutes=10),
        max_attempts=7,
        retention=timedelta(days=30),
        tombstone_retention=None,
        facts_schema='{"properties":{"amount":{"minimum":1.5},"country":{"enum":["no","se"]}},"type":"object"}',
    )
    a = operation_contract(operation="a", policy_id="score", facts_schema='{"type":"object"}')
    examples = (
        PolicyExample(
            name="a rich one",
            facts={"amount": 1, "country": "no", "since": "2020-01-31"},
            outcome="approved",
            reasons=("RICH",),
            outputs={"limit": 5},
            time=datetime(2026, 2, 3, microsecond=500_000, tzinfo=UTC),
        ),
        PolicyExample(name="a bare one", facts={}, outcome="no"),
    )
    policies = (
        PolicySource("loan-approval", "jdm", '{"nodes": []}\n'),
        PolicySource("score", "python", "package.module:function", examples),
    )
    assert CatalogSource(policies=policies, operations=(a, loan)) == source


@pytest.mark.parametrize(("execution", "wait"), [(Execution.INLINE, 2), (Execution.BACKGROUND, 0)])
def test_absent_settings_have_their_defaults(read: Read, execution: Execution, wait: int) -> None:
    """What a file leaves out is what catalog.proto documents."""
    (contract,) = read({OPERATION: f"{MINIMAL}execution: {execution}\n"}).operations
    expected = OperationContract(
        operation="credit.approve-loan",
        policy_id=None,
        policy_version=None,
        execution=execution,
        default_wait=timedelta(seconds=wait),
        max_wait=timedelta(seconds=30),
        lease=timedelta(seconds=30),
        time_budget=timedelta(seconds=1),
        max_attempts=5,
        retention=None,
        tombstone_retention=None,
        facts_schema='{"type":"object"}',
    )
    assert expected == contract
    assert [] == contract_violations(contract)


def test_max_wait_follows_default_wait(read: Read) -> None:
    """An operation that waits long by default may wait as long at most."""
    (contract,) = read({OPERATION: MINIMAL + "default_wait: 2m"}).operations
    assert timedelta(minutes=2) == contract.max_wait


def test_order_of_keys_makes_no_other_schema(read: Read) -> None:
    """Files that differ in the order of keys only give one text, so that no new version is made."""
    texts = [
        read({OPERATION: "operation: credit.approve-loan\nfacts: " + facts}).operations[0].facts_schema
        for facts in ("{type: object, title: é, minProperties: 1}", "{minProperties: 1, title: é, type: object}")
    ]
    assert [texts[0]] * 2 == texts
    assert {"type": "object", "title": "é", "minProperties": 1} == json.loads(texts[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0s", timedelta(0)),
        ("250ms", timedelta(milliseconds=250)),
        ("2s", timedelta(seconds=2)),
        ("5m", timedelta(minutes=5)),
        ("24h", timedelta(days=1)),
        ("999999999d", timedelta(days=999999999)),
        *((text, None) for text in ("", "2", "s", "-1s", "1.5s", "01s", "1 s", "1S", "1w", "1h30m", "forever", "1s\n")),
        ("1000000000d", None),
    ],
)
def test_durations_are_exact(text: str, expected: timedelta | None) -> None:
    """A duration is a whole number and one unit."""
    assert expected == parse_duration(text)


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("default_wait: 31s\nmax_wait: 30s", "default_wait"),
        ("default_wait: 6m", "default_wait"),
        ("max_wait: 301s", "max_wait"),
        ("lease: 99ms", "lease"),
        ("lease: 61m", "lease"),
        ("time_budget: 9ms", "time_budget"),
        ("time_budget: 601s", "time_budget"),
        ("max_attempts: 0", "max_attempts"),
        ("max_attempts: 101", "max_attempts"),
        ("max_attempts: 2.5", "max_attempts"),
        ("retention: 999ms", "retention"),
        ("retention: 36501d", "retention"),
        ("tombstone_retention: 0s", "tombstone_retention"),
        ("lease: forever", "lease"),
        ("lease: 30", "lease"),
        ("lease: 1w", "lease"),
        ("execution: later", "execution"),
        ("policy: Loan", "policy"),
        ("policy: loan@", "policy"),
        ("policy: loan@0", "policy"),
        ("policy: loan@2147483648", "policy"),
        ("colour: blue", "colour"),
        ("1: blue", "1"),
    ],
)
def test_setting_out_of_bounds_is_refused(refused: Refused, line: str, setting: str) -> None:
    """Each setting that is malformed, unknown or out of its bounds is named."""
    assert [f"{OPERATION}#/{setting}"] == [field for field, _ in refused({OPERATION: MINIMAL + line})]


@pytest.mark.parametrize(
    "line",
    [
        "default_wait: 0s",
        "max_wait: 5m",
        "max_wait: 0s\ndefault_wait: 0s",
        "lease: 100ms",
        "lease: 1h",
        "time_budget: 10ms",
        "time_budget: 10m",
        "max_attempts: 1",
        "max_attempts: 100",
        "retention: 1s",
        "tombstone_retention: 36500d",
        "retention: forever",
    ],
)
def test_setting_at_its_bound_is_taken(read: Read, line: str) -> None:
    """Bounds are included."""
    assert 1 == len(read({OPERATION: MINIMAL + line}).operations)


@pytest.mark.parametrize("missing", ["operation", "facts"])
def test_required_setting_is_named(refused: Refused, missing: str) -> None:
    """An operation has a name and a facts schema."""
    text = "".join(line for line in MINIMAL.splitlines(keepends=True) if not line.startswith(missing))
    assert [(f"{OPERATION}#", f'must satisfy required: "{missing}"')] == refused({OPERATION: text})


def test_contract_violations_name_the_operation() -> None:
    """Without a file, a contract's faults are told by its operation's name."""
    contract = operation_contract(operation="A b", facts_schema="{}", policy_version=0, max_attempts=0)
    expected = [
        "operations/A b/operation",
        "operations/A b/policy",
        "operations/A b/policy",
        "operations/A b/max_attempts",
    ]
    assert expected == [violation.field for violation in contract_violations(contract)]


def test_all_violations_are_told_at_once(refused: Refused) -> None:
    """Faults in several files, and several in one, come in one refusal."""
    files = {
        OPERATION: MINIMAL + "policy: nowhere\nlease: 1ms\nmax_attempts: 0\n",
        "operations/other.yaml": MINIMAL,
        "operations/broken.yaml": "a: [",
        "operations/notes.txt": "",
        "operations/Bad.yaml": "",
        "operations/deep/a.yaml": "",
        "policies/p.json": "{}",
        "policies/p.yaml": PYTHON,
        "policies/q.yaml": "engine: lua\nentry_point: q",
        "policies/orphan.examples.yaml": "[]",
        "policies/x.yml": "",
    }
    expected = {
        f"{OPERATION}#/policy",
        f"{OPERATION}#/lease",
        f"{OPERATION}#/max_attempts",
        "operations/other.yaml#/operation",
        "operations/broken.yaml:1:5",
        "operations/notes.txt",
        "operations/Bad.yaml",
        "operations/deep",
        "policies/p.yaml",
        "policies/q.yaml#/engine",
        "policies/q.yaml#/entry_point",
        "policies/orphan.examples.yaml",
        "policies/x.yml",
    }
    assert expected == {field for field, _ in refused(files)}


def test_held_version_may_outlive_its_file(read: Read) -> None:
    """An operation can hold a version of a policy that the directory has no longer."""
    (contract,) = read({OPERATION: MINIMAL + "policy: gone@2"}).operations
    assert ("gone", 2) == (contract.policy_id, contract.policy_version)


def test_directory_without_operations_is_refused(tmp_path: Path) -> None:
    """A wrong directory is no empty catalog, which would take every operation away."""
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InvalidCatalog) as caught:
            read_catalog(directory)
        assert ["operations"] == [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\na: 2", ":2:1"),
        ("a: &x [1]\nb: *x", ":2:4"),
        ("a: &x [*x]", ":1:8"),
        ("a: !!set {x}", ":1:4"),
        ("a: !!timestamp 2020-01-01", ":1:4"),
        ("a: !!python/object:os.system x", ":1:4"),
        ("a: 1\n---\nb: 2", ":2:1"),
        ("? {a: 1}\n: 3", ":1:3"),
        ("a: " + "9" * 5000, ""),
        ("\x01", ""),
        (b"\xff", ""),
        ("", "#"),
        ("[]", "#"),
        ('a: "\\ud800"', "#/a"),
        ("a: .nan", "#/a"),
        ("a: [-.inf]", "#/a/0"),
        ("1: 2", "#/1"),
        ("a: {2020-01-01: 1, true: 2}", "#/a/True"),
    ],
)
def test_what_is_no_plain_yaml_is_refused(refused: Refused, text: str | bytes, place: str) -> None:
    """A file is one YAML 1.2 document that JSON could say, and the first place where it isn't is told."""
    assert [OPERATION + place] == [field for field, _ in refused({OPERATION: text})]


def test_yaml_directive_brings_no_old_rules(read: Read) -> None:
    """A file can't ask for YAML 1.1, where no is false."""
    text = "%YAML 1.1\n---\n" + MINIMAL.replace("{type: object}", "{type: object, const: {a: no, on: 1:30, <<: =}}")
    (contract,) = read({OPERATION: text}).operations
    assert {"a": "no", "on": "1:30", "<<": "="} == json.loads(contract.facts_schema)["const"]


@pytest.mark.parametrize(
    ("example", "place"),
    [
        ("{name: x, facts: {}}", "#/0"),
        ("{name: '', facts: {}, outcome: a}", "#/0/name"),
        ("{name: x, facts: {}, outcome: ''}", "#/0/outcome"),
        ("{name: x, facts: [], outcome: a}", "#/0/facts"),
        ("{name: x, facts: {a: [9007199254740992]}, outcome: a}", "#/0/facts/a/0"),
        ('{name: x, facts: {a: "\\0"}, outcome: a}', "#/0/facts/a"),
        ("{name: x, facts: {}, outcome: a, reasons: [1]}", "#/0/reasons/0"),
        ("{name: x, facts: {}, outcome: a, time: 2026-01-01}", "#/0/time"),
        ("{name: x, facts: {}, outcome: a, time: 2016-12-31T23:59:60Z}", "#/0/time"),
        ("{name: x, facts: {}, outcome: a, outcomes: b}", "#/0/outcomes"),
    ],
)
def test_malformed_example_is_refused(refused: Refused, example: str, place: str) -> None:
    """An example has the form that ApplyCatalog takes, its facts the values that requests may have."""
    path = "policies/p.examples.yaml"
    files: dict[str, str | bytes] = {OPERATION: MINIMAL, "policies/p.json": "{}", path: f"- {example}\n"}
    assert [path + place] == [field for field, _ in refused(files)]


@pytest.mark.parametrize("entry_point", ["module", "module:", ":function", "a-b:c", "a.b:c.d", "a:b()", "../a:b"])
def test_malformed_entry_point_is_refused(refused: Refused, entry_point: str) -> None:
    """An entry point is a module's dotted name and a function's name."""
    files: dict[str, str | bytes] = {
        OPERATION: MINIMAL,
        "policies/p.yaml": f"engine: python\nentry_point: '{entry_point}'\n",
    }
    assert ["policies/p.yaml#/entry_point"] == [field for field, _ in refused(files)]


def test_refusal_quotes_no_example(refused: Refused) -> None:
    """What an example's facts say is not repeated in a refusal."""
    path = "policies/p.examples.yaml"
    text = "- {name: s3cret, facts: {a: s3cret, a: s3cret}, outcome: a}"
    assert "s3cret" not in str(refused({OPERATION: MINIMAL, "policies/p.json": "{}", path: text}))
