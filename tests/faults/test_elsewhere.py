"""Cases, or halves of cases, that tests of other tiers inject: run from here, with a closet of their own where needed."""

from __future__ import annotations

import pytest

from tests.faults import elsewhere


@pytest.mark.case("K5")
def test_an_engine_killed() -> None:
    """Under a launch: it fails, and the lost engine is named."""
    elsewhere.run("tests/integration/test_launch_local_failures.py::test_a_dead_worker_fails_the_launch_and_is_named")


@pytest.mark.case("K6")
def test_a_rank_killed() -> None:
    """Under a launch, while its peers wait for it."""
    elsewhere.run(
        "tests/integration/test_launch_local_failures.py::test_a_killed_rank_is_named_while_its_peers_wait_for_it"
    )


@pytest.mark.case("N1")
def test_a_new_boot_id() -> None:
    """A machine that was started anew proves that what ran there has ended; on simulated nodes."""
    elsewhere.run(
        "tests/unit/broker/test_keeper.py::test_a_restart_of_the_machine_is_proof",
        "tests/unit/broker/test_keeper.py::test_a_restart_before_the_container_was_made_proves_nothing_of_it",
        "tests/unit/broker/test_keeper.py::test_another_daemons_word_frees_nothing",
    )


@pytest.mark.case("S1")
def test_the_file_server_is_gone() -> None:
    """A silent server, a mount that hangs: starts fail in time with the reason and hold no GPU."""
    elsewhere.run(
        "tests/integration/test_storage.py::test_a_hung_server_fails_a_spawn_in_time_and_holds_no_gpu",
        "tests/integration/test_storage.py::test_a_mount_that_hangs_on_the_head_is_told_in_time",
        "tests/integration/test_storage.py::test_a_mount_that_hangs_is_no_dead_node",
    )


@pytest.mark.case("S2")
def test_a_stale_handle() -> None:
    """What the file system says is told; nothing is made or removed."""
    elsewhere.run(
        "tests/unit/storage/test_homes.py::test_what_the_file_system_says_is_told",
        "tests/unit/storage/test_faults.py::test_a_failed_mount_says_what_to_do",
    )


@pytest.mark.case("V1")
def test_stores_of_earlier_versions() -> None:
    """Leases and jobs of earlier versions' stores live through the upgrade, and through the way back."""
    elsewhere.run("tests/unit/broker/test_migration.py")
