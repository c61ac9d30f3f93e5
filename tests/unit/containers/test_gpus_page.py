"""The page of all GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import httpx
import pytest

from gpuhub.broker.client import BrokerClient
from gpuhub.broker.schemas import (
    ClusterView,
    Lease,
    LeaseState,
    NodeState,
    Obstacle,
    Purpose,
    QueueEntry,
    Reservation,
    UsageView,
    Why,
)
from gpuhub.containers.acting import FRESH_S, NOTE, SCOPE, Tokens
from gpuhub.containers.glance import Glance
from gpuhub.containers.gpus_handlers import ChangeNode, Extend, Force, do, parse_act
from gpuhub.containers.gpus_page import (
    NODES_A_PAGE,
    QUEUE_SHOWN,
    Look,
    Wish,
    build_parts,
    build_runs,
    build_why,
    choose_nodes,
    parse_wish,
)
from gpuhub.errors import BrokerUnreachable, InvalidRequest
from gpuhub.settings import Cluster
from tests.support.fake_broker import NOW, FakeBroker
from tests.unit.containers.test_arguments import lease
from tests.unit.containers.test_form import ask

NASTY = '<script>alert("x")</script>'
USAGE = UsageView(
    owner="ada",
    gpus=2,
    waiting=1,
    gpu_hours_week=13.25,
    decayed_gpu_hours=4,
    penalty_s=720,
    max_gpus=4,
    max_gpu_hours_week=None,
    max_waiting=16,
)


def change(known: Lease, **changes: object) -> Lease:
    return known.model_copy(update=changes)


def entry(position: int, owner: str, **more: Any) -> QueueEntry:
    return QueueEntry(
        lease=f"l{position}", position=position, owner=owner, purpose=Purpose.JOB, wants="8 GPUs", since=NOW, **more
    )


def parts(view: ClusterView | None, *, name: str = "ada", is_admin: bool = False, **more: Any) -> dict[str, str]:
    found = build_parts(Look(name=name, is_admin=is_admin, view=view, **more), Wish())
    return {part: " ".join(html.split()) for part, html in found.items()}


async def view_of(cluster: Cluster, **changes: Any) -> ClusterView:
    return (await FakeBroker(cluster).cluster()).model_copy(update=changes)


async def test_everybody_sees_who_holds_what(cluster: Cluster) -> None:
    """Nodes with state and GPUs, held ones with their holder."""
    broker = FakeBroker(cluster)
    await broker.request_lease(ask("big", "ben"))
    shown = parts(await broker.cluster())
    assert "2 of 3 GPUs free on 3 nodes" in shown["totals"]
    assert "held by <strong>ben</strong>" in shown["nodes"]
    assert shown["nodes"].count("<article") == 3


async def test_what_is_ones_own_comes_first(cluster: Cluster) -> None:
    """Usage with limits, leases with a way to more time, notes of the broker."""
    held = change(lease("GPU-a"), state=LeaseState.ACTIVE, expires_at=NOW + timedelta(hours=2), note="mixed cards")
    shown = parts(await view_of(cluster), leases=[held], usage=[USAGE])["own"]
    assert "<dd>2 of 4</dd>" in shown
    assert "<dd>13.2</dd>" in shown
    assert "put back by 12 min" in shown
    assert 'data-do="extend" data-lease="lease-1"' in shown
    assert "mixed cards" in shown
    unlimited = change(held, expires_at=None)
    assert "data-do" not in parts(await view_of(cluster), leases=[unlimited])["own"]


async def test_a_request_of_ones_own_unfolds_why(cluster: Cluster) -> None:
    """Others' do so for administrators alone; what it waits for is public, its demands are not."""
    queue = (entry(1, "ben", expected_start=NOW), entry(2, "ada"))
    view = await view_of(cluster, queue=queue, waiting=2)
    own = parts(view)["queue"]
    assert ('data-why="l1"' in own, 'data-why="l2"' in own) == (False, True)
    assert ('data-do="leave" data-lease="l1"' in own, 'data-do="leave" data-lease="l2"' in own) == (False, True)
    assert "expected at <time" in own
    root = parts(view, name="root", is_admin=True)["queue"]
    assert 'data-why="l1"' in root
    assert "data-do" not in root


async def test_ones_own_requests_are_shown_however_long_the_queue(cluster: Cluster) -> None:
    """And how many there are besides."""
    queue = tuple(entry(position, "ada" if position == 900 else "ben") for position in range(1, 1001))
    far = change(lease(), id="far", state=LeaseState.REQUESTED, position=9000, gpus=())
    view = await view_of(cluster, queue=queue, waiting=10_000)
    assert 'data-why="far"' in parts(view, leases=[far])["queue"]
    shown = parts(view)["queue"]
    assert shown.count("waits for") == QUEUE_SHOWN + 1
    assert 'data-why="l900"' in shown
    assert "10,000 waiting" in shown
    assert f"and {10_000 - QUEUE_SHOWN - 1:,} more" in shown


