"""Clients of the nodes' Docker daemons."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import docker
import pytest

from gpuhub.common.errors import NodeUnreachable
from gpuhub.config.settings import NodeSettings
from gpuhub.docker import client as docker_client
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.exec_session import start_exec


def test_node_without_docker_is_not_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docker-py takes an empty URL for this machine's own daemon."""
    urls: list[str] = []

    def record(base_url: str, **_options: Any) -> None:
        urls.append(base_url)

    monkeypatch.setattr(docker, "APIClient", record)
    clients = DockerClients([NodeSettings(name="rig1", address="10.0.0.11")], instance="gh", run_dir=tmp_path)
    with pytest.raises(NodeUnreachable, match=r"rig1: cluster\.toml gives it no docker address"):
        asyncio.run(clients.call("rig1", "containers"))
    clients.close()
    assert urls == []


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [(CallKind.SHORT, 10.0), (CallKind.EXEC, 10.0), (CallKind.SWARM, 25.0), (CallKind.MOUNTING, 25.0)],
)
def test_calls_that_wait_for_others_have_more_time(kind: CallKind, seconds: float) -> None:
    """A Swarm without a leader answers after 20 s, and so may a start among many."""
    assert kind.choose_timeout(10.0) == seconds
    assert kind.choose_timeout(60.0) == 60.0


async def test_images_take_as_long_as_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 10 Mbit/s to a guest, images of 9 GB take two hours; cut off after one, they would never be there."""
    daemon, limits, timeout = SlowExecs(), [], asyncio.timeout
    monkeypatch.setattr(docker_client, "_build_client", lambda *_: daemon)

    def record(limit_s: float | None) -> asyncio.Timeout:
        limits.append(limit_s)
        return timeout(limit_s)

    clients = DockerClients(
        [NodeSettings(name="rig1", address="127.0.0.1", docker="unix:///run/rig1.sock")],
        instance="ghtest",
        run_dir=tmp_path,
    )
    monkeypatch.setattr(docker_client.asyncio, "timeout", record)
    for kind in (CallKind.SHORT, CallKind.SWARM, CallKind.LONG):
        assert await clients.run("rig1", lambda client: client.ping(), kind=kind)
    clients.close()
    assert limits == [25.0, 55.0, None]


class SlowExecs:
    """A daemon that answers at once, but starts programs only when it may."""

    def __init__(self) -> None:
        self.may_start = threading.Event()

    def exec_create(self, *_arguments: Any, **_options: Any) -> dict[str, str]:
        assert self.may_start.wait(60)
        return {"Id": "exec1"}

    def exec_start(self, *_arguments: Any, **_options: Any) -> socket.socket:
        return socket.socket(socket.AF_UNIX)

    def ping(self) -> bool:
        return True

    def close(self) -> None:
        """Close nothing."""


async def test_probes_do_not_wait_for_programs_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users decide how many programs are started at the same time, and how long that takes."""
    daemon = SlowExecs()
    monkeypatch.setattr(docker_client, "_build_client", lambda *_: daemon)
    clients = DockerClients(
        [NodeSettings(name="rig1", address="127.0.0.1", docker="unix:///run/rig1.sock")],
        instance="ghtest",
        run_dir=tmp_path,
    )
    starts = [asyncio.create_task(start_exec(clients, "rig1", "container", ["program"])) for _ in range(20)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert await clients.call("rig1", "ping")
    finally:
        daemon.may_start.set()
        for session in await asyncio.gather(*starts):
            session.close()
        clients.close()
