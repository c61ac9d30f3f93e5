"""`%gpu_launch` on nodes without Docker: a launch is a Slurm job of its owner, with a worker on each node.

Hub, broker, Slurm, notebook and kernel are real; ranks run on the CPU, because there is no GPU.
"""

from __future__ import annotations

import pytest

from tests.support.hub.installed_laptop import Laptop
from tests.support.hub.kernel_client import Kernel, open_kernel
from tests.support.product import wait_for
from tests.support.slurm.hub import NB, Cluster, leases, start
from tests.support.slurm.launches import ALL_REDUCE, find_processes, jobs, launches, ssh, wait_free, write
from tests.support.slurm.site import USERS

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.torch]

CHECKPOINT = """
    import signal, sys, time, os
    def save(*_):
        time.sleep(1)
        open(f"saved-{os.environ['RANK']}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    # Both are ready when this is printed.
    open(f"ready-{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"ready-{rank}") for rank in range(2)):
        time.sleep(0.1)
    print("ready to save", flush=True)
    time.sleep(600)
"""


def test_two_nodes_reduce_and_the_next_launch_reuses_the_workers(cluster: Cluster, cell: Kernel) -> None:
    output = cell.run("%gpu_launch --nnodes 2 reduce.py")
    assert "on rig1 sum 3.0" in output, output
    assert "on rig2 sum 3.0" in output, output
    [job] = launches(cluster)
    assert cluster.site.ask("squeue", "-h", "-j", str(job), "-o", "%D %U").split() == ["2", str(USERS["ada"])]
    output = cell.run("%gpu_launch --nnodes 2 reduce.py")
    assert "sum 3.0" in output, output
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
    output = cell.run("%gpu_launch --nnodes 2 --keep 0s fail.py")
    assert "rank 1 on rig2" in output, output
    assert "ValueError: rank one is unwell" in output, output
    wait_free(cluster)


def test_scancel_is_reported_in_the_notebook(cluster: Cluster, cell: Kernel) -> None:
    messages = cell.messages(cell.begin("%gpu_launch --nnodes 2 sleep.py"))
    while "sleeping" not in next(messages):
        pass
    [job] = launches(cluster)
    cluster.site.ask("scancel", str(job), user="ada")
    output = "".join(messages)
    assert "The workers were stopped: its Slurm job was" in output, output
    wait_free(cluster)


def test_elastic_launch_starts_with_the_free_nodes(cluster: Cluster, cell: Kernel) -> None:
    blocking = cluster.site.submit("ben", "--gres=gpu:rtx5090:1")
    cluster.site.wait_for_state(blocking, "RUNNING")
    output = cell.run("%gpu_launch --nnodes 1:2 --keep 0s reduce.py")
    assert "rank 0 on rig2 sum 1.0" in output, output
    cluster.site.ask("scancel", str(blocking))
    wait_free(cluster)


def test_elastic_launch_grows_with_a_second_slurm_job(cluster: Cluster, cell: Kernel) -> None:
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
    output = next(text for text in messages if "world of 2" in text)
    jobs = launches(cluster)
    assert jobs[0] == first, output
    assert len(jobs) == 2, output
    assert "Error" not in "".join(messages)
    wait_free(cluster)


@pytest.mark.parametrize(("script", "code"), [("reduce.py", 0), ("exits.py", 3)])
def test_detached_job_continues_without_the_notebook(cluster: Cluster, cell: Kernel, script: str, code: int) -> None:
    write(cluster, "exits.py", "import sys; print('exits', flush=True); sys.exit(3)")
    cell.run(f"%gpu_launch --detach --nnodes 2 {script}")
    job = jobs(cluster)[0]
    wait_for(lambda: jobs(cluster)[0]["state"] == "ended", "the job has ended", 120)
    ended = jobs(cluster)[0]
    output = cluster.site.users["ada"].home / ".gpu_launch" / "jobs" / str(job["run_id"]) / "output.log"
    assert ended["exit_code"] == code, (ended, output.read_text())
    assert ("sum 3.0" if code == 0 else "exits") in output.read_text()
    wait_free(cluster)


def test_cancelled_detached_job_has_a_grace_period(cluster: Cluster, cell: Kernel) -> None:
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


def test_laptop_sends_a_folder_and_gets_output_and_files(cluster: Cluster, laptop: Laptop) -> None:
    """The folder arrives in the home, ranks of two nodes write to it, and the results come back."""
    laptop.write(
        "train.py",
        ALL_REDUCE
        + """
    from helper import NAME
    if os.environ["RANK"] == "0":
        os.makedirs("results", exist_ok=True)
        open("results/out.txt", "w").write("the result of " + NAME)
    """,
    )
    laptop.write("helper.py", "NAME = 'helper'")
    output = laptop.run("run", "--nnodes", "2", "train.py")
    assert "on rig1 sum 3.0" in output, output
    assert "on rig2 sum 3.0" in output, output
    job = jobs(cluster)[0]
    assert "on rig2 sum 3.0" in laptop.run("logs", str(job["run_id"]))
    shared = f"/shared/{job['id']}/logs"
    assert cluster.ben.ask(cluster.ben.broker, "GET", shared)[0] == 404
    laptop.run("share", str(job["run_id"]), "--with", "ben")
    status, output = cluster.ben.ask(cluster.ben.broker, "GET", shared)
    assert status == 200, output
    assert "on rig2 sum 3.0" in output
    [folder] = [path.parent for path in (cluster.site.users["ada"].home / "gpu-launch").glob("*/results")]
    laptop.run("cp", f"home:gpu-launch/{folder.name}/results", "fetched")
    assert (laptop.work / "fetched/out.txt").read_text() == "the result of helper"
    assert folder.stat().st_uid == USERS["ada"]
    wait_free(cluster)


