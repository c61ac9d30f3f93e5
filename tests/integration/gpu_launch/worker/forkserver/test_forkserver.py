"""The fork server: when it is used, refused and replaced, its store, and the resources that it releases."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpu_launch.worker import agent, output_forwarder, processes
from gpu_launch.worker.forkserver import child, client
from gpu_launch.worker.forkserver.client import ForkRefused
from gpu_launch.worker.gpu_monitor import choose_gpu

pytestmark = pytest.mark.torch

HELLO = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    print("sum", value.item())
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        raise SystemExit("once")
    dist.barrier()
    dist.destroy_process_group()
"""


def module(node, name, text):
    """Write a module in a folder below the home, and return the environment that finds it."""
    folder = node.home / "lib"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def test_matching_fork_server_is_reused(node):
    """Variables that only ranks read do not replace the server."""
    assert agent.prepare_forking((), {}) == ""
    first = node.server
    assert agent.prepare_forking((), {"MINE": "1", "OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO"}) == ""
    assert node.server is first


def test_startup_variables_replace_the_fork_server(node):
    """Variables that Python reads at its start replace the server, and the rank has them from its start."""
    assert agent.prepare_forking((), {}) == ""
    first = node.server
    environ = {"PYTHONHASHSEED": "7"}
    assert agent.prepare_forking((), environ) == ""
    assert node.server is not first
    assert not first.is_alive()
    found = {node.launch(node.script("print(hash('a'))"), environ=environ)["code"]: node.text()}
    cold = subprocess.run(
        [sys.executable, "-c", "print(hash('a'))"], check=True, env=os.environ | environ, capture_output=True, text=True
    )
    assert found == {0: cold.stdout}


def test_preloaded_modules_follow_changes_of_their_files(node):
    """The running server imports further modules; fewer or changed modules need a new server."""
    environ = module(node, "slow_to_import", "WORD = 'old'")
    assert agent.prepare_forking(("colorsys",), environ) == ""
    first = node.server
    both = ("colorsys", "slow_to_import")
    assert agent.prepare_forking(both, environ) == ""
    assert agent.prepare_forking(both, environ) == ""
    assert node.server is first
    module(node, "slow_to_import", "WORD = 'changed'")
    assert agent.prepare_forking(both, environ) == ""
    second = node.server
    assert second is not first
    assert agent.prepare_forking((), environ) == ""
    assert node.server is not second


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "2 threads"),
        ("import torch; torch.cuda.is_initialized = lambda: True", "torch has initialised CUDA"),
        ("raise SystemExit(3)", "unsafe cannot be imported with .*SystemExit: 3"),
    ],
    ids=["thread", "cuda", "exit"],
)
def test_unsafe_fork_is_refused_with_the_reason(node, text, why):
    """The reason is a sentence that users understand."""
    environ = module(node, "unsafe", text)
    said = agent.prepare_forking(("unsafe",), environ)
    assert re.search(why, said), said
    assert "unsafe" in said
    with pytest.raises(ForkRefused, match="unsafe"):
        agent.open_store("run-x", 0)


def test_corrected_preload_module_is_used(node):
    """The corrected module is used without any action of the user."""
    environ = module(node, "unsafe", "1 / 0")
    assert "ZeroDivisionError" in agent.prepare_forking(("unsafe",), environ)
    module(node, "unsafe", "")
    assert agent.prepare_forking(("unsafe",), environ) == ""


def test_other_interpreter_is_not_forked(node):
    """torchrun's variable PYTHON_EXEC names another interpreter."""
    assert "/opt/other/python" in agent.prepare_forking((), {"PYTHON_EXEC": "/opt/other/python"})


def test_each_restart_has_a_separate_store(node):
    """A restart finds no data of the earlier ranks, and their store is closed."""
    script = node.script(HELLO)
    node.start(script, nproc=2, max_restarts=1)
    (rank_1,) = [end for end in node.end_of_start()["ends"] if end["rank"] == 1]
    assert (rank_1["exit_code"], "once" in rank_1["error"]) == (1, True)
    first = node.port
    node.start(script, nproc=2, again=True, attempt=1, restart_count=1, max_restarts=1)
    assert node.port != first
    assert node.end()["code"] == 0, node.text("stderr")
    assert [node.text(rank=rank) for rank in range(2)] == ["sum 3.0\n"] * 2
    deadline = time.monotonic() + 60
    while any(map(is_open, (first, node.port))):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_open(port):
    """Return whether a server listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def count_resources(node):
    """Return everything that may leak: threads, files of both processes, processes and shared memory."""
    server = node.server._process.pid
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "server's files": len(list(Path(f"/proc/{server}/fd").iterdir())),
        "server's children": processes.find_descendants(server),
        "zombies": [
            pid
            for pid in processes.find_descendants(os.getpid())
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        ],
        "shared": sorted(name for name in processes.list_shm_names() if node.crew.run_id in name),
        "marked": processes.find_marked(processes.build_mark(node.run.run_id, None)),
    }


def count_settled(node, is_expected=lambda counted: True):
    """Return the first count without zombies that is as expected and stays for half a second; the last after 60 s."""
    deadline = time.monotonic() + 60
    counted, since = count_resources(node), time.monotonic()
    while time.monotonic() < min(deadline, since + 0.5):
        time.sleep(0.01)
        before, counted = counted, count_resources(node)
        if counted != before or counted["zombies"] or not is_expected(counted):
            since = time.monotonic()
    return counted


SHARING = """
    import os, sys, torch
    tensor = torch.ones(10).share_memory_()
    open("/dev/shm/torch_left_%s_%d" % (sys.argv[1], os.getpid()), "w").close()