def test_why_lists_each_demand_with_what_it_costs() -> None:
    """The one that costs most stands first; what is not known is said."""
    obstacles = (Obstacle(demand="3 nodes", would_start_at=NOW), Obstacle(demand=NASTY, would_start_at=None))
    html = build_why(Why(lease="l", position=2, waits_for="ben", expected_start=None, obstacles=obstacles))
    assert html.index("3 nodes") < html.index("not known either")
    assert NASTY not in html


async def test_administrators_get_buttons_and_quarantined_leases(cluster: Cluster) -> None:
    """Cordon and drain on a node that is up, uncordon on one that is not; nobody else sees a button."""
    view = await view_of(cluster)
    cordoned = view.nodes[0].model_copy(update={"state": NodeState.CORDONED, "message": "cordoned by root: fans"})
    view = view.model_copy(update={"nodes": (cordoned, *view.nodes[1:])})
    quarantined = change(lease("GPU-a"), id="q", owner="ben", state=LeaseState.QUARANTINED, note="rig1 is silent")
    shown = parts(view, name="root", is_admin=True, quarantined=[quarantined], usage=[USAGE, USAGE])
    assert shown["nodes"].count('data-do="undrain"') == 1
    assert shown["nodes"].count('data-do="cordon"') == 2
    assert shown["nodes"].count('data-do="drain"') == 3
    assert 'data-do="force" data-lease="q"' in shown["admin"]
    assert "rig1 is silent" in shown["admin"]
    assert "Everybody's usage" in shown["admin"]
    plain = parts(view)
    assert plain["admin"] == ""
    assert "data-do" not in plain["nodes"]
    assert "cordoned by root: fans" in plain["nodes"]


def test_what_runs_on_a_node_is_told_before_it_is_drained() -> None:
    """Owner, what it is, its GPUs there and until when; or that there is nothing."""
    job = change(lease("GPU-b"), owner="ben", purpose=Purpose.JOB, expires_at=NOW)
    html = " ".join(build_runs([lease("GPU-a"), job], "rig1").split())
    assert "<td>notebook</td> <td>RTX 5090</td> <td>no limit</td>" in html
    assert "<td>job</td> <td>RTX 5090</td> <td><time" in html
    assert "Nothing runs on rig2" in build_runs([], "rig2")


async def test_reservations_are_told(cluster: Cluster) -> None:
    """What they keep, for whom and until when."""
    kept = Reservation(
        id="r", name=NASTY, nodes=("rig1",), users=("ben",), groups=("ml",), starts_at=NOW, ends_at=NOW, created_by="root"
    )  # fmt: skip
    shown = parts(await view_of(cluster, reservations=(kept,)))["reservations"]
    assert "keeps rig1 for ben, ml" in shown
    assert NASTY not in shown


def test_a_silent_broker_is_told() -> None:
    """Nothing old is shown as if it were true."""
    shown = parts(None)
    assert "does not answer" in shown.pop("problem")
    assert set(shown.values()) == {""}


