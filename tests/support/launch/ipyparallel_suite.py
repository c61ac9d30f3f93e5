"""ipyparallel's own tests of launchers, as its package has them, with `engines="gpuhub"`.

`tests/integration/launches/test_ipyparallel.py` runs this in an interpreter of its own, as a notebook's: they have a configuration and
fixtures for every test, and end ZeroMQ's context.

Of ipyparallel's tests of clusters that start engines these are missing: `test_wait_for_engines_crash` expects engines to have the
environment of the notebook, which containers do not have; `test_cluster_repr`, `test_sync_with` and `test_start_and_connect_activate` have
nothing that depends on the launcher.
"""

from __future__ import annotations

import pytest
from ipyparallel.tests.conftest import (  # noqa: F401
    Cluster,
    Context,
    cluster_config,
    controller_launcher_class,
    ipython_dir,
)
from ipyparallel.tests.test_cluster import (  # noqa: F401
    test_async_with,
    test_cluster_manager_notice_stop,
    test_default_from_file,
    test_get_output,
    test_restart_engines,
    test_signal_engines,
    test_start_stop_cluster,
    test_start_stop_engines,
    test_to_from_dict,
)


@pytest.fixture
def engine_launcher_class() -> str:
    """Return the launcher to test, for ipyparallel's fixtures."""
    return "gpuhub"
