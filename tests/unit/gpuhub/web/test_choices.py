"""Small decisions of the hub's side: profiles, leases, waiting texts, errors."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from pathlib import Path

import docker.errors
import pytest
import requests

from gpuhub.broker_api.schemas import LeaseState, LeaseView, NodeState
from gpuhub.common.errors import (
    Conflict,
    GpuhubError,
    ImageMissing,
    InvalidRequest,
    NodeSilent,
    NodeUnreachable,
    NotAllowed,
    NotFound,
)
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker import ssh
from gpuhub.docker.client import translate_docker_error
from gpuhub.docker.networks import build_access_network, build_user_network
from gpuhub.spawners.base import SpawnFailed
from gpuhub.spawners.docker.startup import check_server_name, choose_profile, parse_published_address
from gpuhub.spawners.notebook_lease import choose_lease, claim_lease, release_lease, select_groups
from gpuhub.web.gpus_page.actions import parse_leave_request
from gpuhub.web.text import describe_gpus, describe_placing, describe_waiting, eligible_nodes
from tests.support.broker.factories import lease
from tests.support.clusters import build_cluster
from tests.support.hub.fake_broker import NOW, FakeBroker


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"profile": "nope"},
        {"profile": ["big"]},
        {"profile": {"name": "big"}},
        {"profile": None},
        {"profile": 5},
        {"profile": "big", "gpu_count": 2},
        {"image": "evil"},
        {"profile": "../big"},
        {"profile": "<b>"},
        ["big"],
        "big",
        None,
    ],
)
def test_anything_but_one_known_profile_is_refused(cluster: ClusterSettings, options: object) -> None:
    """Form and REST API accept only a profile's name, and a refusal lists the valid ones."""
    with pytest.raises(InvalidRequest, match="big, small, cpu"):
        choose_profile(cluster, options)


@pytest.mark.parametrize("name", ["..", "a/b", "A", "-a", "a-", "a b", "a\n", "ä", "a" * 33, "a_b", "{x}"])
def test_server_names_with_special_meaning_are_refused(name: str) -> None:
    """They become part of a container's name and of a path."""
    with pytest.raises(InvalidRequest):
        check_server_name(name)


def test_profiles_of_other_groups_are_refused(cluster: ClusterSettings) -> None:
    """With the groups, also through the REST API; the list of valid ones has only those that the user may use."""
    big = cluster.profiles[0].model_copy(update={"groups": ("vision", "nlp")})
    restricted = cluster.model_copy(update={"profiles": (big, *cluster.profiles[1:])})
    with pytest.raises(NotAllowed) as raised:
        choose_profile(restricted, {"profile": "big"}, owner="ben", groups={"lab"})
    assert str(raised.value) == "profile 'big' is only for members of vision or nlp, and ben is not one"
    failed = SpawnFailed.from_error(raised.value)
    assert (failed.status_code, failed.jupyterhub_message) == (403, str(raised.value))
    assert choose_profile(restricted, {"profile": "big"}, owner="mia", groups={"lab", "nlp"}) is big
    with pytest.raises(InvalidRequest, match=r"choose one of: small, cpu$"):
        choose_profile(restricted, {"profile": "gone"}, owner="ben")


def test_only_images_of_the_profile_can_be_chosen(cluster: ClusterSettings) -> None:
    """Without a choice it is the profile's own; a refusal lists what it offers."""
    big = cluster.profiles[0].model_copy(update={"images": ("gpuhub/llm:latest", "lab/mine:1")})
    offering = cluster.model_copy(update={"profiles": (big, *cluster.profiles[1:])})
    assert choose_profile(offering, {"profile": "big"}).image == "gpuhub/notebook:latest"
    for image in ("gpuhub/notebook:latest", "lab/mine:1"):
        assert choose_profile(offering, {"profile": "big", "image": image}).image == image
    for profile, image in (
        ("big", "evil"),
        ("big", "lab/mine:2"),
        ("big", ""),
        ("big", ["lab/mine:1"]),
        ("small", "lab/mine:1"),
    ):
        with pytest.raises(InvalidRequest, match=r"does not offer the image .* it offers: gpuhub/notebook:latest"):
            choose_profile(offering, {"profile": profile, "image": image})


def test_known_profile_is_accepted(cluster: ClusterSettings) -> None:
    """The name leads to the profile."""
    assert choose_profile(cluster, {"profile": "small"}).gpu_model == "RTX 5070"


def change(known: LeaseView, **changes: object) -> LeaseView:
    return known.model_copy(update=changes)


