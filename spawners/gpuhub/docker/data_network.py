"""The data network: ranks' containers on the nodes' own network cards, beside their user's overlay (`data_interface`).

Each node has one Docker network for it, a macvlan on its interface, which all users' containers join. Containers on one
node do not reach each other there; those on different nodes are separated by the firewall (`firewall.rules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuhub.common import names
from gpuhub.common.errors import GpuhubError
from gpuhub.config.machines.data_network import build_hardware_address, map_data_address
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.network_lifecycle import create_network, inspect_network, remove_outdated
from gpuhub.docker.networks import UserNetwork


async def join_data_network(
    daemons: DockerClients, cluster: ClusterSettings, node: str, container: str, network: UserNetwork
) -> None:
    """Connect a container, which has an address on its user's overlay, to the node's own network card.

    Raises:
        Conflict: Containers are still on a data network of other settings.
        GpuhubError: It did not get the addresses by which the firewall knows it.
    """
    await _ensure_data_network(daemons, cluster, node)
    name = names.data_network_name(daemons.instance)
    networks = await _read_networks(daemons, node, container)
    if name not in networks:
        address = _find_address(cluster, networks[network.name])
        await daemons.call(
            node,
            "connect_container_to_network",
            container,
            name,
            ipv4_address=address,
            mac_address=build_hardware_address(address),
        )
        networks = await _read_networks(daemons, node, container)
    _check_addresses(cluster, node, networks[network.name], networks[name])


def build_data_network(cluster: ClusterSettings, instance: str, node: NodeSettings) -> dict[str, Any]:
    """Build the arguments of `create_network` for a node's data network."""
    return {
        "driver": "macvlan",
        # No way to other networks, so that the containers' default route stays on the access bridge.
        "internal": True,
        "options": {"parent": node.data_interface, "macvlan_mode": "private"},
        "ipam": {"Driver": "default", "Config": [{"Subnet": cluster.network.data_pool}]},
        "labels": {names.LABEL_INSTANCE: instance},
    }


async def _ensure_data_network(daemons: DockerClients, cluster: ClusterSettings, node: str) -> None:
    name = names.data_network_name(daemons.instance)
    arguments = build_data_network(cluster, daemons.instance, cluster.node(node))
    network = await inspect_network(daemons, node, name)
    if network is not None and not _fits(network, arguments):
        explanation = f"containers on {node} are on the data network of before data_interface or data_pool was changed"
        await remove_outdated(daemons, node, network, explanation)
        network = None
    if network is None:
        await create_network(daemons, node, name, arguments)


def _fits(network: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    subnets = [config.get("Subnet") for config in network["IPAM"]["Config"]]
    options = network.get("Options") or {}
    return subnets == [arguments["ipam"]["Config"][0]["Subnet"]] and arguments["options"].items() <= options.items()


async def _read_networks(daemons: DockerClients, node: str, container: str) -> Mapping[str, Any]:
    description = await daemons.call(node, "inspect_container", container)
    networks: Mapping[str, Any] = description["NetworkSettings"]["Networks"]
    return networks


def _find_address(cluster: ClusterSettings, overlay: Mapping[str, Any]) -> str:
    try:
        return map_data_address(cluster.network, overlay["IPAddress"])
    except ValueError as error:
        raise GpuhubError(
            f"the container's address on its user's network gives it none for data_interface: {error}"
        ) from None


def _check_addresses(cluster: ClusterSettings, node: str, overlay: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    address = _find_address(cluster, overlay)
    if (data["IPAddress"], data["MacAddress"].lower()) != (address, build_hardware_address(address)):
        raise GpuhubError(
            f"Docker on {node} gave a container the data address {data['IPAddress']} ({data['MacAddress']}) instead of "
            f"{address} ({build_hardware_address(address)}), by which the firewall knows it: use another version of "
            "Docker there, or remove data_interface from the nodes"
        )