"""


def test_fifty_launches_leave_nothing(node):
    """No process, thread, file, zombie or shared memory remains in the agent or its fork server."""
    script = node.script(SHARING)
    assert agent.prepare_forking((), {}) == ""
    for _ in range(2):
        node.launch(script, node.crew.run_id, nproc=2)
    # Processes of earlier tests may not have been waited for yet, and a rank's process may be just ending.
    before, own = count_settled(node), len(list(Path("/proc/self/fd").iterdir()))
    assert before["zombies"] == []
    for _ in range(50):
        assert node.launch(script, node.crew.run_id)["code"] == 0, node.text("stderr")
    assert count_settled(node, lambda counted: counted == before) == before
    assert len(list(Path("/proc/self/fd").iterdir())) == own


def test_semaphores_in_use_are_kept():
    """They are mapped under a name that has already been removed."""
    before = processes.list_shm_names()
    lock = multiprocessing.get_context("spawn").Lock()
    came = processes.list_shm_names() - before
    assert lock._semlock.name.removeprefix("/") in {name.removeprefix("sem.") for name in came}
    processes.remove_shm_leftovers(before)
    assert came <= processes.list_shm_names()


def test_shared_memory_cleanup_keeps_files_in_use_and_foreign_files(tmp_path):
    """Only new files of known libraries that no process has open are removed."""
    (tmp_path / "torch_1_0").touch()
    before = processes.list_shm_names(tmp_path)
    for name in ("torch_2_0", "sem.mp-abc", "dataset.npy"):
        (tmp_path / name).touch()
    with (tmp_path / "nccl-abc").open("w"):
        assert processes.remove_shm_leftovers(before, tmp_path) == ["sem.mp-abc", "torch_2_0"]
    assert processes.list_shm_names(tmp_path) == {"torch_1_0", "dataset.npy", "nccl-abc"}


@pytest.mark.parametrize(
    ("environ", "has_mkl", "number"),
    [
        ({}, True, 6),
        ({"OMP_NUM_THREADS": "4"}, True, 4),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}, True, 2),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}, False, 4),
        ({"OMP_NUM_THREADS": "8,2"}, False, 8),
        ({"OMP_NUM_THREADS": "many"}, False, 6),
    ],
)
def test_number_of_threads_matches_a_new_process(environ, has_mkl, number):
    """The number is the one that torch chooses."""
    assert child.choose_thread_count(environ, cores=6, has_mkl=has_mkl) == number


def test_select_startup_variables():
    """Variables of loaders, interpreters, thread pools and torch's start are selected; those read later are not."""
    late = {"NCCL_DEBUG": "1", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}
    early = {"LD_PRELOAD": "x", "PYTHONHASHSEED": "1", "TORCH_LOGS": "dynamo", "OMP_PROC_BIND": "true", "LANG": "C"}
    assert client.select_start_variables(late | early) == early


@pytest.mark.parametrize(
    ("line", "files", "kills", "limit"),
    [
        ("0::/docker/4f", {"memory.events": "oom 1\noom_kill 3\n", "memory.max": "1073741824\n"}, 3, 1024),
        ("0::/docker/4f", {"docker/4f/memory.events": "oom_kill 1\n", "docker/4f/memory.max": "max\n"}, 1, 0),
        (
            "4:memory:/a",
            {"memory/memory.oom_control": "under_oom 0\noom_kill 2\n", "memory/memory.limit_in_bytes": "9" * 19},
            2,
            0,
        ),
        ("1:name=systemd:/", {}, None, 0),
    ],
)
def test_memory_limit_is_read_from_cgroups_v1_and_v2(tmp_path, line, files, kills, limit):
    """A cgroup that is mounted at the root is found too."""
    (tmp_path / "cgroup").write_text(f"{line}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert output_forwarder.count_oom_kills(tmp_path / "cgroup", tmp_path) == kills
    assert output_forwarder.read_memory_limit_mib(tmp_path / "cgroup", tmp_path) == limit


@pytest.mark.parametrize(
    ("local_rank", "visible", "name"),
    [
        (1, None, "H200 GPU-b"),
        (0, "1,0", "H200 GPU-b"),
        (1, "GPU-b,GPU-a", "L40 GPU-a"),
        (1, "0", ""),
        (0, "7", ""),
        (2, None, ""),
    ],
)
def test_gpu_of_a_rank_follows_cuda_visible_devices(local_rank, visible, name):
    """CUDA_VISIBLE_DEVICES defines the order of GPUs."""
    assert choose_gpu(local_rank, [("GPU-a", "L40"), ("GPU-b", "H200")], visible) == name
