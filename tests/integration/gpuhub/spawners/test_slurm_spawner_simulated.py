"""The order of steps of a start, and how a failed start cleans up job and lease."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from jupyterhub import __version__, orm
from jupyterhub.httpclient import JupyterHubHTTPClient
from jupyterhub.objects import Hub
from jupyterhub.roles import create_role, get_default_roles
from jupyterhub.user import User
from traitlets.config import Config

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common.errors import BrokerUnreachable, Conflict, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.slurm_client.interface import SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState, SlurmNode, SlurmSite, SlurmSnapshot, SlurmSubmission
from gpuhub.spawners.base import SpawnFailed
from gpuhub.spawners.slurm.spawner import GpuSlurmSpawner
from gpuhub.tls import notebook_certificate
from tests.support.broker.in_process import until
from tests.support.hub.fake_broker import NOW, FakeBroker

OPTIONS = {"profile": "gpu"}
ANSWER = f"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-JupyterHub-Version: {__version__}\r\nConnection: close\r\n\r\n{{}}"


class SlurmBroker(FakeBroker):
    """Grants a lease only when its job runs."""

    is_away = False

    async def _settle(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def get_lease(self, lease_id: str, **asked: Any) -> Any:
        if self.is_away:
            raise BrokerUnreachable("the broker is away")
        return await super().get_lease(lease_id, **asked)

    async def grant(self, lease_id: str) -> None:
        gpus = tuple(self.gpus[:1])
        await self._change(lease_id, state=LeaseState.GRANTED, nodes=("rig1",), gpus=gpus, granted_at=NOW, epoch=1)

    async def end(self, lease_id: str) -> None:
        await self._change(lease_id, state=LeaseState.RELEASED, reason="its job has ended")


@dataclass
class FakeSlurm:
    """Records jobs without running them."""

    jobs: dict[int, SlurmJob] = field(default_factory=dict)
    submitted: list[SlurmSubmission] = field(default_factory=list)
    cancelled: list[tuple[int, bool]] = field(default_factory=list)
    trouble: Exception | None = None
    may_submit: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: Any = field(default_factory=lambda: itertools.count(100))

    async def read_snapshot(self) -> SlurmSnapshot:
        self._ask()
        nodes = (SlurmNode(name="sx1", state="idle", takes_work=True, gpus={"rtx5090": 1}),)
        return SlurmSnapshot(jobs=tuple(self.jobs.values()), nodes=nodes)

    async def read_site(self) -> SlurmSite:
        return SlurmSite(version=(22, 5, 8), cluster="c", partitions=(), nodes=(), has_accounting=False)

    async def find_job(self, job_id: int, *, name: str | None = None) -> SlurmJob | None:
        self._ask()
        job = self.jobs.get(job_id)
        return job if job is not None and name in {None, job.name} else None

    async def submit(self, submission: SlurmSubmission) -> int:
        await self.may_submit.wait()
        self._ask()
        self.submitted.append(submission)
        number: int = next(self.numbers)
        self.jobs[number] = SlurmJob(
            id=number, name=submission.name, user_id=submission.submitter.uid, state=SlurmJobState.PENDING
        )
        return number

    async def cancel(self, job_id: int, *, name: str | None = None, at_once: bool = False) -> None:
        self._ask()
        assert job_id not in self.jobs or self.jobs[job_id].name == name
        self.cancelled.append((job_id, at_once))
        self.jobs.pop(job_id, None)

    def _ask(self) -> None:
        if self.trouble is not None:
            raise self.trouble


@dataclass
class World:
    """One user of a hub, before and after restarts of the hub."""

    broker: SlurmBroker
    slurm: FakeSlurm
    #: Makes the user as a hub has it right after its start.
    make_user: Callable[[], User]
    db: Any
    port: int

    async def until_waiting(self) -> str:
        """Return the lease of a start that waits for its grant."""
        await until(lambda: self.slurm.submitted, "the job is submitted")
        [lease] = [one.id for one in await self.broker.leases()]
        return lease

    async def run(self, user: User, lease: str) -> None:
        """Run the job, and report its notebook's port."""
        await self.broker.grant(lease)
        await until(lambda: self.broker.known[lease].state is LeaseState.ACTIVE, "the lease is active")
        user.spawner.set_port(self.port)

    async def started(self) -> User:
        """Return a user whose notebook runs."""
        user = self.make_user()
        start = asyncio.create_task(user.spawn(options=OPTIONS))
        await self.run(user, await self.until_waiting())
        await start
        return user


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(Paths, "state", property(lambda _: tmp_path))
    cluster = ClusterSettings.model_validate(
        {
            "engine": "slurm",
            "nodes": [
                {
                    "name": "rig1",
                    "slurm": "sx1",
                    "address": "127.0.0.1",
                    "docker": "ssh://rig1",
                    "gpus": [{"model": "RTX 5090", "memory": "32G"}],
                }
            ],
            "profiles": [{"name": "gpu", "title": "GPU", "gpu_model": "RTX 5090"}],
            "users": {"allowed": ["ada"], "uid_first": 71001},
            "storage": {"home": f"{tmp_path}/{{username}}"},
            "slurm": {"runtime": "plain", "command": "/opt/bin/jupyterhub-singleuser"},
        }
    )
    broker, slurm = SlurmBroker(cluster), FakeSlurm()
    slurm.may_submit.set()
    factory = orm.new_session_factory("sqlite:///:memory:")
    db = factory()
    for role in get_default_roles():
        create_role(db, role)
    db.add(orm.OAuthClient(identifier="jupyterhub"))
    db.add(orm.User(name="ada"))
    db.commit()
    settings = {
        "spawner_class": GpuSlurmSpawner,
        "config": Config(
            LeasedSpawner={
                "cluster": cluster,
                "instance": "gh",
                "head_address": "127.0.0.1",
                "make_broker": lambda: broker,
            },
            GpuSlurmSpawner={"make_slurm": lambda: slurm},
            Spawner={"start_timeout": 60, "cmd": ["/opt/bin/jupyterhub-singleuser"]},
        ),
        "hub": Hub(ip="127.0.0.1", port=8081),
        "internal_ssl": False,
        "allow_named_servers": True,
    }

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER.encode())
        await writer.drain()
        writer.close()

    # The head node is the only node; see `test_no_notebook_can_pass_for_the_hub`.
    notebook = await asyncio.start_server(answer, "127.0.0.2", 0)
    port = notebook.sockets[0].getsockname()[1]
    yield World(broker, slurm, lambda: User(orm.User.find(db, "ada"), settings), db, port)
    notebook.close()
    db.close()
    # JupyterHub has one HTTP client for each event loop.
    await JupyterHubHTTPClient.loop_instance().close()


