"""Keeps the guard's container on a node, and learns from its last line whether the packet filter is in place.

The container has Docker restart it with the machine: a node that comes back without the head node is guarded. The table
outlives the container; only `remove_guard` takes it away.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import docker.errors
from docker.types import LogConfig

from gpuhub import names
from gpuhub.containers import creation
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import Conflict, GpuhubError, NotFound
from gpuhub.guard import script
from gpuhub.guard.rules import Filter, plan_filter, write_removal, write_rules
from gpuhub.nodes.agent_container import IMAGE
from gpuhub.nodes.head import head_address, source_address
from gpuhub.settings import Cluster

#: Says which script, rules and image it runs: others make another container.
LABEL_BUILD = "gpuhub.guard"
#: A new guard has its rules in place within so long, seconds.
READY_S = 15.0
_LOOK_AGAIN_S = 0.05
_REMOVE_S = script.NFT_S + 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A guard's container as its daemon tells."""

    id: str
    build: str
    #: Docker's word: running, restarting, exited …
    status: str
    #: What the guard last said since its start; empty when nothing yet.
    state: str
    why: str


def find_filter(cluster: Cluster, instance: str, node: str) -> Filter:
    """A node's filter with the addresses that this machine has on the way there. Sends nothing.

    Raises:
        SetupError: this machine has no address that containers can reach.
    """
    caller = source_address(cluster.node(node).address)
    return plan_filter(cluster, instance, head=head_address(cluster), callers=() if caller is None else (caller,))


async def ensure_guard(daemons: Daemons, cluster: Cluster, instance: str, node: str) -> None:
    """Have the packet filter in place on a node; without `network.guard`, have none.

    Three questions to the daemon where all is well. Safe to call several times at once, from several processes.

    Raises:
        NodeUnreachable: the daemon does not answer.
        GpuhubError: the filter cannot be set up; with the node and why.
    """
    if not cluster.network.guard:
        await remove_guard(daemons, instance, node)
        return
    rules = write_rules(find_filter(cluster, instance, node))
    end = asyncio.get_running_loop().time() + READY_S
    while True:
        build, found = await daemons.run(node, lambda client: _look(client, instance, rules))
        if found is None or found.build != build or found.status in {"created", "exited", "dead", "paused"}:
            await _replace(daemons, node, found, build_container(instance, build, rules))
        elif found.status == "running" and found.state == "ok":
            return
        elif found.state == "failed" or asyncio.get_running_loop().time() > end:
            raise GpuhubError(
                f"node {node}: its packet filter is not in place, so users' containers do not start there: "
                f"{found.why if found.state == 'failed' else f'the guard is {found.status} and has not set it up yet'}"
            )
        else:
            await asyncio.sleep(_LOOK_AGAIN_S)


async def remove_guard(daemons: Daemons, instance: str, node: str) -> None:
    """Take a node's guard away, and its table with it; nothing happens where there is none.

    Until the table is gone one container of this kind is there, so that a removal that broke off is done again.

    Raises:
        NodeUnreachable, GpuhubError: the table may still be there.
    """
    mine = {"label": [f"{names.LABEL_INSTANCE}={instance}", f"{names.LABEL_KIND}={names.KIND_GUARD}"]}
    there = await daemons.call(node, "containers", all=True, filters=mine)
    if not there:
        return
    image = str(there[0]["ImageID"])
    removers = [one for one in there if f"/{_remover(instance)}" in one["Names"]]
    for one in removers:
        await creation.remove(daemons, node, str(one["Id"]))
    remover = await daemons.run(node, lambda client: _create(client, build_remover(instance, image)))
    for one in there:
        if one not in removers:
            await creation.remove(daemons, node, str(one["Id"]))
    await daemons.call(node, "start", remover)
    ended = await daemons.call(node, "wait", remover, timeout=_REMOVE_S)
    if ended["StatusCode"]:
        said = await daemons.call(node, "logs", remover, stdout=True, stderr=False, tail=1)
        raise GpuhubError(f"node {node}: its packet filter could not be removed: {parse_line(said)[1]}")
    await creation.remove(daemons, node, remover)


