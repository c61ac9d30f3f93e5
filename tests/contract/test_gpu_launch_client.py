"""The client of gpu_launch against the real broker, over HTTP, on simulated nodes."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpu_launch import environment
from gpu_launch.broker import models
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.gpu_request import Amount, GpuRequest
from gpu_launch.broker.holdings import CLUSTER, LAUNCH, RANKS, format_holdings
from gpu_launch.broker.own_jobs import cancel_jobs
from gpu_launch.broker.problems import OPTIONS
from gpu_launch.cli.submission.run import run
from gpu_launch.common import run_folder
from gpu_launch.errors import BrokerError
from gpu_launch.launch.plan import make_plan
from gpu_launch.launch.workers.worker_group import BrokerWorkerGroup
from gpuhub.broker.admission import submit
from gpuhub.broker_api.schemas import JobRequest, JobState, WorkerState
from gpuhub.config.settings import SchedulingSettings
from gpuhub.config.users.users import UserSettings
from gpuhub.domain.rate_limit import RateLimit
from tests.support.broker.in_process import Running, Setting, served_broker
from tests.support.docker.simulated_nodes import build_cluster, wait_until

RUN = "run-000001"


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """The practice closet's three nodes, simulated."""
    return Setting(tmp_path)


@pytest.fixture
def running(setting: Setting) -> Iterator[Running]:
    """A broker that listens on a port."""
    with served_broker(setting) as served:
        yield served


@pytest.fixture
def client(running: Running) -> BrokerClient:
    """The client of ada's notebook."""
    return BrokerClient(running.url, "ada", retry_limit_s=5.0)


def _create(client: BrokerClient, *, run_id: str = RUN, nnodes: int = 2, **parts: object) -> models.Job:
    arguments = {"nproc_per_node": 1, "server": "", "exclude_nodes": (), "demand": GpuRequest(), **parts}
    return client.create_job(run_id=run_id, nnodes=nnodes, **arguments)  # type: ignore[arg-type]


def _wait_state(client: BrokerClient, job: models.Job, state: str) -> models.Job:
    """Long-poll until the job is in that state."""
    deadline = time.monotonic() + 10
    while job.state != state and time.monotonic() < deadline:
        job = client.get_job(job.id, version=job.version, wait_s=2.0)
    assert job.state == state
    return job


def test_cluster_is_parsed(running: Running, client: BrokerClient) -> None:
    """Nodes, GPUs, models and leases' owners arrive as the broker has them."""
    held = running.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"}).json()
    cluster = client.get_cluster()
    assert [node.name for node in cluster.nodes] == ["rig1", "rig2", "rig3"]
    assert cluster.list_models() == ("RTX 5060", "RTX 5070", "RTX 5090")
    gpu, free = cluster.find_gpus((held["gpus"][0]["uuid"], "GPU-rig2-0"))
    assert (gpu.node, gpu.model, gpu.holder) == ("rig1", "RTX 5090", "ben")
    assert (free.node, free.holder) == ("rig2", "")
    assert gpu.memory_mib > free.memory_mib > 8000


def test_instances_profiles_and_leases_are_parsed(running: Running, client: BrokerClient) -> None:
    """Profiles have models and images, and a notebook's lease its place in the queue, as `instance` shows them."""
    profiles = {profile.name: profile for profile in client.get_cluster().profiles}
    assert (profiles["rtx5090"].models, profiles["rtx5090"].gpu_count) == (("RTX 5090",), 1)
    assert profiles["rtx5090"].image == "gpuhub/notebook:latest"
    assert profiles["rtx5090"].images == ("gpuhub/notebook:latest",)
    assert profiles["cpu"].gpu_count == 0
    running.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"})
    asked = running.send("POST", "/api/v1/leases", json={"profile": "rtx5090", "key": "k", "server": "big"}).json()
    (waiting,) = client.list_leases()
    assert (waiting.id, waiting.server, waiting.profile) == (asked["id"], "big", "rtx5090")
    assert (waiting.state, waiting.position, waiting.is_granted) == ("requested", 1, False)
    assert "RTX 5090" in (waiting.waiting_for or "")
    assert client.get_lease(waiting.id, version=waiting.version, wait_s=0.1) == waiting
    with pytest.raises(BrokerError, match="is requested: only a lease that continues") as error:
        client.extend_lease(waiting.id, 3600)
    assert error.value.status == 409


