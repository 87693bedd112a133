"""Policies that are Python functions: their source at publish, the guard, and how they are run."""

import sys
from pathlib import Path
from typing import Any

import pytest

from decideonce_server import policy_python
from decideonce_server.errors import InvalidCatalog, Violation
from decideonce_server.policy import Evaluation, PolicyFailed, RetryLater
from decideonce_server.values import Json
from harness import evaluate_one

HEADER = "# entry_point: shop.rules:decide\n"
APPROVED = "def decide(facts, decision):\n    return {'outcome': 'APPROVED'}\n"


def evaluate(source: str, facts: dict[str, Json] | None = None) -> Evaluation:
    return evaluate_one(policy_python.Engine().prepare(HEADER + source), facts or {}, {})


def rules(source: str) -> list[tuple[str, str]]:
    return [(violation.field, violation.rule) for violation in policy_python.check(HEADER + source)]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a directory on the module path, whose modules are forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def test_source_is_read_and_not_executed(installed: Path) -> None:
    """The content is the module's source under its entry point, and the module doesn't run."""
    (installed / "stockroom").mkdir()
    (installed / "stockroom/__init__.py").touch()
    (installed / "stockroom/rules.py").write_text("raise SystemExit('größer')\n", encoding="utf-8")
    content = policy_python.read_source("stockroom.rules:decide")
    assert content == "# entry_point: stockroom.rules:decide\nraise SystemExit('größer')\n"
    assert "stockroom.rules" not in sys.modules


def test_a_version_outlives_what_is_installed(installed: Path) -> None:
    """A version is evaluated from its stored content, whatever the installed module became since."""
    module = installed / "stockroom_rules.py"
    module.write_text("def decide(facts, decision):\n    return {'outcome': 'FIRST'}\n")
    first = policy_python.read_source("stockroom_rules:decide")
    module.write_text("def decide(facts, decision):\n    return {'outcome': 'SECOND'}\n# changed\n")
    assert "SECOND" in policy_python.read_source("stockroom_rules:decide")
    module.unlink()
    assert "FIRST" == evaluate_one(policy_python.Engine().prepare(first), {}, {}).outcome


@pytest.mark.parametrize(
    "entry_point",
    ["", "rules", "rules:", ":decide", "a.b:c.d", "a..b:c", "a-b:c", "rules:decide\nimport os", ".rules:decide"],
)
def test_a_malformed_entry_point_is_refused(entry_point: str) -> None:
    """An entry point is "package.module:function" and nothing else."""
    with pytest.raises(InvalidCatalog) as caught:
        policy_python.read_source(entry_point)
    assert caught.value.violations == (Violation("entry_point", 'must be "package.module:function"'),)


@pytest.mark.parametrize(
    "entry_point",
    ["nowhere_to_be_found:decide", "nowhere.rules:decide", "broken.rules:decide", "json:dumps", "sys:exit"],
)
def test_a_module_without_readable_source_is_refused(installed: Path, entry_point: str) -> None:
    """A module that is absent, below a package that fails, a package itself, or built in can't be a version."""
    (installed / "broken").mkdir()
    (installed / "broken/__init__.py").write_text("1 / 0\n")
    (installed / "broken/rules.py").write_text(APPROVED)
    with pytest.raises(InvalidCatalog) as caught:
        policy_python.read_source(entry_point)
    assert [violation.field for violation in caught.value.violations] == ["entry_point"]


