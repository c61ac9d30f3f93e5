"""Nodes without Docker: `DockerClients` with clients that keep containers in memory and respond as docker-py does."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from gpuhub.common.errors import Conflict, GpuhubError, ImageMissing, NodeUnreachable, NotFound
from gpuhub.config.settings import ClusterSettings, NodeSettings, ProfileSettings, UserSettings
from gpuhub.docker.client import CallKind, DockerClients
from tests.support.docker.simulated_execs import SimulatedExecs

T = TypeVar("T")

#: Model and MiB of the cards of the practice closet.
CLOSET = {
    "rig1": [("NVIDIA GeForce RTX 5090", 32607)],
    "rig2": [("NVIDIA GeForce RTX 5070", 12227)],
    "rig3": [("NVIDIA GeForce RTX 5060", 8151)],
}
_ids = itertools.count(1)


@dataclass(slots=True)
class SimulatedNode:
    """One node's daemon; tests change its fields."""

    name: str
    cards: list[tuple[str, int]]
    is_reachable: bool = True
    has_toolkit: bool = True
    images: set[str] = field(default_factory=lambda: {"gpuhub/base:latest", "gpuhub/notebook:latest"})
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    volumes: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Called with the method's name before each call.
    on_call: Callable[[str], None] = lambda method: None
    lines: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    nvml_error: str | None = None
    #: Calls get no response while it is set.
    is_hung: bool = False
    #: The agent's lines end while it is set.
    is_silent: bool = False
    daemon_id: str = ""
    #: CPUs and bytes of memory that it reports; None for none, so that nothing is counted there.
    size: tuple[int, int] | None = None
    boot_id: str | None = ""
    #: Free space for Docker's data, bytes.
    disk_free: int = 100 * 1024**3
    driver: str = "580.95.05"
    #: By index, where it is not as on an idle, healthy GPU: pid and MiB of each process, MiB in use, NVML's error,
    #: uncorrectable errors, failed row remaps, and the name and MiB of each MIG device.
    processes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    used_mib: dict[int, int] = field(default_factory=dict)
    gpu_errors: dict[int, str] = field(default_factory=dict)
    ecc: dict[int, int] = field(default_factory=dict)
    remap_failed: set[int] = field(default_factory=set)
    remap_pending: set[int] = field(default_factory=set)
    #: By index: generation and width of the link under load, and whether the clocks stay low.
    loaded_links: dict[int, list[int]] = field(default_factory=dict)
    throttled: set[int] = field(default_factory=set)
    mig: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    #: Bits of the clocks' event reasons by index, and Xid errors (code, count, time) by UUID.
    clocks_event_reasons: dict[int, int] = field(default_factory=dict)
    xids: dict[str, list[tuple[int, int, float]]] = field(default_factory=dict)
    #: Use of GPUs by index, percent; 0 for the others.
    use_percent: dict[int, int] = field(default_factory=dict)
    #: Their power limits by index, watts; not reported for the others.
    power_limits: dict[int, float] = field(default_factory=dict)
    #: Their counters of energy by index, millijoules.
    energy_mj: dict[int, int] = field(default_factory=dict)
    #: Signals sent to containers' programs: container and signal.
    signals: list[tuple[str, str]] = field(default_factory=list)
    last_line: bytes = b""
    #: Where users' homes are for what is run in their containers, and what is.
    homes: Path = Path("/nonexistent")
    execs: SimulatedExecs = field(default_factory=SimulatedExecs)
    #: What moves GPU memory: its commands so far, outcomes in place of `done` by command, and what was moved out of each
    #: container: its processes, and MiB.
    suspender_commands: list[list[str]] = field(default_factory=list)
    suspender_outcomes: dict[str, str] = field(default_factory=dict)
    moved: dict[str, tuple[list[tuple[int, int]], int]] = field(default_factory=dict)
    #: On a guest: the folder with a home for each container.
    guest_homes: Path | None = None

    def __post_init__(self) -> None:
        self.daemon_id = self.daemon_id or f"daemon-{self.name}"
        self.boot_id = f"boot-{self.name}" if self.boot_id == "" else self.boot_id

    @property
    def uuids(self) -> list[str]:
        """The UUIDs of the node's GPUs."""
        return [f"GPU-{self.name}-{index}" for index in range(len(self.cards))]

    def kill(self) -> None:
        """Power the machine off: nothing answers, and its containers have ended."""
        self.is_reachable = False
        for container in self.containers.values():
            container.update(State="exited", ExitCode=137)

    def start(self, boot_id: str) -> None:
        """Restart the machine."""
        self.boot_id, self.is_reachable = boot_id, True

    def print_line(self) -> bytes:
        """Return the agent's last line, a new one unless the agent is silent."""
        if not self.is_silent or not self.last_line:
            gpus = [] if self.nvml_error else [gpu for index in range(len(self.cards)) for gpu in self._readings(index)]
            line = {"n": next(self.lines), "boot_id": self.boot_id, "driver": self.driver, "error": self.nvml_error}
            line["disk_free"] = self.disk_free
            if not self.nvml_error:
                line["xids"] = {uuid: self._list_xids(uuid) for uuid in self.uuids}
            self.last_line = json.dumps({**line, "gpus": gpus}).encode() + b"\n"
        return self.last_line

    def _list_xids(self, uuid: str) -> list[dict[str, Any]]:
        return [{"code": code, "count": count, "at": at} for code, count, at in self.xids.get(uuid, ())]

    def _readings(self, index: int) -> list[dict[str, Any]]:
        if index in self.gpu_errors:
            return [{"index": index, "error": self.gpu_errors[index], "mig": False, "parent": None}]
        uuid, (name, mib) = self.uuids[index], self.cards[index]
        reading = {
            "uuid": uuid,
            "index": index,
            "name": name,
            "memory_total_mib": mib,
            "memory_used_mib": self.used_mib.get(index, 4),
            "utilisation_percent": self.use_percent.get(index, 0),
            "memory_utilisation_percent": 0,
            "power_w": 20.5,
            "power_limit_w": self.power_limits.get(index),
            "energy_mj": self.energy_mj.get(index, 7_920_310),
            "temperature_c": 40,
            "clocks_event_reasons": self.clocks_event_reasons.get(index, 1),
            "processes": [{"pid": pid, "memory_mib": used} for pid, used in self.processes.get(index, ())],
            "capability": [12, 0],
            "mig": False,
            "parent": None,
            "ecc_uncorrected": self.ecc.get(index),
            "remap_failed": True if index in self.remap_failed else None,
            "remap_pending": True if index in self.remap_pending else None,
            "pcie": {"generation": 1, "width": 16, "most_generation": 5, "most_width": 16},
            "loaded_link": self.loaded_links.get(index),
            "is_throttled": index in self.throttled,
            "remapped_rows": [0, 1] if index in self.remap_failed else None,
            "error": None,
        }
        return [
            {
                **reading,
                "uuid": f"MIG-{uuid}-{slot}",
                "name": part,
                "memory_total_mib": mib,
                "mig": True,
                "parent": uuid,
            }
            for slot, (part, mib) in enumerate(self.mig.get(index, ()))
        ] or [reading]

    def run_suspender(self, command: list[str]) -> str:
        """Do what `nodes.gpu_suspension` does, and return its output."""
        self.suspender_commands.append(command)
        what, container, uuid, *_ = command
        outcome, moved_mib = self.suspender_outcomes.get(what, "done"), 0
        if self.containers.get(container, {}).get("State") != "running" or uuid not in self.uuids:
            outcome = "refused" if what == "suspend" else "failed"
        if outcome == "done" and what == "suspend" and container not in self.moved:
            index = self.uuids.index(uuid)
            self.moved[container] = self.processes.pop(index, []), self.used_mib.pop(index, 4)
            moved_mib = self.moved[container][1]
        elif outcome == "done" and what == "resume" and container in self.moved:
            index = self.uuids.index(uuid)
            self.processes[index], self.used_mib[index] = self.moved.pop(container)
            moved_mib = self.used_mib[index]
        text = "" if outcome == "done" else f"{what} was {outcome}"
        return json.dumps({"outcome": outcome, "text": text, "moved_mib": moved_mib})

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the containers with that label."""
        return [c for c in self.containers.values() if c["Labels"].get("gpuhub.kind") == kind]

    def run_container(
        self, labels: dict[str, str], *, name: str = "", state: str = "running", devices: Sequence[str] = ()
    ) -> str:
        """Run a container as a spawner would."""
        container = f"{next(_ids):064x}"
        self.containers[container] = {
            "Id": container,
            "Names": [f"/{name or container[-12:]}"],
            "Labels": {"gpuhub.instance": "ghtest", **labels},
            "State": state,
            "ExitCode": 0,
            "OOMKilled": False,
            "Devices": list(devices),
            "StartedAt": "",
            "NetworkMode": "",
        }
        return container

    def end_container(self, container: str, *, code: int = 0, oom: bool = False) -> None:
        """End the container's program."""
        self.containers[container].update(State="exited", ExitCode=code, OOMKilled=oom)


