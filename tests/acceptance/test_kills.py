"""Hub, broker and daemons killed, links cut, at random moments under load: nothing is doubled, leaked or lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gpuhub.closet.plan import practice_plan
from tests.support.observer import Observer
from tests.support.users import Client, log_in

from .conftest import Product, wait_for
from .faults import Faults, schedule
from .load import Load

SEED = 20261121
#: `GPUHUB_KILLS=50` has as many as the figures are published for.
MOMENTS = int(os.environ.get("GPUHUB_KILLS", "15"))
#: Faults until everybody pauses and all must come right.
BURST = 5
#: From the last fault's end until lease table and containers must agree, seconds.
SETTLE_S = 90.0
#: Each user's own server, which nobody stops: it must live as long as its node does.
ANCHOR = "anchor"
USERS = {"ada": "rtx5090", "ben": "cpu"}
PASSING = ("rtx5070", "rtx5060", "cpu")


@dataclass(slots=True)
class Anchor:
    """A server that must live on, where and what it was when it was last seen well."""

    client: Client
    profile: str
    node: str = ""
    container: str = ""
    crashes: int = 0


@pytest.fixture
def clients(product: Product) -> Iterator[list[Client]]:
    """Each user, with a token of their own from the hub."""
    made = [log_in(product.address, name, product.password) for name in USERS]
    yield made
    for client in made:
        for server in client.servers() or {}:
            client.stop(server)
        wait_for(lambda client=client: client.servers() == {}, f"{client.name}'s servers are gone", deadline_s=90)
        client.close()


def test_random_kills_under_load(product: Product, clients: list[Client], capsys: pytest.CaptureFixture[str]) -> None:
    """After each burst: each GPU in one running container at most, leases as containers, anchors alive."""
    plan = practice_plan(product.paths.instance)
    faults, observer = Faults(product, plan), Observer(plan, product.paths)
    load = Load(clients, SEED, PASSING)
    anchors = [Anchor(client, USERS[client.name]) for client in clients]
    for anchor in anchors:
        ensure_anchor(anchor, observer, faults)
    moments = schedule(SEED, MOMENTS, tuple(node.name for node in plan.nodes))
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
            load.quieten()
            leaks += settle(clients, observer)
            for anchor in anchors:
                check_alive(anchor, observer, faults, product)
        # On a slow machine nobody may have come through between two faults; after the last one everybody does.
        load.calm.clear()
        wait_for(
            lambda: all(load.done.values()) or load.failures,
            "somebody had a notebook, and somebody a job",
            deadline_s=240,
        )
        load.quieten()
        leaks += settle(clients, observer)
    finally:
        load.end()
        observer.end()
    with capsys.disabled():
        counts = f"{len(set(observer.double))} double leases, {leaks} leaks"
        print(f"\nfaults: {MOMENTS} moments, {counts} ({dict(faults.done)}, {load.done}, {observer.looks} looks)")
    assert observer.double == []
    assert leaks == 0
    assert load.failures == []


def settle(clients: list[Client], observer: Observer) -> int:
    """Wait until leases are as containers are; how many are not so in time."""
    end = time.monotonic() + SETTLE_S
    while (found := differences(clients, observer)) and time.monotonic() < end:
        time.sleep(1)
    for line in found:
        print(line)
    return len(found)


def ensure_anchor(anchor: Anchor, observer: Observer, faults: Faults) -> None:
    """The user's own server runs; where it does is remembered."""
    seen = wait_for(lambda: _started(anchor, observer), f"{anchor.client.name}'s own server runs", 150)
    anchor.node, anchor.container = seen.node, seen.id
    anchor.crashes = faults.crashes[seen.node]


def _started(anchor: Anchor, observer: Observer) -> Any:
    """Its container when hub and node say that it runs; started where the hub has, or has noticed, none."""
    servers = anchor.client.servers()
    if servers is not None and ANCHOR not in servers:
        anchor.client.start(ANCHOR, anchor.profile)
    is_ready = ((servers or {}).get(ANCHOR) or {}).get("ready")
    return _own(anchor, observer) if is_ready else None


def _own(anchor: Anchor, observer: Observer) -> Any:
    leases = {row["id"] for row in _leases(anchor.client) if row["subject"] == ANCHOR}
    return next((seen for seen in observer.running() if seen.lease in leases), None)


def check_alive(anchor: Anchor, observer: Observer, faults: Faults, product: Product) -> None:
    """The server is the same one and answers, unless its node crashed; then a new one is started."""
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


def _leases(client: Client) -> list[dict[str, Any]]:
    """The user's open leases; none while the broker does not answer."""
    status, rows = client.ask(client.broker, "GET", "/leases")
    return rows if status == 200 else []


def differences(clients: list[Client], observer: Observer) -> list[str]:
    """Where the broker's table and the nodes' containers do not agree; empty when all is well."""
    rows = {row["id"]: row for client in clients for row in _leases(client)}
    containers = observer.running()
    found = [f"{one.kind} {one.id[:12]} on {one.node} has no open lease" for one in containers if one.lease not in rows]
    found += [f"lease {row['id']} is {row['state']}" for row in rows.values() if row["state"] != "active"]
    with_container = {one.lease for one in containers}
    return found + [f"lease {lease} has no container" for lease in rows if lease not in with_container]
