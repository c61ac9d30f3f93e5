"""The checks of what the jobs reported, and their figures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpuhub.broker_api.schemas import LeasedGpuView
from gpuhub.ops.validation.jobs import JobResult
from gpuhub.ops.validation.report import Better, Check, Figure, build_check, failed, info, passed

#: Share of the throughputs alone that jobs at once must reach together, on real GPUs: three must be 2.95 times one.
LEAST_TOGETHER = 2.95 / 3
#: A second machine pays where two train this many times as many samples as one.
PAYS = 1.1
#: Largest deviation of a matrix product in 32 bits from the exact one, which TF32 keeps too.
_PRODUCT_TOLERANCE = 2e-3
#: Maximum difference between the gradients of ranks.
_RANKS_TOLERANCE = 1e-6
#: Maximum difference from the gradients of one process, which adds in another order.
_SINGLE_TOLERANCE = 1e-4
_TFLOPS, _GBIT = "TFLOP/s", "Gbit/s"

CheckedPart = tuple[list[Check], list[Figure]]


def check_error(subject: str, outcome: JobResult) -> Check:
    """Return the failed check of a job without a result."""
    node = outcome.workers[0].node if len(outcome.workers) == 1 else ""
    where = f"`gpuhub doctor {node}`".replace(" `", "`") if node else "`gpuhub doctor`"
    return failed(
        f"{subject}: job",
        outcome.error,
        expected="the job ends with exit code 0, and its result is in the home",
        advice=f"`gpuhub events`, {where}, and ~/.gpu_launch/jobs of the user",
    )


def find_gpu(outcome: JobResult) -> LeasedGpuView | None:
    """Return the one GPU of a job's lease; None where it got none."""
    gpus = [gpu for worker in outcome.workers for gpu in worker.gpus]
    return gpus[0] if len(gpus) == 1 else None


def _find_place(outcome: JobResult) -> tuple[str, int]:
    gpu = find_gpu(outcome)
    return (gpu.node, gpu.index) if gpu else ("", 0)


def check_single(subject: str, outcome: JobResult, uid: int) -> CheckedPart:
    """Check a job that had one GPU alone; `uid` is the user's on the head node."""
    if outcome.result is None:
        return [check_error(subject, outcome)], []
    result = outcome.result
    checks = [
        _check_visible(subject, outcome, result),
        _check_home(subject, result, uid),
        _check_product(subject, result),
        info(f"{subject}: throughput", _describe_throughput(result, result["alone_tflops"])),
    ]
    return checks, [_throughput(subject, result["alone_tflops"])]


def check_together(outcomes: Sequence[JobResult], uid: int) -> CheckedPart:
    """Check jobs that had all GPUs at the same time, one each."""
    checks: list[Check] = []
    for number, outcome in enumerate(sorted(outcomes, key=_find_place)):
        gpu = find_gpu(outcome)
        subject = f"{gpu.node} GPU {gpu.index}" if gpu else f"job {number + 1}"
        if outcome.result is None:
            checks.append(check_error(subject, outcome))
        else:
            checks += [_check_visible(subject, outcome, outcome.result), _check_home(subject, outcome.result, uid)]
            checks.append(_check_product(subject, outcome.result))
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    checks.append(_check_distinct(results))
    if len(results) < len(outcomes):
        return checks, []
    ratio = compute_together_ratio(results)
    return [*checks, _check_ratio(results, ratio)], [
        Figure(name="closet.jobs_at_once_over_one", value=ratio, unit="", better=Better.HIGHER)
    ]


def compute_together_ratio(results: Sequence[Mapping[str, Any]]) -> float:
    """Return the throughput of all jobs at once over the mean of each one alone: n for n jobs that do not disturb."""
    together = sum(result["together_tflops"] for result in results)
    return float(together / statistics.mean(result["alone_tflops"] for result in results))


def _check_visible(subject: str, outcome: JobResult, result: Mapping[str, Any]) -> Check:
    gpu = find_gpu(outcome)
    leased = [] if gpu is None else [gpu.uuid]
    return build_check(
        f"{subject}: visible GPUs",
        holds=bool(leased) and result["uuids"] == leased,
        seen=", ".join(result["uuids"]) or "none",
        expected=f"{leased[0]} alone, which was leased" if leased else "the one GPU that was leased",
        advice="NVIDIA's container toolkit on the node: `gpuhub doctor`, and `nvidia-smi -L` in a notebook there",
    )