def test_laptop_opens_a_terminal_beside_a_worker(cluster: Cluster, cell: Kernel, laptop: Laptop) -> None:
    """It is on the worker's node, in its Slurm job, with its GPU; it ends with its client, and the job continues."""
    del cell  # ada's notebook is running as well
    laptop.write("sleep.py", "import time; print('sleeping', flush=True); time.sleep(600)")
    laptop.run("run", "--detach", "--nnodes", "2", "sleep.py")
    run = str(jobs(cluster)[0]["run_id"])
    wait_for(lambda: "sleeping" in laptop.run("logs", run), "the job runs", 120)
    [job] = launches(cluster)
    show = "echo on $GPUHUB_NODE in $SLURM_JOB_ID with $GPUHUB_GPU_UUIDS as $(id -u); cat; exit 3"
    shown = laptop.run("shell", run, "--worker", "1", "--", "sh", "-c", show, code=3, stdin="typed\x04")
    assert f"on rig2 in {job} with SLURM-rig2-0 as {USERS['ada']}" in shown, shown
    assert "typed" in shown, shown
    home = str(cluster.site.users["ada"].home)
    assert ssh(laptop, f"gpuhub-{run}.1", "echo $GPUHUB_NODE; id -u; pwd") == ["rig2", str(USERS["ada"]), home]
    with laptop.start("shell", run, "--", "sh", "-c", "echo begun; exec sleep 1234") as terminal:
        assert terminal.stdout is not None
        assert any("begun" in line for line in terminal.stdout)
        wait_for(lambda: find_processes(b"sleep\x001234"), "the terminal's program runs")
        terminal.kill()
    wait_for(lambda: not find_processes(b"sleep\x001234"), "the terminal's processes have ended", 30)
    wait_for(lambda: not find_processes(b"srun\0--jobid"), "the terminal's step has ended", 30)
    status, refusal = cluster.ben.ask(cluster.ben.broker, "GET", f"/jobs/{jobs(cluster)[0]['id']}/logs")
    assert status == 404, refusal
    assert launches(cluster) == [job]
    laptop.run("cancel", run)
    wait_free(cluster)


def test_ssh_lands_in_the_notebook(cluster: Cluster, cell: Kernel, laptop: Laptop) -> None:
    """It is in the notebook's Slurm job, with its variables, home and Python."""
    [job] = cluster.jobs_of("ada")
    python = cell.run("import sys; print(sys.prefix)").strip()
    shown = ssh(
        laptop, f"gpuhub-{NB}", "echo $SLURM_JOB_ID $JUPYTERHUB_USER; pwd; python3 -c 'import sys; print(sys.prefix)'"
    )
    assert shown == [str(job), "ada", str(cluster.site.users["ada"].home), python]


def test_cells_share_the_worker_of_one_slurm_job(cluster: Cluster, cell: Kernel) -> None:
    """`%%gpu` is a Slurm job of its owner, whose worker stays for the next cell and ends with `--stop`."""
    cell.run("numbers = [1]")
    output = cell.run("%%gpu\nimport os\nnumbers.append(2)\npid = os.getpid()\nprint('in', os.environ['GPUHUB_NODE'])")
    assert "in rig" in output, output
    [job] = launches(cluster)
    assert cluster.site.ask("squeue", "-h", "-j", str(job), "-o", "%D %U").split() == ["1", str(USERS["ada"])]
    output = cell.run("%%gpu\nnumbers.append(os.getpid() == pid)")
    assert cell.run("print(numbers)") == "[1, 2, True]\n", output
    assert launches(cluster) == [job]
    assert "is released" in cell.run("%gpu --stop")
    wait_free(cluster)


def test_notebooks_own_gpu_is_used(cluster: Cluster, cell: Kernel) -> None:
    del cell  # ada's notebook is still running
    write(cluster, "reduce.py", ALL_REDUCE, user="ben")
    start(cluster, cluster.ben, "gpu")
    try:
        with open_kernel(f"127.0.0.1:{cluster.hub.port}", cluster.ben, NB) as own:
            [gpu] = leases(cluster.ben)[0]["gpus"]
            assert own.run("import os; print(os.environ['GPUHUB_GPU_UUIDS'])").split() == [gpu["uuid"]]
            output = own.run("%gpu_launch --nnodes 2 reduce.py")
            assert "rank 0 on rig1 sum 3.0" in output, output
            assert "rank 1 on rig2 sum 3.0" in output, output
    finally:
        cluster.ben.stop(NB)
    wait_for(lambda: not cluster.jobs_of("ben"), "no job of ben's is left", 60)
