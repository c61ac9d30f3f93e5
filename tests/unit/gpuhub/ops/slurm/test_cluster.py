"""The cluster from the machines' states, and its keys."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.config.machines.nodes import ExpectedGpus, NodeSettings
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.slurm import SlurmSettings
from gpuhub.ops.slurm.cluster import SlurmFeatures, build_cluster, find_models, read_secrets
from gpuhub.ops.slurm.config_lines import SlurmPartitionConfig
from gpuhub.ops.slurm.files import JWT_KEY, MUNGE_KEY, SLURMDBD_CONF
from gpuhub.ops.slurm.machine_state import InstalledFile, SlurmMachineState
from gpuhub.ops.slurm.power import SlurmPower, find_slurm_power
from tests.support.docker import simulated_nodes

FEATURES = SlurmFeatures(name="lab", partition="gpu")
STATE = SlurmMachineState(
    sudo="yes",
    distribution="debian",
    release="12",
    os="Debian GNU/Linux 12 (bookworm)",
    hostname="rig1",
    cpus=16,
    memory_kib=64 * 1024 * 1024,
)


def settings_of(*nodes: NodeSettings) -> ClusterSettings:
    return simulated_nodes.build_cluster().model_copy(update={"nodes": nodes})


def node(name: str, **keys: object) -> NodeSettings:
    return NodeSettings.model_validate({"name": name, "address": f"10.0.0.{name[-1]}", **keys})


class RecordedHead:
    """A head node that answers with the content of its files."""

    def __init__(self, **files: bytes) -> None:
        self.files = {f"base64 -w0 {path}\n": content for path, content in files.items()}
        self.calls: list[tuple[str, bool]] = []

    def run(self, script: str, arguments: Sequence[str] = (), *, as_root: bool = False, timeout_s: float = 90.0) -> str:
        assert not arguments
        assert timeout_s
        self.calls.append((script, as_root))
        return base64.b64encode(self.files[script]).decode()


def test_models_are_the_agents_then_those_of_the_settings() -> None:
    gpus = [ExpectedGpus.model_validate({"model": "RTX 5090", "memory": "32G", "count": 2})]
    cluster = settings_of(node("rig1", gpus=gpus), node("rig2", gpus=gpus), node("rig3", gpus=[]))
    assert find_models(cluster, {"rig1": ["RTX 5070"], "rig2": []}) == {
        "rig1": ("RTX 5070",),
        "rig2": ("RTX 5090", "RTX 5090"),
        "rig3": (),
    }


def test_nodes_without_power_are_excepted_from_power_saving() -> None:
    """Slurm has one time for all nodes: the longest; nodes with idle = "0s" stay on."""
    nodes = [
        node("rig1"),
        node(
            "rig2", docker="ssh://rig2", slurm="n2", power={"mac": "3c:ec:ef:12:34:56", "off": "poweroff", "idle": "1h"}
        ),
        node("rig3", docker="ssh://rig3", power={"mac": "3c:ec:ef:12:34:57", "wake_timeout": "10m", "idle": "30m"}),
        node("rig4", docker="ssh://rig4", power={"mac": "3c:ec:ef:12:34:58"}),
    ]
    power = find_slurm_power(settings_of(*nodes), ["rig1", "rig2", "rig3", "rig4"], ("gpuhub",))
    assert power == SlurmPower(suspend_s=3600, resume_timeout_s=600, excluded=("rig1", "rig4"), command=("gpuhub",))
    assert find_slurm_power(settings_of(*nodes), ["rig1", "rig4"], ("gpuhub",)) is None


def test_unknown_gpus_are_an_error_with_the_key_to_add() -> None:
    with pytest.raises(SetupError, match=r"which GPUs rig1, rig2 have: start gpuhub .* gpus = \[\{model = "):
        find_models(settings_of(node("rig1"), node("rig2")), {})


def test_nodes_come_from_the_machines_states() -> None:
    """Memory leaves some room; devices have the driver's numbers where it knows all GPUs."""
    nodes = [(node("rig1", slurm="n1"), STATE), (node("rig2"), replace(STATE, hostname="beast", minors=(1, 0)))]
    cluster = build_cluster(
        FEATURES, settings_of(), (STATE, "10.0.0.9"), nodes, {"rig1": ["RTX 5090"], "rig2": ["RTX 5070", "RTX 5070"]}
    )
    first, second = cluster.nodes
    assert (cluster.head_name, cluster.head_address) == ("rig1", "10.0.0.9")
    assert (first.config.name, first.config.address, first.config.gpus) == ("n1", "10.0.0.1", ("rtx5090",))
    assert (first.config.cpus, first.config.memory_mib) == (16, 64225)
    assert first.devices == (Path("/dev/nvidia0"),)
    assert second.config.hostname == "beast"
    assert second.devices == (Path("/dev/nvidia1"), Path("/dev/nvidia0"))
    assert cluster.rest_plugins is None


