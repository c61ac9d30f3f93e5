"""What JAX is told of a launch, with JAX's own registry of cluster environments."""

from __future__ import annotations

import dataclasses
import importlib
import sys

import pytest

from gpu_launch.common.launch_spec import Channel, LaunchSpec, Membership
from gpu_launch.worker import jax_cluster
from gpu_launch.worker.runners.base import build_rank_environ

SPEC = LaunchSpec(
    run_id="run-1", attempt=0,
    membership=Membership(includes_notebook=False, workers=(0, 1), nodes=("rig1", "rig2"), nproc_per_node=2),
    master_addr="10.0.1.2", master_port=4711, coordinator_port=4712, command=("train.py",), module=False,
    no_python=False, torchrun_flags=(), shutdown_s=None, cwd="/home/ada", log_dir="/home/ada/logs", environ={},
    python_path="", channel=Channel(url="", server_public=b"", client_public=b"", client_secret=b""),
)  # fmt: skip
#: What Slurm sets for a task on one of two nodes: two processes, not the four ranks.
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "rig[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip


@pytest.fixture
def clusters(monkeypatch):
    """JAX's registry, which is as before afterwards."""
    module = importlib.import_module("jax._src.clusters")
    monkeypatch.setattr(module.ClusterEnv, "_cluster_types", list(module.ClusterEnv._cluster_types))
    return module


def set_rank(monkeypatch, environ):
    """Set the variables of the last of four ranks."""
    shared = jax_cluster.build_variables(SPEC)
    rank = build_rank_environ(shared, SPEC, node_rank=1, local_rank=1, error_file="", progress_file="")
    for name, value in {**rank, **environ}.items():
        monkeypatch.setenv(name, value)


def detect(clusters, method=None):
    """Return address, count, id and devices, as `jax.distributed.initialize()` gets them."""
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, method, 300)


@pytest.mark.parametrize("environ", [{}, SLURM], ids=["plain", "slurm"])
def test_jax_detects_the_rank(clusters, monkeypatch, environ):
    """All four values, on Slurm too, whose own are those of the containers."""
    set_rank(monkeypatch, environ)
    jax_cluster.register(clusters)
    assert detect(clusters) == ("10.0.1.2:4712", 4, 3, [1])
    if environ:
        assert detect(clusters, "slurm")[1:3] == (2, 1)


def test_port_of_the_user_is_used(clusters, monkeypatch):
    """JAX_COORDINATOR_PORT replaces the launch's."""
    set_rank(monkeypatch, {"JAX_COORDINATOR_PORT": "5000"})
    jax_cluster.register(clusters)
    assert detect(clusters)[0] == "10.0.1.2:5000"


def test_address_of_ipv6_is_bracketed():
    """Otherwise the port would be a part of it."""
    spec = dataclasses.replace(SPEC, master_addr="fd00::2")
    assert jax_cluster.build_variables(spec)["JAX_COORDINATOR_ADDRESS"] == "[fd00::2]:4712"


def test_nothing_is_registered_outside_of_a_launch(monkeypatch):
    """A rank that was started without a coordinator's port leaves JAX as it is."""
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setenv("RANK", "0")
    before = list(sys.meta_path)
    jax_cluster.install()
    assert sys.meta_path == before
