"""The choice of the nodes that `gpuhub up` runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.common.errors import SettingsError
from gpuhub.common.gpu import GpuSpec
from gpuhub.common.paths import Paths
from gpuhub.ops.deploy import cluster_choice
from gpuhub.ops.deploy.cluster_choice import ClusterOrigin, choose_cluster


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """An instance on a machine with a GPU and NVIDIA's toolkit."""
    monkeypatch.setattr(Paths, "state", property(lambda self: tmp_path / self.instance))
    monkeypatch.setattr(cluster_choice, "find_local_gpus", lambda: [GpuSpec(model="RTX 5070", memory_mib=12227)])
    monkeypatch.setattr(cluster_choice.shutil, "which", lambda name: f"/usr/bin/{name}")
    return Paths("ghtest")


def test_machine_with_a_gpu_is_its_own_cluster(paths: Paths, tmp_path: Path) -> None:
    """Without a file of settings, and without asking for the practice closet."""
    assert choose_cluster(paths, tmp_path / "cluster.toml").origin is ClusterOrigin.THIS_MACHINE


def test_practice_closet_on_a_machine_with_a_gpu(paths: Paths, tmp_path: Path) -> None:
    """Where it is asked for; and where it runs, until it is stopped."""
    asked = choose_cluster(paths, tmp_path / "cluster.toml", variant="house")
    running = choose_cluster(paths, tmp_path / "cluster.toml", is_provider_running=True)
    with_gpu = choose_cluster(paths, tmp_path / "cluster.toml", real_gpu="rig3")
    assert asked == running == with_gpu
    assert asked.origin is ClusterOrigin.PROVIDER


def test_practice_closet_beside_a_cluster_file_is_refused(paths: Paths, tmp_path: Path) -> None:
    """The error names the file, which would be ignored otherwise."""
    file = tmp_path / "cluster.toml"
    file.touch()
    with pytest.raises(SettingsError, match=f"CLOSET=lab is for the practice closet, and {file} describes other nodes"):
        choose_cluster(paths, file, variant="lab")
    with pytest.raises(SettingsError, match="CLOSET=lab REAL_GPU=rig3 is for the practice closet"):
        choose_cluster(paths, file, variant="lab", real_gpu="rig3")
    assert choose_cluster(paths, file).origin is ClusterOrigin.SETTINGS
