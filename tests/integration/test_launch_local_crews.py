"""Workers that stay with a notebook on this machine: used again, given back in time, and never leaking anything."""

from __future__ import annotations

import pytest

from gpuhub.broker import schemas
from tests.support.folded import times
from tests.support.local_cluster import DEADLINE_S, Notebook, lines_until, until
from tests.support.rank_scripts import ALL_REDUCE

#: What this kernel and its workers hold: (processes, file descriptors, listening sockets, shared memory, threads, folders).
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


def test_workers_are_used_again(either: Notebook) -> None:
    """Also for less nodes; nobody is asked of anything in between, and it is said once that they stay."""
    either.keep_s = 60
    either.script("hello.py", ALL_REDUCE)
    launches = "\n".join(either.call("hello.py", nnodes=nnodes) for nnodes in (3, 3, 2))
    code, out, err = either.run(launches)
    assert code == 0, out + err
    assert (times(out, "sum 6.0 of 3"), times(out, "sum 3.0 of 2")) == (6, 2)
    stays = (
        "rig2 RTX 5070, rig3 RTX 5060 stay with this notebook for 60 s after a launch, or until others wait for GPUs"
    )
    assert out.count(stays) == 1
    assert "done in" in out.partition("sum 3.0 of 2")[2]
    assert "2 ranks on rig1 RTX 5090, rig2 RTX 5070\n" in out
    assert either.broker.calls[:2] == ["GET /cluster", "POST /jobs"]
    assert either.broker.calls.count("POST /jobs") == 1
    until(lambda: not either.broker.jobs(schemas.JobState.RUNNING), "the kernel's end frees them")
    until(lambda: not either.left(), "no process left")


def test_workers_that_do_not_fit_make_room_for_others(notebook: Notebook) -> None:
    """The first ones are freed before more are asked for."""
    notebook.keep_s = 60
    notebook.script("hello.py", ALL_REDUCE)
    code, out, err = notebook.run("\n".join(notebook.call("hello.py", nnodes=nnodes) for nnodes in (2, 3)), gpus=())
    assert code == 0, out + err
    assert "sum 6.0 of 3" in out
    asked = [call for call in notebook.broker.calls if "jobs" in call]
    assert [call.split("/jobs")[0] for call in asked[:3]] == ["POST ", "DELETE ", "POST "]


@pytest.mark.parametrize("why", ["idle for 2 s", "others wait for GPUs", "a worker ended, or others needed its GPU"])
def test_idle_workers_go_back(notebook: Notebook, why: str) -> None:
    """When their time is over, when anybody waits, or when one has ended; the next launch says so, and starts anew."""
    notebook.keep_s = 2 if "idle" in why else 600
    notebook.script("hello.py", ALL_REDUCE)
    launch = notebook.call("hello.py", nnodes=2)
    process = notebook.start(
        f"import sys\n{launch}\nprint('IDLE', flush=True)\nsys.stdin.readline()\n{launch}", talks=True
    )
    lines_until(process, "IDLE")
    (run,) = notebook.broker.gangs
    notebook.broker.waiting = 1 if "wait" in why else 0
    if "ended" in why:
        notebook.broker.lose(run, 0)
    until(lambda: notebook.broker.gangs[run].state is schemas.JobState.ENDED, "they go back")
    until(lambda: len(notebook.left()) == 1, "only the kernel is left")
    out, err = process.communicate("\n", timeout=DEADLINE_S)
    assert f"gpu_launch: rig2 RTX 5070 went back meanwhile: {why}\n" in out, out + err
    assert "sum 3.0 of 2" in out
    assert notebook.broker.calls.count("POST /jobs") == 2


def test_workers_are_released_when_asked(notebook: Notebook) -> None:
    """All that are idle; a name that is none is refused."""
    notebook.keep_s = 600
    notebook.script("hello.py", ALL_REDUCE)
    code, out, err = notebook.run(
        f"""
        {notebook.call("hello.py", nnodes=2)}
        from gpu_launch.crew import crews
        (view,) = crews.standing()
        print("STANDING", view.nodes, len(view.jobs), view.is_busy, 0 < view.left_s <= 600)
        try:
            crews.release("run-nothing")
        except gpu_launch.UsageError as error:
            print(error)
        print("RELEASED", crews.release(), crews.standing(), crews.release())
        """
    )
    assert code == 0, out + err
    assert "STANDING rig1 RTX 5090, rig2 RTX 5070 1 False True" in out
    assert "no workers called run-nothing" in out
    assert "RELEASED ['rig1 RTX 5090, rig2 RTX 5070'] [] []" in out


def test_a_killed_kernel_leaves_nothing(either: Notebook) -> None:
    """After SIGKILL of the kernel its controller, engines, fork servers and ranks end by themselves on every node."""
    either.keep_s = 600
    either.script("sleep.py", "import time; print('sleeping', flush=True); time.sleep(600)")
    process = either.start(either.call("sleep.py", nnodes=2))
    lines_until(process, "] sleeping")
    process.kill()
    process.communicate(timeout=20)
    until(lambda: not either.left(), "no process left")


def test_a_killed_kernel_takes_idle_workers_along(notebook: Notebook) -> None:
    """The same when nothing runs on them."""
    notebook.keep_s = 600
    notebook.script("hello.py", ALL_REDUCE)
    process = notebook.start(f"{notebook.call('hello.py', nnodes=2)}\nprint('IDLE', flush=True)\ninput()", talks=True)
    lines_until(process, "IDLE")
    process.kill()
    process.communicate(timeout=20)
    until(lambda: not notebook.left(), "no process left")


def test_sixty_relaunches_leak_nothing(notebook: Notebook) -> None:
    """No process, file descriptor, port, shared memory, thread or folder; the closet has a hundred."""
    notebook.keep_s = 600
    # Each rank leaves shared memory behind, as a data loader that was killed does.
    notebook.script("hello.py", ALL_REDUCE + f"    open(f'/dev/shm/torch_{notebook.home.name}_{{os.getpid()}}', 'w')\n")
    launch = notebook.call("hello.py", nnodes=2)
    code, out, err = notebook.run(
        HOLDINGS
        + f"""
for number in range(61):
    {launch}
    if number == 25:
        first = holdings()
# A connection to the broker may be open at this moment, and what is ended need not be gone.
deadline = time.monotonic() + 30
while (last := holdings()) != first and time.monotonic() < deadline:
    time.sleep(0.1)
print("HOLDS", first, "HOLDS", last, flush=True)
""",
        limit_s=5 * DEADLINE_S,
    )
    assert code == 0, out[-3000:] + err[-3000:]
    assert times(out, "sum 3.0 of 2") == 122
    (holds,) = (line for line in out.splitlines() if line.startswith("HOLDS "))
    _, first, last = holds.split("HOLDS ")
    first = first.strip()
    assert first == last
    assert "'shared memory': []" in last
    assert notebook.broker.calls.count("POST /jobs") == 1
