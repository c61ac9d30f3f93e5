"""The script that moves GPU memory: what it refuses, and what it does when a call of the driver fails.

The driver here answers as the real one did on an H100, driver 580.159.04; with the simulated one the script itself runs
on the practice closet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common.errors import GpuhubError
from gpuhub.nodes import gpu_suspension
from gpuhub.nodes.gpu_suspension import CHECKPOINTED, LOCKED, RUNNING, Outcome
from gpuhub.nodes.suspension_container import SuspensionOutcome, build_container, build_host_config, parse_result

OUT_OF_MEMORY, INVALID_VALUE = 2, 1
NAMES = {OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY", INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE"}


class Driver:
    """The CUDA driver; `failures` has results of calls, by call and process."""

    def __init__(self, gpu: Gpu, **failures: dict[int, int]) -> None:
        self._gpu = gpu
        self._failures = failures
        self.states = dict.fromkeys(gpu.processes, RUNNING)

    def describe(self, result: int) -> str:
        return NAMES[result]

    def get_state(self, pid: int) -> int | None:
        return self.states.get(pid)

    def lock(self, pid: int) -> int:
        return self._enter("lock", pid, LOCKED)

    def checkpoint(self, pid: int) -> int:
        result = self._enter("checkpoint", pid, CHECKPOINTED)
        if result == 0:
            self._gpu.moved[pid] = self._gpu.processes.pop(pid, 0)
        return result

    def restore(self, pid: int) -> int:
        result = self._enter("restore", pid, LOCKED)
        if result == 0:
            self._gpu.processes[pid] = self._gpu.moved.pop(pid)
        return result

    def unlock(self, pid: int) -> int:
        return self._enter("unlock", pid, RUNNING)

    def _enter(self, call: str, pid: int, state: int) -> int:
        result = self._failures.get(call, {}).get(pid, 0)
        if result == 0:
            self.states[pid] = state
        return result


class Gpu:
    """A GPU with processes and their MiB."""

    device = "/dev/nvidia0"

    def __init__(self, processes: dict[int, int], unlisted_mib: int = 0) -> None:
        self.processes = processes
        self.moved: dict[int, int] = {}
        self.unlisted_mib = unlisted_mib

    def list_processes(self) -> dict[int, int]:
        return dict(self.processes)

    def explain_use(self) -> str | None:
        if self.processes:
            return f"{len(self.processes)} programs use it"
        return f"{self.unlisted_mib} MiB of it are in use" if self.unlisted_mib else None

    wait_until_empty = explain_use


class Machine:
    """Processes of the container, and its device file."""

    def __init__(self) -> None:
        self.pids = [11, 12, 13]
        self.sessions: dict[int, int] = {}
        self.available_mib = 64_000
        self.is_hidden = False


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()

    class File:
        def __init__(self, pid: int, device: str) -> None:
            assert (pid, device) == (11, "/dev/nvidia0")

        def hide(self) -> None:
            machine.is_hidden = True

        def show(self) -> None:
            machine.is_hidden = False

    monkeypatch.setattr(gpu_suspension, "DeviceFile", File)
    monkeypatch.setattr(gpu_suspension, "list_container_pids", lambda _container: list(machine.pids))
    monkeypatch.setattr(gpu_suspension, "maps_cuda", lambda _pid: True)
    monkeypatch.setattr(gpu_suspension, "read_name", lambda pid: f"python3 ({pid})")
    monkeypatch.setattr(gpu_suspension, "read_start", lambda pid: f"{pid} 1")
    monkeypatch.setattr(gpu_suspension, "read_available_mib", lambda: machine.available_mib)
    monkeypatch.setattr(os, "getsid", lambda pid: machine.sessions.get(pid, pid))
    return machine


def suspend(gpu: Any, driver: Any, max_mib: int = 32_000) -> int:
    return gpu_suspension.suspend("c" * 64, gpu, max_mib, driver)


def test_two_kernels_are_moved_and_brought_back(machine: Machine) -> None:
    """The device file is hidden meanwhile, and both commands may be repeated."""
    gpu = Gpu({11: 3684, 12: 5902})
    driver = Driver(gpu)
    assert suspend(gpu, driver) == 9586
    assert (gpu.processes, machine.is_hidden, driver.states) == ({}, True, {11: CHECKPOINTED, 12: CHECKPOINTED})
    assert suspend(gpu, driver) == 0
    for _ in range(2):
        assert gpu_suspension.resume("c" * 64, gpu, driver) == 9586
        assert (machine.is_hidden, driver.states) == (False, {11: RUNNING, 12: RUNNING})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda machine, gpu: setattr(machine, "pids", []), "its container does not run"),
        (lambda machine, gpu: gpu.processes.update({99: 10}), "python3 (99) uses its GPU as well"),
        (lambda machine, gpu: gpu.processes.update({13: 10}), "python3 (13) uses its GPU in a way"),
        (lambda machine, gpu: gpu.processes.update({11: 40_000}), "room for 32000 MiB"),
        (lambda machine, gpu: setattr(machine, "available_mib", 5000), "its node has 3976 MiB"),
        (lambda machine, gpu: machine.sessions.update({11: 5, 12: 5}), "may share memory"),
        (lambda machine, gpu: setattr(gpu, "unlisted_mib", 900), "not empty afterwards: 900 MiB"),
    ],
)
def test_a_refusal_leaves_everything_as_it_was(machine: Machine, change: Any, text: str) -> None:
    """Each is a sentence for the owner, and every process runs with its memory on the GPU."""
    gpu = Gpu({11: 3684, 12: 5902})
    driver = Driver(gpu)
    change(machine, gpu)
    before = dict(gpu.processes)
    with pytest.raises(Outcome) as refused:
        suspend(gpu, driver)
    assert refused.value.outcome == "refused"
    assert text in refused.value.text
    assert (gpu.processes, machine.is_hidden) == (before, False)
    assert set(driver.states.values()) == {RUNNING}


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
@pytest.mark.parametrize("pid", [11, 12])
def test_a_call_that_fails_has_all_processes_go_on(machine: Machine, call: str, pid: int) -> None:
    """Also those that were moved before; the driver's word is in the answer."""
    gpu = Gpu({11: 3684, 12: 5902})
    driver = Driver(gpu, **{call: {pid: OUT_OF_MEMORY}})
    with pytest.raises(Outcome) as refused:
        suspend(gpu, driver)
    assert refused.value.outcome == "refused"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in refused.value.text
    assert (gpu.processes, set(driver.states.values())) == ({11: 3684, 12: 5902}, {RUNNING})


