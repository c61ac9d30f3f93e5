"""The torchrun command line of one node. Pure."""

from __future__ import annotations

import shlex

from gpu_launch.spec import LaunchSpec


def build_arguments(spec: LaunchSpec, *, node_rank: int, local_addr: str, capped: bool = False) -> list[str]:
    """torchrun's arguments on one node: static rendezvous, every rank's streams in files.

    With `capped` the ranks keep to the container's part of a GPU. That, and what goes between them and the notebook, is
    `ranks.script`'s to do.
    """
    arguments = [
        f"--nnodes={spec.roster.nnodes}",
        f"--node-rank={node_rank}",
        f"--nproc-per-node={spec.roster.nproc_per_node}",
        f"--master-addr={spec.master_addr}",
        f"--master-port={spec.master_port}",
        f"--local-addr={local_addr}",
        f"--rdzv-id={spec.run_id}",
        "--max-restarts=0",
        f"--log-dir={node_logs(spec, node_rank)}",
        "--redirects=3",
        *spec.passed,
    ]
    if (capped or spec.exchange) and not spec.no_python:
        exchange = ["--exchange", spec.exchange] if spec.exchange else []
        module = ["-m"] if spec.module else []
        return [*arguments, "--module", "gpu_launch.ranks.script", *exchange, *module, *spec.command]
    if spec.module:
        arguments.append("--module")
    if spec.no_python:
        arguments.append("--no-python")
    return [*arguments, *spec.command]


def node_logs(spec: LaunchSpec, node_rank: int) -> str:
    """The folder of one node's logs in one start; torchrun adds its own tree below."""
    again = f"-restart{spec.attempt}" if spec.attempt else ""
    return f"{spec.log_dir}/node{node_rank}{again}"


def build_by_hand(spec: LaunchSpec, addresses: list[str]) -> str:
    """What one would type on every node to get the same launch, one line a node."""
    lines = [
        shlex.join(["torchrun", *build_arguments(spec, node_rank=rank, local_addr=address)])
        for rank, address in enumerate(addresses)
    ]
    return "\n".join([f"# in {shlex.quote(spec.cwd)}, one line a node", *lines, ""])
