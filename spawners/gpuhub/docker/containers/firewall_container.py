"""Runs the firewall's container on a node, and reads from its last line whether the rules are in place.

Docker restarts the container with the machine, so a node that boots without the head node has its firewall. The table
of rules outlives the container; only `remove_firewall` removes it.
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
from time import time
from typing import Any

import docker.errors
from docker.types import LogConfig

from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.config.head_address import find_head_address
from gpuhub.config.own_address import find_source_address
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients, is_being_removed
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.containers.container_spec import BASE_IMAGE
from gpuhub.firewall import script
from gpuhub.firewall.rules import FirewallPolicy, build_policy, format_removal, format_rules

#: Hash of script, rules and image; when it differs, the container is replaced.
LABEL_BUILD = "gpuhub.guard"
#: When the process started that made the container, seconds since 1970: the newest process has the current settings.
LABEL_SINCE = "gpuhub.guard-since"
_PROCESS_SINCE = time()
#: Time for a new container to apply its rules, seconds.
READY_TIMEOUT_S = 15.0
_POLL_S = 0.05
_REMOVE_TIMEOUT_S = script.NFT_TIMEOUT_S + 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallStatus:
    """A firewall's container as its daemon reports it."""

    id: str
    build: str
    #: When the process started that made it; 0 if that is unknown.
    since: float
    #: Docker's state: running, restarting, exited …
    status: str
    #: Last state that the script printed since its start; empty before its first line.
    state: str
    why: str
    #: Packets that the rules have refused since they were applied; None if unknown.
    rejected: int | None = None


def build_node_policy(cluster: ClusterSettings, instance: str, node: str) -> FirewallPolicy:
    """Build a node's policy with this machine's addresses on the route to the node. Sends nothing.

    Raises:
        SetupError: This machine has no address that containers can reach.
    """
    settings = cluster.node(node)
    caller = find_source_address(settings.address)
    return build_policy(
        cluster,
        instance,
        head=find_head_address(cluster),
        callers=() if caller is None else (caller,),
        is_guest=settings.guest,
        data_interface=settings.data_interface if cluster.has_data_network else None,
    )


async def ensure_firewall(daemons: DockerClients, cluster: ClusterSettings, instance: str, node: str) -> int | None:
    """Set up the firewall on a node, or remove it if `network.guard` is false.

    Returns the number of packets that it has refused since its rules were applied; None if that is unknown. Costs three
    calls to the daemon when nothing changes. Safe to call concurrently from several processes, also with different
    settings, as while `gpuhub up` prepares nodes for new ones and hub and broker still run: rules of a process that
    started later stay.

    Raises:
        NodeUnreachable: The daemon does not answer.
        GpuhubError: The firewall cannot be set up; the text names the node and the cause.
    """
    if not cluster.network.guard:
        await remove_firewall(daemons, instance, node)
        return None
    rules = format_rules(build_node_policy(cluster, instance, node))
    end = asyncio.get_running_loop().time() + READY_TIMEOUT_S
    while True:
        build, status = await daemons.run(node, lambda client: _inspect_firewall(client, instance, rules))
        is_other = status is not None and status.build != build and not _PROCESS_SINCE < status.since <= time()
        if status is None or is_other or status.status in {"created", "exited", "dead", "paused"}:
            arguments = build_firewall_container(instance, build, rules)
            arguments["labels"][LABEL_SINCE] = repr(_PROCESS_SINCE)
            await _replace(daemons, node, status, arguments)
        elif status.status == "running" and status.state == "ok":
            return status.rejected
        elif status.state == "failed" or asyncio.get_running_loop().time() > end:
            is_failed = status.state == "failed"
            why = status.why if is_failed else f"its container is {status.status} and has not set it up yet"
            raise GpuhubError(
                f"node {node}: its firewall is not in place, so users' containers do not start there: {why}"
            )
        else:
            await asyncio.sleep(_POLL_S)


async def remove_firewall(daemons: DockerClients, instance: str, node: str) -> None:
    """Remove a node's firewall container and its table of rules, if there are any.

    One container of this kind exists until the table is gone, so that an interrupted removal is repeated.

    Raises:
        NodeUnreachable, GpuhubError: The table may still exist.
    """
    filters = {"label": [f"{names.LABEL_INSTANCE}={instance}", f"{names.LABEL_KIND}={names.KIND_FIREWALL}"]}
    existing = await daemons.call(node, "containers", all=True, filters=filters)
    if not existing:
        return
    image = str(existing[0]["ImageID"])
    removers = [listed for listed in existing if f"/{_removal_container_name(instance)}" in listed["Names"]]
    for listed in removers:
        await container_lifecycle.remove_container(daemons, node, str(listed["Id"]))
    remover = await daemons.run(
        node, lambda client: container_lifecycle.create_container(client, build_removal_container(instance, image))
    )
    for listed in existing:
        if listed not in removers:
            await container_lifecycle.remove_container(daemons, node, str(listed["Id"]))
    await daemons.call(node, "start", remover)
    result = await daemons.call(node, "wait", remover, timeout=_REMOVE_TIMEOUT_S)
    if result["StatusCode"]:
        output = await daemons.call(node, "logs", remover, stdout=True, stderr=False, tail=1)
        raise GpuhubError(f"node {node}: its firewall could not be removed: {parse_status_line(output)[1]}")
    await container_lifecycle.remove_container(daemons, node, remover)