def test_job_lifecycle(running: Running, client: BrokerClient) -> None:
    """A job is requested, long-polled until it runs, renewed and stopped, and its GPUs are free at the end."""
    job = _create(client, exclude_nodes=("rig1",))
    again = _create(client, exclude_nodes=("rig1",))
    assert again.id == job.id
    ready = _wait_state(client, job, models.RUNNING)
    assert [worker.index for worker in ready.workers] == [0, 1]
    assert sorted(worker.node for worker in ready.workers) == ["rig2", "rig3"]
    assert all(len(worker.gpus) == 1 and worker.state == "running" for worker in ready.workers)
    assert (ready.run_id, ready.position, ready.renew_within_s) == (RUN, None, 25.0)
    client.renew_job(job.id)
    stopped = client.delete_job(job.id)
    ended = _wait_state(client, stopped, models.ENDED)
    assert ended.reason == "stopped"
    assert all(worker.state == models.EXITED for worker in ended.workers)
    assert all(gpu.holder == "" for node in client.get_cluster().nodes for gpu in node.gpus)


def test_waiting_job_has_position_and_reason(running: Running, client: BrokerClient) -> None:
    """A waiting job has its position and reason, and starts when the GPUs are free."""
    held = running.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"}).json()
    job = _create(client, nnodes=3)
    assert (job.state, job.position) == (models.WAITING, 1)
    assert job.waiting_for == "1 × any GPU on each of 3 nodes: held by ben"
    running.send("DELETE", f"/api/v1/leases/{held['id']}", "ben")
    assert len(_wait_state(client, job, models.RUNNING).workers) == 3
    assert _wait_state(client, client.delete_job(job.id), models.ENDED).reason == "stopped"


def test_workers_end_is_reported(running: Running, client: BrokerClient) -> None:
    """The exit code and message of a worker reach the notebook."""
    job = _wait_state(client, _create(client, nnodes=1), models.RUNNING)
    node = running.setting.nodes[job.workers[0].node]
    node.end_container(node.of_kind("worker")[0]["Id"], code=3)
    ended = _wait_state(client, job, models.ENDED)
    assert (ended.workers[0].exit_code, ended.workers[0].message) == (3, "ended with exit code 3")


@pytest.mark.parametrize(
    ("token", "parts", "status", "text"),
    [
        ("ada", {"nnodes": 9}, 422, "9 nodes were requested and the cluster has 3: rig1, rig2, rig3"),
        ("ada", {"demand": GpuRequest(models=("RTX 4090",))}, 422, "1 × RTX 4090 on each of 2 nodes was requested"),
        (
            "ada",
            {"demand": GpuRequest(least_memory_mib=80 * 1024)},
            422,
            "1 × any GPU of at least 80 GiB on each of 2 nodes",
        ),
        ("ada", {"demand": GpuRequest(same_model=True)}, 422, "1 × any GPU on each of 2 nodes"),
        ("ada", {"demand": GpuRequest(priority=5)}, 403, "priority 5: only an admin"),
        ("ada", {"run_id": "../x"}, 422, "run_id: String should match pattern"),
        ("ada", {"max_retries": 1}, 422, "--after, --retry: they are for detached jobs"),
        ("ada", {"detached": True, "max_retries": 101}, 422, "--retry: Input should be less than or equal to 100"),
        ("ada", {"demand": GpuRequest(stage=("datasets/",))}, 422, "--stage: String should match pattern"),
        (
            "ada",
            {"demand": GpuRequest(ram_mib=Amount(1024), shm_mib=2048)},
            422,
            "--shm: /dev/shm counts in the memory of its container, and 2048 MiB are more than --ram, 1024: ask",
        ),
        ("unknown", {}, 401, "the hub does not know this token"),
        ("narrow", {}, 403, "this token may not use the GPU broker"),
    ],
)
def test_refusals_have_readable_messages(
    running: Running, token: str, parts: dict[str, object], status: int, text: str
) -> None:
    """The user reads the problem document's text and status, and the client does not retry."""
    began = time.monotonic()
    with pytest.raises(BrokerError) as caught:
        _create(BrokerClient(running.url, token, retry_limit_s=30.0), **parts)
    assert (caught.value.status, str(caught.value)[: len(text)]) == (status, text)
    assert time.monotonic() - began < 10


