"""One start of standing ranks: the launch that holds them, and the way of cells to them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_launch import network, runs
from gpu_launch.broker import Broker
from gpu_launch.crew import Crew, crews
from gpu_launch.errors import GpuLaunchError, LaunchFailed
from gpu_launch.launch import Launch
from gpu_launch.progress import SILENCE_S
from gpu_launch.request import Checked
from gpu_launch.standing.control import Control, Message
from gpu_launch.standing.heard import HearingSink
from gpu_launch.standing.idle import Patience
from gpu_launch.standing.screen import CellScreen

_CONTROL, _MODULE = "standing.json", "gpu_launch.standing.rank"
_JOIN_S = 180.0  # seconds for all ranks to join the group, once they were started
_PING_S = 1.0  # seconds between looks whether ranks are connected
_GONE_S = 3.0  # seconds without a connection after which a rank is gone whose node has told its end; else SILENCE_S
_LEAVE_S = 5.0  # seconds ranks have for their own end
_SILENT_S = 1.0  # seconds without any output after which no more of a cell's is waited for
_NETWORK_S = 2.0
#: However short workers are to stay, as renewed ranks are started on the same ones.
_RENEW_S = 60


class Session:
    """Begun once, ended once. For one thread at a time."""

    def __init__(self, checked: Checked, broker: Broker | None, *, screen: CellScreen) -> None:
        env = checked.request.env
        asked_s = checked.request.options.keep_s
        #: How long idle ranks keep their GPUs while others wait, and their workers stay afterwards, in seconds.
        self.keep_s = env.keep_workers_s if asked_s is None else float(asked_s)
        self._asker = Broker.inside(env, patience_s=0.0) if env.broker_url and env.token else None
        self.run = runs.create(env.home)
        path = self.run.root / _CONTROL
        checked = _with_module(checked, path, keep_s=max(_RENEW_S, round(self.keep_s)))
        self.crew: Crew = crews.take(checked, broker)
        self.crew.is_told = self.crew.is_told or self.keep_s < _RENEW_S
        try:
            address = network.own(env.subnet, wait_s=_NETWORK_S).address
            self._control = Control(address)
            self._control.write(path)
            sink = HearingSink(address, self._control)
            self._heard = sink.heard
            self._launch = Launch(checked, crew=self.crew, run=self.run, sink=sink, screen=screen)
        except BaseException:
            crews.give_back(self.crew, keep_s=0)
            raise
        #: Every rank's node and device, once it has joined.
        self.nodes: dict[int, str] = {}
        self.devices: dict[int, str] = {}
        self._per_node = checked.plan.nproc_per_node
        self._ranks = checked.plan.nnodes * checked.plan.nproc_per_node
        self._pinged_at = 0.0
        self._missed_since: dict[int, float] = {}
        self.is_over = False
        self.patience = Patience(self.keep_s, time.monotonic())

    def begin(self) -> None:
        """Returns when all ranks have joined the group; raises as `Launch.run` does, and LaunchFailed."""
        self._launch.begin()
        deadline = time.monotonic() + _JOIN_S
        while len(self.devices) < self._ranks:
            for message in self.look():
                self._meet(message)
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self._ranks) if rank not in self.devices]
                raise LaunchFailed(f"ranks {missing} have not joined the process group within {_JOIN_S:.0f} s.")
        self.run.root.joinpath(_CONTROL).unlink(missing_ok=True)
        self.patience.touch(time.monotonic())

    def _meet(self, message: Message) -> None:
        if message.header["kind"] == "hello":
            self.nodes[message.rank] = message.header["node"]
        elif message.header["kind"] == "ready":
            if message.header["error"]:
                node = self.nodes.get(message.rank, "?")
                raise LaunchFailed(
                    f"rank {message.rank} on {node} could not join the process group:\n\n{message.header['error']}"
                )
            self.devices[message.rank] = message.header["device"]

    def send(self, rank: int, header: dict[str, Any], frames: Sequence[bytes] = ()) -> None:
        """Send a message to a rank; one that is gone is noticed by `look`."""
        self._control.send(Message(rank=rank, header=header, frames=tuple(frames)))

    def look(self) -> list[Message]:
        """What ranks have sent, with their output shown meanwhile. Raises LaunchFailed when a rank is gone."""
        messages = self._control.receive(0)
        if not self._launch.step():
            raise LaunchFailed("All ranks have ended by themselves, without an error.")
        self._ping()
        return [*messages, *self._control.receive(0)]

    def catch_up(self, written: dict[int, Sequence[int]]) -> None:
        """Show all output up to these sizes of the ranks' stdout and stderr; gives up when nothing more comes."""
        for rank, sizes in written.items():
            self._heard.want(rank, sizes)
        total, since = self._heard.total, time.monotonic()
        while not self._heard.is_all() and time.monotonic() - since < _SILENT_S:
            self._launch.step()
            if self._heard.total != total:
                total, since = self._heard.total, time.monotonic()
        self._launch.drain()

    def anybody_waits(self) -> bool:
        """Whether others wait for GPUs that these ranks could give. For any thread."""
        if self._asker is None or self.crew.gang.is_alone:
            return False
        try:
            return self._asker.cluster().waiting > 0
        except GpuLaunchError:
            # A broker that restarts is no reason to give anything back.
            return False

    def free(self) -> None:
        """After the end: give the workers back at once, however long they were to stay."""
        # Where it cannot be told, the broker frees them by itself: nobody renews their job.
        with contextlib.suppress(GpuLaunchError):
            if not self.crew.is_freed:
                crews.give_back(self.crew, keep_s=0)

    def leave(self) -> None:
        """Let the ranks end by themselves: their own exit functions run. At most some seconds."""
        for rank in self.devices:
            self.send(rank, {"kind": "end"})
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline and self._launch.step():
            pass

    def end(self, outcome: str, *, is_final: bool = True) -> None:
        """End what is left of the ranks and give their workers back; not `is_final` when others follow at once."""
        if self.is_over:
            return
        self.is_over = True
        self._launch.end(outcome)
        self._control.close()
        if is_final and self.keep_s < _RENEW_S and not self.crew.is_freed:
            crews.give_back(self.crew, keep_s=self.keep_s)

    def _ping(self) -> None:
        """Notice ranks that have ended without an error: to a launch they have done their work."""
        now, ended = time.monotonic(), self._launch.ranks.ended()
        if now - self._pinged_at < _PING_S:
            return
        self._pinged_at = now
        for rank in self.devices:
            # Not before its agent's word of how it ended, if that was no good end.
            limit_s = _GONE_S if rank // self._per_node in ended else SILENCE_S
            if self._control.send(Message(rank=rank, header={"kind": "ping"})):
                self._missed_since.pop(rank, None)
            elif now - self._missed_since.setdefault(rank, now) >= limit_s:
                raise LaunchFailed(
                    f"rank {rank} on {self.nodes[rank]} has ended by itself (os._exit?), without an error."
                )


def _with_module(checked: Checked, control: Path, *, keep_s: int) -> Checked:
    """The launch of the module that every rank runs."""
    asked = checked.request.options
    options = replace(asked, module=True, script=_MODULE, arguments=(str(control),), keep_s=keep_s)
    return replace(checked, script=_MODULE, request=replace(checked.request, cell=None, options=options))
