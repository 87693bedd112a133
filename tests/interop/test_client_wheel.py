"""The client as it is published: a wheel in an environment of its own."""

import json
import resource
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.interop

PROGRAM = """
from decideonce.testing import DecideonceServer, LostReply, Outcome
with DecideonceServer() as server:
    server.decides("test.echo", Outcome("DONE"))
    server.next(LostReply())
    with server.sync_client() as client:
        print(client.decide("test.echo", {"n": 1}).outcome)
"""

OLDEST = ["grpcio==1.72.1", "protobuf==6.30.0"]


def pip(*arguments: str) -> str:
    """Run pip, without asking whether it is new."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def used_s() -> float:
    """Tell how much of the processors' time this process's children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the built wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(ROOT / "client"))
    (wheel,) = directory.glob("decideonce-*.whl")
    return wheel


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Give the interpreter of an environment with nothing in it."""
    venv.create(tmp_path / "empty", with_pip=False)
    return tmp_path / "empty/bin/python"


def test_wheel_brings_little_and_is_quick(wheel: Path, python: Path) -> None:
    """The client brings grpcio and protobuf, with what these need themselves, within 5 s, and works with them."""
    # What is downloaded is there, and processors' time counts: networks and other programs aren't the client's doing.
    pip("download", "--quiet", "--dest", str(wheel.parent), str(wheel))
    begun = used_s()
    pip("--python", str(python), "install", "--no-index", "--find-links", str(wheel.parent), str(wheel))
    took_s = used_s() - begun
    installed = {one["name"] for one in json.loads(pip("--python", str(python), "list", "--format", "json"))}
    assert {"decideonce", "grpcio", "protobuf", "typing_extensions"} == installed
    assert took_s < 5
    assert "DONE\n" == subprocess.check_output([python, "-W", "error", "-c", PROGRAM], text=True)


def test_oldest_libraries_that_are_promised(wheel: Path, python: Path) -> None:
    """The client works with the oldest grpcio and protobuf that it says."""
    pip("--python", str(python), "install", "--quiet", str(wheel), *OLDEST)
    said = json.loads(pip("--python", str(python), "list", "--format", "json"))
    assert {"grpcio": "1.72.1", "protobuf": "6.30.0"}.items() <= {one["name"]: one["version"] for one in said}.items()
    assert "DONE\n" == subprocess.check_output([python, "-W", "error", "-c", PROGRAM], text=True)
