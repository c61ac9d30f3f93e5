"""The process that has imported torch and forks ranks: `python -u -m gpu_launch.ranks.forkserver SOCKET PARENT`

One thread, no CUDA, no lock held: it serves only while that is so. It ends when its agent's end of the socket closes,
and its children end with it.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import Any

from gpu_launch import processes
from gpu_launch.ranks import checks, child, native, protocol, store
from gpu_launch.ranks.protocol import Kind, RankOrder

_IMPORTS = ("torch", "torch.distributed", "torch.distributed.elastic.multiprocessing.errors")


class _Forked(BaseException):
    """Unwinds the stack in a process that was just forked, down to where it begins its own work."""

    def __init__(self, work: RankOrder | socket.socket) -> None:
        super().__init__()
        self.work = work


class ForkServer:
    """One agent's."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._inbox = protocol.Inbox(connection)
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

    def load(self, modules: Sequence[str]) -> None:
        """Import these, and say whether ranks can be forked now."""
        for name in modules:
            if self._problem:
                break
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - user code: whatever it raises is said, and nothing is forked
                what = "PyTorch" if name in _IMPORTS else name
                self._problem = f"{what} cannot be imported with {sys.executable}: {type(error).__name__}: {error}"
                traceback.print_exc()
            else:
                problem = checks.find_problem()
                self._problem = f"after importing {name}, {problem}" if problem else ""
        # What is there now is never looked at again by the collector, so that its pages stay shared.
        gc.collect()
        gc.freeze()
        found = [module for name, module in list(sys.modules.items()) if name not in self._before]
        self._say({"kind": "ready", "problem": self._problem, "stamps": checks.stamps(found, _home())})

    def serve(self) -> None:
        """Until the agent is gone. Raises _Forked in children."""
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._reap()
            if self._connection in ready:
                messages = self._inbox.receive()
                if messages is None:
                    break
                for message in messages:
                    self._take(message)
        self._signal(signal.SIGKILL)

    def _take(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "load":
                self.load(message["modules"])
            case "fork":
                self._fork_ranks([_order(item) for item in message["orders"]])
            case "store":
                self._open_store(message["address"])
            case "close store":
                self._close_store()
            case "signal":
                self._signal(message["number"])

    def _fork_ranks(self, orders: Sequence[RankOrder]) -> None:
        if self._refuse():
            return
        pids: list[int] = []
        try:
            for order in orders:
                pids.append(self._fork(order))
                self._ranks.add(pids[-1])
        except OSError as error:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self._say({"kind": "refused", "why": str(error)})
        else:
            self._say({"kind": "forked", "pids": pids})

    def _open_store(self, address: str) -> None:
        self._close_store()
        if self._refuse():
            return
        try:
            listener = store.listen(address)
            # Not closed by leaving a block: the child leaves it too, with the socket that it needs.
            self._store = self._fork(listener)
            port = listener.getsockname()[1]
            listener.close()
        except OSError as error:
            self._say({"kind": "refused", "why": str(error)})
        else:
            self._say({"kind": "store", "port": port})

    def _refuse(self) -> bool:
        """Say why nothing is forked; whether that is so."""
        self._problem = self._problem or checks.find_problem()
        if self._problem:
            self._say({"kind": "refused", "why": self._problem})
        return bool(self._problem)

    def _close_store(self) -> None:
        if self._store is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._store, signal.SIGKILL)
            self._store = None

    def _fork(self, work: RankOrder | socket.socket) -> int:
        """The child's process id. No signal reaches the child before it has handlers of its own."""
        server = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                child.separate(server)
                self._close()
                raise _Forked(work)
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
                self._say({"kind": "exit", "pid": pid, "code": os.waitstatus_to_exitcode(status), "at_ns": at_ns})
            elif pid == self._store:
                self._store = None

    def _signal(self, number: int) -> None:
        """To the process groups of all ranks that have not ended."""
        for pid in self._ranks:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                # Its first moment, before it has a group of its own.
                os.kill(pid, number)

    def _say(self, message: dict[str, Any]) -> None:
        # An agent that is gone shows when it is read from.
        with contextlib.suppress(OSError):
            protocol.send(self._connection, message)


def _order(item: dict[str, Any]) -> RankOrder:
    return RankOrder(**item | {"kind": Kind(item["kind"]), "command": tuple(item["command"])})


def _home() -> Path:
    return Path(os.environ.get("HOME") or Path.home())


def main() -> None:
    """Import, serve; in a child, become what was asked for."""
    native.show_as(processes.MARK, os.environ.get(processes.MARK, "").rstrip("="))
    # Slurm may tell every process of a job to end; this one ends with its agent, and ranks have handlers of their own.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    given = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}  # noqa: PTH100
    path = [entry for entry in sys.path[1:] if entry not in given]
    number, parent = int(sys.argv[1]), int(sys.argv[2])
    native.die_with_parent(signal.SIGKILL, parent)
    os.set_inheritable(number, False)
    server = ForkServer(socket.socket(fileno=number))
    generator = None
    try:
        server.load(_IMPORTS)
        if "torch" in sys.modules:
            generator = sys.modules["torch"].default_generator.get_state()
        server.serve()
        os._exit(0)
    except _Forked as forked:
        work = forked.work
    del server
    if isinstance(work, RankOrder):
        child.become(work, path=path, generator=generator)
    store.serve(work)


if __name__ == "__main__":
    main()
