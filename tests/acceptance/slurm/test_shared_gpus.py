"""Notebooks and plain sbatch jobs share GPUs, and Slurm gives each GPU to one of them at a time."""

from __future__ import annotations

import threading

from tests.acceptance.slurm.servers import lease_of, start, stop
from tests.acceptance.slurm.slurm_commands import SlurmCommands, SlurmObserver
from tests.acceptance.user_load import UserLoad
from tests.support.product import wait_for

LOAD_S = 30.0


def test_notebooks_and_plain_jobs_wait_for_each_other(queue, ada, ben):
    """A plain job waits for a notebook's GPU, and a notebook for that job's, in the order of submission."""
    held = start(ada, "first", "rtx5090")
    (row,) = queue.list_lease_jobs()
    assert (row.id, row.state, row.node) == (held["slurm_job"], "RUNNING", "rig1")
    job = queue.submit("ben", "--gres=gpu:rtx5090:1")
    ada.start("second", "rtx5090")
    wait_for(lambda: lease_of(ada, "second").get("slurm_job"), "the second server's request is in Slurm's queue")
    assert queue.state(job) == "PENDING"
    stop(ada, "first")
    wait_for(lambda: queue.state(job) == "RUNNING", "ben's job runs when the notebook has gone")
    wait_for(lambda: lease_of(ada, "second")["position"] == 1, "the second server is next")
    assert lease_of(ada, "second")["waiting_for"]
    wait_for(lambda: holder(ada).get("slurm_job") == job, lambda: f"users see ben's job: {holder(ada)}")
    assert holder(ada)["owner"] == "ben", "the holder has a name, although the head node has no such account"
    queue.ask("scancel", str(job), user="ben")
    wait_for(lambda: ada.is_ready("second"), "the server starts when the job has gone", deadline_s=60)
    stop(ada, "second")
    wait_for(lambda: queue.list_lease_jobs() == [], "no job is left of them")


def test_cancelled_start_leaves_no_job(queue, ada):
    """A cancelled start leaves no job in Slurm's queue."""
    job = queue.submit("ben", "--gres=gpu:rtx5060:1")
    wait_for(lambda: queue.state(job) == "RUNNING", "the plain job runs")
    ada.start("patient", "rtx5060")
    wait_for(lambda: [row.state for row in queue.list_lease_jobs()] == ["PENDING"], "the request waits in Slurm")
    ada.stop("patient")
    wait_for(lambda: queue.list_lease_jobs() == [], "its job is cancelled")
    assert queue.state(job) == "RUNNING"
    queue.ask("scancel", str(job), user="ben")
    wait_for(lambda: queue.state(job) == "", "the plain job has gone")


def test_no_gpu_is_used_twice_under_load(queue: SlurmCommands, ada, ben, observer: SlurmObserver):
    """No GPU is used twice while servers, launches and sbatch jobs start and end; every daemon and Slurm are watched."""
    load = UserLoad([ada, ben], 5, ("rtx5090", "rtx5070", "rtx5060", "cpu"))
    over = threading.Event()
    plain = threading.Thread(target=keep_submitting, args=(queue, over))
    observer.most = (0, 0)
    load.begin()
    plain.start()
    try:
        over.wait(LOAD_S)
        # Some jobs and servers must have run, however slow the machine is.
        wait_for(
            lambda: (load.done["notebooks"] and min(observer.most)) or load.failures,
            lambda: f"notebooks and plain jobs have run: {load.done}, {observer.most}",
            deadline_s=240,
        )
    finally:
        over.set()
        plain.join(60)
        load.pause()
        load.end()
    assert load.failures == []
    assert load.done["notebooks"] > 0
    assert min(observer.most) > 0, "plain jobs and containers were seen"
    assert observer.double == []
    wait_for(lambda: queue.list_jobs() == [], lambda: f"Slurm's queue is empty: {queue.list_jobs()}", deadline_s=60)


def keep_submitting(queue: SlurmCommands, over: threading.Event) -> None:
    """Keep two short jobs of a user in Slurm until `over` is set."""
    while not over.wait(0.5):
        if sum(row.name == "plain" for row in queue.list_jobs()) < 2:
            queue.submit("ben", "--job-name=plain", "--gres=gpu:1", script="exec sleep 3")


def holder(client):
    """Return the owner of the RTX 5090's lease; empty for none."""
    status, view = client.ask(client.broker, "GET", "/cluster")
    assert status == 200, view
    (gpu,) = next(node for node in view["nodes"] if node["name"] == "rig1")["gpus"]
    return gpu["holder"] or {}
