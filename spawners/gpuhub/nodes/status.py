"""Status of nodes and GPUs, and whether a node's Docker daemon answers. Times are the broker's monotonic seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from gpuhub.common.gpu import GpuSpec
from gpuhub.common.units import format_size
from gpuhub.nodes.power_status import PowerState, PowerStatus

#: A GPU reading older than this cannot be the base of a grant, seconds.
STALE_S = 15.0
#: Failed polls in a row after which a node is unreachable.
FAILURES_UNTIL_DOWN = 2
#: Successful polls in a row after which an unreachable node is up again.
POLLS_UNTIL_UP = 2
#: A node that became unreachable `FLAP_LIMIT` times within `FLAP_WINDOW_S` seconds is flapping and needs more polls.
FLAP_LIMIT = 3
FLAP_WINDOW_S = 600.0
POLLS_UNTIL_UP_WHEN_FLAPPING = 5
#: A Docker daemon's id, and the boot id of its machine; None where unknown.
NodeIdentity = tuple[str | None, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process on a GPU as NVML reports it; the id is the machine's own."""

    pid: int
    #: None where NVML does not report it.
    memory_mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """Speed of a PCIe link."""

    generation: int
    #: Number of lanes.
    width: int

    def is_below(self, other: PcieLink) -> bool:
        """Return whether it is slower in one of both."""
        return self.generation < other.generation or self.width < other.width

    def __str__(self) -> str:
        return f"×{self.width} of generation {self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFault:
    """A fault of a GPU that does not end by itself, and that later readings may not show."""

    #: UUID of the whole GPU.
    gpu: str
    node: str
    #: An Xid error, with its code, or a PCIe link that has become slower, with code 0.
    kind: Literal["xid", "link"]
    code: int
    #: When it last occurred, by the node's clock, and when it was noticed; seconds since 1970.
    occurred_at: float
    noticed_at: float
    #: The machine's boot in which it occurred; None if not known.
    boot_id: str | None
    #: Text for users.
    text: str
    #: The administrator who accepted the GPU again; None while it is blocked.
    accepted_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The last reading of a GPU or a MIG device; None where NVML does not report a value."""

    uuid: str
    #: NVML's index of the GPU; a MIG device has that of its GPU.
    index: int
    model: str
    memory_mib: int
    #: NVML's text for a GPU that cannot be used.
    error: str | None = None
    #: Whether the driver still lists it.
    is_listed: bool = True
    capability: tuple[int, int] | None = None
    is_mig: bool = False
    #: UUID of a MIG device's GPU.
    parent: str | None = None
    #: Uncorrectable memory errors since the driver was loaded.
    ecc_uncorrected: int | None = None
    #: Whether a failing memory row could not be replaced.
    remap_failed: bool | None = None
    #: Whether a failing memory row is replaced at the next reset only.
    remap_pending: bool | None = None
    #: Rows of memory that were replaced after correctable, and after uncorrectable errors.
    remapped_rows: tuple[int, int] | None = None
    utilisation_percent: int | None = None
    #: Time in which its memory was read or written, percent.
    memory_utilisation_percent: int | None = None
    memory_used_mib: int | None = None
    #: Energy since the driver was loaded, millijoules.
    energy_mj: int | None = None
    #: Why its clocks are lower than they could be: NVML's bit mask.
    clocks_event_reasons: int | None = None
    #: Whether the hardware has lowered its clocks for minutes.
    is_throttled: bool = False
    #: Its PCIe link now, the most that card and slot can, and the link under load; None until there was enough load.
    link: PcieLink | None = None
    link_limit: PcieLink | None = None
    loaded_link: PcieLink | None = None
    power_w: float | None = None
    #: The most that it may draw: the lowest of all limits that are set for it, watts.
    power_limit_w: float | None = None
    temperature_c: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    #: Processes that draw: of the machine's own screen, since containers have no graphics.
    graphics: tuple[GpuProcess, ...] | None = None

    @property
    def whole_uuid(self) -> str:
        """Return the UUID of the GPU, also for one of its MIG devices."""
        return self.parent or self.uuid

    @property
    def card(self) -> GpuSpec:
        """Return the properties of the GPU that placement uses."""
        return GpuSpec(model=self.model, memory_mib=self.memory_mib, capability=self.capability, is_mig=self.is_mig)


def find_power_limits(gpus: Iterable[GpuReading]) -> dict[int, float | None]:
    """Return each GPU's power limit by its index, watts; MIG devices have that of their GPU, which counts once."""
    return {gpu.index: gpu.power_limit_w for gpu in gpus}