def test_most_advanced_lease_of_the_notebook_is_continued() -> None:
    """After a restart, a running container's lease is found before a place in the queue; others are in the way."""
    active = change(lease("GPU-a"), id="active", state=LeaseState.ACTIVE)
    waiting = change(lease(), id="waiting", state=LeaseState.REQUESTED)
    others = [
        change(lease(), id="released", state=LeaseState.RELEASED),
        change(lease(), id="releasing", state=LeaseState.RELEASING),
        change(lease(), id="ben", owner="ben"),
        change(lease(server="extra"), id="extra"),
    ]
    chosen, in_the_way = choose_lease([waiting, *others, active], "ada", "", "big")
    assert chosen == active
    assert in_the_way == [waiting]


def test_oldest_of_several_waiting_requests_is_kept() -> None:
    """Of two waiting requests the older one counts."""
    old = change(lease(), id="old", state=LeaseState.REQUESTED)
    new = change(old, id="new", created_at=NOW + timedelta(seconds=5))
    assert choose_lease([new, old], "ada", "", "big") == (old, [new])


def test_lease_of_another_profile_conflicts() -> None:
    """A user who chooses again leaves the queue of the first choice."""
    waiting = change(lease(), state=LeaseState.REQUESTED)
    assert choose_lease([waiting], "ada", "", "small") == (None, [waiting])


def test_waiting_message_has_position_and_cancel_button() -> None:
    """The text is plain, the button carries the lease, and the HTML has the moment for the page's script."""
    soon = datetime.now().astimezone().replace(hour=14, minute=20) + timedelta(days=3)
    waiting = change(lease(), position=2, waiting_for="big is held by <ben>", expected_start=soon)
    text, shown = describe_waiting(waiting)
    assert text == f"Waiting for a GPU: position 2. big is held by <ben>. Expected at about {soon.day} {soon:%b} 14:20."
    assert 'data-lease="lease-1"' in shown
    assert f'&lt;ben&gt;. Expected at about <time datetime="{soon.isoformat()}">' in shown
    assert "<button" not in describe_waiting(None)[1]


def test_placement_message_names_node_and_gpus() -> None:
    """Equal cards are counted."""
    assert describe_placing(lease("GPU-a", "GPU-b")) == "Placed on rig1: 2 × RTX 5090"
    assert describe_gpus(()) == "no GPU"
    mixed = change(lease("GPU-a"), note="mixed cards: 1 × RTX 5090, 1 × RTX 5070")
    assert describe_placing(mixed) == "Placed on rig1: RTX 5090 (mixed cards: 1 × RTX 5090, 1 × RTX 5070)"


def test_gpu_share_is_described_with_its_memory_cap() -> None:
    """A promise is not called a wall."""
    part = lease("GPU-a").gpus[0].model_copy(update={"share": 4, "memory_cap_mib": 8151})
    assert describe_gpus([part]) == "1/4 of RTX 5090 (7.96 GiB cap: a promise, not a wall)"


def test_quarantined_lease_does_not_conflict() -> None:
    """The user may request another lease at once; the quarantined GPUs stay blocked."""
    quarantined = change(lease("GPU-a"), state=LeaseState.QUARANTINED)
    assert choose_lease([quarantined], "ada", "", "big") == (None, [])


async def test_server_stop_does_not_wait_for_a_quarantined_lease(cluster: ClusterSettings) -> None:
    """Proof may take days: the stop of a server does not."""
    broker = FakeBroker(cluster)
    broker.known["lease-1"] = change(lease("GPU-a"), state=LeaseState.ACTIVE)

    async def quarantine(lease_id: str) -> LeaseView:
        return change(broker.known[lease_id], state=LeaseState.QUARANTINED)

    broker.release = quarantine  # type: ignore[method-assign]
    async with asyncio.timeout(1):
        await release_lease(broker, "lease-1", wait=True)
    assert broker.known["lease-1"].state is LeaseState.ACTIVE


async def test_lease_request_contains_the_groups_of_the_owner(cluster: ClusterSettings) -> None:
    """In order, and without names that no setting can have."""
    broker = FakeBroker(cluster)
    await claim_lease(broker, "ada", "", "big", ["ml", "lab", "", "x" * 201, "lab"])
    assert [request.groups for request in broker.requests] == [("lab", "ml")]
    assert len(select_groups(f"group{number}" for number in range(100))) == 64


async def test_only_nodes_that_could_serve_the_profile_need_its_image(cluster: ClusterSettings) -> None:
    """A CPU profile may go anywhere; a node that is away is not asked."""
    view = await FakeBroker(cluster).cluster()
    big, cpu = cluster.profile("big"), cluster.profile("cpu")
    assert big is not None
    assert cpu is not None
    assert eligible_nodes(view, big) == ["rig1"]
    assert eligible_nodes(view, cpu) == ["rig1", "rig2", "rig3"]
    closed = view.nodes[0].model_copy(update={"groups": ("vision",), "is_open": False})
    assert eligible_nodes(view.model_copy(update={"nodes": (closed, *view.nodes[1:])}), cpu) == ["rig2", "rig3"]
    cordoned = view.nodes[1].model_copy(update={"state": NodeState.CORDONED})
    some = view.model_copy(update={"nodes": (view.nodes[0], cordoned, view.nodes[2])})
    assert eligible_nodes(some, cpu) == ["rig1", "rig3"]
    away = view.model_copy(
        update={"nodes": tuple(node.model_copy(update={"state": NodeState.UNREACHABLE}) for node in view.nodes)}
    )
    assert eligible_nodes(away, cpu) == []


