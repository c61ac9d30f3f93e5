"""The GPUs of this machine as nodes of a slow network: each has a network namespace, whose link has a given speed.

The links end at a bridge, as cables do at a switch. NCCL takes the nodes for different machines. It needs root, and
the commands `ip` and `tc`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from tests.support.launch.launched_ranks import RankOutput, run_launched
from tests.support.network_namespaces import Machines, machines

INTERFACE = "eth0"
_NODES = Machines("ghgpu", "10.79.0")


def shaped_nodes(count: int, rate_mbit: int) -> AbstractContextManager[Machines]:
    """That many nodes with links of this speed."""
    return machines(_NODES.name, _NODES.prefix, count, f"{rate_mbit}mbit")


def run_on_nodes(command: Sequence[str], ranks: int, environ: Mapping[str, str]) -> list[RankOutput]:
    """Run a command in the first nodes, one rank with one GPU on each, and check that all succeed."""
    outputs = run_launched(
        command,
        ranks,
        {"NCCL_SOCKET_IFNAME": INTERFACE, "NCCL_IB_DISABLE": "1"} | dict(environ),
        address=_NODES.address(0),
        interface=INTERFACE,
        prefixes=[_list_words(number) for number in range(ranks)],
    )
    assert [rank.code for rank in outputs] == [0] * ranks, "\n".join(rank.stdout + rank.stderr for rank in outputs)
    return outputs


def _list_words(number: int) -> tuple[str, ...]:
    """Return the words before a command that run it on a node, with the node's GPU."""
    node = _NODES.namespace(number)
    environ = (f"CUDA_VISIBLE_DEVICES={number}", f"NCCL_HOSTID={node}", f"GPUHUB_NODE={node}")
    return ("nsenter", f"--net=/run/netns/{node}", "env", *environ)
