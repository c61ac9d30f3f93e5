"""Worker pools of a notebook on three real daemons: fast relaunches, and release for other users."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator

import pytest

from gpuhub_closet.layouts import build_plan
from tests.acceptance.notebook_container import Notebook
from tests.acceptance.process_output import ProcessOutput
from tests.acceptance.random_faults import Fault, FaultInjector
from tests.support.hub.browser import Product, User
from tests.support.product import wait_for

#: Prints its container's identity: the start time of the container's first process.
WHERE = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", total.item(), "in", os.environ["GPUHUB_NODE"], open("/proc/1/stat").read().split()[21])
    dist.barrier()
    dist.destroy_process_group()
"""
FOREVER = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    print("going on", flush=True)
    while True:
        dist.all_reduce(torch.ones(1))
"""


@pytest.fixture(scope="module")
def notebook(product: Product, make_user: Callable[[str], User]) -> Iterator[Notebook]:
    """ada's notebook on the RTX 5070."""
    started = Notebook(product, make_user("ada"), "rtx5070")
    started.write("where.py", WHERE)
    started.write("forever.py", FOREVER)
    yield started
    started.stop()


def has_only_own_gpu(notebook: Notebook) -> bool:
    """Return whether the user has only the notebook's GPU."""
    return notebook.user.holders() == {"RTX 5070": "ada"}


def containers(text: str) -> list[str]:
    """Return the containers in which a launch of `where.py` ran."""
    return sorted(line.partition(" in ")[2].strip() for line in text.splitlines() if " in rig" in line)


def test_next_launch_reuses_the_workers(notebook: Notebook):
    """Launches share the workers, also with torchrun itself; the output says that they stay, and they are released on
    request.
    """
    first, again, cold, status, release = notebook.cells(
        "%gpu_launch --nnodes 3 where.py",
        "%gpu_launch --nnodes 3 where.py",
        "%gpu_launch --nnodes 3 --cold where.py",
        "%gpu_status",
        "%gpu_release",
    )
    assert first.count("sum 3.0") == 3, first
    assert len(containers(first)) == 3, first
    assert containers(first) == containers(again) == containers(cold), first + again + cold
    assert "%gpu_release" in first
    assert "rig" in status
    assert release.strip()
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPUs are free")


def test_idle_workers_are_released_for_waiting_users(
    product: Product, make_user: Callable[[str], User], notebook: Notebook
):
    """ada's idle workers have every GPU; ben requests the RTX 5060 and gets it."""
    with notebook.start_cells("%gpu_launch --nnodes 3 where.py", "import time; time.sleep(90)") as process:
        wait_for(lambda: len(notebook.user.holders()) == 3, "ada's launch holds all", deadline_s=60)
        ben = Notebook(product, make_user("ben"), "rtx5060")
        assert ben.user.holders()["RTX 5060"] == "ben"
        ben.stop()
        process.kill()
    notebook.kill("gpu_launch")
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPUs are free", deadline_s=60)


def test_an_interrupt_keeps_the_workers(notebook: Notebook):
    """Ctrl-C ends all ranks, and the next launch starts in the same containers."""
    with notebook.start_cells(
        "%gpu_launch --nnodes 3 where.py",
        "%gpu_launch --nnodes 3 forever.py",
        "%gpu_launch --nnodes 3 where.py",
        "%gpu_release",
    ) as process:
        shown = ProcessOutput(process)
        shown.wait("going on")
        notebook.kill("load_ext", signal.SIGINT)
        output = shown.rest()
    first, forever, again, _ = [part.split("\n", 1)[1] for part in output.split("=== ")[1:]]
    assert "KeyboardInterrupt" in forever, forever
    assert containers(first) == containers(again), output
    assert len(containers(again)) == 3, output
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPUs are free")


