"""`%gpu_launch` on nodes without Docker: a launch is a Slurm job of its owner, with a worker on each node. The real hub,
broker, Slurm, notebook and kernel; ranks on the CPU, as there is no card.
"""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import Kernel, kernel
from tests.support.product import ROOT, wait_for
from tests.support.slurm_hub import NB, Cluster, build_environment, leases, slurm_hub, start
from tests.support.slurm_site import USERS

INSTANCE = "ghjobs"
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
ALL_REDUCE = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "on", os.environ["GPUHUB_NODE"], "sum", total.item())
    dist.barrier()
    dist.destroy_process_group()
"""
CHECKPOINT = """
    import signal, sys, time, os
    def save(*_):
        time.sleep(1)
        open(f"saved-{os.environ['RANK']}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    # Both are ready when this is said.
    open(f"ready-{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"ready-{rank}") for rank in range(2)):
        time.sleep(0.1)
    print("ready to save", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def command() -> Iterator[Path]:
    """As docs/slurm.md says to make it; torch and what else is large are those of this environment."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-notebook-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        found = build_environment(folder, "ipykernel", "ipyparallel", str(ROOT / "extensions"))
        packages = next((folder / "env" / "lib").glob("python3.*")) / "site-packages"
        ours = next((ROOT / ".venv" / "lib").glob("python3.*")) / "site-packages"
        (packages / "ours.pth").write_text(f"{ours}\n")
        shutil.copytree(ROOT / "extensions" / "gpu_launch" / "image_config", folder / "env" / "etc" / "ipython")
        yield found


@pytest.fixture(scope="module")
def cluster(command: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hub")
    with slurm_hub(INSTANCE, folder, command, site_port=27500, port=18440, further=FURTHER) as cluster:
        write(cluster, "reduce.py", ALL_REDUCE)
        write(cluster, "sleep.py", "import time; print('sleeping', flush=True); time.sleep(600)")
        yield cluster


@pytest.fixture(scope="module")
def cell(cluster: Cluster) -> Iterator[Kernel]:
    """A kernel of ada's notebook, which has no GPU itself."""
    start(cluster, cluster.ada, "cpu")
    with kernel(f"127.0.0.1:{cluster.hub.port}", cluster.ada, NB) as found:
        yield found
    cluster.ada.stop(NB)
    cluster.wait_clear()


@pytest.fixture(autouse=True)
def clear(cluster: Cluster) -> Iterator[None]:
    """What a test leaves is in no other's way."""
    yield
    for job in [*launches(cluster), *cluster.jobs_of("ben")]:
        cluster.site.ask("scancel", str(job))
    wait_free(cluster)


def write(cluster: Cluster, name: str, script: str, user: str = "ada") -> None:
    """A file in the user's home."""
    file = cluster.site.users[user].home / name
    file.write_text(textwrap.dedent(script))
    shutil.chown(file, USERS[user], USERS[user])


def launches(cluster: Cluster) -> list[int]:
    """ada's jobs but the oldest, which is the notebook."""
    return cluster.jobs_of("ada")[1:]


def workers() -> list[int]:
    """Processes of anybody's workers, engines and ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_adas = entry.stat().st_uid == USERS["ada"]
                command = (entry / "cmdline").read_bytes()
                is_worker = (
                    b"gpu-launch-worker" in command or b"gpu_launch.ranks" in command or b"engine_process" in command
                )
            except OSError:
                continue
            if is_adas and is_worker:
                found.append(int(entry.name))
    return found


def wait_free(cluster: Cluster) -> None:
    """Until nothing but the notebook is left, in Slurm and on the nodes."""
    wait_for(lambda: not launches(cluster), "no job of a launch is left", 60)
    wait_for(lambda: not workers(), "no process of a launch is left", 30)


def test_two_nodes_reduce_and_the_next_launch_has_the_same_workers(cluster: Cluster, cell: Kernel) -> None:
    said = cell.run("%gpu_launch --nnodes 2 reduce.py")
    assert "on rig1 sum 3.0" in said, said
    assert "on rig2 sum 3.0" in said, said
    [job] = launches(cluster)
    assert cluster.site.ask("squeue", "-h", "-j", str(job), "-o", "%D %U").split() == ["2", str(USERS["ada"])]
    said = cell.run("%gpu_launch --nnodes 2 reduce.py")
    assert "sum 3.0" in said, said
    assert launches(cluster) == [job]
    cell.run("%gpu_release")
    wait_free(cluster)


def test_a_failing_ranks_own_traceback_comes_first(cluster: Cluster, cell: Kernel) -> None:
    write(
        cluster,
        "fail.py",
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("rank one is unwell")
        time.sleep(60)
        """,
    )
    said = cell.run("%gpu_launch --nnodes 2 --keep 0s fail.py")
    assert "rank 1 on rig2" in said, said
    assert "ValueError: rank one is unwell" in said, said
    wait_free(cluster)


def test_scancel_is_told_in_the_notebook(cluster: Cluster, cell: Kernel) -> None:
    messages = cell.messages(cell.begin("%gpu_launch --nnodes 2 sleep.py"))
    while "sleeping" not in next(messages):
        pass
    [job] = launches(cluster)
    cluster.site.ask("scancel", str(job), user="ada")
    said = "".join(messages)
    assert "The workers were stopped: its Slurm job was" in said, said
    wait_free(cluster)


def test_an_elastic_launch_takes_what_there_is(cluster: Cluster, cell: Kernel) -> None:
    blocking = cluster.site.submit("ben", "--gres=gpu:rtx5090:1")
    cluster.site.wait_for_state(blocking, "RUNNING")
    said = cell.run("%gpu_launch --nnodes 1:2 --keep 0s reduce.py")
    assert "rank 0 on rig2 sum 1.0" in said, said
    cluster.site.ask("scancel", str(blocking))
    wait_free(cluster)


def test_an_elastic_launch_grows_by_another_job(cluster: Cluster, cell: Kernel) -> None:
    write(
        cluster,
        "grow.py",
        """
        import os, time
        print("world of", os.environ["WORLD_SIZE"], flush=True)
        time.sleep(600 if os.environ["WORLD_SIZE"] == "1" else 0)
        """,
    )
    blocking = cluster.site.submit("ben", "--gres=gpu:rtx5090:1")
    cluster.site.wait_for_state(blocking, "RUNNING")
    messages = cell.messages(cell.begin("%gpu_launch --nnodes 1:2 --keep 0s grow.py"))
    while "world of 1" not in next(messages):
        pass
    [first] = launches(cluster)
    cluster.site.ask("scancel", str(blocking))
    said = next(text for text in messages if "world of 2" in text)
    jobs = launches(cluster)
    assert jobs[0] == first, said
    assert len(jobs) == 2, said
    assert "Error" not in "".join(messages)
    wait_free(cluster)


@pytest.mark.parametrize(("script", "code"), [("reduce.py", 0), ("exits.py", 3)])
def test_a_detached_job_goes_on_by_itself(cluster: Cluster, cell: Kernel, script: str, code: int) -> None:
    write(cluster, "exits.py", "import sys; print('exits', flush=True); sys.exit(3)")
    cell.run(f"%gpu_launch --detach --nnodes 2 {script}")
    job = jobs(cluster)[0]
    wait_for(lambda: jobs(cluster)[0]["state"] == "ended", "the job has ended", 120)
    ended = jobs(cluster)[0]
    output = cluster.site.users["ada"].home / ".gpu_launch" / "jobs" / str(job["run_id"]) / "output.log"
    assert ended["exit_code"] == code, (ended, output.read_text())
    assert ("sum 3.0" if code == 0 else "exits") in output.read_text()
    wait_free(cluster)


def test_a_detached_job_that_is_cancelled_has_time_to_save(cluster: Cluster, cell: Kernel) -> None:
    write(cluster, "save.py", CHECKPOINT)
    cell.run("%gpu_launch --detach --nnodes 2 save.py")
    job = jobs(cluster)[0]
    home = cluster.site.users["ada"].home
    output = home / ".gpu_launch" / "jobs" / str(job["run_id"]) / "output.log"
    wait_for(lambda: output.exists() and "ready to save" in output.read_text(), "it runs", 120)
    status, _ = cluster.ada.ask(cluster.ada.broker, "DELETE", f"/jobs/{job['id']}")
    assert status == 200
    wait_free(cluster)
    wait_for(lambda: jobs(cluster)[0]["state"] == "ended", "the broker knows it", 30)
    assert sorted(path.name for path in home.glob("saved-*")) == ["saved-0", "saved-1"]


def test_the_notebooks_own_gpu_takes_part(cluster: Cluster, cell: Kernel) -> None:
    del cell  # ada's notebook is there, as before
    write(cluster, "reduce.py", ALL_REDUCE, user="ben")
    start(cluster, cluster.ben, "gpu")
    try:
        with kernel(f"127.0.0.1:{cluster.hub.port}", cluster.ben, NB) as own:
            [gpu] = leases(cluster.ben)[0]["gpus"]
            assert own.run("import os; print(os.environ['GPUHUB_GPU_UUIDS'])").split() == [gpu["uuid"]]
            said = own.run("%gpu_launch --nnodes 2 reduce.py")
            assert "rank 0 on rig1 sum 3.0" in said, said
            assert "rank 1 on rig2 sum 3.0" in said, said
    finally:
        cluster.ben.stop(NB)
    wait_for(lambda: not cluster.jobs_of("ben"), "no job of ben's is left", 60)


def jobs(cluster: Cluster) -> list[dict[str, object]]:
    """ada's jobs as the broker tells of them, the newest first."""
    status, found = cluster.ada.ask(cluster.ada.broker, "GET", "/jobs?ended=true")
    assert status == 200, found
    return list(found["jobs"] if isinstance(found, dict) else found)