def test_refusals_name_options_that_users_can_type() -> None:
    """Each is one of `gpu-launch run`; only fields that no user sets have none."""
    typed = {option for parameter in run.params for option in parameter.opts}
    assert set(OPTIONS.values()) <= typed
    assert JobRequest.model_fields.keys() - OPTIONS.keys() == {
        "run_id", "server", "exclude_nodes", "least_driver", "least_capability", "batch", "detached", "joins",
        "first_worker",
    }  # fmt: skip


def test_error_leads_to_the_hubs_page_about_it(tmp_path: Path) -> None:
    """Where the page says more than the text, and the hub's address is known."""
    setting = Setting(tmp_path, cluster=build_cluster(users=UserSettings(allowed=("ada",), max_jobs=1)))
    with served_broker(setting) as running:
        notebook = dataclasses.replace(
            environment.read({}), broker_url=running.url, token="ada", hub_url="https://gpus.lan/hub/"
        )
        client = BrokerClient.for_notebook(notebook)
        _create(client)
        with pytest.raises(BrokerError) as caught:
            _create(client, run_id="run-000002")
        page = "https://gpus.lan/hub/gpuhub/troubleshooting#too-many-jobs"
        assert (caught.value.help_url, caught.value._render_traceback_()[-1]) == (page, f"More: {page}")
        with pytest.raises(BrokerError) as unknown:
            client.get_job("nothing")
        assert unknown.value.help_url == ""
        with pytest.raises(BrokerError) as caught:
            _create(BrokerClient(running.url, "ada"), run_id="run-000002")
        assert caught.value._render_traceback_() == [f"BrokerError: {caught.value}"]


def test_check_of_a_job_creates_nothing(client: BrokerClient) -> None:
    """It refuses with the text of the request itself; also for an array."""
    job = {"run_id": RUN, "nnodes": 1, "nproc_per_node": 1, "server": "", "exclude_nodes": (), "demand": GpuRequest()}
    for count in (None, 3):
        client.check_job(count=count, **job)  # type: ignore[arg-type]
        with pytest.raises(BrokerError, match="there is no profile 'nosuch'"):
            client.check_job(count=count, profile="nosuch", **job)  # type: ignore[arg-type]
    assert client.list_jobs() == []