def api_error(status: int, text: str, kind: type[docker.errors.APIError] = docker.errors.APIError) -> Exception:
    response = requests.Response()
    response.status_code = status
    return kind("refused", response=response, explanation=text)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (api_error(404, "No such container: x", docker.errors.NotFound), NotFound),
        (api_error(404, "no such image: x", docker.errors.ImageNotFound), ImageMissing),
        (api_error(409, "name in use"), Conflict),
        (api_error(500, "runc: broken"), GpuhubError),
        (requests.exceptions.ReadTimeout("http+docker://localhost/v1.41 read timed out"), NodeSilent),
        (requests.exceptions.ConnectionError("unix://x"), NodeUnreachable),
        (requests.exceptions.SSLError("https://10.0.0.1"), NodeUnreachable),
        (docker.errors.TLSParameterError("no such file"), NodeUnreachable),
        (ConnectionRefusedError(111, "refused"), NodeUnreachable),
        (docker.errors.DockerException("Error: http+docker://localhost"), GpuhubError),
    ],
)
def test_docker_errors_are_translated_without_addresses(error: Exception, kind: type[GpuhubError]) -> None:
    """Each names its node, and none shows a daemon's URL."""
    ours = translate_docker_error("rig2", error)
    assert type(ours) is kind
    assert "rig2" in str(ours)
    assert "://" not in str(ours)


def test_start_failure_message_is_escaped() -> None:
    """JupyterHub's pages show the HTML text as it is, so it is escaped here."""
    failed = SpawnFailed.from_error(NodeUnreachable("node <rig1> & co"))
    assert failed.status_code == 503
    assert failed.jupyterhub_message == "node <rig1> & co"
    assert failed.jupyterhub_html_message == "node &lt;rig1&gt; &amp; co"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"[]",
        b'{"lease": 5}',
        b'{"lease": ""}',
        b'{"lease": "../cluster"}',
        b"{}",
        b"[" * 100_000,
        b'{"lease": "l0a1", "owner": "ben"}',
    ],
)
def test_queue_cancellation_accepts_only_a_lease_id(body: bytes) -> None:
    """A value that becomes part of a path cannot lead elsewhere."""
    with pytest.raises(InvalidRequest, match="not a valid request of the page"):
        parse_leave_request(body)
    assert parse_leave_request(b'{"lease": "l0a1"}').lease == "l0a1"


def test_published_port_address_is_parsed() -> None:
    """Docker's answer for a port, and the silence of a container that has ended."""
    assert parse_published_address([{"HostIp": "10.0.0.1", "HostPort": "32768"}]) == ("10.0.0.1", 32768)
    with pytest.raises(GpuhubError, match="as soon as"):
        parse_published_address(None)


def test_networks_separate_containers_and_leave_room_for_vxlan() -> None:
    """Containers on the access bridge cannot reach each other; an overlay's packets fit the nodes' network."""
    cluster = build_cluster()
    access = build_access_network("gpuhub", 1500)
    user = build_user_network(cluster, "gpuhub", "ada", 1500)
    assert access["options"]["com.docker.network.bridge.enable_icc"] == "false"
    assert access["options"]["com.docker.network.bridge.name"] == "gpuhub-access"
    assert (user["driver"], user["attachable"]) == ("overlay", True)
    # Of the nodes' network: the overlay driver takes the 50 bytes of VXLAN's header off itself.
    assert user["options"]["com.docker.network.driver.mtu"] == "1500"
    single = cluster.model_copy(update={"nodes": cluster.nodes[:1]})
    bridge = build_user_network(single, "gpuhub", "ada", 1500)
    assert (bridge["driver"], bridge["options"]["com.docker.network.bridge.name"]) == ("bridge", "gpuhub-u7xxeg")


def test_ssh_address_cannot_inject_options() -> None:
    """Whatever stands in the URL, the host comes after the options' end, and nothing is asked of a person."""
    command = ssh.build_tunnel_command("ssh://root@node.lan:2222", Path("/run/x/ssh.sock"))
    assert command[-2:] == ["--", "node.lan"]
    assert "BatchMode=yes" in command
    assert command[command.index("-p") + 1] == "2222"
    assert command[command.index("-l") + 1] == "root"
    assert "/run/x/ssh.sock:/var/run/docker.sock" in command