def test_hundred_relaunches_leave_nothing(product: Product, notebook: Notebook):
    """A hundred launches leave no processes, file descriptors, ports, shared memory or folders."""
    count = """
        import os, re, subprocess
        def counted():
            own = os.getpid()
            ports = sum(1 for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").read().splitlines()[1:] if line.split()[3] == "0A")
            return dict(fds=len(os.listdir(f"/proc/{own}/fd")), threads=len(os.listdir(f"/proc/{own}/task")),
                        processes=sum(name.isdigit() for name in os.listdir("/proc")), shm=len(os.listdir("/dev/shm")), ports=ports)
    """
    remote = """
        import json, os, pathlib
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try: words, fds = (entry / "cmdline").read_text().replace("\\0", " "), len(os.listdir(entry / "fd"))
                except OSError: continue
                # The notebook's own server opens and closes what it likes.
                if "gpu_launch" in words or "gpu-launch" in words:
                    found.setdefault(" ".join(words.split()[:4])[:60], []).append(fds)
        print("REMOTE", json.dumps([os.environ["GPUHUB_NODE"], len(os.listdir("/dev/shm")), {name: sorted(fds) for name, fds in found.items()}]))
    """
    notebook.write("remote.py", remote)
    outputs = notebook.cells(
        count,
        "for _ in range(5): get_ipython().run_line_magic('gpu_launch', '--nnodes 3 where.py')",
        "%gpu_launch --nnodes 3 remote.py",
        "before = counted()",
        "for _ in range(100): get_ipython().run_line_magic('gpu_launch', '--nnodes 3 where.py')",
        "print('BEFORE', before); print('AFTER', counted())",
        "%gpu_launch --nnodes 3 remote.py",
        "%gpu_release",
        timeout_s=600,
    )
    assert outputs[4].count("sum 3.0") == 300, outputs[4][-3000:]
    before, after = (eval(line.split(" ", 1)[1]) for line in outputs[5].splitlines()[:2])
    # A leak would be one for each launch; the number of open ones varies a little.
    assert all(after[name] < before[name] + 10 for name in before), (before, after)
    for then, now in zip(inspect_containers(outputs[2]), inspect_containers(outputs[6]), strict=True):
        assert now[:2] == then[:2]
        assert now[2] < then[2] + 3, (then, now)
        # Open files of all processes together, which vary by more than those of one.
        assert now[3] < then[3] + 50, (then, now)
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPUs are free")


def inspect_containers(text: str) -> list[tuple[str, int, int, int]]:
    """Return for each container its node, files in shared memory, our processes, and their open files."""
    containers = [json.loads(line.partition("REMOTE ")[2]) for line in text.splitlines() if "REMOTE " in line]
    assert len(containers) == 3, text
    return sorted(
        (node, shm, sum(map(len, open_files.values())), sum(map(sum, open_files.values())))
        for node, shm, open_files in containers
    )


def test_rank_session_example_runs_to_its_end(notebook: Notebook):
    """`03-rank-sessions.ipynb` builds a model cell by cell on two nodes, and it learns."""
    output = notebook.execute("03-rank-sessions")
    assert "I am rank 0 of 2" in output, output
    assert "I am rank 1 of 2" in output, output
    assert re.search(r"from \d+\.\d{3} to 0\.\d{3}", output), output
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPUs are free")


def test_slow_networks_example_runs_to_its_end(notebook: Notebook):
    """`06-slow-networks.ipynb` trains in each mode, measures the cards, and predicts its script on 1 to 3 of them."""
    output = notebook.execute("06-slow-networks", timeout_s=600)
    for mode in ("exact", "bf16", "powersgd", "local"):
        assert re.search(rf"^{mode} +loss \d\.\d{{3}}, [01]\.\d{{3}} of exact", output, re.MULTILINE), output
    assert "kept for --predict" in output, output
    assert "One step of slow_networks_train.py: the median of 20" in output, output
    assert re.search(r"\] 3 +powersgd ", output), output
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPUs are free")


def test_lost_node_is_named_and_returns(product: Product, notebook: Notebook):
    """With `--nnodes 2:3` a cut-off node is named, two nodes continue, and three do after its return."""
    notebook.write(
        "elastic.py",
        """
        import os, signal, time, torch, torch.distributed as dist
        from pathlib import Path
        terminated = []
        signal.signal(signal.SIGTERM, lambda *_: terminated.append(1))
        dist.init_process_group("gloo")
        saved = Path("elastic.step")
        step = int(saved.read_text()) if saved.exists() else 0
        print("began at", step, "with", dist.get_world_size(), flush=True)
        while not Path("elastic.enough").exists():
            time.sleep(0.1)
            step += 1
            stop = torch.tensor([float(len(terminated))])
            dist.all_reduce(stop)
            if dist.get_rank() == 0:
                saved.write_text(str(step))
            if stop.item():
                break
        dist.destroy_process_group()
        """,
    )

    def step() -> int:
        saved = notebook.home / "elastic.step"
        # The file is empty while it is being written.
        return int((saved.exists() and saved.read_text()) or 0)

    faults = FaultInjector(product, build_plan(product.paths.instance))
    with notebook.start_cells("%gpu_launch --nnodes 2:3 --max-restarts 3 elastic.py", "%gpu_release") as process:
        output = ProcessOutput(process)
        output.wait("began at 0 with 3")
        wait_for(lambda: step() > 20, "some steps are done")
        faults.inflict(Fault(after_s=0, what="cut", node="rig3", lasts_s=40))
        output.wait("rig3 is lost", 60)
        output.wait(r"began at [1-9]\d* with 2")
        # Slurm resumes a node some time after it answers, and the launch then polls every minute.
        output.wait(r"began at [1-9]\d* with 3", 240)
        notebook.write("elastic.enough", "")
        text = output.rest()
    faults.heal()
    assert "done" in text, text
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPUs are free", deadline_s=90)
