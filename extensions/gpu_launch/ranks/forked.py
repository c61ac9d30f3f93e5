"""Ranks forked from a process that has imported torch already."""

from __future__ import annotations

import signal
import threading
import time

from gpu_launch import processes
from gpu_launch.ranks import runner, variables
from gpu_launch.ranks.logs import RankLogs, find_full, make_tree
from gpu_launch.ranks.protocol import Kind, RankOrder
from gpu_launch.ranks.runner import End, Node
from gpu_launch.ranks.server import GONE, Exit, Server

#: What torchrun's agent does after a failure: it looks this often, tells the other ranks to end, then kills.
_MONITOR_S, _SHUTDOWN_S = 0.1, 30.0
_STOPPED = frozenset({-signal.SIGTERM, -signal.SIGKILL})
_SAID = 4000  # characters


class ForkRunner:
    """The ranks of one node."""

    def __init__(self, server: Server, node: Node) -> None:
        self._server, self._node = server, node
        self._logs = make_tree(node.logs, node.spec.run_id, node.processes)
        self._news = threading.Condition()
        self._exits: dict[int, Exit] = {}
        self._is_gone = False
        self._told: set[int] = set()
        #: The signal from outside that came while ranks ran.
        self._signalled: int | None = None
        self._is_terminated = False
        self._terminated_at: float | None = None
        given = variables.passed(node.spec.passed, "shutdown-timeout", "")
        self._shutdown_s = float(given or node.spec.shutdown_s or _SHUTDOWN_S)
        self._failed_at: float | None = None
        self._pids = server.fork([self._order(local, logs) for local, logs in enumerate(self._logs)], self._take)
        self.pid = self._pids[0]

    def poll(self) -> int | None:
        """As torchrun: with the first failure the node's other ranks are told to end."""
        with self._news:
            if not self._is_gone and len(self._exits) < len(self._pids):
                self._end_others(time.monotonic())
                return None
        if self._signalled is not None:
            return 128 + self._signalled
        return 0 if all(end.code == 0 for end in self.ends()) else 1

    def wait(self, limit_s: float) -> None:
        """Return when one has ended, or after the time."""
        with self._news:
            known = len(self._exits)
            self._news.wait_for(lambda: self._is_gone or len(self._exits) != known, limit_s)

    def failures(self) -> list[End]:
        """Those that failed since this was asked last, but not those that were to end for another one's failure."""
        with self._news:
            failed = [pid for pid, end in self._exits.items() if end.code != 0 and pid not in self._told]
            self._told.update(failed)
            if self._terminated_at is not None:
                failed = [pid for pid in failed if self._exits[pid].code not in _STOPPED]
        return [self._end(self._pids.index(pid)) for pid in failed]

    def ends(self) -> list[End]:
        """How each ended."""
        return [self._end(local) for local in range(len(self._pids))]

    def said(self) -> str:
        """Of the fork server's own end, and of a disk without room."""
        if self._is_gone:
            return f"The fork server has ended.\n{self._server.log.read_text(errors='replace')[-_SAID:]}"
        return "" if self.poll() == 0 else find_full(self._node.logs)

    def signal(self, number: int) -> None:
        """To every rank's process group. SIGTERM is sent once: a second one could break off what the first began."""
        with self._news:
            is_again = number == signal.SIGTERM and self._is_terminated
            if len(self._exits) == len(self._pids) or is_again:
                return
            self._is_terminated = self._is_terminated or number == signal.SIGTERM
            if self._signalled is None:
                self._signalled = number
        self._server.signal(number)

    def kill(self) -> None:
        """End the ranks and whatever carries their mark."""
        with self._news:
            is_running = len(self._exits) < len(self._pids)
        if is_running:
            self._server.signal(signal.SIGKILL)
        processes.kill_marked(self._node.environ[processes.MARK])

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

    def _order(self, local_rank: int, logs: RankLogs) -> RankOrder:
        spec = self._node.spec
        kind = Kind.PROGRAM if spec.no_python else Kind.MODULE if spec.module else Kind.SCRIPT
        return RankOrder(
            kind=kind,
            command=variables.for_command(spec.command, local_rank=local_rank),
            cwd=spec.cwd,
            environ=variables.for_rank(
                self._node.environ,
                spec,
                node_rank=self._node.node_rank,
                local_rank=local_rank,
                error_file=str(logs.error),
                progress_file=str(self._node.run.progress(self._node.ranks[local_rank])),
            ),
            stdout=str(logs.stdout),
            stderr=str(logs.stderr),
            exchange=spec.exchange,
        )

    def _take(self, ended: Exit) -> None:
        """In the fork server's thread."""
        with self._news:
            if ended is GONE:
                self._is_gone = True
            else:
                self._exits[ended.pid] = ended
            self._news.notify_all()

    def _end(self, local_rank: int) -> End:
        ended = self._exits.get(self._pids[local_rank], GONE)
        return End(
            rank=self._node.ranks[local_rank],
            code=ended.code,
            at_ns=ended.at_ns,
            recorded="" if ended.code == 0 else runner.recorded(self._logs[local_rank].error),
        )
