"""The power controller: wakes sleeping nodes that the queue needs, and puts idle ones to sleep.

A node takes no work from the moment at which it is put to sleep, and is not asked to before the ledger and its Docker
daemon show that nothing runs there. After waking it is proven to be empty as after any other silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from gpuhub.broker.controllers.loop import run_step
from gpuhub.broker.files.couriers import CourierPool
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError
from gpuhub.common.tasks import cancel_tasks
from gpuhub.common.units import format_span
from gpuhub.config.machines.nodes import NodeSettings
from gpuhub.config.machines.power import PowerSettings
from gpuhub.docker.client import DockerClients
from gpuhub.domain.power_policy import choose_needed
from gpuhub.nodes import power_switch
from gpuhub.nodes.gpu_health import describe_outside_use
from gpuhub.nodes.power_status import PowerState, PowerStatus
from gpuhub.nodes.status import NodeStatus

log = logging.getLogger(__name__)

#: Interval of the checks, seconds.
CHECK_PERIOD_S = 2.0
#: Time after which a node that was put to sleep must have stopped answering, seconds.
STOP_TIMEOUT_S = 180.0
#: Interval of magic packets, which may get lost, while a node is being woken, seconds.
RESEND_PERIOD_S = 10.0
#: Pause before a node that refused to sleep is asked again, seconds.
REFUSED_PAUSE_S = 600.0
#: Pause before a node that had a container of no lease is asked to sleep again, seconds.
CONTAINER_PAUSE_S = 30.0
#: Kinds of containers that run on an idle node, and continue after it has slept.
_RESIDENT_KINDS = frozenset({names.KIND_AGENT, names.KIND_FIREWALL})

SwitchOn = Callable[[NodeSettings, PowerSettings], Awaitable[None]]
SwitchOff = Callable[[DockerClients, NodeSettings, PowerSettings], Awaitable[None]]


class PowerController:
    """Follows the power of all nodes that may sleep, until cancelled."""

    def __init__(
        self,
        *,
        core: BrokerState,
        daemons: DockerClients,
        couriers: CourierPool,
        is_transferring: Callable[[], bool],
        switch_on: SwitchOn = power_switch.switch_on,
        switch_off: SwitchOff = power_switch.switch_off,
    ) -> None:
        """`is_transferring` returns whether nodes pass a dataset on now."""
        self._core = core
        self._daemons = daemons
        self._couriers = couriers
        self._is_transferring = is_transferring
        self._switch_on = switch_on
        self._switch_off = switch_off
        #: When each node's state began, or was first seen in this run; monotonic.
        self._began: dict[str, tuple[PowerStatus, float]] = {}
        #: Nodes that this run of the broker has woken.
        self._woken: set[str] = set()
        self._idle_since: dict[str, float] = {}
        self._sleep_from: dict[str, float] = {}
        self._sent_at: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                await self.step()
                await asyncio.sleep(CHECK_PERIOD_S)
        finally:
            await cancel_tasks(self._tasks.values())

    async def step(self) -> None:
        """Follow every node once, then wake those that are needed."""
        for node in self._core.capacity.power:
            await run_step(f"power of node {node}", partial(self._follow, node))
        await run_step("sleeping nodes", self._wake_needed)

    # -- by hand --------------------------------------------------------------------------------------------------

    async def wake(self, node: str, by: str) -> None:
        """Wake a node now, also after a failure.

        Raises:
            Conflict: It is on, or on its way to sleep.
        """
        power = self._core.capacity.power[node]
        if power.state is PowerState.STOPPING:
            raise Conflict(f"node {node} is going to sleep: try again in a minute")
        if self._core.capacity.inventory.nodes[node].is_up:
            raise Conflict(f"node {node} is on")
        if power.state is not PowerState.WAKING:
            await self._begin_waking(node, f"by {by}")

    async def put_to_sleep(self, node: str, by: str) -> None:
        """Put a node to sleep that nothing uses; the queue may wake it again.

        Raises:
            Conflict: Something runs there, it does not answer, or it sleeps.
            GpuhubError: Its daemon does not say what runs there.
        """
        power, record = self._core.capacity.power[node], self._core.capacity.inventory.nodes[node]
        if not power.takes_work or node in self._tasks:
            raise Conflict(f"node {node} is {power.state}")
        if not record.is_up:
            raise Conflict(f"node {node} does not answer: {record.unreachable_reason}")
        await self._prepare_sleep(node)
        self._start(node, self._send_to_sleep(node, f"by {by}"))

    # -- one node -------------------------------------------------------------------------------------------------

    async def _follow(self, node: str) -> None:
        power, record = self._core.capacity.power[node], self._core.capacity.inventory.nodes[node]
        if node in self._tasks:
            return
        elapsed_s = self._measure(node, power)
        if power.state is PowerState.ON:
            self._consider_sleep(node, record)
        elif power.state is PowerState.STOPPING:
            await self._follow_stop(node, power, record, elapsed_s)
        elif record.is_up:
            await self._note_awake(node, power, elapsed_s)
        elif power.state is PowerState.WAKING:
            await self._follow_waking(node, power, elapsed_s)

    def _measure(self, node: str, power: PowerStatus) -> float:
        """Return the seconds in this state, counted from the broker's start at most."""
        now = self._core.clock.monotonic()
        known, began = self._began.get(node, (None, now))
        if known is None or (known.state, known.changed_at) != (power.state, power.changed_at):
            began = now
        self._began[node] = (power, began)
        return now - began

    def _consider_sleep(self, node: str, record: NodeStatus) -> None:
        now, idle_s = self._core.clock.monotonic(), self._settings(node).idle
        if not idle_s or not record.is_up or self.find_use(node) is not None:
            self._idle_since.pop(node, None)
            return
        since = self._idle_since.setdefault(node, now)
        if now - since >= idle_s and now >= self._sleep_from.get(node, 0.0):
            self._start(node, self._sleep_if_unused(node, f"after {format_span(idle_s)} without work"))

    async def _follow_stop(self, node: str, power: PowerStatus, record: NodeStatus, elapsed_s: float) -> None:
        if not record.is_up and record.down_since is not None:
            await self._core.set_power(power.begin(PowerState.ASLEEP, self._now()))
            self._add_event("power.asleep", f"node {node} is asleep", node)
        elif elapsed_s > STOP_TIMEOUT_S:
            await self._note_refusal(node, f"it still answers {format_span(STOP_TIMEOUT_S)} after it was put to sleep")

    async def _note_awake(self, node: str, power: PowerStatus, elapsed_s: float) -> None:
        was_woken = power.state is PowerState.WAKING and node in self._woken
        self._woken.discard(node)
        await self._core.set_power(power.record_awake(self._now(), elapsed_s if was_woken else None))
        self._idle_since.pop(node, None)
        how = f"{format_span(elapsed_s)} after it was woken" if was_woken else "without gpuhub"
        self._add_event("power.on", f"node {node} is awake, {how}", node)

    async def _follow_waking(self, node: str, power: PowerStatus, elapsed_s: float) -> None:
        settings = self._settings(node)
        if elapsed_s > settings.wake_timeout:
            await self._note_failure(
                node, f"did not come up within {format_span(settings.wake_timeout)} after it was woken"
            )
        elif (
            settings.on == "wake-on-lan"
            and self._core.clock.monotonic() - self._sent_at.get(node, 0.0) >= RESEND_PERIOD_S
        ):
            self._start(node, self._send(node))

    # -- going to sleep -------------------------------------------------------------------------------------------

    def find_use(self, node: str) -> str | None:
        """Return why a node must not sleep, as far as the broker knows without asking it; None if nothing uses it."""
        core = self._core
        record = core.capacity.inventory.nodes[node]
        leases = core.ledger.leases_on(node)
        if leases:
            return f"{len(leases)} lease{'s' * (len(leases) > 1)} of {', '.join(sorted({one.owner for one in leases}))}"
        if node in core.capacity.cordons:
            return "it is cordoned"
        if self._is_transferring():
            return "a dataset is being copied between nodes"
        if self._couriers.is_starting_on(node):
            return "files are being read or written there"
        return self._find_gpu_use(record)

    def _find_gpu_use(self, record: NodeStatus) -> str | None:
        core = self._core
        if record.gpu_error is not None or (record.gpus and not record.is_fresh(core.clock.monotonic())):
            return "its GPUs cannot be read, so others may use them"
        for gpu in record.gpus:
            flags = core.capacity.lease_flags.get_status(gpu.uuid)
            use = describe_outside_use(record, gpu, lease_status=flags, scheduling=core.cluster.scheduling)
            if use is not None:
                return f"GPU {gpu.index}: {use}"
        return None

    async def _sleep_if_unused(self, node: str, why: str) -> None:
        try:
            await self._prepare_sleep(node)
        except GpuhubError as error:
            log.info("node %s does not go to sleep yet: %s", node, error)
            self._sleep_from[node] = self._core.clock.monotonic() + CONTAINER_PAUSE_S
            return
        await self._send_to_sleep(node, why)

    async def _prepare_sleep(self, node: str) -> None:
        """Keep new work from a node, and check that there is none; otherwise let it take work again.

        Raises:
            Conflict: Something uses it.
            GpuhubError: Its daemon does not say.
        """
        core = self._core
        before = core.capacity.power[node]
        await core.set_power(before.begin(PowerState.STOPPING, self._now()))
        try:
            # A grant that the scheduler made before is in the ledger once a change that begins now has been written.
            await core.ledger.change(lambda _: None)
            await self._require_unused(node)
        except BaseException:
            await asyncio.shield(core.set_power(before))
            raise

    async def _require_unused(self, node: str) -> None:
        use = self.find_use(node) or await self._find_container(node)
        if use is not None:
            raise Conflict(f"node {node} is used: {use}")

    async def _find_container(self, node: str) -> str | None:
        label = f"{names.LABEL_INSTANCE}={self._daemons.instance}"
        for raw in await self._daemons.call(node, "containers", filters={"label": [label]}):
            kind = str((raw.get("Labels") or {}).get(names.LABEL_KIND, ""))
            if kind not in _RESIDENT_KINDS:
                return f"a container of gpuhub runs there ({kind or raw['Id'][:12]})"
        return None

    async def _send_to_sleep(self, node: str, why: str) -> None:
        self._add_event("power.stopping", f"node {node} is put to sleep {why}", node)
        try:
            await self._switch_off(self._daemons, self._core.cluster.node(node), self._settings(node))
        except GpuhubError as error:
            await self._note_refusal(node, str(error).removeprefix(f"node {node}: "))
        # Also a poll that was late counts from now on.
        self._began.pop(node, None)

    async def _note_refusal(self, node: str, error: str) -> None:
        power = self._core.capacity.power[node]
        self._idle_since.pop(node, None)
        self._sleep_from[node] = self._core.clock.monotonic() + REFUSED_PAUSE_S
        await self._core.set_power(power.record_refusal(error, self._now()))
        self._add_event("power.refused", f"node {node} was not put to sleep: {error}", node)

    # -- waking ---------------------------------------------------------------------------------------------------

    async def _wake_needed(self) -> None:
        core = self._core
        asleep = [node for node, power in core.capacity.power.items() if self._may_wake(node, power)]
        requested = [node for node in asleep if node in core.capacity.wake_requests]
        core.capacity.wake_requests.clear()
        for node in requested:
            await self._begin_waking(node, "for a user's files")
        asleep = [node for node in asleep if node not in requested]
        waiting = core.ledger.index.find("waiting")
        if not asleep or not waiting:
            return
        awake = {
            node: core.capacity.build_awake_capacity(node)
            for node, power in core.capacity.power.items()
            if node in asleep or power.state is PowerState.WAKING
        }
        waking = [capacity for node, capacity in awake.items() if node not in asleep]
        # Large nodes are rather left asleep.
        asleep.sort(
            key=lambda node: (-len(awake[node].slots), -sum(slot.card.memory_mib for slot in awake[node].slots))
        )
        needed = choose_needed(
            lambda chosen: core.scheduler.find_startable(
                [*waking, *(awake[node] for node in chosen)], core.clock.now()
            ),
            asleep,
        )
        for node in needed:
            await self._begin_waking(node, f"for {len(waiting)} waiting request{'s' * (len(waiting) > 1)}")

    def _may_wake(self, node: str, power: PowerStatus) -> bool:
        if node in self._tasks or node in self._core.capacity.cordons:
            return False
        if self._core.capacity.inventory.nodes[node].is_up:
            return False
        is_due = power.retry_at is not None and power.retry_at <= self._now()
        return power.state is PowerState.ASLEEP or (power.state is PowerState.FAILED and is_due)

    async def _begin_waking(self, node: str, why: str) -> None:
        power = self._core.capacity.power[node]
        await self._core.set_power(power.begin(PowerState.WAKING, self._now()))
        self._woken.add(node)
        self._measure(node, self._core.capacity.power[node])
        self._add_event("power.waking", f"node {node} is woken {why}", node)
        self._start(node, self._send(node))

    async def _send(self, node: str) -> None:
        self._sent_at[node] = self._core.clock.monotonic()
        try:
            await self._switch_on(self._core.cluster.node(node), self._settings(node))
        except GpuhubError as error:
            await self._note_failure(node, f"could not be woken: {str(error).removeprefix(f'node {node}: ')}")

    async def _note_failure(self, node: str, error: str) -> None:
        power = self._core.capacity.power[node]
        if power.state is not PowerState.WAKING:
            # It answered in the meantime.
            return
        self._woken.discard(node)
        await self._core.set_power(power.record_failure(error, self._now(), self._settings(node).retry_after))
        self._add_event("power.failed", f"node {node} {error}", node)

    # -- common ---------------------------------------------------------------------------------------------------

    def _settings(self, node: str) -> PowerSettings:
        settings = self._core.cluster.find_power(node)
        if settings is None:
            raise GpuhubError(f"node {node}: it has no power in cluster.toml")
        return settings

    def _now(self) -> float:
        return self._core.clock.now()

    def _add_event(self, kind: str, text: str, node: str) -> None:
        log.info("%s", text)
        self._core.add_event(kind, text, node=node)

    def _start(self, node: str, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background, one at a time for each node."""
        if node in self._tasks:
            work.close()
            return
        task = asyncio.ensure_future(run_step(f"power of node {node}", lambda: work))
        self._tasks[node] = task
        task.add_done_callback(lambda _: self._tasks.pop(node, None))
