"""Checks of the room that the nodes stand in: its electrical circuits, and its heat."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from gpuhub.config.settings import CircuitSettings, ClusterSettings, NodeSettings
from gpuhub.ops.doctor.findings import Finding, failed, ok, warning
from gpuhub.ops.doctor.node_facts import GpuReport

#: A ton of refrigeration, watts: the usual measure of air conditioners in some countries.
TON_W = 3517.0
_UNKNOWN_AGENTS = "`sudo make up` starts the GPU agents, which read the limits"
_UNKNOWN_ADVICE = f"{_UNKNOWN_AGENTS}; add GPUs that report none to their node's base_watts"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePower:
    """The most power that a node may draw."""

    node: str
    #: Sum of the power limits of its GPUs that are known, watts.
    gpus_w: float
    gpu_count: int
    #: The machine without its GPUs, watts.
    base_w: float
    #: Whether the power limit of every GPU is known.
    is_known: bool


def find_node_power(node: NodeSettings, report: GpuReport | None) -> NodePower:
    """Return the most power that a node may draw.

    Args:
        report: What its GPU agent says; None where the node has none.
    """
    limits = {} if report is None else report.power_limits
    known = [limit for limit in limits.values() if limit is not None]
    return NodePower(
        node=node.name,
        gpus_w=sum(known),
        gpu_count=len(known),
        base_w=node.base_watts,
        is_known=report is not None and not report.error and len(known) == len(limits),
    )


def check_room(cluster: ClusterSettings, reports: Mapping[str, GpuReport]) -> Iterator[Finding]:
    """Check each circuit, and describe the heat of all nodes together."""
    powers = {node.name: find_node_power(node, reports.get(node.name)) for node in cluster.nodes}
    for circuit in cluster.circuits:
        is_kept = circuit in cluster.enforced_circuits
        yield check_circuit(circuit, [powers[name] for name in circuit.nodes], is_kept=is_kept)
        if circuit.enforce and not is_kept:
            yield warning(
                "circuit",
                f"{circuit.name}: enforce has no effect with engine = {cluster.engine!r}, which grants GPUs itself and "
                "does not count watts",
                "limit the power of its GPUs, or use fewer nodes",
            )
    yield describe_heat(powers.values())


def check_circuit(circuit: CircuitSettings, powers: Collection[NodePower], *, is_kept: bool = False) -> Finding:
    """Compare the most power that the nodes of a circuit may draw with what it may supply for hours.

    Args:
        circuit: The circuit.
        powers: The power of its nodes.
        is_kept: The scheduler never grants more of the GPUs at once than the circuit may supply.
    """
    gpus, machines = sum(power.gpus_w for power in powers), sum(power.base_w for power in powers)
    gpu_watts = circuit.find_gpu_watts(power.base_w for power in powers)
    excess = gpus - gpu_watts
    needed = f"its nodes may draw {gpus + machines:,.0f} W (GPUs {gpus:,.0f} W, machines {machines:,.0f} W)"
    supplied = f"{circuit.amps:g} A at {circuit.volts:g} V may supply {circuit.continuous_w:,.0f} W for hours"
    unknown = _describe_unknown(powers)
    if is_kept:
        budget = f"enforced: its GPUs in use are kept within {gpu_watts:,.0f} W"
        advice = "GPUs without a known power limit are not granted on this circuit; " + _UNKNOWN_AGENTS
        value = f"{circuit.name}: {needed}; {supplied}; {budget}{unknown}"
        return warning("circuit", value, advice) if unknown else ok("circuit", value)
    if excess <= 0:
        value = f"{circuit.name}: {needed}; {supplied}{unknown}"
        return warning("circuit", value, _UNKNOWN_ADVICE) if unknown else ok("circuit", value)
    value = f"{circuit.name}: {needed}, {excess:,.0f} W too much; {supplied}"
    advice = _advise(excess, sum(power.gpu_count for power in powers))
    if gpus + machines > circuit.rated_w:
        return failed("circuit", f"{value}, and {circuit.rated_w:,.0f} W at most{unknown}", advice)
    return warning("circuit", f"{value}{unknown}", advice)


def _advise(excess_w: float, gpu_count: int) -> str:
    limit = "limit the power of its GPUs (`nvidia-smi -pl WATTS`, again after each boot"
    each = f": {ceil(excess_w / gpu_count)} W less for each of the {gpu_count})" if gpu_count else ")"
    return f"{limit}{each}, connect a node to another circuit, or use fewer nodes"


def describe_heat(powers: Collection[NodePower]) -> Finding:
    """Describe the heat of the nodes, which is all the power that they draw."""
    total = sum(power.gpus_w + power.base_w for power in powers)
    return ok(
        "heat",
        f"the nodes may give off {total / 1000:.2f} kW, which takes {total / TON_W:.2f} tons of refrigeration"
        f"{_describe_unknown(powers)}",
    )


def _describe_unknown(powers: Collection[NodePower]) -> str:
    unknown = [power.node for power in powers if not power.is_known]
    return f"; not counted: GPUs of {', '.join(unknown)} whose limits are not known" if unknown else ""
