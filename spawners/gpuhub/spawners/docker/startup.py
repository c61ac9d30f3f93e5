"""Starts a notebook's container for a granted lease, and checks a start's options before."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuhub.broker_api.schemas import LeaseView
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, ImageMissing, InvalidRequest, NodeUnreachable
from gpuhub.common.names import NOTEBOOK_PORT
from gpuhub.config.head_address import format_host, url_scheme
from gpuhub.config.settings import ClusterSettings, ProfileSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker import networks
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.containers.container_lifecycle import translate_mount_errors
from gpuhub.docker.containers.container_spec import ContainerContext, ContainerSpec, build_notebook_spec
from gpuhub.docker.containers.firewall_container import ensure_firewall
from gpuhub.docker.containers.service_access import find_offered_services
from gpuhub.docker.data_network import join_data_network
from gpuhub.spawners.base import SPAWN_OPTIONS, is_kept, is_suspendable
from gpuhub.spawners.readiness import wait_container_ready
from gpuhub.tls import notebook_certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnContext:
    """Values that all starts of a hub have in common."""

    instance: str
    cluster: ClusterSettings
    daemons: DockerClients
    head_address: str
    #: Folder of the authorities for TLS with notebooks; None without TLS.
    certificates: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnCallbacks:
    """Callbacks of a start: `created` with the container's id, `report` with a message and a percentage."""

    created: Callable[[str], Awaitable[None]]
    report: Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNotebook:
    """A notebook's container and its published address."""

    container: str
    address: str
    port: int
    #: Whether it was started with a certificate.
    is_tls: bool

    @property
    def origin(self) -> str:
        """Return the origin of its URL, such as `https://10.77.0.11:32768`."""
        return f"{url_scheme(tls=self.is_tls)}://{format_host(self.address)}:{self.port}"


def build_spec(
    context: SpawnContext,
    lease: LeaseView,
    profile: ProfileSettings,
    identity: UserIdentity,
    network: networks.UserNetwork,
    *,
    environment: Mapping[str, str],
    command: Sequence[str],
    groups: Collection[str],
    staged: Mapping[str, str] | None = None,
) -> ContainerSpec:
    """Build the notebook container of a granted lease.

    Args:
        groups: The owner's groups.
        staged: Volumes of copies of datasets.
    """
    return build_notebook_spec(
        context=ContainerContext(
            instance=context.instance,
            cluster=context.cluster,
            node=context.cluster.node(lease.nodes[0]),
            gpu_uuids=tuple(gpu.uuid for gpu in lease.gpus),
            gpu_share=max((gpu.share for gpu in lease.gpus), default=1),
            memory_cap_mib=min((gpu.memory_cap_mib for gpu in lease.gpus if gpu.memory_cap_mib), default=None),
            subnet=network.subnet,
            head_address=context.head_address,
            staged=staged or {},
            services=find_offered_services(context.cluster, lease.owner, groups),
        ),
        lease=lease,
        profile=profile,
        identity=identity,
        environment=environment,
        command=command,
    )


async def start_notebook(
    context: SpawnContext,
    node: str,
    spec: ContainerSpec,
    identity: UserIdentity,
    network: networks.UserNetwork,
    *,
    api_path: str,
    callbacks: SpawnCallbacks,
) -> RunningNotebook:
    """Create and start the container, and wait until the notebook answers.

    Raises:
        GpuhubError: A step failed; the container may exist.
    """
    daemons = context.daemons

    def report_waiting() -> None:
        callbacks.report(f"Other notebooks are starting on {node}; yours is next", 45)

    async with daemons.start_slots.hold(node, report_waiting) as slot:
        callbacks.report("Starting the container", 50)
        await asyncio.gather(
            networks.ensure_access_network(daemons, context.cluster, context.instance, node),
            ensure_firewall(daemons, context.cluster, context.instance, node),
        )
        running, tls = await _run_container(context, node, spec, identity, callbacks.created)
        slot.release_later()

        def report_retry() -> None:
            callbacks.report(f"Docker on {node} waits for the nodes that keep your network; trying again", 75)

        callbacks.report("Connecting your network; JupyterLab starts", 70)
        # In parallel: connecting the network takes half a second, and starting the server takes longer.
        async with asyncio.TaskGroup() as group:
            group.create_task(
                _connect_networks(
                    context,
                    node,
                    running.container,
                    network,
                    has_data_network="GPUHUB_DATA_SUBNET" in spec.environment,
                    report_retry=report_retry,
                )
            )
            group.create_task(
                wait_container_ready(daemons, node, running.container, running.origin + api_path, tls=tls)
            )
    return running


async def _connect_networks(
    context: SpawnContext,
    node: str,
    container: str,
    network: networks.UserNetwork,
    *,
    has_data_network: bool,
    report_retry: Callable[[], None],
) -> None:
    await networks.connect_container(context.daemons, node, container, network, report_retry=report_retry)
    if has_data_network:
        await join_data_network(context.daemons, context.cluster, node, container, network)


