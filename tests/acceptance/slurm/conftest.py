"""Users of the product with Slurm as its engine: clients of the hub, and of Slurm itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.users import Client, log_in

from ..conftest import Product, wait_for
from .queue import Queue, SlurmObserver

#: Servers that several tests of a module use.
SHARED = {"anchor", "limited"}


@pytest.fixture(scope="package")
def queue(product: Product) -> Queue:
    """Slurm's commands."""
    return Queue(product)


@pytest.fixture(autouse=True)
def tidy(queue: Queue, ada: Client, ben: Client) -> Iterator[None]:
    """No test leaves plain users' jobs or a server to the next one, but those that several share."""
    yield
    queue.end_plain_jobs()
    for client in (ada, ben):
        for server in (client.servers() or {}).keys() - SHARED:
            stop(client, server)


@pytest.fixture(scope="package")
def observer(product: Product, queue: Queue) -> Iterator[SlurmObserver]:
    """Watches during all these tests: no GPU may be used twice."""
    observer = SlurmObserver(queue.plan, product.paths, queue=queue)
    observer.begin()
    yield observer
    observer.end()
    assert observer.double == []


@pytest.fixture(scope="package", autouse=True)
def watched(observer: SlurmObserver) -> None:
    """Every test here is watched."""


def user(product: Product, name: str) -> Iterator[Client]:
    """A user with a token, whose servers are gone in the end."""
    client = log_in(product.address, name, product.password)
    yield client
    for server in client.servers() or {}:
        client.stop(server)
    wait_for(lambda: client.servers() == {}, f"{name}'s servers are gone", deadline_s=90)
    client.close()


@pytest.fixture(scope="package")
def ada(product: Product) -> Iterator[Client]:
    """A user of notebooks."""
    yield from user(product, "ada")


@pytest.fixture(scope="package")
def ben(product: Product) -> Iterator[Client]:
    """Another, who also knows sbatch."""
    yield from user(product, "ben")


def lease_of(client: Client, server: str) -> dict[str, Any]:
    """The open lease of a user's server; empty for none."""
    status, rows = client.ask(client.broker, "GET", "/leases")
    return next((row for row in rows if row["subject"] == server), {}) if status == 200 else {}


def find_lease(client: Client, lease: str) -> dict[str, Any]:
    """A lease that may have ended."""
    status, row = client.ask(client.broker, "GET", f"/leases/{lease}")
    assert status == 200, row
    return dict(row)


def start(client: Client, server: str, profile: str) -> dict[str, Any]:
    """A server that can be used, and its lease."""
    client.start(server, profile)
    wait_for(lambda: client.is_ready(server), lambda: f"{server} is ready: {lease_of(client, server)}", deadline_s=60)
    return lease_of(client, server)


def stop(client: Client, server: str) -> None:
    """Until nothing is left of it."""
    client.stop(server)
    wait_for(lambda: is_gone(client, server), f"{server} is gone", deadline_s=60)


def is_gone(client: Client, server: str) -> bool:
    """Whether the hub says that it does not run."""
    servers = client.servers()
    return servers is not None and server not in servers