def build_firewall_container(instance: str, build: str, rules: str) -> dict[str, Any]:
    """Build the arguments of `create_container`; those of `create_host_config` are in `host_config`."""
    command = ("keep", names.firewall_table_name(instance), rules)
    return _build_container(instance, names.firewall_container_name(instance), build, BASE_IMAGE, command)


def build_removal_container(instance: str, image: str) -> dict[str, Any]:
    """Build the arguments for the container that removes the table."""
    command = ("remove", names.firewall_table_name(instance), format_removal(instance))
    return _build_container(instance, _removal_container_name(instance), "", image, command)


def build_hash(rules: str, image_id: str) -> str:
    """Return a hash of script, rules, image and the container's arguments."""
    arguments = repr(build_firewall_container("", "-", ""))
    return hashlib.sha256("\0".join((firewall_script(), rules, image_id, arguments)).encode()).hexdigest()[:32]


def firewall_script() -> str:
    """Return the source of `script`, which runs without gpuhub."""
    return inspect.getsource(script)


def parse_status_line(text: bytes) -> tuple[str, str]:
    """Return state and reason in the last line of the script's output; both are empty if there is none."""
    try:
        line = json.loads(text)
        return str(line["state"]), str(line["why"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def parse_rejected(text: bytes) -> int | None:
    """Return the number of refused packets in the last line of the script's output; None if there is none."""
    try:
        rejected = json.loads(text)["rejected"]
    except (ValueError, KeyError, TypeError):
        return None
    return rejected if isinstance(rejected, int) else None


def _build_container(instance: str, name: str, build: str, image: str, command: Sequence[str]) -> dict[str, Any]:
    return {
        "image": image,
        "name": name,
        "command": ["python3", "-u", "-c", firewall_script(), *command],
        # Root, for the one capability; no file of the node is mounted.
        "user": "0:0",
        "labels": {names.LABEL_INSTANCE: instance, names.LABEL_KIND: names.KIND_FIREWALL, LABEL_BUILD: build},
        "environment": {"NVIDIA_VISIBLE_DEVICES": "void"},
        "host_config": {
            "network_mode": "host",
            # If Docker mapped users, the capability would not apply to the node's network.
            "userns_mode": "host",
            "cap_drop": ["ALL"],
            "cap_add": ["NET_ADMIN"],
            "security_opt": ["no-new-privileges:true"],
            "read_only": True,
            "init": True,
            # The container that removes the table has no build hash and is not restarted.
            "restart_policy": {"Name": "unless-stopped" if build else "no"},
            "mem_limit": "128m",
            "memswap_limit": "128m",
            "pids_limit": 32,
            "log_config": LogConfig(type="json-file", config={"max-size": "1m", "max-file": "2"}),
        },
    }


def _removal_container_name(instance: str) -> str:
    return f"{names.firewall_container_name(instance)}-off"


def _inspect_firewall(client: Any, instance: str, rules: str) -> tuple[str, FirewallStatus | None]:
    """Return the hash of the container that should run, and the status of the existing one."""
    build = build_hash(rules, str(client.inspect_image(BASE_IMAGE)["Id"]))
    try:
        raw = client.inspect_container(names.firewall_container_name(instance))
        output = _read_output(client, raw)
    except docker.errors.NotFound:
        return build, None
    state, why = parse_status_line(output)
    labels: Mapping[str, str] = raw["Config"].get("Labels") or {}
    return build, FirewallStatus(
        id=str(raw["Id"]),
        build=labels.get(LABEL_BUILD, ""),
        since=float(labels.get(LABEL_SINCE, "0")),
        status=str(raw["State"]["Status"]),
        state=state,
        why=why,
        rejected=parse_rejected(output),
    )


def _read_output(client: Any, raw: Mapping[str, Any]) -> bytes:
    # Lines from before the last restart of the container do not count.
    since = datetime.fromisoformat(raw["State"]["StartedAt"]).timestamp()
    if since < 0:
        return b""
    try:
        output: bytes = client.logs(raw["Id"], stdout=True, stderr=False, tail=1, since=since)
    except docker.errors.APIError as error:
        if not is_being_removed(error):
            raise
        # Another call replaces it; the caller inspects again until the new one runs.
        return b""
    return output


async def _replace(
    daemons: DockerClients, node: str, existing: FirewallStatus | None, arguments: Mapping[str, Any]
) -> None:
    if existing is not None:
        await container_lifecycle.remove_container(daemons, node, existing.id)
    try:
        container_id = await daemons.run(node, lambda client: container_lifecycle.create_container(client, arguments))
    except Conflict:
        # A concurrent call created the container; the caller inspects it next.
        return
    try:
        await daemons.call(node, "start", container_id)
    except NotFound:
        return
    except GpuhubError as error:
        with suppress(GpuhubError):
            await container_lifecycle.remove_container(daemons, node, container_id)
        raise GpuhubError(f"node {node}: its firewall cannot be set up: {error}") from error
