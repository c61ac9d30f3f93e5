"""Who takes part, from what the environment says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_launch import environment
from gpu_launch.broker import models
from gpu_launch.broker.gpu_request import Amount, GpuRequest
from gpu_launch.common.launch_spec import Membership
from gpu_launch.errors import UsageError
from gpu_launch.launch import plan

BROKER = {"GPUHUB_BROKER_URL": "http://10.77.0.1:8010/services/broker/", "JUPYTERHUB_API_TOKEN": "secret"}
MEMORY_MIB = {"RTX 5090": 32_607, "RTX 5070": 12_227, "RTX 5060": 8_151}


def cards(node, model, count):
    """A node's GPUs."""
    return tuple(
        models.Gpu(uuid=f"{node}-{index}", node=node, model=model, memory_mib=MEMORY_MIB[model])
        for index in range(count)
    )


CLUSTER = models.Cluster(
    nodes=tuple(
        models.Node(name=name, gpus=cards(name, model, count))
        for name, model, count in [("rig1", "RTX 5090", 2), ("rig2", "RTX 5070", 1), ("rig3", "RTX 5060", 1)]
    )
)


def env(gpus="", **more):
    """A notebook's environment on rig1."""
    return environment.read({"GPUHUB_NODE": "rig1", "GPUHUB_GPU_UUIDS": gpus, "HOME": "/home/ada"} | more)


def make(gpus="", nnodes=3, nproc=1, least=None, known=True, env_more=None, **demand):
    """A plan with the broker there; the GPUs are the cluster's own RTX 5090 unless they are not `known`."""
    return plan.make_plan(
        env(gpus, **BROKER, **(env_more or {})),
        nnodes=nnodes,
        least_nnodes=least,
        nproc_per_node=nproc,
        demand=GpuRequest(**demand),
        cards=cards("rig1", "RTX 5090", len(gpus.split(","))) if gpus and known else (),
    )


def test_own_gpu_participates_and_other_nodes_are_requested():
    """Three nodes from a notebook with one GPU: two workers, not on its own node, which is node 0."""
    made = make("GPU-1")
    assert (made.includes_notebook, made.workers, made.exclude_nodes) == (True, 2, ("rig1",))
    membership = Membership(
        includes_notebook=made.includes_notebook, workers=(0, 1), nodes=("rig1", "rig2"), nproc_per_node=1
    )
    assert [membership.node_rank(worker) for worker in (None, 0, 1)] == [0, 1, 2]


def test_notebook_without_gpu_requests_all_nodes():
    """Three nodes from a notebook without GPUs: three workers anywhere."""
    made = make("")
    assert (made.includes_notebook, made.workers, made.exclude_nodes) == (False, 3, ())
    assert (
        Membership(
            includes_notebook=made.includes_notebook,
            workers=(0, 1, 2),
            nodes=("rig1", "rig2", "rig3"),
            nproc_per_node=1,
        ).node_rank(0)
        == 0
    )


def test_node_ranks_are_renumbered_when_workers_leave():
    """Whoever is left keeps the order, from 0 on."""
    membership = Membership(
        includes_notebook=False, workers=(0, 1, 2), nodes=("rig1", "rig2", "rig3"), nproc_per_node=2, preemptions=1
    )
    left = membership.without(frozenset({0}))
    assert (left.participants, left.nnodes, left.ranks, left.node_rank(2)) == ((1, 2), 2, 4, 1)
    assert (left.preemptions, left.nodes, left.node_of(2)) == (1, ("rig2", "rig3"), "rig3")


def test_too_few_own_gpus_do_not_participate():
    """With two ranks a node, a notebook's single GPU does not take part."""
    assert not make("GPU-1", nproc=2).includes_notebook
    assert make("GPU-1, GPU-2", nproc=2).includes_notebook


