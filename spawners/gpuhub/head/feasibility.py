"""What Slurm has for the settings, and which GPUs the broker has read, before the first user comes."""

from __future__ import annotations

import ssl
import time

import httpx

from gpuhub import gpus, secrets
from gpuhub.broker.schemas import ClusterView, NodeState
from gpuhub.containers.telling import card_of
from gpuhub.errors import SettingsError, SetupError
from gpuhub.paths import Paths
from gpuhub.settings import Cluster
from gpuhub.slurm.make import make_api
from gpuhub.slurm.site import check_site

#: A cordoned node is read like any other.
_SILENT = frozenset({NodeState.UNREACHABLE, NodeState.DOWN})


def wait_for_cards(
    broker_url: str, paths: Paths, deadline_s: float, tls: ssl.SSLContext | None
) -> dict[str, list[gpus.Card]]:
    """Each node's cards, once the GPUs of every node have been read.

    Raises:
        SetupError: a node has not been read in time; says what the broker says of it.
        SettingsError: two nodes report the same GPU.
    """
    headers = {"Authorization": f"token {secrets.read_secret(paths, secrets.BROKER_TOKEN)}"}
    end = time.monotonic() + deadline_s
    with httpx.Client(trust_env=False, timeout=10, headers=headers, verify=tls or True) as client:
        while True:
            answer = client.get(f"{broker_url}/api/v1/cluster")
            answer.raise_for_status()
            view = ClusterView.model_validate_json(answer.content)
            unread = [node for node in view.nodes if node.state in _SILENT or not node.gpus]
            if not unread:
                refuse_doubled(view)
                return cards_of(view)
            if time.monotonic() > end:
                lines = [f"  {node.name}: {node.message or 'has no GPU'}" for node in unread]
                raise SetupError("\n".join([f"no GPUs could be read within {deadline_s:.0f} s on:", *lines]))
            time.sleep(0.2)


async def check_slurm(cluster: Cluster) -> None:
    """Ask Slurm whether it has what the settings name.

    Raises:
        SetupError: Slurm does not answer, or is of too old a version.
        SettingsError: with a line for each thing that it has not, or would never grant.
    """
    api = make_api(cluster.slurm)
    try:
        mistakes = check_site(cluster, await api.site())
    finally:
        await api.close()
    if mistakes:
        raise SettingsError("\n".join(mistakes))


def refuse_doubled(view: ClusterView) -> None:
    """Refuse nodes that report the same GPU.

    Raises:
        SettingsError: with a line for each such GPU that names the nodes.
    """
    places: dict[str, list[str]] = {}
    for node in view.nodes:
        for gpu in node.gpus:
            places.setdefault(gpu.uuid, []).append(node.name)
    lines = [
        f"nodes {' and '.join(names)} report the same GPU {uuid}: two entries for one machine? Take one out"
        for uuid, names in places.items()
        if len(names) > 1
    ]
    if lines:
        raise SettingsError("\n".join(lines))


def cards_of(view: ClusterView) -> dict[str, list[gpus.Card]]:
    """Node → its cards."""
    return {node.name: [card_of(gpu) for gpu in node.gpus] for node in view.nodes}
