"""${message}"""

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    """Run ${"before" if "pre" in message else "after"} the code that needs it."""
    ${upgrades if upgrades else ""}
