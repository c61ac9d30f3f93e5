"""Changes of nodes and GPUs as events, and as notifications of the machines' owner."""

from __future__ import annotations

import logging

from gpuhub.broker.controllers.nodes.machine_conditions import MachineConditions, list_conditions
from gpuhub.broker.controllers.nodes.node_probe import ConditionReporter
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.nodes import gpu_health

log = logging.getLogger(__name__)


class ConditionEvents:
    """Reports each change of a node's and its GPUs' conditions once."""

    def __init__(self, core: BrokerState) -> None:
        self._core = core
        self._conditions = ConditionReporter()
        self._machines = MachineConditions(core.store.outbox.find_open_subjects())

    def report(self, node: str, head_error: str | None = None) -> None:
        """Report what begins or ends with the last observation of a node.

        Args:
            head_error: Why the head node's disk keeps all nodes from taking work; None if it does not.
        """
        core, inventory = self._core, self._core.capacity.inventory
        news = self._conditions.report_changes(
            inventory,
            node,
            lease_statuses=core.capacity.lease_flags.by_uuid,
            monotonic=core.clock.monotonic(),
            scheduling=core.cluster.scheduling,
        )
        for kind, text in news:
            log.info("node %s: %s", node, text)
            core.add_event(kind, text, node=node)
        condition = gpu_health.assess_node(
            inventory, node, monotonic=core.clock.monotonic(), scheduling=core.cluster.scheduling
        )
        conditions = list_conditions(inventory.nodes[node], condition, head_error)
        for row in self._machines.update(conditions, core.clock.now()):
            core.add_event(f"notified.{row.kind}", row.title, node=node, notifications=[row])
