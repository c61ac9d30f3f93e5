"""When programs answer, and the nodes' GPUs are read."""

from __future__ import annotations

import ssl
import time
from collections.abc import Collection
from dataclasses import dataclass

import httpx

from gpuhub.broker_api.schemas import ClusterView, NodeState
from gpuhub.common import gpu as gpus
from gpuhub.common import secrets
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.head_address import format_host, url_scheme
from gpuhub.ops.deploy import programs
from gpuhub.tls import public_access
from gpuhub.web.text import build_card

#: States of nodes whose GPUs cannot be read; those of a cordoned node can.
_SILENT = frozenset({NodeState.UNREACHABLE, NodeState.DOWN})


def wait_for_public_url(cluster: settings.ClusterSettings, paths: Paths) -> None:
    """Return when the hub answers at its public address, with the certificate that it should have."""
    https = public_access.find_certificate_files(cluster, paths)
    origin = f"{url_scheme(tls=https is not None)}://{format_host(cluster.hub.bind)}:{cluster.hub.port}"
    tls = None if https is None else public_access.build_pinned_context(https.certificate)
    wait_for_http(f"{origin}/hub/health", 60, paths, programs.HUB, tls=tls)


def wait_for_http(url: str, deadline_s: float, paths: Paths, name: str, *, tls: ssl.SSLContext | None = None) -> None:
    """Return when a program answers at a URL.

    Raises:
        SetupError: It does not in time; the text has the last lines of its log.
    """
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            if httpx.get(url, timeout=5, trust_env=False, verify=tls or True).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.1)
    log = paths.log / f"{name}.log"
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:] if log.exists() else []
    raise SetupError(
        "\n".join([f"{name} does not answer at {url} after {deadline_s:.0f} s; the last lines of {log}:", *tail])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpus:
    """What the broker has read of the nodes."""

    #: The GPUs of each node by its name.
    gpus: dict[str, list[gpus.GpuSpec]]
    #: A line for each node that answers, and whose GPUs could not be read.
    unread: tuple[str, ...]


def wait_for_gpus(
    broker_url: str, paths: Paths, deadline_s: float, tls: ssl.SSLContext | None, *, away: Collection[str] = ()
) -> FoundGpus:
    """Return each node's GPUs once the broker has read those of every node but guests, or when the time is over.

    Args:
        away: Nodes that do not answer, which are not waited for.

    Raises:
        SetupError: No node was read in time; the broker's reasons are in the text.
        SettingsError: Two nodes report the same GPU.
    """
    headers = {"Authorization": f"token {secrets.read_secret(paths, secrets.BROKER_TOKEN)}"}
    end = time.monotonic() + deadline_s
    with httpx.Client(trust_env=False, timeout=10, headers=headers, verify=tls or True) as client:
        while True:
            answer = client.get(f"{broker_url}/api/v1/cluster")
            answer.raise_for_status()
            view = ClusterView.model_validate_json(answer.content)
            nodes = tuple(node for node in view.nodes if not node.guest and node.name not in away)
            view = view.model_copy(update={"nodes": nodes})
            unread = [node for node in nodes if node.state in _SILENT or not node.gpus]
            if unread and time.monotonic() < end:
                time.sleep(0.2)
                continue
            lines = [f"{node.name}: {node.message or 'has no GPU'}" for node in unread]
            if len(unread) == len(nodes):
                raise SetupError("\n  ".join([f"no GPUs could be read within {deadline_s:.0f} s on:", *lines]))
            check_unique_gpus(view)
            return FoundGpus(gpus=group_gpus(view), unread=tuple(lines))


def check_unique_gpus(view: ClusterView) -> None:
    """Check that every GPU is reported by one node only.

    Raises:
        SettingsError: A line for each GPU that several nodes report, with their names.
    """
    owners: dict[str, list[str]] = {}
    for node in view.nodes:
        for gpu in node.gpus:
            owners.setdefault(gpu.uuid, []).append(node.name)
    lines = [
        f"nodes {' and '.join(names)} report the same GPU {uuid}: are they two entries for one machine? Remove one"
        for uuid, names in owners.items()
        if len(names) > 1
    ]
    if lines:
        raise SettingsError("\n".join(lines))


def group_gpus(view: ClusterView) -> dict[str, list[gpus.GpuSpec]]:
    """Return the GPUs of each node by its name."""
    return {node.name: [build_card(gpu) for gpu in node.gpus] for node in view.nodes}
