"""CPU and memory of notebooks and jobs: what they are granted, what is stored and shown, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.broker.controllers.worker_launcher import build_spec
from gpuhub.config.settings import ProfileSettings
from tests.support.broker.calls import ask, post, read, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.docker.simulated_nodes import build_cluster

GIB = 1024**3
PROFILES = tuple(
    ProfileSettings.model_validate(profile)
    for profile in (
        {"name": "any", "title": "Any GPU"},
        {"name": "small", "title": "Small", "cpus": 2, "memory": "4G", "shm": "1G"},
        {"name": "cpu", "title": "No GPU", "gpu_count": 0, "cpus": 1, "memory": "2G"},
    )
)
JOB = {"run_id": "run-000001", "detached": True, "name": "train.py", "models": ["RTX 5090"]}
#: What of a node with 16 cores and 64 GiB goes with its one GPU, beside a notebook of the profile `cpu`.
SHARE = (14.0, 62260 - 2048)


@pytest.fixture
def machines(setting: Setting) -> Setting:
    """Every node is a machine with 16 cores, 64 GiB and one GPU."""
    setting.cluster = build_cluster(profiles=PROFILES)
    for node in setting.nodes.values():
        node.size = (16, 64 * GIB)
    return setting


def list_sizes(lease: dict[str, Any]) -> list[tuple[float, int]]:
    return [(size["cpus"], size["memory_mib"]) for size in lease["sizes"]]


async def wait_until_measured(running: Running) -> None:
    """Wait until the nodes have reported what they have, which a request in their first second would not see."""

    async def look() -> Any:
        return (await read(running, "ada", "/cluster"))["profiles"][0]["cpus"]

    await until(look, "the nodes have reported their sizes")


async def test_notebook_gets_the_share_of_its_gpu(machines: Setting) -> None:
    """The lease and the list of profiles say it; a profile's own numbers come before it."""
    async with asgi_broker(machines) as running:
        await wait_until_measured(running)
        profiles = {view["name"]: view for view in (await read(running, "ada", "/cluster"))["profiles"]}
        assert profiles["any"]["cpus"] == [SHARE[0]] * 2
        assert profiles["any"]["memory_mib"] == [SHARE[1]] * 2
        assert (profiles["small"]["cpus"], profiles["small"]["memory_mib"]) == ([2, 2], [4096, 4096])
        assert list_sizes(await ask(running, "ada", profile="any")) == [SHARE]
        assert list_sizes(await ask(running, "ben", profile="small")) == [(2.0, 4096)]


async def test_worker_gets_what_its_lease_was_granted(machines: Setting) -> None:
    """`--cpus 20+` is more than the share; `--shm` is of the container alone."""
    machines.nodes["rig1"].size = (32, 64 * GIB)
    async with asgi_broker(machines) as running:
        await wait_until_measured(running)
        job = await post(running, "ada", "/jobs", {**JOB, "cpus": 30.5, "cpus_or_more": True, "shm_mib": 512}, 201)
        await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        snapshot = running.app.state.core.ledger.snapshot
        row = snapshot.jobs[job["id"]]
        size = build_spec("gh", row, snapshot.leases[row.lease_id], row.workers[0]).size
        assert (size.cpus, size.memory, size.shm) == (30.5, SHARE[1] * 1024**2, 512 * 1024**2)


async def test_nothing_is_promised_twice(machines: Setting) -> None:
    """A second notebook without GPU waits while the first and a large job have all of the only open node."""
    machines.cluster = build_cluster({"rig1": [("NVIDIA GeForce RTX 5090", 32607)]}, profiles=PROFILES)
    machines.nodes = {"rig1": machines.nodes["rig1"]}
    async with asgi_broker(machines) as running:
        await wait_until_measured(running)
        await post(running, "ada", "/jobs", {**JOB, "cpus": 14.5}, 201)
        waiting = await ask(running, "ben", profile="cpu")
        assert waiting["state"] == "requested"
        assert "too little CPU or memory is left on the nodes" in waiting["waiting_for"]


@pytest.mark.parametrize(
    ("wanted", "status", "text"),
    [
        ({"cpus": 64}, 422, "64 CPU cores was requested; none of the nodes can provide it; "),
        ({"ram_mib": 1 << 20}, 422, "containers may have: rig1 15 CPU cores and 60.8 GiB"),
        ({"cpus_or_more": True}, 422, "they say how cpus and ram_mib are meant"),
        ({"ram_mib": 1024, "shm_mib": 2048}, 422, "2048 MiB are more than ram_mib, 1024"),
        ({"cpus": 0}, 422, "cpus"),
    ],
)
async def test_impossible_sizes_are_refused_at_once(
    machines: Setting, wanted: dict[str, Any], status: int, text: str
) -> None:
    """With what there is, before anything waits."""
    async with asgi_broker(machines) as running:
        await wait_until_measured(running)
        assert text in (await post(running, "ada", "/jobs", JOB | wanted, status))["detail"]
        assert await read(running, "ada", "/leases") == []
