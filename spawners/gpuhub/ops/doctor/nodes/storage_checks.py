"""Checks of what a node needs to mount homes and datasets from a file server."""

from __future__ import annotations

from collections.abc import Iterator

from gpuhub.ops.doctor.findings import Finding, failed, ok, warning
from gpuhub.ops.doctor.node_facts import HostFacts
from gpuhub.ops.doctor.nodes.node_checks import NodeEnvironment


def check_nfs_client(host: HostFacts, environment: NodeEnvironment) -> Iterator[Finding]:
    """Check that the node can mount NFS, and that a cache which the mount options ask for exists."""
    if not environment.nfs_servers or host.nfs_client is None:
        return
    if not host.nfs_client:
        yield failed(
            "storage",
            "its kernel cannot mount NFS, so no container of a user starts there",
            "`apt-get install nfs-common`, and a kernel with the module nfsv4",
        )
    elif environment.uses_fsc and host.cachefilesd is False:
        yield warning(
            "storage",
            "nfs_options has fsc, and cachefilesd does not run: reads are not cached on its disk",
            "`apt-get install cachefilesd`, RUN=yes in /etc/default/cachefilesd; or remove fsc, and stage the datasets",
        )
    else:
        yield ok("storage", "its kernel can mount NFS")
