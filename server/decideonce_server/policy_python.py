"""Policies that are Python functions, called as `function(facts, decision)`; they may be async.

A version's content is the source of the function's module under a first line that names the entry point. It is taken
once, at publish, and evaluated from there: what is installed later changes no published version. What the module itself
imports is not part of the version; keep that to the standard library and to code that changes as carefully.

The guard in `check` catches mistakes, such as a clock that is read. It is no sandbox: a policy is trusted code.
"""

import ast
import asyncio
import contextlib
import copy
import importlib
import importlib.util
import inspect
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader
from types import CodeType, ModuleType
from typing import Any

from decideonce_server.errors import InvalidCatalog, Violation
from decideonce_server.policy import (
    EngineName,
    Evaluate,
    Evaluation,
    Input,
    PolicyError,
    PolicyFailed,
    RetryLater,
    evaluation_of,
)

NAME = f"python/{platform.python_version()}"

_ENTRY_POINT = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<function>[^\W\d]\w*)")
_HEADER = "# entry_point: "

_ARGUMENTS = 2

_REFUSED_MODULES = {
    **dict.fromkeys(("random", "numpy.random", "secrets", "uuid_utils"), "randomness"),
    **dict.fromkeys(("socket", "socketserver", "ssl", "select", "selectors"), "the network"),
    **dict.fromkeys(("urllib", "urllib3", "http", "ftplib", "imaplib", "poplib", "smtplib", "xmlrpc"), "the network"),
    **dict.fromkeys(("requests", "httpx", "aiohttp", "websockets", "grpc", "boto3", "botocore"), "the network"),
    **dict.fromkeys(("asyncpg", "psycopg", "psycopg2", "pymongo", "redis", "sqlalchemy", "sqlite3"), "a database"),
    **dict.fromkeys(("pathlib", "tempfile", "shutil", "glob"), "files"),
    **dict.fromkeys(("subprocess", "multiprocessing", "signal"), "the state of processes"),
    **dict.fromkeys(("importlib", "runpy"), "code that the guard does not see"),
}
_ALLOWED_MODULES = {"urllib.parse"}

_REFUSED_NAMES = {
    f"{module}.{attribute}": what
    for module, what, attributes in (
        ("time", "a clock", "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time"),
        ("time", "a clock", "process_time_ns thread_time thread_time_ns clock_gettime clock_gettime_ns"),
        ("time", "a clock", "gmtime localtime ctime"),
        ("datetime.datetime", "a clock", "now utcnow today"),
        ("datetime.date", "a clock", "today"),
        ("uuid", "randomness", "uuid1 uuid4 uuid6 uuid7 uuid8 getnode"),
        ("os", "randomness", "urandom getrandom"),
        ("os", "the environment", "environ environb getenv getenvb getcwd getpid uname"),
        ("os", "files", "open listdir scandir walk stat"),
        ("os", "the state of processes", "fork system popen"),
        ("asyncio", "the network", "open_connection open_unix_connection start_server start_unix_server"),
        ("asyncio", "the state of processes", "create_subprocess_exec create_subprocess_shell"),
    )
    for attribute in attributes.split()
}
_REFUSED_BUILTINS = {
    **dict.fromkeys(("open", "input"), "files"),
    **dict.fromkeys(("eval", "exec", "compile", "__import__"), "code that the guard does not see"),
}


@dataclass(frozen=True, slots=True)
class _Source:
    """A version's content, taken apart; line numbers in `text` are those of the author's file."""

    module: str
    function: str
    text: str


def read_source(entry_point: str) -> str:
    """Give the content of a version: the source, as installed beside the server, of "package.module:function".

    The packages above the module are imported to find it; the module itself is not.

    Raises:
        InvalidCatalog: the entry point is malformed, or no source is found for its module.
    """
    matched = _ENTRY_POINT.fullmatch(entry_point)
    if matched is None:
        raise _invalid_entry_point('must be "package.module:function"')
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(matched["module"])
    except Exception:  # noqa: BLE001 a package above the module may raise anything when it is imported
        raise _invalid_entry_point("must name a module whose packages can be imported where the server runs") from None
    if spec is None or not isinstance(spec.loader, InspectLoader):
        raise _invalid_entry_point("must name a module that is installed where the server runs")
    if spec.submodule_search_locations is not None:
        raise _invalid_entry_point("must name a module, not a package")
    try:
        text = spec.loader.get_source(matched["module"])
    except (ImportError, SyntaxError):
        text = None
    if text is None:
        raise _invalid_entry_point("must name a module whose source can be read as text")
    return f"{_HEADER}{entry_point}\n{text}"


def _invalid_entry_point(rule: str) -> InvalidCatalog:
    return InvalidCatalog([Violation("entry_point", rule)])


def check(content: str) -> list[Violation]:
    """Tell what keeps a content from being published: it can't be parsed or called, or is not pure.

    Each violation's field is the line in the module's source, like "line 12".
    """
    try:
        source = _source_of(content)
        tree = ast.parse(source.text)
    except SyntaxError as fault:
        return [Violation(f"line {fault.lineno or 1}", "must be valid Python")]
    except (PolicyFailed, ValueError, RecursionError):
        return [Violation("line 1", "must be valid Python")]
    guard = _PurityGuard()
    guard.visit(tree)
    return [*_function_violations(tree, source.function), *guard.violations]


