"""Creating and removing containers, with texts for users when a mount fails or hangs.

Creating a container twice gives one, and another user's container of the same name is never used. A dead file server
is not taken for a dead node.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, NodeSilent, NotFound, StorageUnavailable
from gpuhub.config.settings import StorageSettings
from gpuhub.config.users.identity import ARCHIVE_ROOT, UserIdentity, build_identity_archive
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.containers.container_spec import ContainerSpec
from gpuhub.docker.containers.mounts import SCRATCH
from gpuhub.tls.notebook_certificate import NotebookCertificate

#: Labels that name a container's owner and the grant for which it was made.
_GRANT_LABELS = (names.LABEL_INSTANCE, names.LABEL_KIND, names.LABEL_LEASE, names.LABEL_EPOCH, names.LABEL_OWNER)
#: Attempts to create a container. Between a refused name and the inspection of the container that has it, that
#: container may appear (from an earlier call that timed out) or vanish; the next attempt sees the new state.
_TRIES = 3
#: A healthy daemon answers `/_ping` in milliseconds.
_PING_TIMEOUT_S = 5.0
#: Docker's messages for a failed mount: of a volume, of a folder on the node, or in runc.
_MOUNT_FAILURE = re.compile(
    r"failed to mount local volume|error while mounting volume|error mounting|bind source path|"
    r"invalid mount config|stale (nfs )?file handle|mount\.nfs|passed in network volume address",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedContainer:
    """A container that exists on a node."""

    id: str
    is_running: bool


async def ensure_created(daemons: DockerClients, node: str, spec: ContainerSpec, *, adopt: bool) -> CreatedContainer:
    """Create the container of `spec`, or adopt an existing one.

    Another container of the same name, instance and owner is a leftover and is removed.

    Args:
        adopt: Use a container of the same grant if there is one.

    Raises:
        Conflict: A container that does not belong to this user has the name.
        StorageUnavailable: The daemon is still creating a container of this name because a mount hangs.
        GpuhubError: The daemon refused, for example because the node cannot limit a container's disk.
    """
    for _ in range(_TRIES):
        try:
            return CreatedContainer(id=await _create(daemons, node, spec), is_running=False)
        except Conflict as error:
            conflict = error
        existing = await inspect_container(daemons, node, spec.name)
        if existing is None:
            continue
        if adopt and is_same_grant(existing, spec.labels):
            return CreatedContainer(id=existing["Id"], is_running=bool(existing["State"]["Running"]))
        await _remove_leftover(daemons, node, existing, spec)
    if existing is not None:
        raise conflict
    raise StorageUnavailable(
        f"Docker on node {node} is still creating an earlier container of yours, whose storage hangs: "
        "try again in a minute"
    ) from conflict


async def inject_identity(
    daemons: DockerClients,
    node: str,
    container: str,
    identity: UserIdentity,
    storage: StorageSettings,
    *,
    certificate: NotebookCertificate | None = None,
    is_guest: bool = False,
) -> None:
    """Write the names of the user and groups and the certificate into the container, and hand over its scratch volume.

    On a guest, the volume in place of the home is handed over. A new volume belongs to root until then.

    Raises:
        Conflict: The scratch volume is another user's.
    """
    folders = (identity.home,) if is_guest else (SCRATCH,) if storage.scratch else ()
    if SCRATCH in folders:
        await _check_scratch(daemons, node, identity.name)
    archive = build_identity_archive(identity, private_folders=folders)
    if certificate is not None:
        # In the same archive, because each one takes a fifth of a second.
        archive = certificate.build_archive(identity.uid, identity.gid, onto=archive)
    # The daemon mounts the container's volumes for it.
    await daemons.run(node, lambda client: client.put_archive(container, ARCHIVE_ROOT, archive), kind=CallKind.MOUNTING)


async def _check_scratch(daemons: DockerClients, node: str, owner: str) -> None:
    volume = names.scratch_volume_name(daemons.instance, owner)
    with contextlib.suppress(NotFound):
        found = await daemons.call(node, "inspect_volume", volume)
        names.check_owner(volume, found.get("Labels"), owner)


async def inspect_container(daemons: DockerClients, node: str, container: str) -> dict[str, Any] | None:
    """Return the daemon's description of the container, or None if it does not exist."""
    try:
        description: dict[str, Any] = await daemons.call(node, "inspect_container", container)
    except NotFound:
        return None
    return description


