"""Whether the nodes' kernels can encrypt overlays: IPsec's ESP with AES-GCM, as Docker sets it up.

A short-lived container adds such a security association to its own, empty network. The kernel loads modules for it, or
answers with the reason why it cannot. The modules' names alone would not tell: they may be built in, or forbidden.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.docker import esp_script
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.probe_container import run_probe

#: The remedy for a node whose kernel cannot encrypt.
ENCRYPTION_ADVICE = (
    "boot a kernel with INET_ESP, XFRM_USER and CRYPTO_GCM (those of Debian and Ubuntu have them), or set encrypt = "
    "false below [network]"
)


async def find_error(daemons: DockerClients, node: str) -> str | None:
    """Return why the node's kernel cannot encrypt overlays; None if it can.

    Raises:
        ImageMissing: The node does not have the image yet.
        GpuhubError: The container could not run.
    """
    text = await run_probe(daemons, node, ["python3", "-c", inspect.getsource(esp_script)], build_host_config())
    return parse_answer(text)


def build_host_config() -> dict[str, Any]:
    """Build the arguments of `create_host_config`: only an empty network, which the container may configure."""
    return {
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "cap_add": ["NET_ADMIN"],
        "security_opt": ["no-new-privileges"],
        "read_only": True,
        "mem_limit": "128m",
        "pids_limit": 16,
    }


def parse_answer(text: str) -> str | None:
    """Return the kernel's reason in the script's output; None if the kernel can encrypt."""
    lines = text.strip().splitlines()
    last = lines[-1] if lines else "no output"
    if last == esp_script.SUCCESS:
        return None
    return f"its kernel cannot encrypt: {last.removeprefix(esp_script.FAILURE)}"


async def require_encryption(daemons: DockerClients, nodes: Sequence[str]) -> None:
    """Check that every node can encrypt overlays.

    Raises:
        SetupError: Some cannot; the text names each with the reason, and the remedy.
    """
    answers = await asyncio.gather(*(find_error(daemons, node) for node in nodes), return_exceptions=True)
    failures = []
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, GpuhubError):
            raise answer
        if answer is not None:
            failures.append(f"  {node}: {str(answer).removeprefix(f'node {node}: ')}")
    if failures:
        lines = "\n".join(failures)
        raise SetupError(f"network.encrypt = true, and not every node can do that:\n{lines}\n{ENCRYPTION_ADVICE}")
