"""How vLLM is started on each node, if an image has it: its own options for several nodes. Never run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_launch.serving.settings import ServerSettings

#: Port of the master; no other program in a job's container uses it.
MASTER_PORT = 29555


def build_command(
    settings: ServerSettings, folder: Path, *, node: int, nodes: int, cards: int, master: str
) -> tuple[str, ...]:
    """Return vLLM's command line on one node.

    The layers are divided between the nodes, and each layer between the cards of a node.

    Args:
        settings: What is served, and how.
        folder: The model's folder.
        node: The node's number.
        nodes: The number of nodes.
        cards: Cards of each node.
        master: Address of node 0.
    """
    words = ["vllm", "serve", str(folder), "--served-model-name", settings.name]
    words += ["--host", "127.0.0.1", "--port", str(settings.port), "--max-num-seqs", str(settings.slots)]
    if settings.context is not None:
        words += ["--max-model-len", str(settings.context)]
    if cards > 1:
        words += ["--tensor-parallel-size", str(cards)]
    if nodes > 1:
        words += ["--pipeline-parallel-size", str(nodes), "--nnodes", str(nodes), "--node-rank", str(node)]
        words += ["--master-addr", master, "--master-port", str(MASTER_PORT)]
        words += ["--headless"] if node else []
    return tuple(words)


def build_environ(environ: Mapping[str, str], stages: Sequence[range]) -> dict[str, str]:
    """Return the variables of vLLM: without those of a rank, and with the layers of each node."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        and not name.startswith(("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_"))
    }
    if len(stages) > 1:
        kept["VLLM_PP_LAYER_PARTITION"] = ",".join(str(len(layers)) for layers in stages)
    return kept
