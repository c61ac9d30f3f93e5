"""The commands that make and unmake a closet, as argument lists: pure."""

from __future__ import annotations

from gpuhub.closet.places import NodePlaces, cgroup
from gpuhub.closet.plan import ClosetNode, Link, Plan

Command = tuple[str, ...]

#: How long a node's start waits for a daemon of the same node that is still ending.
LOCK_WAIT_S = 30
#: How long dockerd gives its containers to end.
SHUTDOWN_S = 5

# Run inside the node's namespaces. Files of a daemon that was killed would mislead the next one: process ids in them
# may belong to something else by now. The two folders hold sockets that Docker keeps nowhere else, so each node gets
# its own, which vanish with it.
_START = """\
hostname "$1"
for folder in /run/docker /run/containerd; do
    mkdir -p "$folder"
    mount -t tmpfs -o mode=711 closet "$folder"
done
rm -rf -- "$2" "$3" "$4"
PATH="$5:$PATH"
shift 5
exec "$@"
"""


def build_bridge(plan: Plan) -> tuple[Command, ...]:
    """Make the switch, with this machine as the head node on it."""
    head = f"{plan.head}/{plan.subnet.prefixlen}"
    return (
        ("ip", "link", "add", plan.bridge, "type", "bridge"),
        ("ip", "address", "replace", head, "dev", plan.bridge),
        ("ip", "link", "set", plan.bridge, "up"),
    )


def build_node_network(plan: Plan, node: ClosetNode) -> tuple[Command, ...]:
    """Make a node's network namespace and plug its link into the switch.

    There is no default route: a closet has no way out, and what tries fails at once instead of waiting.
    """
    name, address = plan.netns(node), f"{node.address}/{plan.subnet.prefixlen}"
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


def build_shaping(plan: Plan, node: ClosetNode) -> tuple[Command, ...]:
    """Hold both directions of a node's link to the plan's speed."""
    if plan.link is None:
        return ()
    name = plan.netns(node)
    return (
        ("tc", "qdisc", "replace", "dev", name, *_bucket(plan.link)),
        ("tc", "-netns", name, "qdisc", "replace", "dev", "eth0", *_bucket(plan.link)),
    )


def _bucket(link: Link) -> Command:
    # The burst must hold a few of the 64 KiB segments that virtual links pass on whole.
    burst_kib = max(256, link.rate_mbit)
    return ("root", "tbf", "rate", f"{link.rate_mbit}mbit", "burst", f"{burst_kib}kb", "latency", "20ms")


def build_forward_rule(plan: Plan) -> Command:
    """The rule that lets nodes reach each other although bridged packets pass this machine's FORWARD chain."""
    comment = ("-m", "comment", "--comment", f"closet of {plan.instance}")
    return ("FORWARD", "-i", plan.bridge, "-o", plan.bridge, *comment, "-j", "ACCEPT")


def build_iptables(action: str, rule: Command) -> Command:
    """`action` is -I (insert), -C (is it there?) or -D (delete)."""
    return ("iptables", "--wait", "10", action, *rule)


def build_removal(plan: Plan) -> tuple[Command, ...]:
    """Remove the links, namespaces and the bridge; each command may fail because its object is gone already."""
    links = tuple(("ip", "link", "delete", plan.netns(node)) for node in plan.nodes)
    spaces = tuple(("ip", "netns", "delete", plan.netns(node)) for node in plan.nodes)
    return (*links, *spaces, ("ip", "link", "delete", plan.bridge))


def build_dockerd(plan: Plan, node: ClosetNode, places: NodePlaces) -> Command:
    """The node's daemon itself."""
    pool = plan.pool(node)
    bridge = pool.broadcast_address - 254
    return (
        "dockerd",
        "--config-file", str(places.daemon_file),
        "--host", places.docker_url,
        "--group", "root",
        "--data-root", str(places.data_root),
        "--exec-root", str(places.exec_root),
        "--pidfile", str(places.pid_file),
        "--exec-opt", "native.cgroupdriver=cgroupfs",
        "--cgroup-parent", f"/{cgroup(plan.instance)}/{node.name}",
        "--bip", f"{bridge}/24",
        "--default-address-pool", f"base={pool},size=24",
        "--shutdown-timeout", str(SHUTDOWN_S),
        "--log-level", "warn",
    )  # fmt: skip


def build_node_command(plan: Plan, node: ClosetNode, places: NodePlaces) -> Command:
    """Run the node in the foreground: SIGTERM ends it cleanly, SIGKILL (of any part) like a power cut.

    The node has its own network, host name, mounts and process ids. When its first process ends, the kernel ends
    all others and drops the mounts: nothing of a killed node is left over, and the next start finds a clean place.
    """
    start = ("sh", "-euc", _START, "sh", node.name)
    removed = (str(places.exec_root), str(places.pid_file), str(places.socket))
    return (
        # Inherited down to dockerd: the lock is free when the last process of the chain is gone.
        "flock", "--timeout", str(LOCK_WAIT_S), "--no-fork", str(places.lock),
        "docker-init", "-s", "-g", "--",
        "setpriv", "--pdeathsig", "KILL",
        "nsenter", f"--net=/run/netns/{plan.netns(node)}",
        "unshare", "--uts", "--mount", "--propagation", "slave",
        "--pid", "--fork", "--kill-child=KILL", "--mount-proc",
        *start, *removed, str(places.toolkit),
        "docker-init", "--", *build_dockerd(plan, node, places),
    )  # fmt: skip
