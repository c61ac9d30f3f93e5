"""The nodes of a practice closet as existing machines: a head node of their own, with a cluster.toml that names them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpuhub_closet.paths import node_paths

ROOT = Path(__file__).parents[3]
INSTANCE = "ghset"

SETTINGS = """
[users]
login = "password"
allowed = ["ada"]
uid_first = 20000
[hub]
address = "{head}"
https = "local"
port = 18200
api_port = 18281
broker_port = 18210
proxy_api_port = 18201
[storage]
home = "/var/lib/{instance}/homes/{{username}}"
[[profiles]]
name = "gpu"
title = "A GPU"
cpus = 1
memory = "1G"
shm = "64M"
{more}
"""


def run_gpuhub(*words: str | Path, agent: str = "") -> subprocess.CompletedProcess[str]:
    """Run the administrator's command with the settings' file as the last argument."""
    program = Path(sys.executable).with_name("gpuhub")
    *command, file = map(str, words)
    environment = {name: value for name, value in os.environ.items() if name != "SUDO_USER"}
    return subprocess.run(
        [str(program), *command, "--instance", INSTANCE, "--cluster-file", file],
        cwd=ROOT,
        env={**environment, "SSH_AUTH_SOCK": agent},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def write_settings(closet: Any, folder: Path, further: str = "", count: int = 3) -> Path:
    """Write settings that name the closet's first nodes like any machines."""
    nodes = "".join(
        f'[[nodes]]\nname = "{node.name}"\naddress = "{node.address}"\ndocker = "{node_paths(closet.paths, node).docker_url}"\n'
        for node in closet.plan.nodes[:count]
    )
    file = folder / "cluster.toml"
    file.write_text(SETTINGS.format(head=closet.plan.head, instance=INSTANCE, more=further) + nodes, encoding="utf-8")
    return file
