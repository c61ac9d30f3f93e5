"""The GPUs of this machine as nodes of a slow network: each has a network namespace, whose link has a given speed.

The links end at a bridge, as cables do at a switch. NCCL takes the nodes for different machines. It needs root, and
the commands `ip` and `tc`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tests.support.launch.launched_ranks import RankOutput, run_launched

#: Of the first node.
ADDRESS = "10.79.0.1"
INTERFACE = "eth0"
_SWITCH = "ghgpu-switch"


def _name(number: int) -> str:
    return f"ghgpu-{number}"


@contextmanager
def shaped_nodes(count: int, rate_mbit: int) -> Iterator[None]:
    """That many nodes, each of which sends at this speed."""
    names = [_SWITCH, *map(_name, range(count))]
    try:
        for name in names:
            _ip("netns", "del", name, check=False)
            _ip("netns", "add", name)
        _ip("-n", _SWITCH, "link", "add", "switch", "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", "switch", "up")
        for number in range(count):
            node, port = _name(number), f"port{number}"
            _ip("link", "add", INTERFACE, "netns", node, "type", "veth", "peer", "name", port, "netns", _SWITCH)
            _ip("-n", _SWITCH, "link", "set", port, "master", "switch", "up")
            _ip("-n", node, "addr", "add", f"10.79.0.{number + 1}/24", "dev", INTERFACE)
            _ip("-n", node, "link", "set", "lo", "up")
            _ip("-n", node, "link", "set", INTERFACE, "up")
            shape = f"qdisc add dev {INTERFACE} root tbf rate {rate_mbit}mbit burst 512kb latency 50ms"
            subprocess.run(["tc", "-n", node, *shape.split()], check=True)
        yield
    finally:
        for name in names:
            _ip("netns", "del", name, check=False)


def run_on_nodes(command: Sequence[str], ranks: int, environ: Mapping[str, str]) -> list[RankOutput]:
    """Run a command in the first nodes, one rank with one GPU on each, and check that all succeed."""
    outputs = run_launched(
        command,
        ranks,
        {"NCCL_SOCKET_IFNAME": INTERFACE, "NCCL_IB_DISABLE": "1"} | dict(environ),
        address=ADDRESS,
        interface=INTERFACE,
        prefixes=[_list_words(number) for number in range(ranks)],
    )
    assert [rank.code for rank in outputs] == [0] * ranks, "\n".join(rank.stdout + rank.stderr for rank in outputs)
    return outputs


def _list_words(number: int) -> tuple[str, ...]:
    """Return the words before a command that run it on a node, with the node's GPU."""
    node = _name(number)
    environ = (f"CUDA_VISIBLE_DEVICES={number}", f"NCCL_HOSTID={node}", f"GPUHUB_NODE={node}")
    return ("nsenter", f"--net=/run/netns/{node}", "env", *environ)


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)
