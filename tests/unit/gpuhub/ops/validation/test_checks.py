"""Each check fails for what it is there for, and says what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.broker_api.schemas import LeasedGpuView, WorkerState, WorkerView
from gpuhub.ops.validation import checks
from gpuhub.ops.validation.jobs import JobResult
from gpuhub.ops.validation.report import Check, Outcome
from tests.support.validation import UID, build_ddp_result, build_gpu_result, build_network_result

NODES = ["rig1", "rig2", "rig3"]


def build_outcome(result: dict[str, Any] | None, node: str = "rig1", error: str = "") -> JobResult:
    gpu = LeasedGpuView(uuid=f"GPU-{node}-0", node=node, index=0, model="RTX 5090", memory_mib=32607)
    worker = WorkerView(index=0, node=node, gpus=(gpu,), state=WorkerState.EXITED, exit_code=0, message=None)
    return JobResult(workers=(worker,), result=result, error=error)


def failing(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found if check.outcome is Outcome.FAIL}


@pytest.mark.parametrize(
    ("changes", "name", "seen"),
    [
        ({"uuids": ["GPU-rig1-1"]}, "rig1: visible GPUs", "GPU-rig1-1"),
        ({"uuids": ["GPU-rig1-0", "GPU-rig1-1"]}, "rig1: visible GPUs", "GPU-rig1-0, GPU-rig1-1"),
        ({"uuids": []}, "rig1: visible GPUs", "none"),
        ({"home_uid": 0}, "rig1: home", "20001 0 20001"),
        ({"file_uid": 65534}, "rig1: home", "65534"),
        ({"device": "CPU"}, "rig1: computes", "no CUDA device"),
        ({"deviation": 0.5}, "rig1: computes", "exact to 5e-01"),
    ],
)
def test_single_gpu(changes: dict[str, Any], name: str, seen: str) -> None:
    """Another GPU than the leased one, files of somebody else, no CUDA, and wrong products are failures."""
    found, figures = checks.check_single("rig1", build_outcome(build_gpu_result("rig1", "GPU-rig1-0", **changes)), UID)
    assert list(failing(found)) == [name]
    assert seen in failing(found)[name].seen
    assert failing(found)[name].expected
    assert failing(found)[name].advice
    assert [figure.value for figure in figures] == [200.0]


def test_simulated_gpu_computes_on_the_cpu() -> None:
    """On a simulated GPU the CPU is right, and the throughput says that it is the CPU's."""
    result = build_gpu_result("rig1", "GPU-rig1-0", is_simulated=True, device="CPU", alone_tflops=0.05)
    found, _ = checks.check_single("rig1", build_outcome(result), UID)
    assert failing(found) == {}
    assert "0.050 TFLOP/s of the CPU, since the GPU is simulated" in [check.seen for check in found]


def test_job_without_result_is_one_failure() -> None:
    found, figures = checks.check_single("rig1", build_outcome(None, error="it ended with exit code 1"), UID)
    assert failing(found)["rig1: job"].seen == "it ended with exit code 1"
    assert "gpuhub doctor rig1" in failing(found)["rig1: job"].advice
    assert figures == []


def build_all(**changes: Any) -> list[JobResult]:
    return [build_outcome(build_gpu_result(node, f"GPU-{node}-0", **changes), node) for node in NODES]


def test_jobs_at_once_reach_the_goal() -> None:
    found, [ratio] = checks.check_together(build_all(), UID)
    assert failing(found) == {}
    assert (ratio.name, ratio.value) == ("closet.jobs_at_once_over_one", pytest.approx(2.985))


def test_jobs_at_once_that_disturb_each_other_fail() -> None:
    found, _ = checks.check_together(build_all(together_tflops=196.5), UID)
    assert list(failing(found)) == ["all: jobs at once over one"]
    assert failing(found)["all: jobs at once over one"].expected == "at least 2.95"


