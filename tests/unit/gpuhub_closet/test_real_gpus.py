"""This machine's own GPUs in one node of the practice closet: `make up REAL_GPU=…`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.gpu import GpuSpec
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.ops.deploy import cluster_choice
from gpuhub_closet import layouts, lifecycle, real_gpus
from gpuhub_closet.cluster_file import format_cluster
from gpuhub_closet.paths import node_paths
from gpuhub_closet.real_gpus import RealGpus
from gpuhub_closet.slurm import slurm_setup

RTX_5070 = GpuSpec(model="RTX 5070", memory_mib=12282)
H200 = GpuSpec(model="H200", memory_mib=143771)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """An instance on a machine with an RTX 5070 and NVIDIA's toolkit; its state is in a folder of the test."""
    monkeypatch.setattr(Paths, "state", property(lambda self: tmp_path / self.instance))
    monkeypatch.setattr(Paths, "run", property(lambda self: tmp_path / "run" / self.instance))
    monkeypatch.setattr(cluster_choice, "find_local_gpus", lambda: [RTX_5070])
    monkeypatch.setattr(cluster_choice.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(real_gpus, "MACHINE_DAEMON_FILE", tmp_path / "daemon.json")
    return Paths("ghtest")


def test_one_node_has_the_machines_gpus() -> None:
    """The others keep their simulated ones, and all keep their addresses."""
    plan, simulated = (
        layouts.build_plan("ghtest", "lab", RealGpus(node="rig2", gpus=(H200, H200))),
        layouts.build_plan("ghtest", "lab"),
    )
    assert [node.real_gpus for node in plan.nodes] == [(), (H200, H200), ()]
    assert [len(node.gpus) for node in plan.nodes] == [4, 0, 4]
    assert [node.address for node in plan.nodes] == [node.address for node in simulated.nodes]
    assert plan.nodes[0] == simulated.nodes[0]


def test_simulated_gpus_of_the_same_model_say_so() -> None:
    """Profiles choose by the model, so that one would not know which of the two a notebook gets."""
    plan = layouts.build_plan("ghtest", "house", RealGpus(node="rig3", gpus=(RTX_5070,)))
    assert [gpu.model for node in plan.nodes for gpu in node.grantable_gpus] == [
        "RTX 5090", "RTX 5090", "RTX 5070", "RTX 5070 simulated", "RTX 5060",
    ]  # fmt: skip
    [twin] = plan.node("rig4").gpus
    assert (twin.name, twin.power_limit_w) == ("NVIDIA GeForce RTX 5070 simulated", 250)


@pytest.mark.parametrize("backend", ["builtin", "slurm"])
def test_cluster_file_names_the_real_model(backend: str, tmp_path: Path) -> None:
    """With its profile, which does not say that it is simulated, and as a desktop; Slurm has its type."""
    real = RealGpus(node="rig1", gpus=(RTX_5070, RTX_5070, GpuSpec(model="RTX 5070", memory_mib=12227)))
    plan, file = layouts.build_plan("ghtest", "practice", real), tmp_path / "cluster.toml"
    file.write_text(format_cluster(plan, Paths("ghtest"), cpus=8, backend=backend))
    cluster = settings.load(file)
    assert cluster.notice.endswith("only rig1 has this machine's own GPUs.")
    assert [node.desktop for node in cluster.nodes] == [True, False, False]
    profiles = {profile.name: (profile.gpu_model, profile.gpu_count) for profile in cluster.profiles}
    assert profiles["rtx5070"] == ("RTX 5070", 1)
    assert profiles["rtx5070x3"] == ("RTX 5070", 3)
    assert profiles["rtx5070simulated"] == ("RTX 5070 simulated", 1)
    texts = {profile.name: profile.description for profile in cluster.profiles}
    assert (texts["rtx5070"], texts["rtx5060"]) == ("12 GB (real)", "8 GB (simulated)")
    conf = slurm_setup.build_slurm_config(plan, Paths("ghtest"))
    assert [node.gpus for node in conf.nodes] == [("rtx5070",) * 3, ("rtx5070simulated",), ("rtx5060",)]


def test_long_model_has_a_valid_profile(tmp_path: Path) -> None:
    """NVIDIA's names of workstation cards are longer than a profile's name may be."""
    card = GpuSpec(model="RTX PRO 6000 Blackwell Max-Q Workstation Edition", memory_mib=97887)
    plan, file = layouts.build_plan("ghtest", "practice", RealGpus(node="rig1", gpus=(card,) * 2)), tmp_path / "toml"
    file.write_text(format_cluster(plan, Paths("ghtest"), cpus=8))
    assert "rtxpro6000blackwellmaxqworksx2" in {profile.name for profile in settings.load(file).profiles}


def test_choice_is_kept_with_the_layout(paths: Paths) -> None:
    """`make up` keeps it, REAL_GPU alone moves the GPU, and CLOSET alone has simulated GPUs only."""
    chosen = layouts.choose_layout(paths, "house", real_gpu="rig3", is_running=False)
    assert chosen == layouts.build_plan("ghtest", "house", RealGpus(node="rig3", gpus=(RTX_5070,)))
    assert layouts.choose_layout(paths, None, is_running=False) == chosen
    assert layouts.choose_layout(paths, None, is_running=True) == chosen
    assert layouts.find_plan(paths) == chosen
    moved = layouts.choose_layout(paths, None, real_gpu="rig5", is_running=False)
    assert [node.name for node in moved.nodes if node.real_gpus] == ["rig5"]
    assert layouts.choose_layout(paths, "house", is_running=False) == layouts.build_plan("ghtest", "house")
    assert layouts.find_plan(paths) == layouts.build_plan("ghtest", "house")


def test_running_closet_does_not_get_other_gpus(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the two commands; without a request, the GPUs are those of the start."""
    started = layouts.choose_layout(paths, "house", real_gpu="rig3", is_running=False)
    for closet, node, wanted in (
        ("house", None, "CLOSET=house"),
        (None, "rig4", "CLOSET=house REAL_GPU=rig4"),
        ("practice", "rig3", "CLOSET=practice REAL_GPU=rig3"),
    ):
        with pytest.raises(SetupError) as caught:
            layouts.choose_layout(paths, closet, real_gpu=node, is_running=True)
        assert "runs with CLOSET=house REAL_GPU=rig3: `sudo make down` first" in str(caught.value)
        assert str(caught.value).endswith(f"`sudo make up {wanted}`")
    monkeypatch.setattr(cluster_choice, "find_local_gpus", list)
    assert layouts.choose_layout(paths, None, is_running=True) == started


def test_unknown_node_is_refused(paths: Paths) -> None:
    """The error names the nodes of that layout, and nothing is kept."""
    with pytest.raises(
        SettingsError, match="REAL_GPU=rig4: the practice closet practice has no such node; there are rig1, rig2, rig3"
    ):
        layouts.choose_layout(paths, None, real_gpu="rig4", is_running=False)
    assert not paths.closet.exists()


def test_machine_without_a_gpu_or_toolkit_is_refused(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written; also where the choice was made while it had them."""
    layouts.choose_layout(paths, "house", real_gpu="rig3", is_running=False)
    monkeypatch.setattr(cluster_choice.shutil, "which", lambda _name: None)
    with pytest.raises(SetupError, match="install NVIDIA's container toolkit"):
        layouts.choose_layout(paths, "lab", real_gpu="rig1", is_running=False)
    monkeypatch.setattr(cluster_choice, "find_local_gpus", list)
    for requested, node, named in (("lab", "rig1", "REAL_GPU=rig1"), (None, None, "REAL_GPU=rig3")):
        with pytest.raises(SetupError, match=f"{named} .* nvidia-smi finds none here: install NVIDIA's driver"):
            layouts.choose_layout(paths, requested, real_gpu=node, is_running=False)
    assert layouts.find_layout(paths) == "house"


def test_daemon_settings_are_those_that_pass_gpus(paths: Paths) -> None:
    """The machine's runtimes and CDI, and none of its storage, networks or mirrors."""
    file = real_gpus.MACHINE_DAEMON_FILE
    assert real_gpus.read_daemon_settings() == {}
    runtimes = {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}
    passing = {"runtimes": runtimes, "default-runtime": "nvidia", "cdi-spec-dirs": ["/etc/cdi"]}
    others = {"data-root": "/data", "bip": "10.0.0.1/24", "features": {"cdi": True, "containerd-snapshotter": True}}
    file.write_text(json.dumps({**passing, **others}))
    assert real_gpus.read_daemon_settings() == {**passing, "features": {"cdi": True}}
    file.write_text("{]")
    with pytest.raises(SetupError, match=f"{file} is not valid JSON, so Docker cannot read it either"):
        layouts.choose_layout(paths, "house", real_gpu="rig3", is_running=False)


def test_real_node_has_the_machines_toolkit(paths: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its daemon has the machine's runtimes and no simulated hook, also where it had one; the others have the hook."""
    real_gpus.MACHINE_DAEMON_FILE.write_text('{"default-runtime": "gpus", "runtimes": {"gpus": {"path": "/opt/gpus"}}}')
    monkeypatch.setattr(lifecycle, "_check_machine", lambda: None)
    monkeypatch.setattr(lifecycle.driver, "ensure_driver", lambda _paths: lifecycle.driver.SimulatedDriver(tmp_path))
    for step in ("ensure_network", "ensure_dns"):
        monkeypatch.setattr(lifecycle.network, step, lambda *_: None)
    lifecycle.prepare_closet(layouts.build_plan("ghtest"), paths)
    rig1, rig2 = node_paths(paths, "rig1"), node_paths(paths, "rig2")
    assert (rig1.toolkit / "nvidia-container-runtime-hook").exists()
    plan = layouts.build_plan("ghtest", "practice", RealGpus(node="rig1", gpus=(RTX_5070,)))
    lifecycle.prepare_closet(plan, paths)
    assert json.loads(rig1.daemon_file.read_text()) == {
        "dns": ["10.87.0.1"], "default-runtime": "gpus", "runtimes": {"gpus": {"path": "/opt/gpus"}},
    }  # fmt: skip
    assert json.loads(rig2.daemon_file.read_text()) == {"dns": ["10.87.0.1"], "features": {"cdi": False}}
    assert not rig1.toolkit.exists()
    assert list(rig1.gpus.iterdir()) == []
    assert (rig2.toolkit / "nvidia-container-runtime-hook").exists()
