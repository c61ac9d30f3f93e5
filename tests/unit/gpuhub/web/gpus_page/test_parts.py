"""The page of all GPUs."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gpuhub.broker.api.auth import ADMIN_SCOPE
from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.errors import TooManyRequests
from gpuhub.broker_api.schemas import (
    ClusterView,
    ConstraintView,
    LeaseState,
    LeaseView,
    NodeState,
    PendingReasonView,
    Purpose,
    ReservationView,
    SuspensionState,
    SuspensionView,
)
from gpuhub.broker_api.schemas.limits import UserLimitsView
from gpuhub.broker_api.schemas.live import OwnView
from gpuhub.common.errors import BrokerUnreachable, InvalidRequest
from gpuhub.config.settings import ClusterSettings
from gpuhub.web.gpus_page.actions import (
    CancelJobAction,
    ChangeNodeAction,
    ExtendAction,
    ForceAction,
    KeepAction,
    StopLeaseAction,
    parse_action,
    perform_action,
)
from gpuhub.web.gpus_page.node_filter import NODES_PER_PAGE, NodeFilter, parse_node_filter, select_nodes
from gpuhub.web.gpus_page.pages import GpusPageHandler
from gpuhub.web.gpus_page.parts import (
    MAX_QUEUE_ENTRIES,
    GpusPageData,
    render_node_leases,
    render_page,
    render_pending_reason,
)
from gpuhub.web.handlers import BROKER_SCOPE, PAGE_NOTE, TOKEN_RENEW_AFTER_S, ClusterCache, UserTokens
from tests.support.broker.factories import USAGE, ask, entry, lease
from tests.support.hub.fake_broker import NOW, FakeBroker

NASTY = '<script>alert("x")</script>'


def change(known: LeaseView, **changes: object) -> LeaseView:
    return known.model_copy(update=changes)


def render(view: ClusterView | None, *, name: str = "ada", is_admin: bool = False, **more: Any) -> dict[str, str]:
    found = render_page(GpusPageData(name=name, is_admin=is_admin, view=view, **more), NodeFilter())
    parts = {**found.parts, "nodes": "".join(found.nodes.values())}
    return {part: " ".join(html.split()) for part, html in parts.items()}


async def build_view(cluster: ClusterSettings, **changes: Any) -> ClusterView:
    return (await FakeBroker(cluster).cluster()).model_copy(update=changes)


async def test_all_users_see_the_holders_of_gpus(cluster: ClusterSettings) -> None:
    """Nodes with state and GPUs, held ones with their holder."""
    broker = FakeBroker(cluster)
    await broker.request_lease(ask("big", "ben"))
    shown = render(await broker.cluster())
    assert "2 of 3 GPUs free on 3 nodes" in shown["totals"]
    assert "held by <strong>ben</strong>" in shown["nodes"]
    assert shown["nodes"].count("<article") == 3


async def test_own_usage_and_leases_are_shown(cluster: ClusterSettings) -> None:
    """Usage with limits, leases with a way to more time, notes of the broker."""
    held = change(lease("GPU-a"), state=LeaseState.ACTIVE, expires_at=NOW + timedelta(hours=2), note="mixed cards")
    shown = render(await build_view(cluster), leases=[held], usage=[USAGE])["own"]
    assert "<dd>2 of 4</dd>" in shown
    assert "<dd>13.2</dd>" in shown
    assert "delayed by 12 min" in shown
    assert 'data-do="extend" data-lease="lease-1"' in shown
    assert "mixed cards" in shown
    unlimited = change(held, expires_at=None)
    assert "data-do" not in render(await build_view(cluster), leases=[unlimited])["own"]


async def test_limits_of_the_user_alone_are_shown_with_their_reason(cluster: ClusterSettings) -> None:
    """Those that are set, and who set them; nothing is shown where there are none."""
    limits = UserLimitsView(owner="ada", by="root", at=NOW, reason=NASTY, max_gpus=4, longest_lease_s=7200)
    usage = USAGE.model_copy(update={"own_limits": limits})
    shown = render(await build_view(cluster), usage=[usage])["own"]
    assert "Limits of your own: GPUs at once 4, longest lease 2 h. Set by root: " in shown
    assert NASTY not in shown
    assert "Set by" not in render(await build_view(cluster), usage=[USAGE])["own"]


async def test_own_request_shows_its_pending_reason(cluster: ClusterSettings) -> None:
    """Others' do so for administrators alone; what it waits for is public, its demands are not."""
    queue = (entry(1, "ben", expected_start=NOW), entry(2, "ada"))
    view = await build_view(cluster, queue=queue, waiting=2)
    own = render(view)["queue"]
    assert ('data-why="l1"' in own, 'data-why="l2"' in own) == (False, True)
    assert ('data-do="leave" data-lease="l1"' in own, 'data-do="leave" data-lease="l2"' in own) == (False, True)
    assert "expected at <time" in own
    root = render(view, name="root", is_admin=True)["queue"]
    assert 'data-why="l1"' in root
    assert ('data-do="stop" data-lease="l1"' in root, 'data-do="leave"' in root) == (True, False)