def test_a_kernel_that_has_only_initialised_cuda_waits_as_well(machine: Machine) -> None:
    """It has nothing on the GPU, but its file open, so that hiding the file would not stop it."""
    gpu = Gpu({11: 3684})
    driver = Driver(gpu)
    driver.states[12] = RUNNING
    suspend(gpu, driver)
    assert driver.states == {11: CHECKPOINTED, 12: CHECKPOINTED}


def test_nothing_is_restored_while_others_use_the_gpu(machine: Machine) -> None:
    """By their processes, or by memory alone; nothing has changed then."""
    gpu = Gpu({11: 3684})
    driver = Driver(gpu)
    suspend(gpu, driver)
    for use in ({99: 3000}, {}):
        gpu.processes, gpu.unlisted_mib = use, 0 if use else 900
        with pytest.raises(Outcome) as busy:
            gpu_suspension.resume("c" * 64, gpu, driver)
        assert busy.value.outcome == "busy"
        assert (driver.states[11], machine.is_hidden) == (CHECKPOINTED, True)


def test_a_restore_that_fails_is_the_end(machine: Machine) -> None:
    """As it was with memory that two processes share; a process that has ended by itself is none."""
    gpu = Gpu({11: 632})
    driver = Driver(gpu, restore={11: INVALID_VALUE})
    suspend(gpu, driver)
    with pytest.raises(Outcome) as failed:
        gpu_suspension.resume("c" * 64, gpu, driver)
    assert (failed.value.outcome, failed.value.text) == (
        "failed",
        "the GPU memory of python3 (11) is lost: CUDA_ERROR_INVALID_VALUE",
    )
    machine.pids = []
    with pytest.raises(Outcome) as gone:
        gpu_suspension.resume("c" * 64, gpu, driver)
    assert gone.value.outcome == "failed"


def test_an_interrupted_suspension_is_finished(machine: Machine) -> None:
    """One process was moved, and the other locked, when the script was killed."""
    gpu = Gpu({11: 3684, 12: 5902})
    driver = Driver(gpu)
    driver.lock(11)
    driver.checkpoint(11)
    driver.lock(12)
    assert suspend(gpu, driver) == 5902
    assert driver.states == {11: CHECKPOINTED, 12: CHECKPOINTED}


def test_the_last_line_of_the_output_counts() -> None:
    """Warnings may come before it; anything else is no result."""
    text = 'a warning\n{"outcome": "done", "text": "", "moved_mib": 18802}\n'
    result = parse_result(text)
    assert (result.outcome, result.moved_mib) == (SuspensionOutcome.DONE, 18802)
    for broken in ("", "Killed", '{"outcome": "maybe", "text": "", "moved_mib": 1}', '{"outcome": "done"}', "[1]"):
        with pytest.raises(GpuhubError, match="moving GPU memory failed"):
            parse_result(broken)


def test_the_container_has_what_it_needs_and_nothing_else() -> None:
    """No network, a read-only file system, four capabilities; the script is in its command."""
    host = build_host_config()
    assert (host["network_mode"], host["read_only"], host["cap_drop"]) == ("none", True, ["ALL"])
    assert sorted(host["cap_add"]) == ["DAC_OVERRIDE", "SYS_ADMIN", "SYS_CHROOT", "SYS_PTRACE"]
    assert "privileged" not in host
    command = build_container("gh", "gh-suspender-1", ("resume", "c1", "GPU-1"))["command"]
    assert command[:3] == ["python3", "-I", "-c"]
    assert command[4:] == ["resume", "c1", "GPU-1"]
    compile(command[3], "script", "exec")


def test_the_process_table_of_this_machine_is_read() -> None:
    """The parts that meet the kernel, on this process."""
    me = os.getpid()
    assert gpu_suspension.read_start(me).split()[0] == str(me)
    assert gpu_suspension.read_start(2**30) == ""
    assert gpu_suspension.read_session(me) == os.getsid(me)
    assert gpu_suspension.read_session(2**30) == 2**30
    assert gpu_suspension.read_available_mib() > 0
    assert not gpu_suspension.maps_cuda(me)
    assert json.dumps(gpu_suspension.list_container_pids("no-such-container")) == "[]"


@pytest.mark.process
def test_the_name_of_a_program_may_be_any_bytes() -> None:
    """A process may set its name to any bytes, and is suspended and resumed all the same."""
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) \\xff (b', 0, 0, 0); print(1, flush=True); input()"
    command = [sys.executable, "-c", rename]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        pid = process.pid
        start = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
        assert gpu_suspension.read_start(pid) == f"{pid} {start}"
        assert gpu_suspension.read_name(pid) == f"a) \ufffd (b ({pid})"
        process.communicate(b"\n")
