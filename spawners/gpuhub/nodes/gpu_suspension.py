"""The script that moves a container's GPU memory into host memory, and back, with the CUDA driver's checkpoint calls.

    suspend CONTAINER GPU MAX-MIB     free the GPU; the container's processes keep their memory, and wait in CUDA calls
    resume CONTAINER GPU              bring everything back onto the same GPU, which must be empty

It prints one line of JSON: `{"outcome": "done", "text": "", "moved_mib": 8120}`. The outcome is

- `done`: the GPU is proven empty, or the memory is back and its processes continue;
- `refused`: nothing has changed, and `text` is the reason, for the notebook's owner;
- `busy` (resume): others still use the GPU, and nothing has changed;
- `failed`: the processes cannot continue.

Both commands may be repeated after they were interrupted at any point. While a container is suspended, `/dev/null` is
mounted over its GPU's device file, so that no program of it can start to use the GPU.

It runs on the node as root, in a container of its own with the machine's process ids, every GPU and the rights to enter
and to stop other containers' processes. It uses Python's standard library and pynvml alone: the broker passes this
file's text to `python3 -c`.

Source: CUDA Driver API, "Coredump Attributes Control" and "CUDA Checkpointing" (CUDA 12.8 and newer, driver 570).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

#: States of a process, by the driver.
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
#: CUDA's result for a process that uses no GPU, or has not started to.
SUCCESS = 0
#: Time for the calls that run on a GPU to end before a process is stopped, milliseconds.
LOCK_TIMEOUT_MS = 10_000
#: Memory that an empty GPU may have in use, and host memory that stays free, MiB.
EMPTY_MIB = 512
HOST_RESERVE_MIB = 1024
#: Time until the driver no longer lists processes that have left a GPU, seconds.
SETTLE_S = 10.0
#: Maximum number of processes of one container that are moved.
MAX_PROCESSES = 16
#: What the script does in a container's mount namespace.
HIDE, SHOW = "hide", "show"
_CALLS = ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")
_MS_BIND, _MNT_DETACH = 4096, 2
_CLONE_NEWNS = 0x00020000


class Outcome(Exception):
    """The command ends here, with this result."""

    def __init__(self, outcome: str, text: str = "", moved_mib: int = 0) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.text = text
        self.moved_mib = moved_mib


def refuse(text: str) -> NoReturn:
    raise Outcome("refused", text)


class _LockArgs(ctypes.Structure):
    """`CUcheckpointLockArgs`."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class CheckpointDriver:
    """The checkpoint calls of `libcuda.so.1`; each returns CUDA's result, 0 for success."""

    def __init__(self) -> None:
        """Load the library.

        Raises:
            Outcome: The driver is missing, does not start, or is too old.
        """
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            for name in _CALLS:
                getattr(self._library, f"cuCheckpointProcess{name}")
        except (OSError, AttributeError):
            refuse("its node's NVIDIA driver cannot move GPU memory: version 570 or newer is needed")
        result = self._library.cuInit(0)
        if result != SUCCESS:
            refuse(f"CUDA does not start on its node: {self.describe(result)}")

    def describe(self, result: int) -> str:
        """Return CUDA's name of a result, such as `CUDA_ERROR_NOT_SUPPORTED`."""
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(result, ctypes.byref(name))
        return name.value.decode() if name.value else f"CUDA error {result}"

    def get_state(self, pid: int) -> int | None:
        """Return the state of a process; None if it does not use CUDA."""
        state = ctypes.c_int(-1)
        result = self._library.cuCheckpointProcessGetState(pid, ctypes.byref(state))
        return state.value if result == SUCCESS else None

    def lock(self, pid: int) -> int:
        args = _LockArgs(timeout_ms=LOCK_TIMEOUT_MS)
        return int(self._library.cuCheckpointProcessLock(pid, ctypes.byref(args)))

    def checkpoint(self, pid: int) -> int:
        return int(self._library.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int) -> int:
        return int(self._library.cuCheckpointProcessRestore(pid, None))

    def unlock(self, pid: int) -> int:
        return int(self._library.cuCheckpointProcessUnlock(pid, None))


# -- processes ----------------------------------------------------------------------------------------------------


def list_container_pids(container: str) -> list[int]:
    """Return the processes of a container, by its id in the names of their control groups."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if container in (folder / "cgroup").read_text():
                    pids.append(int(folder.name))
    return sorted(pids)


def read_start(pid: int) -> str:
    """Return a process's number with its start, which differs if the number was used again; empty if it has ended."""
    with contextlib.suppress(OSError):
        # The name of a program in it may be any bytes.
        return f"{pid} {Path(f'/proc/{pid}/stat').read_text(errors='replace').rpartition(')')[2].split()[19]}"
    return ""


