"""The agent's client for its fork server: starts it, sends requests, receives exits of its children."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_launch import environment
from gpu_launch.common import run_folder
from gpu_launch.worker import processes
from gpu_launch.worker.forkserver import protocol
from gpu_launch.worker.forkserver.protocol import RankSpec

_ANSWER_TIMEOUT_S = 15.0  # seconds for a ready fork server to answer
_END_TIMEOUT_S = 5.0  # seconds for a killed fork server to end
#: Prefixes of variables that are read only when the interpreter, its allocator, torch or one of its libraries starts.
_START_PREFIXES = (
    "LD_", "PYTHON", "LC_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_",
    "BLIS_", "TORCH", "PYTORCH_", "TRITON_",
)  # fmt: skip
_START_NAMES = frozenset({"LANG", "LANGUAGE", "LOGLEVEL"})
#: The fork server sets its own values of these, and so does each rank. Other names count while a rank runs.
_EXCLUDED_NAMES = frozenset(
    {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTORCH_NVML_BASED_CUDA_CHECK"}
)
_EXCLUDED_PREFIXES = ("TORCHELASTIC_", "TORCH_ELASTIC_")


class ForkServerGone(RuntimeError):
    """The fork server has ended."""


class ForkRefused(RuntimeError):
    """The fork server refuses to fork; the text says why."""


@dataclass(frozen=True, kw_only=True)
class ChildExit:
    """The exit of a rank."""

    pid: int
    #: Negative for a signal; None if unknown.
    code: int | None
    at_ns: int


#: Reported when the fork server has ended, and its ranks with it.
SERVER_EXIT = ChildExit(pid=0, code=None, at_ns=0)


class ForkServerClient:
    """A running fork server. One thread makes requests; another thread reports exits."""

    def __init__(self, *, mark: str, log: Path, environ: Mapping[str, str] | None = None) -> None:
        """Start the fork server, which imports torch at once.

        Args:
            mark: Value of the process mark in its environment.
            log: File for its output.
            environ: Variables that only count when Python starts, added to those of this process.
        """
        new_environ = _complete_environ(environ or {})
        self._variables, self._python_path = (
            select_start_variables(new_environ),
            new_environ.get("PYTHONPATH", ""),
        )
        environ_now = environment.remove_secrets(os.environ)
        kept = {name: value for name, value in environ_now.items() if name not in select_start_variables(environ_now)}
        connection, server_end = socket.socketpair()
        with server_end, log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "gpu_launch.worker.forkserver.server",
                    str(server_end.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # No file there can shadow an import.
                cwd="/",
                env=kept
                | self._variables
                | {
                    "PYTHONPATH": self._python_path,
                    processes.MARK_VARIABLE: processes.pad_value(mark),
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                    "RES_OPTIONS": "timeout:1 attempts:1",
                },
                pass_fds=[server_end.fileno()],
                start_new_session=True,
            )
        self._connection = connection
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._on_exit: Callable[[ChildExit], None] = lambda _exit: None
        self._unclaimed_exits: list[ChildExit] = []
        self._ready_answer: dict[str, Any] | None = None
        #: Imported in addition to torch.
        self.modules: tuple[str, ...] = ()
        self.log = log
        self._reader = threading.Thread(target=self._read, name="gpu_launch fork server", daemon=True)
        self._reader.start()

    def wait_until_ready(self, limit_s: float) -> str:
        """Wait until it serves. Return the reason if it cannot, else an empty string."""
        if self._ready_answer is None:
            self._ready_answer = self._wait_for_answer(limit_s)
        return str(self._ready_answer.get("problem", ""))

    def import_modules(self, modules: Sequence[str], limit_s: float) -> str:
        """Import more modules. Return the reason if ranks cannot be forked any more, else an empty string."""
        if not (problem := self.wait_until_ready(limit_s)):
            self._ready_answer = self._call({"do": "load", "modules": list(modules)}, limit_s)
            self.modules += tuple(modules)
            problem = str(self._ready_answer["problem"])
        return problem

    def is_current(self, environ: Mapping[str, str], modules: Sequence[str]) -> bool:
        """Return whether a new server for `environ` would be the same, apart from `modules` that this one lacks."""
        new_environ = _complete_environ(environ)
        file_stamps = [] if self._ready_answer is None else self._ready_answer["stamps"]
        return (
            self.is_alive()
            and (self._ready_answer is None or not self._ready_answer["problem"])
            and set(self.modules) <= set(modules)
            and self._variables == select_start_variables(new_environ)
            # Ranks set their own path; this one only matters for the modules imported here.
            and (not modules or self._python_path == new_environ.get("PYTHONPATH", ""))
            and not protocol.has_changed([(path, time_ns, size) for path, time_ns, size in file_stamps])
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, orders: Sequence[RankSpec], on_exit: Callable[[ChildExit], None]) -> list[int]:
        """Fork ranks and return their process ids.

        `on_exit` is called in another thread as soon as one has ended.
        """
        with self._lock:
            self._unclaimed_exits = []
            self._on_exit = self._unclaimed_exits.append
        answer = self._call({"do": "fork", "orders": [asdict(order) for order in orders]})
        pids: list[int] = answer["pids"]
        with self._lock:
            early, self._unclaimed_exits, self._on_exit = self._unclaimed_exits, [], on_exit
            for ended in early:
                on_exit(ended)
        return pids

    def open_store(self, address: str) -> int:
        """Open a new rendezvous store, close the last one, and return the new one's port."""
        return int(self._call({"do": "store", "address": address})["port"])

    def close_store(self) -> None:
        self._send({"do": "close store"})

    def signal(self, number: int) -> None:
        """Send a signal to the process groups of all ranks."""
        self._send({"do": "signal", "number": number})

    def close(self) -> None:
        """Kill the server and with it its children."""
        self._process.kill()
        self._process.wait()
        self._reader.join(_END_TIMEOUT_S)
        self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            protocol.send_message(self._connection, message)

    def _call(self, message: dict[str, Any], limit_s: float = _ANSWER_TIMEOUT_S) -> dict[str, Any]:
        self._send(message)
        return self._wait_for_answer(limit_s)

    def _wait_for_answer(self, limit_s: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self._process.kill()
            raise ForkServerGone(f"the fork server did not answer within {limit_s:.0f} s") from None
        if answer["kind"] == "gone":
            self._answers.put(answer)
            raise ForkServerGone(f"the fork server has ended with {self._process.wait(_END_TIMEOUT_S)}")
        if answer["kind"] == "refused":
            raise ForkRefused(answer["why"])
        return answer

    def _read(self) -> None:
        inbox = protocol.MessageReader(self._connection)
        with contextlib.suppress(OSError):
            while (messages := inbox.receive()) is not None:
                for message in messages:
                    if message["kind"] == "exit":
                        self._report_exit(ChildExit(pid=message["pid"], code=message["code"], at_ns=message["at_ns"]))
                    else:
                        self._answers.put(message)
        self._answers.put({"kind": "gone"})
        self._report_exit(SERVER_EXIT)

    def _report_exit(self, ended: ChildExit) -> None:
        with self._lock:
            self._on_exit(ended)


def start_fork_server(run_id: str, environ: Mapping[str, str] | None = None) -> ForkServerClient:
    """Start this container's fork server, with its log in the folder of the run the container was started for."""
    env = environment.read()
    name = "notebook" if env.worker is None else str(env.worker)
    log = run_folder.open_run(env.home, run_id).log_file(f"forkserver-{name}")
    # Differs from the ranks' mark even if the run is the same: the server must survive when they are killed.
    return ForkServerClient(mark=f"{processes.build_mark(run_id, env.worker)}/server", log=log, environ=environ)


def select_start_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that only count when Python and torch start."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_START_PREFIXES) or name in _START_NAMES)
        and name not in _EXCLUDED_NAMES
        and not name.startswith(_EXCLUDED_PREFIXES)
    }


def _complete_environ(environ: Mapping[str, str]) -> dict[str, str]:
    return environment.remove_secrets(os.environ) | dict(environ)
