"""One Slurm without Docker, with its hub, for all tests of launches: starting both takes half a minute."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub.installed_laptop import Laptop
from tests.support.hub.kernel_client import Kernel, open_kernel
from tests.support.product import ROOT
from tests.support.slurm.hub import NB, Cluster, build_environment, log_in_laptop, slurm_hub, start
from tests.support.slurm.launches import ALL_REDUCE, launches, wait_free, write

INSTANCE = "ghjobs"
FURTHER = """
[[profiles]]
name = "cpu"
title = "No GPU"
gpu_count = 0
cpus = 1
memory = "1GiB"
[jobs]
cpus = 1
memory = "2GiB"
"""


@pytest.fixture(scope="package")
def command() -> Iterator[Path]:
    """A gpu-launch environment made as docs/slurm.md describes; torch and other large packages come from this one."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-notebook-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        environment = build_environment(folder, "ipykernel", "ipyparallel", str(ROOT / "extensions"))
        packages = next((folder / "env" / "lib").glob("python3.*")) / "site-packages"
        site_packages = next((Path(sys.prefix) / "lib").glob("python3.*")) / "site-packages"
        (packages / "ours.pth").write_text(f"{site_packages}\n")
        shutil.copytree(ROOT / "extensions" / "gpu_launch" / "image_config", folder / "env" / "etc" / "ipython")
        extensions = folder / "env" / "etc" / "jupyter" / "jupyter_server_config.d" / "gpu_launch.json"
        extensions.write_text('{"ServerApp": {"jpserver_extensions": {"gpu_launch.sshd.jupyter_extension": true}}}')
        yield environment


@pytest.fixture(scope="package")
def cluster(command: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hub")
    with slurm_hub(INSTANCE, folder, command, site_port=27500, port=18440, further=FURTHER) as cluster:
        write(cluster, "reduce.py", ALL_REDUCE)
        write(cluster, "sleep.py", "import time; print('sleeping', flush=True); time.sleep(600)")
        yield cluster


@pytest.fixture(scope="package")
def cell(cluster: Cluster) -> Iterator[Kernel]:
    """A kernel of ada's notebook, which has no GPU."""
    start(cluster, cluster.ada, "cpu")
    with open_kernel(f"127.0.0.1:{cluster.hub.port}", cluster.ada, NB) as opened:
        yield opened
    cluster.ada.stop(NB)
    cluster.wait_clear()


@pytest.fixture(scope="package")
def laptop(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Laptop:
    """gpu-launch, logged in as ada."""
    return log_in_laptop(cluster, tmp_path_factory.mktemp("laptop"))


@pytest.fixture(autouse=True)
def clear(cluster: Cluster) -> Iterator[None]:
    """Remove what a test has left."""
    yield
    for job in [*launches(cluster), *cluster.jobs_of("ben")]:
        cluster.site.ask("scancel", str(job))
    wait_free(cluster)
