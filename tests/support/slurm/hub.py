"""The real hub, broker and proxy with a real Slurm whose jobs are notebooks: the real jupyterhub-singleuser, which runs
as a user that Slurm's machines know and the head node does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.hub.installed_laptop import Laptop
from tests.support.hub.served_hub import ServedHub
from tests.support.hub.users import Client, log_in
from tests.support.product import ROOT, wait_for
from tests.support.slurm.site import USERS, SlurmSite, slurm_site

#: The server's name.
NB = "nb"
#: One GPU of each type, so that a second user waits. FURTHER is replaced by profiles and more.
SETTINGS = """
engine = "slurm"
[[nodes]]
name = "rig1"
slurm = "sx1"
address = "127.0.0.11"
docker = "unix:///run/gpuhub-nobody-listens-here.sock"
[[nodes]]
name = "rig2"
slurm = "sx2"
address = "127.0.0.12"
docker = "unix:///run/gpuhub-nobody-listens-too.sock"
[[profiles]]
name = "gpu"
title = "RTX 5090"
gpu_model = "RTX 5090"
cpus = 1
memory = "1GiB"
time_limit = "1h"
FURTHER
[users]
login = "password"
allowed = ["ada", "ben"]
uid_first = 71001
[storage]
home = "HOMES/{{username}}"
DATASETS
[slurm]
conf = "CONF"
RUNTIME
poll = "1s"
"""
#: /dev/zero and /dev/full stand for GPUs.
_DEVICES = (((1, 5),), ((1, 7),))
#: Only intervals are changed, so that tests wait less.
CONFIG = "load_subconfig({real!r})\nc.Spawner.poll_interval = 2\n"


@dataclass(frozen=True)
class Cluster:
    """A hub with its Slurm."""

    site: SlurmSite
    hub: ServedHub
    ada: Client
    ben: Client

    def jobs(self) -> dict[int, tuple[str, int, str]]:
        """Return the jobs that have not ended: name, UID and state by number."""
        lines = self.site.ask("squeue", "-h", "-o", "%i %j %U %T").splitlines()
        return {int(number): (name, int(uid), state) for number, name, uid, state in map(str.split, lines)}

    def jobs_of(self, name: str) -> list[int]:
        """Return a user's jobs, oldest first."""
        return sorted(number for number, (_, uid, _) in self.jobs().items() if uid == USERS[name])

    def job_of(self, name: str) -> int | None:
        """Return the only job of a user."""
        found = self.jobs_of(name)
        assert len(found) <= 1
        return found[0] if found else None

    def wait_clear(self) -> None:
        """Wait until Slurm has no job and the broker no lease."""
        wait_for(lambda: not self.jobs(), "no jobs are left", 60)
        wait_for(lambda: not leases(self.ada) and not leases(self.ben), "no leases are left", 60)


def leases(user: Client) -> list[dict[str, Any]]:
    """Return the user's leases that have not ended."""
    status, found = user.ask(user.broker, "GET", "/leases")
    assert status == 200, found
    return list(found["leases"] if isinstance(found, dict) else found)


@contextmanager
def slurm_hub(
    instance: str,
    folder: Path,
    program: Path,
    *,
    site_port: int,
    port: int,
    further: str = "",
    datasets: Path | None = None,
) -> Iterator[Cluster]:
    """Run a hub with ada and ben on two nodes with a GPU each.

    Args:
        program: The notebook's program, or the image file (.sif) that Apptainer runs.
        further: More of cluster.toml, including profiles.
        datasets: The folder of the datasets.
    """
    is_image = program.suffix == ".sif"
    # With control groups SIGTERM does not reach squashfuse, without which nothing in the container can end in order.
    devices = _DEVICES if is_image else None
    with slurm_site(
        port=site_port, nodes=(("rtx5090",), ("rtx5070",)), devices=devices, cpus=2, min_job_age_s=30
    ) as site:
        runtime = ("apptainer", "image") if is_image else ("plain", "command")
        texts = {
            "HOMES": site.folder / "homes",
            "CONF": site.files.conf,
            "DATASETS": "" if datasets is None else f'datasets = "{datasets}"',
            "RUNTIME": f'runtime = "{runtime[0]}"\n{runtime[1]} = "{program}"',
            "FURTHER": further,
        }
        settings = SETTINGS
        for word, text in texts.items():
            settings = settings.replace(word, str(text))
        hub = ServedHub(instance, folder, "", port, settings=settings, config=CONFIG)
        if is_image:
            # Apptainer on the head node must know the users as well.
            hub.enter = site.daemons.build_enter_command(hub.paths.state)
        try:
            hub.start()
            address = f"http://127.0.0.1:{hub.port}"
            ada, ben = (log_in(address, name, hub.password) for name in ("ada", "ben"))
            (hub.paths.state / "uids.json").write_text(json.dumps(USERS))
            yield Cluster(site, hub, ada, ben)
            ada.close()
            ben.close()
        finally:
            hub.stop()


def build_environment(folder: Path, *further: str) -> Path:
    """Build an environment and return the path of its jupyterhub-singleuser."""
    uv = str(Path(sys.executable).with_name("uv"))
    locks = [word for layer in ("science", "lab") for word in ("--constraint", f"{ROOT}/images/python/{layer}.lock")]
    subprocess.run([uv, "venv", "-q", "--python", "/usr/bin/python3", str(folder / "env")], check=True)
    python = str(folder / "env" / "bin" / "python")
    wanted = ["jupyterhub", "jupyter_server", *further]
    # Compiled now, because users may not write into it: each of their programs would compile all that it imports.
    install = [uv, "pip", "install", "-q", "--compile-bytecode", "--python", python]
    subprocess.run([*install, *locks, *wanted], check=True)
    return folder / "env" / "bin" / "jupyterhub-singleuser"


def log_in_laptop(cluster: Cluster, folder: Path) -> Laptop:
    """Return gpu-launch with a home and a work folder of its own, logged in as ada."""
    laptop = Laptop(program=Path(sys.executable).with_name("gpu-launch"), home=folder / "home", work=folder / "work")
    laptop.home.mkdir()
    laptop.work.mkdir()
    (folder / "token").write_text(cluster.ada.token)
    output = laptop.run("login", f"http://127.0.0.1:{cluster.hub.port}", "--token-file", str(folder / "token"))
    assert "as ada" in output
    return laptop


def start(cluster: Cluster, user: Client, profile: str = "gpu") -> int:
    """Start the user's notebook, wait until it answers, and return its job's number."""
    user.start(NB, profile)
    wait_ready(cluster, user)
    job = cluster.job_of(user.name)
    assert job is not None
    return job


def wait_ready(cluster: Cluster, user: Client) -> None:
    def is_ready() -> bool:
        servers = user.servers()
        assert servers is None or NB in servers, f"the start failed:\n{cluster.hub.log('hub')}"
        return user.is_ready(NB)

    wait_for(is_ready, f"{user.name}'s notebook", 120)
