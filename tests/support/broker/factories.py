"""Wire models and rows of the broker with defaults for what a test does not care about."""

from __future__ import annotations

from typing import Any

from gpuhub.broker.state.transaction import RowIndex, Transaction
from gpuhub.broker_api.schemas import (
    LeasedGpuView,
    LeaseRequest,
    LeaseState,
    LeaseView,
    Purpose,
    QueueEntry,
    UsageView,
)
from gpuhub.common.gpu import GpuSpec
from gpuhub.domain import job_states, lease_states
from gpuhub.domain.models import JobRow, LeaseRow, LedgerSnapshot, ResourceRequest
from gpuhub.scheduler.interface import GpuSlot, NodeAllocation
from tests.support.hub.fake_broker import NOW

CARD = GpuSpec(model="RTX 5090", memory_mib=32607)


def held(**changes: object) -> LeaseView:
    return lease("GPU-a").model_copy(update={"id": "l0123456789abcdef", "state": LeaseState.ACTIVE, **changes})


def lease(*uuids: str, server: str = "") -> LeaseView:
    gpus = tuple(
        LeasedGpuView(uuid=uuid, node="rig1", index=n, model="RTX 5090", memory_mib=32607)
        for n, uuid in enumerate(uuids)
    )
    return LeaseView(
        id="lease-1",
        owner="ada",
        purpose=Purpose.NOTEBOOK,
        subject=server,
        profile="big",
        state=LeaseState.GRANTED,
        version=2,
        position=None,
        waiting_for=None,
        nodes=("rig1",),
        gpus=gpus,
        epoch=1,
        created_at=NOW,
        granted_at=NOW,
        expires_at=None,
        reason=None,
    )


def ask(profile: str, owner: str) -> LeaseRequest:
    return LeaseRequest(profile=profile, key=f"{owner}-{profile}", owner=owner)


USAGE = UsageView(
    owner="ada",
    gpus=2,
    waiting=1,
    gpu_hours_week=13.25,
    decayed_gpu_hours=4,
    penalty_s=720,
    max_gpus=4,
    max_gpu_hours_week=None,
    max_waiting=16,
)


def entry(position: int, owner: str, **more: Any) -> QueueEntry:
    return QueueEntry(
        lease=f"l{position}", position=position, owner=owner, purpose=Purpose.JOB, wants="8 GPUs", since=NOW, **more
    )


def build_running_job(nodes: int = 2, **ask: Any) -> tuple[JobRow, LeaseRow]:
    """Return a running job and its lease."""
    asked = LeaseRow(
        id="l1", seq=1, key="job:l1", owner="ada", groups=("lab",), purpose=Purpose.JOB, subject="j1", profile=None,
        resources=ResourceRequest(nodes=nodes, **ask), created_at=1.0, since=1.0, time_limit_s=1000,
    )  # fmt: skip
    names = [f"rig{number}" for number in range(1, nodes + 1)]
    shares = [NodeAllocation(node=n, slots=(GpuSlot(uuid=f"GPU-{n}", node=n, index=0, card=CARD),)) for n in names]
    lease = lease_states.activate(lease_states.grant(asked, shares, 10.0), None, 10.0)
    job = JobRow(
        id="j1", run_id="run-000001", owner="ada", server="", notebook_lease=None, lease_id="l1", image="i",
        nnodes=nodes, nproc_per_node=1, created_at=1.0, since=1.0,
    )  # fmt: skip
    job = job_states.start(job, lease, 10.0)
    for index in range(nodes):
        job = job_states.record_worker_start(job, index, f"c{index}", 11.0)
    return job, lease


def build_transaction(job: JobRow, lease: LeaseRow, now: float) -> Transaction:
    index = RowIndex()
    index.replace_lease(None, lease)
    index.replace_job(None, job)
    return Transaction(LedgerSnapshot(leases={lease.id: lease}, jobs={job.id: job}), index, now, seq=7)


def lease_row(**changes: object) -> LeaseRow:
    """Return ada's request for a notebook, made at 100."""
    row = LeaseRow(
        id="l1",
        seq=1,
        key="k",
        owner="ada",
        purpose=Purpose.NOTEBOOK,
        subject="",
        profile="rtx5090",
        resources=ResourceRequest(),
        created_at=100.0,
        since=100.0,
    )
    return row.evolve(**changes)
