"""Nodes without Docker, as Slurm tells of them, and when what was there is over."""

from __future__ import annotations

import pytest

from gpuhub.backends.slurm.bare_nodes import build_node, find_clear_nodes, may_run
from gpuhub.broker_api.schemas import LeaseState
from gpuhub.config.machines.nodes import ExpectedGpus
from gpuhub.domain import lease_states
from gpuhub.domain.models import LeasedGpu, LeaseRow
from gpuhub.nodes.status import NodeStatus
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState, SlurmNode
from tests.support.broker.factories import lease_row
from tests.support.slurm.scripted_backend import slurm_cluster

NEVER_READ = NodeStatus(name="rig1")


def build_job_lease(job: int) -> LeaseRow:
    gpu = LeasedGpu(uuid="SLURM-rig1-0", node="rig1", index=0, model="RTX 5090", memory_mib=32607, worker=0)
    return lease_row(state=LeaseState.ACTIVE, nodes=("rig1",), gpus=(gpu,), granted_at=100.0, slurm_job=job)


def test_gpus_of_bare_nodes_are_numbered_by_type() -> None:
    """Models and memory are what the settings say of that type; a type that they do not name stands for itself."""
    node = SlurmNode(name="rig1", state="idle", takes_work=True, gpus={"rtx5090": 1, "gh200": 2})
    cluster = slurm_cluster()
    card = ExpectedGpus(model="NVIDIA GeForce RTX 5090", memory="32607M")
    first = cluster.nodes[0].model_copy(update={"gpus": (card,)})
    cluster = cluster.model_copy(update={"nodes": (first, *cluster.nodes[1:])})
    record = build_node(cluster, NEVER_READ, node, 50.0)
    assert [(gpu.uuid, gpu.index, gpu.model) for gpu in record.gpus] == [
        ("SLURM-rig1-0", 0, "RTX 5090"),
        ("SLURM-rig1-1", 1, "gh200"),
        ("SLURM-rig1-2", 2, "gh200"),
    ]
    assert record.gpus[0].memory_mib == 32607
    assert (record.is_up, record.is_reconciled, record.has_readings, record.is_fresh(60.0)) == (True, True, True, True)


@pytest.mark.parametrize("state", ["down*", "DOWN", "unknown", "fail"])
def test_node_that_is_down_has_the_reason_from_slurm(state: str) -> None:
    node = SlurmNode(name="rig1", state=state, takes_work=False, reason="fans")
    record = build_node(slurm_cluster(), NEVER_READ, node, 50.0)
    assert (record.is_up, record.unreachable_reason, record.down_since) == (False, f"Slurm reports {state}: fans", 50.0)
    later = build_node(slurm_cluster(), record, node, 70.0)
    assert later.down_since == 50.0
    back = build_node(slurm_cluster(), later, SlurmNode(name="rig1", state="idle", takes_work=True), 80.0)
    assert (back.is_up, back.unreachable_reason, back.down_since) == (True, None, None)


def test_drained_node_stays_up_for_its_jobs() -> None:
    node = SlurmNode(name="rig1", state="mixed+drain", takes_work=False, reason="fans")
    assert build_node(slurm_cluster(), NEVER_READ, node, 50.0).is_up


def test_node_unknown_to_slurm_is_unavailable() -> None:
    record = build_node(slurm_cluster(), NEVER_READ, None, 50.0)
    assert (record.is_up, record.unreachable_reason) == (False, "Slurm does not know this node")
    assert build_node(slurm_cluster(), record, None, 70.0).down_since == 50.0


def test_release_is_proven_when_the_job_has_ended() -> None:
    lease = build_job_lease(7)
    ending = lease_states.release(lease, "stopped", 200.0)
    assert find_clear_nodes(lease, set()) == ()
    assert find_clear_nodes(ending, {7}) == ()
    assert find_clear_nodes(ending, {8}) == ("rig1",)


def test_completing_job_may_still_run() -> None:
    job = SlurmJob(id=7, name="x", user_id=1, state=SlurmJobState.RUNNING)
    assert may_run(job)
    assert may_run(SlurmJob(id=7, name="x", user_id=1, state=SlurmJobState.CANCELLED, is_completing=True))
    assert may_run(SlurmJob(id=7, name="x", user_id=1, state=SlurmJobState.COMPLETING))
    assert not may_run(SlurmJob(id=7, name="x", user_id=1, state=SlurmJobState.CANCELLED))
