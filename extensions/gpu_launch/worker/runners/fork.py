"""Forks ranks from a process that has imported torch already."""

from __future__ import annotations

import signal
import threading
import time

from gpu_launch.worker import log_files, processes
from gpu_launch.worker.forkserver.client import SERVER_EXIT, ChildExit, ForkServerClient
from gpu_launch.worker.forkserver.protocol import CommandKind, RankSpec
from gpu_launch.worker.log_files import RankLogs, create_log_tree, describe_full_disk
from gpu_launch.worker.runners.base import NodeSpec, ProcessExit, build_rank_environ, expand_command, get_torchrun_flag

#: What torchrun's agent does after a failure: it polls with this period, terminates the other ranks, then kills them.
_MONITOR_S, _SHUTDOWN_S = 0.1, 30.0
_STOPPED = frozenset({-signal.SIGTERM, -signal.SIGKILL})
_LOG_EXCERPT = 4000  # characters


class ForkRunner:
    """Runs the ranks of one node."""

    def __init__(self, server: ForkServerClient, node: NodeSpec) -> None:
        self._server, self._node = server, node
        self._logs = create_log_tree(node.logs, node.spec.run_id, node.processes)
        self._exits_changed = threading.Condition()
        self._exits: dict[int, ChildExit] = {}
        self._is_server_gone = False
        self._reported: set[int] = set()
        #: The first signal sent while ranks ran.
        self._signalled: int | None = None
        self._is_terminated = False
        self._terminated_at: float | None = None
        shutdown_flag = get_torchrun_flag(node.spec.torchrun_flags, "shutdown-timeout", "")
        self._shutdown_s = float(shutdown_flag or node.spec.shutdown_s or _SHUTDOWN_S)
        self._failed_at: float | None = None
        self._pids = server.fork(
            [self._build_rank_spec(local, logs) for local, logs in enumerate(self._logs)], self._record_exit
        )
        self.pid = self._pids[0]

    def poll(self) -> int | None:
        """Return the overall exit code. As under torchrun, the first failure ends the node's other ranks."""
        with self._exits_changed:
            if not self._is_server_gone and len(self._exits) < len(self._pids):
                self._end_others(time.monotonic())
                return None
        if self._signalled is not None:
            return 128 + self._signalled
        return 0 if all(end.code == 0 for end in self.exits()) else 1

    def wait(self, limit_s: float) -> None:
        with self._exits_changed:
            exit_count = len(self._exits)
            self._exits_changed.wait_for(lambda: self._is_server_gone or len(self._exits) != exit_count, limit_s)

    def new_failures(self) -> list[ProcessExit]:
        """Return the ranks that failed since the last call, without those terminated after another one's failure."""
        with self._exits_changed:
            failed = [pid for pid, end in self._exits.items() if end.code != 0 and pid not in self._reported]
            self._reported.update(failed)
            if self._terminated_at is not None:
                failed = [pid for pid in failed if self._exits[pid].code not in _STOPPED]
        return [self._build_exit(self._pids.index(pid)) for pid in failed]

    def exits(self) -> list[ProcessExit]:
        return [self._build_exit(local) for local in range(len(self._pids))]

    def failure_note(self) -> str:
        """Report the end of the fork server itself, and a full disk."""
        if self._is_server_gone:
            return f"The fork server has ended.\n{self._server.log.read_text(errors='replace')[-_LOG_EXCERPT:]}"
        return "" if self.poll() == 0 else describe_full_disk(self._node.logs)

    def signal(self, number: int) -> None:
        """Send a signal to every rank's process group.

        SIGTERM is sent only once, because a second one could interrupt the ranks' handling of the first.
        """
        with self._exits_changed:
            is_again = number == signal.SIGTERM and self._is_terminated
            if len(self._exits) == len(self._pids) or is_again:
                return
            self._is_terminated = self._is_terminated or number == signal.SIGTERM
            if self._signalled is None:
                self._signalled = number
        self._server.signal(number)

    def kill(self) -> None:
        """Kill the ranks and all processes with their mark."""
        with self._exits_changed:
            is_running = len(self._exits) < len(self._pids)
        if is_running:
            self._server.signal(signal.SIGKILL)
        processes.kill_marked(self._node.environ[processes.MARK_VARIABLE])

    def _end_others(self, now: float) -> None:
        if not any(end.code != 0 for end in self._exits.values()):
            return
        if self._failed_at is None:
            self._failed_at = now
        elif self._terminated_at is None and now - self._failed_at > _MONITOR_S:
            self._terminated_at = now
            self._server.signal(signal.SIGTERM)
        elif self._terminated_at is not None and now - self._terminated_at > self._shutdown_s:
            self._server.signal(signal.SIGKILL)

    def _build_rank_spec(self, local_rank: int, logs: RankLogs) -> RankSpec:
        spec = self._node.spec
        kind = CommandKind.PROGRAM if spec.no_python else CommandKind.MODULE if spec.module else CommandKind.SCRIPT
        return RankSpec(
            kind=kind,
            command=expand_command(spec.command, local_rank=local_rank),
            cwd=spec.cwd,
            environ=build_rank_environ(
                self._node.environ,
                spec,
                node_rank=self._node.node_rank,
                local_rank=local_rank,
                error_file=str(logs.error),
                progress_file=str(self._node.run.progress_file(self._node.ranks[local_rank])),
            ),
            stdout=str(logs.stdout),
            stderr=str(logs.stderr),
            exchange=spec.exchange,
        )

    def _record_exit(self, ended: ChildExit) -> None:
        """Record an exit; called in the fork server client's thread."""
        with self._exits_changed:
            if ended is SERVER_EXIT:
                self._is_server_gone = True
            else:
                self._exits[ended.pid] = ended
            self._exits_changed.notify_all()

    def _build_exit(self, local_rank: int) -> ProcessExit:
        ended = self._exits.get(self._pids[local_rank], SERVER_EXIT)
        return ProcessExit(
            rank=self._node.ranks[local_rank],
            code=ended.code,
            at_ns=ended.at_ns,
            traceback="" if ended.code == 0 else log_files.read_error_file(self._logs[local_rank].error),
        )
