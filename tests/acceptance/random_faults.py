"""Random faults of the practice closet: killed processes, cut links, frozen daemons."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from gpuhub_closet import docker_daemons, shell
from gpuhub_closet.topology import ClosetPlan
from tests.support.hub.browser import Product


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and its delay after the previous one."""

    after_s: float
    what: str
    node: str
    #: Duration of a cut, seconds.
    lasts_s: float


def schedule_faults(seed: int, count: int, nodes: tuple[str, ...]) -> list[Fault]:
    """Return `count` random faults, the same for the same seed, with every kind among them."""
    chance = random.Random(seed)
    kinds = ["hub", "broker", "dockerd", "cut"]
    return [
        Fault(
            after_s=chance.uniform(0.5, 5.0),
            what=kinds[number] if number < len(kinds) else chance.choice(kinds),
            node=chance.choice(nodes),
            lasts_s=chance.uniform(5.0, 20.0),
        )
        for number in range(count)
    ]


@dataclass(slots=True)
class FaultInjector:
    """Injects faults and counts them by node."""

    product: Product
    plan: ClosetPlan
    #: Kills of each node's daemon, which end its containers as a power cut does.
    crashes: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    _healing: list[threading.Thread] = field(default_factory=list)

    def inflict(self, fault: Fault) -> None:
        """Inject one fault; a cut ends after its duration."""
        self.done[fault.what] += 1
        if fault.what in {"hub", "broker"}:
            pid = self.product.supervisor.pid(fault.what)
            if pid:
                _signal(pid, signal.SIGKILL)
        elif fault.what == "dockerd":
            self.crashes[fault.node] += 1
            self._signal_daemon(fault.node, signal.SIGKILL)
        else:
            healing = threading.Thread(target=self._cut, args=(fault.node, fault.lasts_s))
            self._healing.append(healing)
            healing.start()

    def heal(self) -> None:
        """Wait until every cut is over and all daemons run."""
        for healing in self._healing:
            healing.join(60)
        self._healing.clear()
        docker_daemons.wait_ready(self.plan, self.product.paths)

    def _cut(self, node: str, seconds: float) -> None:
        """Drop all packets of the node and freeze its daemon, which the closet reaches without the network."""
        link = self.plan.netns_name(self.plan.node(node))
        shell.run_command(("ip", "link", "set", link, "down"))
        self._signal_daemon(node, signal.SIGSTOP)
        time.sleep(seconds)
        self._signal_daemon(node, signal.SIGCONT)
        shell.run_command(("ip", "link", "set", link, "up"))

    def _signal_daemon(self, node: str, number: signal.Signals) -> None:
        for pid, name in docker_daemons.find_processes(self.plan, self.plan.node(node)).items():
            if name == "dockerd":
                _signal(pid, number)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
