"""Storage that is full, locked, truncated or missing, and containers that exceed their limits."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


#: Sizes in SQLite's write-ahead log, bytes: its header, and the header of each frame before its page.
_WAL_HEADER, _FRAME_HEADER = 32, 24


def cut_last_frame(store: Path) -> None:
    """Cut the store's write-ahead log in the middle of its last frame that counts.

    Frames of an earlier round of the log, with other salts than the header's, may follow it and count no more.
    """
    wal = store.with_name(f"{store.name}-wal")
    content = wal.read_bytes()
    page_bytes = int.from_bytes(content[8:12])
    salts = content[16:24]
    size = _FRAME_HEADER + page_bytes
    begins = [
        begin for begin in range(_WAL_HEADER, len(content) - size + 1, size) if content[begin + 8 : begin + 16] == salts
    ]
    assert len(begins) > 1, f"{wal} has {len(begins)} frames: nothing would remain"
    os.truncate(wal, begins[-1] + size // 2)


@pytest.mark.case("S4")
def test_store_is_truncated(testbed: FaultTestbed) -> None:
    """The write-ahead log is cut within its last frame: that transaction is gone, and everything before it is present."""
    seen = testbed.start("ada", "nb", "on1")
    lease = testbed.lease_of("ada", "nb")
    # Stopped and then killed: supervisord must not start another broker, whose recovery would rewrite the log.
    body = {"profile": "on1", "server": "nb", "key": f"cut-{time.time_ns()}"}
    ben = testbed.clients["ben"]
    assert ben.ask(ben.broker, "POST", "/leases", body)[0] == 201
    pid = testbed.kill(BROKER, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(testbed.supervisor.stop, BROKER)
        wait_for(lambda: testbed.supervisor.state(BROKER) == "STOPPING", "supervisord stops the broker", 10)
        os.kill(pid, signal.SIGKILL)
        stopping.result(60)
    cut_last_frame(testbed.paths.store)
    testbed.supervisor.ensure_started(BROKER)
    wait_for(testbed.is_live, "the broker answers", 60)
    with closing(sqlite3.connect(testbed.paths.store)) as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert ben.ask(ben.broker, "POST", "/leases", body)[0] in {200, 201}
    assert [row["state"] for row in testbed.leases() or () if row["owner"] == "ben"] == ["requested"]
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


#: Programs that exceed a limit for 8 s again and again, and end with 9 if the limit stopped them at least once.
_WILD = {
    "fork bomb": """
while time.time() < end:
    try: os.fork()
    except OSError:
        hit = True
        time.sleep(.01)
if os.getpid() != first: os._exit(0)
""",
    "memory": """
while time.time() < end:
    child = os.fork()
    if not child:
        held = []
        while True: held.append(bytearray(1 << 20))
    hit = os.waitpid(child, 0)[1] != 0 or hit
""",
    "shared memory": """
while time.time() < end:
    try: open("/dev/shm/x", "wb").write(b"0" * (64 << 20))
    except OSError: hit = True
""",
    "log": """
out = open("/proc/1/fd/1", "wb", 0)
while time.time() < end: out.write(b"x" * 65535 + b"\\n")
hit = True
""",
}
_FRAME = "import os, sys, time\nfirst, end, hit = os.getpid(), time.time() + 8, False\n{}\nsys.exit(9 if hit else 0)\n"
#: Ended by its limit, or killed together with what it started.
_LIMITED = {9, 137}
#: The longest that hub, broker or a neighbour may take to answer in the meantime, seconds.
_ANSWER_S = 10.0


@pytest.mark.case("S6")
@pytest.mark.parametrize("how", list(_WILD))
def test_container_exhausts_its_resources(testbed: FaultTestbed, figure: Figure, how: str) -> None:
    """In the meantime another container on the node and the product answer, and the log stays within its limits."""
    wild, other = testbed.start("ada", "nb", "half1"), testbed.start("ben", "nb", "half1")
    assert other.node == wild.node
    took: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        storm = pool.submit(testbed.execute, wild, "timeout", "30", "python3", "-c", _FRAME.format(_WILD[how]))
        while not storm.done():
            began = time.monotonic()
            assert testbed.is_live(_ANSWER_S)
            assert testbed.execute(other, "true")[0] == 0
            took.append(time.monotonic() - began)
        status, output = storm.result()
    assert status in _LIMITED, (status, output[-500:])
    assert len(took) >= 2, took
    figure("slowest_answer_s", max(took))
    assert max(took) < _ANSWER_S
    assert testbed.container("ben", "nb") == other
    logs = (node_paths(testbed.paths, wild.node).data_root / "containers" / wild.id).glob("*-json.log*")
    assert sum(file.stat().st_size for file in logs) < 35 << 20
