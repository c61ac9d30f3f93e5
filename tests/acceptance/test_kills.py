"""Hub, broker and daemons killed and links cut at random moments under load: no double lease, no leak, no loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gpuhub_closet.layouts import build_plan
from tests.acceptance.random_faults import FaultInjector, schedule_faults
from tests.acceptance.settling import list_leases, settle
from tests.acceptance.user_load import UserLoad
from tests.support.closet.observer import Observer
from tests.support.hub.browser import Product
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

SEED = 20261121
#: `GPUHUB_KILLS=50` injects as many faults as the published figures.
MOMENTS = int(os.environ.get("GPUHUB_KILLS", "10"))
#: FaultInjector between two checks of the whole state.
BURST = 5
#: Each user's server that must live as long as its node does.
ANCHOR = "anchor"
USERS = {"ada": "rtx5090", "ben": "cpu"}
PASSING = ("rtx5070", "rtx5060", "cpu")


@dataclass(slots=True)
class Anchor:
    """A server that must survive, with the node and container where it ran last."""

    client: Client
    profile: str
    node: str = ""
    container: str = ""
    crashes: int = 0


@pytest.fixture
def clients(product: Product) -> Iterator[list[Client]]:
    """A client of each user with a token from the hub."""
    logged_in = [log_in(product.address, name, product.password) for name in USERS]
    yield logged_in
    for client in logged_in:
        for server in client.servers() or {}:
            client.stop(server)
        wait_for(lambda client=client: client.servers() == {}, f"{client.name}'s servers are gone", deadline_s=90)
        client.close()


def test_random_kills_under_load(product: Product, clients: list[Client], capsys: pytest.CaptureFixture[str]) -> None:
    """After each burst no GPU is in two containers, containers match leases, and every anchor is alive."""
    plan = build_plan(product.paths.instance)
    faults, observer = FaultInjector(product, plan), Observer(plan, product.paths)
    load = UserLoad(clients, SEED, PASSING)
    anchors = [Anchor(client, USERS[client.name]) for client in clients]
    for anchor in anchors:
        ensure_anchor(anchor, observer, faults)
    moments = schedule_faults(SEED, MOMENTS, tuple(node.name for node in plan.nodes))
    leaks = 0
    observer.begin()
    load.begin()
    try:
        for begin in range(0, MOMENTS, BURST):
            load.calm.clear()
            for moment in moments[begin : begin + BURST]:
                load.over.wait(moment.after_s)
                faults.inflict(moment)
            faults.heal()
            load.pause()
            leaks += settle(clients, observer)
            for anchor in anchors:
                check_alive(anchor, observer, faults, product)
        # On a slow machine no start may complete between two faults; after the last one all do.
        load.calm.clear()
        wait_for(
            lambda: all(load.done.values()) or load.failures,
            "a notebook and a job have run",
            deadline_s=240,
        )
        load.pause()
        leaks += settle(clients, observer)
    finally:
        load.end()
        observer.end()
    with capsys.disabled():
        counts = f"{len(set(observer.double))} double leases, {leaks} leaks"
        looks = f"looks at the daemons: {dict(observer.answers)}"
        print(f"\nfaults: {MOMENTS} moments, {counts} ({dict(faults.done)}, {load.done}, {looks})")
    assert observer.double == []
    assert set(observer.answers) == {node.name for node in plan.nodes}
    assert leaks == 0
    assert load.failures == []


def ensure_anchor(anchor: Anchor, observer: Observer, faults: FaultInjector) -> None:
    """Start the user's anchor if necessary, and remember where it runs."""
    seen = wait_for(lambda: _ensure_started(anchor, observer), f"{anchor.client.name}'s own server runs", 150)
    anchor.node, anchor.container = seen.node, seen.id
    anchor.crashes = faults.crashes[seen.node]


def _ensure_started(anchor: Anchor, observer: Observer) -> Any:
    """Return the anchor's container when hub and node agree that it runs; start it when the hub has none."""
    servers = anchor.client.servers()
    if servers is not None and ANCHOR not in servers:
        anchor.client.start(ANCHOR, anchor.profile)
    is_ready = ((servers or {}).get(ANCHOR) or {}).get("ready")
    return _find_own_container(anchor, observer) if is_ready else None


def _find_own_container(anchor: Anchor, observer: Observer) -> Any:
    leases = {row["id"] for row in list_leases(anchor.client) if row["subject"] == ANCHOR}
    return next((seen for seen in observer.running() if seen.lease in leases), None)


def check_alive(anchor: Anchor, observer: Observer, faults: FaultInjector, product: Product) -> None:
    """Check that the anchor is the same and answers; after a crash of its node, start a new one."""
    name = anchor.client.name
    if faults.crashes[anchor.node] == anchor.crashes:
        wait_for(
            lambda: anchor.container in {seen.id for seen in observer.running()}, f"{name}'s notebook is there", 30
        )
        path = f"{product.address}/user/{name}/{ANCHOR}/api"
        wait_for(_answers(path), f"{name}'s notebook answers", 60)
        return
    ensure_anchor(anchor, observer, faults)


def _answers(url: str) -> Callable[[], bool]:
    def look() -> bool:
        try:
            return httpx.get(url, trust_env=False, timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    return look
