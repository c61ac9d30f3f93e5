"""What breaks, on the practice closet: processes killed by their id, links cut, daemons frozen."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from gpuhub.closet import daemons, shell
from gpuhub.closet.plan import Plan

from .conftest import Product


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One fault, and how long after the one before."""

    after_s: float
    what: str
    node: str
    #: How long a cut lasts, seconds.
    lasts_s: float


def schedule(seed: int, count: int, nodes: tuple[str, ...]) -> list[Moment]:
    """So many random moments, the same for the same seed; every kind comes up."""
    chance = random.Random(seed)
    kinds = ["hub", "broker", "dockerd", "cut"]
    return [
        Moment(
            after_s=chance.uniform(0.5, 5.0),
            what=kinds[number] if number < len(kinds) else chance.choice(kinds),
            node=chance.choice(nodes),
            lasts_s=chance.uniform(5.0, 20.0),
        )
        for number in range(count)
    ]


@dataclass(slots=True)
class Faults:
    """Does what moments say, and remembers what each node went through."""

    product: Product
    plan: Plan
    #: Kills of each node's daemon, with which its containers end like in a power cut.
    crashes: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    _healing: list[threading.Thread] = field(default_factory=list)

    def inflict(self, moment: Moment) -> None:
        """One fault; a cut heals by itself."""
        self.done[moment.what] += 1
        if moment.what in {"hub", "broker"}:
            pid = self.product.supervisor.pid(moment.what)
            if pid:
                _signal(pid, signal.SIGKILL)
        elif moment.what == "dockerd":
            self.crashes[moment.node] += 1
            self._signal_daemon(moment.node, signal.SIGKILL)
        else:
            healing = threading.Thread(target=self._cut, args=(moment.node, moment.lasts_s))
            self._healing.append(healing)
            healing.start()

    def heal(self) -> None:
        """Return when every cut is over and everything runs again."""
        for healing in self._healing:
            healing.join(60)
        self._healing.clear()
        daemons.wait_ready(self.plan, self.product.paths)

    def _cut(self, node: str, seconds: float) -> None:
        """No packet to or from the node, and no answer of its daemon, which the closet reaches past the network."""
        link = self.plan.netns(self.plan.node(node))
        shell.run(("ip", "link", "set", link, "down"))
        self._signal_daemon(node, signal.SIGSTOP)
        time.sleep(seconds)
        self._signal_daemon(node, signal.SIGCONT)
        shell.run(("ip", "link", "set", link, "up"))

    def _signal_daemon(self, node: str, number: signal.Signals) -> None:
        for pid, name in daemons.processes(self.plan, self.plan.node(node)).items():
            if name == "dockerd":
                _signal(pid, number)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