class SimulatedClient:
    """The methods of docker.APIClient that the broker uses."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node

    def containers(self, all: bool = False, filters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        wanted = dict(label.split("=", 1) for label in (filters or {}).get("label", ()))
        return [
            dict(container)
            for container in list(self._node.containers.values())
            if (all or container["State"] == "running") and has_labels(wanted, container["Labels"])
        ]

    def inspect_image(self, image: str) -> dict[str, Any]:
        if image not in self._node.images:
            raise ImageMissing(f"node {self._node.name}: no such image: {image}")
        return {"Id": f"sha256:{image}"}

    def create_host_config(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    def create_container(self, *, image: str, name: str, labels: dict[str, str], **rest: Any) -> dict[str, Any]:
        self.inspect_image(image)
        if any(container["Names"] == [f"/{name}"] for container in self._node.containers.values()):
            raise Conflict(f"node {self._node.name}: the name {name} is in use")
        made = self._node.run_container(labels, name=name, state="created")
        self._node.containers[made]["NetworkMode"] = (rest.get("host_config") or {}).get("network_mode", "")
        self._node.containers[made]["Command"] = rest.get("command")
        return {"Id": made}

    def start(self, container: str) -> None:
        found = self._find(container)
        if not self._node.has_toolkit:
            # dockerd answers 500, which is neither of the errors with a meaning.
            raise GpuhubError(f'node {self._node.name}: could not select device driver "" with capabilities: [[gpu]]')
        found.update(State="running", StartedAt=datetime.now(UTC).isoformat())
        if found["Labels"].get("gpuhub.kind") == "suspender":
            command = found["Command"]
            found.update(State="exited", Output=self._node.run_suspender(command[command.index("-c") + 2 :]))

    def update_container(self, container: str, **limits: Any) -> dict[str, Any]:
        self._find(container)["Limits"] = limits
        return {"Warnings": None}

    def stop(self, container: str, timeout: int = 10) -> None:
        self._find(container)["State"] = "exited"

    def remove_container(self, container: str, force: bool = False, v: bool = False) -> None:
        if self._find(container)["State"] == "running" and not force:
            raise Conflict(
                f"node {self._node.name}: You cannot remove a running container {container}. Stop the container before "
                "attempting removal or force remove"
            )
        del self._node.containers[self._find(container)["Id"]]

    def kill(self, container: str, signal: str = "SIGKILL") -> None:
        if self._find(container)["State"] != "running":
            raise Conflict(f"node {self._node.name}: container {container} is not running")
        self._node.signals.append((container, signal))

    def info(self) -> dict[str, Any]:
        size = {} if self._node.size is None else {"NCPU": self._node.size[0], "MemTotal": self._node.size[1]}
        return {"ID": self._node.daemon_id, "Name": self._node.name, **size}

    def inspect_container(self, container: str) -> dict[str, Any]:
        found = self._find(container)
        return {
            "Id": found["Id"],
            "Config": {"Labels": found["Labels"]},
            "State": {
                "Running": found["State"] == "running",
                "StartedAt": found["StartedAt"],
                "ExitCode": found["ExitCode"],
                "OOMKilled": found["OOMKilled"],
            },
            "HostConfig": {
                "DeviceRequests": [{"DeviceIDs": found["Devices"]}] if found["Devices"] else None,
                "NetworkMode": found["NetworkMode"],
            },
        }

    def exec_create(self, container: str, cmd: list[str], **_arguments: Any) -> dict[str, Any]:
        found = self._find(container)
        if found["State"] != "running":
            raise Conflict(f"node {self._node.name}: container {container} is not running")
        return {"Id": self._node.execs.create(cmd, self._find_home(container))}

    def put_archive(self, container: str, path: str, data: Iterable[bytes]) -> bool:
        with tarfile.open(fileobj=io.BytesIO(b"".join(data))) as tar:
            tar.extractall(self._find_home(container))
        return True

    def get_archive(self, container: str, path: str) -> tuple[Iterator[bytes], dict[str, Any]]:
        folder = self._find_home(container).joinpath(*Path(path).parts[3:])
        if not folder.exists():
            raise NotFound(f"node {self._node.name}: Could not find the file {path} in container {container}")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.add(folder, arcname=folder.name)
        return iter([buffer.getvalue()]), {}

    def _find_home(self, container: str) -> Path:
        owner = self._find(container)["Labels"].get("gpuhub.owner", "nobody")
        home = self._node.homes / owner if self._node.guest_homes is None else self._node.guest_homes / container
        home.mkdir(parents=True, exist_ok=True)
        return home

    def exec_start(self, exec_id: str, socket: bool = False) -> Any:
        return self._node.execs.start(exec_id)

    def logs(self, container: str, **_arguments: Any) -> bytes:
        output = self._find(container).get("Output")
        return self._node.print_line() if output is None else output.encode()

    def networks(self, **_arguments: Any) -> list[dict[str, Any]]:
        return []

    def volumes(self, filters: dict[str, Any] | None = None) -> dict[str, Any]:
        wanted = dict(label.split("=", 1) for label in (filters or {}).get("label", ()))
        found = [dict(one) for one in self._node.volumes.values() if has_labels(wanted, one["Labels"])]
        return {"Volumes": found or None, "Warnings": None}

    def create_volume(self, name: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
        # As the daemon: an existing volume of the name is returned as it is.
        return self._node.volumes.setdefault(name, {"Name": name, "Labels": labels or {}, "Options": None})

    def inspect_volume(self, name: str) -> dict[str, Any]:
        if name not in self._node.volumes:
            raise NotFound(f"node {self._node.name}: no such volume: {name}")
        return self._node.volumes[name]

    def remove_volume(self, name: str) -> None:
        if name not in self._node.volumes:
            raise NotFound(f"node {self._node.name}: no such volume: {name}")
        if any(mount["Name"] == name for one in self._node.containers.values() for mount in one.get("Mounts", ())):
            raise Conflict(f"node {self._node.name}: volume is in use: {name}")
        del self._node.volumes[name]

    def _find(self, container: str) -> dict[str, Any]:
        by_name = (one for one in self._node.containers.values() if one["Names"] == [f"/{container}"])
        found = self._node.containers.get(container) or next(by_name, None)
        if found is None:
            raise NotFound(f"node {self._node.name}: no such container: {container}")
        return found


def has_labels(wanted: dict[str, str], labels: dict[str, str]) -> bool:
    """Return whether the container has every wanted label."""
    return all(labels.get(key) == value for key, value in wanted.items())


class SimulatedDaemons(DockerClients):
    """The daemons of simulated nodes."""

    def __init__(self, nodes: Sequence[NodeSettings], simulated: dict[str, SimulatedNode], run_dir: Path) -> None:
        super().__init__(nodes, instance="ghtest", run_dir=run_dir)
        self.simulated = simulated

    async def run(self, node: str, work: Callable[[Any], T], *, kind: CallKind = CallKind.SHORT) -> T:
        """Run `work` on the simulated client."""
        found = self.simulated[node]
        end = time.monotonic() + self._timeout_s
        while found.is_hung and time.monotonic() < end:  # noqa: ASYNC110 - tests set it from other threads
            await asyncio.sleep(0.01)
        if found.is_hung or not found.is_reachable:
            raise NodeUnreachable(f"node {node}: its Docker daemon cannot be reached")
        client = _RecordingClient(SimulatedClient(found), found)
        # Long calls stream, and wait for the event loop.
        return await asyncio.to_thread(work, client) if kind is CallKind.LONG else work(client)


class _RecordingClient:
    """A Docker client that reports each called method to the node."""

    def __init__(self, client: SimulatedClient, node: SimulatedNode) -> None:
        self._client = client
        self._node = node

    def __getattr__(self, method: str) -> Any:
        self._node.on_call(method)
        return getattr(self._client, method)


def simulated_nodes(cards: dict[str, list[tuple[str, int]]] = CLOSET) -> dict[str, SimulatedNode]:
    """Return a node for each entry."""
    return {name: SimulatedNode(name=name, cards=list(of_node)) for name, of_node in cards.items()}


def build_cluster(
    cards: dict[str, list[tuple[str, int]]] = CLOSET, profiles: Sequence[ProfileSettings] = (), **parts: Any
) -> ClusterSettings:
    """Build settings for simulated nodes, with a profile for each model and one without a GPU."""
    models = {name.removeprefix("NVIDIA GeForce ") for of_node in cards.values() for name, _ in of_node}
    return ClusterSettings(
        nodes=tuple(
            NodeSettings(name=name, address=f"127.0.1.{index}", docker=f"unix:///nowhere/{name}.sock")
            for index, name in enumerate(cards, start=1)
        ),
        profiles=tuple(profiles)
        or (
            *(
                ProfileSettings(name=model.lower().replace(" ", ""), title=model, gpu_model=model)
                for model in sorted(models)
            ),
            ProfileSettings(name="any", title="Any GPU"),
            ProfileSettings(name="cpu", title="No GPU", gpu_count=0),
        ),
        **{"users": UserSettings(allowed=("ada", "ben"), max_waiting=1000), **parts},
    )


def wait_until(condition: Callable[[], T | None], what: str, deadline_s: float = 30.0) -> T:
    """Return the condition's value as soon as it is true.

    Raises:
        AssertionError: It was not true within the deadline.
    """
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {deadline_s} s: {what}")
