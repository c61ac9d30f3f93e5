"""Nodes with failed GPUs are drained in Slurm, which knows no failed GPU, and undrained once the GPUs work again.

Reasons of these drains begin with `PREFIX`. A node that takes no work for any other reason is not changed: an
administrator or Slurm itself decided so.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuhub.backends.interface import BackendHost
from gpuhub.nodes.gpu_health import describe_slowdown, find_node_gpu_failure
from gpuhub.nodes.status import NodeStatus
from gpuhub.slurm_client.interface import SlurmClient, SlurmRefused
from gpuhub.slurm_client.models import SlurmNode, SlurmSnapshot

log = logging.getLogger(__name__)

#: Beginning of the reasons of gpuhub's drains, also of those by `slurm_client/health.sh`.
PREFIX = "gpuhub: GPU"
#: Interval between two attempts at a change that Slurm refuses, seconds.
_RETRY_S = 60.0
#: The problem of one GPU in a reason such as `gpuhub: GPU 0: Xid 79, …; GPU 2: …`.
_PROBLEM = re.compile(r"GPU (\d+): (.*?)(?=; GPU|$)")


@dataclass(frozen=True, slots=True)
class DrainChange:
    """A drain, or a new reason for one; without a reason the end of a drain."""

    node: str
    reason: str | None


class GpuDrains:
    """Drains and undrains nodes by the last readings of their GPUs."""

    def __init__(self, api: SlurmClient, host: BackendHost, *, node_names: Mapping[str, str]) -> None:
        """`node_names` has gpuhub's names of the nodes by Slurm's."""
        self._api, self._host, self._node_names = api, host, node_names
        #: Changes that Slurm has refused, with the time to try again (monotonic).
        self._refused: dict[DrainChange, float] = {}

    async def update(self, snapshot: SlurmSnapshot) -> None:
        """Make the changes that follow from the last readings; one that Slurm refuses is tried again later."""
        now = self._host.clock.monotonic()
        changes = list(find_changes(snapshot, self._host.nodes(), self._node_names, now))
        self._refused = {change: at for change, at in self._refused.items() if change in changes}
        for change in changes:
            if now >= self._refused.get(change, now):
                await self._apply(change, now)

    async def _apply(self, change: DrainChange, now: float) -> None:
        try:
            if change.reason is None:
                await self._api.undrain_node(change.node)
            else:
                await self._api.drain_node(change.node, change.reason)
        except SlurmRefused as error:
            if change not in self._refused:
                log.warning("Slurm's node %s cannot be changed (%s): %s", change.node, change.reason, error)
            self._refused[change] = now + _RETRY_S
        else:
            log.info("Slurm's node %s is %s", change.node, change.reason or "not drained any more")


def find_changes(
    snapshot: SlurmSnapshot, nodes: Mapping[str, NodeStatus], node_names: Mapping[str, str], monotonic: float
) -> Iterator[DrainChange]:
    """Yield the drains that begin, end or get another reason.

    Args:
        snapshot: Slurm's nodes as last polled.
        nodes: What is known of gpuhub's nodes.
        node_names: gpuhub's names of the nodes by Slurm's.
        monotonic: Time now; a node without a fresh reading is not changed.
    """
    for theirs in snapshot.nodes:
        ours = nodes.get(node_names.get(theirs.name, ""))
        # What cannot be read is no defect of a GPU: the agent itself may be at fault.
        if ours is None or not ours.is_up or not ours.is_fresh(monotonic) or ours.gpu_error is not None:
            continue
        reason, before = _describe_failures(ours), theirs.reason if is_drained_by_gpuhub(theirs) else None
        if reason != before and (theirs.takes_work or before is not None):
            yield DrainChange(theirs.name, reason)


def is_drained_by_gpuhub(node: SlurmNode) -> bool:
    """Return whether a node takes no work because gpuhub found one of its GPUs failed."""
    return not node.takes_work and node.reason.startswith(PREFIX)


def parse_problems(node: SlurmNode) -> dict[int, str]:
    """Return the problems of a node's GPUs by index, as the reason of its drain has them."""
    return {int(index): text for index, text in _PROBLEM.findall(node.reason)} if is_drained_by_gpuhub(node) else {}


def _describe_failures(node: NodeStatus) -> str | None:
    problems = [
        f"GPU {gpu.index}: {problem}"
        for gpu in node.gpus
        if (problem := find_node_gpu_failure(node, gpu) or describe_slowdown(gpu)) is not None
    ]
    return f"gpuhub: {'; '.join(problems)}" if problems else None