async def test_a_thousand_nodes_come_page_by_page(cluster: Cluster) -> None:
    """What is looked for is found on whichever page it would be; a page that is not there is the last one."""
    view = await view_of(cluster)
    nodes = [view.nodes[0].model_copy(update={"name": f"node{number:04}"}) for number in range(1000)]
    first = choose_nodes(nodes, Wish(), "ada")
    assert (len(first.nodes), first.page, first.pages) == (NODES_A_PAGE, 1, 1000 // NODES_A_PAGE)
    assert choose_nodes(nodes, Wish(page=99999), "ada").page == first.pages
    assert [node.name for node in choose_nodes(nodes, Wish(find="0777"), "ada").nodes] == ["node0777"]
    assert choose_nodes(nodes, Wish(find="rtx 50"), "ada").fitting == 1000
    assert choose_nodes(nodes, Wish(show="mine"), "ada").nodes == []


async def test_nodes_are_chosen_by_what_is_looked_for(cluster: Cluster) -> None:
    """Free ones, those with one's own, those that an administrator should look at."""
    broker = FakeBroker(cluster)
    await broker.request_lease(ask("big", "ada"))
    view = await broker.cluster()
    sick = view.nodes[2].model_copy(update={"state": NodeState.UNREACHABLE})
    nodes = [*view.nodes[:2], sick]

    def names(wish: Wish) -> list[str]:
        return [node.name for node in choose_nodes(nodes, wish, "ada").nodes]

    assert names(Wish(show="mine")) == ["rig1"]
    assert names(Wish(show="free")) == ["rig2", "rig3"]
    assert names(Wish(show="trouble")) == ["rig3"]
    assert names(Wish(find="ada")) == ["rig1"]


@pytest.mark.parametrize(
    ("query", "wish"),
    [
        ({}, Wish()),
        ({"show": "mine", "find": " RIG ", "page": "2"}, Wish(show="mine", find="rig", page=2)),
        ({"show": "<b>", "page": "-1"}, Wish()),
        ({"page": "9" * 20}, Wish()),
    ],
)
def test_a_query_that_makes_no_sense_does_no_harm(query: dict[str, str], wish: Wish) -> None:
    """Anybody can write an address."""
    assert parse_wish(query) == wish


def test_buttons_ask_for_what_they_say() -> None:
    """Each with its fields."""
    assert parse_act(b'{"do": "extend", "lease": "l0a1", "hours": 4}') == Extend(do="extend", lease="l0a1", hours=4)
    assert parse_act(b'{"do": "force", "lease": "l0a1"}') == Force(do="force", lease="l0a1")
    drain = ChangeNode(do="drain", node="rig1", reason="fans", grace_s=600)
    assert parse_act(b'{"do": "drain", "node": "rig1", "reason": "fans", "grace_s": 600}') == drain


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"do": "rm"}',
        b'{"do": "extend", "lease": "../cluster", "hours": 4}',
        b'{"do": "extend", "lease": "l", "hours": "4"}',
        b'{"do": "extend", "lease": "l", "hours": 0}',
        b'{"do": "force", "lease": "l", "by": "root"}',
        b'{"do": "cordon", "node": "rig1/../rig2"}',
        b'{"do": "drain", "node": "rig1", "grace_s": -1}',
    ],
)
def test_what_no_button_asks_for_is_refused(body: bytes) -> None:
    """Before the broker is asked."""
    with pytest.raises(InvalidRequest, match="nothing that the page can ask for"):
        parse_act(body)


async def test_what_a_button_asks_for_reaches_the_broker() -> None:
    """With hours as seconds, and nothing that the button did not say."""
    asked: list[tuple[object, ...]] = []

    class Recording:
        async def extend(self, *arguments: object) -> None:
            asked.append(("extend", *arguments))

        async def force(self, *arguments: object) -> None:
            asked.append(("force", *arguments))

        async def change_node(self, node: str, what: str, request: Any = None) -> None:
            asked.append((what, node, request and (request.reason, request.grace_s)))

    for body in (
        b'{"do": "extend", "lease": "l", "hours": 4}',
        b'{"do": "force", "lease": "l"}',
        b'{"do": "cordon", "node": "rig1", "reason": "fans"}',
        b'{"do": "undrain", "node": "rig1"}',
    ):
        await do(Recording(), parse_act(body))
    assert asked == [("extend", "l", 14400), ("force", "l"), ("cordon", "rig1", ("fans", 0)), ("undrain", "rig1", None)]


class HubUser:
    """The hub's user, as far as tokens go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: list[dict[str, Any]] = []

    def new_api_token(self, **options: Any) -> str:
        self.made.append(options)
        return f"{self.name}-{len(self.made)}"


def test_a_users_token_reaches_the_broker_alone_and_not_for_long() -> None:
    """It is kept for some minutes, and another one is made before it is void; each user has their own."""
    now = [0.0]
    tokens, ada, ben = Tokens(lambda: now[0]), HubUser("ada"), HubUser("ben")
    assert [tokens.of(ada), tokens.of(ada), tokens.of(ben)] == ["ada-1", "ada-1", "ben-1"]
    assert ada.made == [{"note": NOTE, "expires_in": 2 * FRESH_S, "scopes": [SCOPE]}]
    now[0] = FRESH_S
    assert tokens.of(ada) == "ada-2"
    tokens.forget(ada)
    assert tokens.of(ada) == "ada-3"


async def test_many_viewers_are_one_question(cluster: Cluster) -> None:
    """And a broker that does not answer is told as such, then asked again."""
    broker, asked = FakeBroker(cluster), []

    async def look() -> ClusterView:
        asked.append(1)
        if len(asked) == 2:
            raise BrokerUnreachable("silent")
        return await broker.cluster()

    glance = Glance(look)
    first, second = await glance.look(), await glance.look()
    assert first is second is not None
    assert len(asked) == 1
    glance._at -= 10  # time goes by
    assert await glance.look() is None
    assert await glance.look() is not None


async def test_a_client_acts_with_the_users_token() -> None:
    """Over the same connections; the hub's own token stays what it is."""
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Authorization"])
        return httpx.Response(200, json=[])

    hub = BrokerClient("http://broker", "hub", transport=httpx.MockTransport(answer))
    await hub.acting("ada").usage("ada")
    await hub.leases()
    assert seen == ["token ada", "token hub"]
