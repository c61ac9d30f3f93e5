"""Worker pools of a notebook on this machine: reuse, release in time, and no leaks."""

from __future__ import annotations

import pytest

from gpuhub.broker_api import schemas
from tests.support.launch.local_cluster import DEADLINE_S, Notebook, lines_until, until
from tests.support.launch.rank_scripts import ALL_REDUCE, count_ranks

#: What this kernel and its workers have: (processes, file descriptors, listening sockets, shared memory, threads,
#: folders).
HOLDINGS = """
import os, threading, time
from pathlib import Path
import psutil, zmq

def holdings():
    home = os.environ["HOME"]
    ours = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == home:
                ours.append(process)
        except psutil.Error:
            pass
    ours.sort(key=lambda process: process.pid)
    return {
        "processes": [process.pid for process in ours],
        "descriptors": {process.pid: process.num_fds() for process in ours},
        "ports": {process.pid: sum(one.status == "LISTEN" for one in process.net_connections()) for process in ours},
        "threads": {process.pid: process.num_threads() for process in ours if process.pid != os.getpid()},
        "own threads": sorted(thread.name for thread in threading.enumerate()),
        "shared memory": [name for name in os.listdir("/dev/shm") if Path(home).name in name],
        "temporary": sorted(os.listdir(os.environ["TMPDIR"])),
        "runs": len(list(Path(home, ".gpu_launch/jobs").iterdir())),
    }
"""


def test_workers_are_reused(either: Notebook) -> None:
    """A second launch reuses the workers, also with fewer nodes, sends no request, and reports once that they stay."""
    either.keep_s = 60
    either.script("hello.py", ALL_REDUCE)
    launches = "\n".join(either.call("hello.py", nnodes=nnodes) for nnodes in (3, 3, 2))
    code, out, err = either.run(launches)
    assert code == 0, out + err
    assert (count_ranks(out, "sum 6.0 of 3"), count_ranks(out, "sum 3.0 of 2")) == (6, 2)
    stays = (
        "rig2 RTX 5070, rig3 RTX 5060 stay with this notebook for 1 min after a launch, or until others wait for GPUs"
    )
    assert out.count(stays) == 1
    assert "% busy" not in out
    assert "done in" in out.partition("sum 3.0 of 2")[2]
    assert "2 ranks on rig1 RTX 5090, rig2 RTX 5070\n" in out
    assert either.broker.calls[:2] == ["GET /cluster", "POST /jobs"]
    assert either.broker.calls.count("POST /jobs") == 1
    until(lambda: not either.broker.jobs(schemas.JobState.RUNNING), "the kernel's end frees them")
    until(lambda: not either.left(), "no process left")


def test_unsuitable_workers_are_released_first(notebook: Notebook) -> None:
    """The first workers are released before others are requested."""
    notebook.keep_s = 60
    notebook.script("hello.py", ALL_REDUCE)
    code, out, err = notebook.run("\n".join(notebook.call("hello.py", nnodes=nnodes) for nnodes in (2, 3)), gpus=())
    assert code == 0, out + err
    assert "sum 6.0 of 3" in out
    asked = [call for call in notebook.broker.calls if "jobs" in call]
    assert [call.split("/jobs")[0] for call in asked[:3]] == ["POST ", "DELETE ", "POST "]


@pytest.mark.parametrize("why", ["idle for 2 s", "others wait for GPUs", "a worker ended, or others needed its GPU"])
def test_idle_workers_are_released(notebook: Notebook, why: str) -> None:
    """Idle workers are released after their time, for other requests, and when one has ended; the next launch reports
    it.
    """
    notebook.keep_s = 2 if "idle" in why else 600
    notebook.script("hello.py", ALL_REDUCE)
    launch = notebook.call("hello.py", nnodes=2)
    process = notebook.start(
        f"import sys\n{launch}\nprint('IDLE', flush=True)\nsys.stdin.readline()\n{launch}", interactive=True
    )
    lines_until(process, "IDLE")
    (run,) = notebook.broker.groups
    notebook.broker.waiting = 1 if "wait" in why else 0
    if "ended" in why:
        notebook.broker.lose(run, 0)
    until(lambda: notebook.broker.groups[run].state is schemas.JobState.ENDED, "the workers are released")
    until(lambda: len(notebook.left()) == 1, "only the kernel is left")
    out, err = process.communicate("\n", timeout=DEADLINE_S)
    assert f"gpu_launch: freed in the meantime: rig2 RTX 5070, {why}\n" in out, out + err
    assert "sum 3.0 of 2" in out
    assert notebook.broker.calls.count("POST /jobs") == 2


