"""Who takes part, from what the environment says."""

from __future__ import annotations

import pytest

from gpu_launch import environment, plan, wire
from gpu_launch.errors import UsageError

BROKER = {"GPUHUB_BROKER_URL": "http://10.77.0.1:8010/services/broker/", "JUPYTERHUB_API_TOKEN": "secret"}
CLUSTER = wire.Cluster(
    nodes=tuple(
        wire.Node(name=name, gpus=tuple(wire.Gpu(uuid=f"{name}-{i}", node=name, model=model) for i in range(count)))
        for name, model, count in [("rig1", "RTX 5090", 2), ("rig2", "RTX 5070", 1), ("rig3", "RTX 5060", 1)]
    )
)


def env(gpus="", **more):
    """A notebook's environment on rig1."""
    return environment.read({"GPUHUB_NODE": "rig1", "GPUHUB_GPU_UUIDS": gpus, "HOME": "/home/ada"} | more)


def make(gpus="", nnodes=3, nproc=1, model=None, own_model="RTX 5090", **more):
    """A plan with the broker there."""
    return plan.make_plan(
        env(gpus, **BROKER, **more), nnodes=nnodes, nproc_per_node=nproc, model=model, own_model=own_model
    )


def test_own_gpu_takes_part_and_the_rest_is_asked_for_elsewhere():
    """Three nodes from a notebook with one GPU: two workers, not on its own node, which is node 0."""
    made = make("GPU-1")
    assert (made.own, made.workers, made.exclude_nodes) == (True, 2, ("rig1",))
    assert [made.node_rank(worker) for worker in (None, 0, 1)] == [0, 1, 2]


def test_a_cpu_notebook_asks_for_all():
    """Three nodes from a notebook without GPUs: three workers anywhere."""
    made = make("")
    assert (made.own, made.workers, made.exclude_nodes) == (False, 3, ())
    assert made.node_rank(0) == 0


def test_too_few_own_gpus_stay_out():
    """With two ranks a node, a notebook's single GPU does not take part."""
    assert not make("GPU-1", nproc=2).own
    assert make("GPU-1, GPU-2", nproc=2).own


def test_another_model_keeps_the_own_gpu_out():
    """--model is for every rank."""
    assert not make("GPU-1", model="RTX 5070").own
    assert make("GPU-1", model="RTX 5090").own
    assert not make("GPU-1", model="RTX 5090", own_model=None).own


def test_one_node_with_own_gpus_needs_no_broker():
    """A container with a GPU launches alone."""
    made = plan.make_plan(env("GPU-1"), nnodes=1, nproc_per_node=1, model=None, own_model=None)
    assert (made.own, made.workers) == (True, 0)


@pytest.mark.parametrize(
    ("have", "missing"),
    [({}, "GPUHUB_BROKER_URL is not set"), ({"GPUHUB_BROKER_URL": "http://x"}, "JUPYTERHUB_API_TOKEN is not set")],
)
def test_without_a_broker_one_line_says_what_is_missing(have, missing):
    """On a laptop, or in a plain image."""
    with pytest.raises(UsageError, match=missing) as refused:
        plan.make_plan(env("", **have), nnodes=2, nproc_per_node=1, model=None, own_model=None)
    assert "secret" not in str(refused.value)


def test_more_nodes_than_the_cluster_has_are_refused_with_the_right_number():
    """The nodes that could take part are counted and named."""
    plan.check_fits(make("GPU-1"), CLUSTER)
    with pytest.raises(UsageError, match=r"3 nodes have 1 GPU \(rig1, rig2, rig3\)\. Use --nnodes 3 or less"):
        plan.check_fits(make("GPU-1", nnodes=4), CLUSTER)
    with pytest.raises(UsageError, match=r"1 node has 2 GPUs \(rig1\)"):
        plan.check_fits(make("", nnodes=2, nproc=2), CLUSTER)
    with pytest.raises(UsageError, match="no node of the cluster has 8 GPUs"):
        plan.check_fits(make("", nnodes=1, nproc=8), CLUSTER)


def test_models_are_found_in_any_spelling():
    """An unknown one is refused with those there are."""
    assert plan.find_model(CLUSTER, "rtx5070") == "RTX 5070"
    with pytest.raises(UsageError, match="RTX 5060, RTX 5070, RTX 5090"):
        plan.find_model(CLUSTER, "H100")


def test_ranks_get_what_the_user_set_and_no_credentials():
    """Names set since the notebook began, but none of the hub's or ipyparallel's."""
    before = {"PATH": "/bin", "NCCL_DEBUG": "WARN"}
    now = before | {"NCCL_DEBUG": "INFO", "JUPYTERHUB_API_TOKEN": "t", "IPP_CONNECTION_INFO": "{}", "MINE": "1"}
    assert environment.changed(before, now) == {"NCCL_DEBUG": "INFO", "MINE": "1"}
    assert environment.without_secrets(now).keys() == {"PATH", "NCCL_DEBUG", "MINE"}
