"""The invariants that hold after every case, checked with the daemons directly and not with the product."""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction

from gpuhub.broker.controllers.nodes.network_gc import NETWORKS_PERIOD_S
from gpuhub.common import names
from tests.faults.testbed.testbed import KEPT, USERS, FaultTestbed, home_of, label_filter
from tests.support.closet.observer import find_overused_gpus

#: From the end of a case until leases and containers must agree and nothing may be left over, seconds.
SETTLE_S = 60.0
#: The broker removes unused networks of users at this interval; the last case may have just joined one.
NETWORKS_SETTLE_S = 2 * NETWORKS_PERIOD_S + SETTLE_S


@dataclass(slots=True)
class InvariantChecker:
    """Checks the invariants and counts violations since the counts were last read."""

    testbed: FaultTestbed
    double_leases: int = 0
    leaks: int = 0
    _sums: dict[str, str] = field(default_factory=dict)
    _volumes: dict[str, set[str]] = field(default_factory=dict)

    def begin(self) -> None:
        """Record the state that must not change, and start watching every daemon."""
        for name in USERS:
            file = home_of(self.testbed, name) / KEPT
            if file.parent.is_dir():
                file.write_bytes(os.urandom(200_000))
                os.chown(file, file.parent.stat().st_uid, file.parent.stat().st_gid)
                self._sums[name] = digest(file.read_bytes())
        self._volumes = {node.name: self._list_volumes(node.name) for node in self.testbed.plan.nodes}
        self.testbed.observer.begin()

    def check_leases(self) -> list[str]:
        """Return the violations by GPUs, leases and containers that remain at the deadline."""
        wrong = self._find_doubled()
        end = time.monotonic() + SETTLE_S
        while (remaining := self._find_differences()) and time.monotonic() < end:
            time.sleep(0.5)
        self.leaks += len(remaining)
        return wrong + remaining

    def check_empty(self) -> list[str]:
        """Return the violations after every server and lease has ended: leftovers, homes, hub and broker."""
        end = time.monotonic() + SETTLE_S
        while (remaining := self._find_leftovers()) and time.monotonic() < end:
            time.sleep(0.5)
        self.leaks += len(remaining)
        live = [] if self.testbed.is_live() else ["hub or broker does not answer"]
        return self._find_doubled() + remaining + self._find_changed_homes() + live

    def check_networks(self) -> list[str]:
        """Return users' networks that remain although nobody has had a lease for longer than the broker keeps them."""
        end = time.monotonic() + NETWORKS_SETTLE_S
        while (remaining := self._find_networks()) and time.monotonic() < end:
            time.sleep(1)
        return remaining

    def _find_doubled(self) -> list[str]:
        """Return GPUs that were or are in two running containers."""
        seen = {*self.testbed.observer.double, *find_overused_gpus(self.testbed.observer.running())}
        self.testbed.observer.double.clear()
        self.double_leases += len(seen)
        return [f"doubled: {text}" for text in sorted(seen)]

    def _find_differences(self) -> list[str]:
        rows = self.testbed.leases()
        if rows is None:
            return ["the broker does not tell its leases"]
        by_id = {row["id"]: row for row in rows}
        containers = self.testbed.observer.running()
        texts = [
            f"{container.kind} {container.id[:12]} on {container.node} has no open lease"
            for container in containers
            if container.lease not in by_id
        ]
        waits = {"requested", "quarantined"}
        texts += [
            f"lease {row['id']} of {row['owner']} is {row['state']}"
            for row in rows
            if row["state"] != "active" and row["state"] not in waits
        ]
        with_container = {container.lease for container in containers}
        texts += [
            f"lease {row['id']} of {row['owner']} has no container"
            for row in rows
            if row["state"] == "active" and row["id"] not in with_container
        ]
        held: defaultdict[str, Fraction] = defaultdict(Fraction)
        for row in rows:
            for gpu in row["gpus"] if row["state"] != "requested" else ():
                held[gpu["uuid"]] += Fraction(1, gpu["share"])
        return texts + [f"GPU {uuid} is in two leases" for uuid, parts in sorted(held.items()) if parts > 1]

    def _find_leftovers(self) -> list[str]:
        leftovers: list[str] = []
        for node in self.testbed.plan.nodes:
            with closing(self.testbed.client_of(node.name)) as client:
                wanted = label_filter(self.testbed)
                for item in client.containers(all=True, filters=wanted):
                    if item["Labels"].get(names.LABEL_KIND) not in names.KINDS_WITHOUT_LEASE:
                        leftovers.append(f"container {item['Names']} on {node.name} ({item['State']})")
            extra = self._list_volumes(node.name) - self._volumes.get(node.name, set())
            leftovers += [f"volume {name} on {node.name}" for name in sorted(extra)]
        return leftovers

    def _find_networks(self) -> list[str]:
        found: list[str] = []
        wanted = {"label": [*label_filter(self.testbed)["label"], names.LABEL_OWNER]}
        for node in self.testbed.plan.nodes:
            with closing(self.testbed.client_of(node.name)) as client:
                found += [f"network {item['Name']} on {node.name}" for item in client.networks(filters=wanted)]
        return found

    def _list_volumes(self, node: str) -> set[str]:
        """Return a node's volumes except users' scratch, which they keep."""
        scratch = {names.scratch_volume_name(self.testbed.paths.instance, name) for name in USERS}
        with closing(self.testbed.client_of(node)) as client:
            return {volume["Name"] for volume in client.volumes()["Volumes"] or ()} - scratch

    def _find_changed_homes(self) -> list[str]:
        return [
            f"{name}'s {KEPT} was changed or lost"
            for name, wanted in self._sums.items()
            if not (home_of(self.testbed, name) / KEPT).is_file()
            or digest((home_of(self.testbed, name) / KEPT).read_bytes()) != wanted
        ]


def digest(content: bytes) -> str:
    """Return a file's checksum."""
    return hashlib.sha256(content).hexdigest()
