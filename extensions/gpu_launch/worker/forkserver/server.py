"""The fork server: `python -u -m gpu_launch.worker.forkserver.server SOCKET PARENT`

It serves only while it has one thread, no CUDA context and no held lock. It ends when its agent closes the socket, and
its children end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpu_launch.worker import processes
from gpu_launch.worker.forkserver import child, protocol
from gpu_launch.worker.forkserver.protocol import CommandKind, RankSpec

#: Connections that may wait: all ranks connect at the same time.
_STORE_BACKLOG = 1024
_IMPORTS = ("torch", "torch.distributed", "torch.distributed.elastic.multiprocessing.errors")
_CUDA_ERROR_NOT_INITIALIZED = 3


class ForkServer:
    """Imports torch, then forks ranks and rendezvous stores for one agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = protocol.MessageReader(connection)
        self._ranks: set[int] = set()
        self._store: int | None = None
        self._problem = ""
        self._before = set(sys.modules)
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def import_modules(self, modules: Sequence[str]) -> None:
        """Import modules and report whether ranks can be forked."""
        for name in modules:
            if self._problem:
                break
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - user code: whatever it raises is reported, and nothing is forked
                label = "PyTorch" if name in _IMPORTS else name
                self._problem = f"{label} cannot be imported with {sys.executable}: {type(error).__name__}: {error}"
                traceback.print_exc()
            else:
                problem = _find_problem()
                self._problem = f"after importing {name}, {problem}" if problem else ""
        # The garbage collector skips these objects from now on, so their pages stay shared.
        gc.collect()
        gc.freeze()
        new_modules = [module for name, module in list(sys.modules.items()) if name not in self._before]
        self._send({"kind": "ready", "problem": self._problem, "stamps": protocol.collect_stamps(new_modules, _home())})

    def serve(self) -> None:
        """Serve until the agent closes the connection.

        Raises:
            _ForkedChild: In each forked child.
        """
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._reap()
            if self._connection in ready:
                messages = self._reader.receive()
                if messages is None:
                    break
                for message in messages:
                    self._handle(message)
        self._signal_ranks(signal.SIGKILL)

    def _handle(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "load":
                self.import_modules(message["modules"])
            case "fork":
                self._fork_ranks([_parse_rank_spec(item) for item in message["orders"]])
            case "store":
                self._open_store(message["address"])
            case "close store":
                self._close_store()
            case "signal":
                self._signal_ranks(message["number"])

    def _fork_ranks(self, orders: Sequence[RankSpec]) -> None:
        if self._refuse_if_unsafe():
            return
        pids: list[int] = []
        try:
            for order in orders:
                pids.append(self._fork(order))
                self._ranks.add(pids[-1])
        except OSError as error:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self._send({"kind": "refused", "why": str(error)})
        else:
            self._send({"kind": "forked", "pids": pids})

    def _open_store(self, address: str) -> None:
        self._close_store()
        if self._refuse_if_unsafe():
            return
        try:
            listener = open_store_listener(address)
            # Not a `with` block: the child leaves it too and needs the socket.
            self._store = self._fork(listener)
            port = listener.getsockname()[1]
            listener.close()
        except OSError as error:
            self._send({"kind": "refused", "why": str(error)})
        else:
            self._send({"kind": "store", "port": port})

    def _refuse_if_unsafe(self) -> bool:
        """Report why forking is unsafe, if it is; return whether a refusal was sent."""
        self._problem = self._problem or _find_problem()
        if self._problem:
            self._send({"kind": "refused", "why": self._problem})
        return bool(self._problem)

    def _close_store(self) -> None:
        if self._store is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._store, signal.SIGKILL)
            self._store = None

    def _fork(self, work: RankSpec | socket.socket) -> int:
        """Fork and return the child's process id. The child blocks signals until it has its own handlers."""
        server = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                child.detach_from_server(server)
                self._close()
                raise _ForkedChild(work)
            return pid
        finally:
            if os.getpid() == server:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _close(self) -> None:
        self._selector.close()
        for end in (self._connection, self._woken, self._waker):
            end.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            at_ns = time.time_ns()
            if pid in self._ranks:
                self._ranks.remove(pid)
                self._send({"kind": "exit", "pid": pid, "code": os.waitstatus_to_exitcode(status), "at_ns": at_ns})
            elif pid == self._store:
                self._store = None

    def _signal_ranks(self, number: int) -> None:
        """Send a signal to the process groups of all running ranks."""
        for pid in self._ranks:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                # A rank has no process group of its own in its first moment.
                os.kill(pid, number)

    def _send(self, message: dict[str, Any]) -> None:
        # A missing agent is noticed at the next read.
        with contextlib.suppress(OSError):
            protocol.send_message(self._connection, message)


def main() -> None:
    """Import torch and serve; a forked child runs its work."""
    processes.set_visible_variable(processes.MARK_VARIABLE, os.environ.get(processes.MARK_VARIABLE, "").rstrip("="))
    # Slurm may send SIGTERM to every process of a job. The fork server ends with its agent, and ranks have their own
    # handlers.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    user_path = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}  # noqa: PTH100
    path = [entry for entry in sys.path[1:] if entry not in user_path]
    number, parent = int(sys.argv[1]), int(sys.argv[2])
    processes.die_with_parent(signal.SIGKILL, parent)
    os.set_inheritable(number, False)
    server = ForkServer(socket.socket(fileno=number))
    generator = None
    try:
        server.import_modules(_IMPORTS)
        if "torch" in sys.modules:
            generator = sys.modules["torch"].default_generator.get_state()
        server.serve()
        os._exit(0)
    except _ForkedChild as forked:
        work = forked.work
    del server
    if isinstance(work, RankSpec):
        child.become_rank(work, path=path, generator=generator)
    serve_store(work)


class _ForkedChild(BaseException):
    """Unwinds the stack of a newly forked process to the point where its own work begins."""

    def __init__(self, work: RankSpec | socket.socket) -> None:
        super().__init__()
        self.work = work


def _parse_rank_spec(item: dict[str, Any]) -> RankSpec:
    return RankSpec(**item | {"kind": CommandKind(item["kind"]), "command": tuple(item["command"])})


def _find_problem() -> str:
    """Return why this process must not fork, empty if it may."""
    threads = _list_threads()
    if len(threads) > 1:
        return f"{len(threads)} threads run where there may be one ({', '.join(sorted(set(threads)))})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch has initialised CUDA"
    if _is_driver_in_use():
        return "the CUDA driver is initialised"
    return ""


def _list_threads() -> list[str]:
    """Return the names of this process's threads."""
    return [(entry / "comm").read_text().strip() for entry in Path("/proc/self/task").iterdir()]


def _is_driver_in_use() -> bool:
    """Return whether any library has initialised the CUDA driver in this process. The check does not initialise it."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if entry.readlink().name.startswith("nvidia-uvm"):
                return True
        except OSError:
            continue  # the descriptor of this listing
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line}
    return any(
        ctypes.CDLL(library).cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED
        for library in libraries
    )


def _home() -> Path:
    return Path(os.environ.get("HOME") or Path.home())


def open_store_listener(address: str) -> socket.socket:
    """Listen on a free port of `address`, so that the port is known and reserved before the store's process exists."""
    return socket.create_server((address, 0), backlog=_STORE_BACKLOG)


def serve_store(listener: socket.socket) -> None:
    """Serve torch's TCPStore on the listening socket until this process is killed."""
    from torch.distributed import TCPStore

    # Ranks need the store until they have ended, also after SIGTERM.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    address, port = listener.getsockname()
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    main()
