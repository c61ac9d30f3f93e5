"""What a validation uses: the nodes that are up, their free GPUs, and the time limits of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuhub.broker_api.schemas import ClusterView, GpuState, GpuView, NodeState, NodeView, UsageView
from gpuhub.common.errors import Conflict, InvalidRequest
from gpuhub.config.users.users import UserSettings
from gpuhub.ops.validation.report import Check, failed, info, passed

#: Time that a job may take from the request to its end, besides what its program measures; seconds.
JOB_LIMIT_S = 240.0
#: Duration of the measurement of a GPU, seconds.
COMPUTE_S = 3.0
#: Duration of a transfer between two nodes, seconds.
TRANSFER_S = 1.0
#: Time for the steps of DDP, whose gradients take 9 s in each at 100 Mbit/s, seconds.
STEPS_S = 120.0
#: Time in which all GPUs must be free after the last job, seconds.
FREE_LIMIT_S = 90.0
#: Measurements around the transfer of a path, the computing around that of one GPU, and all jobs at once; seconds.
_PATH_OVERHEAD_S, _COMPUTE_OVERHEAD_S, _TOGETHER_S = 2.0, 2.0, 10.0
#: States of nodes that an administrator chose.
_LEFT_OUT = frozenset({NodeState.CORDONED, NodeState.DRAINING})


@dataclass(frozen=True, kw_only=True)
class ValidationPlan:
    """The nodes and GPUs that take part."""

    user: str
    #: Nodes that are up and have a free GPU.
    nodes: tuple[NodeView, ...]
    #: Names of all other nodes.
    other_nodes: tuple[str, ...]
    #: The free GPUs of `nodes`.
    gpus: tuple[GpuView, ...]
    #: What is wrong with the cluster before anything starts.
    checks: tuple[Check, ...]

    @property
    def together_limit_s(self) -> float:
        """Time limit of the jobs that measure in turns and then at once, seconds."""
        return JOB_LIMIT_S + _TOGETHER_S + (COMPUTE_S + _COMPUTE_OVERHEAD_S) * (len(self.gpus) + 1)

    @property
    def network_limit_s(self) -> float:
        """Time limit of the job that measures all paths, seconds."""
        count = len(self.nodes)
        return JOB_LIMIT_S + count * (count - 1) * (TRANSFER_S + _PATH_OVERHEAD_S)


def choose_user(users: UserSettings, name: str | None) -> str:
    """Return the named user, or the first one that may log in by name.

    Raises:
        InvalidRequest: cluster.toml names no user, and neither does the command.
    """
    if name:
        return name
    for known in (*users.allowed, *users.admins):
        return known
    raise InvalidRequest("cluster.toml has no user in [users] allowed: --user names the one whose jobs should run")


def build_plan(view: ClusterView, usage: UsageView, user: str) -> ValidationPlan:
    """Return what takes part; the cluster must be idle, and the user must be allowed to have all GPUs at once.

    Raises:
        Conflict: GPUs are in use, or requests wait.
        InvalidRequest: There is nothing to validate, the backend has no containers, or the user's limit is too low.
    """
    if not view.capabilities.containers:
        raise InvalidRequest(
            "validate compares the GPUs that jobs see with their UUIDs, which gpuhub knows only of nodes with Docker"
        )
    _check_idle(view)
    up = [node for node in view.nodes if node.state is NodeState.UP]
    nodes = tuple(node for node in up if _free_gpus(node))
    gpus = tuple(gpu for node in nodes for gpu in _free_gpus(node))
    if not gpus:
        raise InvalidRequest("no node that is up has a free GPU: `gpuhub node list` says why")
    if usage.max_gpus is not None and usage.max_gpus < len(gpus):
        raise InvalidRequest(
            f"{user} may have {usage.max_gpus} GPUs at once, and all {len(gpus)} are needed: name another user with "
            "--user, such as a member of a group with a higher max_gpus in cluster.toml"
        )
    taking_part = {node.name for node in nodes}
    return ValidationPlan(
        user=user,
        nodes=nodes,
        other_nodes=tuple(node.name for node in view.nodes if node.name not in taking_part),
        gpus=gpus,
        checks=tuple(check for node in view.nodes for check in _check_node(node)),
    )


def _free_gpus(node: NodeView) -> Sequence[GpuView]:
    return [gpu for gpu in node.gpus if gpu.state is GpuState.FREE]


def _check_idle(view: ClusterView) -> None:
    held = [gpu for node in view.nodes for gpu in node.gpus if gpu.state is GpuState.HELD]
    if held:
        holders = ", ".join(sorted({f"{gpu.node} by {gpu.holder.owner}" for gpu in held if gpu.holder})) or "other jobs"
        raise Conflict(f"GPUs are in use ({holders}), and validate needs all of them: wait, or `gpuhub lease list`")
    if view.waiting:
        raise Conflict(f"{view.waiting} requests wait for GPUs, and validate would delay them: `gpuhub lease list`")


def _check_node(node: NodeView) -> list[Check]:
    reason = f": {node.message}" if node.message else ""
    if node.state in _LEFT_OUT:
        return [info(f"{node.name}: state", f"{node.state}, so it takes no part{reason}")]
    if node.state is not NodeState.UP:
        return [
            failed(f"{node.name}: state", f"{node.state}{reason}", expected="up", advice=f"`gpuhub doctor {node.name}`")
        ]
    unusable = [gpu for gpu in node.gpus if gpu.state is not GpuState.FREE]
    checks = [
        failed(
            f"{node.name}: GPU {gpu.index}",
            f"{gpu.state}{f': {gpu.message}' if gpu.message else ''}",
            expected="free",
            advice=f"`gpuhub doctor {node.name}`, and nvidia-smi there",
        )
        for gpu in unusable
    ]
    if not node.gpus:
        return [
            failed(
                f"{node.name}: GPUs", f"none{reason}", expected="at least one", advice=f"`gpuhub doctor {node.name}`"
            )
        ]
    return checks or [
        passed(f"{node.name}: state", f"up, {len(node.gpus)} free GPU{'' if len(node.gpus) == 1 else 's'}")
    ]
