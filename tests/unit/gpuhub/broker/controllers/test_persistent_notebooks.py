"""Notebooks that ask again for their GPUs when their container was lost: over the HTTP API, with simulated nodes."""

from __future__ import annotations

import pytest

from gpuhub.broker.controllers import server_restarter
from tests.support.broker.calls import ask, delete, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, until


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are checked in quick succession."""
    monkeypatch.setattr(server_restarter, "CHECK_PERIOD_S", 0.05)


@pytest.fixture
def quick(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the hub is asked soon for one that no spawner polls."""
    monkeypatch.setattr(server_restarter, "POLL_TIMEOUT_S", 0.3)


def find_open(running: Running, owner: str) -> list[str]:
    """Return the states of an owner's leases, oldest first."""
    rows = sorted(running.core.ledger.snapshot.leases.values(), key=lambda row: row.seq)
    return [str(row.state) for row in rows if row.owner == owner]


@pytest.mark.usefixtures("quick")
async def test_lost_notebook_waits_again_and_is_started_by_the_hub(setting: Setting) -> None:
    """Its request is behind those that waited already, with the same profile and image; its owner is notified."""
    async with asgi_broker(setting) as running:
        lost = await ask(
            running, "spawner", owner="ada", server="work", persistent=True, image="lab/other:1", suspendable=False
        )
        assert lost["persistent"]
        container = await run_notebook(running, lost)
        earlier = await ask(running, "ben")
        assert earlier["position"] == 1
        setting.nodes["rig1"].end_container(container, code=137)
        await wait_for_state(running, f"/leases/{earlier['id']}", "granted")
        await until(lambda: "requested" in find_open(running, "ada"), "ada's notebook asks again")
        await until(lambda: ("ada", "work", "rtx5090") in setting.hub.started, "the hub is asked for ada's server")
        chosen = {"profile": "rtx5090", "image": "lab/other:1", "keep": "yes", "suspend": "no"}
        assert setting.hub.options["ada", "work"] == chosen
        (again,) = [lease for lease in await read(running, "ada", "/leases") if lease["state"] == "requested"]
        assert (again["subject"], again["persistent"], again["position"]) == ("work", True, 1)
        events = await read(running, "ada", "/events")
        texts = [event["text"] for event in events if event["kind"] == "notebook.lost"]
        assert len(texts) == 1 and "asks again for its GPUs" in texts[0] and "rig1" in texts[0]
        # The hub's start finds the request instead of making another one.
        same = await ask(running, "spawner", owner="ada", server="work", persistent=True)
        assert same["id"] == again["id"]


@pytest.mark.usefixtures("often")
async def test_stopped_notebook_stays_stopped(setting: Setting) -> None:
    """Released by its owner before its container goes; and a notebook that is not persistent ends with its container."""
    async with asgi_broker(setting) as running:
        stopped = await ask(running, "ada", persistent=True)
        container = await run_notebook(running, stopped)
        await delete(running, "ada", f"/leases/{stopped['id']}")
        await wait_for_state(running, f"/leases/{stopped['id']}", "released")
        assert container not in setting.nodes["rig1"].containers
        plain = await ask(running, "ben")
        setting.nodes["rig1"].end_container(await run_notebook(running, plain))
        await wait_for_state(running, f"/leases/{plain['id']}", "released")
        assert find_open(running, "ada") == find_open(running, "ben") == []
        assert setting.hub.started == []


async def test_notebook_that_is_lost_again_and_again_ends(setting: Setting) -> None:
    """After three restarts within an hour its owner is told to start it by hand."""
    async with asgi_broker(setting) as running:
        await ask(running, "spawner", owner="ada", persistent=True)
        for _ in range(4):
            (lease,) = [
                row for row in await read(running, "ada", "/leases") if row["state"] in ("requested", "granted")
            ]
            await wait_for_state(running, f"/leases/{lease['id']}", "granted")
            setting.nodes["rig1"].end_container(await run_notebook(running, lease))
            await wait_for_state(running, f"/leases/{lease['id']}", "released")
        assert find_open(running, "ada") == []
        texts = [event["text"] for event in await read(running, "ada", "/events") if event["kind"] == "notebook.lost"]
        assert len(texts) == 4
        assert sum("It is not started again: that happened 3 times within an hour." in text for text in texts) == 1


async def test_it_survives_a_restart_of_the_broker(setting: Setting) -> None:
    """Request, image and losses are in the store."""
    async with asgi_broker(setting) as running:
        lost = await ask(running, "spawner", owner="ada", persistent=True, image="lab/other:1")
        setting.nodes["rig1"].end_container(await run_notebook(running, lost))
        await wait_for_state(running, f"/leases/{lost['id']}", "released")
    async with asgi_broker(setting) as running:
        (row,) = [row for row in running.core.ledger.snapshot.leases.values() if row.owner == "ada"]
        assert (row.is_persistent, row.image, len(row.losses)) == (True, "lab/other:1", 1)
