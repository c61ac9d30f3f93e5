"""Storage that is full, locked, torn or missing, and containers that use more than they may."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gpuhub.closet import daemons, shell
from gpuhub.closet.places import node_places
from gpuhub.head.programs import BROKER
from tests.faults.bed import Bed
from tests.support.product import wait_for

Figure = Callable[[str, float], None]

#: In the node's namespaces: Docker's folder of containers ($1) on a full file system ($2), with those that exist.
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
def full_docker(bed: Bed, node: str) -> Iterator[None]:
    """No room for another container on the node."""
    places = node_places(bed.paths, node)
    pid = next(p for p, name in daemons.processes(bed.plan, bed.plan.node(node)).items() if name == "dockerd")
    inside = ("nsenter", "-t", str(pid), "--mount", "--pid", "sh", "-euc")
    folders = ("sh", str(places.data_root / "containers"), str(places.run / "full"))
    shell.run((*inside, _FILL, *folders))
    try:
        yield
    finally:
        shell.run((*inside, _EMPTY, *folders))


@pytest.mark.case("S3")
@pytest.mark.fast
def test_docker_has_no_space(bed: Bed) -> None:
    """The user reads it, and no GPU is held; the next start works."""
    with full_docker(bed, "rig2"):
        assert "no space left" in bed.refusal("ada", "nb", "on2")
        wait_for(lambda: bed.leases() == [], "no lease is left", 60)
        bed.start("ben", "nb", "on3")
    bed.start("ada", "nb", "on2")


@contextmanager
def small_store(bed: Bed) -> Iterator[Path]:
    """The broker's store is on a file system of 8 MB."""
    place, store = bed.paths.state / "small", bed.paths.store
    bed.supervisor.stop(BROKER)
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small", str(place)], check=True)
    files = list(store.parent.glob(f"{store.name}*"))
    try:
        for file in files:
            shutil.move(file, place / file.name)
        store.symlink_to(place / store.name)
        bed.supervisor.ensure_started(BROKER)
        wait_for(bed.is_live, "the broker answers", 60)
        yield place
    finally:
        bed.supervisor.stop(BROKER)
        store.unlink(missing_ok=True)
        for file in place.glob(f"{store.name}*"):
            shutil.move(file, store.parent / file.name)
        subprocess.run(["umount", str(place)], check=True)
        place.rmdir()
        bed.supervisor.ensure_started(BROKER)
        wait_for(bed.is_live, "the broker answers", 60)


@pytest.mark.case("S3")
def test_the_store_has_no_space(bed: Bed) -> None:
    """503 while nothing can be written, and nothing is recorded; then all goes on."""
    with small_store(bed) as place:
        seen = bed.start("ada", "nb", "on1")
        filler = place / "filler"
        # What the log has room for already would be written over.
        with closing(sqlite3.connect(place / bed.paths.store.name)) as store:
            store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"\0" * 4096)
        ben = bed.clients["ben"]
        refused = [_request(bed, number) for number in range(12)]
        assert 503 in refused
        assert set(refused) <= {201, 503}
        filler.unlink()
        rows = [row for row in bed.leases() or () if row["owner"] == "ben"]
        assert len(rows) == refused.count(201)
        assert bed.container("ada", "nb") == seen
        for row in rows:
            ben.ask(ben.broker, "DELETE", f"/leases/{row['id']}")
        wait_for(lambda: _request(bed, 99) == 201, "requests are taken again", 30)
        for row in bed.leases() or ():
            if row["owner"] == "ben":
                ben.ask(ben.broker, "DELETE", f"/leases/{row['id']}")


def _request(bed: Bed, number: int) -> int:
    ben = bed.clients["ben"]
    body = {"profile": "on1", "server": f"s{number % 8}", "key": f"full-{time.time_ns()}"}
    status: int = ben.ask(ben.broker, "POST", "/leases", body)[0]
    return status


@pytest.mark.case("S4")
def test_the_store_is_locked(bed: Bed, figure: Figure) -> None:
    """Another process holds a write transaction: 503, then it goes on, and what ran runs."""
    seen = bed.start("ada", "nb", "on1")
    with closing(sqlite3.connect(bed.paths.store, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        assert _request(bed, 1) == 503
        figure("refused_after_s", time.monotonic() - began)
        other.execute("ROLLBACK")
    wait_for(lambda: _request(bed, 2) == 201, "requests are taken again", 30)
    assert bed.container("ada", "nb") == seen
    ben = bed.clients["ben"]
    for row in bed.leases() or ():
        if row["owner"] == "ben":
            ben.ask(ben.broker, "DELETE", f"/leases/{row['id']}")


@pytest.mark.case("S4")
def test_the_store_is_torn(bed: Bed) -> None:
    """The end of the write-ahead log was half written when the broker died: what was committed before is there."""
    seen = bed.start("ada", "nb", "on1")
    lease = bed.lease_of("ada", "nb")
    wal = bed.paths.store.with_name(bed.paths.store.name + "-wal")
    bed.kill(BROKER)
    bed.supervisor.stop(BROKER)
    with wal.open("ab") as file:
        file.write(b"\x37\x7f\x06\x82" * 700)
    bed.supervisor.ensure_started(BROKER)
    wait_for(bed.is_live, "the broker answers", 60)
    assert bed.lease_of("ada", "nb")["id"] == lease["id"]
    assert bed.container("ada", "nb") == seen
    bed.start("ben", "nb", "on2")


@pytest.mark.case("S5")
def test_an_image_is_missing(bed: Bed) -> None:
    """The user reads which node lacks which image, and no lease was ever made."""
    first = bed.last_event()
    told = bed.refusal("ada", "nb", "absent")
    assert "gpuhub/absent:1" in told
    assert "rig3" in told
    assert bed.leases() == []
    assert not bed.events("lease.granted", after=first)


_WILD = {
    "fork bomb": "import os,time\nend=time.time()+4\nwhile time.time()<end:\n  try: os.fork()\n  except OSError: time.sleep(.01)\n",
    "memory": "held=[]\nwhile True: held.append(bytearray(1<<20))\n",
    "shared memory": "open('/dev/shm/x','wb').write(b'0'*(64<<20))\n",
    "log": "out=open('/proc/1/fd/1','wb',0)\nfor _ in range(800): out.write(b'x'*65535+b'\\n')\n",
}


@pytest.mark.case("S6")
@pytest.mark.parametrize("how", list(_WILD))
def test_a_container_runs_wild(bed: Bed, figure: Figure, how: str) -> None:
    """Another's container on the same node answers as before, the product too, and the log stays in its bounds."""
    wild, other = bed.start("ada", "nb", "light"), None
    for number in range(8):
        other = bed.start("ben", f"s{number}", "light")
        if other.node == wild.node:
            break
    assert other is not None
    status, _ = bed.execute(wild, "timeout", "15", "python3", "-c", _WILD[how])
    assert status != 0 or how in {"log", "fork bomb"}
    began = time.monotonic()
    assert bed.is_live()
    figure("slowest_answer_s", time.monotonic() - began)
    assert bed.execute(other, "true")[0] == 0
    logs = (node_places(bed.paths, wild.node).data_root / "containers" / wild.id).glob("*-json.log*")
    assert sum(file.stat().st_size for file in logs) < 35 << 20