def maps_cuda(pid: int) -> bool:
    """Return whether a process has loaded the CUDA driver."""
    with contextlib.suppress(OSError):
        return "libcuda.so" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return False


def read_name(pid: int) -> str:
    """Return a process for people, such as `python3 (4711)`."""
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()} ({pid})"
    except OSError:
        return f"process {pid}"


def read_session(pid: int) -> int:
    """Return the session of a process; its own number if it has ended, which no other one has."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return pid


def read_available_mib() -> int:
    """Return the host memory that is available, MiB."""
    text = Path("/proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) // 1024 if found else 0


# -- the GPU ------------------------------------------------------------------------------------------------------


class Gpu:
    """One GPU, as NVML sees it."""

    def __init__(self, uuid: str) -> None:
        """Find the GPU.

        Raises:
            Outcome: NVML does not start, or has no such GPU.
        """
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self.device = f"/dev/nvidia{pynvml.nvmlDeviceGetMinorNumber(self._handle)}"
        except pynvml.NVMLError as error:
            refuse(f"its GPU cannot be read: {error}")

    def list_processes(self) -> dict[int, int]:
        """Return the programs that compute on the GPU, with their memory in MiB."""
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {int(process.pid): int(process.usedGpuMemory or 0) // 1024**2 for process in processes}

    def read_used_mib(self) -> int:
        """Return the memory in use, without the driver's own, MiB."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._nvml.nvmlMemory_v2)
        return int(memory.used) // 1024**2

    def explain_use(self) -> str | None:
        """Return how the GPU is in use; None if it is empty."""
        processes, used_mib = self.list_processes(), self.read_used_mib()
        if processes:
            return f"{len(processes)} programs use it"
        return f"{used_mib} MiB of it are in use" if used_mib > EMPTY_MIB else None

    def wait_until_empty(self) -> str | None:
        """Wait a little; return how the GPU is still in use, None if it is empty."""
        end = time.monotonic() + SETTLE_S
        while (use := self.explain_use()) is not None and time.monotonic() < end:
            time.sleep(0.1)
        return use


# -- the device file ----------------------------------------------------------------------------------------------


