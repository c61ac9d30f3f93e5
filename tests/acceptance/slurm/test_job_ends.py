"""A lease ends with its Slurm job: scancel, a time limit, and containers that a job leaves on its node."""

from __future__ import annotations

import subprocess

import pytest

from tests.acceptance.slurm.servers import find_lease, is_gone, start
from tests.acceptance.slurm.slurm_commands import SlurmCommands, SlurmObserver
from tests.support.hub.users import Client
from tests.support.product import wait_for


@pytest.fixture(scope="module", autouse=True)
def limited(queue: SlurmCommands, ben: Client) -> dict[str, object]:
    """A server whose job has a time limit of one minute; it runs while other tests do."""
    lease = start(ben, "limited", "rtx5060")
    queue.ask("scontrol", "update", f"jobid={lease['slurm_job']}", "timelimit=1")
    return lease


def containers(observer: SlurmObserver, lease: str) -> list[str]:
    """Return the lease's running containers."""
    return [seen.id for seen in observer.running() if seen.lease == lease]


def test_scancel_ends_the_server(queue, ada, observer):
    """The owner's scancel stops the server, and the lease has the reason."""
    lease = start(ada, "cancelled", "rtx5070")
    wait_for(lambda: len(containers(observer, lease["id"])) == 1, "its container is seen")
    queue.ask("scancel", str(lease["slurm_job"]), user="ada")
    wait_for(lambda: is_gone(ada, "cancelled"), "the server has ended", deadline_s=60)
    wait_for(lambda: queue.state(lease["slurm_job"]) == "", "its job is over")
    assert containers(observer, lease["id"]) == []
    assert "Slurm job" in str(find_lease(ada, lease["id"])["reason"])


def test_epilog_removes_containers_of_the_job(queue, product):
    """The Epilog removes containers with the job's number, running or only created, and no other."""
    job = queue.submit("ben", "--gres=gpu:rtx5090:1")
    wait_for(lambda: queue.state(job) == "RUNNING", "the job runs")
    image = next(iter(docker(product, "images", "--quiet").split()))
    left = docker(product, "create", "--label", f"gpuhub.slurm-job={job}", image, "sleep", "1").strip()
    other = docker(product, "create", "--label", f"gpuhub.slurm-job={job}0", image, "sleep", "1").strip()
    following = queue.submit("ben", "--gres=gpu:rtx5090:1", script="true")
    queue.ask("scancel", str(job), user="ben")
    wait_for(lambda: queue.state(following) == "", "the next job has had the GPU")
    remaining = docker(product, "ps", "--all", "--quiet", "--no-trunc").split()
    docker(product, "rm", other)
    assert left not in remaining
    assert other in remaining


def test_slurm_time_limit_ends_the_server(queue, ben, limited, observer):
    """The server ends at Slurm's time limit, and the lease has a reason that users understand."""
    wait_for(lambda: is_gone(ben, "limited"), "the server has ended", deadline_s=150)
    assert containers(observer, limited["id"]) == []
    assert "time limit" in str(find_lease(ben, limited["id"])["reason"])
    wait_for(lambda: queue.list_lease_jobs() == [], "no job is left of it", deadline_s=60)


def docker(product, *words: str) -> str:
    """Return the address of the first node's Docker."""
    command = ["docker", "-H", product.cluster.nodes[0].docker, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
