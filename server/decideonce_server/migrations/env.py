"""Runs Alembic's migrations over the connection that `migrate` hands in."""

from alembic import context

from decideonce_server.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
