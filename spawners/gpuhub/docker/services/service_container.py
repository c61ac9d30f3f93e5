"""The two containers of a service: its program, and the relay, whose network the program has.

Without `internet`, that network is a loopback alone. Connections to the service begin in the relay, through Docker's
exec (`relay_script`), so that the node opens no port, and the service's image needs nothing of gpuhub's.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from docker.types import LogConfig, Mount

from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, ImageMissing
from gpuhub.config.containers.services import ServiceSettings
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker import networks
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.containers.container_spec import BASE_IMAGE
from gpuhub.docker.containers.firewall_container import ensure_firewall
from gpuhub.docker.containers.security import (
    ContainerLimits,
    build_gpu_environment,
    build_security_options,
    build_tmpfs,
)
from gpuhub.docker.services import data_folder_script, relay_script

#: Hash of everything that a container is made from; when it differs, both are replaced.
LABEL_BUILD = "gpuhub.service-build"
_UNPRIVILEGED_USER = "65534:65534"
_PIDS = 1024
_DATA_PARENT = "/parent"
#: Time for the folder of the data to be made, seconds.
_DATA_TIMEOUT_S = 30.0
#: Time that a service has to end before it is replaced, seconds.
STOP_S = 10
#: Maximum number of lines of a service's output that can be read at once.
MAX_LOG_LINES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContainers:
    """The containers of a service as their daemon describes them; None where there is none."""

    relay: Mapping[str, Any] | None
    program: Mapping[str, Any] | None

    @property
    def relay_id(self) -> str:
        """The id of the relay; empty where there is none."""
        return "" if self.relay is None else str(self.relay["Id"])

    @property
    def is_running(self) -> bool:
        """Whether the program runs in the network that the relay has now."""
        if self.relay is None or self.program is None:
            return False
        are_running = all(one["State"]["Running"] for one in (self.relay, self.program))
        # A relay that starts again has a new network, and the program still the old one.
        return are_running and _started_at(self.relay) <= _started_at(self.program)

    @property
    def has_ended(self) -> bool:
        """Whether the program has ended by itself or with its node."""
        return self.program is not None and not self.program["State"]["Running"]

    def is_built_as(self, build: str) -> bool:
        """Return whether both exist, belong together and were made from the same settings and images."""
        if self.relay is None or self.program is None:
            return False
        builds = {one["Config"]["Labels"].get(LABEL_BUILD) for one in (self.relay, self.program)}
        return builds == {build} and self.program["HostConfig"]["NetworkMode"] == f"container:{self.relay_id}"


async def inspect_service(daemons: DockerClients, node: str, service: str) -> ServiceContainers:
    """Return the containers of a service on a node."""
    inspected = [
        await container_lifecycle.inspect_container(daemons, node, name)
        for name in (
            names.service_relay_name(daemons.instance, service),
            names.service_container_name(daemons.instance, service),
        )
    ]
    return ServiceContainers(relay=inspected[0], program=inspected[1])


async def find_build(daemons: DockerClients, node: str, service: ServiceSettings) -> str:
    """Return the hash of the containers that the settings ask for, with the images that the node has now.

    Raises:
        ImageMissing: The node lacks one of the images.
    """
    images = [str((await daemons.call(node, "inspect_image", image))["Id"]) for image in (service.image, BASE_IMAGE)]
    instance = daemons.instance
    arguments = (build_relay(instance, service, "", None), build_program(instance, service, "", ""))
    return hashlib.sha256(repr((images, arguments)).encode()).hexdigest()[:32]


async def pull_image(daemons: DockerClients, node: str, image: str) -> None:
    """Let a node pull an image; this takes up to half an hour.

    Raises:
        ImageMissing: It could not; the text has Docker's reason.
    """
    try:
        output = await daemons.run(node, lambda client: client.pull(image), kind=CallKind.LONG)
    except GpuhubError as error:
        raise ImageMissing(f"node {node}: the image {image} is missing, and cannot be pulled: {error}") from error
    last = str(output).strip().rpartition("\n")[2]
    if '"error"' in last:
        reason = json.loads(last).get("error", "")
        raise ImageMissing(f"node {node}: the image {image} is missing, and cannot be pulled: {reason}")


async def create_service(
    daemons: DockerClients, cluster: ClusterSettings, node: str, service: ServiceSettings, build: str
) -> None:
    """Replace the containers of a service by new ones, which do not run yet; its data stays.

    Raises:
        NodeUnreachable: The node does not answer.
        GpuhubError: The daemon refuses, or the folder for the data cannot be used.
    """
    await remove_service(daemons, node, service.name)
    network = None
    if service.internet:
        network = await networks.ensure_access_network(daemons, cluster, daemons.instance, node)
    if service.data is not None:
        await _ensure_data(daemons, node, service)
    relay = build_relay(daemons.instance, service, build, network)
    relay_id = await daemons.run(node, lambda client: container_lifecycle.create_container(client, relay))
    program = build_program(daemons.instance, service, build, relay_id)
    await daemons.run(
        node, lambda client: container_lifecycle.create_container(client, program), kind=CallKind.MOUNTING
    )


async def start_service(
    daemons: DockerClients, cluster: ClusterSettings, node: str, service: ServiceSettings, found: ServiceContainers
) -> None:
    """Start the containers of a service, the program again where its network is gone.

    Raises:
        GpuhubError: A container does not start, or the node's firewall is not in place.
    """
    assert found.relay is not None  # noqa: S101 - for the type checker
    assert found.program is not None  # noqa: S101 - for the type checker
    program = str(found.program["Id"])
    if service.internet:
        await ensure_firewall(daemons, cluster, daemons.instance, node)
    if not found.relay["State"]["Running"]:
        await daemons.call(node, "start", found.relay_id)
    if found.program["State"]["Running"]:
        await daemons.run(node, lambda client: client.stop(program, timeout=STOP_S), kind=CallKind.MOUNTING)
    await daemons.run(node, lambda client: client.start(program), kind=CallKind.MOUNTING)


async def remove_service(daemons: DockerClients, node: str, service: str) -> None:
    """Stop and remove the containers of a service; its data stays."""
    instance = daemons.instance
    program = names.service_container_name(instance, service)
    await container_lifecycle.remove_container(daemons, node, program, grace_s=STOP_S)
    for name in (names.service_relay_name(instance, service), names.service_data_name(instance, service)):
        await container_lifecycle.remove_container(daemons, node, name)


async def list_services(daemons: DockerClients, node: str) -> set[str]:
    """Return the names of services that have a container on a node."""
    labels = [f"{names.LABEL_INSTANCE}={daemons.instance}", f"{names.LABEL_KIND}={names.KIND_SERVICE}"]
    listed = await daemons.call(node, "containers", all=True, filters={"label": labels})
    return {str(one["Labels"].get(names.LABEL_SERVICE, "")) for one in listed} - {""}


async def read_log(daemons: DockerClients, node: str, service: str, lines: int) -> bytes:
    """Return the last lines of a service's output, at most `MAX_LOG_LINES`.

    Raises:
        NotFound: It has no container now.
    """
    name = names.service_container_name(daemons.instance, service)
    output: bytes = await daemons.call(
        node, "logs", name, stdout=True, stderr=True, timestamps=True, tail=min(lines, MAX_LOG_LINES)
    )
    return output


def build_relay_command(port: int) -> tuple[str, ...]:
    """Return the program that carries one connection to a service, for Docker's exec in its relay."""
    return ("python3", "-I", "-S", "-c", inspect.getsource(relay_script), str(port))


