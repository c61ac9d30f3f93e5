"""The spawn form."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhub.broker_api.schemas import (
    Capabilities,
    ClusterView,
    GpuView,
    HolderView,
    OutsideProcess,
    ProfileView,
    Purpose,
)
from gpuhub.config.settings import ClusterSettings, GroupSettings, IdleSettings
from gpuhub.spawners.base import SpawnFailed, parse_spawn_options
from gpuhub.storage.home_usage import HomeUsage
from gpuhub.web.handlers import ClusterCaches
from gpuhub.web.spawn_form import build_cards, build_spawn_form, describe_facts, render_form, render_parts
from tests.support.broker.factories import ask
from tests.support.clusters import build_cluster
from tests.support.hub.fake_broker import NOW, FakeBroker


async def test_last_profile_is_selected_if_it_can_start_now(cluster: ClusterSettings) -> None:
    """The form shows the number of free GPUs."""
    cards = build_cards(cluster, await FakeBroker(cluster).cluster(), "small")
    assert [card.name for card in cards if card.is_chosen] == ["small"]
    assert cards[0].free_text == "1 of 1 free"


async def test_occupied_profile_is_not_selected_and_shows_its_holder(cluster: ClusterSettings) -> None:
    """Otherwise the first that starts at once is selected, and the next position in the queue is shown."""
    broker = FakeBroker(cluster)
    await broker.request_lease(ask("big", "ben"))
    await broker.request_lease(ask("big", "cid"))
    cards = build_cards(cluster, await broker.cluster(), "big")
    assert [card.name for card in cards if card.is_chosen] == ["small"]
    assert (cards[0].status_text, cards[0].free_text) == ("will queue at position 2", "0 of 1 free")
    assert [holder.owner for holder in cards[0].holders] == ["ben"]
    html = render_form(cluster, await broker.cluster(), last_profile="big")
    assert "held by <strong>ben</strong>" in html
    assert "<strong>cid</strong> waits for profile big" in html


async def test_last_profile_stays_selected_if_all_gpus_are_held(cluster: ClusterSettings) -> None:
    """There is nothing better to offer than what the user wanted."""
    only = cluster.model_copy(update={"profiles": cluster.profiles[:2]})
    broker = FakeBroker(only)
    for profile in ("big", "small"):
        await broker.request_lease(ask(profile, "ben"))
    cards = build_cards(only, await broker.cluster(), "small")
    assert [card.name for card in cards if card.is_chosen] == ["small"]


async def test_profile_without_gpu_comes_first_while_no_gpu_is_free(cluster: ClusterSettings) -> None:
    """Its cells take a GPU when they need one; with a free GPU the order is that of cluster.toml."""
    broker = FakeBroker(cluster)
    await broker.request_lease(ask("big", "ben"))
    assert [card.name for card in build_cards(cluster, await broker.cluster(), None)] == ["big", "small", "cpu"]
    await broker.request_lease(ask("small", "ben"))
    cards = build_cards(cluster, await broker.cluster(), None)
    assert [(card.name, card.is_chosen) for card in cards] == [("cpu", True), ("big", False), ("small", False)]
    assert cards[0].facts.startswith("no GPU; a cell takes one with %%gpu")
    assert [card.name for card in build_cards(cluster, None, None)] == ["big", "small", "cpu"]


@pytest.mark.parametrize("last", [None, 5, "gone", {"a": 1}])
async def test_invalid_last_profile_is_ignored(cluster: ClusterSettings, last: object) -> None:
    """Old options may be anything: the REST API stores what it is given."""
    cards = build_cards(cluster, await FakeBroker(cluster).cluster(), last)
    assert [card.name for card in cards if card.is_chosen] == ["big"]


def test_form_is_complete_without_the_broker(cluster: ClusterSettings) -> None:
    """Profiles come from the settings; the number of free GPUs is shown as unknown."""
    html = render_form(cluster, None, last_profile=None)
    assert html.count('type="radio"') == 3
    assert html.count(" checked") == 1
    assert "free GPUs are unknown" in html


def test_form_offers_not_to_lend_the_gpu_where_idle_notebooks_do(cluster: ClusterSettings) -> None:
    """The last choice is selected."""
    assert "gpuhub-suspend" not in render_form(cluster, None, last_profile=None)
    lending = cluster.model_copy(update={"idle": IdleSettings(suspend_after="10m")})
    assert 'name="suspend" value="no" id="gpuhub-suspend" >' in render_form(lending, None, last_profile=None)
    assert 'id="gpuhub-suspend" checked>' in render_form(lending, None, last_profile=None, is_suspendable=False)


async def test_form_offers_to_keep_the_notebook_where_that_works(cluster: ClusterSettings) -> None:
    """The last choice is selected; with Slurm there is none."""
    view = await FakeBroker(cluster).cluster()
    assert 'name="keep" value="yes" id="gpuhub-keep" >' in render_form(cluster, view, last_profile=None)
    assert 'id="gpuhub-keep" checked>' in render_form(cluster, view, last_profile=None, is_kept=True)
    without = view.model_copy(update={"capabilities": Capabilities(persistent_notebooks=False)})
    assert "gpuhub-keep" not in render_form(cluster, without, last_profile=None)


async def test_text_from_settings_is_escaped() -> None:
    """Titles, descriptions and the notice are text, not HTML."""
    nasty = '<script>alert("x")</script>'
    profile = {"name": "p", "title": nasty, "description": nasty, "gpu_count": 0}
    cluster = build_cluster(profiles=[profile], notice=nasty)
    html = render_form(cluster, await FakeBroker(cluster).cluster(), last_profile=None)
    assert nasty not in html
    assert html.count("&lt;script&gt;") == 3


async def test_form_and_its_refreshed_parts_are_equal(cluster: ClusterSettings) -> None:
    """Each part that is sent later stands in the page already."""
    view = await FakeBroker(cluster).cluster()
    html = render_form(cluster, view, last_profile=None)
    parts = render_parts(cluster, view)
    assert set(parts) == {"card-big", "card-small", "card-cpu", "nodes", "queue", "problem"}
    for name, text in parts.items():
        assert f'data-gpuhub-part="{name}"' in html
        assert text.strip() in html


async def test_gpu_problems_are_shown_on_the_form(cluster: ClusterSettings) -> None:
    """The form shows why a GPU is unavailable: external use, failure, cordon, reservation or share."""
    view = await FakeBroker(cluster).cluster()
    strangers = (OutsideProcess(pid=4242, memory_mib=5222), OutsideProcess(pid=7, memory_mib=None))
    holder = HolderView(owner="ada", purpose=Purpose.NOTEBOOK, since=NOW, until=None)
    states: list[tuple[dict[str, object], str]] = [
        ({"state": "outside", "outside": strangers}, "in use outside gpuhub: pid 4242, 5.1 GiB; pid 7"),
        ({"state": "failed", "message": "fallen off the bus"}, "failed: fallen off the bus"),
        ({"state": "unavailable", "message": "cordoned by root: fans"}, "unavailable: cordoned by root: fans"),
        ({"state": "quarantined", "holder": holder}, "quarantined: its lease of <strong>ada</strong> is over"),
        ({"state": "free", "reservation": "course"}, "reserved: course"),
        ({"state": "held", "share": 4, "holder": holder, "holders": (holder,) * 2}, "2 of 4 parts held"),
        (
            {"state": "held", "share": 4, "holder": holder, "holders": (holder,)},
            "7.96 GiB cap each: a promise, not a wall",
        ),
    ]
    for changes, text in states:
        gpu = GpuView.model_validate({**view.nodes[0].gpus[0].model_dump(), **changes})
        node = view.nodes[0].model_copy(update={"gpus": (gpu,)})
        html = render_parts(cluster, view.model_copy(update={"nodes": (node, *view.nodes[1:])}))["nodes"]
        assert text in " ".join(html.split()), html


async def test_form_summarizes_a_large_cluster(cluster: ClusterSettings) -> None:
    """A thousand nodes do not make a form of a thousand lines."""
    view = await FakeBroker(cluster).cluster()
    many = view.model_copy(update={"nodes": view.nodes[:1] * 1000})
    html = render_parts(cluster, many)["nodes"]
    assert "1,000 of 1,000 GPUs free on 1,000 nodes" in html
    assert len(html) < 200


def test_home_usage_is_shown_on_the_form(cluster: ClusterSettings) -> None:
    """The usage is shown only with a quota or little space, and never as HTML."""
    html = render_form(cluster, None, last_profile=None, home=HomeUsage(text="Home: 1 of <2>", warning="nearly full"))
    assert "Home: 1 of &lt;2&gt;" in html
    assert '<div class="alert alert-warning">nearly full</div>' in html
    assert "Home:" not in render_form(cluster, None, last_profile=None)


def test_gpu_share_profile_describes_its_memory_cap() -> None:
    """With the cap where the cards are known, and never as a wall."""
    profile = {"name": "quarter", "title": "A quarter", "gpu_share": 4, "gpu_model": "RTX 5090"}
    shared = build_cluster(profiles=[profile]).profiles[0]
    assert describe_facts(shared) == "1/4 of RTX 5090, a memory cap: a promise, not a wall"
    assert describe_facts(shared, [32768]) == "1/4 of RTX 5090, 8 GiB cap: a promise, not a wall"
    assert "2 to 8 GiB cap" in describe_facts(shared, [8192, 12288, 32768])


def test_profile_facts_are_described_in_one_line(cluster: ClusterSettings) -> None:
    """GPU, CPUs, memory and limit in one line."""
    assert describe_facts(cluster.profiles[0]) == "1 × RTX 5090 · up to 8 h"
    assert describe_facts(cluster.profiles[1]) == "1 × RTX 5070 · 1 CPU · 4 GiB memory"


@pytest.mark.parametrize(
    ("cpus", "memory_mib", "text"),
    [
        ((14.0, 14.0), (60212, 60212), "1 × RTX 5090 · 14 CPUs · 58 GiB memory · up to 8 h"),
        ((6.125, 14.0), (28000, 60212), "1 × RTX 5090 · 6.1 to 14 CPUs · 27 GiB to 58 GiB memory · up to 8 h"),
        ((1.0, 1.0), (700, 700), "1 × RTX 5090 · 1 CPU · 700 MiB memory · up to 8 h"),
        (None, None, "1 × RTX 5090 · up to 8 h"),
    ],
)
def test_profile_shows_the_share_that_goes_with_its_gpu(
    cluster: ClusterSettings,
    cpus: tuple[float, float] | None,
    memory_mib: tuple[int, int] | None,
    text: str,
) -> None:
    """A range where nodes differ; numbers of the profile come before it."""
    view = ProfileView(
        name="big", title="", description="", gpu_count=1, total=1, free=1, starts_now=True, ahead=0, holders=(),
        cpus=cpus, memory_mib=memory_mib,
    )  # fmt: skip
    assert describe_facts(cluster.profiles[0], view=view) == text
    assert describe_facts(cluster.profiles[1], view=view) == "1 × RTX 5070 · 1 CPU · 4 GiB memory"


@pytest.mark.parametrize(
    "fields",
    [
        {"profile": ["a", "b"]},
        {"image": ["x"]},
        {"profile": ["a"], "x_file": ["b"]},
        {"profile": ["a"], "image": ["x", "y"]},
        {"profile": ["a"], "image-a": []},
    ],
)
def test_unknown_form_fields_are_refused(fields: dict[str, list[str]]) -> None:
    """A form sends one profile."""
    with pytest.raises(SpawnFailed):
        parse_spawn_options(fields)


def test_the_form_sends_a_profile() -> None:
    """And nothing else."""
    assert parse_spawn_options({"profile": ["big"]}) == {"profile": "big"}
    assert parse_spawn_options({}) == {}


def test_the_form_sends_the_image_of_the_chosen_profile() -> None:
    """A browser sends the choices of all profiles."""
    fields = {"profile": ["big"], "image-big": ["lab/mine:1"], "image-small": ["lab/mine:2"]}
    assert parse_spawn_options(fields) == {"profile": "big", "image": "lab/mine:1"}
    assert parse_spawn_options({**fields, "profile": ["cpu"]}) == {"profile": "cpu"}
    assert parse_spawn_options({"profile": ["big"], "image": ["lab/mine:1"]}) == {
        "profile": "big",
        "image": "lab/mine:1",
    }


def test_a_profile_with_several_images_has_a_choice(cluster: ClusterSettings) -> None:
    """The user's last one comes first; it is forgotten where the profile does not offer it any more."""
    big = cluster.profiles[0].model_copy(update={"images": ("gpuhub/llm:latest", "gpuhub/notebook:latest")})
    offering = cluster.model_copy(update={"profiles": (big, *cluster.profiles[1:])})
    card, *others = build_cards(offering, None, "big", last_image="gpuhub/llm:latest")
    assert card.images == ("gpuhub/llm:latest", "gpuhub/notebook:latest")
    assert [other.images for other in others] == [()] * len(others)
    for last_profile, last_image in (("small", "gpuhub/llm:latest"), ("big", "gone"), ("big", None), ("big", 5)):
        (card, *_) = build_cards(offering, None, last_profile, last_image=last_image)
        assert card.images == ("gpuhub/notebook:latest", "gpuhub/llm:latest")
    html = render_form(offering, None, last_profile="big", last_image="gpuhub/llm:latest")
    assert '<select class="form-select form-select-sm" name="image-big"' in html
    assert "<option>gpuhub/llm:latest</option><option>gpuhub/notebook:latest</option>" in html
    assert "image-small" not in html


