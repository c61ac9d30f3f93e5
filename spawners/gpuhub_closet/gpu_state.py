"""The files of a node's simulated GPUs, which the containers with a GPU see read-only and up to date.

A GPU's folder `<index>` holds two files of `key value` lines: `card` has its model, `live` its load and its fault. The
simulated library reads both at every call.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import StrEnum

from gpuhub.common.errors import SettingsError
from gpuhub.common.paths import Paths
from gpuhub_closet import shell
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import ClosetNode, ClosetPlan, SimulatedGpu, gpu_uuid, mig_uuid


class GpuFault(StrEnum):
    """A fault of a simulated GPU."""

    NONE = "none"
    #: NVML answers "GPU is lost" for the GPU, and no new container gets it.
    LOST = "lost"
    #: NVML answers "Unknown Error" for the GPU, and no new container gets it.
    FALLEN_OFF_BUS = "fallen_off_bus"
    #: NVML does not start where the GPU is visible: the driver was upgraded without a restart.
    DRIVER_MISMATCH = "driver_mismatch"
    #: NVML counts an uncorrectable memory error.
    ECC = "ecc"
    #: NVML reports that a failing memory row could not be replaced.
    REMAP_FAILED = "remap_failed"
    #: NVML reports that a failing memory row waits to be replaced.
    REMAP_PENDING = "remap_pending"
    #: NVML's calls about the GPU do not return while it has this fault.
    HANG = "hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigLoad:
    """The load of a MIG device."""

    memory_used_mib: int = 0
    #: Process id and memory in MiB of each program.
    processes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """The load and the fault of a GPU."""

    utilisation_percent: int = 0
    memory_used_mib: int = 0
    fault: GpuFault = GpuFault.NONE
    #: Why its clocks are lowered, as NVML's bit mask; an idle GPU has bit 0 in addition.
    clocks_event_reasons: int = 0
    #: Code of the last Xid error, and how many there were.
    xid: int = 0
    xid_count: int = 0
    #: Lanes of its PCIe link.
    link_width: int = 16
    #: Process id and memory in MiB of each program on the GPU.
    processes: tuple[tuple[int, int], ...] = ()
    #: The load of the MIG devices of a GPU in MIG mode, by position.
    mig_devices: tuple[MigLoad, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.utilisation_percent <= 100:
            raise SettingsError(f"utilisation {self.utilisation_percent} %: it must be between 0 and 100")
        if self.memory_used_mib < 0:
            raise SettingsError(f"memory used {self.memory_used_mib} MiB: it cannot be negative")


def format_gpu(gpu: SimulatedGpu, *, index: int, uuid: str) -> str:
    """Return the text of the file `card`."""
    major, minor = gpu.capability
    text = (
        f"index {index}\nname {gpu.name}\nuuid {uuid}\nminor {index}\nbus {index + 1}\n"
        f"power_limit_w {gpu.power_limit_w}\nmemory_mib {gpu.memory_mib}\ncapability {major}.{minor}\n"
    )
    mig_lines = (
        f"mig_device {slot} {mig_uuid(uuid, slot)} {device.memory_mib} {device.profile}\n"
        for slot, device in enumerate(gpu.mig_devices)
    )
    return text + ("mig_mode 1\n" if gpu.mig_devices else "") + "".join(mig_lines)


def format_load(load: GpuLoad) -> str:
    """Return the text of the file `live`."""
    head = f"utilization {load.utilisation_percent}\nmemory_used_mib {load.memory_used_mib}\nfault {load.fault}\n"
    head += f"clocks_event_reasons {load.clocks_event_reasons}\nxid {load.xid} {load.xid_count}\n"
    head += f"link_width {load.link_width}\n"
    lines = [f"process {pid} {used}\n" for pid, used in load.processes]
    for slot, device in enumerate(load.mig_devices):
        lines.append(f"mig_memory_used_mib {slot} {device.memory_used_mib}\n")
        lines += [f"mig_process {slot} {pid} {used}\n" for pid, used in device.processes]
    return head + "".join(lines)


def ensure_gpus(plan: ClosetPlan, node: ClosetNode, paths: Paths) -> None:
    """Write the files of the node's GPUs, and remove those of others; load and faults that were set before are kept."""
    gpus = node_paths(paths, node).gpus
    for former in gpus.iterdir() if gpus.exists() else ():
        if int(former.name) >= len(node.gpus):
            shutil.rmtree(former)
    for index, gpu in enumerate(node.gpus):
        folder = gpus / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        uuid = gpu_uuid(plan.instance, node.name, index)
        shell.replace_file(folder / "card", format_gpu(gpu, index=index, uuid=uuid).encode())
        if not (folder / "live").exists():
            shell.replace_file(folder / "live", format_load(GpuLoad()).encode())
