"""Servers of a user with Slurm as the backend, and their leases."""

from __future__ import annotations

from typing import Any

from tests.support.hub.users import Client
from tests.support.product import wait_for


def lease_of(client: Client, server: str) -> dict[str, Any]:
    """Return the open lease of a user's server; empty for none."""
    status, rows = client.ask(client.broker, "GET", "/leases")
    return next((row for row in rows if row["subject"] == server), {}) if status == 200 else {}


def find_lease(client: Client, lease: str) -> dict[str, Any]:
    """Return a lease, which may have ended."""
    status, row = client.ask(client.broker, "GET", f"/leases/{lease}")
    assert status == 200, row
    return dict(row)


def start(client: Client, server: str, profile: str) -> dict[str, Any]:
    """Start a server, wait until it is ready, and return its lease."""
    client.start(server, profile)
    wait_for(lambda: client.is_ready(server), lambda: f"{server} is ready: {lease_of(client, server)}", deadline_s=60)
    return lease_of(client, server)


def stop(client: Client, server: str) -> None:
    """Stop a server and wait until it is gone."""
    client.stop(server)
    wait_for(lambda: is_gone(client, server), f"{server} is gone", deadline_s=60)


def is_gone(client: Client, server: str) -> bool:
    """Return whether the hub has no such server."""
    servers = client.servers()
    return servers is not None and server not in servers
