"""An agent's hold on its fork server: starts it, asks it, hears of its children's ends."""

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

from gpu_launch import environment, processes, runs
from gpu_launch.ranks import checks, native, protocol
from gpu_launch.ranks.protocol import RankOrder

_ANSWER_S = 15.0  # seconds for a fork server that is ready to do something
_ENDED_S = 5.0  # seconds for one that was told to end


class ServerGone(RuntimeError):
    """The fork server has ended."""


class Refused(RuntimeError):
    """The fork server does not fork, and says why."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """A rank's end."""

    pid: int
    #: Negative for a signal; None where it is not known.
    code: int | None
    at_ns: int


#: The fork server itself has ended, and its ranks with it.
GONE = Exit(pid=0, code=None, at_ns=0)


class Server:
    """A fork server that was started. Requests are for one thread at a time; ends are told by a thread of its own."""

    def __init__(self, *, mark: str, log: Path, environ: Mapping[str, str] | None = None) -> None:
        """Begins at once and imports torch; `environ` is what counts when Python starts, beside this process's own."""
        wanted = _whole(environ or {})
        self._variables, self._python_path = checks.start_variables(wanted), wanted.get("PYTHONPATH", "")
        own = environment.without_secrets(os.environ)
        left = {name: value for name, value in own.items() if name not in checks.start_variables(own)}
        connection, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "gpu_launch.ranks.forkserver", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Nothing there to be imported in place of what is meant.
                cwd="/",
                env=left
                | self._variables
                | {
                    "PYTHONPATH": self._python_path,
                    processes.MARK: native.padded(mark),
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                    "RES_OPTIONS": "timeout:1 attempts:1",
                },
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = connection
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._on_exit: Callable[[Exit], None] = lambda _exit: None
        self._early: list[Exit] = []
        self._ready: dict[str, Any] | None = None
        #: Imported besides torch.
        self.modules: tuple[str, ...] = ()
        self.log = log
        self._reader = threading.Thread(target=self._read, name="gpu_launch fork server", daemon=True)
        self._reader.start()

    def wait(self, limit_s: float) -> str:
        """Wait until it serves; empty, or why it does not."""
        if self._ready is None:
            self._ready = self._answer(limit_s)
        return str(self._ready.get("problem", ""))

    def load(self, modules: Sequence[str], limit_s: float) -> str:
        """Have it import more; as `wait`."""
        if not (problem := self.wait(limit_s)):
            self._ready = self._ask({"do": "load", "modules": list(modules)}, limit_s)
            self.modules += tuple(modules)
            problem = str(self._ready["problem"])
        return problem

    def is_current(self, environ: Mapping[str, str], modules: Sequence[str]) -> bool:
        """Whether a new one for `environ` would be the same, but for some of `modules` that this one lacks."""
        wanted = _whole(environ)
        known = [] if self._ready is None else self._ready["stamps"]
        return (
            self.is_alive()
            and (self._ready is None or not self._ready["problem"])
            and set(self.modules) <= set(modules)
            and self._variables == checks.start_variables(wanted)
            # Ranks have a path of their own; it counts for what is imported here.
            and (not modules or self._python_path == wanted.get("PYTHONPATH", ""))
            and not checks.has_changed([(path, time_ns, size) for path, time_ns, size in known])
        )

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def fork(self, orders: Sequence[RankOrder], on_exit: Callable[[Exit], None]) -> list[int]:
        """Fork ranks; their process ids. `on_exit` is called in another thread as soon as one has ended."""
        with self._lock:
            self._early = []
            self._on_exit = self._early.append
        answer = self._ask({"do": "fork", "orders": [asdict(order) for order in orders]})
        pids: list[int] = answer["pids"]
        with self._lock:
            early, self._early, self._on_exit = self._early, [], on_exit
            for ended in early:
                on_exit(ended)
        return pids

    def open_store(self, address: str) -> int:
        """A new store in place of the last one; its port."""
        return int(self._ask({"do": "store", "address": address})["port"])

    def close_store(self) -> None:
        """End the store."""
        self._tell({"do": "close store"})

    def signal(self, number: int) -> None:
        """To the process groups of all ranks."""
        self._tell({"do": "signal", "number": number})

    def end(self) -> None:
        """End it, and its children with it."""
        self._process.kill()
        self._process.wait()
        self._reader.join(_ENDED_S)
        self._connection.close()

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            protocol.send(self._connection, message)

    def _ask(self, message: dict[str, Any], limit_s: float = _ANSWER_S) -> dict[str, Any]:
        self._tell(message)
        return self._answer(limit_s)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self._process.kill()
            raise ServerGone(f"the fork server did not answer within {limit_s:.0f} s") from None
        if answer["kind"] == "gone":
            self._answers.put(answer)
            raise ServerGone(f"the fork server has ended with {self._process.wait(_ENDED_S)}")
        if answer["kind"] == "refused":
            raise Refused(answer["why"])
        return answer

    def _read(self) -> None:
        inbox = protocol.Inbox(self._connection)
        with contextlib.suppress(OSError):
            while (messages := inbox.receive()) is not None:
                for message in messages:
                    if message["kind"] == "exit":
                        self._hear(Exit(pid=message["pid"], code=message["code"], at_ns=message["at_ns"]))
                    else:
                        self._answers.put(message)
        self._answers.put({"kind": "gone"})
        self._hear(GONE)

    def _hear(self, ended: Exit) -> None:
        with self._lock:
            self._on_exit(ended)


def spawn(run_id: str, environ: Mapping[str, str] | None = None) -> Server:
    """This container's, with its log in the folder of the run that the container was started for."""
    env = environment.read()
    name = "notebook" if env.worker is None else str(env.worker)
    log = runs.folder(env.home, run_id).log(f"forkserver-{name}")
    # Not that of the run's ranks, which may be the same run's: it stays when they are killed.
    return Server(mark=f"{processes.mark(run_id, env.worker)}/server", log=log, environ=environ)


def _whole(environ: Mapping[str, str]) -> dict[str, str]:
    return environment.without_secrets(os.environ) | dict(environ)
