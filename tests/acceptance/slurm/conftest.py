"""Fixtures of the tests with Slurm as the backend: clients of the hub and of Slurm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.slurm.servers import stop
from tests.acceptance.slurm.slurm_commands import SlurmCommands, SlurmObserver
from tests.support.hub.browser import Product
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

#: Servers that several tests of a module use.
SHARED = {"anchor", "limited"}


@pytest.fixture(scope="package")
def queue(product: Product) -> SlurmCommands:
    """Slurm's commands."""
    return SlurmCommands(product)


@pytest.fixture(autouse=True)
def tidy(queue: SlurmCommands, ada: Client, ben: Client) -> Iterator[None]:
    """Remove the test's plain jobs and servers, except servers that several tests share."""
    yield
    queue.end_plain_jobs()
    for client in (ada, ben):
        for server in (client.servers() or {}).keys() - SHARED:
            stop(client, server)


@pytest.fixture(scope="package")
def observer(product: Product, queue: SlurmCommands) -> Iterator[SlurmObserver]:
    """Watches GPUs during all these tests: none may be used twice."""
    observer = SlurmObserver(queue.plan, product.paths, queue=queue)
    observer.begin()
    yield observer
    observer.end()
    assert observer.double == []


@pytest.fixture(scope="package", autouse=True)
def watched(observer: SlurmObserver) -> None:
    """Watches GPUs during all these tests: none may be used twice."""


def user(product: Product, name: str) -> Iterator[Client]:
    """Yield a client of a user and remove the user's servers afterwards."""
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
    """A user of notebooks and sbatch."""
    yield from user(product, "ben")