@pytest.mark.parametrize(
    ("source", "line", "used"),
    [
        ("import random\n", 1, "random"),
        ("import secrets as s\n", 1, "secrets"),
        ("from random import choice\n", 1, "random"),
        ("import socket\n", 1, "socket"),
        ("import urllib.request\n", 1, "urllib"),
        ("from urllib import request\n", 1, "urllib"),
        ("import http.client\n", 1, "http"),
        ("import requests\n", 1, "requests"),
        ("def f():\n    import httpx\n", 2, "httpx"),
        ("import numpy as np\nx = np.random.rand()\n", 2, "numpy.random"),
        ("import time\nx = time.time()\n", 2, "time.time"),
        ("import time as t\n\nx = t.time_ns()\n", 3, "time.time_ns"),
        ("from time import monotonic\n", 1, "time.monotonic"),
        ("import time\nclock = time.perf_counter\n", 2, "time.perf_counter"),
        ("from time import *\n", 1, "time.*"),
        ("import datetime\nx = datetime.datetime.now()\n", 2, "datetime.datetime.now"),
        ("import datetime as d\nx = d.date.today()\n", 2, "datetime.date.today"),
        ("from datetime import datetime\nx = datetime.utcnow()\n", 2, "datetime.datetime.utcnow"),
        ("from datetime import datetime as dt\nx = dt.today()\n", 2, "datetime.datetime.today"),
        ("from datetime import UTC, datetime\nx = datetime.now(UTC)\n", 2, "datetime.datetime.now"),
        ("from uuid import uuid4\n", 1, "uuid.uuid4"),
        ("import uuid\nx = uuid.uuid1().hex\n", 2, "uuid.uuid1"),
        ("import os\nx = os.environ['HOME']\n", 2, "os.environ"),
        ("import os\nx = os.environ.get('HOME')\n", 2, "os.environ"),
        ("import os.path\nx = os.getenv('HOME')\n", 2, "os.getenv"),
        ("from os import urandom\n", 1, "os.urandom"),
        ("x = open('/etc/hosts')\n", 1, "open"),
        ("x = __import__('random')\n", 1, "__import__"),
        ("import importlib\n", 1, "importlib"),
        ("import subprocess\n", 1, "subprocess"),
        ("import asyncio\nx = asyncio.open_connection('x', 1)\n", 2, "asyncio.open_connection"),
    ],
)
def test_what_is_not_pure_is_refused(source: str, line: int, used: str) -> None:
    """A source that reads more than its facts is refused once, with the line in the author's file and the name."""
    ((field, rule),) = rules(source + APPROVED)
    assert f"line {line}" == field
    assert rule.startswith(f"must not use {used}: it reads ")


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef wait():\n    time.sleep(1)\n",
        "import asyncio\nasync def wait():\n    await asyncio.sleep(1)\n",
        "import os\ndef leave():\n    os._exit(137)\n",
        "from datetime import datetime, timedelta\nx = datetime.fromisoformat\n",
        "from uuid import UUID, uuid5\nx = uuid5\n",
        "from urllib.parse import quote\n",
        "from urllib import parse\n",
        "import urllib.parse\nx = urllib.parse.quote('a')\n",
        "import decimal, typing, math, hashlib, json, dataclasses\n",
        "from . import tables\nfrom .random import choice\n",
        "class Clock:\n    def now(self): ...\nclock = Clock()\nx = clock.now()\n",
    ],
)
def test_what_is_pure_is_accepted(source: str) -> None:
    """The guard refuses nothing that a policy may use."""
    assert [] == rules(source + APPROVED)


@pytest.mark.parametrize(
    "signature",
    [
        "def decide(a, b)",
        "async def decide(a, b)",
        "def decide(a, b, /)",
        "def decide(*all)",
        "def decide(a, b, c=1, *, d=2)",
    ],
)
def test_functions_of_two_arguments_are_accepted(signature: str) -> None:
    """Sync or async, a function that can be called with two positional arguments will do."""
    assert [] == rules(f"{signature}:\n    return {{}}\n")


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ("\ndef decide(facts):\n    return {}\n", "line 2"),
        ("def decide(a, b, c):\n    return {}\n", "line 1"),
        ("def decide(a, b, *, c):\n    return {}\n", "line 1"),
        ("def other(a, b):\n    return {}\n", "line 1"),
        ("class Rules:\n    def decide(self, b):\n        return {}\n", "line 1"),
        ("decide = dict\n", "line 1"),
        ("\n\ndef decide(facts, decision)\n    return {}\n", "line 3"),
        ("x = '\0'\n", "line 1"),
    ],
)
def test_what_cannot_be_called_is_refused(source: str, field: str) -> None:
    """A source needs the function, at its top level, of two arguments, and valid Python around it."""
    assert [field] == [found for found, _ in rules(source)]


def test_content_without_an_entry_point_is_refused() -> None:
    """A content must start with its entry point."""
    assert [Violation("line 1", "must be valid Python")] == policy_python.check(APPROVED)


def test_an_async_policy_is_awaited() -> None:
    """A policy may be async; every call has an event loop of its own."""
    source = (
        "import asyncio\nasync def decide(facts, decision):\n    await asyncio.sleep(0)\n    return {'outcome': 'A'}\n"
    )
    prepared = policy_python.Engine().prepare(HEADER + source)
    assert ["A", "A"] == [evaluate_one(prepared, {}, {}).outcome for _ in range(2)]