async def read_exit_code(daemons: DockerClients, node: str, container: str) -> int | None:
    """Return None while the container runs, its exit code when it has ended, and 0 when it is gone.

    Raises:
        GpuhubError: The daemon does not answer.
    """
    description = await inspect_container(daemons, node, container)
    if description is None:
        return 0
    return None if description["State"]["Running"] else int(description["State"]["ExitCode"])


def create_container(client: Any, arguments: Mapping[str, Any]) -> str:
    """Create a container with a docker-py client and return its id. Blocks.

    Args:
        arguments: Those of `create_container`; those of `create_host_config` are in `host_config`.
    """
    host = client.create_host_config(**arguments["host_config"])
    return str(client.create_container(**{**arguments, "host_config": host})["Id"])


async def remove_container(daemons: DockerClients, node: str, container: str, *, grace_s: int = 0) -> None:
    """Stop the container, with `grace_s` seconds to end, and remove it; a missing container is not an error."""
    try:
        if grace_s:
            await daemons.run(node, lambda client: client.stop(container, timeout=grace_s), kind=CallKind.MOUNTING)
        await daemons.run(
            node, lambda client: client.remove_container(container, force=True, v=True), kind=CallKind.MOUNTING
        )
    except NotFound:
        return
    except Conflict as error:
        if "already in progress" not in str(error):
            raise


async def _create(daemons: DockerClients, node: str, spec: ContainerSpec) -> str:
    try:
        return await daemons.run(node, spec.create, kind=CallKind.MOUNTING)
    except GpuhubError as error:
        if "storage-opt" in str(error) and "storage_opt" in spec.host_config:
            raise GpuhubError(
                f"node {node}: its Docker cannot limit what a container writes, which `disk` requires: that needs "
                "Docker's data on XFS, mounted with pquota. The administrator removes `disk` from cluster.toml, or "
                f"repairs the node ({error})"
            ) from error
        raise