async def test_endless_answer_of_a_notebook_is_not_read(world: World) -> None:
    """Neither by the spawner nor by the wait of JupyterHub that follows it: both read headers alone."""
    sent: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER.partition("Content-Length")[0].encode() + b"X-JupyterHub-Version: 5.0.0\r\n\r\n")
        number = len(sent)
        sent.append(0)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(bytes(65536))
                await writer.drain()
                sent[number] += 65536
        writer.close()

    async with asyncio.timeout(60), await asyncio.start_server(answer, "127.0.0.2", 0) as notebook:
        user = await replace(world, port=notebook.sockets[0].getsockname()[1]).started()
        await until(lambda: len(sent) == 2, "both have asked")
        assert user.spawner._jupyterhub_version == "5.0.0"
    assert max(sent) < 16 * 1024**2


async def test_notebook_is_submitted_polled_and_cancelled(world: World, tmp_path: Path) -> None:
    user = await world.started()
    [submission] = world.slurm.submitted
    [lease] = world.broker.known.values()
    spawner = user.spawner
    assert submission.name == f"gh-lease-{lease.id}"
    assert (submission.submitter.uid, submission.gpus_per_node) == (71001, 1)
    assert spawner.api_token in submission.script
    assert str(user.spawner.server.url) == f"http://127.0.0.2:{world.port}/user/ada/"
    assert (spawner.job_id, spawner.node) == ("100", "rig1")
    assert await spawner.poll() is None
    with pytest.raises(Conflict, match="another port"):
        spawner.set_port(world.port + 1)
    await user.stop()
    assert world.slurm.cancelled == [(100, False)]
    assert world.broker.known[lease.id].state is LeaseState.RELEASED
    assert list((tmp_path / "slurm-notebooks").iterdir()) == []


