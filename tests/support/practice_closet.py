"""The practice closet of the integration tests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import docker

from gpuhub.common.paths import Paths
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import ClosetNode, ClosetPlan

INSTANCE = os.environ.get("GPUHUB_TEST_INSTANCE", "ghtest")


@dataclass(frozen=True, slots=True)
class Closet:
    """A running closet."""

    plan: ClosetPlan
    paths: Paths
    #: A plain cluster.toml of the closet.
    cluster_file: Path

    def client(self, node: ClosetNode | str) -> docker.DockerClient:
        """Return a new Docker client of a node; close it after use."""
        return docker.DockerClient(base_url=node_paths(self.paths, node).docker_url, version="auto", timeout=60)
