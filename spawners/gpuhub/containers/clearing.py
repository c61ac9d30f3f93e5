"""Removes from a node what gpuhub has made there."""

from __future__ import annotations

import contextlib
from typing import Literal

from gpuhub import names
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import NotFound


async def remove_all(daemons: Daemons, node: str, instance: str, kind: Literal["container", "network"]) -> None:
    """Remove the instance's containers, its guard aside (`guard.container.remove_guard`), or its networks on a node.

    Raises:
        NodeUnreachable, GpuhubError: one of them stays.
    """
    listing, removal = {"container": ({"all": True}, {"force": True, "v": True}), "network": ({}, {})}[kind]
    mine = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
    for found in await daemons.call(node, f"{kind}s", filters=mine, **listing):
        if kind == "container" and found["Labels"].get(names.LABEL_KIND) == names.KIND_GUARD:
            continue
        with contextlib.suppress(NotFound):  # it went by itself meanwhile
            await daemons.call(node, f"remove_{kind}", found["Id"], **removal)


async def remove_definitions(daemons: Daemons, node: str, instance: str) -> list[str]:
    """Remove the instance's volumes that only say where an NFS server is; the names of the others, which hold files."""
    mine = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
    left = []
    for volume in (await daemons.call(node, "volumes", filters=mine)).get("Volumes") or ():
        if (volume.get("Options") or {}).get("type") in {"nfs", "nfs4"}:
            with contextlib.suppress(NotFound):
                await daemons.call(node, "remove_volume", volume["Name"])
        else:
            left.append(str(volume["Name"]))
    return left
