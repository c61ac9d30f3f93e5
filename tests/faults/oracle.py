"""What must hold after every case, whatever it was: told by the daemons themselves, not by the product."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import closing
from dataclasses import dataclass, field

from gpuhub import names
from tests.faults.bed import KEPT, USERS, Bed, home, label_filter
from tests.support.observer import doubles

#: From the end of a case until leases and containers must agree and nothing may be left over, seconds.
SETTLE_S = 60.0


@dataclass(slots=True)
class Oracle:
    """Looks, and counts over the session."""

    bed: Bed
    double_leases: int = 0
    leaks: int = 0
    _sums: dict[str, str] = field(default_factory=dict)
    _volumes: dict[str, set[str]] = field(default_factory=dict)

    def begin(self) -> None:
        """Remember what must stay; from now on every daemon is watched."""
        for name in USERS:
            file = home(self.bed, name) / KEPT
            if file.parent.is_dir():
                file.write_bytes(os.urandom(200_000))
                os.chown(file, file.parent.stat().st_uid, file.parent.stat().st_gid)
                self._sums[name] = digest(file.read_bytes())
        self._volumes = {node.name: self._listed_volumes(node.name) for node in self.bed.plan.nodes}
        self.bed.observer.begin()

    def settle(self) -> list[str]:
        """What is wrong with the GPUs and between leases and containers, at the latest after the deadline."""
        wrong = self._doubled()
        end = time.monotonic() + SETTLE_S
        while (found := self._differences()) and time.monotonic() < end:
            time.sleep(0.5)
        self.leaks += len(found)
        return wrong + found

    def emptied(self) -> list[str]:
        """What is wrong when every server and lease has ended: leftovers, homes, hub and broker."""
        end = time.monotonic() + SETTLE_S
        while (found := self._leftovers()) and time.monotonic() < end:
            time.sleep(0.5)
        self.leaks += len(found)
        live = [] if self.bed.is_live() else ["hub or broker does not answer"]
        return self._doubled() + found + self._changed_homes() + live

    def _doubled(self) -> list[str]:
        """GPUs in two running containers, seen by the watch or now."""
        seen = {*self.bed.observer.double, *doubles(self.bed.observer.running())}
        self.bed.observer.double.clear()
        self.double_leases += len(seen)
        return [f"doubled: {one}" for one in sorted(seen)]

    def _differences(self) -> list[str]:
        rows = self.bed.leases()
        if rows is None:
            return ["the broker does not tell its leases"]
        by_id = {row["id"]: row for row in rows}
        there = self.bed.observer.running()
        found = [f"{one.kind} {one.id[:12]} on {one.node} has no open lease" for one in there if one.lease not in by_id]
        waits = {"requested", "quarantined"}
        found += [
            f"lease {row['id']} of {row['owner']} is {row['state']}"
            for row in rows
            if row["state"] != "active" and row["state"] not in waits
        ]
        with_container = {one.lease for one in there}
        found += [
            f"lease {row['id']} of {row['owner']} has no container"
            for row in rows
            if row["state"] == "active" and row["id"] not in with_container
        ]
        held = [gpu["uuid"] for row in rows for gpu in row["gpus"] if row["state"] != "requested"]
        return found + [
            f"GPU {uuid} is in two leases" for uuid in sorted({uuid for uuid in held if held.count(uuid) > 1})
        ]

    def _leftovers(self) -> list[str]:
        found: list[str] = []
        for node in self.bed.plan.nodes:
            with closing(self.bed.client_of(node.name)) as client:
                wanted = label_filter(self.bed)
                for one in client.containers(all=True, filters=wanted):
                    if one["Labels"].get(names.LABEL_KIND) not in names.LEASELESS:
                        found.append(f"container {one['Names']} on {node.name} ({one['State']})")
                for one in client.networks(filters=wanted):
                    owner = (one["Labels"] or {}).get(names.LABEL_OWNER)
                    if owner is not None and owner not in USERS:
                        found.append(f"network {one['Name']} on {node.name}")
            extra = self._listed_volumes(node.name) - self._volumes.get(node.name, set())
            found += [f"volume {name} on {node.name}" for name in sorted(extra)]
        return found

    def _listed_volumes(self, node: str) -> set[str]:
        """Volumes there but for those that users keep."""
        with closing(self.bed.client_of(node)) as client:
            listed = client.volumes()["Volumes"] or []
        return {one["Name"] for one in listed if not (one.get("Labels") or {}).get(names.LABEL_INSTANCE)}

    def _changed_homes(self) -> list[str]:
        return [
            f"{name}'s {KEPT} was changed or lost"
            for name, wanted in self._sums.items()
            if not (home(self.bed, name) / KEPT).is_file()
            or digest((home(self.bed, name) / KEPT).read_bytes()) != wanted
        ]


def digest(content: bytes) -> str:
    """The checksum of a file."""
    return hashlib.sha256(content).hexdigest()
