"""The torchrun command line of a node."""

from __future__ import annotations

import shlex

from gpu_launch.common.launch_spec import LaunchSpec


def build_arguments(spec: LaunchSpec, *, node_rank: int, local_addr: str, capped: bool = False) -> list[str]:
    """Build torchrun's arguments on one node: static rendezvous, every rank's streams in files.

    With `capped` the ranks are limited to the container's GPU share. `worker.rank_main` applies that limit and the
    exchange of values.
    """
    arguments = [
        f"--nnodes={spec.membership.nnodes}",
        f"--node-rank={node_rank}",
        f"--nproc-per-node={spec.membership.nproc_per_node}",
        f"--master-addr={spec.master_addr}",
        f"--master-port={spec.master_port}",
        f"--local-addr={local_addr}",
        f"--rdzv-id={spec.run_id}",
        "--max-restarts=0",
        f"--log-dir={build_node_log_dir(spec, node_rank)}",
        "--redirects=3",
        *spec.torchrun_flags,
    ]
    if (capped or spec.exchange) and not spec.no_python:
        exchange = ["--exchange", spec.exchange] if spec.exchange else []
        module = ["-m"] if spec.module else []
        return [*arguments, "--module", "gpu_launch.worker.rank_main", *exchange, *module, *spec.command]
    if spec.module:
        arguments.append("--module")
    if spec.no_python:
        arguments.append("--no-python")
    return [*arguments, *spec.command]


def build_node_log_dir(spec: LaunchSpec, node_rank: int) -> str:
    """Return the folder of a node's logs in one start, in which torchrun creates its own tree."""
    suffix = f"-restart{spec.attempt}" if spec.attempt else ""
    return f"{spec.log_dir}/node{node_rank}{suffix}"


def format_commands(spec: LaunchSpec, addresses: list[str]) -> str:
    """Format the commands, one for each node, that would start the same launch by hand."""
    lines = [
        shlex.join(["torchrun", *build_arguments(spec, node_rank=rank, local_addr=address)])
        for rank, address in enumerate(addresses)
    ]
    return "\n".join([f"# in {shlex.quote(spec.cwd)}, one line a node", *lines, ""])