@pytest.mark.parametrize(
    ("demand", "takes_part"),
    [
        ({"models": ("RTX 5070",)}, False),
        ({"models": ("RTX 5070", "RTX 5090")}, True),
        ({"models": ("RTX 5090",), "known": False}, False),
        ({"least_memory_mib": 32 * 1024}, True),
        ({"least_memory_mib": 48 * 1024}, False),
        ({"least_memory_mib": 16 * 1024, "env_more": {"GPUHUB_GPU_MEMORY_CAP_MIB": "8192"}}, False),
        ({"exclusive": True}, False),
        ({"cpus": Amount(4)}, False),
        ({"ram_mib": Amount(4096, or_more=True)}, False),
        ({"shm_mib": 512}, False),
        ({"stage": ("datasets/a",)}, False),
        ({"stage": ("datasets/a", "datasets/b/c"), "env_more": {"GPUHUB_STAGED": "datasets/a,datasets/b"}}, True),
        ({"stage": ("datasets/ab",), "env_more": {"GPUHUB_STAGED": "datasets/a"}}, False),
        ({"same_model": True}, True),
        ({"scavenge": True, "priority": -1, "time_limit_s": 60, "known": False}, True),
    ],
)
def test_own_gpu_participates_if_it_meets_the_constraints(demand, takes_part):
    """Demands are for every rank; a card that nobody knows is not good enough for them."""
    assert make("GPU-1", **demand).includes_notebook is takes_part


def test_same_model_requests_the_model_of_the_own_gpu():
    """As the broker does not know that the notebook's GPU takes part."""
    assert make("GPU-1", same_model=True).demand.models == ("RTX 5090",)
    assert make("", same_model=True).demand.models == ()


def test_exclusive_launch_excludes_the_notebooks_node():
    """Where the notebook itself runs."""
    assert make("", exclusive=True).exclude_nodes == ("rig1",)


def test_one_node_with_own_gpus_needs_no_broker():
    """A container with a GPU launches alone."""
    made = plan.make_plan(env("GPU-1"), nnodes=1, nproc_per_node=1, demand=GpuRequest())
    assert (made.includes_notebook, made.workers) == (True, 0)


def test_elastic_launch_includes_its_own_node():
    """1:3 with a GPU of its own: up to two workers, none of them needed."""
    made = make("GPU-1", least=1)
    assert (made.workers, made.least_workers, made.is_elastic) == (2, 0, True)
    assert not make("GPU-1").is_elastic


@pytest.mark.parametrize(
    ("have", "missing"),
    [({}, "GPUHUB_BROKER_URL is not set"), ({"GPUHUB_BROKER_URL": "http://x"}, "JUPYTERHUB_API_TOKEN is not set")],
)
def test_missing_broker_is_reported_in_one_line(have, missing):
    """On a laptop, or in a plain image."""
    with pytest.raises(UsageError, match=missing) as refused:
        plan.make_plan(env("", **have), nnodes=2, nproc_per_node=1, demand=GpuRequest())
    assert "secret" not in str(refused.value)


def test_too_many_nodes_are_refused_with_the_available_number():
    """The nodes that could take part are counted and named."""
    assert plan.fit(make("GPU-1"), CLUSTER) == make("GPU-1")
    with pytest.raises(UsageError, match=r"3 nodes have 1 GPU \(rig1, rig2, rig3\)\. Use --nnodes 3 or less"):
        plan.fit(make("GPU-1", nnodes=4), CLUSTER)
    with pytest.raises(UsageError, match=r"1 node has 2 GPUs \(rig1\)"):
        plan.fit(make("", nnodes=2, nproc=2), CLUSTER)
    with pytest.raises(UsageError, match=r"no node of the cluster has 8 GPUs\. Use --nproc-per-node 2 or less\.$"):
        plan.fit(make("", nnodes=1, nproc=8), CLUSTER)


@pytest.mark.parametrize(
    ("demand", "right"),
    [
        ({"nnodes": 1, "least_memory_mib": 80 * 1024}, r"no node of the cluster has 1 GPU of at least 80 GiB\.$"),
        ({"nnodes": 3, "least_memory_mib": 12 * 1024}, r"2 nodes have 1 GPU of at least 12 GiB \(rig1, rig2\)"),
        ({"nnodes": 2, "models": ("RTX 5070",)}, r"1 node has 1 RTX 5070 \(rig2\)\. Use --nnodes 1 or less"),
        ({"nnodes": 3, "models": ("RTX 5090", "RTX 5070")}, r"2 nodes have 1 RTX 5090 or RTX 5070 \(rig1, rig2\)"),
        ({"nnodes": 2, "same_model": True}, r"1 node has 1 GPU, all of one model \(rig"),
        ({"nnodes": 3, "exclusive": True}, r"2 nodes have 1 GPU other than .* own, rig1 \(rig2, rig3\)"),
        ({"nnodes": 1, "nproc": 2, "exclusive": True}, "no node of the cluster has 2 GPUs other than .* own, rig1"),
        ({"nnodes": 4, "least": 4}, "--nnodes 4 is more than the cluster has"),
    ],
)
def test_unsatisfiable_request_is_refused(demand, right):
    """With the nodes that could take part, so that the right number is seen."""
    with pytest.raises(UsageError, match=right):
        plan.fit(make("", **demand), CLUSTER)