def is_same_grant(found: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether an inspected container was made for the grant that `labels` name."""
    actual = found["Config"].get("Labels") or {}
    return all(actual.get(label) == labels[label] for label in _GRANT_LABELS)


async def _remove_leftover(daemons: DockerClients, node: str, found: Mapping[str, Any], spec: ContainerSpec) -> None:
    actual = found["Config"].get("Labels") or {}
    for label in (names.LABEL_INSTANCE, names.LABEL_OWNER):
        if actual.get(label) != spec.labels[label]:
            raise Conflict(
                f"node {node}: the container name {spec.name} is taken by a container that gpuhub did not make: "
                "rename or remove it"
            )
    await remove_container(daemons, node, str(found["Id"]))


async def remove_instance_objects(
    daemons: DockerClients, node: str, instance: str, kind: Literal["container", "network"]
) -> None:
    """Remove the instance's networks on a node, or its containers except the firewall's (see `remove_firewall`).

    Raises:
        NodeUnreachable, GpuhubError: At least one of them remains.
    """
    listing, removal = {"container": ({"all": True}, {"force": True, "v": True}), "network": ({}, {})}[kind]
    filters = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
    for listed in await daemons.call(node, f"{kind}s", filters=filters, **listing):
        if kind == "container" and listed["Labels"].get(names.LABEL_KIND) == names.KIND_FIREWALL:
            continue
        with contextlib.suppress(NotFound):  # it ended in the meantime
            await daemons.call(node, f"remove_{kind}", listed["Id"], **removal)


async def remove_nfs_volumes(daemons: DockerClients, node: str, instance: str) -> list[str]:
    """Remove the instance's NFS volumes, which hold no files, and return the names of its other volumes."""
    filters = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
    remaining = []
    for volume in (await daemons.call(node, "volumes", filters=filters)).get("Volumes") or ():
        if (volume.get("Options") or {}).get("type") in {"nfs", "nfs4"}:
            with contextlib.suppress(NotFound):
                await daemons.call(node, "remove_volume", volume["Name"])
        else:
            remaining.append(str(volume["Name"]))
    return remaining


def find_used_volumes(containers: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the volumes that the listed containers have, running or not."""
    return {
        str(mount["Name"]) for container in containers for mount in container.get("Mounts") or () if mount.get("Name")
    }


@dataclass(frozen=True, slots=True)
class _MountFault:
    pattern: str
    #: May name `{node}`, `{what}` and `{place}`.
    explanation: str


#: The first match counts. Docker mounts without mount.nfs, so most of these messages are the kernel's.
_FAULTS = (
    _MountFault(
        r"no such device|unknown filesystem type",
        "the kernel of node {node} has no NFS client: `apt-get install nfs-common` there, and `modprobe nfs`",
    ),
    _MountFault(
        r"stale (nfs )?file handle",
        "the file server has another file system at {place} than when node {node} mounted it (stale file handle). "
        "There, as root, `umount -l` what is stale, or restart the node; on the server, see that the export is what "
        "it was. Nothing was deleted",
    ),
    _MountFault(
        r"bind source path does not exist|no such file or directory",
        "there is no {place} for node {node}: it must be exported by the file server, or mounted on the node, and "
        "the folder must exist",
    ),
    _MountFault(
        r"permission denied|access denied",
        "the file server does not let node {node} have {place}: its /etc/exports must name the node's address",
    ),
    _MountFault(
        r"operation not permitted",
        "the file server, or the kernel of node {node}, does not allow it: see /etc/exports, and `dmesg` on the node",
    ),
    _MountFault(r"connection refused", "the file server does not serve NFS now: it refuses node {node}"),
    _MountFault(r"timed out|timeout|host is down", "the file server does not answer node {node}"),
    _MountFault(r"no route to host|network is unreachable", "node {node} has no way to the file server"),
    _MountFault(
        r"no such host|network volume address",
        "node {node} cannot look up the file server's name: write its IP address in [storage]",
    ),
    _MountFault(
        r"protocol not supported|not supported|invalid argument",
        "the kernel of node {node}, or the file server, does not take nfs_options = {options!r} of [storage]",
    ),
    _MountFault(r"input/output error", "the disk or the file server fails (input/output error)"),
)


@asynccontextmanager
async def translate_mount_errors(
    daemons: DockerClients, node: str, storage: StorageSettings, owner: str
) -> AsyncIterator[None]:
    """Wrap the creation and start of an owner's container, and name storage in the error if it is the cause.

    Raises:
        StorageUnavailable: Storage is the cause of the error. A container that was created remains.
    """
    try:
        yield
    except NodeSilent as error:
        if await _is_daemon_responsive(daemons, node):
            raise StorageUnavailable(describe_mount_hang(node, storage, owner)) from error
        raise
    except GpuhubError as error:
        explanation = explain_mount_failure(str(error), node, storage, owner)
        if explanation is None:
            raise
        raise StorageUnavailable(explanation) from error


async def _is_daemon_responsive(daemons: DockerClients, node: str) -> bool:
    try:
        async with asyncio.timeout(_PING_TIMEOUT_S):
            return bool(await daemons.call(node, "ping"))
    except (GpuhubError, TimeoutError):
        return False


def explain_mount_failure(text: str, node: str, storage: StorageSettings, owner: str) -> str | None:
    """Return an explanation of Docker's error for users, or None if its cause is not a mount."""
    if not _MOUNT_FAILURE.search(text):
        return None
    what, place = _find_mount(text, storage, owner)
    means = next((fault.explanation for fault in _FAULTS if re.search(fault.pattern, text, re.IGNORECASE)), None)
    if means is None:
        return f"Node {node} cannot mount {what} ({place}): {text}"
    return (
        f"Node {node} cannot mount {what} ({place}): "
        f"{means.format(node=node, what=what, place=place, options=storage.nfs_options)}."
    )


def describe_mount_hang(node: str, storage: StorageSettings, owner: str) -> str:
    """Return the text for a call that hangs in a mount while the daemon answers other calls."""
    home = storage.format_home(owner)
    places = " or ".join((home, *storage.list_read_only()))
    return (
        f"Docker on node {node} answers, but cannot finish the container: most likely its storage hangs there, "
        f"{places}. Then the file server, or the network between the two, does not answer; `dmesg` on {node} shows it."
    )


def _find_mount(text: str, storage: StorageSettings, owner: str) -> tuple[str, str]:
    """Return the name and the source of the mount that Docker's message is about."""
    for name, source in (("datasets", storage.datasets), ("models", storage.models)):
        if source is not None and (f"-{name}-" in text or (source.startswith("/") and source in text)):
            return f"the {name}", source
    if "-scratch-" in text:
        return "the scratch", "a local volume"
    return f"the home of {owner}", storage.format_home(owner)
