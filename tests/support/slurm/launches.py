"""Launches, jobs and instances of ada's on a Slurm without Docker, as tests see them."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from contextlib import suppress
from pathlib import Path

from tests.support.hub.installed_laptop import Laptop
from tests.support.product import wait_for
from tests.support.slurm.hub import Cluster, leases
from tests.support.slurm.site import USERS

ALL_REDUCE = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "on", os.environ["GPUHUB_NODE"], "sum", total.item())
    dist.barrier()
    dist.destroy_process_group()
"""


def write(cluster: Cluster, name: str, script: str, user: str = "ada") -> None:
    """Write a file into the user's home."""
    file = cluster.site.users[user].home / name
    file.write_text(textwrap.dedent(script))
    shutil.chown(file, USERS[user], USERS[user])


def launches(cluster: Cluster) -> list[int]:
    """Return ada's Slurm jobs except that of the notebook, oldest first."""
    notebooks = {lease["slurm_job"] for lease in leases(cluster.ada) if lease["purpose"] == "notebook"}
    return [job for job in cluster.jobs_of("ada") if job not in notebooks]


def workers() -> list[int]:
    """Return the processes of all workers, engines and ranks."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_adas = entry.stat().st_uid == USERS["ada"]
                command = (entry / "cmdline").read_bytes()
                is_worker = b"gpu-launch-worker" in command or b"gpu_launch.worker" in command
            except OSError:
                continue
            if is_adas and is_worker:
                pids.append(int(entry.name))
    return pids


def wait_free(cluster: Cluster) -> None:
    """Wait until only the notebook is left, in Slurm and on the nodes."""
    wait_for(lambda: not launches(cluster), "no job of a launch is left", 60)
    wait_for(lambda: not workers(), "no process of a launch is left", 30)


def jobs(cluster: Cluster) -> list[dict[str, object]]:
    """Return ada's jobs as the broker lists them, the newest first."""
    status, rows = cluster.ada.ask(cluster.ada.broker, "GET", "/jobs?ended=true")
    assert status == 200, rows
    return list(rows["jobs"] if isinstance(rows, dict) else rows)


def ssh(laptop: Laptop, host: str, command: str) -> list[str]:
    """Return the words that a command writes that OpenSSH's client runs on a host of the laptop's settings."""
    laptop.run("ssh-config")
    words = ("ssh", "-F", str(laptop.home / ".ssh/config"), host, command)
    done = subprocess.run(
        words, cwd=laptop.work, env=laptop.environ(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def find_processes(command: bytes) -> list[int]:
    """Return the processes whose command line contains this."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if command in (entry / "cmdline").read_bytes():
                    pids.append(int(entry.name))
    return pids
