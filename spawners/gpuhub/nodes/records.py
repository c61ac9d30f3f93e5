"""What is known of nodes and their GPUs, as values. Times are the broker's monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from gpuhub.gpus import Card

#: A GPU reading older than this is no base for a grant, seconds.
STALE_S = 15.0

#: A Docker daemon's id, and the boot id of its machine; None where not known.
Identity = tuple[str | None, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A compute process on a GPU, as NVML tells; the id is the machine's own."""

    pid: int
    #: None where NVML cannot tell.
    memory_mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """A GPU, or a MIG device, as NVML last told; None where it could not tell."""

    uuid: str
    #: NVML's number of the GPU; of a MIG device that of the GPU it is a part of.
    index: int
    model: str
    memory_mib: int
    #: Why it cannot be used, in NVML's words.
    error: str | None = None
    #: The driver still lists it.
    is_listed: bool = True
    capability: tuple[int, int] | None = None
    is_mig: bool = False
    #: The GPU that a MIG device is a part of.
    parent: str | None = None
    #: Uncorrectable memory errors since the driver was loaded.
    ecc_uncorrected: int | None = None
    #: A memory row that fails could not be replaced.
    remap_failed: bool | None = None
    utilisation_percent: int | None = None
    memory_used_mib: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    processes: tuple[Process, ...] | None = None

    @property
    def card(self) -> Card:
        """The GPU as far as placement cares."""
        return Card(model=self.model, memory_mib=self.memory_mib, capability=self.capability, is_mig=self.is_mig)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReading:
    """One line of a node's GPU agent."""

    n: int
    error: str | None
    gpus: tuple[GpuReading, ...]
    boot_id: str | None = None
    driver: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node at one moment."""

    name: str
    #: Its Docker daemon answers.
    is_up: bool = False
    #: Looks that failed, and looks that went well while it was not up, in a row.
    failures: int = 0
    good_looks: int = 0
    #: When it stopped to answer; None while it answers, and before the first look.
    down_since: float | None = None
    #: When it became unreachable, lately.
    flaps: tuple[float, ...] = ()
    #: Why the daemon does not answer, for a person.
    trouble: str | None = "has not been read yet"
    #: Every container of ours there belongs to an open lease: nothing unknown can hold a GPU.
    is_settled: bool = False
    #: An open lease began under another Docker daemon of the same machine: what the present one lists proves nothing
    #: about it.
    is_suspect: bool = False
    #: Of the Docker daemon that answers.
    daemon_id: str | None = None
    #: Of the machine as it runs now.
    boot_id: str | None = None
    #: NVIDIA's driver.
    driver: str | None = None
    gpus: tuple[GpuReading, ...] = ()
    #: GPUs were read at some time, now or in an earlier run of the broker.
    is_known: bool = False
    #: The last line's number and when it was first seen; None before the first line of this run.
    line: int | None = None
    read_at: float | None = None
    #: The last line was printed after this moment; None where that is not known.
    printed_after: float | None = None
    #: When the agent's lines were last looked at.
    looked_at: float | None = None
    #: Why its GPUs cannot be read, for a person.
    gpu_trouble: str | None = None
    #: Why its packet filter is not in place, for a person.
    filter_trouble: str | None = None

    def evolve(self, **changes: Any) -> Self:
        """A copy with changes."""
        return replace(self, **changes)

    @property
    def identity(self) -> Identity:
        """What a lease that begins here now is stored with."""
        return self.daemon_id, self.boot_id

    def takes_work(self) -> bool:
        """Whether containers can be put there, as far as the node itself goes."""
        return self.is_up and self.is_settled

    def is_fresh(self, now: float) -> bool:
        """Whether the last GPU reading can be trusted."""
        return self.read_at is not None and now - self.read_at <= STALE_S

    def is_read_after(self, moment: float) -> bool:
        """Whether the last GPU reading was made after that moment."""
        return self.printed_after is not None and self.printed_after >= moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What is known of a GPU's leases in this run of the broker."""

    #: A lease holds it, or a part of it.
    leased: bool = False
    #: When the last lease on it was proven gone; None where there was none.
    freed_at: float | None = None
