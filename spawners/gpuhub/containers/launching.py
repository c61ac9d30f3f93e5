"""From a granted lease to a notebook that answers: the container's steps, in the order that is quickest."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuhub import names, urls
from gpuhub.broker.schemas import Lease
from gpuhub.containers import creation, networks
from gpuhub.containers.arguments import NOTEBOOK_PORT, ContainerSpec, Place, build_notebook
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.mounting import telling_storage
from gpuhub.containers.readiness import wait_ready
from gpuhub.errors import GpuhubError, ImageMissing, InvalidRequest, NodeUnreachable
from gpuhub.guard.container import ensure_guard
from gpuhub.identity import Identity
from gpuhub.settings import Cluster, Profile
from gpuhub.trust import notebooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What does not change from one start to the next."""

    instance: str
    cluster: Cluster
    daemons: Daemons
    head_address: str
    #: The authorities for TLS with notebooks; None without it.
    certificates: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What the spawner does between the steps: remember, tell, and report to the broker."""

    created: Callable[[str], Awaitable[None]]
    tell: Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A notebook's container and where it answers."""

    container: str
    address: str
    port: int
    #: It was started with a certificate.
    is_tls: bool

    @property
    def origin(self) -> str:
        """Such as `https://10.77.0.11:32768`."""
        return f"{urls.scheme(tls=self.is_tls)}://{urls.in_url(self.address)}:{self.port}"


def spec_of(
    around: Surroundings,
    lease: Lease,
    profile: Profile,
    identity: Identity,
    network: networks.UserNetwork,
    *,
    environment: Mapping[str, str],
    command: Sequence[str],
) -> ContainerSpec:
    """The notebook container of a granted lease."""
    return build_notebook(
        place=Place(
            instance=around.instance,
            cluster=around.cluster,
            node=around.cluster.node(lease.nodes[0]),
            gpu_uuids=tuple(gpu.uuid for gpu in lease.gpus),
            gpu_share=max((gpu.share for gpu in lease.gpus), default=1),
            memory_cap_mib=min((gpu.memory_cap_mib for gpu in lease.gpus if gpu.memory_cap_mib), default=None),
            subnet=network.subnet,
            head_address=around.head_address,
        ),
        lease=lease,
        profile=profile,
        identity=identity,
        environment=environment,
        command=command,
    )


async def launch(
    around: Surroundings,
    node: str,
    spec: ContainerSpec,
    identity: Identity,
    network: networks.UserNetwork,
    *,
    api_path: str,
    steps: Steps,
) -> Running:
    """Create and start the container and wait until the notebook answers.

    Raises:
        GpuhubError: with the step that failed; the container may exist.
    """
    daemons = around.daemons
    steps.tell("Starting the container", 50)
    await asyncio.gather(
        networks.ensure_access_network(daemons, around.cluster, around.instance, node),
        ensure_guard(daemons, around.cluster, around.instance, node),
    )
    storage = around.cluster.storage
    async with telling_storage(daemons, node, storage, identity.name):
        certificate = await _issue(around, node, identity)
        made = await creation.ensure_created(daemons, node, spec, adopt=False)
        await asyncio.gather(
            steps.created(made.id),
            creation.name_user(daemons, node, made.id, identity, storage, certificate=certificate),
        )
        address, port = await daemons.run(node, lambda client: _start(client, made.id), mounting=True)
    tls = None if around.certificates is None else notebooks.client_context(around.certificates)
    running = Running(container=made.id, address=address, port=port, is_tls=tls is not None)
    steps.tell("Connecting your network; JupyterLab starts", 70)
    # The overlay takes half a second to join, the server longer to boot: side by side.
    async with asyncio.TaskGroup() as group:
        group.create_task(networks.connect(daemons, node, made.id, network))
        group.create_task(wait_ready(daemons, node, made.id, running.origin + api_path, tls=tls))
    return running


async def _issue(around: Surroundings, node: str, identity: Identity) -> notebooks.Issued | None:
    """A certificate for a notebook on that node; None without TLS."""
    if around.certificates is None:
        return None
    address = around.cluster.node(node).address
    return await asyncio.to_thread(notebooks.issue, around.certificates, identity.name, address)


