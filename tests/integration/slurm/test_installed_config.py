"""Slurm's own programs read the files that `gpuhub slurm init` writes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpuhub.ops.slurm.files import InstalledCluster, format_cgroup_conf, format_gres_conf, format_slurm_conf
from tests.support.slurm.installed import VARIANTS

pytestmark = [pytest.mark.slurm, pytest.mark.root]


def read_gpus(cluster: InstalledCluster, node: str, folder: Path) -> str:
    """Let slurmd print the GPUs of a node (`-G`), after which it ends by itself; its folders are in `folder`."""
    for index in range(2):
        (folder / f"nvidia{index}").symlink_to("/dev/null")
    conf = format_slurm_conf(cluster)
    for path in ("/var/lib/slurm/", "/var/log/slurm/", "/run/"):
        conf = conf.replace(path, f"{folder}/")
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(format_gres_conf(cluster).replace("/dev/", f"{folder}/"))
    (folder / "cgroup.conf").write_text(format_cgroup_conf())
    command = ["slurmd", "-G", "-N", node, "-f", str(folder / "slurm.conf")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_slurmd_reads_the_files(name: str, tmp_path: Path) -> None:
    """Without an error, and with each GPU's type and device file."""
    text = read_gpus(VARIANTS[name], "rig3", tmp_path)
    assert "error" not in text
    assert re.findall(r"Type=(\S+) .* File=\S+/(\S+)", text) == [("rtx5070", "nvidia0"), ("rtx5060", "nvidia1")]
