"""The cluster as everybody sees it, through the API of a real broker on simulated nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.views.cluster_view import MAX_QUEUE_SHOWN
from gpuhub.broker.views.serializers import describe_request
from gpuhub.broker_api.schemas import Purpose
from gpuhub.config.settings import CircuitSettings, ProfileSettings
from gpuhub.domain.models import LeaseRow, ResourceRequest
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Setting, asgi_broker, until
from tests.support.docker.simulated_nodes import build_cluster


def gpu_of(view: dict[str, Any], node: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in view["nodes"] if one["name"] == node)["gpus"][0]
    return found


def profile_of(view: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in view["profiles"] if one["name"] == name)
    return found


async def test_shared_gpu_shows_all_holders(tmp_path: Path) -> None:
    """Parts are counted as parts, each with its cap, and a whole card is not to be had there."""
    profiles = [
        ProfileSettings(name="half", title="Half", gpu_share=2, gpu_model="RTX 5090"),
        ProfileSettings(name="whole", title="Whole", gpu_model="RTX 5090"),
    ]
    async with asgi_broker(Setting(tmp_path, cluster=build_cluster(profiles=profiles))) as running:
        lease = await ask(running, "ada", profile="half")
        assert (lease["gpus"][0]["share"], lease["gpus"][0]["memory_cap_mib"]) == (2, 32607 // 2)
        view = await read(running, "ben", "/cluster")
        assert (gpu_of(view, "rig1")["share"], len(gpu_of(view, "rig1")["holders"])) == (2, 1)
        half, whole = profile_of(view, "half"), profile_of(view, "whole")
        assert (half["total"], half["free"], half["starts_now"], half["share"]) == (2, 1, True, 2)
        assert (whole["total"], whole["free"], whole["starts_now"]) == (1, 0, False)
        await ask(running, "ben", profile="half")
        view = await read(running, "ben", "/cluster")
        assert [holder["owner"] for holder in gpu_of(view, "rig1")["holders"]] == ["ada", "ben"]
        assert profile_of(view, "half")["free"] == 0


async def test_cordon_is_shown_and_blocks_new_work(setting: Setting) -> None:
    """Until it is uncordoned: then who waited is served."""
    async with asgi_broker(setting) as running:
        node = await post(running, "root", "/nodes/rig1/cordon", {"reason": "new fans"})
        assert (node["state"], node["message"]) == ("cordoned", "cordoned by root: new fans")
        assert node["gpus"][0]["state"] == "unavailable"
        waiting = await ask(running, "ada")
        view = await read(running, "ada", "/cluster")
        assert (view["waiting"], view["queue"][0]["lease"]) == (1, waiting["id"])
        assert (await post(running, "root", "/nodes/rig1/undrain"))["state"] == "up"
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted", "ada")


async def test_reservation_is_shown_on_its_gpus(setting: Setting) -> None:
    """Whoever is in it starts at once, others do not; what starts is told to each as it is for them."""
    window = {"starts_at": "2020-01-01T08:00:00Z", "ends_at": "2126-01-01T09:00:00Z"}
    async with asgi_broker(setting) as running:
        kept = {"name": "course", "nodes": ["rig1"], "users": ["ada"], **window}
        made = await post(running, "root", "/reservations", kept, 201)
        views = {name: await read(running, name, "/cluster") for name in ("ada", "ben")}
        assert gpu_of(views["ben"], "rig1")["reservation"] == "course"
        assert gpu_of(views["ben"], "rig2")["reservation"] is None
        assert {name: profile_of(view, "rtx5090")["starts_now"] for name, view in views.items()} == {
            "ada": True,
            "ben": False,
        }
        assert (await ask(running, "ben"))["state"] == "requested"
        async with running.client("root") as client:
            assert (await client.delete(f"/api/v1/reservations/{made['id']}")).status_code == 204
        assert await read(running, "ben", "/reservations") == []


async def test_lease_ends_after_a_forced_release(setting: Setting) -> None:
    """Its node is silent: it stays releasing, until an administrator says that it is gone."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        setting.nodes["rig1"].is_reachable = False
        assert (await delete(running, "ada", f"/leases/{lease['id']}"))["state"] == "releasing"
        forced = await post(running, "root", f"/leases/{lease['id']}/force")
        assert forced["state"] == "released"
        events = await read(running, "ada", "/events", limit=1000)
        assert "lease.forced" in [event["kind"] for event in events]
        assert events == sorted(events, key=lambda event: event["seq"])
        assert await read(running, "ada", "/events", after=events[-1]["seq"]) == []
        assert await read(running, "ben", "/events") == []


