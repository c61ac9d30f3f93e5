"""The lease's end and its Slurm job's are one: scancel, a time limit, and what a job leaves on its node."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.users import Client

from ..conftest import wait_for
from .conftest import find_lease, is_gone, start
from .queue import Queue, SlurmObserver


@pytest.fixture(scope="module", autouse=True)
def limited(queue: Queue, ben: Client) -> dict[str, object]:
    """A server whose job Slurm ends after a minute, on which the others need not wait."""
    lease = start(ben, "limited", "rtx5060")
    queue.ask("scontrol", "update", f"jobid={lease['slurm_job']}", "timelimit=1")
    return lease


def containers(observer: SlurmObserver, lease: str) -> list[str]:
    """Its running containers."""
    return [seen.id for seen in observer.running() if seen.lease == lease]


def test_scancel_ends_the_server(queue, ada, observer):
    """Its owner's scancel is as good as the stop button, and the lease says what happened."""
    lease = start(ada, "cancelled", "rtx5070")
    wait_for(lambda: len(containers(observer, lease["id"])) == 1, "its container is seen")
    queue.ask("scancel", str(lease["slurm_job"]), user="ada")
    wait_for(lambda: is_gone(ada, "cancelled"), "the server has ended", deadline_s=60)
    wait_for(lambda: queue.state(lease["slurm_job"]) == "", "its job is over")
    assert containers(observer, lease["id"]) == []
    assert "Slurm job" in str(find_lease(ada, lease["id"])["reason"])


def test_what_a_job_leaves_is_removed_before_its_gpu_is_given(queue, product):
    """The Epilog removes a container with the job's number, running or only created, and no other."""
    job = queue.submit("ben", "--gres=gpu:rtx5090:1")
    wait_for(lambda: queue.state(job) == "RUNNING", "the job runs")
    image = next(iter(docker(product, "images", "--quiet").split()))
    left = docker(product, "create", "--label", f"gpuhub.slurm-job={job}", image, "sleep", "1").strip()
    other = docker(product, "create", "--label", f"gpuhub.slurm-job={job}0", image, "sleep", "1").strip()
    following = queue.submit("ben", "--gres=gpu:rtx5090:1", script="true")
    queue.ask("scancel", str(job), user="ben")
    wait_for(lambda: queue.state(following) == "", "the next job has had the GPU")
    found = docker(product, "ps", "--all", "--quiet", "--no-trunc").split()
    docker(product, "rm", other)
    assert left not in found
    assert other in found


def test_slurm_s_time_limit_ends_the_server(queue, ben, limited, observer):
    """The lease's end is Slurm's, with a reason that a user understands."""
    wait_for(lambda: is_gone(ben, "limited"), "the server has ended", deadline_s=150)
    assert containers(observer, limited["id"]) == []
    assert "time limit" in str(find_lease(ben, limited["id"])["reason"])
    wait_for(lambda: queue.ours() == [], "no job is left of it", deadline_s=60)


def docker(product, *words: str) -> str:
    """On the first node."""
    command = ["docker", "-H", product.cluster.nodes[0].docker, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
