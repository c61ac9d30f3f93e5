"""Five nodes that read one dataset: from a file server at once, and from copies on their own disks.

Server and nodes are network namespaces on one bridge, each with a link of 200 Mbit/s. The file server is nfs-ganesha, and
its readers are libnfs's `nfs-cat`, since a kernel's NFS client cannot be told which namespace it is in. For the copies,
the server itself runs the program that reads the dataset; in the product the first node does that over its NFS mount.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from gpuhub.storage import staging_script
from tests.support.network_namespaces import Machines, machines
from tests.support.nfs import serving_nfs

NODES, RUNS = 5, 3
FILES, FILE_BYTES = 16, 4 * 1024**2
_RATE = "200mbit"
_MACHINES = Machines("ghbench", "10.88.0")
_SECRET = "bench"


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `storage`."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        stack.enter_context(machines(_MACHINES.name, _MACHINES.prefix, NODES + 1, _RATE))
        server = stack.enter_context(
            serving_nfs(folder / "nfs", _MACHINES.address(0), namespace=_MACHINES.namespace(0))
        )
        dataset = server.folder / "digits"
        write_dataset(dataset)
        yield "storage.five_readers_s", read_over_nfs(server.port, NODES), "s"
        ones, fives = [], []
        for _ in range(RUNS):
            ones.append(stage(dataset, folder / "copies", 1))
            before = read_sent_bytes()
            fives.append(stage(dataset, folder / "copies", NODES))
            sent = read_sent_bytes() - before
        yield "storage.stage_five_s", statistics.median(fives), "s"
        ratios = [five / one for one, five in zip(ones, fives, strict=True)]
        yield "storage.stage_fanout_over_one", statistics.median(ratios), "ratio"
        yield "storage.server_bytes_first_epoch_over_size", sent / (FILES * FILE_BYTES), "ratio"
        before = read_sent_bytes()
        read_copies(folder / "copies", NODES)
        yield "storage.server_bytes_second_epoch", read_sent_bytes() - before, "bytes"


def write_dataset(folder: Path) -> None:
    """Write a dataset of random bytes, which no link compresses."""
    folder.mkdir(mode=0o755)
    for number in range(FILES):
        file = folder / f"{number}.bin"
        file.write_bytes(os.urandom(FILE_BYTES))
        file.chmod(0o644)


def read_sent_bytes() -> int:
    """Return the bytes of all IP packets that the server has sent."""
    command = _MACHINES.enter(0, "cat", "/proc/net/netstat")
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    names, values = (line.split() for line in text.splitlines() if line.startswith("IpExt:"))
    return int(dict(zip(names, values, strict=True))["OutOctets"])


def read_over_nfs(port: int, nodes: int) -> float:
    """Return the seconds until this number of nodes have read the whole dataset from the server at once."""
    urls = [
        f"nfs://{_MACHINES.address(0)}/export/digits/{number}.bin?version=4&nfsport={port}" for number in range(FILES)
    ]
    script = 'for url; do nfs-cat "$url" > /dev/null || exit 1; done'
    return _time([("sh", "-c", script, "sh", *urls) for _ in range(nodes)])


def read_copies(folder: Path, nodes: int) -> float:
    """Return the seconds until this number of nodes have read their copies."""
    return _time([("sh", "-c", 'cat "$1"/*.bin > /dev/null', "sh", str(folder / str(node))) for node in range(nodes)])


def stage(dataset: Path, copies: Path, nodes: int) -> float:
    """Return the seconds until this number of nodes have a whole copy each, in folders of their own."""
    shutil.rmtree(copies, ignore_errors=True)
    lists: list[dict[str, object]] = []
    staging_script.run({"do": "list", "folder": str(dataset)}, "", lists.append)
    task = {"do": "copy", "digest": lists[0]["digest"], "bytes": lists[0]["bytes"], "spare": 0}
    tasks = [{**task, "read": str(dataset), "write": None, "next": _MACHINES.address(1)}]
    for node in range(nodes):
        (copies / str(node)).mkdir(parents=True)
        following = _MACHINES.address(node + 2) if node + 1 < nodes else None
        tasks.append({**task, "read": None, "write": str(copies / str(node)), "next": following})
    program = (sys.executable, "-c", Path(staging_script.__file__).read_text(encoding="utf-8"))
    return _time([(*program, json.dumps(each)) for each in tasks], first=0)


def _time(commands: Sequence[Sequence[str]], *, first: int = 1) -> float:
    """Return the seconds that the commands take, each in its own namespace, from number `first` on."""
    environment = {**os.environ, "GPUHUB_STAGING_SECRET": _SECRET}
    began = time.monotonic()
    processes = [
        subprocess.Popen(_MACHINES.enter(number, *command), stdout=subprocess.DEVNULL, env=environment)
        for number, command in enumerate(commands, start=first)
    ]
    codes = [process.wait(600) for process in processes]
    took_s = time.monotonic() - began
    assert codes == [0] * len(codes), codes
    return took_s
