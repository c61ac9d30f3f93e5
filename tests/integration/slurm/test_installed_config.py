"""Slurm's own programs read the files that `gpuhub slurm init` writes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpuhub.ops.slurm.files import InstalledCluster, format_cgroup_conf, format_gres_conf, format_slurm_conf
from tests.support.slurm.installed import VARIANTS

pytestmark = [pytest.mark.slurm, pytest.mark.root]


def write_files(cluster: InstalledCluster, folder: Path) -> Path:
    """Write the files with all folders in this one, and return slurm.conf."""
    folder.chmod(0o755)
    for index in range(2):
        (folder / f"nvidia{index}").symlink_to("/dev/null")
    conf = format_slurm_conf(cluster)
    for path in ("/var/lib/slurm/", "/var/log/slurm/", "/run/"):
        conf = conf.replace(path, f"{folder}/")
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(format_gres_conf(cluster).replace("/dev/", f"{folder}/"))
    (folder / "cgroup.conf").write_text(format_cgroup_conf())
    return folder / "slurm.conf"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], check=False, capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize("name", VARIANTS)
def test_slurmd_reads_the_files(name: str, tmp_path: Path) -> None:
    """`-G` prints each GPU's type and device file, and ends."""
    done = run("slurmd", "-G", "-N", "rig3", "-f", write_files(VARIANTS[name], tmp_path))
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    assert re.findall(r"Type=(\S+) .* File=\S+/(\S+)", done.stderr) == [("rtx5070", "nvidia0"), ("rtx5060", "nvidia1")]


def test_misspelt_setting_would_be_refused(tmp_path: Path) -> None:
    conf = write_files(VARIANTS["plain"], tmp_path)
    conf.write_text(conf.read_text().replace("TaskPlugin=", "TaskPlugn="))
    assert "unrecognized key: TaskPlugn" in run("slurmd", "-G", "-N", "rig3", "-f", conf).stderr
