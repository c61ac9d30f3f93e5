"""The spawn form and the page of all GPUs where Slurm decides."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpuhub.broker_api.schemas import (
    ClusterView,
    GpuModelView,
    GpuState,
    HolderView,
    LeaseState,
    NodeState,
    PartitionView,
    Purpose,
)
from gpuhub.config.settings import ClusterSettings
from gpuhub.web.gpus_page.node_filter import NodeFilter, needs_attention, select_nodes
from gpuhub.web.gpus_page.parts import GpusPageData, render_page
from gpuhub.web.spawn_form import build_cards, render_form, render_parts
from gpuhub.web.text import count_totals, describe_partition, describe_waiting
from tests.support.broker.factories import USAGE, entry, lease
from tests.support.clusters import build_cluster
from tests.support.hub.fake_broker import NOW, FakeBroker

NASTY = "<script>alert(1)</script>"
CAROL = HolderView(
    owner="carol",
    purpose=Purpose.JOB,
    since=NOW,
    until=NOW + timedelta(hours=2),
    slurm_job=17,
    is_outside=True,
)
GPU = PartitionView(
    name="gpu",
    is_default=True,
    is_up=True,
    longest_s=86400,
    usual_s=3600,
    most_nodes=None,
    nodes=2,
    gpus=(GpuModelView(model="RTX 5070", free=1, total=1), GpuModelView(model="RTX 5090", free=0, total=1)),
    profiles=("small", "cpu"),
)
SHORT = GPU.model_copy(
    update={
        "name": "short",
        "is_default": False,
        "longest_s": 4 * 3600,
        "usual_s": None,
        "most_nodes": 2,
        "profiles": ("big",),
    }
)


@pytest.fixture
def slurm() -> ClusterSettings:
    """The small cluster in Slurm's care."""
    profiles = [
        {"name": "big", "title": "RTX 5090", "gpu_model": "RTX 5090", "partition": "short", "qos": "high"},
        {"name": "small", "title": "RTX 5070", "gpu_model": "RTX 5070", "time_limit": "30m"},
        {"name": "cpu", "title": "No GPU", "gpu_count": 0},
    ]
    return build_cluster(engine="slurm", slurm={"account": "physics"}, profiles=profiles)


async def build_view(cluster: ClusterSettings, **changes: Any) -> ClusterView:
    """rig1's GPU is carol's by a plain job."""
    view = await FakeBroker(cluster).cluster()
    taken = (
        view.nodes[0]
        .gpus[0]
        .model_copy(
            update={"state": GpuState.OUTSIDE, "holder": CAROL, "holders": (CAROL,), "message": "Slurm job 17 of carol"}
        )
    )
    nodes = (view.nodes[0].model_copy(update={"gpus": (taken,)}), *view.nodes[1:])
    held = view.profiles[0].model_copy(update={"free": 0, "starts_now": False, "holders": (CAROL,)})
    told = {"engine": "slurm", "nodes": nodes, "profiles": (held, *view.profiles[1:]), "partitions": (GPU, SHORT)}
    return view.model_copy(update={**told, **changes})


def render(view: ClusterView, **more: Any) -> dict[str, str]:
    found = render_page(GpusPageData(**{"name": "ada", "is_admin": False, "view": view, **more}), NodeFilter())
    parts = {**found.parts, "nodes": "".join(found.nodes.values())}
    return {part: " ".join(html.split()) for part, html in parts.items()}


async def test_each_profile_shows_its_slurm_terms(slurm: ClusterSettings) -> None:
    """The terms have partition, limits, account and QOS; without a limit the partition's default counts."""
    big, small, cpu = build_cards(slurm, await build_view(slurm), None)
    assert big.terms == "partition short (up to 4 h; 2 nodes at most) · account physics · QOS high"
    assert big.facts.endswith("up to 4 h")
    assert small.terms == "partition gpu (up to 24 h, 1 h by default) · account physics"
    assert small.facts.endswith("up to 30 min")
    assert cpu.facts.endswith("up to 1 h")
    assert (big.status_text, big.free_text) == ("waits in Slurm's queue", "0 of 1 free")


async def test_partition_that_is_down_is_shown(slurm: ClusterSettings) -> None:
    down = SHORT.model_copy(update={"is_up": False})
    big = build_cards(slurm, await build_view(slurm, partitions=(down,)), None)[0]
    assert big.status_text == "waits: its partition is down"
    assert "down: nothing starts there" in big.terms


def test_slurm_terms_come_from_settings_without_a_broker(slurm: ClusterSettings, cluster: ClusterSettings) -> None:
    """And without Slurm there is nothing of it."""
    assert build_cards(slurm, None, None)[0].terms == "partition short · account physics · QOS high"
    assert {card.terms for card in build_cards(cluster, None, None)} == {""}


