"""Problems of the machines that their owner is notified of: nodes that are down, failed GPUs, and full disks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuhub.broker_api.schemas import NodeState, NotificationKind
from gpuhub.domain.models import NotificationRow
from gpuhub.domain.notifications import build_condition
from gpuhub.nodes.gpu_health import NodeCondition, find_gpu_failure
from gpuhub.nodes.status import NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Whether something has a problem now, and texts for its owner."""

    kind: NotificationKind
    #: Such as `node:rig1`.
    subject: str
    is_open: bool
    title: str
    body: str = ""


def list_conditions(record: NodeStatus, condition: NodeCondition) -> Iterator[Condition]:
    """Yield what is known of a node, its GPUs and its disk after a poll."""
    name = record.name
    if condition.state is NodeState.DOWN:
        body = f"{condition.message}. What runs there keeps its GPUs until the node answers."
        yield Condition(
            kind=NotificationKind.NODE_DOWN,
            subject=f"node:{name}",
            is_open=True,
            title=f"Node {name} is down",
            body=body,
        )
    if not record.is_up:
        return
    yield Condition(
        kind=NotificationKind.NODE_DOWN, subject=f"node:{name}", is_open=False, title=f"Node {name} answers again"
    )
    yield Condition(
        kind=NotificationKind.DISK_LOW,
        subject=f"disk:{name}",
        is_open=record.disk_error is not None,
        title=f"Node {name} has enough free disk space again"
        if record.disk_error is None
        else f"Disk full: node {name}",
        body=f"It takes no work: {record.disk_error}." if record.disk_error else "",
    )
    for gpu in record.gpus:
        failure = find_gpu_failure(gpu)
        card = f"GPU {gpu.index} ({gpu.model}) of {name}"
        yield Condition(
            kind=NotificationKind.GPU_FAILED,
            subject=f"gpu:{gpu.uuid}",
            is_open=failure is not None,
            title=f"{card} works again" if failure is None else f"{card} failed",
            body="" if failure is None else f"It is not given to anyone: {failure}.",
        )


class MachineConditions:
    """The problems that were reported and are not over, so that each begin and each end is reported once."""

    def __init__(self, open_subjects: Iterable[str]) -> None:
        """`open_subjects` have a problem as the store knows it."""
        self._open = set(open_subjects)

    def update(self, conditions: Iterable[Condition], now: float) -> list[NotificationRow]:
        """Take over what is known now; return the notifications of what has changed."""
        rows = []
        for condition in conditions:
            if condition.is_open == (condition.subject in self._open):
                continue
            (self._open.add if condition.is_open else self._open.discard)(condition.subject)
            rows.append(
                build_condition(
                    condition.kind, condition.subject, condition.title, condition.body, now, is_open=condition.is_open
                )
            )
        return rows
