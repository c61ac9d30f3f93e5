"""Mounts that fail or hang: messages for users, and a daemon that hangs against one that does not while a mount does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpuhub.common.errors import (
    Conflict,
    GpuhubError,
    NodeSilent,
    NodeUnreachable,
    NotFound,
    StorageUnavailable,
)
from gpuhub.config.settings import StorageSettings
from gpuhub.docker.containers.container_lifecycle import (
    describe_mount_hang,
    ensure_created,
    explain_mount_failure,
    translate_mount_errors,
)
from tests.support.clusters import build_cluster, worker

STORAGE = StorageSettings(home="nfs://nas/home/{username}")
SILENT = NodeSilent("node rig1: its Docker daemon does not answer in time")
STORAGE_WITH_DATASETS = StorageSettings(
    home="nfs://nas/home/{username}", datasets="nfs://nas/data", nfs_options="nfsvers=4.2,hard"
)
VOLUME = (
    "node rig1: error while mounting volume '/var/lib/docker/volumes/gpuhub-home-ada-1a2b3c4d/_data': failed to mount "
    "local volume: mount :/home/ada:/var/lib/docker/volumes/gpuhub-home-ada-1a2b3c4d/_data, data: addr=10.0.0.1: "
)
BIND = 'node rig1: invalid mount config for type "bind": '


class FakeDaemon:
    """Answers `/_ping` or raises; stands for `Daemons`."""

    def __init__(self, ping: Any) -> None:
        self.ping = ping

    async def call(self, _node: str, method: str) -> Any:
        assert method == "ping"
        if isinstance(self.ping, Exception):
            raise self.ping
        return self.ping


async def fail(error: Exception, ping: Any = "OK") -> None:
    async with translate_mount_errors(FakeDaemon(ping), "rig1", STORAGE, "ada"):  # type: ignore[arg-type]
        raise error


async def test_storage_hang_is_reported_only_if_docker_responds() -> None:
    """Hanging storage is reported only if the daemon answers a ping."""
    with pytest.raises(
        StorageUnavailable, match=r"Docker on node rig1 answers.*storage hangs there, nfs://nas/home/ada"
    ):
        await fail(SILENT)
    with pytest.raises(NodeSilent):
        await fail(SILENT, NodeUnreachable("node rig1: its Docker daemon cannot be reached"))
    with pytest.raises(NodeSilent):
        await fail(SILENT, TimeoutError())


async def test_unreachable_node_is_not_a_storage_error() -> None:
    """Nor is what has nothing to do with a mount."""
    for error in (NodeUnreachable("node rig1: cut off"), Conflict("node rig1: taken"), GpuhubError("node rig1: runc")):
        with pytest.raises(type(error), match=str(error)):
            await fail(error)
    with pytest.raises(StorageUnavailable, match="no NFS client"):
        await fail(GpuhubError("node rig1: failed to mount local volume: no such device"))


async def test_name_reserved_by_a_hung_creation_is_reported() -> None:
    """The daemon refuses the name, and knows no such container yet."""

    class NameConflictDaemon:
        async def run(self, *_arguments: Any, **_more: Any) -> str:
            raise Conflict("node rig1: name in use")

        async def call(self, *_arguments: Any) -> Any:
            raise NotFound("node rig1: no such container")

    with pytest.raises(StorageUnavailable, match="still creating an earlier container"):
        await ensure_created(NameConflictDaemon(), "rig1", worker(build_cluster()), adopt=True)  # type: ignore[arg-type]


async def test_container_of_an_earlier_request_is_adopted() -> None:
    """The daemon is through with it between two of the questions: whichever they are, there is one container."""
    spec = worker(build_cluster())

    class LateListingDaemon:
        """The daemon lists the container after the given number of calls."""

        def __init__(self, made_after: int) -> None:
            self.left = made_after

        def is_listed(self) -> bool:
            self.left -= 1
            return self.left < 0

        async def run(self, *_arguments: Any, **_more: Any) -> str:
            self.is_listed()
            raise Conflict("node rig1: name in use")

        async def call(self, *_arguments: Any) -> Any:
            if not self.is_listed():
                raise NotFound("node rig1: no such container")
            return {"Id": "c1", "State": {"Running": False}, "Config": {"Labels": spec.labels}}

    for questions in range(5):
        made = await ensure_created(LateListingDaemon(questions), "rig1", spec, adopt=True)  # type: ignore[arg-type]
        assert (made.id, made.is_running) == ("c1", False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (VOLUME + "no such device", r"kernel of node rig1 has no NFS client: `apt-get install nfs-common`"),
        (VOLUME + "stale file handle", r"stale file handle.*Nothing was deleted"),
        (VOLUME + "stale NFS file handle", r"umount -l"),
        (VOLUME + "no such file or directory", r"there is no nfs://nas/home/ada for node rig1"),
        (VOLUME + "permission denied", r"/etc/exports must name the node's address"),
        (VOLUME + "operation not permitted", r"dmesg"),
        (VOLUME + "connection refused", r"does not serve NFS now"),
        (VOLUME + "connection timed out", r"does not answer node rig1"),
        (VOLUME + "no route to host", r"has no way to the file server"),
        (VOLUME + "protocol not supported", r"does not take nfs_options = 'nfsvers=4.2,hard'"),
        (VOLUME + "invalid argument", r"does not take nfs_options"),
        (VOLUME + "input/output error", r"input/output error"),
        (
            "node rig1: error while mounting volume 'x': error resolving passed in network volume address: lookup nas: "
            "no such host",
            r"cannot look up the file server's name",
        ),
        (BIND + "bind source path does not exist: /srv/ada", r"or mounted on the node"),
        (BIND + "stat /srv/ada: stale file handle", r"stale file handle"),
        (VOLUME + "something new", r"cannot mount the home of ada \(nfs://nas/home/ada\): node rig1: .*something new"),
    ],
)
def test_mount_failure_has_a_remedy(text: str, says: str) -> None:
    """For the user, who passes it on, and the administrator."""
    found = explain_mount_failure(text, "rig1", STORAGE_WITH_DATASETS, "ada")
    assert found is not None
    assert found.startswith("Node rig1 cannot mount the home of ada (nfs://nas/home/ada): ")
    assert re.search(says, found), found


def test_mount_failure_names_the_mount() -> None:
    """The texts distinguish datasets and scratch from the home."""
    datasets = VOLUME.replace("-home-ada-", "-datasets-") + "permission denied"
    assert "cannot mount the datasets (nfs://nas/data)" in str(
        explain_mount_failure(datasets, "rig1", STORAGE_WITH_DATASETS, "ada")
    )
    bound = STORAGE_WITH_DATASETS.model_copy(update={"datasets": "/srv/data"})
    text = BIND + "bind source path does not exist: /srv/data"
    assert "cannot mount the datasets (/srv/data)" in str(explain_mount_failure(text, "rig1", bound, "ada"))
    models = STORAGE.model_copy(update={"models": "nfs://nas/models"})
    text = VOLUME.replace("-home-ada-", "-models-") + "permission denied"
    assert "cannot mount the models (nfs://nas/models)" in str(explain_mount_failure(text, "rig1", models, "ada"))
    scratch = VOLUME.replace("-home-ada-1a2b3c4d", "-scratch-ada") + "input/output error"
    assert "cannot mount the scratch" in str(explain_mount_failure(scratch, "rig1", STORAGE_WITH_DATASETS, "ada"))


@pytest.mark.parametrize(
    "text",
    [
        "node rig1: could not select device driver",
        "node rig1: permission denied",
        "node rig1: OCI runtime create failed: exec: no such file or directory",
        "node rig1: driver failed programming external connectivity: connection refused",
    ],
)
def test_other_failures_are_not_explained_as_storage(text: str) -> None:
    """Storage is named only where Docker names a mount."""
    assert explain_mount_failure(text, "rig1", STORAGE_WITH_DATASETS, "ada") is None


def test_mount_hang_names_the_storage_paths() -> None:
    """The home, and the datasets where there are some."""
    assert "storage hangs there, nfs://nas/home/ada or nfs://nas/data." in describe_mount_hang(
        "rig1", STORAGE_WITH_DATASETS, "ada"
    )
    alone = STORAGE_WITH_DATASETS.model_copy(update={"datasets": None})
    assert "storage hangs there, nfs://nas/home/ada." in describe_mount_hang("rig1", alone, "ada")
