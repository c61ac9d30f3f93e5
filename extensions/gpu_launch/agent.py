"""The agent in a node's engine process: starts torchrun, sends ranks' output, passes signals on.

Its functions are called through ipyparallel's `apply` and return at once, so that the engine stays responsive.
"""

from __future__ import annotations

import json
import os
import signal as signals
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from gpu_launch import command, environment, network, processes, runs, spare
from gpu_launch.output import Writer
from gpu_launch.spec import LaunchSpec, NodeInfo
from gpu_launch.tail import Tail

_POLL_S = 0.02  # seconds between looks at the log files
_BEAT_S = 1.0  # seconds between signs of life
#: A notebook that takes nothing for this long is gone or stuck; its engine's own watch ends us then.
_SEND_MS = 30_000
_KILLED_S = 5.0  # seconds for a torchrun that was killed to be gone
_SENT_S = 5.0  # seconds for the last output to be taken


class _Agent:
    """This process's torchrun: at most one at a time, and a spare that has imported torch already."""

    def __init__(self) -> None:
        self.spare: subprocess.Popen[bytes] | None = None
        self.running: subprocess.Popen[bytes] | None = None
        self.pump: threading.Thread | None = None
        #: SIGTERM came to this container, and it ends with its ranks.
        self.is_leaving = False
        #: The torchrun that has got SIGTERM. A second one would break off its wait for its ranks.
        self.terminated: subprocess.Popen[bytes] | None = None


_agent = _Agent()


def adopt(process: subprocess.Popen[bytes]) -> None:
    """Use this waiting torchrun for the first start."""
    _agent.spare = process


def describe() -> NodeInfo:
    """This container, for the plan of a launch."""
    env = environment.read()
    found = network.own(env.subnet, wait_s=1.0)
    return NodeInfo(
        worker=env.worker,
        node=env.node,
        address=found.address,
        interface=found.name,
        port=network.free_port(found.address),
    )


def start(spec: LaunchSpec) -> int:
    """Start this node's torchrun; its process id. Output and end go to the spec's channel."""
    if _agent.is_leaving:
        raise RuntimeError("this container is to end")
    if _agent.running is not None and _agent.running.poll() is None:
        raise RuntimeError("a torchrun of an earlier start still runs here")
    env = environment.read()
    found = network.own(env.subnet, wait_s=1.0)
    node_rank = spec.roster.node_rank(env.worker)
    logs = Path(command.node_logs(spec, node_rank))
    logs.mkdir(parents=True, exist_ok=True)
    failures = runs.folder(env.home, spec.run_id).failures(node_rank, spec.attempt)
    process, _agent.spare = _agent.spare or spare.spawn(spec.run_id), None
    order = {
        "argv": command.build_arguments(
            spec, node_rank=node_rank, local_addr=found.address, capped=env.memory_cap_mib is not None
        ),
        "shutdown_s": spec.shutdown_s,
        "environ": build_environ(dict(os.environ), spec, interface=found.name),
        "cwd": spec.cwd,
        "failures": str(failures),
    }
    assert process.stdin is not None  # noqa: S101 - made with a pipe
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.close()
    _agent.running = process
    pump = _Pump(process, spec, node_rank=node_rank, node=env.node, logs=logs, failures=failures)
    _agent.pump = threading.Thread(target=pump.run, name="gpu_launch output", daemon=True)
    _agent.pump.start()
    return process.pid


def signal(number: int, run_id: str) -> None:
    """Send a signal to torchrun, which passes it on to its ranks; with no rank left it is ended at once.

    A torchrun whose ranks are done waits for the other nodes in native code, where no signal's handler runs.
    SIGTERM is sent once.
    """
    running = _agent.running
    if running is None or running.poll() is not None:
        return
    if all(pid == running.pid for pid in processes.marked(_mark(run_id))):
        running.kill()
    elif number != signals.SIGTERM:
        running.send_signal(number)
    elif _agent.terminated is not running:
        _agent.terminated = running
        running.send_signal(number)


def kill(run_id: str) -> None:
    """End torchrun, its ranks and whatever they started, at once."""
    running = _agent.running
    if running is not None and running.poll() is None:
        running.kill()
    processes.kill_marked(_mark(run_id))
    if running is not None:
        running.wait(_KILLED_S)