def _check_home(subject: str, result: Mapping[str, Any], uid: int) -> Check:
    uids = (result["uid"], result["home_uid"], result["file_uid"])
    return build_check(
        f"{subject}: home",
        holds=set(uids) == {uid},
        seen="writable, UIDs of process, home and a new file: " + " ".join(map(str, uids)),
        expected=f"UID {uid} for all three",
        advice="[storage] in cluster.toml, and on a file server the mapping of users (all_squash, idmapd)",
    )


def _check_product(subject: str, result: Mapping[str, Any]) -> Check:
    has_device = result["device"] != "CPU" or result["is_simulated"]
    seen = f"{result['device']}: a matrix product is exact to {result['deviation']:.0e}"
    return build_check(
        f"{subject}: computes",
        holds=has_device and result["deviation"] <= _PRODUCT_TOLERANCE,
        seen=seen if has_device else "torch finds no CUDA device and computes on the CPU",
        expected=f"a CUDA device, and a deviation of {_PRODUCT_TOLERANCE:.0e} at most",
        advice="images.torch_build in cluster.toml and the node's driver, and the node's log for Xid errors",
    )


def _check_distinct(results: Sequence[Mapping[str, Any]]) -> Check:
    counts = Counter(uuid for result in results for uuid in result["uuids"])
    shared = sorted(uuid for uuid, count in counts.items() if count > 1)
    return build_check(
        "all: distinct GPUs",
        holds=not shared,
        seen=f"{len(counts)} GPUs in {len(results)} jobs"
        + (f"; in several jobs: {', '.join(shared)}" if shared else ""),
        expected="no GPU in two jobs",
        advice="stop using the cluster, and keep the output of `gpuhub lease list` and `gpuhub events`",
    )


def _check_ratio(results: Sequence[Mapping[str, Any]], ratio: float) -> Check:
    name, goal = "all: jobs at once over one", LEAST_TOGETHER * len(results)
    seen = f"{ratio:.2f} × the throughput of one job, with {len(results)} jobs"
    if any(result["is_simulated"] for result in results):
        return info(name, f"{seen}; simulated GPUs share the CPU, so there is no goal")
    return build_check(
        name,
        holds=ratio >= goal,
        seen=seen,
        expected=f"at least {goal:.2f}",
        advice="power and temperature of the GPUs at full load, and the CPUs that each profile and job gets",
    )


def _describe_throughput(result: Mapping[str, Any], value: float) -> str:
    if result["is_simulated"]:
        return f"{value:.3f} {_TFLOPS} of the CPU, since the GPU is simulated"
    return f"{value:.1f} {_TFLOPS} on {result['device']}"


def _throughput(subject: str, value: float) -> Figure:
    return Figure(name=f"{subject}.throughput", value=value, unit=_TFLOPS, better=Better.HIGHER)


def check_network(outcome: JobResult, nodes: Sequence[str]) -> CheckedPart:
    """Check the paths between all nodes of one launch."""
    if outcome.result is None:
        return [check_error("all nodes", outcome)], []
    seen = {node["node"]: node for node in sorted(outcome.result["nodes"], key=lambda node: str(node["node"]))}
    checks = [
        build_check(
            "all: nodes of the launch",
            holds=sorted(seen) == sorted(nodes),
            seen=", ".join(sorted(seen)),
            expected=", ".join(sorted(nodes)),
            advice="`gpuhub node list`",
        )
    ]
    for name, node in seen.items():
        text = f"{node['host']}, {node['address']} on {node['interface']}, MTU {node['mtu']}"
        checks.append(info(f"{name}: address", text))
    figures: list[Figure] = []
    for path in sorted(outcome.result["paths"], key=lambda path: (path["from"], path["to"])):
        checks.append(_check_path(path, seen[path["from"]]))
        figures += _measure_path(path)
    if not outcome.result["paths"]:
        checks.append(info("all: paths", "one node only, so there is no path to measure"))
    return checks, figures


def _check_path(path: Mapping[str, Any], source: Mapping[str, Any]) -> Check:
    subject = f"{path['from']} to {path['to']}"
    trip = path["round_trip_ms"]
    route = f"via {path['gateway']}" if path["gateway"] else "direct"
    seen = (
        f"{f'{trip:.2g} ms' if trip is not None else 'no answer'}, {path['gbit_per_s']:.2f} {_GBIT}, "
        f"MTU {path['mtu']}, {route}"
    )
    problems = []
    if path["lost"]:
        problems.append(f"{path['lost']} small packets were lost")
    if path["full_packets_lost"]:
        problems.append(f"{path['full_packets_lost']} packets of {source['mtu']} bytes were lost")
    if not problems:
        return passed(subject, seen)
    return failed(
        subject,
        f"{seen}; {', '.join(problems)}",
        expected="no packet is lost, also not with the full MTU",
        advice="network.mtu in cluster.toml, cables and switch, and `gpuhub doctor` for both nodes",
    )


