"""What all processes count together."""

from alembic import op

revision = "0003_pre"
down_revision = "0002_pre"


def upgrade() -> None:
    """Run before the code that needs it."""
    op.execute(
        """
        CREATE TABLE mismatch (
            tenant text NOT NULL,
            minute timestamptz NOT NULL,
            count integer NOT NULL,
            PRIMARY KEY (tenant, minute)
        )
        """
    )
