"""`[[circuits]]` in cluster.toml: the electrical circuits that the nodes are connected to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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

    @property
    def rated_w(self) -> float:
        """The power at which the breaker may open, watts."""
        return self.volts * self.amps

    @property
    def continuous_w(self) -> float:
        """The power that may be drawn for hours, watts."""
        return self.rated_w * self.continuous


def find_circuit_mistakes(circuits: Sequence[CircuitSettings], nodes: Sequence[str]) -> Iterator[str]:
    """Return one line for each node of a circuit that does not exist, or is on several circuits."""
    for circuit in circuits:
        for name in circuit.nodes:
            if name not in nodes:
                yield f"circuits: {circuit.name!r} names the node {name!r}; there are {', '.join(nodes)}"
    supplies = Counter(name for circuit in circuits for name in circuit.nodes)
    for name, count in supplies.items():
        if count > 1:
            named = [circuit.name for circuit in circuits for node in circuit.nodes if node == name]
            yield (
                f"circuits: node {name!r} is listed {count} times ({', '.join(map(repr, named))}): "
                "list each node once, on the circuit that supplies it"
            )