def test_a_policy_that_changes_its_facts_changes_its_own_copy() -> None:
    """What a policy does to its facts reaches neither the caller nor the next evaluation."""
    source = (
        "def decide(facts, decision):\n"
        "    facts['list'].append(1)\n"
        "    return {'outcome': 'A', 'n': len(facts['list'])}\n"
    )
    prepared = policy_python.Engine().prepare(HEADER + source)
    facts: dict[str, Json] = {"list": []}
    assert [1, 1] == [evaluate_one(prepared, facts, {}).outputs["n"] for _ in range(2)]
    assert {"list": []} == facts


@pytest.mark.parametrize("way", ["def", "async def"])
@pytest.mark.parametrize(
    "error", ["SystemExit(0)", "KeyboardInterrupt()", "GeneratorExit()", "MemoryError()", "KeyError(1)"]
)
def test_whatever_a_policy_raises_is_a_failure(way: str, error: str) -> None:
    """Anything that a policy raises is PolicyFailed, with the line for its authors; it ends nothing else."""
    with pytest.raises(PolicyFailed, match=r"^line 2: "):
        evaluate(f"{way} decide(facts, decision):\n    raise {error}\n")


@pytest.mark.parametrize("way", ["def", "async def"])
def test_a_policy_may_ask_to_be_tried_again(way: str) -> None:
    """RetryLater passes as it is."""
    head = "from decideonce_server.policy import RetryLater\n"
    with pytest.raises(RetryLater, match="no rates yet"):
        evaluate(f"{head}{way} decide(facts, decision):\n    raise RetryLater('no rates yet')\n")


def test_a_source_that_fails_to_load_is_a_failure() -> None:
    """A module whose own code fails is PolicyFailed, with the line in its file."""
    with pytest.raises(PolicyFailed, match=r"^line 2: ZeroDivisionError"):
        evaluate("\n1 / 0\n")


def test_a_source_without_its_function_is_a_failure() -> None:
    """A content that lost its function can't be prepared."""
    with pytest.raises(PolicyFailed, match="has no function decide"):
        evaluate("decide = 1\n")


def test_a_source_runs_once() -> None:
    """What a module sets up is set up when it is prepared, and not again."""
    source = "n = [0]\nn[0] += 1\ndef decide(facts, decision):\n    return {'outcome': 'A', 'n': n[0]}\n"
    prepared = policy_python.Engine().prepare(HEADER + source)
    assert [1, 1] == [evaluate_one(prepared, {}, {}).outputs["n"] for _ in range(2)]


def test_two_versions_live_side_by_side() -> None:
    """Two versions of one module don't see each other, and neither stays among the imported modules."""
    contents = [HEADER + APPROVED.replace("APPROVED", outcome) for outcome in ("FIRST", "SECOND")]
    first, second = (policy_python.Engine().prepare(content) for content in contents)
    assert ["FIRST", "SECOND", "FIRST"] == [
        evaluate_one(prepared, {}, {}).outcome for prepared in (first, second, first)
    ]
    assert "shop.rules" not in sys.modules


def test_an_installed_module_is_left_alone(installed: Path) -> None:
    """Code of a stored version may import its neighbours, and what is installed under its name stays what it was."""
    (installed / "shop").mkdir()
    (installed / "shop/__init__.py").write_text("from shop.rules import decide\n")
    (installed / "shop/rules.py").write_text(APPROVED.replace("APPROVED", "INSTALLED"))
    (installed / "shop/tables.py").write_text("OUTCOME = 'FROM THE NEIGHBOUR'\n")
    stored = "from . import tables\ndef decide(facts, decision):\n    return {'outcome': tables.OUTCOME}\n"
    assert evaluate(stored).outcome == "FROM THE NEIGHBOUR"
    assert sys.modules["shop.rules"].decide({}, {}) == {"outcome": "INSTALLED"}


def test_a_module_finds_itself_while_it_runs() -> None:
    """Dataclasses with text annotations, which look their module up, work in a stored source."""
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport typing\n"
        "@dataclass\nclass Rate:\n    percent: typing.ClassVar[int] = 5\n    name: str = 'A'\n"
        "def decide(facts, decision):\n    return {'outcome': ' '.join(typing.get_type_hints(Rate))}\n"
    )
    assert evaluate(source).outcome == "percent name"
