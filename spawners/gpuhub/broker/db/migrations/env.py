"""Run by Alembic: migrate over the connection that `broker.db.engine` passes."""

from __future__ import annotations

from alembic import context

from gpuhub.broker.db.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
