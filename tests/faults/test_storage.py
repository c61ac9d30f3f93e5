"""Storage that is full, locked, truncated or missing, and containers that exceed their limits."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gpuhub.ops.deploy.programs import BROKER
from gpuhub_closet import docker_daemons, shell
from gpuhub_closet.paths import node_paths
from tests.faults.testbed.testbed import FaultTestbed
from tests.support.product import wait_for

Figure = Callable[[str, float], None]

#: In the node's namespaces: mounts a full file system ($2) over Docker's folder of containers ($1) and keeps those in
#: it.
_FILL = """
mkdir -p "$2" && mount -t tmpfs -o size=64k full "$2"
for one in "$1"/*/; do
    name=$(basename "$one"); mkdir "$2/$name"; mount --bind "$one" "$2/$name"
done
mount --rbind "$2" "$1"
cat /dev/zero > "$2/filler" 2>/dev/null || true
"""
_EMPTY = 'umount -R -l "$1"; umount -R -l "$2"; rmdir "$2"'


@contextmanager
def full_docker(testbed: FaultTestbed, node: str) -> Iterator[None]:
    """Leave no space for another container on the node."""
    places = node_paths(testbed.paths, node)
    pid = next(
        p
        for p, name in docker_daemons.find_processes(testbed.plan, testbed.plan.node(node)).items()
        if name == "dockerd"
    )
    inside = ("nsenter", "-t", str(pid), "--mount", "--pid", "sh", "-euc")
    folders = ("sh", str(places.data_root / "containers"), str(places.run / "full"))
    shell.run_command((*inside, _FILL, *folders))
    try:
        yield
    finally:
        shell.run_command((*inside, _EMPTY, *folders))


@pytest.mark.case("S3")
@pytest.mark.fast
def test_docker_has_no_space(testbed: FaultTestbed) -> None:
    """The user reads the error, and no GPU is leased; the next start works."""
    with full_docker(testbed, "rig2"):
        assert "no space left" in testbed.find_refusal("ada", "nb", "on2")
        wait_for(lambda: testbed.leases() == [], "no lease is left", 60)
        testbed.start("ben", "nb", "on3")
    testbed.start("ada", "nb", "on2")


@contextmanager
def small_store(testbed: FaultTestbed) -> Iterator[Path]:
    """A file system of 8 MB with the broker's store."""
    folder, store = testbed.paths.state / "small", testbed.paths.store
    testbed.supervisor.stop(BROKER)
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small", str(folder)], check=True)
    files = list(store.parent.glob(f"{store.name}*"))
    try:
        for file in files:
            shutil.move(file, folder / file.name)
        store.symlink_to(folder / store.name)
        testbed.supervisor.ensure_started(BROKER)
        wait_for(testbed.is_live, "the broker answers", 60)
        yield folder
    finally:
        testbed.supervisor.stop(BROKER)
        store.unlink(missing_ok=True)
        for file in folder.glob(f"{store.name}*"):
            shutil.move(file, store.parent / file.name)
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()
        testbed.supervisor.ensure_started(BROKER)
        wait_for(testbed.is_live, "the broker answers", 60)


@pytest.mark.case("S3")
def test_the_store_has_no_space(testbed: FaultTestbed) -> None:
    """The broker answers 503 and records nothing while its store is full, and then continues."""
    with small_store(testbed) as folder:
        seen = testbed.start("ada", "nb", "on1")
        filler = folder / "filler"
        # Allocated space of the log would be reused.
        with closing(sqlite3.connect(folder / testbed.paths.store.name)) as store:
            store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"\0" * 4096)
        ben = testbed.clients["ben"]
        refused = [_request(testbed, number) for number in range(12)]
        assert 503 in refused
        assert set(refused) <= {201, 503}
        filler.unlink()
        rows = [row for row in testbed.leases() or () if row["owner"] == "ben"]
        assert len(rows) == refused.count(201)
        assert testbed.container("ada", "nb") == seen
        for row in rows:
            ben.ask(ben.broker, "DELETE", f"/leases/{row['id']}")
        wait_for(lambda: _request(testbed, 99) == 201, "requests are taken again", 30)
        for row in testbed.leases() or ():
            if row["owner"] == "ben":
                ben.ask(ben.broker, "DELETE", f"/leases/{row['id']}")


def _request(testbed: FaultTestbed, number: int) -> int:
    ben = testbed.clients["ben"]
    body = {"profile": "on1", "server": f"s{number % 8}", "key": f"full-{time.time_ns()}"}
    status: int = ben.ask(ben.broker, "POST", "/leases", body)[0]
    return status


@pytest.mark.case("S4")
def test_the_store_is_locked(testbed: FaultTestbed, figure: Figure) -> None:
    """While another process has a write transaction the broker answers 503; then it continues with all leases."""
    seen = testbed.start("ada", "nb", "on1")
    with closing(sqlite3.connect(testbed.paths.store, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        assert _request(testbed, 1) == 503
        figure("refused_after_s", time.monotonic() - began)
        other.execute("ROLLBACK")
    wait_for(lambda: _request(testbed, 2) == 201, "requests are taken again", 30)
    assert testbed.container("ada", "nb") == seen
    ben = testbed.clients["ben"]
    for row in testbed.leases() or ():
        if row["owner"] == "ben":
            ben.ask(ben.broker, "DELETE", f"/leases/{row['id']}")


@pytest.mark.case("S4")
def test_store_is_truncated(testbed: FaultTestbed) -> None:
    """When the end of the write-ahead log is cut at the broker's death, committed data is present."""
    seen = testbed.start("ada", "nb", "on1")
    lease = testbed.lease_of("ada", "nb")
    wal = testbed.paths.store.with_name(testbed.paths.store.name + "-wal")
    testbed.kill(BROKER)
    testbed.supervisor.stop(BROKER)
    with wal.open("ab") as file:
        file.write(b"\x37\x7f\x06\x82" * 700)
    testbed.supervisor.ensure_started(BROKER)
    wait_for(testbed.is_live, "the broker answers", 60)
    assert testbed.lease_of("ada", "nb")["id"] == lease["id"]
    assert testbed.container("ada", "nb") == seen
    testbed.start("ben", "nb", "on2")


@pytest.mark.case("S5")
def test_an_image_is_missing(testbed: FaultTestbed) -> None:
    """The user reads the node's and the image's names, and no lease is recorded."""
    first = testbed.last_event()
    message = testbed.find_refusal("ada", "nb", "absent")
    assert "gpuhub/absent:1" in message
    assert "rig3" in message
    assert testbed.leases() == []
    assert not testbed.events("lease.granted", after=first)


_WILD = {
    "fork bomb": "import os,time\nend=time.time()+4\nwhile time.time()<end:\n  try: os.fork()\n  except OSError: time.sleep(.01)\n",
    "memory": "held=[]\nwhile True: held.append(bytearray(1<<20))\n",
    "shared memory": "open('/dev/shm/x','wb').write(b'0'*(64<<20))\n",
    "log": "out=open('/proc/1/fd/1','wb',0)\nfor _ in range(800): out.write(b'x'*65535+b'\\n')\n",
}


@pytest.mark.case("S6")
@pytest.mark.parametrize("how", list(_WILD))
def test_container_exhausts_its_resources(testbed: FaultTestbed, figure: Figure, how: str) -> None:
    """Other containers on the node and the product answer as before, and the log stays within its limits."""
    wild, other = testbed.start("ada", "nb", "light"), None
    for number in range(8):
        other = testbed.start("ben", f"s{number}", "light")
        if other.node == wild.node:
            break
    assert other is not None
    status, _ = testbed.execute(wild, "timeout", "15", "python3", "-c", _WILD[how])
    assert status != 0 or how in {"log", "fork bomb"}
    began = time.monotonic()
    assert testbed.is_live()
    figure("slowest_answer_s", time.monotonic() - began)
    assert testbed.execute(other, "true")[0] == 0
    logs = (node_paths(testbed.paths, wild.node).data_root / "containers" / wild.id).glob("*-json.log*")
    assert sum(file.stat().st_size for file in logs) < 35 << 20
