"""What others' Slurm jobs have, on the cluster as everybody sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

import pytest

from gpuhub.backends.builtin import BuiltinBackend
from gpuhub.backends.interface import ExternalUsage
from gpuhub.backends.slurm.backend import build_capabilities
from gpuhub.backends.slurm.external_jobs import build_partitions, build_usage, describe_job
from gpuhub.backends.slurm.scheduler import SlurmScheduler
from gpuhub.broker.views import cluster_view
from gpuhub.broker.views.gpu_summary import ClusterViewInput
from gpuhub.broker_api.schemas import ClusterView, GpuState, GpuView, LeaseState, NodeState, Purpose
from gpuhub.domain.models import LeasedGpu, LeaseRow, ResourceRequest
from gpuhub.nodes.inventory import GpuReading, Inventory, build_inventory
from gpuhub.scheduler.interface import GpuSlot, NodeCapacity, SchedulerSnapshot, SchedulingRequest
from gpuhub.scheduler.scheduler import BaseScheduler, BuiltinScheduler
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState, SlurmNode, SlurmPartition, SlurmSite, SlurmSnapshot
from gpuhub.web.text import count_totals
from tests.support.clusters import build_cluster
from tests.support.slurm.scripted_backend import build_backend
from tests.support.slurm.scripted_slurm import ScriptedSlurm

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC).timestamp()
HOUR = 3600.0
CARDS = {"rig1": ("RTX 5090", 32607), "rig2": ("RTX 5070", 12227), "rig3": ("RTX 5060", 8151)}
CAROL = SlurmJob(
    id=17,
    name="train",
    user_id=1007,
    user_name="carol",
    state=SlurmJobState.RUNNING,
    started_at=NOW - HOUR,
    ends_at=NOW + HOUR,
    nodes=("rig1",),
    gpus={"rig1": (0,)},
)
SITE = SlurmSite(
    version=(22, 5, 8),
    cluster="lab",
    partitions=(
        SlurmPartition(
            name="gpu", is_default=True, max_time_s=8 * 3600, default_time_s=3600, nodes=("rig1", "rig2", "far")
        ),
        SlurmPartition(name="small", is_up=False, max_nodes=1, nodes=("rig3",)),
        SlurmPartition(name="cpu", nodes=("far",)),
    ),
    nodes=tuple(SlurmNode(name=name, state="idle", takes_work=True) for name in CARDS),
    has_accounting=False,
)
SLURM = build_cluster(engine="slurm")


def read_inventory() -> Inventory:
    """Every node answers, and its card was read just now."""
    seen = {
        name: [GpuReading(uuid=f"GPU-{name}", index=0, model=model, memory_mib=mib, processes=(), memory_used_mib=0)]
        for name, (model, mib) in CARDS.items()
    }
    inventory = build_inventory(SLURM, seen)
    for record in list(inventory.nodes.values()):
        inventory = inventory.with_node(
            record.evolve(is_up=True, is_reconciled=True, read_at=0.0, unreachable_reason=None, daemon_id="d")
        )
    return inventory


@dataclass(frozen=True, kw_only=True)
class FakeExternalScheduler:
    """What Slurm reports of others, and of its partitions."""

    site: SlurmSite | None = None
    outside: Mapping[str, SlurmJob] = field(default_factory=dict)
    away: Mapping[str, str] = field(default_factory=dict)
    waiting: Sequence[SlurmJob] = ()

    def find_external_jobs(self) -> Mapping[str, SlurmJob]:
        return self.outside

    def find_unavailable(self) -> Mapping[str, str]:
        return self.away

    def list_external_pending(self) -> Sequence[SlurmJob]:
        return self.waiting


def build_view(
    beside: FakeExternalScheduler,
    *leases: LeaseRow,
    scheduler: BaseScheduler | None = None,
    external: SlurmScheduler | None = None,
) -> ClusterView:
    """The cluster, with these leases and waiting requests, and what Slurm says besides; `external` instead of both."""
    scheduler = scheduler or external
    known, inventory = scheduler or BuiltinScheduler(), read_inventory()
    cards = {name: record.gpus[0] for name, record in inventory.nodes.items()}
    slots = {name: GpuSlot(uuid=gpu.uuid, node=name, index=0, card=gpu.card) for name, gpu in cards.items()}
    waiting = [lease for lease in leases if lease.state is LeaseState.REQUESTED]
    known.rebuild(
        SchedulerSnapshot(
            nodes=[NodeCapacity(name=name, slots=(slot,)) for name, slot in slots.items()],
            requests=[
                SchedulingRequest(
                    id=lease.id, owner=lease.owner, created_at=lease.created_at, slurm_job=lease.slurm_job
                )
                for lease in waiting
            ],
        )
    )
    scene = ClusterViewInput(
        cluster=SLURM,
        leases={lease.id: lease for lease in leases},
        places={},
        inventory=inventory,
        scheduler=known,
        now=NOW,
        monotonic=0.0,
        capabilities=build_capabilities(SLURM),
        external=build_usage(external or beside, NOW),  # type: ignore[arg-type]
        build_partitions=partial(build_partitions, SLURM, beside.site),
    )
    return cluster_view.build_cluster(scene)


def lease(name: str, **changes: object) -> LeaseRow:
    """A notebook's lease that waits."""
    row = LeaseRow(
        id=name,
        seq=1,
        key=name,
        owner="ada",
        purpose=Purpose.NOTEBOOK,
        subject="",
        profile="big",
        resources=ResourceRequest(),
        created_at=NOW - HOUR,
        since=NOW,
    )
    return row.evolve(**changes)


