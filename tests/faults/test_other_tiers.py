"""Cases, or parts of cases, that tests of other folders inject; they run from here, with a separate closet."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.faults.testbed.testbed import INSTANCE
from tests.support.product import ROOT

#: What the tests of the other folders need.
pytestmark = [pytest.mark.closet, pytest.mark.docker, pytest.mark.root, pytest.mark.torch]


def run_tests(*tests: str, deadline_s: float = 300) -> None:
    """Run these tests, given by their node ids; at least one must exist, and all must pass."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # A separate closet: the product of these cases is running.
    environment["GPUHUB_TEST_INSTANCE"] = f"{INSTANCE[:7]}e"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    assert passed is not None, done.stdout[-3000:]


@pytest.mark.case("K5")
def test_killed_engine() -> None:
    """A launch whose engine is killed fails and names it."""
    run_tests("tests/integration/launches/test_failures.py::test_a_dead_worker_fails_the_launch_and_is_named")


@pytest.mark.case("K6")
def test_killed_rank() -> None:
    """A launch whose rank is killed while its peers wait for it names the rank."""
    run_tests("tests/integration/launches/test_failures.py::test_a_killed_rank_is_named_while_its_peers_wait_for_it")


@pytest.mark.case("N1")
def test_new_boot_id_is_proof_of_release() -> None:
    """On simulated nodes a new boot id proves that everything from before has ended."""
    run_tests(
        "tests/unit/gpuhub/broker/controllers/nodes/test_node_controller.py::test_machine_restart_proves_a_release",
        "tests/unit/gpuhub/broker/controllers/nodes/test_node_controller.py::test_restart_before_container_creation_is_not_proof",
        "tests/unit/gpuhub/broker/controllers/nodes/test_node_controller.py::test_another_daemon_does_not_prove_a_release",
    )


@pytest.mark.case("S1")
def test_unreachable_file_server() -> None:
    """Starts fail in time with the reason and without a GPU when a server is silent or a mount hangs."""
    run_tests(
        "tests/integration/notebooks/test_storage.py::test_hung_server_fails_a_spawn_in_time_and_leases_no_gpu",
        "tests/integration/notebooks/test_storage.py::test_hanging_mount_on_the_head_node_is_reported_in_time",
        "tests/integration/notebooks/test_storage.py::test_hanging_mount_does_not_fail_the_node",
    )


@pytest.mark.case("S2")
def test_stale_nfs_file_handle() -> None:
    """The file system's error is shown, and nothing is made or removed."""
    run_tests(
        "tests/integration/gpuhub/storage/test_homes.py::test_file_system_error_is_reported",
        "tests/unit/gpuhub/docker/containers/test_container_lifecycle.py::test_mount_failure_has_a_remedy",
    )


@pytest.mark.case("V1")
def test_migration_of_stores_of_earlier_versions() -> None:
    """Leases and jobs in earlier versions' stores survive the upgrade and the downgrade."""
    run_tests("tests/unit/gpuhub/broker/db/test_migrations.py")
