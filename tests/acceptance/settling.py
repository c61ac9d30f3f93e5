"""Whether the broker's leases and the nodes' containers agree once all is calm."""

from __future__ import annotations

import time
from typing import Any

from tests.support.closet.observer import Observer
from tests.support.hub.users import Client

#: From the last fault's end until leases and containers must agree, seconds.
SETTLE_S = 90.0


def settle(clients: list[Client], observer: Observer) -> int:
    """Wait until containers match leases, and return the number of differences that remain."""
    end = time.monotonic() + SETTLE_S
    while (remaining := find_differences(clients, observer)) and time.monotonic() < end:
        time.sleep(1)
    for line in remaining:
        print(line)
    return len(remaining)


def list_leases(client: Client) -> list[dict[str, Any]]:
    """Return the user's open leases; none while the broker does not answer."""
    status, rows = client.ask(client.broker, "GET", "/leases")
    return rows if status == 200 else []


def find_differences(clients: list[Client], observer: Observer) -> list[str]:
    """Return the differences between the broker's leases and the nodes' containers."""
    rows = {row["id"]: row for client in clients for row in list_leases(client)}
    containers = observer.running()
    texts = [
        f"{container.kind} {container.id[:12]} on {container.node} has no open lease"
        for container in containers
        if container.lease not in rows
    ]
    texts += [f"lease {row['id']} is {row['state']}" for row in rows.values() if row["state"] != "active"]
    with_container = {container.lease for container in containers}
    return texts + [f"lease {lease} has no container" for lease in rows if lease not in with_container]
