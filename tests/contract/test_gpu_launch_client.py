"""gpu_launch's own client against the real broker, over HTTP, on simulated nodes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpu_launch import wire
from gpu_launch.broker import Broker
from gpu_launch.demand import Demand
from gpu_launch.errors import BrokerError
from gpuhub.broker.schemas import JobRequest, JobState, WorkerState
from gpuhub.settings import Scheduling
from tests.support.brokers import Running, Setting, served_broker
from tests.support.simulated import build_cluster, wait_until

RUN = "run-000001"


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """The practice closet's three nodes, simulated."""
    return Setting(tmp_path)


@pytest.fixture
def running(setting: Setting) -> Iterator[Running]:
    """A broker with a port."""
    with served_broker(setting) as found:
        yield found


@pytest.fixture
def client(running: Running) -> Broker:
    """Ada's notebook."""
    return Broker(running.url, "ada", patience_s=5.0)


def _create(client: Broker, *, run_id: str = RUN, nnodes: int = 2, **parts: object) -> wire.Job:
    arguments = {"nproc_per_node": 1, "server": "", "exclude_nodes": (), "demand": Demand(), **parts}
    return client.create_job(run_id=run_id, nnodes=nnodes, **arguments)  # type: ignore[arg-type]


def _until(client: Broker, job: wire.Job, state: str) -> wire.Job:
    """Long polls until the job is in that state."""
    deadline = time.monotonic() + 10
    while job.state != state and time.monotonic() < deadline:
        job = client.job(job.id, version=job.version, wait_s=2.0)
    assert job.state == state
    return job


def test_the_cluster_is_read(running: Running, client: Broker) -> None:
    """Nodes, GPUs, models and holders arrive as the broker has them."""
    held = running.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"}).json()
    cluster = client.cluster()
    assert [node.name for node in cluster.nodes] == ["rig1", "rig2", "rig3"]
    assert cluster.models() == ("RTX 5060", "RTX 5070", "RTX 5090")
    gpu, free = cluster.cards((held["gpus"][0]["uuid"], "GPU-rig2-0"))
    assert (gpu.node, gpu.model, gpu.holder) == ("rig1", "RTX 5090", "ben")
    assert (free.node, free.holder) == ("rig2", "")
    assert gpu.memory_mib > free.memory_mib > 8000


def test_a_jobs_whole_life(running: Running, client: Broker) -> None:
    """Asked for, followed by long polls to running, renewed, stopped, followed to its end; its GPUs are free."""
    job = _create(client, exclude_nodes=("rig1",))
    again = _create(client, exclude_nodes=("rig1",))
    assert again.id == job.id
    ready = _until(client, job, wire.RUNNING)
    assert [worker.index for worker in ready.workers] == [0, 1]
    assert sorted(worker.node for worker in ready.workers) == ["rig2", "rig3"]
    assert all(len(worker.gpus) == 1 and worker.state == "running" for worker in ready.workers)
    assert (ready.run_id, ready.position, ready.renew_within_s) == (RUN, None, 25.0)
    client.renew(job.id)
    stopped = client.delete_job(job.id)
    ended = _until(client, stopped, wire.ENDED)
    assert ended.reason == "stopped"
    assert all(worker.state == wire.EXITED for worker in ended.workers)
    assert all(gpu.holder == "" for node in client.cluster().nodes for gpu in node.gpus)


def test_a_waiting_job_tells_place_and_reason(running: Running, client: Broker) -> None:
    """Who waits sees the position and what for, and starts by itself when the GPUs are free."""
    held = running.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"}).json()
    job = _create(client, nnodes=3)
    assert (job.state, job.position) == (wire.WAITING, 1)
    assert job.waiting_for == "1 × any GPU on each of 3 nodes: held by ben"
    running.send("DELETE", f"/api/v1/leases/{held['id']}", "ben")
    assert len(_until(client, job, wire.RUNNING).workers) == 3
    assert _until(client, client.delete_job(job.id), wire.ENDED).reason == "stopped"


def test_a_workers_end_is_told(running: Running, client: Broker) -> None:
    """Exit code and message of a worker reach the notebook."""
    job = _until(client, _create(client, nnodes=1), wire.RUNNING)
    node = running.setting.nodes[job.workers[0].node]
    node.end_container(node.of_kind("worker")[0]["Id"], code=3)
    ended = _until(client, job, wire.ENDED)
    assert (ended.workers[0].exit_code, ended.workers[0].message) == (3, "ended with exit code 3")


@pytest.mark.parametrize(
    ("token", "parts", "status", "text"),
    [
        ("ada", {"nnodes": 9}, 422, "9 nodes were asked for and the cluster has 3: rig1, rig2, rig3"),
        ("ada", {"demand": Demand(models=("RTX 4090",))}, 422, "1 × RTX 4090 on each of 2 nodes was asked for"),
        (
            "ada",
            {"demand": Demand(least_memory_mib=80 * 1024)},
            422,
            "1 × any GPU of at least 80 GiB on each of 2 nodes",
        ),
        ("ada", {"demand": Demand(same_model=True)}, 422, "1 × any GPU on each of 2 nodes"),
        ("ada", {"demand": Demand(priority=5)}, 403, "priority 5: only an admin"),
        ("ada", {"run_id": "../x"}, 422, "run_id: String should match pattern"),
        ("unknown", {}, 401, "the hub does not know this token"),
        ("narrow", {}, 403, "this token may not use the GPU broker"),
    ],
)
def test_refusals_arrive_in_words(
    running: Running, token: str, parts: dict[str, object], status: int, text: str
) -> None:
    """The problem document's text is what the user reads, with its status, and without a retry."""
    began = time.monotonic()
    with pytest.raises(BrokerError) as caught:
        _create(Broker(running.url, token, patience_s=30.0), **parts)
    assert (caught.value.status, str(caught.value)[: len(text)]) == (status, text)
    assert time.monotonic() - began < 10


