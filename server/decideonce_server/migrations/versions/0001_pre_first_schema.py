"""The first schema: ledger, outbox, catalog and tokens."""

from alembic import op

revision = "0001_pre"
down_revision = None

BUCKET_RULE = "bucket = get_byte(sha256(convert_to(operation_key, 'UTF8')), 0)"

STATEMENTS = [
    f"""
    CREATE TABLE ledger (
        bucket smallint NOT NULL,
        tenant text NOT NULL,
        operation text NOT NULL,
        operation_key text NOT NULL,
        decision_id uuid NOT NULL,
        state smallint NOT NULL,
        attempt integer NOT NULL,
        lease_expires_at timestamptz,
        retry_at timestamptz,
        background boolean NOT NULL,
        fingerprint_version smallint NOT NULL,
        fingerprint bytea NOT NULL,
        operation_version integer NOT NULL,
        policy_id text NOT NULL,
        policy_version integer NOT NULL,
        reserve_time timestamptz NOT NULL,
        complete_time timestamptz,
        replayable_until timestamptz,
        key_retained_until timestamptz,
        facts bytea,
        response bytea,
        PRIMARY KEY (bucket, tenant, operation, operation_key),
        CONSTRAINT ledger_bucket_check CHECK ({BUCKET_RULE}),
        CONSTRAINT ledger_state_check CHECK (state BETWEEN 1 AND 5),
        CONSTRAINT ledger_lease_check CHECK ((state = 1) = (lease_expires_at IS NOT NULL)),
        CONSTRAINT ledger_facts_check CHECK (state <> 1 OR facts IS NOT NULL),
        CONSTRAINT ledger_response_check CHECK ((state IN (2, 3, 4)) = (response IS NOT NULL)),
        CONSTRAINT ledger_fingerprint_check CHECK (octet_length(fingerprint) = 32)
    )
    """,
    """
    CREATE INDEX ledger_due ON ledger (tenant, coalesce(lease_expires_at, retry_at))
        WHERE coalesce(lease_expires_at, retry_at) IS NOT NULL
    """,
    "CREATE INDEX ledger_replayable ON ledger (bucket, replayable_until) WHERE state IN (2, 4)",
    "CREATE INDEX ledger_retained ON ledger (bucket, key_retained_until) WHERE state = 5",
    f"""
    CREATE TABLE outbox (
        bucket smallint NOT NULL,
        id uuid NOT NULL,
        tenant text NOT NULL,
        operation text NOT NULL,
        operation_key text NOT NULL,
        aggregatetype text NOT NULL,
        aggregateid text NOT NULL,
        type text NOT NULL,
        payload bytea NOT NULL,
        PRIMARY KEY (bucket, id),
        CONSTRAINT outbox_bucket_check CHECK ({BUCKET_RULE})
    )
    """,
    """
    CREATE TABLE policy_version (
        policy_id text NOT NULL,
        version integer NOT NULL,
        engine text NOT NULL,
        digest text NOT NULL,
        content text NOT NULL,
        create_time timestamptz NOT NULL,
        PRIMARY KEY (policy_id, version)
    )
    """,
    "CREATE UNIQUE INDEX policy_version_digest ON policy_version (policy_id, digest)",
    """
    CREATE TABLE operation_version (
        operation text NOT NULL,
        version integer NOT NULL,
        digest text NOT NULL,
        content text NOT NULL,
        create_time timestamptz NOT NULL,
        PRIMARY KEY (operation, version)
    )
    """,
    "CREATE UNIQUE INDEX operation_version_digest ON operation_version (operation, digest)",
    """
    CREATE TABLE catalog (
        revision bigint NOT NULL PRIMARY KEY,
        apply_time timestamptz NOT NULL,
        applied_by text NOT NULL,
        operations text NOT NULL,
        policies text NOT NULL
    )
    """,
    """
    CREATE TABLE token (
        token_id text NOT NULL PRIMARY KEY,
        secret_hash bytea NOT NULL,
        tenant text NOT NULL,
        roles text[] NOT NULL,
        operations text[] NOT NULL,
        description text NOT NULL,
        create_time timestamptz NOT NULL,
        revoke_time timestamptz
    )
    """,
    """
    CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'rows of % are immutable', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
    END
    $$
    """,
    *(
        f"""CREATE TRIGGER {table}_immutable BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}
            EXECUTE FUNCTION refuse_change()"""
        for table in ("policy_version", "operation_version", "catalog")
    ),
]


def upgrade() -> None:
    """Run before the code that needs it."""
    for statement in STATEMENTS:
        op.execute(statement)