async def test_what_was_suspended_cannot_leave_the_queue(cluster: ClusterSettings) -> None:
    """It runs and waits for its GPU: leaving would end it."""
    view = await build_view(cluster, queue=(entry(1, "ada"),), waiting=1)
    shown = SuspensionView(state=SuspensionState.RESUMING, text="waits for the RTX 5090", since=NOW, moved_mib=8192)
    waiting = change(lease("GPU-a"), id="l1", position=1)
    assert 'data-do="leave"' in render(view, leases=[waiting])["queue"]
    assert 'data-do="leave"' not in render(view, leases=[change(waiting, suspension=shown)])["queue"]


async def test_own_requests_are_shown_in_a_long_queue(cluster: ClusterSettings) -> None:
    """The number of further entries is shown as well."""
    queue = tuple(entry(position, "ada" if position == 900 else "ben") for position in range(1, 1001))
    far = change(lease(), id="far", state=LeaseState.REQUESTED, position=9000, gpus=())
    near = change(lease(), id="l900", state=LeaseState.REQUESTED, position=900, gpus=())
    view = await build_view(cluster, queue=queue, waiting=10_000)
    assert 'data-why="far"' in render(view, leases=[near, far])["queue"]
    shown = render(view, leases=[near])["queue"]
    assert shown.count("waits for") == MAX_QUEUE_ENTRIES + 1
    assert 'data-why="l900"' in shown
    assert "10,000 waiting" in shown
    assert f"and {10_000 - MAX_QUEUE_ENTRIES - 1:,} more" in shown


def test_pending_reason_lists_each_demand_with_its_delay() -> None:
    """The constraint with the longest delay comes first; unknown times are shown as such."""
    obstacles = (
        ConstraintView(demand="3 nodes", would_start_at=NOW),
        ConstraintView(demand=NASTY, would_start_at=None),
    )
    html = render_pending_reason(
        PendingReasonView(lease="l", position=2, waits_for="ben", expected_start=None, obstacles=obstacles)
    )
    assert html.index("3 nodes") < html.index("<td>unknown</td>")
    assert NASTY not in html


async def test_administrators_get_buttons_and_quarantined_leases(cluster: ClusterSettings) -> None:
    """A node that is up has Cordon and Drain, a cordoned one Uncordon; only administrators see buttons."""
    view = await build_view(cluster)
    cordoned = view.nodes[0].model_copy(update={"state": NodeState.CORDONED, "message": "cordoned by root: fans"})
    view = view.model_copy(update={"nodes": (cordoned, *view.nodes[1:])})
    quarantined = change(lease("GPU-a"), id="q", owner="ben", state=LeaseState.QUARANTINED, note="rig1 is silent")
    shown = render(view, name="root", is_admin=True, quarantined=[quarantined], usage=[USAGE, USAGE])
    assert shown["nodes"].count('data-do="undrain"') == 1
    assert shown["nodes"].count('data-do="cordon"') == 2
    assert shown["nodes"].count('data-do="drain"') == 3
    assert 'data-do="force" data-lease="q"' in shown["quarantined"]
    assert "rig1 is silent" in shown["quarantined"]
    assert "Usage and limits of all users" in shown["all_usage"]
    plain = render(view)
    assert plain["quarantined"] == plain["all_usage"] == ""
    assert "data-do" not in plain["nodes"]
    assert "cordoned by root: fans" in plain["nodes"]