async def test_form_shows_external_jobs_and_free_gpus_by_type(slurm: ClusterSettings) -> None:
    """With user and end; and that others wait for GPUs in the same queue."""
    view = await build_view(slurm, queue=(entry(3, "ben"),), waiting=1, waiting_outside=2)
    parts = {name: " ".join(html.split()) for name, html in render_parts(slurm, view).items()}
    assert "held by <strong>carol</strong> (Slurm job 17) since <time" in parts["nodes"]
    assert "Free now: 1 of 1 RTX 5060 · 1 of 1 RTX 5070 · 0 of 1 RTX 5090" in parts["nodes"]
    assert "held by <strong>carol</strong> (Slurm job 17)" in parts["card-big"]
    assert "Slurm&#39;s queue" in parts["queue"]
    assert '<li value="3">' in parts["queue"]
    assert "2 other Slurm jobs wait for GPUs in the same queue" in parts["queue"]
    html = render_form(slurm, view, last_profile=None)
    assert all(text.strip() in html for text in render_parts(slurm, view).values())


async def test_gpu_page_shows_partitions_and_no_cordon_buttons(slurm: ClusterSettings) -> None:
    """Nodes are drained in Slurm; a node to which Slurm gives no work is not shown as up."""
    view = await build_view(slurm, waiting_outside=1)
    away = view.nodes[1].model_copy(
        update={"state": NodeState.CORDONED, "message": "Slurm starts no jobs on this node: drained"}
    )
    view = view.model_copy(update={"nodes": (view.nodes[0], away, view.nodes[2])})
    shown = render(view, is_admin=True, usage=[USAGE, USAGE])
    assert '<strong class="gpuhub-name">gpu</strong> <span class="gpuhub-quiet">default</span>' in shown["partitions"]
    assert "up to 24 h, 1 h by default" in shown["partitions"]
    assert "free now: 1 of 1 RTX 5070 · 0 of 1 RTX 5090" in shown["partitions"]
    assert ">no work</span>" in shown["nodes"]
    assert "data-do" not in shown["nodes"]
    assert "1 other Slurm job waits for GPUs in the same queue" in shown["queue"]
    assert "Fair share" not in shown["own"]
    assert "Delay" not in shown["all_usage"]
    assert "Free now: " in shown["totals"]
    assert "out of service" not in shown["totals"]


async def test_without_slurm_there_are_no_partitions(cluster: ClusterSettings) -> None:
    shown = render(await FakeBroker(cluster).cluster())
    assert (shown["partitions"], "Free now" in shown["totals"]) == ("", False)


async def test_external_jobs_are_found_and_are_not_problems(slurm: ClusterSettings) -> None:
    """The filter finds the user's own nodes, and nodes by their holder's name."""
    view = await build_view(slurm)
    assert not needs_attention(view.nodes[0])
    assert [node.name for node in select_nodes(view.nodes, NodeFilter(show="mine"), "carol").nodes] == ["rig1"]
    assert [node.name for node in select_nodes(view.nodes, NodeFilter(find="carol"), "ada").nodes] == ["rig1"]
    totals = count_totals(view)
    assert totals is not None
    assert (totals.free, totals.held, totals.gpus_unusable) == (2, 1, 0)


async def test_names_from_slurm_are_escaped(slurm: ClusterSettings) -> None:
    """Names and reasons from Slurm cannot insert HTML."""
    nasty = CAROL.model_copy(update={"owner": NASTY})
    view = await build_view(slurm, partitions=(GPU.model_copy(update={"name": NASTY}),))
    gpu = view.nodes[0].gpus[0].model_copy(update={"holder": nasty, "holders": (nasty,)})
    node = view.nodes[0].model_copy(update={"gpus": (gpu,), "message": NASTY})
    html = "".join(render(view.model_copy(update={"nodes": (node,)})).values())
    assert NASTY not in html
    assert html.count("&lt;script&gt;") == 3


def test_waiting_user_sees_slurm_position_and_reason() -> None:
    """The job's number is what `squeue` and `scancel` take."""
    waiting = lease().model_copy(
        update={
            "state": LeaseState.REQUESTED,
            "position": 3,
            "slurm_job": 41,
            "waiting_for": "others go first",
            "gpus": (),
        }
    )
    text, button = describe_waiting(waiting)
    assert text.startswith("Waiting for a GPU: position 3 in Slurm's queue, as job 41. Others go first.")
    assert "gpuhub-leave" in button
    first = waiting.model_copy(update={"position": None})
    assert describe_waiting(first)[0].startswith("Waiting for a GPU: in Slurm's queue, as job 41.")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "up to 24 h, 1 h by default"),
        ({"usual_s": 86400}, "up to 24 h"),
        ({"longest_s": None, "usual_s": None}, "no time limit"),
        ({"longest_s": None}, "no time limit, 1 h by default"),
        ({"most_nodes": 1, "usual_s": None}, "up to 24 h; 1 node at most"),
    ],
)
def test_partition_limits_are_described(changes: dict[str, object], text: str) -> None:
    assert describe_partition(GPU.model_copy(update=changes)) == text