async def test_named_jobs_are_shown_by_name(setting: Setting) -> None:
    """Whoever holds a GPU with one, and what waits; a name cannot move a terminal's cursor."""
    async with asgi_broker(setting) as running:
        for number in (1, 2):
            body = {"run_id": f"run-00000{number}", "detached": True, "nnodes": 3, "name": f"train{number}.py"}
            await post(running, "ada", "/jobs", body, 201)
        view = await read(running, "ben", "/cluster")
        assert gpu_of(view, "rig1")["holder"]["name"] == "train1.py"
        assert [entry["wants"] for entry in view["queue"]] == ["train2.py: 3 nodes × 1 GPU"]
        refused = await post(running, "ada", "/jobs", {"run_id": "run-000003", "name": "a\x1b[2J"}, 422)
        assert refused["detail"].startswith("name: ")


async def test_leases_are_filtered(setting: Setting) -> None:
    """By owner, state and node; never beyond what the caller may see."""
    async with asgi_broker(setting) as running:
        await ask(running, "ada")
        await ask(running, "ben")
        narrowed = {
            **{f"owner {name}": {"owner": name} for name in ("ada", "ben", "cid")},
            "waiting": {"state": "requested"},
            "on rig1": {"node": "rig1"},
        }
        found = {
            what: [lease["owner"] for lease in await read(running, "root", "/leases", **query)]
            for what, query in narrowed.items()
        }
        assert found == {
            "owner ada": ["ada"],
            "owner ben": ["ben"],
            "owner cid": [],
            "waiting": ["ben"],
            "on rig1": ["ada"],
        }
        assert await read(running, "ben", "/leases", owner="ada") == []
        refused = await read(running, "root", "/leases", 422, ovner="ada")
        assert refused["detail"] == "ovner: there is no such parameter; valid here: node, owner, state"


async def test_nodes_name_whose_requests_could_be_granted_there(setting: Setting) -> None:
    """At most two owners, the same to all callers."""

    def list_owners(view: dict[str, Any]) -> dict[str, list[str]]:
        return {node["name"]: node["wanted_by"] for node in view["nodes"]}

    job = {"models": ["RTX 5090"], "batch": True}
    async with asgi_broker(setting) as running:
        assert set(map(tuple, list_owners(await read(running, "ada", "/cluster")).values())) == {()}
        for number, owner in enumerate(("cid", "cid", "ben", "ada")):
            await post(running, owner, "/jobs", {**job, "run_id": f"run-00000{number}"}, 201)
        expected = {"rig1": ["ada", "ben"], "rig2": [], "rig3": []}
        assert list_owners(await read(running, "ada", "/cluster")) == expected
        assert list_owners(await read(running, "root", "/cluster")) == expected
        assert (await read(running, "ada", "/nodes"))[0]["wanted_by"] is None


async def test_request_without_a_gpu_could_be_granted_on_any_node(tmp_path: Path) -> None:
    """It waits for CPU and memory that holders of GPUs have."""
    profiles = [ProfileSettings(name="cpu", title="CPU", gpu_count=0)]
    async with asgi_broker(Setting(tmp_path, cluster=build_cluster(profiles=profiles))) as running:
        for node in ("rig1", "rig2", "rig3"):
            await post(running, "root", f"/nodes/{node}/cordon", {"reason": "new fans"})
        await ask(running, "ben", profile="cpu")
        view = await read(running, "ada", "/cluster")
    assert [node["wanted_by"] for node in view["nodes"]] == [["ben"]] * 3


