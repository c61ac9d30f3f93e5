"""Docker's messages for failed mounts become texts for users."""

from __future__ import annotations

import re

import pytest

from gpuhub.config.settings import StorageSettings
from gpuhub.docker.mount_errors import describe_mount_hang, explain_mount_failure

STORAGE = StorageSettings(home="nfs://nas/home/{username}", datasets="nfs://nas/data", nfs_options="nfsvers=4.2,hard")
VOLUME = (
    "node rig1: error while mounting volume '/var/lib/docker/volumes/gpuhub-home-ada-1a2b3c4d/_data': failed to mount "
    "local volume: mount :/home/ada:/var/lib/docker/volumes/gpuhub-home-ada-1a2b3c4d/_data, data: addr=10.0.0.1: "
)
BIND = 'node rig1: invalid mount config for type "bind": '


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (VOLUME + "no such device", r"kernel of node rig1 has no NFS client: `apt-get install nfs-common`"),
        (VOLUME + "stale file handle", r"stale file handle.*Nothing was deleted"),
        (VOLUME + "stale NFS file handle", r"umount -l"),
        (VOLUME + "no such file or directory", r"there is no nfs://nas/home/ada for node rig1"),
        (VOLUME + "permission denied", r"/etc/exports must name the node's address"),
        (VOLUME + "operation not permitted", r"dmesg"),
        (VOLUME + "connection refused", r"does not serve NFS at present"),
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
def test_a_failed_mount_says_what_to_do(text: str, says: str) -> None:
    """For the user, who passes it on, and the administrator."""
    found = explain_mount_failure(text, "rig1", STORAGE, "ada")
    assert found is not None
    assert found.startswith("Node rig1 cannot mount the home of ada (nfs://nas/home/ada): ")
    assert re.search(says, found), found


def test_it_says_which_mount_it_is() -> None:
    """The texts distinguish datasets and scratch from the home."""
    datasets = VOLUME.replace("-home-ada-", "-datasets-") + "permission denied"
    assert "cannot mount the datasets (nfs://nas/data)" in str(explain_mount_failure(datasets, "rig1", STORAGE, "ada"))
    bound = STORAGE.model_copy(update={"datasets": "/srv/data"})
    text = BIND + "bind source path does not exist: /srv/data"
    assert "cannot mount the datasets (/srv/data)" in str(explain_mount_failure(text, "rig1", bound, "ada"))
    scratch = VOLUME.replace("-home-ada-1a2b3c4d", "-scratch-ada") + "input/output error"
    assert "cannot mount the scratch" in str(explain_mount_failure(scratch, "rig1", STORAGE, "ada"))


@pytest.mark.parametrize(
    "text",
    [
        "node rig1: could not select device driver",
        "node rig1: permission denied",
        "node rig1: OCI runtime create failed: exec: no such file or directory",
        "node rig1: driver failed programming external connectivity: connection refused",
    ],
)
def test_other_failures_are_left_alone(text: str) -> None:
    """Storage is named only where Docker names a mount."""
    assert explain_mount_failure(text, "rig1", STORAGE, "ada") is None


def test_a_hang_names_what_may_hang() -> None:
    """The home, and the datasets where there are some."""
    assert "storage hangs there, nfs://nas/home/ada or nfs://nas/data." in describe_mount_hang("rig1", STORAGE, "ada")
    alone = STORAGE.model_copy(update={"datasets": None})
    assert "storage hangs there, nfs://nas/home/ada." in describe_mount_hang("rig1", alone, "ada")