async def test_no_notebook_can_pass_for_the_hub(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A certificate that names the head node's address would be accepted in the hub's place."""
    named: list[str] = []

    def issue(_folder: Path, _user: str, *addresses: str) -> None:
        named.extend(addresses)
        raise SetupError("no certificate in this test")

    monkeypatch.setattr(notebook_certificate, "issue_certificate", issue)
    user = world.make_user()
    user.spawner.internal_ssl = True
    user.spawner.internal_certs_location = str(tmp_path)
    with pytest.raises(SpawnFailed, match="no certificate in this test"):
        await user.spawn(options=OPTIONS)
    assert named == ["127.0.0.2"]


async def test_notebook_of_an_older_version_is_found_at_its_nodes_address(world: World) -> None:
    """Its state names no address, and it listens on that of its node."""
    user = await world.started()
    state = user.spawner.get_state()
    assert state.pop("notebook_address") == "127.0.0.2"
    user.spawner.load_state(state)
    assert await user.spawner.get_url() == f"http://127.0.0.1:{world.port}/user/ada/"
    user.spawner.notebook_address = "127.0.0.2"
    await user.stop()


async def test_server_is_lost_only_if_slurm_reports_it(world: World) -> None:
    user = await world.started()
    spawner = user.spawner
    [lease] = world.broker.known
    world.slurm.trouble = SlurmUnreachable("slurmctld is away")
    world.broker.is_away = True
    assert await spawner.poll() is None
    world.broker.is_away = False
    await world.broker.end(lease)
    assert await spawner.poll() is None
    world.slurm.trouble = None
    assert await spawner.poll() is None
    world.slurm.jobs[100] = SlurmJob(id=100, name="gh-lease-lease-1", user_id=71001, state=SlurmJobState.NODE_FAIL)
    assert await spawner.poll() == 1
    del world.slurm.jobs[100]
    assert await spawner.poll() == 0
    await user.stop()


async def test_cancelled_start_cancels_its_slurm_job(world: World) -> None:
    user = world.make_user()
    start = asyncio.create_task(user.spawn(options=OPTIONS))
    lease = await world.until_waiting()
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    await user.stop()
    assert world.slurm.cancelled == [(100, True)]
    assert world.broker.known[lease].state is LeaseState.RELEASED


async def test_start_cancelled_during_sbatch_cancels_its_slurm_job(world: World) -> None:
    world.slurm.may_submit.clear()
    user = world.make_user()
    start = asyncio.create_task(user.spawn(options=OPTIONS))
    await until(lambda: user.spawner._submit_task is not None, "sbatch runs")
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    world.slurm.may_submit.set()
    await user.stop()
    assert world.slurm.cancelled == [(100, True)]
    assert await world.broker.leases() == []


async def test_refusal_of_slurm_is_shown(world: World) -> None:
    world.slurm.may_submit.clear()
    user = world.make_user()
    start = asyncio.create_task(user.spawn(options=OPTIONS))
    await until(lambda: user.spawner._submit_task is not None, "sbatch runs")
    world.slurm.trouble = SlurmRefused("Slurm says: Invalid account")
    world.slurm.may_submit.set()
    with pytest.raises(SpawnFailed, match="Invalid account") as refusal:
        await start
    assert refusal.value.status_code == 400
    assert await world.broker.leases() == []


async def test_failed_start_names_the_notebooks_log_file(world: World) -> None:
    user = world.make_user()
    start = asyncio.create_task(user.spawn(options=OPTIONS))
    lease = await world.until_waiting()
    world.slurm.jobs[100] = SlurmJob(id=100, name="gh-lease-lease-1", user_id=71001, state=SlurmJobState.FAILED)
    await world.broker.grant(lease)
    with pytest.raises(SpawnFailed, match=r"~/\.gpuhub/notebook\.log"):
        await start
    assert await world.broker.leases() == []


async def restart_hub(world: World, user: User, start: asyncio.Task[Any]) -> User:
    """Simulate a killed hub, which undoes nothing, and return the user in the next hub after its first poll."""
    user.spawner._undo = lambda: asyncio.sleep(0)
    user.stop = lambda *_: asyncio.sleep(0)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    after = world.make_user()
    assert await after.spawner.poll() == 0
    await after.stop()
    return after


async def test_restarted_hub_resumes_a_waiting_job(world: World) -> None:
    before = world.make_user()
    start = asyncio.create_task(before.spawn(options=OPTIONS))
    lease = await world.until_waiting()
    token = before.spawner.api_token
    after = await restart_hub(world, before, start)
    assert world.slurm.cancelled == []
    again = asyncio.create_task(after.spawn(options=OPTIONS))
    await until(lambda: after.spawner.job_id == "100", "the job is found")
    # The job reports with the token in its script.
    assert after.spawner.api_token == token
    assert orm.APIToken.find(world.db, token).user.name == "ada"
    await world.run(after, lease)
    await again
    assert len(world.slurm.submitted) == 1
    assert await after.spawner.poll() is None
    await after.stop()


async def test_restarted_hub_knows_a_port_reported_before(world: World) -> None:
    before = world.make_user()
    start = asyncio.create_task(before.spawn(options=OPTIONS))
    lease = await world.until_waiting()
    await until(lambda: before.spawner.job_id, "the job's number is known")
    before.spawner.set_port(world.port)
    before.spawner.notebook_port = 0
    before.spawner.save_state()
    after = await restart_hub(world, before, start)
    again = asyncio.create_task(after.spawn(options=OPTIONS))
    await world.broker.grant(lease)
    await again
    assert after.spawner.notebook_port == world.port
    await after.stop()


async def test_job_with_a_lost_token_is_replaced(world: World, tmp_path: Path) -> None:
    before = world.make_user()
    start = asyncio.create_task(before.spawn(options=OPTIONS))
    lease = await world.until_waiting()
    await world.broker._change(lease, slurm_job=100)
    after = await restart_hub(world, before, start)
    (tmp_path / "slurm-notebooks" / f"{lease}.json").unlink()
    again = asyncio.create_task(after.spawn(options=OPTIONS))
    await until(lambda: len(world.slurm.submitted) == 2, "another job is submitted")
    assert world.slurm.cancelled == [(100, True)]
    assert world.broker.known[lease].state is LeaseState.RELEASED
    [other] = [one.id for one in await world.broker.leases()]
    await world.run(after, other)
    await again
    await after.stop()


async def test_unreachable_slurm_does_not_lose_the_queue_position(world: World) -> None:
    before = world.make_user()
    start = asyncio.create_task(before.spawn(options=OPTIONS))
    lease = await world.until_waiting()
    after = await restart_hub(world, before, start)
    world.slurm.trouble = SlurmUnreachable("slurmctld is away")
    with pytest.raises(SpawnFailed, match="slurmctld is away") as failure:
        await after.spawn(options=OPTIONS)
    assert failure.value.status_code == 503
    assert world.broker.known[lease].state is LeaseState.REQUESTED
    world.slurm.trouble = None
    again = asyncio.create_task(after.spawn(options=OPTIONS))
    await world.run(after, lease)
    await again
    assert (len(world.slurm.submitted), world.slurm.cancelled) == (1, [])
    await after.stop()


async def test_batchspawner_commands_are_disabled(world: World) -> None:
    spawner = world.make_user().spawner
    for act in (spawner.submit_batch_script, spawner.cancel_batch_job):
        spawner.job_id = "7"
        with pytest.raises((NotImplementedError, KeyError)):
            await act()
