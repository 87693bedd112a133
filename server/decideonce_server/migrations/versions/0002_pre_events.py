"""What publishing events needs: topics, traces, parked events, and leases of buckets."""

from alembic import op

revision = "0002_pre"
down_revision = "0001_pre"

BUCKET_RULE = "bucket = get_byte(sha256(convert_to(operation_key, 'UTF8')), 0)"

STATEMENTS = [
    "ALTER TABLE ledger ADD COLUMN traceparent text",
    # The default is for the version before, which goes on beside this one for a while.
    """ALTER TABLE outbox ADD COLUMN topic text NOT NULL DEFAULT 'decideonce.events', ADD COLUMN traceparent text""",
    f"""
    CREATE TABLE outbox_parked (
        bucket smallint NOT NULL,
        id uuid NOT NULL,
        tenant text NOT NULL,
        operation text NOT NULL,
        operation_key text NOT NULL,
        aggregatetype text NOT NULL,
        aggregateid text NOT NULL,
        type text NOT NULL,
        payload bytea NOT NULL,
        topic text NOT NULL,
        traceparent text,
        reason text NOT NULL,
        park_time timestamptz NOT NULL,
        PRIMARY KEY (bucket, id),
        CONSTRAINT outbox_parked_bucket_check CHECK ({BUCKET_RULE})
    )
    """,
    """
    CREATE TABLE bucket_lease (
        bucket smallint NOT NULL PRIMARY KEY,
        holder uuid,
        lease_expires_at timestamptz,
        CONSTRAINT bucket_lease_bucket_check CHECK (bucket BETWEEN 0 AND 255),
        CONSTRAINT bucket_lease_lease_check CHECK ((holder IS NULL) = (lease_expires_at IS NULL))
    )
    """,
    "INSERT INTO bucket_lease (bucket) SELECT generate_series(0, 255)",
    """
    CREATE TABLE bucket_holder (
        holder uuid NOT NULL PRIMARY KEY,
        alive_until timestamptz NOT NULL
    )
    """,
]


def upgrade() -> None:
    """Run before the code that needs it."""
    for statement in STATEMENTS:
        op.execute(statement)
