"""The closet's network on this machine: a bridge as the switch, and a namespace with a link for each node.

Its name server answers every query at once with "no such name". A closet has no connection to other networks: without
this server, Docker's resolver forwards to the machine's, which a node cannot reach. torch's store asks for the name of
each peer's address, and every query would take ten seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from gpuhub.common.paths import Paths
from gpuhub_closet import shell
from gpuhub_closet.paths import run_folder
from gpuhub_closet.topology import ClosetNode, ClosetPlan, NodeLink

_DNS_STOP_TIMEOUT_S = 5.0
NETNS_FOLDER = Path("/run/netns")
_INTERFACES = Path("/sys/class/net")
Command = tuple[str, ...]


def build_bridge(plan: ClosetPlan) -> tuple[Command, ...]:
    """Return the commands that make the switch, with this machine as the head node on it."""
    head = f"{plan.head}/{plan.subnet.prefixlen}"
    return (
        ("ip", "link", "add", plan.bridge, "type", "bridge"),
        ("ip", "address", "replace", head, "dev", plan.bridge),
        ("ip", "link", "set", plan.bridge, "up"),
    )


def build_node_network(plan: ClosetPlan, node: ClosetNode) -> tuple[Command, ...]:
    """Return the commands that make a node's network namespace and join its link to the switch.

    A node has no default route: the closet has no connection to other networks, and attempts fail at once.
    """
    name, address = plan.netns_name(node), f"{node.address}/{plan.subnet.prefixlen}"
    inside = ("ip", "-netns", name)
    return (
        ("ip", "netns", "add", name),
        ("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name),
        ("ip", "link", "set", name, "master", plan.bridge),
        ("ip", "link", "set", name, "up"),
        (*inside, "link", "set", "lo", "up"),
        (*inside, "address", "replace", address, "dev", "eth0"),
        (*inside, "link", "set", "eth0", "up"),
    )


def build_shaping(plan: ClosetPlan, node: ClosetNode) -> tuple[Command, ...]:
    """Return the commands that limit both directions of a node's link to the plan's speed."""
    if plan.link is None:
        return ()
    name = plan.netns_name(node)
    return (
        ("tc", "qdisc", "replace", "dev", name, *_build_bucket(plan.link)),
        ("tc", "-netns", name, "qdisc", "replace", "dev", "eth0", *_build_bucket(plan.link)),
    )


def _build_bucket(link: NodeLink) -> Command:
    # The burst must hold a few of the 64 KiB segments that virtual links do not split.
    burst_kib = max(256, link.rate_mbit)
    return ("root", "tbf", "rate", f"{link.rate_mbit}mbit", "burst", f"{burst_kib}kb", "latency", "20ms")


def build_forward_rule(plan: ClosetPlan) -> Command:
    """Return the rule that lets nodes reach each other: bridged packets pass this machine's FORWARD chain."""
    comment = ("-m", "comment", "--comment", f"closet of {plan.instance}")
    return ("FORWARD", "-i", plan.bridge, "-o", plan.bridge, *comment, "-j", "ACCEPT")


def build_iptables(action: str, rule: Command) -> Command:
    """Return an iptables command; `action` is -I (insert), -C (check) or -D (delete)."""
    return ("iptables", "--wait", "10", action, *rule)


def build_removal(plan: ClosetPlan) -> tuple[Command, ...]:
    """Return the commands that remove links, namespaces and bridge; each fails if its object is gone already."""
    links = tuple(("ip", "link", "delete", plan.netns_name(node)) for node in plan.nodes)
    spaces = tuple(("ip", "netns", "delete", plan.netns_name(node)) for node in plan.nodes)
    return (*links, *spaces, ("ip", "link", "delete", plan.bridge))


def ensure_network(plan: ClosetPlan) -> None:
    """Make the bridge, namespaces, links, speeds and the firewall rule where they are missing."""
    if not has_link(plan.bridge):
        for command in build_bridge(plan):
            shell.run_command(command)
    for node in plan.nodes:
        if not (has_netns(plan, node) and has_link(plan.netns_name(node))):
            _remove_node(plan, node)
            for command in build_node_network(plan, node):
                shell.run_command(command)
        for command in build_shaping(plan, node):
            shell.run_command(command)
    if not has_forward_rule(plan):
        shell.run_command(build_iptables("-I", build_forward_rule(plan)))


def remove_network(plan: ClosetPlan) -> None:
    """Remove the network; missing parts are ignored."""
    for command in build_removal(plan):
        shell.is_successful(command)
    while has_forward_rule(plan):
        shell.run_command(build_iptables("-D", build_forward_rule(plan)))
    if NETNS_FOLDER.is_dir() and not any(NETNS_FOLDER.iterdir()):
        # `ip netns add` mounts the folder onto itself, and would do so again.
        shell.is_successful(("umount", str(NETNS_FOLDER)))


def _remove_node(plan: ClosetPlan, node: ClosetNode) -> None:
    shell.is_successful(("ip", "link", "delete", plan.netns_name(node)))
    shell.is_successful(("ip", "netns", "delete", plan.netns_name(node)))


def has_link(name: str) -> bool:
    """Return whether this machine has the network interface."""
    return (_INTERFACES / name).exists()


def has_netns(plan: ClosetPlan, node: ClosetNode) -> bool:
    """Return whether the node's network namespace is mounted under its name."""
    return (NETNS_FOLDER / plan.netns_name(node)).exists()


def has_forward_rule(plan: ClosetPlan) -> bool:
    """Return whether the firewall has the closet's rule."""
    if shutil.which("iptables") is None:
        return False
    return shell.is_successful(build_iptables("-C", build_forward_rule(plan)))


def netns_id(plan: ClosetPlan, node: ClosetNode) -> tuple[int, int] | None:
    """Return device and inode of the node's network namespace, which identify its processes; None without one."""
    try:
        status = (NETNS_FOLDER / plan.netns_name(node)).stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def build_dns_command(plan: ClosetPlan, pid_file: Path) -> tuple[str, ...]:
    """Return the command that starts dnsmasq on the head's address, in the background."""
    return (
        "dnsmasq",
        "--conf-file=/dev/null",
        "--no-resolv",
        "--no-hosts",
        "--bind-interfaces",
        f"--listen-address={plan.head}",
        "--except-interface=lo",
        "--local=/#/",
        "--user=root",
        f"--pid-file={pid_file}",
    )


def ensure_dns(plan: ClosetPlan, paths: Paths) -> None:
    """Start the name server unless it runs."""
    if find_dns_process(paths) is None:
        shell.run_command(build_dns_command(plan, _dns_pid_file(paths)))


def find_dns_process(paths: Paths) -> int | None:
    """Return the name server's process id; None when it does not run."""
    try:
        pid = int(_dns_pid_file(paths).read_text())
        is_ours = str(_dns_pid_file(paths)) in Path(f"/proc/{pid}/cmdline").read_text()
    except (OSError, ValueError):
        return None
    return pid if is_ours else None


def stop_dns(paths: Paths) -> None:
    """Stop the name server, and return when it is gone."""
    pid = find_dns_process(paths)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        shell.wait_until(lambda: find_dns_process(paths) is None, timeout_s=_DNS_STOP_TIMEOUT_S)


def _dns_pid_file(paths: Paths) -> Path:
    return run_folder(paths) / "dns.pid"