async def test_form_shows_only_profiles_that_the_user_may_use(cluster: ClusterSettings) -> None:
    """Also without the broker, and when it refreshes itself; the last profile may have become restricted."""
    big = cluster.profiles[0].model_copy(update={"groups": ("vision",)})
    restricted = cluster.model_copy(update={"profiles": (big, *cluster.profiles[1:])})
    view = await FakeBroker(restricted).cluster()
    for shown in (view, None):
        cards = build_cards(restricted, shown, "big", {"lab"})
        assert [(card.name, card.is_chosen) for card in cards] == [("small", True), ("cpu", False)]
        assert len(build_cards(restricted, shown, "big", {"vision"})) == 3
        html = render_form(restricted, shown, last_profile="big", groups={"lab"})
        assert 'value="big"' not in html
        assert 'value="big" checked' in render_form(restricted, shown, last_profile="big", groups={"vision"})
    assert "card-big" not in render_parts(restricted, view)
    assert "card-big" in render_parts(restricted, view, {"vision"})


async def test_form_without_profiles_says_why(cluster: ClusterSettings) -> None:
    """All are restricted to groups."""
    big = cluster.profiles[0].model_copy(update={"groups": ("vision",)})
    only = cluster.model_copy(update={"profiles": (big,)})
    html = render_form(only, await FakeBroker(only).cluster(), last_profile=None)
    assert "Every profile is restricted to groups that you are not in." in html
    assert 'type="radio"' not in html


