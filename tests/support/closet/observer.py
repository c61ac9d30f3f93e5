"""Observes every daemon of a practice closet independently of the product: no GPU may be in two running containers.

A GPU that is divided into parts may be in as many as it has parts.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpuhub.common import names
from gpuhub.common.paths import Paths
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import ClosetNode, ClosetPlan

#: A daemon that does not answer the observer within this time is asked again later, seconds.
LOOK_S = 4.0


@dataclass(frozen=True, slots=True)
class SeenContainer:
    """A running container of gpuhub, other than its agents."""

    node: str
    id: str
    kind: str
    owner: str
    lease: str
    uuids: tuple[str, ...]
    #: It has one of so many equal parts of its GPU.
    share: int = 1


@dataclass(slots=True)
class Observer:
    """Polls every daemon independently of the product, and checks that no GPU is in two running containers."""

    plan: ClosetPlan
    paths: Paths
    double: list[str] = field(default_factory=list)
    polls: int = 0
    #: Polls that a daemon answered, by node: while it is stopped, nothing is seen there.
    answers: Counter[str] = field(default_factory=Counter)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        """Poll until `end`."""
        self._thread = threading.Thread(target=self._keep_on)
        self._thread.start()

    def end(self) -> None:
        """Stop polling."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(60)

    def running(self) -> list[SeenContainer]:
        """Return every running container on every daemon that answers."""
        return [seen for node in self.plan.nodes for seen in self._list_containers(node)]

    def _keep_on(self) -> None:
        while not self._over.wait(0.5):
            self.polls += 1
            # A container may have ended before a later daemon was polled, so only a repeated finding counts.
            first = self.find()
            if first:
                self.double += sorted(first & self.find())

    def find(self) -> set[str]:
        """Return the GPUs that two containers use now."""
        return find_overused_gpus(self.running())

    def _list_containers(self, node: ClosetNode) -> list[SeenContainer]:
        """Return nothing for a daemon that does not answer in time, or is killed in the meantime."""
        label = json.dumps({"label": [f"{names.LABEL_INSTANCE}={self.paths.instance}"]})
        try:
            with closing(_Unix(node_paths(self.paths, node).socket)) as daemon:
                listed = daemon.get(f"/containers/json?filters={quote(label)}")
                found = [seen for one in listed if (seen := daemon.get(f"/containers/{one['Id']}/json")) is not None]
        except (OSError, HTTPException, ValueError):
            return []
        self.answers[node.name] += 1
        return [parse(node.name, one) for one in found if (one["Config"]["Labels"] or {}).get(names.LABEL_LEASE)]


class _Unix(HTTPConnection):
    """A minimal client of a daemon's API: docker-py leaves a socket open when a daemon does not answer, as many do
    here.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("docker", timeout=LOOK_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))

    def get(self, path: str) -> Any:
        """Return the daemon's answer; None for an object that does not exist, ValueError for any other error."""
        self.request("GET", path)
        answer = self.getresponse()
        text = answer.read()
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise ValueError(f"{path}: {answer.status}")
        return json.loads(text)


def parse(node: str, found: dict[str, Any]) -> SeenContainer:
    """Parse an inspected container."""
    labels = found["Config"]["Labels"]
    wanted = found["HostConfig"].get("DeviceRequests") or []
    return SeenContainer(
        node=node,
        id=found["Id"],
        kind=labels.get(names.LABEL_KIND, ""),
        owner=labels.get(names.LABEL_OWNER, ""),
        lease=labels[names.LABEL_LEASE],
        uuids=tuple(uuid for request in wanted for uuid in request.get("DeviceIDs") or ()),
        share=int(labels.get(names.LABEL_SHARE, 1)),
    )


def find_overused_gpus(containers: list[SeenContainer]) -> set[str]:
    """Return the GPUs that are in more running containers than they have parts, with these containers."""
    users: defaultdict[str, dict[str, Fraction]] = defaultdict(dict)
    for seen in containers:
        for uuid in seen.uuids:
            users[uuid][f"{seen.owner}'s {seen.kind} {seen.id[:12]} of lease {seen.lease}"] = Fraction(1, seen.share)
    return {f"{uuid}: {', '.join(sorted(by))}" for uuid, by in users.items() if sum(by.values()) > 1}
