"""What a validation uses, and what keeps it from beginning."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import Capabilities, ClusterView, CordonRequest, NodeState
from gpuhub.common.errors import Conflict, InvalidRequest
from gpuhub.config.users.users import UserSettings
from gpuhub.ops.validation.plan import build_plan, choose_user
from gpuhub.ops.validation.report import Outcome
from tests.support.broker.calls import ask
from tests.support.broker.factories import USAGE
from tests.support.broker.in_process import Running, Setting, asgi_broker

#: A user without a limit of GPUs.
UNLIMITED = USAGE.model_copy(update={"max_gpus": None})


@pytest.fixture
async def running(setting: Setting) -> AsyncIterator[Running]:
    async with asgi_broker(setting) as running:
        yield running


async def fetch_view(running: Running) -> ClusterView:
    client = AsyncBrokerClient(running.url, "ada", transport=running.transport, retry_limit_s=0)
    try:
        return await client.cluster()
    finally:
        await client.close()


async def test_all_free_gpus_take_part(running: Running) -> None:
    plan = build_plan(await fetch_view(running), UNLIMITED, "ada")
    assert [node.name for node in plan.nodes] == ["rig1", "rig2", "rig3"]
    assert len(plan.gpus) == 3
    assert {check.outcome for check in plan.checks} == {Outcome.PASS}


async def test_cordoned_node_is_left_out_and_a_silent_one_fails(running: Running) -> None:
    """What an administrator took out is no failure; a node that is down is one, and neither takes part."""
    client = AsyncBrokerClient(running.url, "own-token", transport=running.transport, retry_limit_s=0)
    await client.change_node("rig1", "cordon", CordonRequest(reason="new fan"))
    await client.close()
    view = await fetch_view(running)
    nodes = tuple(
        node.model_copy(update={"state": NodeState.DOWN, "message": "no answer"}) if node.name == "rig2" else node
        for node in view.nodes
    )
    plan = build_plan(view.model_copy(update={"nodes": nodes}), UNLIMITED, "ada")
    assert ([node.name for node in plan.nodes], plan.other_nodes) == (["rig3"], ("rig1", "rig2"))
    outcomes = {check.name: check.outcome for check in plan.checks}
    assert outcomes == {
        "rig1: state": Outcome.INFO,
        "rig2: state": Outcome.FAIL,
        "rig3: state": Outcome.PASS,
    }


async def test_busy_cluster_is_refused(running: Running) -> None:
    """The error says who holds GPUs, before anything starts."""
    await ask(running, "ben")
    with pytest.raises(Conflict, match=r"GPUs are in use \(rig\d by ben\)"):
        build_plan(await fetch_view(running), UNLIMITED, "ada")


async def test_waiting_requests_are_not_delayed(running: Running) -> None:
    view = (await fetch_view(running)).model_copy(update={"waiting": 2})
    with pytest.raises(Conflict, match="2 requests wait"):
        build_plan(view, UNLIMITED, "ada")


async def test_limit_of_the_user_must_allow_all_gpus(running: Running) -> None:
    limited = UNLIMITED.model_copy(update={"max_gpus": 2})
    with pytest.raises(InvalidRequest, match="ada may have 2 GPUs at once, and all 3 are needed"):
        build_plan(await fetch_view(running), limited, "ada")


async def test_backend_without_containers_is_refused(running: Running) -> None:
    view = (await fetch_view(running)).model_copy(update={"capabilities": Capabilities(containers=False)})
    with pytest.raises(InvalidRequest, match="only of nodes with Docker"):
        build_plan(view, UNLIMITED, "ada")


def test_user_is_the_named_or_the_first_one() -> None:
    users = UserSettings(login="password", allowed=("ada", "ben"), admins=("root1",), uid_first=20000)
    assert choose_user(users, None) == "ada"
    assert choose_user(users, "ben") == "ben"
    with pytest.raises(InvalidRequest, match="--user names"):
        choose_user(UserSettings(login="pam", allowed_groups=("lab",)), None)
