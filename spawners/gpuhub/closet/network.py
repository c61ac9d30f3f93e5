"""The closet's switch and links on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from gpuhub.closet import commands, shell
from gpuhub.closet.plan import ClosetNode, Plan

NETNS_FOLDER = Path("/run/netns")
_INTERFACES = Path("/sys/class/net")


def ensure_network(plan: Plan) -> None:
    """Make what is missing of bridge, namespaces, links, speeds and the firewall rule."""
    if not has_link(plan.bridge):
        for command in commands.build_bridge(plan):
            shell.run(command)
    for node in plan.nodes:
        if not (has_netns(plan, node) and has_link(plan.netns(node))):
            _remove_node(plan, node)
            for command in commands.build_node_network(plan, node):
                shell.run(command)
        for command in commands.build_shaping(plan, node):
            shell.run(command)
    if not has_forward_rule(plan):
        shell.run(commands.build_iptables("-I", commands.build_forward_rule(plan)))


def remove_network(plan: Plan) -> None:
    """Remove all of it; what is gone already is no mistake."""
    for command in commands.build_removal(plan):
        shell.succeeds(command)
    while has_forward_rule(plan):
        shell.run(commands.build_iptables("-D", commands.build_forward_rule(plan)))
    if NETNS_FOLDER.is_dir() and not any(NETNS_FOLDER.iterdir()):
        # `ip netns add` mounts the folder onto itself, and would do so again.
        shell.succeeds(("umount", str(NETNS_FOLDER)))


def _remove_node(plan: Plan, node: ClosetNode) -> None:
    shell.succeeds(("ip", "link", "delete", plan.netns(node)))
    shell.succeeds(("ip", "netns", "delete", plan.netns(node)))


def has_link(name: str) -> bool:
    """Whether this machine has the network interface."""
    return (_INTERFACES / name).exists()


def has_netns(plan: Plan, node: ClosetNode) -> bool:
    """Whether the node's network namespace is mounted under its name."""
    return (NETNS_FOLDER / plan.netns(node)).exists()


def has_forward_rule(plan: Plan) -> bool:
    """Whether the firewall lets the nodes reach each other by our rule."""
    if shutil.which("iptables") is None:
        return False
    return shell.succeeds(commands.build_iptables("-C", commands.build_forward_rule(plan)))


def netns_id(plan: Plan, node: ClosetNode) -> tuple[int, int] | None:
    """Device and inode of the node's network namespace, by which its processes are known; None when there is none."""
    try:
        status = (NETNS_FOLDER / plan.netns(node)).stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
