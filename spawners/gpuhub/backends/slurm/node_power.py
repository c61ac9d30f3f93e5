"""Whether Slurm has put nodes to sleep, from the flags of their states."""

from __future__ import annotations

from collections.abc import Mapping

from gpuhub.nodes.power_status import PowerState
from gpuhub.slurm_client.models import SlurmSnapshot

#: Flags in the order in which they count: Slurm may show several of them.
_FLAGS = {
    "powering_up": PowerState.WAKING,
    "power_up": PowerState.WAKING,
    "powering_down": PowerState.STOPPING,
    "power_down": PowerState.STOPPING,
    "powered_down": PowerState.ASLEEP,
}


def find_power(snapshot: SlurmSnapshot, node_names: Mapping[str, str]) -> dict[str, PowerState]:
    """Return the power of gpuhub's nodes; `node_names` has their names by Slurm's."""
    return {node_names[node.name]: parse_power(node.state) for node in snapshot.nodes if node.name in node_names}


def parse_power(state: str) -> PowerState:
    """Return the power in a state such as `idle+powered_down`."""
    flags = state.rstrip("*").split("+")
    return next((power for flag, power in _FLAGS.items() if flag in flags), PowerState.ON)
