"""Wire models of the broker with defaults for what a test does not care about."""

from __future__ import annotations

from typing import Any

from gpuhub.broker_api.schemas import (
    LeasedGpuView,
    LeaseRequest,
    LeaseState,
    LeaseView,
    Purpose,
    QueueEntry,
    UsageView,
)
from tests.support.fake_broker import NOW


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
