"""Every test of the store on PostgreSQL, but those of SQLite's files."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
from _pytest.fixtures import FixtureFunctionDefinition

from tests.unit.gpuhub.broker.db import test_cost_store, test_outbox, test_retention, test_store

#: Tests of SQLite's own behaviour, and of its files.
_OF_FILES = frozenset(
    {
        "test_changes_that_wait_for_the_disk_are_reported_as_unavailable",
        "test_error_for_an_unreadable_store_names_the_file",
        "test_every_commit_is_synced_before_it_counts",
        "test_locked_store_is_reported_as_unavailable",
        "test_migrations_create_the_tables_of_the_model",
        "test_readers_do_not_wait_for_a_writer",
        "test_store_file_is_private",
    }
)
pytestmark = pytest.mark.usefixtures("in_postgresql")


def _take(module: ModuleType) -> None:
    for name, value in vars(module).items():
        is_test = name.startswith("test_") and inspect.isfunction(value) and name not in _OF_FILES
        if is_test or isinstance(value, FixtureFunctionDefinition):
            globals()[name] = value


for _module in (test_store, test_outbox, test_retention, test_cost_store):
    _take(_module)