def _function_violations(tree: ast.Module, function: str) -> list[Violation]:
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == function]
    if not found:
        return [Violation("line 1", f"must define the function {function} at the top level of its module")]
    arguments = found[-1].args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    takes_two = positional - len(arguments.defaults) <= _ARGUMENTS and (positional >= _ARGUMENTS or arguments.vararg)
    if not takes_two or None in arguments.kw_defaults:
        return [Violation(f"line {found[-1].lineno}", f"{function} must take two positional arguments")]
    return []


class _PurityGuard(ast.NodeVisitor):
    """Collects what a policy's source reads besides its facts, as far as names tell; scopes are not told apart."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._imported: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imported[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )
            self._refuse_import(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        for alias in node.names:
            if alias.name == "*" and any(name.startswith(f"{node.module}.") for name in _REFUSED_NAMES):
                self._refuse(node, f"{node.module}.*", "more than the guard can tell")
                continue
            self._imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            self._refuse_import(node, f"{node.module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        used = self._dotted(node)
        if used in _REFUSED_NAMES:
            self._refuse(node, used, _REFUSED_NAMES[used])
        elif used in _REFUSED_MODULES:
            self._refuse(node, used, _REFUSED_MODULES[used])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _REFUSED_BUILTINS:
            self._refuse(node, node.func.id, _REFUSED_BUILTINS[node.func.id])
        self.generic_visit(node)

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, "")
        if isinstance(node, ast.Attribute) and (above := self._dotted(node.value)):
            return f"{above}.{node.attr}"
        return ""

    def _refuse_import(self, node: ast.stmt, used: str) -> None:
        parts = used.split(".")
        prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        if not _ALLOWED_MODULES.isdisjoint(prefixes):
            return
        for prefix in prefixes:
            if what := _REFUSED_MODULES.get(prefix) or _REFUSED_NAMES.get(prefix):
                self._refuse(node, prefix, what)
                return

    def _refuse(self, node: ast.stmt | ast.expr, used: str, what: str) -> None:
        self.violations.append(Violation(f"line {node.lineno}", f"must not use {used}: it reads {what}"))


class Engine:
    """Evaluates policies that are Python functions; satisfies `policy.Engine`."""

    name: EngineName = "python"

    def prepare(self, content: str) -> Evaluate:
        """Execute a version's source once, as a module of its own, and make its function ready to be called.

        Raises:
            PolicyFailed: the source can't be executed here, or has no such function.
        """
        source = _source_of(content)
        module = ModuleType(source.module)
        module.__package__ = source.module.rpartition(".")[0]
        try:
            code: CodeType = compile(source.text, f"<{source.module}>", "exec", dont_inherit=True)
            _import_package(module.__package__)
            with _as_imported(module):
                exec(code, module.__dict__)  # noqa: S102 a policy is trusted code
        except BaseException as fault:  # noqa: BLE001 the policy's own code ran, and it may raise anything
            raise PolicyFailed(_failure_text(fault, source.module)) from None
        function = module.__dict__.get(source.function)
        if not callable(function):
            raise PolicyFailed(f"{source.module} has no function {source.function}")
        return _Prepared(module, function)


class _Prepared:
    def __init__(self, module: ModuleType, function: Callable[..., Any]) -> None:
        self._module = module
        self._function = function

    def __call__(self, inputs: Sequence[Input]) -> list[Evaluation | PolicyError]:
        """Evaluate each, one after another."""
        return [self._result_of(one) for one in inputs]

    def _result_of(self, one: Input) -> Evaluation | PolicyError:
        try:
            return self._evaluate(one)
        except PolicyError as error:
            return error

    def _evaluate(self, one: Input) -> Evaluation:
        """Evaluate on copies, so that a policy which changes its facts reaches no later evaluation."""
        try:
            with _as_imported(self._module):
                result = self._function(copy.deepcopy(one.facts), copy.deepcopy(one.decision))
                if inspect.iscoroutine(result):
                    result = asyncio.run(result)
        except RetryLater:
            raise
        except BaseException as fault:  # noqa: BLE001 the policy's own code ran, and it may raise anything
            raise PolicyFailed(_failure_text(fault, self._module.__name__)) from None
        return evaluation_of(result, NAME)


def _source_of(content: str) -> _Source:
    header, _, text = content.partition("\n")
    matched = _ENTRY_POINT.fullmatch(header.removeprefix(_HEADER))
    if matched is None or not header.startswith(_HEADER):
        raise PolicyFailed("the content does not start with its entry point")
    return _Source(matched["module"], matched["function"], text)


def _import_package(package: str) -> None:
    """Import a module's package before the module stands in for the installed one, which the package may import."""
    # A version can outlive its package. Only a relative import needs it then, and fails by itself.
    with contextlib.suppress(ModuleNotFoundError):
        if package:
            importlib.import_module(package)


@contextlib.contextmanager
def _as_imported(module: ModuleType) -> Iterator[None]:
    """Let a module be found under its name while its code runs (dataclasses ask for it), and no longer."""
    installed = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        if installed is None:
            sys.modules.pop(module.__name__, None)
        else:
            sys.modules[module.__name__] = installed


def _failure_text(fault: BaseException, module: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(fault.__traceback__) if frame.filename == f"<{module}>"]
    text = "".join(traceback.format_exception_only(fault)).strip()
    return f"line {lines[-1]}: {text}" if lines else text