class DeviceFile:
    """A GPU's device file in a container, which can be hidden behind `/dev/null`."""

    def __init__(self, pid: int, device: str) -> None:
        """`pid` is a process of the container, whose files are not trusted."""
        self._pid = pid
        self.path = device

    def hide(self) -> None:
        """Mount `/dev/null` over the file, unless that is done."""
        if not self._is_hidden():
            self._enter(HIDE)

    def show(self) -> None:
        """Undo `hide`."""
        while self._is_hidden():
            self._enter(SHOW)

    def _is_hidden(self) -> bool:
        lines = Path(f"/proc/{self._pid}/mountinfo").read_text(errors="replace").splitlines()
        mounts = [line.split() for line in lines]
        return any(fields[4] == self.path and fields[3] == "/null" for fields in mounts)

    def _enter(self, command: str) -> None:
        """Act in the container's mount namespace: in another process, since CUDA's threads forbid it in this one."""
        mine = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
        done = subprocess.run([*mine, command, str(self._pid), self.path], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            refuse(f"{self.path} cannot be hidden from its container: {done.stderr.strip()[-200:]}")


def change_mount(command: str, pid: str, path: str) -> None:
    """Hide or show a device file in the mount namespace of a process; this process stays there."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    target = path.encode()
    calls: dict[str, Callable[[], int]] = {
        HIDE: lambda: libc.mount(b"/dev/null", target, None, _MS_BIND, None),
        SHOW: lambda: libc.umount2(target, _MNT_DETACH),
    }
    if libc.setns(namespace, _CLONE_NEWNS) != 0 or calls[command]() != 0:
        sys.exit(os.strerror(ctypes.get_errno()))


# -- commands -----------------------------------------------------------------------------------------------------


def suspend(container: str, gpu: Gpu, max_mib: int, driver: CheckpointDriver) -> int:
    """Free the GPU; return the memory that was moved, MiB.

    Raises:
        Outcome: It is refused, or has failed.
    """
    pids = list_container_pids(container)
    if not pids:
        refuse("its container does not run")
    on_gpu = gpu.list_processes()
    if others := sorted(set(on_gpu) - set(pids)):
        refuse(f"{read_name(others[0])} uses its GPU as well")
    states = {pid: state for pid in pids if maps_cuda(pid) and (state := driver.get_state(pid)) is not None}
    if unknown := sorted(set(on_gpu) - set(states)):
        refuse(f"{read_name(unknown[0])} uses its GPU in a way that cannot be suspended")
    # Also those that have initialised CUDA and have nothing on the GPU yet: they have its file open.
    moved = list(states)
    _check_fits(moved, sum(on_gpu.values()), max_mib)
    _stop(moved, states, driver)
    # The calls before open the file. From now on nothing can start on the GPU, so what follows is proof.
    file = DeviceFile(pids[0], gpu.device)
    try:
        file.hide()
        if (use := gpu.wait_until_empty()) is not None:
            refuse(f"its GPU was not empty afterwards: {use}")
    except Outcome:
        file.show()
        _resume_processes(moved, driver)
        raise
    return sum(on_gpu.values())


def _check_fits(moved: Sequence[int], needed_mib: int, max_mib: int) -> None:
    if len(moved) > MAX_PROCESSES:
        refuse(f"{len(moved)} programs use its GPU; at most {MAX_PROCESSES} are suspended")
    # The driver moves memory that processes share by CUDA's handles, and cannot bring it back.
    if len({read_session(pid) for pid in moved}) < len(moved):
        refuse("several programs of one kernel or terminal use its GPU, and may share memory of it")
    if needed_mib > max_mib:
        refuse(f"it uses {needed_mib} MiB of GPU memory, and its container has room for {max_mib} MiB of it")
    free_mib = read_available_mib() - HOST_RESERVE_MIB
    if needed_mib > free_mib:
        refuse(f"it uses {needed_mib} MiB of GPU memory, and its node has {max(0, free_mib)} MiB of memory for it")


def _stop(moved: Sequence[int], states: dict[int, int], driver: CheckpointDriver) -> None:
    """Lock all processes, then move the memory of each; after a refusal all continue."""
    for pid in moved:
        if states[pid] == RUNNING and (result := driver.lock(pid)) != SUCCESS:
            _resume_processes(moved, driver)
            refuse(f"{read_name(pid)} cannot be stopped: {driver.describe(result)}")
    for pid in moved:
        if states[pid] != CHECKPOINTED and (result := driver.checkpoint(pid)) != SUCCESS:
            _resume_processes(moved, driver)
            refuse(f"the GPU memory of {read_name(pid)} cannot be moved: {driver.describe(result)}")


def _resume_processes(pids: Sequence[int], driver: CheckpointDriver) -> None:
    """Let processes continue from whatever state they are in.

    Raises:
        Outcome: One of them cannot.
    """
    for pid in pids:
        start, state = read_start(pid), driver.get_state(pid)
        if state == CHECKPOINTED:
            result = driver.restore(pid)
            if result != SUCCESS and start and read_start(pid) == start:
                raise Outcome("failed", f"the GPU memory of {read_name(pid)} is lost: {driver.describe(result)}")
            state = LOCKED
        if state == LOCKED:
            result = driver.unlock(pid)
            if result != SUCCESS and start and read_start(pid) == start:
                raise Outcome("failed", f"{read_name(pid)} does not continue: {driver.describe(result)}")


def resume(container: str, gpu: Gpu, driver: CheckpointDriver) -> int:
    """Bring the container's memory back; return the memory that its processes have on the GPU then, MiB.

    Raises:
        Outcome: Others use the GPU, or the processes cannot continue.
    """
    pids = list_container_pids(container)
    if not pids:
        raise Outcome("failed", "its container does not run any more")
    states = {pid: state for pid in pids if maps_cuda(pid) and (state := driver.get_state(pid)) is not None}
    moved = [pid for pid, state in states.items() if state in (LOCKED, CHECKPOINTED)]
    # What this container has restored before an interruption does not count.
    foreign = set(gpu.list_processes()) - set(pids)
    if foreign or (not set(gpu.list_processes()) and gpu.explain_use() is not None):
        raise Outcome("busy", f"its GPU is in use: {gpu.explain_use()}")
    DeviceFile(pids[0], gpu.device).show()
    _resume_processes(moved, driver)
    return sum(used for pid, used in gpu.list_processes().items() if pid in pids)


def run(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Run a command; yield the fields of the answer."""
    command, container, uuid, *more = arguments
    try:
        gpu, driver = Gpu(uuid), CheckpointDriver()
        if command == "suspend":
            moved_mib = suspend(container, gpu, int(more[0]), driver)
        else:
            moved_mib = resume(container, gpu, driver)
        yield from (("outcome", "done"), ("text", ""), ("moved_mib", moved_mib))
    except Outcome as result:
        yield from (("outcome", result.outcome), ("text", result.text), ("moved_mib", result.moved_mib))


if __name__ == "__main__":
    if sys.argv[1] in (HIDE, SHOW):
        change_mount(*sys.argv[1:])
    else:
        sys.stdout.write(json.dumps(dict(run(sys.argv[1:]))) + "\n")
