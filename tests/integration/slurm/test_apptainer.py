"""Notebooks and launches on nodes with Apptainer: the real one, with a real image file, hub, broker and Slurm.

Ranks run on the CPU, because there is no GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from tests.support.hub.kernel_client import Kernel, open_kernel
from tests.support.product import ROOT, wait_for
from tests.support.slurm.apptainer_image import build_sif
from tests.support.slurm.hub import NB, Cluster, log_in_laptop, slurm_hub, start
from tests.support.slurm.site import USERS

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.torch]

INSTANCE = "ghsif"
FURTHER = """
[[profiles]]
name = "cpu"
title = "No GPU"
gpu_count = 0
cpus = 1
memory = "1GiB"
[jobs]
cpus = 1
memory = "2GiB"
"""
#: More than Apptainer's own limit of 64 MiB, which was the limit of both folders together.
MIB = 100
SURROUNDINGS = f"""
import json, multiprocessing.shared_memory, os, subprocess, sys
def write(path):
    with open(path, "wb") as file:
        for _ in range({MIB}):
            file.write(bytes(1 << 20))
    return os.path.getsize(path) >> 20
def refuses(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return error.strerror
shm = os.listdir("/dev/shm")
shared = multiprocessing.shared_memory.SharedMemory(create=True, size={MIB} << 20)
shared.buf[:] = bytes({MIB} << 20)
print(json.dumps({{
    "home": os.path.expanduser("~"), "cwd": os.getcwd(), "homes": os.listdir("/home"),
    "tmp": os.listdir("/tmp"), "var_tmp": os.listdir("/var/tmp"),
    "shm": shm, "written": [write("/tmp/large"), write("/var/tmp/large")],
    "datasets": refuses("/datasets/file"), "system": refuses("/usr/file"),
    "user": subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip(),
    "privileges": [line for line in open("/proc/self/status") if line.startswith(("CapEff", "NoNewPrivs"))],
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "prefix": sys.prefix, "prompt": os.environ.get("PROMPT_COMMAND"), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "encoding": sys.getfilesystemencoding(), "mask": oct(os.umask(0o22)),
}}))
shared.close()
shared.unlink()
"""
#: The ranks of both nodes add their numbers, and one gets a tensor from a process in shared memory.
EXCHANGE = f"""
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        data = [torch.full(({MIB} << 18,), 2.0)]
        [tensor] = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1)
        print("shared", tensor.is_shared(), tensor.sum().item() / len(tensor))
    print("rank", dist.get_rank(), "on", os.environ["GPUHUB_NODE"], "sum", total.item(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""
#: It imports and starts a program after the signal, which needs the image.
CHECKPOINT = """
    import os, signal, subprocess, sys, time
    def save(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1)
        import xml.dom.minidom
        subprocess.run(["/usr/bin/id"], check=True)
        open(f"saved-{os.environ['RANK']}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    open(f"ready-{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"ready-{rank}") for rank in range(2)):
        time.sleep(0.1)
    print("ready to save", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """An image file that every user can read, unlike pytest's folders."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-notebook-") as name:
        Path(name).chmod(0o755)
        yield build_sif(Path(name))


@pytest.fixture(scope="module")
def cluster(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hub")
    with slurm_hub(
        INSTANCE, folder, image, site_port=27600, port=18460, further=FURTHER, datasets=(ROOT / ".venv").resolve()
    ) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clear(cluster: Cluster) -> Iterator[None]:
    """End what a test has left."""
    yield
    cluster.ada.stop(NB)
    for job in cluster.jobs():
        cluster.site.ask("scancel", str(job))
    cluster.wait_clear()


def write(cluster: Cluster, name: str, script: str) -> None:
    """Write a file into ada's home."""
    file = cluster.site.users["ada"].home / name
    file.write_text(textwrap.dedent(script))
    shutil.chown(file, USERS["ada"], USERS["ada"])


def open_notebook(cluster: Cluster) -> AbstractContextManager[Kernel]:
    """Return a kernel of ada's notebook, through the proxy and over TLS."""
    return open_kernel(f"127.0.0.1:{cluster.hub.port}", cluster.ada, NB)


def processes(image: Path) -> dict[int, bytes]:
    """Return the command lines of ada's processes that have the image open, or are in its container."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                is_adas = entry.stat().st_uid == USERS["ada"]
                files = [file.readlink() for file in (entry / "fd").iterdir()] if is_adas else []
                if image in files or (is_adas and os.fsencode(image) in (entry / "environ").read_bytes()):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return found


def folders() -> list[Path]:
    """Return ada's folders for temporary files on the nodes."""
    return [path for path in Path("/tmp").glob("gpuhub-job-*") if path.stat().st_uid == USERS["ada"]]


def wait_gone(image: Path) -> None:
    """Wait until no process is left, and no folder, which the job's script removes after its processes."""
    wait_for(lambda: not processes(image), lambda: f"no process is left: {processes(image)}", 30)
    wait_for(lambda: not folders(), lambda: f"no folder is left: {folders()}", 30)


def read_log(cluster: Cluster) -> str:
    return (cluster.site.users["ada"].home / ".gpuhub" / f"notebook-{NB}.log").read_text()


def test_notebook_sees_only_its_home_and_the_datasets(cluster: Cluster, image: Path) -> None:
    job = start(cluster, cluster.ada)
    with open_notebook(cluster) as kernel:
        seen = json.loads(kernel.run(SURROUNDINGS))
        kernel.run("open('of-ada', 'w').close()")
        homes = cluster.site.users["ben"].home.parent
        hidden = kernel.run(f"print(os.path.exists({str(image)!r}), os.path.exists({str(homes)!r}))")
    assert {key: seen[key] for key in ("home", "cwd", "homes", "user", "prefix", "prompt", "gpus")} == {
        "home": "/home/ada",
        "cwd": "/home/ada",
        "homes": ["ada"],
        "user": "ada",
        "prefix": "/opt/gpuhub",
        "prompt": None,
        "gpus": "0",
    }
    assert hidden == "False False\n"
    # Only the folder of the kernels' sockets is there, and nothing of the node's own /tmp.
    [sockets] = seen["tmp"]
    assert sockets.startswith(f"gpuhub-{USERS['ada']}-")
    assert (seen["var_tmp"], seen["shm"], seen["written"]) == ([], [], [MIB, MIB])
    assert (seen["datasets"], seen["system"]) == ("Read-only file system", "Read-only file system")
    assert seen["privileges"] == ["CapEff:\t0000000000000000\n", "NoNewPrivs:\t1\n"]
    assert max(seen["processes"]) < 1000
    assert (seen["encoding"], seen["mask"]) == ("utf-8", "0o22")
    owner = (cluster.site.users["ada"].home / "of-ada").stat()
    assert (owner.st_uid, owner.st_gid) == (USERS["ada"], USERS["ada"])
    assert any(b"squashfuse" in command for command in processes(image).values())
    [folder] = folders()
    assert folder.stat().st_mode & 0o777 == 0o700
    # With control groups Slurm signals the script alone, before it kills all of the job.
    cluster.site.ask("scancel", str(job), user="ada")
    wait_for(lambda: not cluster.job_of("ada"), "the job has ended", 60)
    wait_gone(image)
    log = read_log(cluster)
    assert "received signal 15" in log, log
    for message in ("WARNING", "Bus error", "Transport endpoint"):
        assert message not in log, log


def test_launch_shares_memory_and_adds_over_two_nodes(cluster: Cluster, image: Path) -> None:
    write(cluster, "exchange.py", EXCHANGE)
    start(cluster, cluster.ada, "cpu")
    with open_notebook(cluster) as kernel:
        output = kernel.run("%gpu_launch --nnodes 2 --keep 0s exchange.py")
        assert "on rig1 sum 3.0" in output, output
        assert "on rig2 sum 3.0" in output, output
        assert "shared True 2.0" in output, output
        # A cancelled job can save its state, which needs the image after the signal.
        write(cluster, "save.py", CHECKPOINT)
        kernel.run("%gpu_launch --detach --nnodes 2 save.py")
        status, jobs = cluster.ada.ask(cluster.ada.broker, "GET", "/jobs")
        assert status == 200, jobs
        [job] = jobs
        home = cluster.site.users["ada"].home
        log = home / ".gpu_launch" / "jobs" / job["run_id"] / "output.log"
        wait_for(lambda: log.exists() and "ready to save" in log.read_text(), "it runs", 120)
        assert cluster.ada.ask(cluster.ada.broker, "DELETE", f"/jobs/{job['id']}")[0] == 200
        wait_for(lambda: len(cluster.jobs_of("ada")) == 1, "only the notebook is left", 60)
        assert sorted(path.name for path in home.glob("saved-*")) == ["saved-0", "saved-1"], log.read_text()
    cluster.ada.stop(NB)
    cluster.wait_clear()
    wait_gone(image)


def test_laptop_sends_files_and_opens_a_terminal(cluster: Cluster, image: Path, tmp_path: Path) -> None:
    """Files go through a container on the head node, and a terminal is in one more on the worker's node."""
    laptop = log_in_laptop(cluster, tmp_path)
    laptop.write("sleep.py", "import time; print('sleeping', flush=True); time.sleep(600)")
    laptop.run("run", "--detach", "--nnodes", "2", "sleep.py")
    status, [job] = cluster.ada.ask(cluster.ada.broker, "GET", "/jobs")
    assert status == 200
    run = str(job["run_id"])
    wait_for(lambda: "sleeping" in laptop.run("logs", run), "the job runs", 120)
    show = "echo on $GPUHUB_NODE with $GPUHUB_GPU_UUIDS in $(ls /home) as $(id -un); exit 3"
    shown = laptop.run("shell", run, "--worker", "1", "--", "sh", "-c", show, code=3)
    assert "on rig2 with SLURM-rig2-0 in ada as ada" in shown, shown
    [folder] = (cluster.site.users["ada"].home / "gpu-launch").iterdir()
    laptop.run("cp", f"home:gpu-launch/{folder.name}/sleep.py", "fetched.py")
    assert (laptop.work / "fetched.py").read_text() == (laptop.work / "sleep.py").read_text()
    laptop.run("cancel", run)
    cluster.wait_clear()
    wait_gone(image)
