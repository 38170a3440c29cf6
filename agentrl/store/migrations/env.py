"""Alembic's entry: migrate inside the transaction of the connection that `agentrl.store.migrate` hands
over."""

from alembic import context

from agentrl.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
