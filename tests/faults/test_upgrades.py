"""Another version, another time."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from gpuhub.broker import opening
from gpuhub.head.programs import BROKER, HUB
from tests.faults.bed import Bed
from tests.support.product import wait_for


@pytest.mark.case("V1")
def test_from_the_last_version_to_this_and_back(bed: Bed) -> None:
    """The store goes back by one migration and forward again under a live server: nobody loses anything."""
    seen = bed.start("ada", "nb", "on1")
    lease = bed.lease_of("ada", "nb")
    bed.supervisor.stop(BROKER)
    engine = opening.build_engine(f"sqlite:///{bed.paths.store}")
    with engine.begin() as connection:
        newest = _version(connection)
        config = Config()
        config.set_main_option("script_location", "gpuhub.broker:migrations")
        config.attributes["connection"] = connection
        command.downgrade(config, "-1")
        assert _version(connection) != newest
    engine.dispose()
    bed.supervisor.ensure_started(BROKER)
    wait_for(bed.is_live, "the broker answers", 60)
    bed.kill_and_wait(HUB)
    assert bed.lease_of("ada", "nb")["id"] == lease["id"]
    wait_for(lambda: bed.clients["ada"].is_ready("nb"), "ada's server is ready", 60)
    assert bed.container("ada", "nb") == seen


def _version(connection: sa.Connection) -> str:
    return str(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one())


@contextmanager
def broker_with_own_time(bed: Bed, file: Path) -> Iterator[None]:
    """The broker runs with the clock that `file` says, as an offset; in place of supervisord's."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    section = (bed.paths.run / "supervisord.conf").read_text().split(f"[program:{BROKER}]")[1]
    line = next(line for line in section.splitlines() if line.startswith("command="))
    bed.supervisor.stop(BROKER)
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
            wait_for(bed.is_live, lambda: file.with_suffix(".log").read_text(), 60)
            yield
        finally:
            broker.terminate()
            broker.wait(30)
            bed.supervisor.ensure_started(BROKER)
            wait_for(bed.is_live, "the broker answers", 60)


@pytest.mark.case("V3")
@pytest.mark.parametrize("offset", ["+3600", "-3600"])
def test_the_clock_is_set(bed: Bed, tmp_path: Path, offset: str) -> None:
    """By an hour, while a lease runs and another waits: none ends, none is given, and the next is as usual."""
    file = tmp_path / "time"
    file.write_text("+0")
    with broker_with_own_time(bed, file):
        seen = bed.start("ada", "nb", "on1")
        bed.ask_start("ben", "nb", "on1")
        wait_for(lambda: bed.lease_of("ben", "nb"), "ben's request is known")
        job = bed.job("cyd", 1)
        first = bed.last_event()
        file.write_text(offset)
        time.sleep(20)
        assert not bed.events("lease.released", "lease.quarantined", "node.unreachable", after=first)
        assert bed.container("ada", "nb") == seen
        assert bed.lease_of("ben", "nb")["state"] == "requested"
        assert bed.job_now("cyd", job["id"])["state"] == "running"
        bed.stop("ada", "nb")
        bed.wait_ready("ben", "nb", 60)
        bed.clear()