def build_container(instance: str, build: str, rules: str) -> dict[str, Any]:
    """Arguments of `create_container`, with those of `create_host_config` as `host_config`."""
    command = ("keep", names.filter_table(instance), rules)
    return _build(instance, names.guard_container(instance), build, IMAGE, command)


def build_remover(instance: str, image: str) -> dict[str, Any]:
    """The same for the container that takes the table away."""
    command = ("remove", names.filter_table(instance), write_removal(instance))
    return _build(instance, _remover(instance), "", image, command)


def build_hash(rules: str, image_id: str) -> str:
    """Differs when script, rules, image or the container's arguments differ."""
    arguments = repr(build_container("", "-", ""))
    return hashlib.sha256("\0".join((guard_script(), rules, image_id, arguments)).encode()).hexdigest()[:32]


def guard_script() -> str:
    """The text of `script`, which runs without gpuhub."""
    return inspect.getsource(script)


def parse_line(text: bytes) -> tuple[str, str]:
    """State and reason in the guard's last line; empty where there is none."""
    try:
        line = json.loads(text)
        return str(line["state"]), str(line["why"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def _build(instance: str, name: str, build: str, image: str, command: Sequence[str]) -> dict[str, Any]:
    return {
        "image": image,
        "name": name,
        "command": ["python3", "-u", "-c", guard_script(), *command],
        # Root, for the one capability; it has no file of the node.
        "user": "0:0",
        "labels": {names.LABEL_INSTANCE: instance, names.LABEL_KIND: names.KIND_GUARD, LABEL_BUILD: build},
        "environment": {"NVIDIA_VISIBLE_DEVICES": "void"},
        "host_config": {
            "network_mode": "host",
            # Where Docker maps users, the capability would mean nothing to the node's network.
            "userns_mode": "host",
            "cap_drop": ["ALL"],
            "cap_add": ["NET_ADMIN"],
            "security_opt": ["no-new-privileges:true"],
            "read_only": True,
            "init": True,
            # The remover has no build, and is not started anew.
            "restart_policy": {"Name": "unless-stopped" if build else "no"},
            "mem_limit": "128m",
            "memswap_limit": "128m",
            "pids_limit": 32,
            "log_config": LogConfig(type="json-file", config={"max-size": "1m", "max-file": "2"}),
        },
    }


def _remover(instance: str) -> str:
    return f"{names.guard_container(instance)}-off"


def _look(client: Any, instance: str, rules: str) -> tuple[str, Found | None]:
    """What should run, and what is there."""
    build = build_hash(rules, str(client.inspect_image(IMAGE)["Id"]))
    try:
        raw = client.inspect_container(names.guard_container(instance))
        # A guard that the machine's start has started anew has not said anything yet, whatever it said before.
        since = datetime.fromisoformat(raw["State"]["StartedAt"]).timestamp()
        said = b"" if since < 0 else client.logs(raw["Id"], stdout=True, stderr=False, tail=1, since=since)
    except docker.errors.NotFound:
        return build, None
    state, why = parse_line(said)
    labels: Mapping[str, str] = raw["Config"].get("Labels") or {}
    return build, Found(
        id=str(raw["Id"]), build=labels.get(LABEL_BUILD, ""), status=str(raw["State"]["Status"]), state=state, why=why
    )


async def _replace(daemons: Daemons, node: str, found: Found | None, wanted: Mapping[str, Any]) -> None:
    if found is not None:
        await creation.remove(daemons, node, found.id)
    try:
        made = await daemons.run(node, lambda client: _create(client, wanted))
    except Conflict:
        # Somebody else was quicker: that one is looked at next.
        return
    try:
        await daemons.call(node, "start", made)
    except NotFound:
        return
    except GpuhubError as error:
        with suppress(GpuhubError):
            await creation.remove(daemons, node, made)
        raise GpuhubError(f"node {node}: its packet filter cannot be set up: {error}") from error


def _create(client: Any, wanted: Mapping[str, Any]) -> str:
    host = client.create_host_config(**wanted["host_config"])
    return str(client.create_container(**{**wanted, "host_config": host})["Id"])
