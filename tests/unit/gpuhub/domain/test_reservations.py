"""GPUs kept for some users in a window."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpuhub.broker.state import broker_state as core_module
from gpuhub.broker_api.schemas import ReservationRequest
from gpuhub.common.errors import Conflict, InvalidRequest
from gpuhub.domain import reservations
from gpuhub.nodes.inventory import GpuReading, Inventory, build_inventory
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Setting, asgi_broker, until
from tests.support.docker.simulated_nodes import build_cluster

NOW = 1_800_000_000.0


def window(begins_s: float, ends_s: float, now: float = NOW) -> dict[str, Any]:
    """From so many seconds from now to so many."""
    start = datetime.fromtimestamp(now, UTC)
    return {
        "starts_at": (start + timedelta(seconds=begins_s)).isoformat(),
        "ends_at": (start + timedelta(seconds=ends_s)).isoformat(),
    }


def inventory() -> Inventory:
    cards = {
        f"rig{number}": [GpuReading(uuid=f"GPU-{number}", index=0, model="RTX 5090", memory_mib=32607)]
        for number in (1, 2)
    }
    return build_inventory(build_cluster(), cards)


def build(**parts: Any) -> Any:
    body = {"name": "course", "nodes": ["rig1"], "users": ["ada"], **window(10, 20), **parts}
    request = ReservationRequest.model_validate(body)
    return reservations.build_reservation(request, by="root", inventory=inventory(), now=NOW)


def test_reservation_includes_all_gpus_of_its_nodes() -> None:
    """As far as they are known; the scheduler admits whom it names."""
    row = build(nodes=["rig1"], gpus=["GPU-2"], groups=["lab"])
    kept = reservations.build_scheduler_reservation(row, inventory())
    assert kept.uuids == {"GPU-1", "GPU-2"}
    assert (kept.starts_at, kept.ends_at) == (NOW + 10, NOW + 20)
    assert kept.admits("ada", frozenset())
    assert kept.admits("ben", frozenset({"lab"}))
    assert not kept.admits("ben", frozenset())
    assert reservations.build_reservation_view(row).created_by == "root"


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"nodes": []}, "name what should be kept"),
        ({"users": []}, "name for whom it is kept"),
        ({"nodes": ["rig9"]}, "there is no node 'rig9'; there are: rig1, rig2, rig3"),
        ({"gpus": ["GPU-9"]}, "there is no GPU 'GPU-9'"),
        (window(20, 10), "ends after it begins"),
        (window(-20, -10), "in the future"),
    ],
)
def test_invalid_reservations_are_refused(parts: dict[str, Any], text: str) -> None:
    """With what is wrong."""
    with pytest.raises(InvalidRequest, match=text):
        build(**parts)


def test_overlapping_reservations_of_a_gpu_are_refused() -> None:
    """Another window, or other GPUs, are no overlap."""
    first = build()
    reservations.check_overlap(build(**window(20, 30)), [first], inventory())
    reservations.check_overlap(build(nodes=["rig2"]), [first], inventory())
    with pytest.raises(Conflict, match="the reservation 'course' keeps some of these GPUs"):
        reservations.check_overlap(build(nodes=[], gpus=["GPU-1"], **window(15, 30)), [first], inventory())


async def test_reserved_gpus_go_to_reservation_users_only(setting: Setting) -> None:
    """Over a restart as well; when it is cancelled, whoever waits is served."""
    async with asgi_broker(setting) as running:
        body = {"name": "course", "nodes": ["rig1"], "users": ["ada"]}
        times = window(-5, 3600, running.core.clock.now())
        refused = await post(running, "ada", "/reservations", {**body, **times}, 403)
        assert refused["detail"] == "ada is not an administrator: only administrators may reserve GPUs"
        made = await post(running, "root", "/reservations", {**body, **times}, 201)
        assert (made["created_by"], made["nodes"]) == ("root", ["rig1"])
        await post(running, "root", "/reservations", {**body, **times}, 409)
        waiting = await ask(running, "ben", key="b")
        assert waiting["state"] == "requested"
    async with asgi_broker(setting) as running:
        assert await read(running, "ben", "/reservations") == [made]
        view = await read(running, "ben", "/cluster")
        assert view["nodes"][0]["gpus"][0]["reservation"] == "course"
        lease = await ask(running, "ada", key="a")
        assert lease["state"] == "granted"
        await run_notebook(running, lease)
        await delete(running, "ada", f"/leases/{lease['id']}")
        await wait_for_state(running, f"/leases/{lease['id']}", "released")
        assert (await read(running, "ben", f"/leases/{waiting['id']}"))["state"] == "requested"
        async with running.client("root") as client:
            assert (await client.delete(f"/api/v1/reservations/{made['id']}")).status_code == 204
            assert (await client.delete(f"/api/v1/reservations/{made['id']}")).status_code == 404
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")


async def test_reservation_starts_and_ends_automatically(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody needs to ask for anything then: who waits is served when it ends, and it is forgotten."""
    monkeypatch.setattr(core_module, "HOUSEKEEPING_S", 0.05)
    async with asgi_broker(setting) as running:
        # On a busy machine, two requests may take many seconds.
        times = window(-5, 15, running.core.clock.now())
        await post(
            running, "root", "/reservations", {"name": "short", "nodes": ["rig1"], "users": ["ada"], **times}, 201
        )
        waiting = await ask(running, "ben")
        assert waiting["state"] == "requested"
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")
        await until(lambda: running.store.load_reservations() == [], "it is forgotten")
        assert await read(running, "ben", "/reservations") == []
