"""What the client package needs."""

import subprocess
import sys

# Nothing can be imported but Python's own modules, the client and what it depends on.
BLOCKER = """
import sys

ALLOWED = sys.stdlib_module_names | {"decideonce", "google", "grpc", "typing_extensions"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Blocker())
"""


def test_consumers_need_no_other_library() -> None:
    """The decoder and the inbox can be imported where there is only the client with grpcio and protobuf."""
    program = f"{BLOCKER}\nfrom decideonce import events, inbox\nprint(inbox.Inbox('billing').consumer)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ("billing\n", "") == (ran.stdout, ran.stderr)


def test_callers_need_no_other_library() -> None:
    """The clients, the journal and the service for tests work where there is only the client with what it needs."""
    program = f"""{BLOCKER}
from decideonce.journal import PostgresJournal
from decideonce.testing import DecideonceServer, Outcome
with DecideonceServer() as server:
    server.decides("test.echo", Outcome("DONE"))
    with server.sync_client() as client:
        print(PostgresJournal("loans").name, client.decide("test.echo", {{}}).outcome)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ("loans DONE\n", "") == (ran.stdout, ran.stderr)


def test_blocker_blocks() -> None:
    """The block is in force: a library that is installed can't be imported."""
    program = f"{BLOCKER}\nimport sqlalchemy"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: sqlalchemy" in ran.stderr
