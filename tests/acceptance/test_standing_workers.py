"""Workers that stay with a notebook, on three real daemons: instant relaunch, and nothing in anybody's way."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator

import pytest

from gpuhub.closet.plan import practice_plan

from .conftest import Product, User, wait_for
from .faults import Faults, Moment
from .notebooks import Notebook
from .outputs import Output

#: Says which container it is in: when the container's first process started.
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
    found = Notebook(product, make_user("ada"), "rtx5070")
    found.write("where.py", WHERE)
    found.write("forever.py", FOREVER)
    yield found
    found.stop()


def own_only(notebook: Notebook) -> bool:
    """Whether the user holds nothing but the notebook's GPU."""
    return notebook.user.holders() == {"RTX 5070": "ada"}


def containers(text: str) -> list[str]:
    """The containers that a launch of `where.py` ran in."""
    return sorted(line.partition(" in ")[2].strip() for line in text.splitlines() if " in rig" in line)


def test_the_next_launch_runs_in_the_same_workers(notebook: Notebook):
    """Two launches and one with torchrun itself share the workers; told is that they stay, and they go when told to."""
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
    wait_for(lambda: own_only(notebook), "the other GPUs are free")


def test_standing_workers_make_room_for_whoever_waits(
    product: Product, make_user: Callable[[str], User], notebook: Notebook
):
    """ada's idle workers hold every GPU; ben asks for the RTX 5060 and gets it."""
    with notebook.start_cells("%gpu_launch --nnodes 3 where.py", "import time; time.sleep(90)") as process:
        wait_for(lambda: len(notebook.user.holders()) == 3, "ada's launch holds all", deadline_s=60)
        ben = Notebook(product, make_user("ben"), "rtx5060")
        assert ben.user.holders()["RTX 5060"] == "ben"
        ben.stop()
        process.kill()
    notebook.kill("gpu_launch")
    wait_for(lambda: own_only(notebook), "the other GPUs are free", deadline_s=60)


def test_an_interrupt_keeps_the_workers(notebook: Notebook):
    """Ctrl-C ends all ranks; the next launch starts in the same containers."""
    with notebook.start_cells(
        "%gpu_launch --nnodes 3 where.py",
        "%gpu_launch --nnodes 3 forever.py",
        "%gpu_launch --nnodes 3 where.py",
        "%gpu_release",
    ) as process:
        shown = Output(process)
        shown.wait("going on")
        notebook.kill("load_ext", signal.SIGINT)
        output = shown.rest()
    first, forever, again, _ = [part.split("\n", 1)[1] for part in output.split("=== ")[1:]]
    assert "KeyboardInterrupt" in forever, forever
    assert containers(first) == containers(again), output
    assert len(containers(again)) == 3, output
    wait_for(lambda: own_only(notebook), "the other GPUs are free")


def test_a_hundred_relaunches_leave_nothing_behind(product: Product, notebook: Notebook):
    """Processes, file descriptors, ports, shared memory and folders: after a hundred launches as many as after some."""
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
    # One of each launch would be a hundred; what is open at this moment varies by some.
    assert all(after[name] < before[name] + 10 for name in before), (before, after)
    for then, now in zip(remotes(outputs[2]), remotes(outputs[6]), strict=True):
        assert now[:2] == then[:2]
        assert now[2] < then[2] + 3, (then, now)
        assert now[3] < then[3] + 10, (then, now)
    wait_for(lambda: own_only(notebook), "the other GPUs are free")


def remotes(text: str) -> list[tuple[str, int, int, int]]:
    """Of each container: its node, files in shared memory, our processes there, and the files that they have open."""
    told = [json.loads(line.partition("REMOTE ")[2]) for line in text.splitlines() if "REMOTE " in line]
    assert len(told) == 3, text
    return sorted(
        (node, shm, sum(map(len, found.values())), sum(map(sum, found.values()))) for node, shm, found in told
    )


def test_the_example_of_ranks_that_stay_runs_to_its_end(notebook: Notebook):
    """`03-ranks-that-stay.ipynb`: a model built up from cell to cell on two nodes, that has learned something."""
    output = notebook.execute("03-ranks-that-stay")
    assert "I am rank 0 of 2" in output, output
    assert "I am rank 1 of 2" in output, output
    assert re.search(r"from \d+\.\d{3} to 0\.\d{3}", output), output
    wait_for(lambda: own_only(notebook), "the other GPUs are free")


def test_a_lost_node_is_named_and_comes_back(product: Product, notebook: Notebook):
    """`--nnodes 2:3` amid collectives: a node is cut off and named, two go on; it comes back, and three go on."""
    notebook.write(
        "elastic.py",
        """
        import os, signal, time, torch, torch.distributed as dist
        from pathlib import Path
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        dist.init_process_group("gloo")
        saved = Path("elastic.step")
        step = int(saved.read_text()) if saved.exists() else 0
        print("began at", step, "with", dist.get_world_size(), flush=True)
        while not Path("elastic.enough").exists():
            time.sleep(0.1)
            step += 1
            stop = torch.tensor([float(len(told))])
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
        # Empty while it is being written.
        return int((saved.exists() and saved.read_text()) or 0)

    faults = Faults(product, practice_plan(product.paths.instance))
    with notebook.start_cells("%gpu_launch --nnodes 2:3 --max-restarts 3 elastic.py", "%gpu_release") as process:
        output = Output(process)
        output.wait("began at 0 with 3")
        wait_for(lambda: step() > 20, "some steps are done")
        faults.inflict(Moment(after_s=0, what="cut", node="rig3", lasts_s=40))
        output.wait("rig3 is lost", 60)
        output.wait(r"began at [1-9]\d* with 2")
        # Slurm takes a node back some time after it answers again, and the launch looks every minute in the end.
        output.wait(r"began at [1-9]\d* with 3", 240)
        notebook.write("elastic.enough", "")
        text = output.rest()
    faults.heal()
    assert "done" in text, text
    wait_for(lambda: own_only(notebook), "the other GPUs are free", deadline_s=90)
