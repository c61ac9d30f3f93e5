"""Creating a container so that doing it twice gives one, and a stranger's of the same name is never taken over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuhub import names
from gpuhub.containers.arguments import SCRATCH, ContainerSpec
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import Conflict, GpuhubError, NotFound, StorageUnavailable
from gpuhub.identity import ARCHIVE_ROOT, Identity, build_archive
from gpuhub.settings import Storage
from gpuhub.trust.notebooks import Issued

#: Labels that say whose a container is and under which grant it was made.
_GRANT = (names.LABEL_INSTANCE, names.LABEL_KIND, names.LABEL_LEASE, names.LABEL_EPOCH, names.LABEL_OWNER)

#: Between a refused name and the look at who has it, an earlier request for the same container, which its caller gave
#: up, may come to its end, or its container may go: then the next try finds that.
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container that exists on a node."""

    id: str
    is_running: bool


async def ensure_created(daemons: Daemons, node: str, spec: ContainerSpec, *, adopt: bool) -> Container:
    """The container of `spec`; with `adopt`, one of the same grant that exists already is taken.

    Any other container of that name, instance and owner is a leftover: it is removed.

    Raises:
        Conflict: the name is taken by a container that is not this user's.
        StorageUnavailable: the daemon has kept the name for one that it is still making: a mount hangs.
        GpuhubError: among others, the node cannot keep the limit of its disk.
    """
    for _ in range(_TRIES):
        try:
            return Container(id=await _create(daemons, node, spec), is_running=False)
        except Conflict as error:
            conflict = error
        found = await inspect(daemons, node, spec.name)
        if found is None:
            continue
        if adopt and is_same_grant(found, spec.labels):
            return Container(id=found["Id"], is_running=bool(found["State"]["Running"]))
        await _remove_leftover(daemons, node, found, spec)
    if found is not None:
        raise conflict
    raise StorageUnavailable(
        f"Docker on node {node} is still busy with an earlier container of yours, whose storage hangs: "
        "try again in a minute"
    ) from conflict


async def name_user(
    daemons: Daemons,
    node: str,
    container: str,
    identity: Identity,
    storage: Storage,
    *,
    certificate: Issued | None = None,
) -> None:
    """Put the user's and groups' names into the container, and give it its scratch (a new volume is root's) and its
    certificate.
    """
    archive = build_archive(identity, own=(SCRATCH,) if storage.scratch else ())
    if certificate is not None:
        # At once with the rest: each archive is a fifth of a second.
        archive = certificate.archive(identity.uid, identity.gid, onto=archive)
    # The daemon mounts the container's volumes for it.
    await daemons.run(node, lambda client: client.put_archive(container, ARCHIVE_ROOT, archive), mounting=True)


async def inspect(daemons: Daemons, node: str, container: str) -> dict[str, Any] | None:
    """What the daemon says of the container; None when there is none."""
    try:
        found: dict[str, Any] = await daemons.call(node, "inspect_container", container)
    except NotFound:
        return None
    return found


async def exit_code(daemons: Daemons, node: str, container: str) -> int | None:
    """None while the container runs; its exit code when it ended, 0 when it is gone.

    Raises:
        GpuhubError: nobody can tell.
    """
    found = await inspect(daemons, node, container)
    if found is None:
        return 0
    return None if found["State"]["Running"] else int(found["State"]["ExitCode"])


async def remove(daemons: Daemons, node: str, container: str, *, grace_s: int = 0) -> None:
    """Stop the container, giving it `grace_s` seconds, and remove it; one that is gone is fine."""
    try:
        if grace_s:
            await daemons.run(node, lambda client: client.stop(container, timeout=grace_s), mounting=True)
        await daemons.run(node, lambda client: client.remove_container(container, force=True, v=True), mounting=True)
    except NotFound:
        return
    except Conflict as error:
        if "already in progress" not in str(error):
            raise


async def _create(daemons: Daemons, node: str, spec: ContainerSpec) -> str:
    try:
        return await daemons.run(node, spec.create, mounting=True)
    except GpuhubError as error:
        if "storage-opt" in str(error) and "storage_opt" in spec.host_config:
            raise GpuhubError(
                f"node {node}: its Docker cannot limit what a container writes, which `disk` asks for: that needs "
                "Docker's data on XFS, mounted with pquota. The administrator takes `disk` out of cluster.toml, or "
                f"mends the node ({error})"
            ) from error
        raise


def is_same_grant(found: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether an inspected container was made for the grant that `labels` name."""
    has = found["Config"].get("Labels") or {}
    return all(has.get(label) == labels[label] for label in _GRANT)


async def _remove_leftover(daemons: Daemons, node: str, found: Mapping[str, Any], spec: ContainerSpec) -> None:
    has = found["Config"].get("Labels") or {}
    for label in (names.LABEL_INSTANCE, names.LABEL_OWNER):
        if has.get(label) != spec.labels[label]:
            raise Conflict(
                f"node {node}: the container name {spec.name} is taken by a container that gpuhub did not make: "
                "rename or remove it"
            )
    await remove(daemons, node, str(found["Id"]))
