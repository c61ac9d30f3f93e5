"""Probes of one node: its containers, its daemon's id, the last reading of its GPU agent and its firewall, which other
programs may remove; and reports of changed conditions of nodes and GPUs.

No query takes longer than `PROBE_TIMEOUT_S`, whatever hangs on the node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpuhub.broker_api.schemas import GpuState, NodeState
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, NodeUnreachable, NotFound
from gpuhub.common.tasks import cancel_tasks
from gpuhub.config.settings import SchedulingSettings
from gpuhub.docker.client import DockerClients
from gpuhub.domain.clock import Clock
from gpuhub.domain.reconcile import ObservedContainer, parse_container, parse_devices
from gpuhub.nodes import agent_container, gpu_health
from gpuhub.nodes.agent_container import ensure_agent, read_last_line
from gpuhub.nodes.daemon_identity import describe_shared_identity
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.status import GpuLeaseStatus, GpuReading, MachineSize, NodeStatus

log = logging.getLogger(__name__)

#: Ensures that the firewall is in place on a node, and returns the number of packets that it has refused, None if
#: unknown; raises GpuhubError where it is not in place.
EnsureFirewall = Callable[[str], Awaitable[int | None]]
T = TypeVar("T")


class SharedIdentity(GpuhubError):
    """The Docker daemons of several nodes have the same id."""


_MIB = 1024**2
#: Largest machine that is believed: cores and bytes.
_MAX_CPUS = 4096
_MAX_MEMORY = 1 << 47
#: Time limit of one query, seconds.
PROBE_TIMEOUT_S = 4.0
#: Interval between two queries of the daemon's id, seconds.
DAEMON_ID_PERIOD_S = 30.0
#: Delay before containers that could not be inspected are tried again, seconds.
INSPECT_RETRY_S = 30.0
#: Interval between two checks of a node whose firewall is in place, seconds.
FIREWALL_CHECK_PERIOD_S = 10.0
#: Time that a poll of the node waits for a check, seconds.
FIREWALL_TIMEOUT_S = 4.0


@dataclass(slots=True)
class _NodeCache:
    """Values of one node that are kept between polls."""

    daemon_asked_at: float | None = None
    agent: str | None = None
    devices: dict[str, frozenset[str]] = field(default_factory=dict)
    inspect_at: float = 0.0
    reading: asyncio.Task[tuple[float, bytes]] | None = None


class NodeProbe:
    """Queries nodes, with at most one reading of a node's agent at a time."""

    def __init__(self, *, daemons: DockerClients, clock: Clock) -> None:
        self._daemons = daemons
        self._clock = clock
        self._caches: dict[str, _NodeCache] = {}
        #: The last known id of each node's daemon; kept while the node does not answer.
        self._daemon_ids: dict[str, str] = {}
        self._machines: dict[str, MachineSize | None] = {}

    async def close(self) -> None:
        """Cancel running readings."""
        await cancel_tasks(cache.reading for cache in self._caches.values() if cache.reading is not None)

    async def identify(self, nodes: Sequence[str]) -> None:
        """Query the ids of all daemons, so that they are compared before the first node is reconciled."""
        await asyncio.gather(*(self.query_daemon_id(node) for node in nodes), return_exceptions=True)

    def check_identity(self, node: str) -> None:
        """Check that no other node's daemon has the same id: it could be the other one that answers here.

        Raises:
            SharedIdentity: Another one has.
        """
        daemon_id = self._daemon_ids.get(node)
        sharing = [name for name, known in self._daemon_ids.items() if known == daemon_id]
        if daemon_id is not None and len(sharing) > 1:
            raise SharedIdentity(describe_shared_identity(sharing, daemon_id))

    async def list_containers(self, node: str) -> list[Mapping[str, Any]]:
        """Return every container of this instance on the node, as the daemon lists it.

        Raises:
            NodeUnreachable, GpuhubError.
        """
        label = f"{names.LABEL_INSTANCE}={self._daemons.instance}"
        listed: list[Mapping[str, Any]] = await self._query(
            node, lambda client: client.containers(all=True, filters={"label": [label]})
        )
        return listed

    async def find_daemon_id(
        self, record: NodeStatus, listed: Sequence[Mapping[str, Any]], *, is_fresh: bool = False
    ) -> str:
        """Return the id of the daemon that listed these containers.

        It is queried every `DAEMON_ID_PERIOD_S`, whenever it may have changed, and with `is_fresh`. A daemon that
        manages a Swarm without a leader does not answer that query, while it works: then the id is the last one, if the
        GPU agent's container is still the same.

        Raises:
            NodeUnreachable, GpuhubError.
        """
        cache = self._cache_of(record.name)
        agent = next((str(raw["Id"]) for raw in listed if _is_agent(raw)), None)
        is_recent = (
            cache.daemon_asked_at is not None and self._clock.monotonic() - cache.daemon_asked_at < DAEMON_ID_PERIOD_S
        )
        known = self._daemon_ids.get(record.name)
        if (
            record.daemon_id is not None
            and is_recent
            and record.failures == 0
            and agent == cache.agent
            and not is_fresh
        ):
            return record.daemon_id
        try:
            daemon_id = await self.query_daemon_id(record.name)
        except NodeUnreachable:
            if known is None or agent is None or agent != cache.agent:
                raise
            cache.daemon_asked_at = self._clock.monotonic()
            return known
        cache.agent = agent
        return daemon_id

    async def query_daemon_id(self, node: str) -> str:
        """Query the id of the node's daemon.

        Raises:
            NodeUnreachable, GpuhubError.
        """
        info: Mapping[str, Any] = await self._query(node, lambda client: client.info())
        self._cache_of(node).daemon_asked_at = self._clock.monotonic()
        daemon_id = self._daemon_ids[node] = str(info["ID"])
        self._machines[node] = parse_machine_size(info)
        return daemon_id

    def find_machine(self, node: str) -> MachineSize | None:
        """Return CPU and memory of a node as its daemon last reported them; None if it did not."""
        return self._machines.get(node)

    async def inspect_containers(self, node: str, listed: Sequence[Mapping[str, Any]]) -> tuple[ObservedContainer, ...]:
        """Return the listed containers, with the GPUs that they were created with where the daemon reports them."""
        cache = self._cache_of(node)
        ids = [str(raw["Id"]) for raw in listed if _kind(raw) not in names.KINDS_WITHOUT_LEASE]
        cache.devices = {container: cache.devices[container] for container in ids if container in cache.devices}
        missing = [container for container in ids if container not in cache.devices]
        if missing and self._clock.monotonic() >= cache.inspect_at:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    for container in missing:
                        cache.devices[container] = await self._inspect(node, container)
            except (TimeoutError, GpuhubError) as error:
                # The inspection of a container on a dead file server hangs, while the node itself answers.
                reason = str(error) or f"no answer within {PROBE_TIMEOUT_S:.0f} s"
                log.info("node %s: containers cannot be inspected now: %s", node, reason)
                cache.inspect_at = self._clock.monotonic() + INSPECT_RETRY_S
        return tuple(parse_container(raw, cache.devices.get(str(raw["Id"]))) for raw in listed)

    async def read_agent(self, record: NodeStatus, listed: Sequence[Mapping[str, Any]]) -> NodeStatus:
        """Return the record with the last reading of the node's GPU agent; start the agent where none runs.

        Raises:
            NodeUnreachable: the daemon no longer answers.
        """
        cache = self._cache_of(record.name)
        if cache.reading is None or _has_failed(cache.reading):
            # A failure for which no poll waited is outdated.
            agent = next((raw for raw in listed if _is_agent(raw)), None)
            cache.reading = asyncio.ensure_future(self._last_line(record.name, agent))
        done, _ = await asyncio.wait({cache.reading}, timeout=PROBE_TIMEOUT_S)
        if not done:
            # The creation of a container may take long; the last reading stays in the meantime.
            return record
        reading, cache.reading = cache.reading, None
        try:
            began, line = reading.result()
        except NodeUnreachable:
            raise
        except GpuhubError as error:
            return agent_container.record_agent_failure(record, str(error))
        parsed = agent_container.parse_agent_line(line)
        return record if parsed is None else agent_container.record_agent_reading(record, parsed, began)

    def find_agents(self, listed: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the ids of the listed containers that are GPU agents."""
        return [str(raw["Id"]) for raw in listed if _is_agent(raw)]

    async def _inspect(self, node: str, container: str) -> frozenset[str]:
        try:
            return parse_devices(await self._daemons.call(node, "inspect_container", container))
        except NotFound:
            return frozenset()

    async def _last_line(self, node: str, listed: Mapping[str, Any] | None) -> tuple[float, bytes]:
        agent = await ensure_agent(self._daemons, node, listed)
        began = self._clock.monotonic()
        return began, await read_last_line(self._daemons, node, agent)

    async def _query(self, node: str, query: Callable[[Any], T]) -> T:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await self._daemons.run(node, query)
        except TimeoutError:
            raise NodeUnreachable(
                f"node {node}: its Docker daemon did not answer within {PROBE_TIMEOUT_S:.0f} s"
            ) from None

    def _cache_of(self, node: str) -> _NodeCache:
        return self._caches.setdefault(node, _NodeCache())


def parse_machine_size(info: Mapping[str, Any]) -> MachineSize | None:
    """Return CPU and memory of a machine from a daemon's `info`; None if the values are not possible.

    An administrator of a guest can have any number reported.
    """
    cpus, memory = info.get("NCPU"), info.get("MemTotal")
    if not (isinstance(cpus, int) and isinstance(memory, int)):
        return None
    if not (0 < cpus <= _MAX_CPUS and _MIB <= memory <= _MAX_MEMORY):
        return None
    return MachineSize(cpu_milli=cpus * 1000, memory_mib=memory // _MIB)


def _has_failed(task: asyncio.Task[tuple[float, bytes]]) -> bool:
    return task.done() and task.exception() is not None


def _is_agent(raw: Mapping[str, Any]) -> bool:
    return _kind(raw) == names.KIND_AGENT


def _kind(raw: Mapping[str, Any]) -> str:
    return str((raw.get("Labels") or {}).get(names.LABEL_KIND, ""))


@dataclass(slots=True)
class _FirewallCheck:
    """State of the checks of one node's firewall."""

    started_at: float | None = None
    task: asyncio.Task[int | None] | None = None


class FirewallChecker:
    """Checks the firewalls of all nodes, with at most one check of a node at a time."""

    def __init__(self, ensure: EnsureFirewall, clock: Clock) -> None:
        self._ensure = ensure
        self._clock = clock
        self._checks: dict[str, _FirewallCheck] = {}

    async def close(self) -> None:
        """Cancel running checks."""
        await cancel_tasks(check.task for check in self._checks.values() if check.task is not None)

    async def check(self, record: NodeStatus) -> NodeStatus:
        """Return the record with the error of the node's firewall, if any, and the packets that it has refused.

        Raises:
            NodeUnreachable: the daemon no longer answers.
        """
        check = self._checks.setdefault(record.name, _FirewallCheck())
        if check.task is None:
            is_recent = (
                check.started_at is not None and self._clock.monotonic() - check.started_at < FIREWALL_CHECK_PERIOD_S
            )
            if is_recent and record.firewall_error is None:
                return record
            check.started_at = self._clock.monotonic()
            check.task = asyncio.ensure_future(self._ensure_on(record.name))
        done, _ = await asyncio.wait({check.task}, timeout=FIREWALL_TIMEOUT_S)
        if not done:
            return record
        task, check.task = check.task, None
        try:
            rejected = task.result()
        except NodeUnreachable:
            check.started_at = None
            raise
        except GpuhubError as error:
            return record.evolve(firewall_error=str(error).removeprefix(f"node {record.name}: "))
        return record.evolve(firewall_error=None, firewall_rejected=rejected)

    async def _ensure_on(self, node: str) -> int | None:
        return await self._ensure(node)


def describe_firewall_change(before: NodeStatus, after: NodeStatus) -> list[tuple[str, str]]:
    """Return kind and text of the event when a node's firewall fails or is restored."""
    if after.firewall_error == before.firewall_error:
        return []
    if after.firewall_error is None:
        return [("node.guarded", "its firewall is in place again")]
    return [("node.unguarded", after.firewall_error)]


class ConditionReporter:
    """The last reported states of nodes and GPUs, so that each change is reported once."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeState] = {}
        self._gpus: dict[str, GpuState] = {}

    def report_changes(
        self,
        inventory: Inventory,
        name: str,
        *,
        lease_statuses: Mapping[str, GpuLeaseStatus],
        monotonic: float,
        scheduling: SchedulingSettings,
    ) -> list[tuple[str, str]]:
        """Return kind and text of each change on a node since the last call; a healthy start is not a change."""
        node_condition = gpu_health.assess_node(inventory, name, monotonic=monotonic, scheduling=scheduling)
        events: list[tuple[str, str]] = []
        if inventory.nodes[name].is_put_to_sleep:
            # The power controller reports it, and that the node answers again afterwards.
            self._nodes[name] = NodeState.UP
            return events
        if node_condition.state is not self._nodes.get(name, NodeState.UP):
            text = (
                "answers again"
                if node_condition.state is NodeState.UP
                else f"is {node_condition.state}: {node_condition.message}"
            )
            events.append((f"node.{node_condition.state}", f"node {name} {text}"))
        self._nodes[name] = node_condition.state
        if not inventory.nodes[name].is_up:
            return events
        for gpu in inventory.nodes[name].gpus:
            lease_status = lease_statuses.get(gpu.uuid, GpuLeaseStatus())
            condition = gpu_health.assess_gpu(
                inventory,
                name,
                gpu,
                is_held=lease_status.leased,
                lease_status=lease_status,
                monotonic=monotonic,
                scheduling=scheduling,
            )
            events += self._report_gpu_change(name, gpu, condition)
        return events

    def _report_gpu_change(
        self, node: str, gpu: GpuReading, condition: gpu_health.GpuCondition
    ) -> list[tuple[str, str]]:
        if condition.state is GpuState.UNAVAILABLE:
            return []
        before = self._gpus.get(gpu.uuid, GpuState.FREE)
        after = condition.state if condition.state in {GpuState.FAILED, GpuState.OUTSIDE} else GpuState.FREE
        self._gpus[gpu.uuid] = after
        if before is after:
            return []
        text = "can be used again" if after is GpuState.FREE else f"{condition.message}"
        kind = "gpu.healthy" if after is GpuState.FREE else f"gpu.{after}"
        return [(kind, f"GPU {gpu.index} ({gpu.model}) of {node}: {text}")]
