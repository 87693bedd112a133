"""The tables, as the newest migration leaves them. A test holds the two to each other.

Every hot table starts its primary key with `bucket`, the first byte of SHA-256 of the operation key: background workers
divide their work by it, and it can distribute the tables. Statements join only within a bucket.
"""

from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)

metadata = MetaData(
    naming_convention={"pk": "%(table_name)s_pkey", "ck": "%(table_name)s_%(constraint_name)s_check"},
)

BUCKET_RULE = "bucket = get_byte(sha256(convert_to(operation_key, 'UTF8')), 0)"

ledger = Table(
    "ledger",
    metadata,
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("tenant", Text, primary_key=True),
    Column("operation", Text, primary_key=True),
    Column("operation_key", Text, primary_key=True),
    Column("decision_id", Uuid, nullable=False),
    # DecisionStatus by number.
    Column("state", SmallInteger, nullable=False),
    # The fencing token: every write after the reservation compares it.
    Column("attempt", Integer, nullable=False),
    Column("lease_expires_at", DateTime(timezone=True)),
    # When a worker may make the next attempt, where the last one failed.
    Column("retry_at", DateTime(timezone=True)),
    Column("background", Boolean, nullable=False),
    Column("fingerprint_version", SmallInteger, nullable=False),
    Column("fingerprint", LargeBinary, nullable=False),
    # What the request was judged by, and every resend is: today's catalog can't change it.
    Column("operation_version", Integer, nullable=False),
    Column("policy_id", Text, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("reserve_time", DateTime(timezone=True), nullable=False),
    Column("complete_time", DateTime(timezone=True)),
    # Null in a final state: for ever.
    Column("replayable_until", DateTime(timezone=True)),
    Column("key_retained_until", DateTime(timezone=True)),
    # Bytes and not jsonb: what is replayed is what was answered, to the byte.
    Column("facts", LargeBinary),
    Column("response", LargeBinary),
    # The caller's place in its trace (W3C Trace Context), which its events carry on.
    Column("traceparent", Text),
    CheckConstraint(BUCKET_RULE, name="bucket"),
    CheckConstraint("state BETWEEN 1 AND 5", name="state"),
    CheckConstraint("(state = 1) = (lease_expires_at IS NOT NULL)", name="lease"),
    CheckConstraint("state <> 1 OR facts IS NOT NULL", name="facts"),
    CheckConstraint("(state IN (2, 3, 4)) = (response IS NOT NULL)", name="response"),
    CheckConstraint("octet_length(fingerprint) = 32", name="fingerprint"),
    # Open work in the order in which it falls due; what no worker may take is not in it.
    Index(
        "ledger_due",
        "tenant",
        text("coalesce(lease_expires_at, retry_at)"),
        postgresql_where=text("coalesce(lease_expires_at, retry_at) IS NOT NULL"),
    ),
    # What the reaper takes next.
    Index("ledger_replayable", "bucket", "replayable_until", postgresql_where=text("state IN (2, 4)")),
    Index("ledger_retained", "bucket", "key_retained_until", postgresql_where=text("state = 5")),
)


def _event_columns() -> list[Column[Any]]:
    return [
        Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
        # A UUIDv7: events of one operation key sort in the order in which they happened.
        Column("id", Uuid, primary_key=True),
        Column("tenant", Text, nullable=False),
        Column("operation", Text, nullable=False),
        Column("operation_key", Text, nullable=False),
        # The column names of Debezium's outbox event router.
        Column("aggregatetype", Text, nullable=False),
        Column("aggregateid", Text, nullable=False),
        Column("type", Text, nullable=False),
        Column("payload", LargeBinary, nullable=False),
    ]


outbox = Table(
    "outbox",
    metadata,
    *_event_columns(),
    # The default is for the version that knew no topics.
    Column("topic", Text, nullable=False, server_default="decideonce.events"),
    Column("traceparent", Text),
    CheckConstraint(BUCKET_RULE, name="bucket"),
)

# Events that can't be sent, with why: the outbox without them, until an operator sends or discards them.
outbox_parked = Table(
    "outbox_parked",
    metadata,
    *_event_columns(),
    Column("topic", Text, nullable=False),
    Column("traceparent", Text),
    Column("reason", Text, nullable=False),
    Column("park_time", DateTime(timezone=True), nullable=False),
    CheckConstraint(BUCKET_RULE, name="bucket"),
)

# How often a tenant reused a key for another request, in the current minute.
mismatch = Table(
    "mismatch",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("minute", DateTime(timezone=True), primary_key=True),
    Column("count", Integer, nullable=False),
)

# Which publisher works at each of the 256 buckets, and until when.
bucket_lease = Table(
    "bucket_lease",
    metadata,
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("holder", Uuid),
    Column("lease_expires_at", DateTime(timezone=True)),
    CheckConstraint("bucket BETWEEN 0 AND 255", name="bucket"),
    CheckConstraint("(holder IS NULL) = (lease_expires_at IS NULL)", name="lease"),
)

# The publishers that are alive, so that each knows its share of the buckets.
bucket_holder = Table(
    "bucket_holder",
    metadata,
    Column("holder", Uuid, primary_key=True),
    Column("alive_until", DateTime(timezone=True), nullable=False),
)

policy_version = Table(
    "policy_version",
    metadata,
    Column("policy_id", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("engine", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("content", Text, nullable=False),
    Column("create_time", DateTime(timezone=True), nullable=False),
    Index("policy_version_digest", "policy_id", "digest", unique=True),
)

operation_version = Table(
    "operation_version",
    metadata,
    Column("operation", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("digest", Text, nullable=False),
    Column("content", Text, nullable=False),
    Column("create_time", DateTime(timezone=True), nullable=False),
    Index("operation_version_digest", "operation", "digest", unique=True),
)

catalog = Table(
    "catalog",
    metadata,
    Column("revision", BigInteger, primary_key=True, autoincrement=False),
    Column("apply_time", DateTime(timezone=True), nullable=False),
    Column("applied_by", Text, nullable=False),
    # JSON texts: name to version.
    Column("operations", Text, nullable=False),
    Column("policies", Text, nullable=False),
)

token = Table(
    "token",
    metadata,
    Column("token_id", Text, primary_key=True),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("roles", ARRAY(Text), nullable=False),
    Column("operations", ARRAY(Text), nullable=False),
    Column("description", Text, nullable=False),
    Column("create_time", DateTime(timezone=True), nullable=False),
    Column("revoke_time", DateTime(timezone=True)),
)
