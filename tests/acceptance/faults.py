"""What breaks, on the practice closet: processes killed by their id, links cut, daemons frozen; and what must hold."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter, defaultdict
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpuhub import names
from gpuhub.closet import daemons, shell
from gpuhub.closet.places import node_places
from gpuhub.closet.plan import ClosetNode, Plan

from .conftest import Product

#: A daemon that does not answer the observer within this time is asked again later, seconds.
LOOK_S = 4.0


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


@dataclass(frozen=True, slots=True)
class Seen:
    """A running container of gpuhub, other than its agents."""

    node: str
    id: str
    kind: str
    owner: str
    lease: str
    uuids: tuple[str, ...]


@dataclass(slots=True)
class Observer:
    """Looks at every daemon again and again, as nobody in the product does: no GPU in two running containers."""

    plan: Plan
    product: Product
    double: list[str] = field(default_factory=list)
    looks: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        """Look until `end`."""
        self._thread = threading.Thread(target=self._keep_on)
        self._thread.start()

    def end(self) -> None:
        """Stop looking."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(60)

    def running(self) -> list[Seen]:
        """Every running container on every daemon that answers."""
        return [seen for node in self.plan.nodes for seen in self._look(node)]

    def _keep_on(self) -> None:
        while not self._over.wait(0.5):
            self.looks += 1
            # One that was seen first may have ended before a later daemon was asked: twice the same, or no double.
            first = doubles(self.running())
            if first:
                self.double += sorted(first & doubles(self.running()))

    def _look(self, node: ClosetNode) -> list[Seen]:
        """Nothing of a daemon that does not answer in time, or is killed meanwhile."""
        label = json.dumps({"label": [f"{names.LABEL_INSTANCE}={self.product.paths.instance}"]})
        try:
            with closing(_Unix(node_places(self.product.paths, node).socket)) as daemon:
                listed = daemon.get(f"/containers/json?filters={quote(label)}")
                found = [daemon.get(f"/containers/{one['Id']}/json") for one in listed]
        except (OSError, HTTPException, ValueError):
            return []
        return [parse(node.name, one) for one in found if (one["Config"]["Labels"] or {}).get(names.LABEL_LEASE)]


class _Unix(HTTPConnection):
    """A daemon's API by hand: docker-py leaves a socket open where a daemon does not answer, and here many do not."""

    def __init__(self, path: Path) -> None:
        super().__init__("docker", timeout=LOOK_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))

    def get(self, path: str) -> Any:
        """What the daemon answers; ValueError for anything but success."""
        self.request("GET", path)
        answer = self.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise ValueError(f"{path}: {answer.status}")
        return json.loads(text)


def parse(node: str, found: dict[str, Any]) -> Seen:
    """An inspected container."""
    labels = found["Config"]["Labels"]
    wanted = found["HostConfig"].get("DeviceRequests") or []
    return Seen(
        node=node,
        id=found["Id"],
        kind=labels.get(names.LABEL_KIND, ""),
        owner=labels.get(names.LABEL_OWNER, ""),
        lease=labels[names.LABEL_LEASE],
        uuids=tuple(uuid for request in wanted for uuid in request.get("DeviceIDs") or ()),
    )


def doubles(containers: list[Seen]) -> set[str]:
    """GPUs in more than one running container, and in which."""
    users: defaultdict[str, set[str]] = defaultdict(set)
    for seen in containers:
        for uuid in seen.uuids:
            users[uuid].add(f"{seen.owner}'s {seen.kind} {seen.id[:12]} of lease {seen.lease}")
    return {f"{uuid}: {', '.join(sorted(by))}" for uuid, by in users.items() if len(by) > 1}