def gpu_of(view: ClusterView, node: str) -> GpuView:
    return next(one for one in view.nodes if one.name == node).gpus[0]


def test_gpus_of_external_jobs_are_not_free() -> None:
    """Its user and when it ends are told, on the GPU and with the profile that would want it."""
    view = build_view(FakeExternalScheduler(site=SITE, outside={"GPU-rig1": CAROL}))
    gpu = gpu_of(view, "rig1")
    assert gpu.state is GpuState.OUTSIDE
    assert gpu.message is not None
    assert gpu.message.startswith("Slurm job 17 of carol, until ")
    assert gpu.holder is not None
    assert (gpu.holder.owner, gpu.holder.slurm_job, gpu.holder.is_outside) == ("carol", 17, True)
    assert gpu.holder.until is not None
    assert gpu.holder.until.timestamp() == NOW + HOUR
    big = next(profile for profile in view.profiles if profile.name == "big")
    assert ([holder.owner for holder in big.holders], big.total) == (["carol"], 1)
    totals = count_totals(view)
    assert totals is not None
    assert (totals.free, totals.held, totals.gpus_unusable) == (2, 1, 0)
    assert [(kind.model, kind.free, kind.total) for kind in totals.kinds] == [
        ("RTX 5060", 1, 1),
        ("RTX 5070", 1, 1),
        ("RTX 5090", 0, 1),
    ]


def test_lease_takes_precedence_over_a_completing_job() -> None:
    """Its own holder is told, by its Slurm job."""
    held = lease(
        "l1",
        state=LeaseState.ACTIVE,
        nodes=("rig1",),
        slurm_job=12,
        gpus=(LeasedGpu(uuid="GPU-rig1", node="rig1", index=0, model="RTX 5090", memory_mib=32607, worker=0),),
    )
    gpu = gpu_of(build_view(FakeExternalScheduler(outside={"GPU-rig1": CAROL}), held), "rig1")
    assert gpu.state is GpuState.HELD
    assert gpu.holder is not None
    assert (gpu.holder.owner, gpu.holder.slurm_job, gpu.holder.is_outside) == ("ada", 12, False)