def leave(run_id: str) -> None:
    """SIGTERM came to this container: pass it on, give the ranks the time they take, then end this process.

    Who sent it sets the limit, by killing the container. Safe in a signal's handler.
    """
    if not _agent.is_leaving:
        _agent.is_leaving = True
        threading.Thread(target=_leave, args=(run_id,), name="gpu_launch leaving", daemon=True).start()


def _leave(run_id: str) -> None:
    signal(signals.SIGTERM, run_id)
    if _agent.running is not None:
        _agent.running.wait()
    if _agent.pump is not None:
        _agent.pump.join(_SENT_S)
    # Nothing of an engine is worth the time that its own end takes.
    os._exit(128 + signals.SIGTERM)


def _mark(run_id: str) -> str:
    return processes.mark(run_id, environment.read().worker)


def build_environ(base: dict[str, str], spec: LaunchSpec, *, interface: str) -> dict[str, str]:
    """The ranks' environment: the container's without secrets, the network's interface, then what the user set."""
    environ = environment.without_secrets(base)
    environ |= {
        processes.MARK: _mark(spec.run_id),
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        # A lost answer to a reverse look-up otherwise stalls a store's connection for five seconds.
        "RES_OPTIONS": "timeout:1 attempts:1",
        "GPU_LAUNCH_ATTEMPT": str(spec.attempt),
        "GPU_LAUNCH_PREEMPTIONS": str(spec.roster.preemptions),
    }
    if spec.roster.nproc_per_node > 1:
        # The container's own number is for one process; torchrun has its own for several.
        environ.pop("OMP_NUM_THREADS", None)
    environ |= spec.environ
    if spec.python_path:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [spec.python_path, environ.get("PYTHONPATH", "")]))
    return environ


class _Pump:
    """Sends ranks' new output, signs of life, and how it ended."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        spec: LaunchSpec,
        *,
        node_rank: int,
        node: str,
        logs: Path,
        failures: Path,
    ) -> None:
        self._process = process
        self._node_rank, self._node, self._failures = node_rank, node, failures
        self._run_id, self._attempt = spec.run_id, spec.attempt
        per_node = spec.roster.nproc_per_node
        self._ranks = range(node_rank * per_node, (node_rank + 1) * per_node)
        self._tail = Tail(logs, run_id=spec.run_id, first_rank=self._ranks.start, processes=per_node)
        self._channel = spec.channel

    def run(self) -> None:
        """Until torchrun has ended and all is sent, or the notebook takes nothing any more."""
        writer = Writer(self._channel)
        beat_at = 0.0
        has_told = False
        try:
            while (code := self._process.poll()) is None:
                if _agent.is_leaving and not has_told:
                    has_told = True
                    self._send(writer, "leaving")
                entries, now = self._tail.read(), time.monotonic()
                if entries or now - beat_at >= _BEAT_S:
                    beat_at = now
                    if not self._send(writer, "output", entries=entries):
                        return
                if not entries:
                    time.sleep(_POLL_S)
            while entries := self._tail.read():
                self._send(writer, "output", entries=entries)
            self._send(writer, "exit", code=code, ends=self._ends(code), said=self._said(code))
        finally:
            writer.close()

    def _send(self, writer: Writer, kind: str, **content: Any) -> bool:
        message = {"kind": kind, "node_rank": self._node_rank, "node": self._node, "attempt": self._attempt} | content
        return writer.send(message, wait_ms=_SEND_MS)

    def _ends(self, code: int) -> list[dict[str, Any]]:
        """How every rank ended; torchrun names those that failed."""
        try:
            failed = json.loads(self._failures.read_text())
        except FileNotFoundError:
            failed = {}
        ends = []
        for rank in self._ranks:
            tail, at_ns = self._tail.end_of(rank)
            known = failed.get(str(rank))
            exit_code = known["exit_code"] if known else (0 if code == 0 else None)
            ends.append(
                {"rank": rank, "node": self._node, "exit_code": exit_code, "at_ns": at_ns,
                 "error": (known or {}).get("error") or tail}
            )  # fmt: skip
        return ends

    def _said(self, code: int) -> str:
        """The end of torchrun's own log, where it failed without a failing rank."""
        if code == 0 or self._failures.exists():
            return ""
        return spare.log(self._run_id).read_text(errors="replace")[-4000:]