def build_relay(instance: str, service: ServiceSettings, build: str, network: str | None) -> dict[str, Any]:
    """Build the arguments of `create_container`; those of `create_host_config` are in `host_config`.

    Args:
        network: Id of the node's access network; None for no network.
    """
    return {
        "image": BASE_IMAGE,
        "name": names.service_relay_name(instance, service.name),
        "command": ["python3", "-I", "-S", "-c", inspect.getsource(relay_script), "wait"],
        "user": _UNPRIVILEGED_USER,
        "labels": _labels(instance, service, build),
        "environment": build_gpu_environment(()),
        "host_config": {
            "network_mode": network or "none",
            **_confinement(),
            # For a program of some 10 MB for each connection.
            "mem_limit": "1g",
            "memswap_limit": "1g",
            "pids_limit": 512,
            "log_config": LogConfig(type="json-file", config={"max-size": "1m", "max-file": "1"}),
        },
    }


def build_program(instance: str, service: ServiceSettings, build: str, relay_id: str) -> dict[str, Any]:
    """Build the arguments of the container of a service's program; see `build_relay`."""
    uid, gid = service.owner
    limits = ContainerLimits(cpus=service.cpus, memory=service.memory, shm=service.memory // 2, pids=_PIDS)
    identity = UserIdentity(name=service.name, uid=uid, gid=gid, group_names=(service.name,))
    data = service.data
    variables = dict(variable.split("=", 1) for variable in service.environment)
    return {
        "image": service.image,
        "name": names.service_container_name(instance, service.name),
        "command": list(service.command) or None,
        "user": service.user,
        "labels": _labels(instance, service, build),
        # Many programs want to write there, and the image's own folder is not to be written.
        "environment": {"HOME": "/tmp", **variables, **build_gpu_environment(())},  # noqa: S108  inside of the container
        "host_config": {
            **build_security_options(identity, limits),
            "network_mode": f"container:{relay_id}",
            "read_only": True,
            "tmpfs": build_tmpfs(limits),
            "device_requests": [],
            "mounts": [] if data is None else [Mount(target=service.mount, source=data, type="bind")],
        },
    }


def build_data_container(instance: str, service: ServiceSettings) -> dict[str, Any]:
    """Build the arguments of the container that makes the folder of a service's data; see `build_relay`.

    Docker refuses it where the folder's parent is missing, such as that of a disk that is not mounted.
    """
    parent, _, name = (service.data or "").rpartition("/")
    uid, gid = service.owner
    return {
        "image": BASE_IMAGE,
        "name": names.service_data_name(instance, service.name),
        "command": [
            *("python3", "-I", "-S", "-c", inspect.getsource(data_folder_script)),
            *(f"{_DATA_PARENT}/{name}", str(uid), str(gid)),
        ],
        # Root, for the right to give a folder to the service; it sees the parent folder alone.
        "user": "0:0",
        "labels": _labels(instance, service, ""),
        "environment": build_gpu_environment(()),
        "host_config": {
            "network_mode": "none",
            **_confinement(),
            "cap_add": ["CHOWN"],
            "mounts": [Mount(target=_DATA_PARENT, source=parent, type="bind")],
            "mem_limit": "64m",
            "pids_limit": 32,
            "log_config": LogConfig(type="json-file", config={"max-size": "1m", "max-file": "1"}),
        },
    }


def _confinement() -> dict[str, Any]:
    return {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "read_only": True, "init": True}


async def _ensure_data(daemons: DockerClients, node: str, service: ServiceSettings) -> None:
    arguments = build_data_container(daemons.instance, service)
    container = await daemons.run(
        node, lambda client: container_lifecycle.create_container(client, arguments), kind=CallKind.MOUNTING
    )
    try:
        await daemons.run(node, lambda client: client.start(container), kind=CallKind.MOUNTING)
        result = await daemons.call(node, "wait", container, timeout=_DATA_TIMEOUT_S)
        if result["StatusCode"]:
            output = await daemons.call(node, "logs", container, stdout=True, stderr=True, tail=1)
            reason = output.decode("utf-8", "replace").strip()
            raise GpuhubError(f"node {node}: data = {service.data} cannot be used: {reason}")
    finally:
        await container_lifecycle.remove_container(daemons, node, container)


def _labels(instance: str, service: ServiceSettings, build: str) -> dict[str, str]:
    return {
        names.LABEL_INSTANCE: instance,
        names.LABEL_KIND: names.KIND_SERVICE,
        names.LABEL_SERVICE: service.name,
        LABEL_BUILD: build,
    }


def _started_at(container: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(container["State"]["StartedAt"])
