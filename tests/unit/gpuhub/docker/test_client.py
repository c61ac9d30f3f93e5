"""Clients of the nodes' Docker daemons."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import docker
import pytest

from gpuhub.common.errors import NodeUnreachable
from gpuhub.config.settings import NodeSettings
from gpuhub.docker.client import DockerClients


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