def test_leases_of_a_node_are_shown_before_a_drain() -> None:
    """Owner, what it is, its GPUs there and until when; or that there is nothing."""
    job = change(lease("GPU-b"), owner="ben", purpose=Purpose.JOB, expires_at=NOW)
    html = " ".join(render_node_leases([lease("GPU-a"), job], "rig1").split())
    assert "<td>notebook</td> <td>RTX 5090</td> <td>no limit</td>" in html
    assert "<td>job</td> <td>RTX 5090</td> <td><time" in html
    assert "Nothing runs on rig2" in render_node_leases([], "rig2")


async def test_reservations_are_shown(cluster: ClusterSettings) -> None:
    """A reservation is shown with its nodes, users and end."""
    kept = ReservationView(
        id="r", name=NASTY, nodes=("rig1",), users=("ben",), groups=("ml",), starts_at=NOW, ends_at=NOW, created_by="root"
    )  # fmt: skip
    shown = render(await build_view(cluster, reservations=(kept,)))["reservations"]
    assert "reserves rig1 for ben, ml" in shown
    assert NASTY not in shown


def test_unreachable_broker_is_reported() -> None:
    """Nothing old is shown as if it were true."""
    shown = render(None)
    assert "does not answer" in shown.pop("problem")
    assert set(shown.values()) == {""}
    own = OwnView(leases=(), jobs=(), usage=None)
    assert GpusPageData.build(FakeHubUser("ada"), None, own).view is None


async def test_many_nodes_are_paginated(cluster: ClusterSettings) -> None:
    """A match is found whatever its page would be; a page number that is too high gives the last page."""
    view = await build_view(cluster)
    nodes = [view.nodes[0].model_copy(update={"name": f"node{number:04}"}) for number in range(1000)]
    first = select_nodes(nodes, NodeFilter(), "ada")
    assert (len(first.nodes), first.page, first.pages) == (NODES_PER_PAGE, 1, 1000 // NODES_PER_PAGE)
    assert select_nodes(nodes, NodeFilter(page=99999), "ada").page == first.pages
    assert [node.name for node in select_nodes(nodes, NodeFilter(find="0777"), "ada").nodes] == ["node0777"]
    assert select_nodes(nodes, NodeFilter(find="rtx 50"), "ada").fitting == 1000
    assert select_nodes(nodes, NodeFilter(show="mine"), "ada").nodes == []


async def test_nodes_are_filtered_by_the_query(cluster: ClusterSettings) -> None:
    """Nodes with free GPUs, with the user's own leases, and with problems."""
    broker = FakeBroker(cluster)
    await broker.request_lease(ask("big", "ada"))
    view = await broker.cluster()
    sick = view.nodes[2].model_copy(update={"state": NodeState.UNREACHABLE})
    nodes = [*view.nodes[:2], sick]

    def names(wish: NodeFilter) -> list[str]:
        return [node.name for node in select_nodes(nodes, wish, "ada").nodes]

    assert names(NodeFilter(show="mine")) == ["rig1"]
    assert names(NodeFilter(show="free")) == ["rig2", "rig3"]
    assert names(NodeFilter(show="trouble")) == ["rig3"]
    assert names(NodeFilter(find="ada")) == ["rig1"]


@pytest.mark.parametrize(
    ("query", "wish"),
    [
        ({}, NodeFilter()),
        ({"show": "mine", "find": " RIG ", "page": "2"}, NodeFilter(show="mine", find="rig", page=2)),
        ({"show": "<b>", "page": "-1"}, NodeFilter()),
        ({"page": "9" * 20}, NodeFilter()),
    ],
)
def test_invalid_query_parameters_are_ignored(query: dict[str, str], wish: NodeFilter) -> None:
    """Users can enter any address."""
    assert parse_node_filter(query) == wish


def test_button_actions_are_parsed() -> None:
    """Each with its fields."""
    assert parse_action(b'{"do": "extend", "lease": "l0a1", "hours": 4}') == ExtendAction(
        do="extend", lease="l0a1", hours=4
    )
    assert parse_action(b'{"do": "force", "lease": "l0a1"}') == ForceAction(do="force", lease="l0a1")
    assert parse_action(b'{"do": "stop", "lease": "l0a1"}') == StopLeaseAction(do="stop", lease="l0a1")
    assert parse_action(b'{"do": "cancel", "job": "j0a1"}') == CancelJobAction(do="cancel", job="j0a1")
    assert parse_action(b'{"do": "keep", "lease": "l0a1"}') == KeepAction(do="keep", lease="l0a1")
    drain = ChangeNodeAction(do="drain", node="rig1", reason="fans", grace_s=600)
    assert parse_action(b'{"do": "drain", "node": "rig1", "reason": "fans", "grace_s": 600}') == drain


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
        b'{"do": "cancel", "job": "j/../k"}',
        b'{"do": "stop", "job": "j"}',
        b'{"do": "cordon", "node": "rig1/../rig2"}',
        b'{"do": "drain", "node": "rig1", "grace_s": -1}',
        b'{"do": "wake", "node": "rig1", "reason": "cold"}',
    ],
)
def test_unknown_actions_are_refused(body: bytes) -> None:
    """Before the broker is asked."""
    with pytest.raises(InvalidRequest, match="not a valid request of the page"):
        parse_action(body)


