"""Problems of the machines that their owner is notified of: nodes that are down, failed GPUs, and full disks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuhub.broker_api.schemas import NodeState, NotificationKind
from gpuhub.domain.models import NotificationRow
from gpuhub.domain.notifications import build_condition
from gpuhub.nodes.gpu_health import NodeCondition, add_advice, describe_slowdown, find_node_gpu_failure
from gpuhub.nodes.status import GpuReading, NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Whether something has a problem now, and texts for its owner."""

    kind: NotificationKind
    #: Such as `node:rig1`.
    subject: str
    is_open: bool
    title: str
    body: str = ""


def list_conditions(record: NodeStatus, condition: NodeCondition, head_error: str | None = None) -> Iterator[Condition]:
    """Yield what is known of a node, its disk and its GPUs after a poll, and of the head node's disk.

    Args:
        record: The node as last polled.
        condition: The condition of the node itself.
        head_error: Why the head node's disk keeps all nodes from taking work; None if it does not.
    """
    name = record.name
    yield _build(
        NotificationKind.DISK_LOW,
        "head-disk",
        head_error,
        begin="Disk full: head node",
        end="The head node has enough free disk space again",
        effect="No node takes work",
    )
    if condition.state is NodeState.DOWN:
        body = f"{condition.message}. What runs there keeps its GPUs until the node answers."
        yield Condition(
            kind=NotificationKind.NODE_DOWN,
            subject=f"node:{name}",
            is_open=True,
            title=f"Node {name} is down",
            body=body,
        )
    if not record.is_up or record.is_put_to_sleep:
        return
    yield Condition(
        kind=NotificationKind.NODE_DOWN, subject=f"node:{name}", is_open=False, title=f"Node {name} answers again"
    )
    yield _build(
        NotificationKind.DISK_LOW,
        f"disk:{name}",
        None if record.disk_error == head_error else record.disk_error,
        begin=f"Disk full: node {name}",
        end=f"Node {name} has enough free disk space again",
        effect="It takes no work",
    )
    error = None if record.gpu_error is None else add_advice(record.gpu_error)
    yield _build(
        NotificationKind.GPU_FAILED,
        f"gpus:{name}",
        error,
        begin=f"The GPUs of {name} cannot be read",
        end=f"The GPUs of {name} can be read again",
        effect="They are not granted",
    )
    if error is None:
        for gpu in record.gpus:
            yield from _list_gpu_conditions(record, gpu)


def _list_gpu_conditions(record: NodeStatus, gpu: GpuReading) -> Iterator[Condition]:
    card, effect = f"GPU {gpu.index} ({gpu.model}) of {record.name}", "It is not granted"
    yield _build(
        NotificationKind.GPU_FAILED,
        f"gpu:{gpu.uuid}",
        find_node_gpu_failure(record, gpu),
        begin=f"{card} failed",
        end=f"{card} works again",
        effect=effect,
    )
    yield _build(
        NotificationKind.GPU_FAILED,
        f"slow:{gpu.uuid}",
        describe_slowdown(gpu),
        begin=f"{card} is slowed down",
        end=f"{card} is not slowed down any more",
        effect=effect,
    )


def _build(
    kind: NotificationKind, subject: str, problem: str | None, *, begin: str, end: str, effect: str
) -> Condition:
    if problem is None:
        return Condition(kind=kind, subject=subject, is_open=False, title=end)
    return Condition(kind=kind, subject=subject, is_open=True, title=begin, body=f"{effect}: {problem}.")


class MachineConditions:
    """The problems that were reported and are not over, so that each begin and each end is reported once."""

    def __init__(self, open_subjects: Iterable[str]) -> None:
        """`open_subjects` have a problem as the store knows it."""
        self._open = set(open_subjects)

    def update(self, conditions: Iterable[Condition], now: float) -> list[NotificationRow]:
        """Store what is known now; return the notifications of what has changed."""
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
