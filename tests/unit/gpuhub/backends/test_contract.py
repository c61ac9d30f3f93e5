"""What every scheduling backend has to do, through the broker's API on simulated nodes.

A new backend is added to `BACKENDS`; `docs/backends.md` describes the parts of `TestedBackend`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.backends.plugin import find_capabilities, find_plugin, load_plugin
from gpuhub.broker_api.schemas import Capabilities
from gpuhub.common.errors import SettingsError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.broker.memory_backend import installed_memory_backend
from tests.support.docker.simulated_nodes import build_cluster
from tests.support.slurm.scripted_backend import build_backend
from tests.support.slurm.scripted_slurm import ScriptedSlurm


@dataclass(frozen=True, kw_only=True)
class TestedBackend:
    """A backend with the system behind it, as far as the tests act on it."""

    __test__ = False

    cluster: ClusterSettings
    build: Callable[[ClusterSettings], SchedulingBackend]
    #: Lets the system start what fits.
    start: Callable[[], object]
    #: Leases that have a job which waits or runs.
    list_jobs: Callable[[], set[str]]
    #: Ends the job of a lease from outside.
    end_job: Callable[[str], None]
    set_reachable: Callable[[bool], None]

    @property
    def capabilities(self) -> Capabilities:
        return find_capabilities(self.cluster)


@contextmanager
def builtin_backend(folder: Path) -> Iterator[TestedBackend]:
    cluster = build_cluster()
    yield TestedBackend(
        cluster=cluster,
        build=lambda cluster: find_plugin(cluster).build(cluster, Paths("ghtest")),
        start=lambda: None,
        list_jobs=set,
        end_job=lambda lease: None,
        set_reachable=lambda is_reachable: None,
    )


@contextmanager
def slurm_backend(folder: Path) -> Iterator[TestedBackend]:
    slurm = ScriptedSlurm()

    def end_job(lease: str) -> None:
        for job in slurm.live():
            if job.name.endswith(lease):
                slurm.scancel(job.id)
                slurm.clean(job.id)

    def set_reachable(is_reachable: bool) -> None:
        slurm.is_silent = not is_reachable

    yield TestedBackend(
        cluster=build_cluster(engine="slurm", slurm={"poll": "1s"}),
        build=lambda cluster: build_backend(cluster, slurm),
        start=slurm.start,
        list_jobs=lambda: {job.name.split("-lease-")[1] for job in slurm.live()},
        end_job=end_job,
        set_reachable=set_reachable,
    )


@contextmanager
def memory_backend(folder: Path) -> Iterator[TestedBackend]:
    with installed_memory_backend(folder) as plugin:
        queue = plugin.queue

        def end_job(lease: str) -> None:
            for job in queue.live():
                job.is_over = job.is_over or job.lease == lease

        def set_reachable(is_reachable: bool) -> None:
            queue.is_reachable = is_reachable

        yield TestedBackend(
            cluster=build_cluster(engine="memory"),
            build=lambda cluster: find_plugin(cluster).build(cluster, Paths("ghtest")),
            start=lambda: None,
            list_jobs=lambda: {job.lease for job in queue.live()},
            end_job=end_job,
            set_reachable=set_reachable,
        )


BACKENDS = {"builtin": builtin_backend, "slurm": slurm_backend, "memory": memory_backend}
#: The backends whose leases are jobs of another system.
WITH_JOBS = sorted(BACKENDS.keys() - {"builtin"})
with_jobs = pytest.mark.parametrize("backend", WITH_JOBS, indirect=True)


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestedBackend]:
    with BACKENDS[request.param](tmp_path) as backend:
        yield backend


@pytest.fixture
def setting(tmp_path: Path, backend: TestedBackend) -> Setting:
    return Setting(tmp_path, cluster=backend.cluster, build_backend=backend.build)


async def granted(running: Running, backend: TestedBackend, owner: str = "ada", **body: Any) -> Any:
    """A lease that the backend has granted."""
    lease = await ask(running, owner, **body)
    if backend.capabilities.external_jobs:
        await until(lambda: lease["id"] in backend.list_jobs(), "it is submitted")
    backend.start()
    return await wait_for_state(running, f"/leases/{lease['id']}", "granted")


def test_job_backends_match_the_capabilities(backend: TestedBackend) -> None:
    """`WITH_JOBS`, which limits tests to these backends, agrees with the capabilities."""
    assert backend.capabilities.external_jobs == (backend.cluster.engine in WITH_JOBS)


async def test_a_request_is_granted_gpus_that_fit_it(setting: Setting, backend: TestedBackend) -> None:
    async with asgi_broker(setting) as running:
        lease = await granted(running, backend, profile="rtx5070")
        assert [(gpu["node"], gpu["model"]) for gpu in lease["gpus"]] == [("rig2", "RTX 5070")]
        assert lease["expires_at"] is None or lease["expires_at"] > lease["granted_at"]


async def test_a_persistent_notebook_is_refused_where_another_system_decides(
    setting: Setting, backend: TestedBackend
) -> None:
    """With the name of that system, before anything is requested."""
    async with asgi_broker(setting) as running:
        if backend.capabilities.persistent_notebooks:
            assert (await ask(running, "ada", persistent=True))["persistent"]
            return
        refusal = await ask(running, "ada", persistent=True, status=422)
        assert f"keep: {backend.capabilities.scheduler} decides what happens to a job" in refusal["detail"]
        assert not running.core.ledger.snapshot.leases


async def test_no_gpu_is_granted_twice(setting: Setting, backend: TestedBackend) -> None:
    """The second lease gets the GPU when nothing of the first is left, and not before."""
    async with asgi_broker(setting) as running:
        first = await granted(running, backend)
        container = await run_notebook(running, first)
        second = await ask(running, "ben")
        backend.start()
        await asyncio.sleep(0.3)
        waiting = await read(running, "ben", f"/leases/{second['id']}")
        assert (waiting["state"], waiting["gpus"]) == ("requested", [])
        assert waiting["position"] >= 1
        assert waiting["waiting_for"]
        await delete(running, "ada", f"/leases/{first['id']}")
        await wait_for_state(running, f"/leases/{first['id']}", "released")
        assert container not in setting.nodes["rig1"].containers

        async def is_granted() -> bool:
            backend.start()
            return bool((await read(running, "ben", f"/leases/{second['id']}"))["state"] == "granted")

        await until(is_granted, "the second lease is granted")


async def test_a_job_of_several_nodes_is_granted_as_a_whole(setting: Setting, backend: TestedBackend) -> None:
    async with asgi_broker(setting) as running:
        job = await post(running, "ada", "/jobs", {"run_id": "run-000001", "nnodes": 3}, status=201)
        if backend.capabilities.external_jobs:
            await until(lambda: job["lease"]["id"] in backend.list_jobs(), "it is submitted")
        backend.start()
        started = await wait_for_state(running, f"/jobs/{job['id']}", "running")
        assert sorted(worker["node"] for worker in started["workers"]) == ["rig1", "rig2", "rig3"]


async def test_a_lease_that_ends_leaves_no_job(setting: Setting, backend: TestedBackend) -> None:
    async with asgi_broker(setting) as running:
        held = await granted(running, backend)
        await run_notebook(running, held)
        waiting = await ask(running, "ben")
        for owner, lease in (("ben", waiting), ("ada", held)):
            await delete(running, owner, f"/leases/{lease['id']}")
            await wait_for_state(running, f"/leases/{lease['id']}", "released")
        await until(lambda: not backend.list_jobs(), "no job is left")


async def test_extension_is_granted(setting: Setting, backend: TestedBackend) -> None:
    async with asgi_broker(setting) as running:
        lease = await granted(running, backend, time_limit_s=600)
        await run_notebook(running, lease)
        extended = await post(running, "ada", f"/leases/{lease['id']}/extend", {"time_limit_s": 7200})
        assert extended["expires_at"] > lease["expires_at"]


async def test_a_restarted_broker_continues_with_what_runs(setting: Setting, backend: TestedBackend) -> None:
    async with asgi_broker(setting) as running:
        lease = await granted(running, backend)
        await run_notebook(running, lease)
        jobs = backend.list_jobs()
    async with asgi_broker(setting) as running:
        await asyncio.sleep(0.3)
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"
        assert backend.list_jobs() == jobs


@with_jobs
async def test_a_lease_ends_with_its_job(setting: Setting, backend: TestedBackend) -> None:
    async with asgi_broker(setting) as running:
        lease = await granted(running, backend)
        container = await run_notebook(running, lease)
        backend.end_job(lease["id"])
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "released")
        assert ended["reason"]
        assert container not in setting.nodes["rig1"].containers


@with_jobs
async def test_nothing_starts_after_its_job_has_ended(setting: Setting, backend: TestedBackend) -> None:
    """Whether the broker has polled since or not."""
    async with asgi_broker(setting) as running:
        lease = await granted(running, backend)
        backend.end_job(lease["id"])
        await post(running, "spawner", f"/leases/{lease['id']}/activate", {"container_id": "c" * 64}, status=409)


@with_jobs
async def test_outage_ends_no_lease_and_is_reported_once(setting: Setting, backend: TestedBackend) -> None:
    """What runs continues, what waits keeps its place and is told why, and the change is an event once."""
    async with asgi_broker(setting) as running:
        lease = await granted(running, backend)
        await run_notebook(running, lease)
        waiting = await ask(running, "ben")
        await until(lambda: waiting["id"] in backend.list_jobs(), "it is submitted")
        backend.set_reachable(False)
        name = backend.cluster.engine

        async def kinds() -> list[str]:
            events = await read(running, "root", "/events")
            return [event["kind"] for event in events if event["kind"].startswith(f"{name}.")]

        async def is_noted() -> bool:
            return bool(await kinds())

        await until(is_noted, "it is noted")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"
        shown = await read(running, "ben", f"/leases/{waiting['id']}")
        assert shown["state"] == "requested"
        backend.set_reachable(True)

        async def is_back() -> bool:
            return (await kinds()) == [f"{name}.unreachable", f"{name}.answers"]

        await until(is_back, "it answers again")


async def test_capabilities_are_shown_and_enforced(setting: Setting, backend: TestedBackend) -> None:
    async with asgi_broker(setting) as running:
        view = await read(running, "ada", "/cluster")
        assert view["engine"] == backend.cluster.engine
        assert view["capabilities"] == backend.capabilities.model_dump()
        cordoned = 200 if backend.capabilities.cordons else 422
        answer = await post(running, "root", "/nodes/rig1/cordon", {"reason": "fans"}, status=cordoned)
        assert "node" in (answer["detail"] if cordoned == 422 else str(answer))


def test_a_name_without_an_entry_point_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"there is no scheduling backend 'pbs'; installed are: builtin, slurm$"):
        load_plugin("pbs")