async def test_nodes_of_other_groups_are_marked(cluster: ClusterSettings) -> None:
    """With the groups, in the form's table."""
    view = await FakeBroker(cluster).cluster()
    closed = view.nodes[0].model_copy(update={"groups": ("nlp", "vision"), "is_open": False})
    html = render_parts(cluster, view.model_copy(update={"nodes": (closed, *view.nodes[1:])}))["nodes"]
    assert html.count("only for members of nlp or vision") == 1


async def test_figures_are_asked_for_with_the_groups_that_matter(cluster: ClusterSettings) -> None:
    """Those of the login and of the settings, without the ones that no node or profile names."""
    big = cluster.profiles[0].model_copy(update={"groups": ("vision", "nlp")})
    restricted = cluster.model_copy(
        update={"profiles": (big,), "groups": (GroupSettings(name="nlp", members=("ada",)),)}
    )
    user = SimpleNamespace(name="ada", orm_user=SimpleNamespace(groups=[SimpleNamespace(name="vision")]))
    user.orm_user.groups.append(SimpleNamespace(name="lab"))
    asked: list[Collection[str]] = []

    async def read_cluster(groups: Collection[str]) -> ClusterView:
        asked.append(groups)
        return await FakeBroker(restricted).cluster()

    spawner: Any = SimpleNamespace(
        cluster=restricted,
        user=user,
        orm_spawner=SimpleNamespace(user_options=None),
        hub=SimpleNamespace(base_url="/hub/"),
        broker=SimpleNamespace(cluster=read_cluster),
        log=None,
    )
    assert 'value="big"' in await build_spawn_form(spawner)
    caches = ClusterCaches(restricted, read_cluster)
    first, second = await caches.get(user), await caches.get(user)
    assert first is second is not None
    assert asked == [{"vision", "nlp"}] * 2
    user.name, user.orm_user.groups = "ben", []
    assert await caches.get(user) is not None
    assert asked[2:] == [frozenset()]
