"""Rules of this repository that no linter has."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = [*sorted((ROOT / "server").rglob("*.py")), *sorted((ROOT / "client/decideonce").glob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

FUNCTION_LINES_MAX = 60


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_functions_are_short() -> None:
    """No function of the server or the client has more than 60 lines."""
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in OURS
        for node in functions(path)
        if node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert [] == long


def test_tests_say_what_they_show() -> None:
    """Every test has a docstring."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in TESTS
        for node in functions(path)
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert [] == silent


def test_tests_do_not_sleep() -> None:
    """Tests wait on something that happens, and never for a time."""
    sleeping = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep", "sleep")
    ]
    assert [] == sleeping


def test_only_the_status_interceptor_aborts() -> None:
    """One place aborts calls, and awaits it: an abort that isn't awaited lets the code behind it run.

    grpc/grpc#30306: what follows an abort goes on where its exception is swallowed.
    """
    aborts = []
    for path in OURS:
        tree = ast.parse(path.read_text())
        awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
        aborts += [
            (path.name, id(node) in awaited)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr.startswith("abort")
        ]
    assert [("status.py", True)] == aborts


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("decide", "import grpc", "use cases know neither gRPC nor SQL"),
        ("servicer", "import sqlalchemy", "only the ledger and outbox modules speak SQL"),
        ("values", "from decideonce_server import ledger", "imports point down"),
    ],
)
def test_a_planted_import_is_reported(tmp_path: Path, module: str, line: str, contract: str) -> None:
    """An import against the contracts fails the check, which names the contract."""
    copy = tmp_path / "project"
    copy.mkdir()
    for part in ("server", "client", "pyproject.toml"):
        subprocess.run(["cp", "-r", ROOT / part, copy], check=True)
    planted = copy / "server/decideonce_server" / f"{module}.py"
    planted.write_text(planted.read_text() + f"\n{line}\n")
    result = subprocess.run(
        [ROOT / ".venv/bin/lint-imports", "--no-cache"],
        cwd=copy,
        env={"PYTHONPATH": f"{copy}/client:{copy}/server"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 1 == result.returncode
    assert f"{contract} BROKEN" in result.stdout


def test_lock_files_name_no_index() -> None:
    """What is installed is locked with hashes, and no package index's address stands in it."""
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        text = path.read_text()
        assert "--hash=sha256:" in text
        assert "://" not in text


def test_examples_name_no_registry() -> None:
    """Nothing that the clients' examples and their drivers are built from says where packages come from."""
    named = {
        url
        for folder in ("docs/examples/clients", "tests/interop")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
        for url in re.findall(r"https?://[^\s\"'<>]+", path.read_text())
    }
    assert {"http://maven.apache.org/POM/4.0.0"} == named
