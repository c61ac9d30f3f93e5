"""Upgrades of the store, and changes of the clock."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuhub.ops.deploy.programs import BROKER, HUB
from tests.faults.testbed.testbed import FaultTestbed
from tests.support.broker.store_revisions import move_store, read_revision
from tests.support.product import wait_for


@pytest.mark.case("V1")
def test_downgrade_and_upgrade_by_one_migration(testbed: FaultTestbed) -> None:
    """The store is downgraded by one migration and upgraded again under a running server, whose lease continues."""
    seen = testbed.start("ada", "nb", "on1")
    lease = testbed.lease_of("ada", "nb")
    testbed.supervisor.stop(BROKER)
    newest = read_revision(testbed.paths.store)
    move_store(testbed.paths.store, "-1")
    assert read_revision(testbed.paths.store) != newest
    testbed.supervisor.ensure_started(BROKER)
    wait_for(testbed.is_live, "the broker answers", 60)
    testbed.kill_and_wait(HUB)
    assert testbed.lease_of("ada", "nb")["id"] == lease["id"]
    wait_for(lambda: testbed.clients["ada"].is_ready("nb"), "ada's server is ready", 60)
    assert testbed.container("ada", "nb") == seen


@contextmanager
def broker_with_own_time(testbed: FaultTestbed, file: Path) -> Iterator[None]:
    """Run the broker with the clock offset in `file` instead of supervisord's broker."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    section = (testbed.paths.run / "supervisord.conf").read_text().split(f"[program:{BROKER}]")[1]
    line = next(line for line in section.splitlines() if line.startswith("command="))
    testbed.supervisor.stop(BROKER)
    faked = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    with file.with_suffix(".log").open("wb") as log:
        broker = subprocess.Popen(
            shlex.split(line.removeprefix("command=")), env={**os.environ, **faked}, stdout=log, stderr=log
        )
        try:
            wait_for(testbed.is_live, lambda: file.with_suffix(".log").read_text(), 60)
            yield
        finally:
            broker.terminate()
            broker.wait(30)
            testbed.supervisor.ensure_started(BROKER)
            wait_for(testbed.is_live, "the broker answers", 60)


@pytest.mark.case("V3")
@pytest.mark.parametrize("offset", ["+3600", "-3600"])
def test_clock_jump(testbed: FaultTestbed, tmp_path: Path, offset: str) -> None:
    """When the clock is set by an hour no lease ends, no waiting request is granted, and the next grant is as usual."""
    file = tmp_path / "time"
    file.write_text("+0")
    with broker_with_own_time(testbed, file):
        seen = testbed.start("ada", "nb", "on1")
        testbed.ask_start("ben", "nb", "on1")
        wait_for(lambda: testbed.lease_of("ben", "nb"), "ben's request is known")
        job = testbed.submit_job("cyd", 1)
        first = testbed.last_event()
        file.write_text(offset)
        time.sleep(20)
        assert not testbed.events("lease.released", "lease.quarantined", "node.unreachable", after=first)
        assert testbed.container("ada", "nb") == seen
        assert testbed.lease_of("ben", "nb")["state"] == "requested"
        assert testbed.find_job("cyd", job["id"])["state"] == "running"
        testbed.stop("ada", "nb")
        testbed.wait_ready("ben", "nb", 60)
        testbed.clear()