async def test_button_actions_are_sent_to_the_broker() -> None:
    """Hours become seconds, and no other value is sent."""
    asked: list[tuple[object, ...]] = []

    class RecordingClient:
        async def extend(self, *arguments: object) -> None:
            asked.append(("extend", *arguments))

        async def force(self, *arguments: object) -> None:
            asked.append(("force", *arguments))

        async def keep(self, *arguments: object) -> None:
            asked.append(("keep", *arguments))

        async def suspend(self, *arguments: object) -> None:
            asked.append(("suspend", *arguments))

        async def resume(self, *arguments: object) -> None:
            asked.append(("resume", *arguments))

        async def get_lease(self, lease_id: str) -> LeaseView:
            return change(lease(), purpose=Purpose.JOB if lease_id == "of-job" else Purpose.NOTEBOOK, subject="j1")

        async def release(self, *arguments: object) -> None:
            asked.append(("release", *arguments))

        async def end_job(self, *arguments: object) -> None:
            asked.append(("end job", *arguments))

        async def change_node(self, node: str, what: str, request: Any = None) -> None:
            asked.append((what, node, request and (request.reason, request.grace_s)))

        async def switch_power(self, node: str, *, on: bool) -> None:
            asked.append(("power", node, on))

        async def set_limits(self, owner: str, request: Any) -> None:
            asked.append(("limits", owner, request.values, request.reason))

        async def clear_limits(self, owner: str) -> None:
            asked.append(("clear limits", owner))

    for body in (
        b'{"do": "extend", "lease": "l", "hours": 4}',
        b'{"do": "force", "lease": "l"}',
        b'{"do": "keep", "lease": "l"}',
        b'{"do": "suspend", "lease": "l"}',
        b'{"do": "resume", "lease": "l"}',
        b'{"do": "stop", "lease": "l"}',
        b'{"do": "stop", "lease": "of-job"}',
        b'{"do": "cancel", "job": "j2"}',
        b'{"do": "cordon", "node": "rig1", "reason": "fans"}',
        b'{"do": "undrain", "node": "rig1"}',
        b'{"do": "wake", "node": "rig2"}',
        b'{"do": "sleep", "node": "rig2"}',
        b'{"do": "limits", "user": "ben", "max_gpus": 2, "max_jobs": null, "longest_lease_s": 3600, "reason": "x"}',
        b'{"do": "limits", "user": "ben", "max_gpus": null}',
    ):
        await perform_action(RecordingClient(), parse_action(body))
    assert asked == [
        ("extend", "l", 14400),
        ("force", "l"),
        ("keep", "l"),
        ("suspend", "l"),
        ("resume", "l"),
        ("release", "l"),
        ("end job", "j1"),
        ("end job", "j2"),
        ("cordon", "rig1", ("fans", 0)),
        ("undrain", "rig1", None),
        ("power", "rig2", True),
        ("power", "rig2", False),
        ("limits", "ben", {"max_gpus": 2, "longest_lease_s": 3600.0}, "x"),
        ("clear limits", "ben"),
    ]
    with pytest.raises(
        InvalidRequest, match=r"^GPUs at once cannot be 0: input should be greater than or equal to 1\.$"
    ):
        await perform_action(RecordingClient(), parse_action(b'{"do": "limits", "user": "ben", "max_gpus": 0}'))


