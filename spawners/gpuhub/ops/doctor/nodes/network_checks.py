"""Checks of what a node reaches, and of users' networks there: the MTU, encryption, the packet filter and the Swarm."""

from __future__ import annotations

from collections.abc import Iterator

from gpuhub.docker.esp_probe import ENCRYPTION_ADVICE
from gpuhub.docker.networks import compute_user_mtu, find_min_mtu
from gpuhub.ops.doctor.findings import Finding, failed, ok, warning
from gpuhub.ops.doctor.node_facts import DockerFacts, HostFacts
from gpuhub.ops.doctor.nodes.node_checks import NodeEnvironment

#: Prefixes of tunnels' interfaces; the kernel reports no kind for user-space WireGuard.
_TUNNELS = {"wg": "WireGuard", "tailscale": "Tailscale", "utun": "a tunnel", "tun": "a tunnel"}


def check_reach(host: HostFacts, environment: NodeEnvironment) -> Iterator[Finding]:
    """Check the addresses that the node and its containers must reach."""
    for name, port in environment.head_ports.items():
        address = f"{environment.head}:{port}"
        if host.reach.get(address) or port in environment.listening_ports:
            advice = f"let TCP {port} of the head node through its firewall"
            yield _check_address(host, name, address, f"the {name} on the head node", advice)
        else:
            value = f"the {name} at {address} was not checked: nothing listens there"
            yield warning(name, value, "`sudo make up`, then `gpuhub doctor`")
    for address in environment.swarm_managers:
        advice = "let TCP 2377 and 7946 and UDP 7946 and 4789 through between all nodes"
        yield _check_address(host, "nodes", address, "a manager of the Swarm", advice)
    for address in environment.nfs_servers:
        yield _check_address(host, "storage", address, "the file server", "let it through the server's firewall")


def _check_address(host: HostFacts, check: str, address: str, service: str, advice: str) -> Finding:
    answer = host.reach.get(address)
    if answer is None:
        return warning(check, f"{service} at {address} was not checked", "install bash, nc or python3 there")
    if answer:
        return ok(check, f"{service} can be reached at {address}")
    return failed(check, f"{service} cannot be reached at {address} from there", advice)


def check_network(host: HostFacts, environment: NodeEnvironment) -> Iterator[Finding]:
    """Check the MTU of the route, and the packet filter."""
    tunnels = (name for prefix, name in _TUNNELS.items() if host.device.startswith(prefix))
    kind = "WireGuard" if host.device_kind == "wireguard" else next(tunnels, None)
    mtu = min((size for size in (host.mtu, environment.measured_mtu) if size is not None), default=None)
    route = f"{host.device}{f' ({kind})' if kind else ''}" if host.device else "the route to it"
    if not environment.can_measure_mtu:
        yield warning("mtu", "not measured: the head node has no ping", "apt-get install iputils-ping there")
    if mtu is None:
        yield warning("mtu", "unknown", f"{environment.mtu} is assumed: set network.mtu if it is less")
    elif mtu < (least := find_min_mtu(is_encrypted=environment.is_encrypted)):
        yield failed(
            "mtu",
            f"{mtu} bytes over {route}",
            f"users' networks need {least} at least: increase it there",
        )
    elif mtu < environment.mtu:
        yield warning(
            "mtu",
            f"{mtu} bytes over {route}, and {environment.mtu} is assumed",
            f"set mtu = {mtu} below [network]: otherwise large transfers between nodes hang",
        )
    else:
        user_mtu = compute_user_mtu(
            environment.mtu, has_overlay=environment.has_overlay, is_encrypted=environment.is_encrypted
        )
        yield ok(
            "mtu",
            f"{mtu} bytes over {route}; users' networks get {user_mtu}",
        )
    if environment.is_encrypted and not environment.is_new:
        yield _check_encryption(environment.encryption_error)
    if environment.has_firewall:
        yield _check_filter(host, environment.firewall_status)


def _check_encryption(error: str | None) -> Finding:
    if error is None:
        return ok("encryption", "the kernel has IPsec's ESP for users' networks")
    return failed("encryption", error, ENCRYPTION_ADVICE)


def _check_filter(host: HostFacts, firewall_status: tuple[str, str]) -> Finding:
    state, reason = firewall_status
    if state == "ok":
        return ok("filter", "in place")
    if state == "failed":
        return failed(
            "filter",
            f"not in place: {reason}",
            "no container starts there until it is in place: `sudo make up` tries again",
        )
    if host.nf_tables:
        return ok("filter", "the kernel has nf_tables")
    return warning(
        "filter",
        "it is unknown whether the kernel has nf_tables",
        "the packet filter needs it: kernel 4.14 or newer",
    )


def check_swarm(docker: DockerFacts, environment: NodeEnvironment) -> Iterator[Finding]:
    """Check the node's membership of the Swarm, which connects users' networks."""
    if not environment.has_overlay:
        return
    if docker.swarm_state != "active":
        if environment.is_new:
            yield ok("swarm", "joins when the node is added")
        else:
            yield failed(
                "swarm", f"{docker.swarm_state}: users' networks do not reach it", "`sudo make up` lets it join"
            )
    elif environment.swarm_members is None:
        yield warning("swarm", "member of a Swarm; none of its managers answered whether it is gpuhub's")
    elif docker.swarm_node in environment.swarm_members:
        managers = [address for address in environment.swarm_members.values() if address]
        if environment.swarm_members.get(docker.swarm_node or "") and len(managers) < environment.wanted_managers:
            yield warning(
                "swarm",
                f"{len(managers)} of {environment.wanted_managers} nodes that should keep users' networks do: "
                f"{', '.join(sorted(managers))}",
                "start those that are down, let TCP 2377 through between them, then `sudo make up`; see docs/nodes.md",
            )
        else:
            yield ok("swarm", "member of gpuhub's Swarm")
    else:
        yield failed(
            "swarm",
            "member of another Swarm",
            "`docker swarm leave` there first (with --force on a manager): a daemon can be in one Swarm only",
        )
