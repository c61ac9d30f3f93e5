"""What the doctor says about circuits and heat."""

from __future__ import annotations

import pytest

from gpuhub.config.settings import CircuitSettings, NodeSettings
from gpuhub.ops.doctor.findings import Severity
from gpuhub.ops.doctor.node_facts import GpuReport
from gpuhub.ops.doctor.room.room_checks import NodePower, check_circuit, check_room, find_node_power
from tests.support.docker.simulated_nodes import build_cluster

CIRCUIT = CircuitSettings(name="left", volts=120, amps=15, nodes=("rig1", "rig2", "rig3"))


def power(node: str, *limits: float | None, base_w: float = 0.0, error: str = "") -> NodePower:
    settings = NodeSettings(name=node, address="10.0.0.1", base_watts=base_w)
    return find_node_power(settings, GpuReport(power_limits=dict(enumerate(limits)), error=error))


def test_cards_beyond_the_continuous_share_are_a_warning() -> None:
    """1,795 W of five cards on 15 A at 120 V are over by 355 W, which is 71 W for each card."""
    finding = check_circuit(CIRCUIT, [power("rig1", 575, 575), power("rig2", 250, 250), power("rig3", 145)])
    assert (finding.check, finding.severity) == ("circuit", Severity.WARNING)
    assert finding.value == (
        "left: its nodes may draw 1,795 W (GPUs 1,795 W, machines 0 W), 355 W too much; "
        "15 A at 120 V may supply 1,440 W for hours"
    )
    assert "`nvidia-smi -pl WATTS`, again after each boot: 71 W less for each of the 5)" in finding.advice
    assert "connect a node to another circuit, or use fewer nodes" in finding.advice


def test_cards_beyond_the_breakers_rating_are_a_failure() -> None:
    """With the machines around the cards, the breaker may open at once."""
    cards = [power("rig1", 575, 575, base_w=150), power("rig2", 250, 250, base_w=150), power("rig3", 145, base_w=150)]
    finding = check_circuit(CIRCUIT, cards)
    assert finding.severity is Severity.FAILED
    assert "may draw 2,245 W (GPUs 1,795 W, machines 450 W), 805 W too much" in finding.value
    assert finding.value.endswith("1,440 W for hours, and 1,800 W at most")


@pytest.mark.parametrize(
    ("limit", "severity"), [(1440, Severity.OK), (1441, Severity.WARNING), (1801, Severity.FAILED)]
)
def test_limits_of_a_circuit(limit: float, severity: Severity) -> None:
    assert check_circuit(CIRCUIT, [power("rig1", limit)]).severity is severity


@pytest.mark.parametrize(
    "unknown",
    [
        find_node_power(NodeSettings(name="rig2", address="10.0.0.2", base_watts=0), None),
        power("rig2", None),
        power("rig2", error="no GPU agent runs there"),
    ],
)
def test_unknown_limits_are_no_proof_that_a_circuit_suffices(unknown: NodePower) -> None:
    """What is known may be too much already; a node without GPUs is known."""
    finding = check_circuit(CIRCUIT, [power("rig1", 575), unknown])
    assert finding.severity is Severity.WARNING
    assert finding.value.endswith("not counted: GPUs of rig2 whose limits are not known")
    assert finding.advice
    over = check_circuit(CIRCUIT, [power("rig1", 1801), unknown])
    assert (over.severity, "not counted: GPUs of rig2" in over.value) == (Severity.FAILED, True)
    assert check_circuit(CIRCUIT, [power("rig1", 575), power("rig2")]).severity is Severity.OK


def test_enforced_circuit_may_have_more_gpus_than_it_supplies() -> None:
    """The scheduler keeps those in use within it, except GPUs that it knows no limit of."""
    powers = [power("rig1", 575, 575, base_w=150), power("rig2", 575, base_w=150), power("rig3", base_w=150)]
    finding = check_circuit(CIRCUIT, powers, is_kept=True)
    assert finding.severity is Severity.OK
    assert finding.value.endswith("1,440 W for hours; enforced: its GPUs in use are kept within 990 W")
    unknown = check_circuit(CIRCUIT, [*powers[:2], power("rig3", None, base_w=150)], is_kept=True)
    assert (unknown.severity, "not counted: GPUs of rig3" in unknown.value) == (Severity.WARNING, True)
    assert unknown.advice.startswith("GPUs without a known power limit are not granted on this circuit")


def test_slurm_does_not_keep_an_enforced_circuit() -> None:
    """In a sentence of its own, next to the usual comparison."""
    cluster = build_cluster()
    circuit = CIRCUIT.model_copy(update={"nodes": ("rig1",), "enforce": True})
    cluster = cluster.model_copy(update={"circuits": (circuit,)})
    reports = {"rig1": GpuReport(power_limits={0: 575.0})}
    assert "enforced" in next(iter(check_room(cluster, reports))).value
    usual, extra, _ = check_room(cluster.model_copy(update={"engine": "slurm"}), reports)
    assert "enforced" not in usual.value
    assert (extra.severity, extra.value) == (
        Severity.WARNING,
        "left: enforce has no effect with engine = 'slurm', which grants GPUs itself and does not count watts",
    )


def test_heat_of_all_nodes_is_described_once() -> None:
    """Also of those on no circuit: 1 ton of refrigeration is 3.517 kW."""
    cluster = build_cluster()
    nodes = [node.model_copy(update={"base_watts": 617.0}) for node in cluster.nodes]
    circuit = CIRCUIT.model_copy(update={"nodes": (nodes[0].name,)})
    cluster = cluster.model_copy(update={"nodes": tuple(nodes), "circuits": (circuit,)})
    reports = {node.name: GpuReport(power_limits={0: 555.333}) for node in nodes}
    on_circuit, heat = check_room(cluster, reports)
    assert on_circuit.value.startswith("left: its nodes may draw 1,172 W")
    assert (heat.check, heat.severity, len(nodes)) == ("heat", Severity.OK, 3)
    assert heat.value == "the nodes may give off 3.52 kW, which takes 1.00 tons of refrigeration"
    assert len(list(check_room(build_cluster(), reports))) == 1
