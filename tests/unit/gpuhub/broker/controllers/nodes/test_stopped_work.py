"""What `gpuhub down` has removed ends the leases at the next start, also where a new daemon could not prove it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.broker.db.stopped_nodes import (
    StoppedNodes,
    keep_broker_stopped,
    read_stopped_nodes,
    record_stopped_nodes,
)
from gpuhub.broker.db.store import Store
from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from tests.support.broker.calls import ask, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Setting, asgi_broker, until


class LocalPaths(Paths):
    """Paths of an instance in a test's folder."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder


def local_paths(folder: Path) -> Paths:
    paths = LocalPaths()
    object.__setattr__(paths, "folder", folder)
    return paths


async def stop_and_replace_daemon(setting: Setting, stopped: StoppedNodes) -> None:
    """rig1 is cleaned by `gpuhub down`, and its daemon has another identity at the next start."""
    rig1 = setting.nodes["rig1"]
    rig1.containers.clear()
    paths = local_paths(setting.folder)
    with keep_broker_stopped(paths):
        record_stopped_nodes(paths, stopped)
    rig1.daemon_id = "another"


@pytest.mark.parametrize("proof", ["daemon-rig1", None])
async def test_leases_of_a_stopped_node_end_at_the_next_start(setting: Setting, proof: str | None) -> None:
    """The daemon that they began under listed nothing, or no process of the node was left."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
    await stop_and_replace_daemon(setting, {"rig1": proof})
    async with asgi_broker(setting) as running:
        ended = await read(running, "ada", f"/leases/{lease['id']}")
        assert ended["state"] == "released"
        assert ended["reason"] == "`gpuhub down` has ended it on rig1"
        waiting = await ask(running, "ben", key="b")
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")
    assert not setting.stopped_nodes.exists()


@pytest.mark.parametrize("stopped", [{"rig1": "daemon-of-another-disk"}, {"rig2": None}, {}])
async def test_other_leases_go_on(setting: Setting, stopped: StoppedNodes) -> None:
    """Neither another daemon nor another node proves anything."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
    await stop_and_replace_daemon(setting, stopped)
    async with asgi_broker(setting) as running:
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"
        await until(lambda: running.core.capacity.inventory.nodes["rig1"].is_suspect, "rig1 is suspect")


async def test_job_of_a_stopped_node_ends(setting: Setting) -> None:
    """Its worker is gone, so the job ends and its GPU is free."""
    body = {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1, "models": ["RTX 5090"], "batch": True}
    async with asgi_broker(setting) as running:
        job = await post(running, "ada", "/jobs", body, 201)
        await wait_for_state(running, f"/jobs/{job['id']}", "running")
    await stop_and_replace_daemon(setting, {"rig1": "daemon-rig1"})
    async with asgi_broker(setting) as running:
        ended = await wait_for_state(running, f"/jobs/{job['id']}", "ended")
        assert "`gpuhub down` has ended it on rig1" in ended["reason"]
        assert running.core.ledger.leases_on("rig1") == []


def test_nodes_are_recorded_only_while_no_broker_runs(tmp_path: Path) -> None:
    paths = local_paths(tmp_path)
    store = Store.open_file(paths.store)
    try:
        with pytest.raises(SetupError, match="a broker runs"), keep_broker_stopped(paths):
            record_stopped_nodes(paths, {"rig1": None})
    finally:
        store.close()
    assert not paths.stopped_nodes.exists()
    with keep_broker_stopped(paths):
        record_stopped_nodes(paths, {"rig1": "A", "rig2": "B"})
        record_stopped_nodes(paths, {"rig2": None})
        with pytest.raises(SetupError, match="another broker runs"):
            Store.open_file(paths.store)
    assert read_stopped_nodes(paths.stopped_nodes) == {"rig1": "A", "rig2": None}


@pytest.mark.parametrize("text", ["", "[]", '{"rig1": 5}', '{"rig1'])
def test_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    """The broker does not start, and the error has the remedy."""
    file = tmp_path / "stopped-nodes.json"
    file.write_text(text)
    with pytest.raises(SetupError, match=r"stopped-nodes.json is damaged .* remove it"):
        read_stopped_nodes(file)
