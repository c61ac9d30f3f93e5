"""Alembic's environment for the broker's store."""
