"""Programs in terminals, over SSH and detached, as real processes; bash plays sshd under its name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpu_launch.notebook_server import programs
from gpu_launch.notebook_server.programs import UserPrograms, find_programs

pytestmark = pytest.mark.process

#: Start a command by an sshd with a process of its own below the first one, as OpenSSH's has; each waits for its input.
BY_SSHD = """"$0" -c 'bash -c "echo started; read x"; :'; :"""
#: The same with a login shell, which waits at its prompt for `go` and then starts a program.
LOGIN_SHELL = """"$0" -c '(exec -a -bash bash -c "echo prompt; read x; bash -c \\"echo started; read y\\"; :"); :'; :"""
MAPPED = "import mmap, sys; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, prot=1); print(flush=True); input()"

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program and wait for its first line."""
    with ExitStack() as stack:

        def start_one(*command: str | Path) -> subprocess.Popen[bytes]:
            process = stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
                )
            )
            # All of them end with their input.
            stack.callback(process.communicate)
            read_line(process)
            return process

        yield start_one


def read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for CUDA's driver: other programs of this machine may have loaded the real one."""
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(b"x")
    monkeypatch.setattr(programs, "_CUDA_DRIVER", str(library))
    return library


@pytest.fixture
def sshd(tmp_path: Path) -> Path:
    """A bash with the name of sshd."""
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "sshd").symlink_to(bash)
    return tmp_path / "sshd"


def find(shells: list[int] | None = None, kernels: list[int] | None = None, server: int | None = None) -> UserPrograms:
    return find_programs(server=server or os.getpid(), shells=shells or [], kernels=kernels or [])


def list_commands(found: UserPrograms) -> list[str]:
    return sorted(" ".join(process.cmdline()) for process in found.running)


def test_program_in_a_terminal_runs_until_it_ends(start: Start) -> None:
    """A shell at its prompt runs none."""
    shell = start("sh", "-c", "echo prompt; read x; sh -c 'echo started; read y'; echo ended; read z")
    assert find([shell.pid]).running == frozenset()
    assert shell.stdin is not None
    for _ in range(2):
        shell.stdin.write(b"\n")
        if read_line(shell) == b"started\n":
            assert list_commands(find([shell.pid])) == ["sh -c echo started; read y"]
    assert find([shell.pid]).running == frozenset()


def test_command_over_ssh_runs_as_long_as_it_does(start: Start, sshd: Path) -> None:
    """That of the server's own sshd, below sshd's own processes; an sshd of other programs serves others."""
    session = start(sshd, "-c", BY_SSHD, sshd)
    assert list_commands(find()) == ["bash -c echo started; read x"]
    assert find(server=os.getppid()).running == frozenset()
    session.communicate()
    assert find() == UserPrograms(running=frozenset(), used_at=None)


def test_ssh_session_at_its_prompt_was_used_when_its_terminal_was(start: Start, sshd: Path) -> None:
    """What its shell starts is a program, as in a terminal of JupyterLab."""
    session = start(sshd, "-c", LOGIN_SHELL, sshd)
    found = find()
    assert found.running == frozenset()
    assert found.used_at is not None
    assert abs(datetime.now(UTC) - found.used_at) < timedelta(minutes=1)
    assert session.stdin is not None
    session.stdin.write(b"go\n")
    assert read_line(session) == b"started\n"
    assert list_commands(find()) == ["bash -c echo started; read y"]


def test_detached_program_with_cuda_counts_and_a_kernels_does_not(start: Start, driver: Path) -> None:
    """Wherever it was started; what a kernel has started belongs to its cells, and other programs may stay for ever."""
    program = start(sys.executable, "-c", MAPPED, driver)
    start("sh", "-c", "echo; read x")
    assert program.pid in {process.pid for process in find().running}
    assert program.pid not in {process.pid for process in find(kernels=[program.pid]).running}
    assert program.pid not in {process.pid for process in find(kernels=[os.getpid()]).running}