def test_simulated_gpus_have_no_goal() -> None:
    found, _ = checks.check_together(build_all(is_simulated=True, device="CPU", together_tflops=70.0), UID)
    assert failing(found) == {}
    assert found[-1].outcome is Outcome.INFO


def test_gpu_in_two_jobs_fails() -> None:
    found, _ = checks.check_together(build_all(uuids=["GPU-rig1-0"]), UID)
    assert "in several jobs: GPU-rig1-0" in failing(found)["all: distinct GPUs"].seen


def test_missing_result_gives_no_ratio() -> None:
    outcomes = [*build_all()[:2], build_outcome(None, "rig3", error="it was ended")]
    found, figures = checks.check_together(outcomes, UID)
    assert list(failing(found)) == ["rig3 GPU 0: job"]
    assert figures == []


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"lost": 3}, "3 small packets were lost"),
        ({"lost": 50, "round_trip_ms": None}, "no answer"),
        ({"full_packets_lost": 5, "mtu": 1400}, "5 packets of 1450 bytes were lost"),
    ],
)
def test_lossy_paths_fail(changes: dict[str, Any], seen: str) -> None:
    found, _ = checks.check_network(build_outcome(build_network_result(NODES, **changes)), NODES)
    assert len(failing(found)) == 6
    assert seen in failing(found)["rig1 to rig2"].seen


def test_network_names_addresses_and_routes() -> None:
    found, figures = checks.check_network(build_outcome(build_network_result(NODES, gateway="10.1.0.9")), NODES)
    seen = {check.name: check.seen for check in found}
    assert seen["rig2: address"] == "host-rig2, 10.1.0.2 on eth1, MTU 1450"
    assert seen["rig2 to rig1"] == "0.2 ms, 2.30 Gbit/s, MTU 1450, via 10.1.0.9"
    assert len(figures) == 12


def test_missing_node_of_a_launch_fails() -> None:
    found, _ = checks.check_network(build_outcome(build_network_result(NODES[:2])), NODES)
    assert list(failing(found)) == ["all: nodes of the launch"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"sums": [6.0, 5.0]}, "ddp: all-reduce"),
        ({"from_ranks": 1e-3}, "ddp: gradients of all ranks"),
        ({"from_single": 1e-2}, "ddp: gradients of one process"),
        ({"node": "rig1"}, "ddp: ranks"),
    ],
)
def test_wrong_collectives_fail(changes: dict[str, Any], name: str) -> None:
    found, _ = checks.check_collectives(build_outcome(build_ddp_result(NODES, **changes)), 3)
    assert list(failing(found)) == [name]


def test_right_collectives_pass() -> None:
    found, _ = checks.check_collectives(build_outcome(build_ddp_result(NODES)), 3)
    assert (failing(found), len(found)) == ({}, 7)


def test_second_machine_pays_from_a_certain_step_on() -> None:
    """Two take 180 ms longer for a step of 40 ms; with a step of 220 ms they would give 2 × 220 / 400 = 1.1 × as much."""
    found, figures = checks.check_collectives(build_outcome(build_ddp_result(NODES)), 3)
    seen = {check.name: check.seen for check in found}
    assert seen["ddp: 2 machines"].startswith(
        "0.36 × the samples of rig1 alone: a step with 67 MB of gradients takes 220 ms"
    )
    assert seen["ddp: 3 machines"].startswith("0.52 × the samples of rig1 alone")
    assert "computes for longer than 220 ms: two train 1.1 × as many samples" in seen["ddp: a second machine"]
    assert [(figure.name, round(figure.value, 2)) for figure in figures] == [
        ("ddp.2_over_one", 0.36),
        ("ddp.3_over_one", 0.52),
    ]


def test_one_node_has_no_second_machine() -> None:
    found, figures = checks.check_collectives(build_outcome(build_ddp_result(NODES[:1])), 1)
    assert (found[-1].outcome, found[-1].seen) == (Outcome.INFO, "one node only, so there is nothing to compare")
    assert figures == []