def _start(client: Any, container: str) -> tuple[str, int]:
    client.start(container)
    return published_address(client.port(container, NOTEBOOK_PORT))


def published_address(bindings: Sequence[Mapping[str, str]] | None) -> tuple[str, int]:
    """Address and port from `APIClient.port`.

    Raises:
        GpuhubError: nothing is published: the container has ended.
    """
    if not bindings:
        raise GpuhubError("The notebook ended as soon as it was started; its log is in the hub's log.")
    return bindings[0]["HostIp"], int(bindings[0]["HostPort"])


async def find_running(around: Surroundings, node: str, lease: Lease) -> tuple[Running, str] | None:
    """The running container of this very grant, with the hub token in it; None when there is none."""
    name = names.notebook_container(around.instance, lease.owner, lease.subject)
    found = await creation.inspect(around.daemons, node, name)
    labels = {
        names.LABEL_INSTANCE: around.instance,
        names.LABEL_KIND: names.KIND_NOTEBOOK,
        names.LABEL_LEASE: lease.id,
        names.LABEL_EPOCH: str(lease.epoch),
        names.LABEL_OWNER: lease.owner,
    }
    if found is None or not found["State"]["Running"] or not creation.is_same_grant(found, labels):
        return None
    environment = dict(line.partition("=")[::2] for line in found["Config"]["Env"])
    bindings = (found["NetworkSettings"]["Ports"] or {}).get(f"{NOTEBOOK_PORT}/tcp")
    address, port = published_address(bindings)
    is_tls = "JUPYTERHUB_SSL_KEYFILE" in environment
    running = Running(container=found["Id"], address=address, port=port, is_tls=is_tls)
    return running, environment["JUPYTERHUB_API_TOKEN"]


async def check_image(around: Surroundings, profile: Profile, candidates: Sequence[str]) -> None:
    """Refuse a start that would fail for want of the image, before a GPU is asked for.

    Raises:
        ImageMissing: with the nodes that lack it; nodes that do not answer are not counted.
    """

    async def lacks(node: str) -> bool:
        try:
            await around.daemons.call(node, "inspect_image", profile.image)
        except ImageMissing:
            return True
        except NodeUnreachable:
            return False
        return False

    lacking = await asyncio.gather(*map(lacks, candidates))
    missing = [node for node, is_missing in zip(candidates, lacking, strict=True) if is_missing]
    if missing:
        raise ImageMissing(
            f"The image {profile.image} is not on {', '.join(missing)} yet. "
            "The administrator sends it there with: sudo make up"
        )


def choose_profile(cluster: Cluster, options: object) -> Profile:
    """The profile in what a form or the REST API sent: `{"profile": name}` and nothing else.

    Raises:
        InvalidRequest: for anything else, with what is valid.
    """
    valid = ", ".join(profile.name for profile in cluster.profiles)
    if not isinstance(options, dict):
        raise InvalidRequest(f'The options must be {{"profile": NAME}}; NAME is one of: {valid}')
    unknown = sorted(str(key)[:40] for key in options if key != "profile")
    if unknown:
        raise InvalidRequest(f"There is no option {', '.join(unknown)}; the only one is profile, one of: {valid}")
    name = options.get("profile")
    if name is None:
        raise InvalidRequest(f"No profile was chosen; choose one of: {valid}")
    profile = cluster.profile(name) if isinstance(name, str) else None
    if profile is None:
        raise InvalidRequest(f"There is no profile {str(name)[:60]!r}; choose one of: {valid}")
    return profile


def check_server_name(name: str) -> None:
    """Refuse a named server whose name could mean something elsewhere; the empty one is the default server.

    Raises:
        InvalidRequest: with what is valid.
    """
    if name and not re.fullmatch(names.SERVER_PATTERN, name):
        raise InvalidRequest(
            f"Server name {name[:60]!r}: 1 to 32 of a-z, 0-9 and '-' are needed, with a letter or digit at both ends"
        )
