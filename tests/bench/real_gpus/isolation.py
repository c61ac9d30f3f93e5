"""The isolation of one real GPU of two in a container as gpuhub confines it: the other cannot be seen, opened or made.

Docker's `--device` passes the devices as the NVIDIA runtime passes those of a lease: a node in /dev, and a rule of the
container's device list.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker.containers.security import ContainerLimits, build_gpu_environment, build_security_options
from tests.bench.real_gpus.nodes import Node

ADA = UserIdentity(name="ada", uid=20001, gid=20001, group_names=("ada",))
LIMITS = ContainerLimits(cpus=4, memory=32 << 30, shm=1 << 30, pids=4096)
#: A user's attempts, with the errno of each; the arguments are the own GPU's number, the other's, the other's UUID, and
#: a folder of the user.
LOOK = """
import ctypes, errno, json, os, subprocess, sys
own, other, uuid, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
def attempt(work):
    try:
        work()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def opening(path):
    return attempt(lambda: os.close(os.open(path, os.O_RDWR)))
def ask(code, **environ):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environ)
    return done.stdout.split() or [done.stderr[-300:]]
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
made = folder + "/made"
print(json.dumps({
    "CapEff": status["CapEff"].strip(),
    "devices": sorted(name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()),
    "own": opening(f"/dev/nvidia{own}"),
    "other": opening(f"/dev/nvidia{other}"),
    "other, by a node that lies in a mount": opening(f"{folder}/nvidia{other}"),
    "mknod": attempt(lambda: os.mknod(made, 0o20666, os.makedev(195, other))),
    "other, by the node made": opening(made),
    "nvidia-smi": ask("import subprocess; print(subprocess.run(['nvidia-smi', '-L'], capture_output=True, text=True).stdout.count('UUID: GPU-'))"),
    "CUDA": ask("import torch; print(*(torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())))"),
    "CUDA, asked for the other": ask("import torch; print(torch.cuda.device_count())", CUDA_VISIBLE_DEVICES=uuid),
    "sum": ask("import torch; print(int(torch.ones(1000, 1000, device='cuda:0').sum().item()))"),
}))
"""


def run_attempts(
    node: Node, other: Node, home: Path, *, site: str, gpus: tuple[int, ...], **how: Any
) -> dict[str, Any]:
    """Run the attempts in a container on the node and return their results."""
    folder = home / f"isolation-{node.name}"
    folder.mkdir(exist_ok=True)
    os.chown(folder, ADA.uid, ADA.gid)
    for path in folder.iterdir():
        path.unlink()
    leaked = folder / f"nvidia{other.gpu}"
    os.mknod(leaked, stat.S_IFCHR | 0o666, Path(f"/dev/nvidia{other.gpu}").stat().st_rdev)
    leaked.chmod(0o666)
    command = ["sleep", "600"]
    container = node.start(command, build_gpu_environment([node.uuid]), home=home, site=site, gpus=gpus, **how)
    try:
        asked = ["python3", "-c", LOOK, str(node.gpu), str(other.gpu), other.uuid, f"/home/ada/{folder.name}"]
        code, output = container.exec_run(asked)
        assert code == 0, output.decode()
        results: dict[str, Any] = json.loads(output)
        return results
    finally:
        container.remove(force=True)


def isolation(nodes: list[Node], home: Path, site: str) -> list[str]:
    """Check every node's GPU against the next node's, and return a line for each.

    Raises:
        AssertionError: A container reached another GPU, or the check itself would not detect it.
    """
    # Docker's init would be in /sbin, which is the host's and read-only.
    confined = {**build_security_options(ADA, LIMITS), "init": False, "user": f"{ADA.uid}:{ADA.gid}"}
    lines = []
    for node, other in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        held = run_attempts(node, other, home, site=site, gpus=(node.gpu,), **confined)
        lines.append(f"{node.name}, as gpuhub starts it: {json.dumps(held)}")
        assert held == {
            "CapEff": "0000000000000000",
            "devices": [f"nvidia{node.gpu}"],
            "own": "done",
            "other": "ENOENT",
            "other, by a node that lies in a mount": "EPERM",
            "mknod": "EPERM",
            "other, by the node made": "ENOENT",
            "nvidia-smi": ["1"],
            "CUDA": [node.uuid.removeprefix("GPU-")],
            "CUDA, asked for the other": ["0"],
            "sum": ["1000000"],
        }, held
        # Root with Docker's default capabilities can create the node; the device list alone must still deny it.
        loose = run_attempts(node, other, home, site=site, gpus=(node.gpu,), user="0:0")
        lines.append(f"{node.name}, as root with Docker's defaults: {json.dumps(loose)}")
        assert (loose["mknod"], loose["other, by the node made"]) == ("done", "EPERM"), loose
        assert loose["CUDA"] == held["CUDA"], loose
        # With both GPUs, so that an attempt that fails for another reason is detected.
        both = run_attempts(node, other, home, site=site, gpus=(node.gpu, other.gpu), **confined)
        lines.append(f"{node.name}, with both GPUs: {json.dumps(both)}")
        assert both["other"] == both["other, by a node that lies in a mount"] == "done", both
        assert len(both["CUDA"]) == 2, both
        assert both["nvidia-smi"] == ["2"], both
    return [re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", lambda match: match[0][:8] + "…", line) for line in lines]
