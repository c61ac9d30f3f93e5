"""Nodes that Slurm puts to sleep and wakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.backends.slurm.node_power import parse_power
from gpuhub.config.machines.power import NodePowerSettings
from gpuhub.nodes.gpu_health import assess_node
from tests.support.slurm.scripted_backend import BrokerEnvironment, slurm_cluster


@pytest.mark.parametrize(
    ("state", "power"),
    [
        ("idle", "on"),
        ("mixed+drain", "on"),
        ("down*", "on"),
        ("idle+powered_down", "asleep"),
        ("idle+powering_down", "stopping"),
        ("idle+power_down", "stopping"),
        ("allocated+powering_up", "waking"),
        ("idle+cloud+powered_down+power_up", "waking"),
        ("mixed+powering_up*", "waking"),
    ],
)
def test_power_is_in_the_flags_of_the_state(state: str, power: str) -> None:
    """As `sinfo` and slurmrestd show them."""
    assert parse_power(state) == power


async def test_node_follows_slurm(tmp_path: Path) -> None:
    """What sleeps by Slurm is shown asleep and not down, and the time that it takes to wake is measured."""
    cluster = slurm_cluster()
    power = NodePowerSettings(on=("/opt/plug", "on"), off=("/opt/plug", "off"), idle="30m")
    nodes = tuple(node.model_copy(update={"power": power}) if node.name == "rig2" else node for node in cluster.nodes)
    site = BrokerEnvironment(tmp_path, cluster=cluster.model_copy(update={"nodes": nodes}))
    async with site.broker() as harness:
        states = []
        for flag in ("powering_down", "powered_down", "powering_up", ""):
            site.slurm.flags["rig2"] = site.slurm.flags["rig3"] = flag
            await harness.controller.step()
            core = harness.core
            condition = assess_node(
                core.capacity.inventory,
                "rig2",
                monotonic=core.clock.monotonic(),
                scheduling=core.cluster.scheduling,
            )
            states.append((condition.state, core.capacity.power["rig2"].state))
        assert states == [("asleep", "stopping"), ("asleep", "asleep"), ("waking", "waking"), ("up", "on")]
        assert len(core.capacity.power["rig2"].wake_times_s) == 1
        assert list(core.capacity.power) == ["rig2"]