async def _run_container(
    context: SpawnContext,
    node: str,
    spec: ContainerSpec,
    identity: UserIdentity,
    created: Callable[[str], Awaitable[None]],
) -> tuple[RunningNotebook, ssl.SSLContext | None]:
    """Create and start the container; return it with the context for TLS with it."""
    daemons, storage = context.daemons, context.cluster.storage
    async with translate_mount_errors(daemons, node, storage, identity.name):
        certificate = await _issue_certificate(context, node, identity)
        container = await container_lifecycle.ensure_created(daemons, node, spec, adopt=False)
        await asyncio.gather(
            created(container.id),
            container_lifecycle.inject_identity(
                daemons, node, container.id, identity, storage, certificate=certificate
            ),
        )
        address, port = await daemons.run(
            node, lambda client: _start_container(client, container.id), kind=CallKind.MOUNTING
        )
    tls = None if context.certificates is None else notebook_certificate.load_client_context(context.certificates)
    return RunningNotebook(container=container.id, address=address, port=port, is_tls=tls is not None), tls


async def _issue_certificate(
    context: SpawnContext, node: str, identity: UserIdentity
) -> notebook_certificate.NotebookCertificate | None:
    """Issue a certificate for a notebook on the node; None without TLS."""
    if context.certificates is None:
        return None
    address = context.cluster.node(node).address
    return await asyncio.to_thread(notebook_certificate.issue_certificate, context.certificates, identity.name, address)


def _start_container(client: Any, container: str) -> tuple[str, int]:
    client.start(container)
    return parse_published_address(client.port(container, NOTEBOOK_PORT))


def parse_published_address(bindings: Sequence[Mapping[str, str]] | None) -> tuple[str, int]:
    """Return address and port from the result of `APIClient.port`.

    Raises:
        GpuhubError: No port is published because the container has ended.
    """
    if not bindings:
        raise GpuhubError("The notebook ended as soon as it was started; its log is in the hub's log.")
    return bindings[0]["HostIp"], int(bindings[0]["HostPort"])


async def find_running_notebook(
    context: SpawnContext, node: str, lease: LeaseView
) -> tuple[RunningNotebook, str] | None:
    """Return the running container of this very grant and the hub token in it, or None if there is none."""
    name = names.notebook_container_name(context.instance, lease.owner, lease.subject)
    description = await container_lifecycle.inspect_container(context.daemons, node, name)
    labels = {
        names.LABEL_INSTANCE: context.instance,
        names.LABEL_KIND: names.KIND_NOTEBOOK,
        names.LABEL_LEASE: lease.id,
        names.LABEL_EPOCH: str(lease.epoch),
        names.LABEL_OWNER: lease.owner,
    }
    if (
        description is None
        or not description["State"]["Running"]
        or not container_lifecycle.is_same_grant(description, labels)
    ):
        return None
    environment = dict(line.partition("=")[::2] for line in description["Config"]["Env"])
    bindings = (description["NetworkSettings"]["Ports"] or {}).get(f"{NOTEBOOK_PORT}/tcp")
    address, port = parse_published_address(bindings)
    is_tls = "JUPYTERHUB_SSL_KEYFILE" in environment
    running = RunningNotebook(container=description["Id"], address=address, port=port, is_tls=is_tls)
    return running, environment["JUPYTERHUB_API_TOKEN"]


async def check_image(context: SpawnContext, profile: ProfileSettings, candidates: Sequence[str]) -> None:
    """Refuse a start without its image before a GPU is requested.

    Raises:
        ImageMissing: Nodes lack the image; nodes that do not answer are ignored.
    """

    async def lacks(node: str) -> bool:
        try:
            await context.daemons.call(node, "inspect_image", profile.image)
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


def choose_profile(
    cluster: ClusterSettings, options: object, *, owner: str = "", groups: Collection[str] = ()
) -> ProfileSettings:
    """Return the profile that the form or the REST API names with `{"profile": name}`, with the `image` of its choice.

    Args:
        groups: The owner's groups.

    Raises:
        InvalidRequest: The options have another form, or the profile does not offer the image; the text names the
            valid ones.
        NotAllowed: The profile is restricted to groups that the owner is not in.
    """
    valid = ", ".join(profile.name for profile in cluster.profiles if profile.admits(groups)) or "(none)"
    if not isinstance(options, dict):
        raise InvalidRequest(f'The options must be {{"profile": NAME}}; NAME is one of: {valid}')
    unknown = sorted(str(key)[:40] for key in options if key not in SPAWN_OPTIONS)
    if unknown:
        raise InvalidRequest(
            f"There is no option {', '.join(unknown)}; there are image (one of the profile's), keep and suspend "
            f"(yes or no) and profile, one of: {valid}"
        )
    name = options.get("profile")
    if name is None:
        raise InvalidRequest(f"No profile was chosen; choose one of: {valid}")
    profile = cluster.profile(name) if isinstance(name, str) else None
    if profile is None:
        raise InvalidRequest(f"There is no profile {str(name)[:60]!r}; choose one of: {valid}")
    profile.check_groups(owner, groups)
    is_kept(options)
    is_suspendable(options)
    image = options.get("image")
    return profile.with_image(None if image is None else str(image))


def check_server_name(name: str) -> None:
    """Refuse an invalid name of a named server; the empty name is the default server.

    Raises:
        InvalidRequest: The name is invalid; the text states the rules.
    """
    if name and not re.fullmatch(names.SERVER_PATTERN, name):
        raise InvalidRequest(
            f"Server name {name[:60]!r}: 1 to 32 of a-z, 0-9 and '-' are needed, with a letter or digit at both ends"
        )