def test_workers_are_released_when_asked(notebook: Notebook) -> None:
    """All idle workers are released; an unknown name is refused."""
    notebook.keep_s = 600
    notebook.script("hello.py", ALL_REDUCE)
    code, out, err = notebook.run(
        f"""
        {notebook.call("hello.py", nnodes=2)}
        from gpu_launch.launch.workers.worker_pool import worker_pools
        (view,) = worker_pools.list_views()
        print("POOL", view.nodes, len(view.jobs), view.is_busy, 0 < view.remaining_s <= 600)
        try:
            worker_pools.free_idle("run-nothing")
        except gpu_launch.UsageError as error:
            print(error)
        print("RELEASED", worker_pools.free_idle(), worker_pools.list_views(), worker_pools.free_idle())
        """
    )
    assert code == 0, out + err
    assert "POOL rig1 RTX 5090, rig2 RTX 5070 1 False True" in out
    assert "no workers called run-nothing" in out
    assert "RELEASED ['rig1 RTX 5090, rig2 RTX 5070'] [] []" in out


def test_a_killed_kernel_leaves_nothing(either: Notebook) -> None:
    """After SIGKILL of the kernel its controller, engines, fork servers and ranks end on every node."""
    either.keep_s = 600
    either.script("sleep.py", "import time; print('sleeping', flush=True); time.sleep(600)")
    process = either.start(either.call("sleep.py", nnodes=2))
    lines_until(process, "] sleeping")
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    until(lambda: not either.left(), "no process left")


def test_idle_workers_end_with_a_killed_kernel(notebook: Notebook) -> None:
    """After SIGKILL of the kernel its idle workers end too."""
    notebook.keep_s = 600
    notebook.script("hello.py", ALL_REDUCE)
    process = notebook.start(
        f"{notebook.call('hello.py', nnodes=2)}\nprint('IDLE', flush=True)\ninput()", interactive=True
    )
    lines_until(process, "IDLE")
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    until(lambda: not notebook.left(), "no process left")


def test_forty_relaunches_leak_nothing(notebook: Notebook) -> None:
    """Forty launches leave no process, file descriptor, port, shared memory, thread or folder."""
    notebook.keep_s = 600
    # Each rank leaves shared memory behind, as a killed data loader does.
    notebook.script("hello.py", ALL_REDUCE + f"    open(f'/dev/shm/torch_{notebook.home.name}_{{os.getpid()}}', 'w')\n")
    launch = notebook.call("hello.py", nnodes=2)
    code, out, err = notebook.run(
        HOLDINGS
        + f"""
for number in range(41):
    {launch}
    if number == 25:
        first = holdings()
# A connection to the broker may be open at this moment, and what is ended need not be gone.
deadline = time.monotonic() + 60
while (last := holdings()) != first and time.monotonic() < deadline:
    time.sleep(0.1)
print("HOLDS", first, "HOLDS", last, flush=True)
""",
        limit_s=5 * DEADLINE_S,
    )
    assert code == 0, out[-3000:] + err[-3000:]
    assert count_ranks(out, "sum 3.0 of 2") == 82
    (holds,) = (line for line in out.splitlines() if line.startswith("HOLDS "))
    _, first, last = holds.split("HOLDS ")
    first = first.strip()
    assert first == last
    assert "'shared memory': []" in last
    assert notebook.broker.calls.count("POST /jobs") == 1