def _measure_path(path: Mapping[str, Any]) -> list[Figure]:
    name = f"network.{path['from']}-{path['to']}"
    figures = [Figure(name=f"{name}.bandwidth", value=path["gbit_per_s"], unit=_GBIT, better=Better.HIGHER)]
    if path["round_trip_ms"] is not None:
        trip = Figure(name=f"{name}.round_trip", value=path["round_trip_ms"], unit="ms", better=Better.LOWER)
        figures.append(trip)
    return figures


def check_collectives(outcome: JobResult, nnodes: int) -> CheckedPart:
    """Check all-reduce and gradients of a launch with one rank on each node, and say when a second machine pays."""
    if outcome.result is None:
        return [check_error("all nodes", outcome)], []
    ranks: Sequence[Mapping[str, Any]] = outcome.result["ranks"]
    expected = outcome.result["expected_sum"]
    sums = sorted({value for rank in ranks for value in rank["sums"]})
    places = sorted(rank["node"] for rank in ranks)
    between = max(rank["from_ranks"] for rank in ranks)
    single = max(rank["from_single"] for rank in ranks)
    scaling, figures = describe_scaling(outcome.result)
    advice = "the interface that NCCL and Gloo choose: NCCL_DEBUG=INFO in a launch, and docs/launch.md"
    return [
        build_check(
            "ddp: ranks",
            holds=len(places) == nnodes == len(set(places)),
            seen=f"{len(ranks)} ranks on {', '.join(places)}, {outcome.result['backend']}",
            expected=f"one rank on each of {nnodes} nodes",
            advice="`gpuhub node list`",
        ),
        build_check(
            "ddp: all-reduce",
            holds=sums == [expected],
            seen=f"sums {', '.join(f'{value:g}' for value in sums)} on all ranks",
            expected=f"{expected:g} everywhere",
            advice=advice,
        ),
        build_check(
            "ddp: gradients of all ranks",
            holds=between <= _RANKS_TOLERANCE,
            seen=f"deviation {between:.0e}" if between else "identical",
            expected=f"a deviation of {_RANKS_TOLERANCE:.0e} at most, relative to the largest gradient",
            advice=advice,
        ),
        build_check(
            "ddp: gradients of one process",
            holds=single <= _SINGLE_TOLERANCE,
            seen=f"deviation {single:.0e} from those of the whole batch in one process",
            expected=f"a deviation of {_SINGLE_TOLERANCE:.0e} at most, relative to the largest gradient",
            advice=advice,
        ),
        *scaling,
    ], figures


def describe_scaling(result: Mapping[str, Any]) -> CheckedPart:
    """Return what more machines give to the training that was measured, and from when on a second one pays."""
    one, *others = result["scaling"]
    if not others:
        return [info("ddp: a second machine", "one node only, so there is nothing to compare")], []
    megabytes, found, figures = result["gradient_bytes"] / 1e6, [], []
    for more in others:
        count = len(more["nodes"])
        gain = count * one["step_s"] / more["step_s"]
        seen = (
            f"{gain:.2f} × the samples of {one['nodes'][0]} alone: a step with {megabytes:.0f} MB of gradients takes "
            f"{_format_time(more['step_s'])}, and {_format_time(more['alone_s'])} on one machine"
        )
        found.append(info(f"ddp: {count} machines", seen))
        figures.append(Figure(name=f"ddp.{count}_over_one", value=gain, unit="", better=Better.HIGHER))
    exchange_s = max(0.0, others[0]["step_s"] - others[0]["alone_s"])
    # A step of c seconds alone that takes e more on two gives 2 c / (c + e) times the samples.
    least = _format_time(PAYS * exchange_s / (2 - PAYS))
    sentence = (
        f"pays where a step with such gradients computes for longer than {least}: two train {PAYS:g} × as many samples "
        "then. `%gpu_launch --predict` measures a script of your own"
    )
    return [*found, info("ddp: a second machine", sentence)], figures


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
