"""Everyday work with Slurm on nodes without Docker: arrays, chains of jobs, instances, stacks and displays.

Hub, broker, Slurm, notebook and kernel are real; ranks run on the CPU, because there is no GPU.
"""

from __future__ import annotations

import json
import time

import pytest

from tests.support.hub.installed_laptop import Laptop
from tests.support.hub.kernel_client import Kernel
from tests.support.launch.rank_scripts import HANG
from tests.support.product import wait_for
from tests.support.slurm.hub import Cluster
from tests.support.slurm.launches import jobs, launches, ssh, wait_free, write
from tests.support.slurm.site import USERS

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.torch]


def test_array_runs_some_of_its_tasks_at_a_time(cluster: Cluster, laptop: Laptop) -> None:
    """Slurm does not see the others before their turn has come; each task has its index, and one fails."""
    laptop.write(
        "task.py",
        """
        import os, sys
        index = int(os.environ["GPU_LAUNCH_ARRAY_INDEX"])
        open(f"task-{index}", "w").close()
        sys.exit(5 if index == 2 else 0)
        """,
    )
    laptop.run("run", "--array", "0-2%1", "--name", "sweep", "task.py")
    most = 0

    def is_over() -> bool:
        nonlocal most
        most = max(most, len(launches(cluster)))
        return all(job["state"] == "ended" for job in jobs(cluster)[:3])

    wait_for(is_over, lambda: f"the array has ended: {jobs(cluster)[:3]}", 240)
    assert most == 1
    assert sorted(str(job["exit_code"]) for job in jobs(cluster)[:3]) == ["0", "0", "5"]
    [folder] = {path.parent for path in (cluster.site.users["ada"].home / "gpu-launch").glob("*/task-0")}
    assert sorted(path.name for path in folder.glob("task-*")) == [f"task-{index}" for index in range(3)]
    assert {path.stat().st_uid for path in folder.glob("task-*")} == {USERS["ada"]}
    wait_free(cluster)


def test_job_starts_after_another_one_has_succeeded(cluster: Cluster, laptop: Laptop) -> None:
    """It is not in Slurm before; after a failure it ends without having run."""
    laptop.write("first.py", "import sys, time; time.sleep(5); sys.exit(int(sys.argv[1]))")
    laptop.write("second.py", "print('the second runs')")
    for code in ("0", "4"):
        laptop.run("run", "--detach", "--name", f"first-{code}", "first.py", code)
        laptop.run("run", "--detach", "--name", f"second-{code}", "--after", f"first-{code}", "second.py")
    wait_for(lambda: len(launches(cluster)) == 2, "the first ones are submitted, and no other")
    wait_for(lambda: all(job["state"] == "ended" for job in jobs(cluster)[:4]), lambda: f"{jobs(cluster)[:4]}", 120)
    ended = {str(job["name"]): job for job in jobs(cluster)[:4]}
    codes = {name: job["exit_code"] for name, job in ended.items()}
    assert codes == {"first-0": 0, "second-0": 0, "first-4": 4, "second-4": None}
    assert "did not succeed" in str(ended["second-4"]["reason"])
    assert "the second runs" in laptop.run("logs", "second-0")
    wait_free(cluster)


def test_instance_is_started_used_and_stopped_from_the_laptop(cluster: Cluster, laptop: Laptop) -> None:
    output = laptop.run("instance", "start", "--name", "big", "--profile", "gpu")
    assert "gpu-launch instance ssh big" in output, output
    [job] = cluster.jobs_of("ada")[-1:]
    assert "big" in laptop.run("instance", "list")
    shown = laptop.run("instance", "ssh", "big", "--", "echo", "in $SLURM_JOB_ID on $(hostname)")
    assert f"in {job} on" in shown, shown
    assert ssh(laptop, "gpuhub-big", "id -u") == [str(USERS["ada"])]
    laptop.run("instance", "stop", "big")
    wait_for(lambda: job not in cluster.jobs_of("ada"), "its Slurm job has ended", 60)
    [listed] = [row for row in json.loads(laptop.run("instance", "list", "--json")) if row["name"] == "big"]
    assert listed["state"] != "running", listed


@pytest.mark.parametrize(("option", "value", "reason"), [("--retry", "1", "start again"), ("--port", "8000", "port")])
def test_what_needs_docker_is_refused_with_the_reason(
    cluster: Cluster, laptop: Laptop, option: str, value: str, reason: str
) -> None:
    laptop.write("serve.py", "print('it runs')")
    output = laptop.run("run", option, value, "serve.py", code=1)
    assert "on nodes without Docker" in output, output
    assert reason in output, output
    assert not launches(cluster)


def test_stacks_of_ranks_that_hang(cluster: Cluster, cell: Kernel, laptop: Laptop) -> None:
    """From a notebook and from the laptop, of ranks on two nodes."""
    write(cluster, "hang.py", HANG)
    cell.run("%gpu_launch --detach --nnodes 2 hang.py")
    run = str(jobs(cluster)[0]["run_id"])
    wait_for(lambda: laptop.run("logs", run).count("hanging"), "the ranks run", 120)
    time.sleep(1)
    for shown in (cell.run(f"%gpu_stacks {run}"), laptop.run("stacks", run)):
        assert "wait_for_ever" in shown, shown
        assert "compute" in shown, shown
    cell.run(f"%gpu_cancel {run}")
    wait_free(cluster)


def test_displays_of_ranks_have_tabs(cluster: Cluster, cell: Kernel) -> None:
    """And the variables of ranks stay for the next cell."""
    cell.run("%%gpu_ranks --nnodes 2\nfrom IPython.display import HTML\nnumber = rank + 1")
    output = cell.run("%%gpu_ranks\ndisplay(HTML(f'<b>of rank {rank}</b>'))\nnumber")
    assert "rank 0: 1 display, rank 1: 1 display" in output, output
    assert "[rank 1 · rig2] 2" in output, output
    cell.run("%gpu_ranks --stop")
    cell.run("%gpu_release")
    wait_free(cluster)