def test_client_waits_until_it_may_create_again(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that comes too soon after others says so, and starts when it may; nobody waits in vain for long."""
    monkeypatch.setattr(submit, "CREATIONS", RateLimit(burst=2, per_second=1, what="leases and jobs created"))
    told: list[str] = []
    with served_broker(setting) as running:
        client = BrokerClient(running.url, "ada", retry_limit_s=20.0, on_retry=told.append)
        for number in range(2):
            _create(client, run_id=f"run-00000{number}", nnodes=1)
        assert _create(client, run_id="run-000002", nnodes=1).run_id == "run-000002"
        assert [text.partition(":")[0] for text in told] == ["too many leases and jobs created"]
        hasty = BrokerClient(running.url, "ada", retry_limit_s=0.5)
        with pytest.raises(BrokerError, match=r"at most 1 per second are allowed, and 2 at once; try again in 1 s"):
            for number in range(3, 9):
                _create(hasty, run_id=f"run-00000{number}", nnodes=1)
        cancelled = threading.Event()
        cancelled.set()
        with pytest.raises(BrokerError, match="try again in"):
            for number in range(3, 9):
                _create(client, run_id=f"run-00000{number}", nnodes=1, cancelled=cancelled)


def test_other_users_jobs_do_not_exist(running: Running, client: BrokerClient) -> None:
    """Another user's job can neither be read nor stopped nor renewed."""
    job = _create(client)
    other = BrokerClient(running.url, "ben")
    for call in (other.get_job, other.renew_job, other.delete_job):
        with pytest.raises(BrokerError, match="you have no job") as caught:
            call(job.id)
        assert caught.value.status == 404


def test_client_survives_a_restart_of_the_broker(setting: Setting) -> None:
    """A running job and its client continue after a restart of the broker on the same port."""
    with served_broker(setting) as first:
        port = int(first.url.split(":")[2].split("/")[0])
        client = BrokerClient(first.url, "ada", retry_limit_s=20.0)
        job = _wait_state(client, _create(client), models.RUNNING)
    answers: list[models.Job] = []
    asking = threading.Thread(target=lambda: answers.append(client.get_job(job.id)))
    asking.start()
    with served_broker(setting, port=port):
        asking.join(20)
        assert [answer.state for answer in answers] == [models.RUNNING]
        client.renew_job(job.id)
        _wait_state(client, client.delete_job(job.id), models.ENDED)


def test_both_sides_name_the_same_states() -> None:
    """The client's names of states are the broker's."""
    client_states = {models.WAITING, models.STARTING, models.RUNNING, models.PREEMPTING, models.STOPPING, models.ENDED}
    assert client_states == {state.value for state in JobState}
    assert WorkerState.EXITED.value == models.EXITED


def test_every_launch_option_is_a_field_of_the_request() -> None:
    """Each option is a field of the request with the broker's default, which is therefore not sent."""
    for item in dataclasses.fields(GpuRequest):
        assert JobRequest.model_fields[item.name].default == getattr(GpuRequest(), item.name), item.name


def test_all_launch_options_together_are_accepted(running: Running, client: BrokerClient) -> None:
    """All options together are accepted, and the job has the grant's note."""
    demand = GpuRequest(
        models=("RTX 5070", "RTX 5060"),
        least_memory_mib=8000,
        cpus=Amount(1.5),
        ram_mib=Amount(2048, or_more=True),
        shm_mib=256,
        scavenge=True,
        priority=-3,
        time_limit_s=3600,
    )
    job = _wait_state(client, _create(client, demand=demand, exclude_nodes=("rig1",)), models.RUNNING)
    assert [gpu.model for worker in job.workers for gpu in worker.gpus] == ["RTX 5070", "RTX 5060"]
    assert job.note == "mixed cards: 1 × RTX 5070, 1 × RTX 5060; the slowest sets the pace"


def test_elastic_job_starts_with_the_free_nodes(running: Running, client: BrokerClient) -> None:
    """The job has as many workers as were granted."""
    running.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"})
    job = _wait_state(client, _create(client, nnodes=3, min_nnodes=1), models.RUNNING)
    assert sorted(worker.node for worker in job.workers) == ["rig2", "rig3"]


@pytest.fixture
def preempting(tmp_path: Path) -> Iterator[Running]:
    """A broker that preempts leases for other requests."""
    with served_broker(
        Setting(tmp_path, cluster=build_cluster(scheduling=SchedulingSettings(preemption=True)))
    ) as served:
        yield served


def test_a_scavenging_job_is_preempted_and_waits_again(preempting: Running) -> None:
    """The job has a deadline for checkpoints; without its workers it waits, and runs again in its turn."""
    client = BrokerClient(preempting.url, "ada", retry_limit_s=5.0)
    job = _wait_state(client, _create(client, nnodes=3, demand=GpuRequest(scavenge=True)), models.RUNNING)
    held = preempting.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"}).json()
    preempted = _wait_state(client, job, models.PREEMPTING)
    assert preempted.checkpoint_until is not None
    assert 0 < (preempted.checkpoint_until - datetime.now(UTC)).total_seconds() <= 60
    for node in preempting.setting.nodes.values():
        node.end_container(node.of_kind("worker")[0]["Id"], code=143)
    waiting = _wait_state(client, preempted, models.WAITING)
    assert (waiting.preemptions, waiting.checkpoint_until, waiting.workers) == (1, None, ())
    assert (waiting.position, "ben" in (waiting.waiting_for or "")) == (1, True)
    preempting.send("DELETE", f"/api/v1/leases/{held['id']}", "ben")
    assert len(_wait_state(client, waiting, models.RUNNING).workers) == 3


def test_an_elastic_job_is_shrunk(preempting: Running) -> None:
    """A released worker is no longer in the job, and the others keep their numbers."""
    client = BrokerClient(preempting.url, "ada", retry_limit_s=5.0)
    job = _wait_state(client, _create(client, nnodes=3, min_nnodes=1), models.RUNNING)
    going = next(worker.index for worker in job.workers if worker.node == "rig1")
    preempting.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"})
    wait_until(lambda: len(client.get_job(job.id).workers) == 2, "the job is shrunk")
    left = client.get_job(job.id)
    assert (left.state, left.preemptions) == (models.RUNNING, 0)
    assert {worker.index for worker in left.workers} == {0, 1, 2} - {going}


def test_long_poll_returns_at_a_change(running: Running, client: BrokerClient) -> None:
    """A long poll returns when the state changes, well before its end."""
    job = _wait_state(client, _create(client), models.RUNNING)
    stop = threading.Timer(0.3, lambda: BrokerClient(running.url, "ada").delete_job(job.id))
    began = time.monotonic()
    stop.start()
    news = client.get_job(job.id, version=job.version, wait_s=20.0)
    stop.join()
    assert news.state in {models.STOPPING, models.ENDED}
    assert time.monotonic() - began < 5
    wait_until(lambda: client.get_job(job.id).state == models.ENDED, "the job ended")


def test_waiting_launch_names_what_its_user_holds(running: Running, client: BrokerClient, tmp_path: Path) -> None:
    """Engines, ranks and another notebook, as the real broker reports them; nothing for a launch that starts."""
    env = environment.read(
        {"HOME": str(tmp_path), "GPUHUB_BROKER_URL": running.url, "JUPYTERHUB_API_TOKEN": "ada", "USER": "ada"}
    )
    groups = []

    def start(name: str) -> BrokerWorkerGroup:
        plan = make_plan(env, nnodes=1, nproc_per_node=1, demand=GpuRequest())
        group = BrokerWorkerGroup(plan, run_folder.create_run(tmp_path), env=env, broker=client, name=name)
        groups.append(group)
        group.start(settings={})
        return group

    running.send("POST", "/api/v1/leases", "ada", json={"profile": "rtx5090", "key": "k", "server": "second"})
    cluster, ranks = start(CLUSTER), start(RANKS)
    assert (cluster.holdings, ranks.holdings) == ((), ())
    waiting = start(LAUNCH)
    assert waiting.job is not None and waiting.job.state == models.WAITING
    heading, *lines = format_holdings(waiting.holdings, cancel="%gpu_cancel")
    assert heading == "you hold GPUs yourself that this request could use:"
    assert sorted(re.sub(r"\((rig.) RTX 50.0\)", "(GPU)", line) for line in lines) == sorted([
        "  notebook 'second' (GPU): stop it on the hub's Home page",
        f"  %gpu_ranks {ranks.run.run_id} (GPU): %gpu_ranks --stop in its notebook, or %gpu_cancel {ranks.run.run_id}",
        f"  ipp.Cluster {cluster.run.run_id} (GPU): cluster.stop_cluster_sync() in its notebook, or "
        f"%gpu_cancel {cluster.run.run_id}",
    ])  # fmt: skip
    # The command that it names frees the GPU.
    cancel_jobs(env, ranks.run.run_id)
    wait_until(lambda: waiting.job is not None and waiting.job.is_granted, "the launch starts")
    for group in groups:
        group.stop()