@dataclass(frozen=True, slots=True, kw_only=True)
class XidErrors:
    """The driver's errors (Xid) of one GPU with one code, since the start of the node's GPU agent."""

    code: int
    count: int
    #: When the last one occurred, by the node's clock, seconds since 1970.
    last_at: float


#: Errors by the UUID of each GPU whose driver reports them.
XidsByGpu = Mapping[str, tuple[XidErrors, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReading:
    """One line of a node's GPU agent."""

    line_number: int
    error: str | None
    gpus: tuple[GpuReading, ...]
    boot_id: str | None = None
    driver: str | None = None
    #: Free space for Docker's data, bytes; None where NVML hangs, which the agent waits for.
    disk_free: int | None = None
    #: None where NVML fails.
    xids: XidsByGpu | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSize:
    """CPU and memory of a machine, as its Docker daemon reports them."""

    cpu_milli: int
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """The observed state of one node."""

    name: str
    #: Whether its Docker daemon answers.
    is_up: bool = False
    #: Failed polls in a row, and successful ones in a row while it was not up.
    failures: int = 0
    good_polls: int = 0
    #: Time since which it does not answer; None while it answers, and before the first poll.
    down_since: float | None = None
    #: Recent times at which it became unreachable.
    flaps: tuple[float, ...] = ()
    #: Why the daemon does not answer, for users.
    unreachable_reason: str | None = "has not been read yet"
    #: Whether every container of this instance there belongs to an open lease, so that none can hold a GPU unseen.
    is_reconciled: bool = False
    #: Whether an open lease began under another Docker daemon of the same machine. The current daemon's list proves
    #: nothing about such a lease.
    is_suspect: bool = False
    #: Id of the Docker daemon that answers.
    daemon_id: str | None = None
    #: Id of the machine's current boot.
    boot_id: str | None = None
    #: The most GPU memory of one program of its desktop, MiB; None without a desktop.
    desktop_mib: int | None = None
    #: Version of NVIDIA's driver.
    driver: str | None = None
    #: CPU and memory of the machine; None before the first answer.
    machine: MachineSize | None = None
    gpus: tuple[GpuReading, ...] = ()
    #: Xid errors of its GPUs, as far as their driver reports them.
    xids: XidsByGpu = field(default_factory=dict)
    #: Faults of its GPUs that are not over, by the UUID of the whole GPU.
    faults: Mapping[str, tuple[GpuFault, ...]] = field(default_factory=dict)
    #: Whether GPUs were ever read, in this or an earlier run of the broker.
    has_readings: bool = False
    #: Number of the agent's last line and when it was first seen; None before the first line of this run.
    line_number: int | None = None
    read_at: float | None = None
    #: Time after which the last line was printed; None where unknown.
    printed_after: float | None = None
    #: Time of the last poll of the agent's lines.
    polled_at: float | None = None
    #: Why its GPUs cannot be read, for users.
    gpu_error: str | None = None
    #: Why its firewall is not in place, for users.
    firewall_error: str | None = None
    #: Packets that its firewall has refused since its rules were applied; None if unknown.
    firewall_rejected: int | None = None
    #: Free space for Docker's data, bytes; None before the first reading.
    disk_free: int | None = None
    #: Why a full disk keeps it from taking work, for users.
    disk_error: str | None = None
    #: Whether it is on, asleep or on its way; None for a node that stays on.
    power: PowerStatus | None = None

    def evolve(self, **changes: Any) -> Self:
        """Return a copy with changes."""
        return replace(self, **changes)

    @property
    def is_put_to_sleep(self) -> bool:
        """Return whether it is expected not to answer."""
        return self.power is not None and self.power.state in {
            PowerState.STOPPING,
            PowerState.ASLEEP,
            PowerState.WAKING,
        }

    @property
    def identity(self) -> NodeIdentity:
        """Return the identity that is stored with a lease that begins on the node now."""
        return self.daemon_id, self.boot_id

    def is_fresh(self, now: float) -> bool:
        """Return whether the last GPU reading is recent enough."""
        return self.read_at is not None and now - self.read_at <= STALE_S

    def is_read_after(self, moment: float) -> bool:
        """Return whether the last GPU reading was made after that time."""
        return self.printed_after is not None and self.printed_after >= moment


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLeaseStatus:
    """State of a GPU's leases in this run of the broker."""

    #: Whether a lease holds it, or a part of it.
    leased: bool = False
    #: Time at which the last lease on it was proven released; None if there was none.
    freed_at: float | None = None
    #: Whether a suspended notebook can only continue with this GPU.
    is_awaited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """One node's cordon; a draining node's leases are ended as well."""

    node: str
    state: Literal["cordoned", "draining"] = "cordoned"
    by: str
    reason: str = ""
    at: float
    #: For a drain: time until leases there are ended, seconds.
    grace_s: int = 0

    @property
    def is_draining(self) -> bool:
        """Return whether leases on the node are being ended."""
        return self.state == "draining"


def describe_cordon(cordon: Cordon) -> str:
    """Return a text for users, such as `cordoned by root: new fans`."""
    text = f"{cordon.state} by {cordon.by}"
    return f"{text}: {cordon.reason}" if cordon.reason else text


def record_answer(node: NodeStatus, now: float) -> NodeStatus:
    """Return the status after an answer of the daemon. An unreachable node is up again after several answers.

    A node that never failed in this run of the broker is up at once.
    """
    if node.is_up:
        return node.evolve(failures=0, good_polls=0)
    good_polls = node.good_polls + 1
    needed = required_polls(node, now)
    if good_polls < needed:
        reason = _describe_recovery(node, good_polls, needed, now)
        return node.evolve(failures=0, good_polls=good_polls, unreachable_reason=reason)
    return node.evolve(is_up=True, failures=0, good_polls=0, down_since=None, unreachable_reason=None)


def record_failure(node: NodeStatus, reason: str, now: float) -> NodeStatus:
    """Return the status after a poll without an answer. The node is unreachable after several of them."""
    failures = node.failures + 1
    if failures < FAILURES_UNTIL_DOWN and node.is_up:
        return node.evolve(failures=failures)
    flaps = tuple(moment for moment in node.flaps if now - moment < FLAP_WINDOW_S)
    # Anything may happen there until it answers: it must be reconciled before it gets work again, and its daemon and
    # machine must be identified again.
    return node.evolve(
        is_up=False,
        failures=failures,
        good_polls=0,
        down_since=now if node.down_since is None else node.down_since,
        flaps=(*flaps, now) if node.is_up and not node.is_put_to_sleep else flaps,
        unreachable_reason=reason,
        is_reconciled=False,
        daemon_id=None,
        boot_id=None,
    )


def record_disks(node: NodeStatus, *, head_error: str | None, floor: int) -> NodeStatus:
    """Return the status with the error of a full disk, if any.

    Args:
        head_error: The error of the head node's disk, which keeps every node from taking work.
        floor: Free space below which a node takes no work, bytes.
    """
    own_error = find_disk_error(node.disk_free, "of Docker there", floor=floor, before=node.disk_error)
    return node.evolve(disk_error=own_error or head_error)


def find_disk_error(free: int | None, disk: str, *, floor: int, before: str | None) -> str | None:
    """Return the error of a full disk, if any; it ends when clearly more than the floor is free.

    Args:
        free: Free space, bytes; None where it is not known.
        disk: Which disk it is, after the word "disk".
        floor: Free space below which nodes take no work, bytes.
        before: The last error.
    """
    error = f"disk full: less than {format_size(floor)} are free on the disk {disk}"
    # Without a distance, a node on the border would come and go.
    needed = floor + floor // 10 if before == error else floor
    return error if free is not None and free < needed else None


def required_polls(node: NodeStatus, now: float) -> int:
    """Return the number of successful polls in a row after which the node is up."""
    if node.down_since is None:
        return 1
    return POLLS_UNTIL_UP_WHEN_FLAPPING if is_flapping(node, now) else POLLS_UNTIL_UP


def is_flapping(node: NodeStatus, now: float) -> bool:
    """Return whether the node became unreachable too often recently."""
    return sum(now - moment < FLAP_WINDOW_S for moment in node.flaps) >= FLAP_LIMIT


def _describe_recovery(node: NodeStatus, good_polls: int, needed: int, now: float) -> str:
    text = f"answers again; {needed - good_polls} more successful polls are needed before it gets work"
    if not is_flapping(node, now):
        return text
    count = sum(now - moment < FLAP_WINDOW_S for moment in node.flaps)
    return f"{text}, since it was unreachable {count} times within {FLAP_WINDOW_S / 60:.0f} minutes"