def test_partitions_of_groups_have_the_nodes_that_compute() -> None:
    """They have Slurm's names of nodes, and leave a node to the partition for all, which has another name."""
    vision = {"name": "vision", "nodes": ("rig2", "rig3"), "groups": ("vision",)}
    slurm = SlurmSettings.model_validate({"partitions": (vision,)})
    settings = settings_of().model_copy(update={"slurm": slurm})
    nodes = [(node("rig1"), STATE), (node("rig2", slurm="n2"), replace(STATE, hostname="rig2"))]
    models: dict[str, list[str]] = {"rig1": [], "rig2": []}
    cluster = build_cluster(FEATURES, settings, (STATE, "10.0.0.9"), nodes, models)
    assert cluster.partitions == (
        SlurmPartitionConfig(name="vision", nodes=("n2",), is_default=False, groups=("vision",)),
    )
    with pytest.raises(SetupError, match=r"--partition vision: slurm\.partitions in cluster.toml has one of this name"):
        build_cluster(replace(FEATURES, partition="vision"), settings, (STATE, "10.0.0.9"), nodes, models)
    with pytest.raises(SetupError, match="no machine that computes is left for the partition gpu"):
        build_cluster(FEATURES, settings, (STATE, "10.0.0.9"), nodes[1:], models)


@pytest.mark.parametrize(("runtime", "has_check"), [("docker", False), ("plain", True), ("apptainer", True)])
def test_slurm_checks_the_gpus_where_there_are_no_agents(runtime: str, has_check: bool) -> None:
    own = {"plain": {"command": "/opt/single"}, "apptainer": {"image": "/srv/a.sif"}}.get(runtime, {})
    table = SlurmSettings.model_validate({"runtime": runtime, **own})
    settings = settings_of(node("rig1", gpus=[])).model_copy(update={"slurm": table})
    cluster = build_cluster(FEATURES, settings, (STATE, "10.0.0.1"), [(settings.nodes[0], STATE)], {"rig1": ()})
    assert cluster.has_health_check is has_check


def test_other_number_of_gpus_is_refused() -> None:
    """A GPU that fails has no line of the agent, and the others would get its device file."""
    with pytest.raises(SetupError, match=r"rig1: NVIDIA's driver has 2 GPUs, and the GPU agent, .* 1: "):
        nodes = [(node("rig1"), replace(STATE, minors=(0, 1)))]
        build_cluster(FEATURES, settings_of(), (STATE, "10.0.0.9"), nodes, {"rig1": ["RTX 5090"]})


@pytest.mark.parametrize(
    ("release", "has_accounting", "plugins"),
    [
        ("12", False, "openapi/v0.0.38"),
        ("12", True, "openapi/v0.0.38,openapi/dbv0.0.38"),
        ("13", False, "openapi/slurmctld"),
    ],
)
def test_plugins_of_slurmrestd(release: str, has_accounting: bool, plugins: str) -> None:
    """That of accounts refuses a cluster that has none."""
    state = replace(STATE, release=release)
    features = replace(FEATURES, has_rest=True, has_accounting=has_accounting)
    nodes = [(node("rig1"), state)]
    assert build_cluster(features, settings_of(), (state, "10.0.0.9"), nodes, {"rig1": []}).rest_plugins == plugins


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "no machine would compute"),
        (
            [(node("rig2"), replace(STATE, release="13", os="Debian 13"))],
            "rig2 has Debian 13, and the head node Debian",
        ),
        ([(node("rig2"), STATE), (node("rig3"), STATE)], r"the same host name: rig2 \(rig1\), rig3 \(rig1\)"),
    ],
)
def test_machines_that_cannot_be_one_slurm(nodes: list[tuple[NodeSettings, SlurmMachineState]], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        build_cluster(FEATURES, settings_of(), (STATE, "10.0.0.9"), nodes, {"rig2": [], "rig3": []})


def test_secrets_of_the_head_node_are_kept() -> None:
    there = InstalledFile(mode=0o600, owner="slurm", changed_at=1, sha256="0")
    files = {MUNGE_KEY: b"old key", JWT_KEY: b"old token key", SLURMDBD_CONF: b"StoragePass=old\n"}
    head = RecordedHead(**{str(path): content for path, content in files.items()})
    features = replace(FEATURES, has_accounting=True, has_rest=True)
    secrets = read_secrets(features, replace(STATE, files=dict.fromkeys(map(str, files), there)), head)
    assert (secrets.munge_key, secrets.jwt_key, secrets.database_password) == (b"old key", b"old token key", "old")
    assert all(as_root for _, as_root in head.calls)


def test_missing_secrets_are_new() -> None:
    features = replace(FEATURES, has_accounting=True, has_rest=True)
    first, second = (read_secrets(features, STATE, RecordedHead()) for _ in range(2))
    assert len(first.munge_key) == 1024
    assert len(first.jwt_key) == 32
    assert first.database_password.isalnum()
    assert first.munge_key != second.munge_key
    plain = read_secrets(FEATURES, STATE, RecordedHead())
    assert (plain.jwt_key, plain.database_password) == (b"", "")