def test_somebody_elses_job_does_not_exist(running: Running, client: Broker) -> None:
    """Neither read nor stopped nor renewed."""
    job = _create(client)
    other = Broker(running.url, "ben")
    for call in (other.job, other.renew, other.delete_job):
        with pytest.raises(BrokerError, match="there is no job") as caught:
            call(job.id)
        assert caught.value.status == 404


def test_a_restart_of_the_broker_is_waited_out(setting: Setting) -> None:
    """A running job and its notebook's client go on over a restart of the broker on the same port."""
    with served_broker(setting) as first:
        port = int(first.url.split(":")[2].split("/")[0])
        client = Broker(first.url, "ada", patience_s=20.0)
        job = _until(client, _create(client), wire.RUNNING)
    answers: list[wire.Job] = []
    asking = threading.Thread(target=lambda: answers.append(client.job(job.id)))
    asking.start()
    with served_broker(setting, port=port):
        asking.join(20)
        assert [answer.state for answer in answers] == [wire.RUNNING]
        client.renew(job.id)
        _until(client, client.delete_job(job.id), wire.ENDED)


def test_both_sides_name_states_alike() -> None:
    """The client's words for states are the broker's."""
    ours = {wire.WAITING, wire.STARTING, wire.RUNNING, wire.PREEMPTING, wire.STOPPING, wire.ENDED}
    assert ours == {state.value for state in JobState}
    assert WorkerState.EXITED.value == wire.EXITED


def test_every_demand_is_a_field_of_the_request() -> None:
    """With the broker's own default, which is therefore not sent."""
    for item in dataclasses.fields(Demand):
        assert JobRequest.model_fields[item.name].default == getattr(Demand(), item.name), item.name


def test_every_demand_is_taken(running: Running, client: Broker) -> None:
    """As a whole, and the grant's note comes with the job."""
    demand = Demand(
        models=("RTX 5070", "RTX 5060"), least_memory_mib=8000, scavenge=True, priority=-3, time_limit_s=3600
    )
    job = _until(client, _create(client, demand=demand, exclude_nodes=("rig1",)), wire.RUNNING)
    assert [gpu.model for worker in job.workers for gpu in worker.gpus] == ["RTX 5070", "RTX 5060"]
    assert job.note == "mixed cards: 1 × RTX 5070, 1 × RTX 5060; the slowest sets the pace"


def test_an_elastic_job_starts_with_what_is_free(running: Running, client: Broker) -> None:
    """Its workers are as many as were granted."""
    running.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"})
    job = _until(client, _create(client, nnodes=3, min_nnodes=1), wire.RUNNING)
    assert sorted(worker.node for worker in job.workers) == ["rig2", "rig3"]


@pytest.fixture
def preempting(tmp_path: Path) -> Iterator[Running]:
    """A broker that takes GPUs back when others need them."""
    with served_broker(Setting(tmp_path, cluster=build_cluster(scheduling=Scheduling(preemption=True)))) as found:
        yield found


def test_a_scavenging_job_is_preempted_and_waits_again(preempting: Running) -> None:
    """It says until when checkpoints may be written; with its workers gone it waits, and runs again in its turn."""
    client = Broker(preempting.url, "ada", patience_s=5.0)
    job = _until(client, _create(client, nnodes=3, demand=Demand(scavenge=True)), wire.RUNNING)
    held = preempting.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"}).json()
    told = _until(client, job, wire.PREEMPTING)
    assert told.checkpoint_until is not None
    assert 0 < (told.checkpoint_until - datetime.now(UTC)).total_seconds() <= 60
    for node in preempting.setting.nodes.values():
        node.end_container(node.of_kind("worker")[0]["Id"], code=143)
    waiting = _until(client, told, wire.WAITING)
    assert (waiting.preemptions, waiting.checkpoint_until, waiting.workers) == (1, None, ())
    assert (waiting.position, "ben" in (waiting.waiting_for or "")) == (1, True)
    preempting.send("DELETE", f"/api/v1/leases/{held['id']}", "ben")
    assert len(_until(client, waiting, wire.RUNNING).workers) == 3


def test_an_elastic_job_is_shrunk(preempting: Running) -> None:
    """What was given back is no worker any more, and the others keep their numbers."""
    client = Broker(preempting.url, "ada", patience_s=5.0)
    job = _until(client, _create(client, nnodes=3, min_nnodes=1), wire.RUNNING)
    going = next(worker.index for worker in job.workers if worker.node == "rig1")
    preempting.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"})
    wait_until(lambda: len(client.job(job.id).workers) == 2, "the job is shrunk")
    left = client.job(job.id)
    assert (left.state, left.preemptions) == (wire.RUNNING, 0)
    assert {worker.index for worker in left.workers} == {0, 1, 2} - {going}


def test_a_long_poll_ends_with_the_news(running: Running, client: Broker) -> None:
    """An answer comes as soon as the state changes, well before the poll's end."""
    job = _until(client, _create(client), wire.RUNNING)
    stop = threading.Timer(0.3, lambda: Broker(running.url, "ada").delete_job(job.id))
    began = time.monotonic()
    stop.start()
    news = client.job(job.id, version=job.version, wait_s=20.0)
    stop.join()
    assert news.state in {wire.STOPPING, wire.ENDED}
    assert time.monotonic() - began < 5
    wait_until(lambda: client.job(job.id).state == wire.ENDED, "the job ended")