class FakeHubUser:
    """The hub's user, as far as tokens go."""

    def __init__(self, name: str, *, admin: bool = False) -> None:
        self.name = name
        self.admin = admin
        self.made: list[dict[str, Any]] = []

    def new_api_token(self, **options: Any) -> str:
        self.made.append(options)
        return f"{self.name}-{len(self.made)}"


def test_user_token_is_scoped_to_the_broker_and_short_lived() -> None:
    """It is kept for some minutes, and another one is made before it is void; each user has their own."""
    now = [0.0]
    tokens, ada, ben = UserTokens(lambda: now[0]), FakeHubUser("ada"), FakeHubUser("ben")
    assert [tokens.get(ada), tokens.get(ada), tokens.get(ben)] == ["ada-1", "ada-1", "ben-1"]
    assert ada.made == [{"note": PAGE_NOTE, "expires_in": 2 * TOKEN_RENEW_AFTER_S, "scopes": [BROKER_SCOPE]}]
    now[0] = TOKEN_RENEW_AFTER_S
    assert tokens.get(ada) == "ada-2"
    tokens.forget(ada)
    assert tokens.get(ada) == "ada-3"
    rita = FakeHubUser("rita", admin=True)
    tokens.get(rita)
    assert rita.made[0]["scopes"] == [BROKER_SCOPE, ADMIN_SCOPE]


async def test_page_is_shown_while_the_broker_refuses_tokens() -> None:
    """A flood of unknown tokens elsewhere is no failure of the page: it shows that there is no answer, and asks again."""

    async def refuse(*_: object) -> None:
        raise TooManyRequests("too many requests")

    async def get_view(_: object) -> object:
        return object()

    ada = FakeHubUser("ada")
    handler = SimpleNamespace(cluster_caches=SimpleNamespace(get=get_view), call_as_user=refuse, current_user=ada)
    data = await GpusPageHandler._load(handler)  # type: ignore[arg-type]
    assert data == GpusPageData(name="ada", is_admin=False, view=None)
    assert await ClusterCache(refuse).get() is None  # type: ignore[arg-type]


async def test_hub_asks_again_while_the_broker_refuses_its_token() -> None:
    """The spawner waits for the broker as it does while the broker is restarted."""
    answers = iter(
        [httpx.Response(429, json={"code": "too-many-requests", "detail": "x"}), httpx.Response(200, json=[])]
    )
    hub = AsyncBrokerClient("http://broker", "hub", transport=httpx.MockTransport(lambda _: next(answers)))
    assert await hub.leases() == []
    assert next(answers, None) is None


async def test_cluster_cache_shares_one_query_among_viewers(cluster: ClusterSettings) -> None:
    """A broker that does not answer is reported as such and called again later."""
    broker, asked = FakeBroker(cluster), []

    async def fetch_cluster() -> ClusterView:
        asked.append(1)
        if len(asked) == 2:
            raise BrokerUnreachable("silent")
        return await broker.cluster()

    glance = ClusterCache(fetch_cluster)
    first, second = await glance.get(), await glance.get()
    assert first is second is not None
    assert len(asked) == 1
    glance._fetched_at -= 10  # time goes by
    assert await glance.get() is None
    assert await glance.get() is not None


async def test_a_client_acts_with_the_users_token() -> None:
    """Over the same connections; the hub's own token stays what it is."""
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Authorization"])
        return httpx.Response(200, json=[])

    hub = AsyncBrokerClient("http://broker", "hub", transport=httpx.MockTransport(answer))
    await hub.acting("ada").usage("ada")
    await hub.leases()
    assert seen == ["token ada", "token hub"]