def test_nodes_that_are_reserved_for_others_do_not_count():
    """The error names them; an elastic launch goes without them."""
    rig1, *others = CLUSTER.nodes
    restricted = replace(CLUSTER, nodes=(replace(rig1, is_open=False), *others))
    with pytest.raises(UsageError, match=r"2 nodes have 1 GPU \(rig2, rig3\)\. Use --nnodes 2 or less"):
        plan.fit(make("", nnodes=3), restricted)
    with pytest.raises(UsageError, match=r"2 GPUs \(rig1: restricted to groups that you are not in\)\."):
        plan.fit(make("", nnodes=1, nproc=2), restricted)
    assert plan.fit(make("", nnodes=9, least=1), restricted).nnodes == 2
    assert "rig1" not in plan.free_nodes(make("", nnodes=1), restricted)


def test_scavenging_launches_count_nodes_that_take_only_those():
    """They are placed on an owner's machine; other launches are not."""
    rig1, *others = CLUSTER.nodes
    first, closed = (
        replace(CLUSTER, nodes=(replace(rig1, is_open=False, takes_scavenging=takes), *others))
        for takes in (True, False)
    )
    assert plan.fit(make("", nnodes=3, scavenge=True), first).nnodes == 3
    for cluster, scavenge in ((first, False), (closed, True)):
        with pytest.raises(UsageError, match=r"2 nodes have 1 GPU \(rig2, rig3\)\. Use --nnodes 2 or less"):
            plan.fit(make("", nnodes=3, scavenge=scavenge), cluster)


def test_elastic_launch_requests_at_most_the_existing_nodes():
    """1:9 on three nodes is 1:3."""
    fitted = plan.fit(make("GPU-1", nnodes=9, least=1), CLUSTER)
    assert (fitted.nnodes, fitted.least_nnodes, fitted.workers) == (3, 1, 2)


def test_same_model_applies_within_one_node():
    """Two cards on one node must be alike."""
    mixed = (*cards("rig1", "RTX 5090", 1), *cards("rig1", "RTX 5070", 1))
    assert GpuRequest().count_usable(mixed) == 2
    assert GpuRequest(same_model=True).count_usable(mixed) == 1


def test_request_omits_options_that_were_not_given():
    """In the broker's own words, so that its defaults stay its own."""
    assert GpuRequest().build_body() == {}
    assert GpuRequest(models=("RTX 5090", "RTX 5070"), scavenge=True, time_limit_s=7200).build_body() == {
        "models": ["RTX 5090", "RTX 5070"],
        "scavenge": True,
        "time_limit_s": 7200,
    }


def test_models_are_found_in_any_spelling():
    """An unknown one is refused with those there are."""
    assert plan.find_model(CLUSTER, "rtx5070") == "RTX 5070"
    with pytest.raises(UsageError, match="RTX 5060, RTX 5070, RTX 5090"):
        plan.find_model(CLUSTER, "H100")


def test_ranks_get_the_users_variables_and_no_credentials():
    """Names set since the notebook began, but none of the hub's or ipyparallel's."""
    before = {"PATH": "/bin", "NCCL_DEBUG": "WARN"}
    now = before | {"NCCL_DEBUG": "INFO", "JUPYTERHUB_API_TOKEN": "t", "IPP_CONNECTION_INFO": "{}", "MINE": "1"}
    assert environment.find_changes(before, now) == {"NCCL_DEBUG": "INFO", "MINE": "1"}
    assert environment.remove_secrets(now).keys() == {"PATH", "NCCL_DEBUG", "MINE"}
