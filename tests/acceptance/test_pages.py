"""What README and docs/ tell a reader to do is done, on a service with the example catalog."""

import asyncio
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from conftest import connect
from decideonce.v1.catalog_pb2_grpc import CatalogServiceStub
from decideonce_server.catalog_dir import read_catalog
from decideonce_server.catalog_wire import request_of
from decideonce_server.database import Database
from decideonce_server.outbox import Outbox
from decideonce_server.outbox_buckets import BUCKETS, BucketLeases
from harness import url_text
from pages import PAGES, ROOT, name_of, outputs, pattern, pieces, runs, script
from publishing import TOPIC, event_rows, plant

README = (ROOT / "README.md").read_text()
RUNNING = [page for page in PAGES if runs(page)]
SQL = [
    pytest.param(piece.text, id=name_of(page)) for page in PAGES for piece in pieces(page) if piece.mark == "execute"
]


@pytest.fixture(scope="module")
def catalog() -> tuple[dict, dict]:
    """Give none: the service has the example catalog."""
    return {}, {}


@pytest.fixture(scope="module")
def python_path(tmp_path_factory) -> Iterator[Path]:
    """Give a folder of modules that the service can publish, beside those of the example catalog."""
    folder = tmp_path_factory.mktemp("python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'catalog/python'}:{folder}")
        yield folder


@pytest.fixture(scope="module")
def flags(python_path) -> list[str]:
    """Give the flags of a service with the example catalog."""
    return ["--catalog", str(ROOT / "catalog")]


@pytest.fixture
def folder(tmp_path, python_path) -> Path:
    """Give a folder as the repository's is after `make setup`, for a reader to work in."""
    for part in ("catalog", ".venv", "docs"):
        (tmp_path / part).symlink_to(ROOT / part)
    (tmp_path / "python").symlink_to(python_path)
    return tmp_path


@pytest.fixture(scope="module")
def parked(stage) -> list[str]:
    """Give the ids of two parked events."""

    async def park() -> list[str]:
        connection, database = await connect(stage.url), Database(stage.url, pool_size=1)
        try:
            planted = [(await plant(connection, event_rows(TOPIC, count=1)))[0] for _ in range(2)]
            leases = BucketLeases(database, uuid.uuid4(), timedelta(seconds=60))
            await leases.hold()
            waiting = await Outbox(database).waiting(range(BUCKETS), 1000)
            events = [event for event in waiting if str(event.id) in planted]
            await Outbox(database).park(leases.holder, events, ["TOPIC_NOT_FOUND"] * 2)
            return planted
        finally:
            await connection.close()
            await database.close()

    return asyncio.run(park())


@pytest.fixture
def published(stage) -> None:
    """Publish the example catalog again, whatever a page before has published."""
    with grpc.insecure_channel(stage.service.address) as channel:
        request = request_of(read_catalog(ROOT / "catalog"), dry_run=False)
        CatalogServiceStub(channel).ApplyCatalog(request, metadata=[("authorization", f"Bearer {stage.token}")])


def test_setup_commands_are_two() -> None:
    """README has exactly two set-up commands, and they are targets of the Makefile."""
    assert ["make run", "make test"] == re.findall(r"^make \w+", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in ("run", "test"))


@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_commands_of_a_page_do_what_it_says(stage, folder, parked, published, page: Path) -> None:
    """Every command of a page runs as it stands, after those before it, and prints what the page shows."""
    found = pieces(page)
    for piece in found:
        if piece.mark == "file":
            path = folder / piece.argument
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(piece.text)
    environment = {
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
        "DECIDEONCE_SERVER": stage.service.address,
        "DECIDEONCE_TOKEN": stage.token,
        "DECIDEONCE_DATABASE_URL": url_text(stage.url),
        "EVENT_ID": parked[0],
        "OTHER_EVENT_ID": parked[1],
    }
    ran = subprocess.run(
        ["bash", "-e", "-c", script(found)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert 0 == ran.returncode, ran.stdout
    printed = outputs(ran.stdout)
    for i, piece in enumerate(found):
        if piece.mark == "output":
            assert pattern(piece.text).fullmatch(printed[i - 1]), printed[i - 1]


@pytest.mark.parametrize("statements", SQL)
async def test_statements_of_a_page_can_be_executed(stage, statements: str) -> None:
    """Every statement of a page is one that Postgres executes on a service's database."""
    connection = await connect(stage.url)
    try:
        await connection.execute(statements)
    finally:
        await connection.close()
