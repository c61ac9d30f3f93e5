"""`gpuhub node firewall`: a node's packet filter as text."""

from __future__ import annotations

from gpuhub.guard.container import find_filter
from gpuhub.guard.rules import describe
from gpuhub.paths import Paths
from gpuhub.settings import Cluster, Node


def describe_firewall(cluster: Cluster, node: Node, paths: Paths) -> str:
    """The rules as the broker puts them there, or would with `network.guard`."""
    return describe(cluster, node, find_filter(cluster, paths.instance, node.name))