async def test_long_queue_is_truncated(setting: Setting) -> None:
    """With how many wait in all, and with all of one's own."""
    job = {"models": ["RTX 5090"], "batch": True}
    async with asgi_broker(setting) as running:
        await post(running, "ada", "/jobs/arrays", {"job": {**job, "run_id": "longrun"}, "count": 1000}, 201)
        for number in range(3):
            await post(running, "ben", "/jobs", {**job, "run_id": f"benrun{number}"}, 201)
        told = {name: await read(running, name, "/cluster") for name in ("ada", "ben", "cid")}
    assert {view["waiting"] for view in told.values()} == {1002}
    assert [entry["position"] for entry in told["cid"]["queue"]] == list(range(1, MAX_QUEUE_SHOWN + 1))
    owners = {name: [entry["owner"] for entry in view["queue"]] for name, view in told.items()}
    assert (owners["ada"].count("ada"), owners["ben"].count("ben")) == (999, 3)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (ResourceRequest(), "1 node × 1 GPU"),
        (ResourceRequest(nodes=3, least_nodes=3, gpus_per_node=2), "3 nodes × 2 GPUs"),
        (ResourceRequest(nodes=3, least_nodes=1, models=("RTX 5090",)), "1 to 3 nodes × 1 RTX 5090"),
        (ResourceRequest(spread=8), "8 GPUs anywhere"),
        (
            ResourceRequest(models=("A", "B"), exclusive=True, scavenge=True, batch=True),
            "1 node × 1 A or B, exclusive, scavenging, batch",
        ),
    ],
)
def test_job_request_is_described_in_one_line(ask: ResourceRequest, text: str) -> None:
    """In the queue that everybody sees."""
    lease = LeaseRow(
        id="l", seq=1, key="k", owner="ada", purpose=Purpose.JOB, subject="j", profile=None, resources=ask, created_at=0, since=0
    )  # fmt: skip
    assert describe_request(lease) == text


async def test_enforced_circuit_limits_what_is_free(tmp_path: Path) -> None:
    """From the agents' limits to the page: what is taken, what waits and why, and what is refused at once."""
    circuit = CircuitSettings(name="left", volts=120, amps=10, nodes=("rig1", "rig2"), enforce=True)
    setting = Setting(tmp_path, cluster=build_cluster(circuits=(circuit,)))
    setting.nodes["rig1"].power_limits[0], setting.nodes["rig2"].power_limits[0] = 575.0, 249.5
    async with asgi_broker(setting) as running:
        await ask(running, "ada", profile="rtx5090")
        view = await read(running, "ben", "/cluster")
        assert [node["circuit"] for node in view["nodes"]] == [
            {"name": "left", "taken_watts": 575, "gpu_watts": 660},
            {"name": "left", "taken_watts": 575, "gpu_watts": 660},
            None,
        ]
        gpu = gpu_of(view, "rig2")
        assert (gpu["state"], gpu["message"]) == (
            "unavailable",
            "circuit 'left' has 85 W of 660 W for GPUs left, and it needs 250 W",
        )
        assert (profile_of(view, "rtx5070")["free"], profile_of(view, "rtx5070")["starts_now"]) == (0, False)
        waiting = await ask(running, "ben", profile="rtx5070")
        why = await read(running, "ben", f"/leases/{waiting['id']}/why")
        assert why["waits_for"] == (
            "1 × RTX 5070 on one node: circuit 'left' has 85 W of 660 W for GPUs left and 250 W are needed "
            "(taken by ada)"
        )
        assert why["expected_start"] is None


async def test_gpu_beyond_its_circuit_is_refused_or_unavailable(tmp_path: Path) -> None:
    """A limit above the circuit is refused until it is lowered; without a limit the GPU is not granted."""
    circuit = CircuitSettings(name="left", volts=120, amps=5, nodes=("rig1", "rig2"), enforce=True)
    setting = Setting(tmp_path, cluster=build_cluster(circuits=(circuit,)))
    setting.nodes["rig1"].power_limits[0] = 575.0
    async with asgi_broker(setting) as running:
        refused = await ask(running, "ada", status=422, profile="rtx5090")
        assert "needs 575 W of circuit 'left', which leaves 180 W to GPUs" in refused["detail"]
        assert gpu_of(await read(running, "ada", "/cluster"), "rig2")["message"] == (
            "NVML reports no power limit for it, so that circuit 'left' may not be enough"
        )
        setting.nodes["rig1"].power_limits[0] = 180.0
        capacity = running.core.capacity
        await until(lambda: capacity.inventory.nodes["rig1"].gpus[0].power_limit_w == 180.0, "the lower limit is read")
        assert (await ask(running, "ada", profile="rtx5090"))["state"] == "granted"
