"""`[[circuits]]` in cluster.toml: the electrical circuits that the nodes are connected to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from gpuhub.config.base import Label, ListOf, NodeName, Number, SettingsTable


class CircuitSettings(SettingsTable):
    """An electrical circuit with a breaker of its own, and the nodes that it supplies."""

    #: Name of the circuit, such as the breaker's label; each circuit needs its own.
    name: Label
    #: Voltage, volts.
    volts: Annotated[Number, Field(gt=0, le=1000)]
    #: Rating of the circuit's breaker, amperes.
    amps: Annotated[Number, Field(gt=0, le=1000)]
    #: Names of the nodes that are connected to it.
    nodes: Annotated[ListOf[NodeName], Field(min_length=1)]
    #: Share of the rating that may be used for hours.
    continuous: Annotated[Number, Field(gt=0, le=1)] = 0.8
    #: Grant only as many of the nodes' GPUs at once as their power limits leave within this share; for
    #: `engine = "builtin"`.
    enforce: bool = False

    @property
    def rated_w(self) -> float:
        """The power at which the breaker may open, watts."""
        return self.volts * self.amps

    @property
    def continuous_w(self) -> float:
        """The power that may be drawn for hours, watts."""
        return self.rated_w * self.continuous

    def find_gpu_watts(self, base_watts: Iterable[float]) -> float:
        """Return the power that the machines leave to their GPUs for hours, watts; negative if they need more alone.

        Args:
            base_watts: What each of its nodes draws without its GPUs, watts.
        """
        return self.continuous_w - sum(base_watts)


def find_circuit_mistakes(circuits: Sequence[CircuitSettings], base_watts: Mapping[str, float]) -> Iterator[str]:
    """Return one line for each node of a circuit that does not exist, or is on several circuits, and for each enforced
    circuit that leaves GPUs nothing.

    Args:
        base_watts: What each node of the cluster draws without its GPUs, watts.
    """
    for circuit in circuits:
        for name in circuit.nodes:
            if name not in base_watts:
                yield f"circuits: {circuit.name!r} names the node {name!r}; there are {', '.join(base_watts)}"
        machines = [base_watts[name] for name in circuit.nodes if name in base_watts]
        if circuit.enforce and circuit.find_gpu_watts(machines) < 1:
            yield (
                f"circuits: {circuit.name!r}: enforce: its machines alone may draw {sum(machines):,.0f} W (base_watts) "
                f"of the {circuit.continuous_w:,.0f} W that it may supply for hours, so that no GPU could be granted: "
                "connect a node to another circuit, or correct base_watts"
            )
    supplies = Counter(name for circuit in circuits for name in circuit.nodes)
    for name, count in supplies.items():
        if count > 1:
            named = [circuit.name for circuit in circuits for node in circuit.nodes if node == name]
            yield (
                f"circuits: node {name!r} is listed {count} times ({', '.join(map(repr, named))}): "
                "list each node once, on the circuit that supplies it"
            )