def test_unavailable_node_has_the_reason_from_slurm() -> None:
    """Slurm's words stand on it and on its free GPUs; what a job has there still runs."""
    view = build_view(
        FakeExternalScheduler(away={"rig1": "drained: fans", "rig2": "down*"}, outside={"GPU-rig1": CAROL})
    )
    rig1, rig2 = view.nodes[:2]
    assert (rig1.state, rig1.message) == (NodeState.CORDONED, "Slurm starts no jobs on this node: drained: fans")
    assert rig1.gpus[0].state is GpuState.OUTSIDE
    assert (rig2.gpus[0].state, rig2.gpus[0].message) == (
        GpuState.UNAVAILABLE,
        "Slurm starts no jobs on this node: down*",
    )
    assert gpu_of(view, "rig3").state is GpuState.FREE


def test_partitions_have_limits_and_free_gpus() -> None:
    """Those that have nodes of gpuhub's; profiles that name none are with the default."""
    view = build_view(FakeExternalScheduler(site=SITE, outside={"GPU-rig1": CAROL}))
    gpu, small = view.partitions
    assert (gpu.name, gpu.is_default, gpu.longest_s, gpu.usual_s, gpu.nodes) == ("gpu", True, 28800, 3600, 2)
    assert [(kind.model, kind.free, kind.total) for kind in gpu.gpus] == [("RTX 5070", 1, 1), ("RTX 5090", 0, 1)]
    assert gpu.profiles == ("big", "small", "cpu")
    assert (small.name, small.is_up, small.most_nodes, small.profiles) == ("small", False, 1, ())
    assert view.engine == "slurm"
    assert build_view(FakeExternalScheduler()).partitions == ()


def test_queue_positions_include_external_jobs() -> None:
    """Jobs beside gpuhub's wait in the same queue and have theirs; those that want GPUs are counted."""
    scheduler = SlurmScheduler(instance="gh", node_names={name: name for name in CARDS})
    pending = [
        replace(
            CAROL,
            id=number,
            state=SlurmJobState.PENDING,
            priority=priority,
            gpus={},
            nodes=(),
            wants=wants,
            reason=reason,
        )
        for number, priority, wants, reason in (
            (21, 300, "gpu:rtx5090:1", "Resources"),
            (22, 200, "gpu:1", "Priority"),
            (23, 100, "gpu:1", "Priority"),
            (24, 90, "", "Priority"),
            (25, 80, "gpu:1", "JobHeldUser"),
        )
    ]
    scheduler.observe(SlurmSnapshot(jobs=tuple(pending), nodes=()))
    row = lease("l1", slurm_job=22)
    build_view(FakeExternalScheduler(), row, scheduler=scheduler)
    view = build_view(FakeExternalScheduler(), row, external=scheduler)
    assert [(entry.lease, entry.position) for entry in view.queue] == [("l1", 2)]
    assert (view.waiting, view.waiting_outside) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ends_at": None}, "Slurm job 17 of carol, without a time limit"),
        ({"ends_at": None, "user_name": ""}, "Slurm job 17 of user 1007, without a time limit"),
    ],
)
def test_external_job_is_described(changes: dict[str, object], text: str) -> None:
    assert describe_job(replace(CAROL, **changes), NOW) == text  # type: ignore[arg-type]


def test_description_names_the_day_of_a_later_end() -> None:
    """With the clock alone it would be today."""
    assert len(describe_job(replace(CAROL, ends_at=NOW + 48 * HOUR), NOW).split("until ")[1].split()) == 3


def test_builtin_backend_has_no_external_usage() -> None:
    """And Slurm's has nothing before it was polled."""
    assert BuiltinBackend(SLURM).external_usage(NOW) == ExternalUsage()
    backend = build_backend(SLURM, ScriptedSlurm())
    backend.site = SITE
    assert backend.external_usage(NOW) == ExternalUsage()
    assert (
        backend.build_partitions(build_view(FakeExternalScheduler()).nodes)
        == build_view(FakeExternalScheduler(site=SITE)).partitions
    )
