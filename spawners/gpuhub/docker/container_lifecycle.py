"""Creating a container so that doing it twice gives one, and a stranger's of the same name is never taken over."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, NotFound, StorageUnavailable
from gpuhub.config.identity import ARCHIVE_ROOT, UserIdentity, build_identity_archive
from gpuhub.config.settings import StorageSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.container_spec import SCRATCH, ContainerSpec
from gpuhub.tls.notebook_certificate import NotebookCertificate

#: Labels that name a container's owner and the grant for which it was made.
_GRANT_LABELS = (names.LABEL_INSTANCE, names.LABEL_KIND, names.LABEL_LEASE, names.LABEL_EPOCH, names.LABEL_OWNER)
#: Attempts to create a container. Between a refused name and the inspection of the container that has it, that
#: container may appear (from an earlier call that timed out) or vanish; the next attempt sees the new state.
_TRIES = 3


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
) -> None:
    """Write the names of the user and groups and the certificate into the container, and hand over its scratch volume.

    A new volume belongs to root until then.
    """
    archive = build_identity_archive(identity, private_folders=(SCRATCH,) if storage.scratch else ())
    if certificate is not None:
        # In the same archive, because each one takes a fifth of a second.
        archive = certificate.build_archive(identity.uid, identity.gid, onto=archive)
    # The daemon mounts the container's volumes for it.
    await daemons.run(node, lambda client: client.put_archive(container, ARCHIVE_ROOT, archive), mounting=True)


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


async def remove_container(daemons: DockerClients, node: str, container: str, *, grace_s: int = 0) -> None:
    """Stop the container, with `grace_s` seconds to end, and remove it; a missing container is not an error."""
    try:
        if grace_s:
            await daemons.run(node, lambda client: client.stop(container, timeout=grace_s), mounting=True)
        await daemons.run(node, lambda client: client.remove_container(container, force=True, v=True), mounting=True)
    except NotFound:
        return
    except Conflict as error:
        if "already in progress" not in str(error):
            raise


async def _create(daemons: DockerClients, node: str, spec: ContainerSpec) -> str:
    try:
        return await daemons.run(node, spec.create, mounting=True)
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
