"""The spawn form."""

from __future__ import annotations

import pytest

from gpuhub.broker.schemas import LeaseRequest
from gpuhub.containers.form import build_cards, build_form, build_parts, describe_facts, parse_form
from gpuhub.containers.troubles import SpawnFailed
from gpuhub.settings import Cluster
from tests.support.fake_broker import FakeBroker
from tests.unit.containers.conftest import build_cluster


def ask(profile: str, owner: str) -> LeaseRequest:
    return LeaseRequest(profile=profile, key=f"{owner}-{profile}", owner=owner)


async def test_the_users_last_choice_is_selected_when_it_starts_at_once(cluster: Cluster) -> None:
    """And it says what is free."""
    cards = build_cards(cluster, await FakeBroker(cluster).cluster(), "small")
    assert [card.name for card in cards if card.is_chosen] == ["small"]
    assert cards[0].free_text == "1 of 1 free"


async def test_a_held_profile_is_not_selected_and_tells_who_holds_it(cluster: Cluster) -> None:
    """Else the first that starts at once is; the queue's next position is told."""
    broker = FakeBroker(cluster)
    await broker.request_lease(ask("big", "ben"))
    await broker.request_lease(ask("big", "cid"))
    cards = build_cards(cluster, await broker.cluster(), "big")
    assert [card.name for card in cards if card.is_chosen] == ["small"]
    assert (cards[0].status_text, cards[0].free_text) == ("will queue at position 2", "0 of 1 free")
    assert [holder.owner for holder in cards[0].holders] == ["ben"]
    html = build_form(cluster, await broker.cluster(), last_profile="big")
    assert "held by <strong>ben</strong>" in html
    assert "<strong>cid</strong> waits for profile big" in html


async def test_with_everything_held_the_last_choice_stays(cluster: Cluster) -> None:
    """There is nothing better to offer than what the user wanted."""
    only = cluster.model_copy(update={"profiles": cluster.profiles[:2]})
    broker = FakeBroker(only)
    for profile in ("big", "small"):
        await broker.request_lease(ask(profile, "ben"))
    cards = build_cards(only, await broker.cluster(), "small")
    assert [card.name for card in cards if card.is_chosen] == ["small"]


@pytest.mark.parametrize("last", [None, 5, "gone", {"a": 1}])
async def test_a_strange_last_choice_does_no_harm(cluster: Cluster, last: object) -> None:
    """Old options may be anything: the REST API stores what it is given."""
    cards = build_cards(cluster, await FakeBroker(cluster).cluster(), last)
    assert [card.name for card in cards if card.is_chosen] == ["big"]


def test_the_form_is_whole_while_the_broker_is_silent(cluster: Cluster) -> None:
    """Profiles come from the settings; what is free is said to be unknown."""
    html = build_form(cluster, None, last_profile=None)
    assert html.count('type="radio"') == 3
    assert html.count(" checked") == 1
    assert "cannot be told at present" in html


async def test_text_from_settings_is_escaped() -> None:
    """Titles, descriptions and the notice are text, not HTML."""
    nasty = '<script>alert("x")</script>'
    profile = {"name": "p", "title": nasty, "description": nasty, "gpu_count": 0}
    cluster = build_cluster(profiles=[profile], notice=nasty)
    html = build_form(cluster, await FakeBroker(cluster).cluster(), last_profile=None)
    assert nasty not in html
    assert html.count("&lt;script&gt;") == 3


async def test_the_form_and_its_refresh_show_the_same(cluster: Cluster) -> None:
    """Each part that is sent later stands in the page already."""
    view = await FakeBroker(cluster).cluster()
    html = build_form(cluster, view, last_profile=None)
    parts = build_parts(cluster, view)
    assert set(parts) == {"card-big", "card-small", "card-cpu", "nodes", "queue", "problem"}
    for name, text in parts.items():
        assert f'data-gpuhub-part="{name}"' in html
        assert text.strip() in html


def test_facts_of_a_profile(cluster: Cluster) -> None:
    """GPU, CPUs, memory and limit in one line."""
    assert describe_facts(cluster.profiles[0]) == "1 × RTX 5090 · 4 CPUs · 16 GiB memory · up to 8 h"
    assert describe_facts(cluster.profiles[1]) == "1 × RTX 5070 · 1 CPU · 4 GiB memory"


@pytest.mark.parametrize("fields", [{"profile": ["a", "b"]}, {"image": ["x"]}, {"profile": ["a"], "x_file": ["b"]}])
def test_fields_that_the_form_does_not_have_are_refused(fields: dict[str, list[str]]) -> None:
    """A form sends one profile."""
    with pytest.raises(SpawnFailed):
        parse_form(fields)


def test_the_form_sends_a_profile() -> None:
    """And nothing else."""
    assert parse_form({"profile": ["big"]}) == {"profile": "big"}
    assert parse_form({}) == {}
