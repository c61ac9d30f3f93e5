"""The benchmark on a cluster's trace: reading it, filling the cluster, and the queue in virtual time."""

from __future__ import annotations

import csv
import io
import random
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common.gpu import GpuSpec
from gpuhub.scheduler.demand import WHOLE, NodeDemand
from gpuhub.scheduler.placement import FreeCapacity, PlacementChoice, make_least_waste
from tests.bench.openb import baselines, generated, inflate, placement, queueing, shapes, trace
from tests.bench.openb.schedulers import FifoQueue, Job
from tests.bench.openb.trace import Trace

NODES = """sn,cpu_milli,memory_mib,gpu,model
n0,64000,262144,2,P100
n1,96000,393216,8,G2
"""
PODS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
p0,12000,16384,1,1000,,LS,Running,30,100,40
p1,6000,12288,1,460,P100|V100M16,LS,Pending,10,25,
p2,8000,30517,0,0,,BE,Failed,20,21,20
p3,64000,262144,8,1000,,LS,Running,40,41,40
"""
P100 = GpuSpec(model="P100", memory_mib=0)
G2 = GpuSpec(model="G2", memory_mib=0)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def small_trace() -> Trace:
    """A part of the generated trace's cluster with all of its tasks."""
    nodes = list(generated.node_rows())
    return trace.parse("small", nodes[::4], list(generated.pod_rows()))


def test_parse_trace_by_its_columns() -> None:
    of = trace.parse("t", rows(NODES), rows(PODS))
    assert of.gpus == 10
    assert of.nodes[0] == FreeCapacity(cards=(P100, P100), free=(WHOLE, WHOLE), cpu_milli=64000, memory_mib=262144)
    assert [(task.created_at, task.runs_s) for task in of.tasks] == [(10, 15), (20, 1), (30, 60), (40, 1)]
    assert [task.demand for task in of.tasks] == [
        NodeDemand(gpus=1, cards=(P100,), milli=460, cpu_milli=6000, memory_mib=12288),
        NodeDemand(gpus=0, cpu_milli=8000, memory_mib=30517),
        NodeDemand(gpus=1, cpu_milli=12000, memory_mib=16384),
        NodeDemand(gpus=8, cpu_milli=64000, memory_mib=262144),
    ]


def test_trace_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_node_list_gpu_node.csv").write_text(NODES)
    (tmp_path / "my_pod_list_default.csv").write_text(PODS)
    monkeypatch.setenv("TRACE", str(tmp_path))
    assert trace.load() == trace.parse(str(tmp_path), rows(NODES), rows(PODS))


def test_other_lists_of_tasks_are_read_by_their_file(tmp_path: Path) -> None:
    """A folder may have several lists; those without the column `gpu_spec` accept every model."""
    (tmp_path / "my_node_list_gpu_node.csv").write_text(NODES)
    (tmp_path / "my_pod_list_default.csv").write_text(PODS)
    plain = [{name: value for name, value in row.items() if name != "gpu_spec"} for row in rows(PODS)]
    with (tmp_path / "my_pod_list_multigpu20.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(plain[0]))
        writer.writeheader()
        writer.writerows(plain)
    of = trace.read(tmp_path / "my_pod_list_multigpu20.csv")
    assert [task.demand.cards for task in of.tasks] == [None] * 4
    assert trace.read(tmp_path).tasks[0].demand.cards == (P100,)


def test_policy_that_knows_the_models_leaves_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a third of the tasks names two models, fewer GPUs stay unallocated than without the numbers of GPUs."""
    monkeypatch.setattr(shapes, "PART", 1)
    of = shapes.vary(small_trace(), "models")
    unallocated = {
        name: statistics.fmean(
            placement.fill_one(of, make_least_waste(trace.typical(of.tasks), supply), seed).unallocated_when_full
            for seed in range(3)
        )
        for name, supply in {"known": of.supply, "unknown": {}}.items()
    }
    assert unallocated["known"] < unallocated["unknown"]


def test_variations_keep_the_rest_of_the_trace() -> None:
    """Each is the same every time, on a part of the nodes, with as many tasks that arrive at the same times."""
    of = trace.parse("generated", generated.node_rows(), list(generated.pod_rows()))
    for shape in shapes.SHAPES:
        varied = shapes.vary(of, shape)
        assert varied == shapes.vary(of, shape)
        assert len(varied.nodes) == 8
        assert [task.created_at for task in varied.tasks] == [task.created_at for task in of.tasks]
        assert sum(one.demand != other.demand for one, other in zip(varied.tasks, of.tasks, strict=True)) > 300


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has 0 files named"):
        trace.read(tmp_path)


def test_typical_demands_are_the_frequent_ones() -> None:
    of = trace.parse("t", rows(NODES), rows(PODS) + rows(PODS)[:1] * 7)
    assert trace.typical(of.tasks, share=0.7) == ((of.tasks[2].demand, 8.0),)
    assert len(trace.typical(of.tasks, share=1.0)) == 4


def test_generated_trace_is_deterministic() -> None:
    pods = list(generated.pod_rows())
    assert pods == list(generated.pod_rows())
    of = trace.parse("generated", generated.node_rows(), pods)
    assert (len(of.nodes), len(of.tasks)) == (60, 1500)
    demands = [task.demand for task in of.tasks]
    assert {demand.gpus for demand in demands} == {0, 1, 2, 4, 8}
    assert any(demand.cards for demand in demands)
    assert sum(demand.milli < WHOLE for demand in demands) > len(demands) / 4
    assert all(task.runs_s >= 0 for task in of.tasks)


def test_tasks_are_drawn_up_to_the_requested_number_of_gpus() -> None:
    of = small_trace()
    drawn = inflate.draw(of, seed=3, ratio=1.0)
    sizes = [inflate.size(task.demand) for task in drawn]
    assert sum(sizes) - sizes[-1] < of.gpus * WHOLE <= sum(sizes)
    assert drawn == inflate.draw(of, seed=3, ratio=1.0) != inflate.draw(of, seed=4, ratio=1.0)


class CountingPolicy:
    """A policy that keeps what it was asked of the policy under it."""

    def __init__(self, under: baselines.FirstFit) -> None:
        self.under = under
        self.asked = 0

    def choose(self, node: FreeCapacity, demand: NodeDemand) -> PlacementChoice | None:
        self.asked += 1
        return self.under.choose(node, demand)


def test_only_changed_nodes_are_ranked_again() -> None:
    of = trace.parse("t", rows(NODES), rows(PODS))
    policy = CountingPolicy(baselines.FirstFit())
    cluster = inflate.Cluster(of.nodes, policy)
    assert [cluster.put(of.tasks[2].demand, None) for _ in range(3)] == [True] * 3
    assert policy.asked == len(of.nodes) + 2
    assert [node.load for node in cluster.nodes] == [2, 1]


@pytest.mark.parametrize("name", placement.MAKERS)
def test_filled_cluster_allocates_nothing_twice(name: str) -> None:
    of = small_trace()
    filled = placement.fill_one(of, placement.MAKERS[name](of), seed=0, ties_at_random=name == "random")
    for before, after in zip(of.nodes, filled.nodes, strict=True):
        assert all(0 <= free <= WHOLE for free in after.free)
        assert 0 <= after.cpu_milli <= before.cpu_milli
        assert 0 <= after.memory_mib <= before.memory_mib
    assert filled.unallocated == pytest.approx(sum(sum(node.free) for node in filled.nodes) / WHOLE)
    assert 0 < filled.unallocated <= filled.unallocated_when_full < of.gpus / 2


def test_place_and_release_restore_the_capacity() -> None:
    of = FreeCapacity(cards=(G2, G2), free=(300, WHOLE), cpu_milli=9000, memory_mib=50, load=1)
    demand, choice = NodeDemand(gpus=1, milli=300, cpu_milli=9000, memory_mib=20), PlacementChoice(rank=(), gpus=(0,))
    placed = inflate.place(of, demand, choice)
    assert placed == FreeCapacity(cards=(G2, G2), free=(0, WHOLE), cpu_milli=0, memory_mib=30, load=2)
    assert inflate.release(placed, demand, choice) == of


def fragmentation(workload: baselines.Workload, node: FreeCapacity) -> float:
    """The paper's definition, word by word: what is free and not usable by each typical task, on average."""
    total = sum(often for _, often in workload)
    mean = 0.0
    for demand, often in workload:
        fitting = [free for free in node.free if free >= demand.milli]
        hosts = demand.gpus > 0 and len(fitting) >= demand.gpus and node.cpu_milli >= demand.cpu_milli
        mean += often / total * (sum(node.free) - (sum(fitting) if hosts else 0))
    return mean


def test_fgd_follows_the_steepest_descent_of_its_paper() -> None:
    of = trace.parse("generated", generated.node_rows(), [row | {"gpu_spec": ""} for row in generated.pod_rows()])
    workload = trace.typical(of.tasks)
    fgd = baselines.FragmentationGradientDescent(workload)
    chance = random.Random(0)
    for _ in range(50):
        free = tuple(chance.choice((0, 190, 350, 530, WHOLE)) for _ in range(8))
        node = FreeCapacity(cards=(G2,) * 8, free=free, cpu_milli=chance.randrange(60000), memory_mib=500000)
        demand = NodeDemand(gpus=1, milli=320, cpu_milli=4000)
        choice = fgd.choose(node, demand)
        ways = {
            at: inflate.place(node, demand, PlacementChoice((), (at,))) for at in baselines.room(node, demand) or []
        }
        assert (choice is None) == (not ways)
        if choice is not None:
            changes = {at: fragmentation(workload, after) - fragmentation(workload, node) for at, after in ways.items()}
            # One percent of the sigmoid is at most some 41 thousandths at the changes that there can be.
            assert changes[choice.gpus[0]] <= min(changes.values()) + 60


def test_our_policy_leaves_fewer_unallocated_gpus_than_fgd() -> None:
    of = small_trace()
    ours, fgd = (
        [placement.fill_one(of, placement.MAKERS[name](of), seed).unallocated_when_full for seed in range(3)]
        for name in ("ours", "fgd")
    )
    assert sum(ours) < sum(fgd)


# -- the queue ----------------------------------------------------------------------------------------------------


def job(id: str, arrives_at: float, runs_s: float, *, gpus: int = 1, owner: str = "ann") -> Job:
    return Job(
        id=id, owner=owner, demand=NodeDemand(gpus=gpus), arrives_at=arrives_at, runs_s=runs_s, limit_s=2 * runs_s
    )


def setting(*jobs: Job, gpus: int = 2, ends_at: float = 100) -> queueing.Setting:
    return queueing.Setting(nodes=(FreeCapacity(cards=(G2,) * gpus, free=(WHOLE,) * gpus),), jobs=jobs, ends_at=ends_at)


def starts(of: queueing.Setting, *, overtaking: bool) -> Mapping[str, float]:
    return queueing.run(of, FifoQueue(of.nodes, overtaking=overtaking)).starts


def test_strict_fifo_blocks_behind_the_first_and_overtaking_does_not() -> None:
    of = setting(job("a", 0, 50), job("wide", 10, 20, gpus=2), job("b", 20, 10))
    assert starts(of, overtaking=False) == {"a": 0, "wide": 50, "b": 70}
    assert starts(of, overtaking=True) == {"a": 0, "wide": 50, "b": 20}


def test_outcome_counts_gpu_time_while_jobs_wait() -> None:
    of = setting(job("a", 0, 50), job("wide", 10, 20, gpus=2), job("b", 20, 10))
    outcome = queueing.run(of, FifoQueue(of.nodes))
    assert outcome.makespan_s == 80
    assert outcome.there_while_waiting == 2 * 60
    assert outcome.used_while_waiting == 1 * 40 + 2 * 20


def test_no_schedule_delivers_more_than_the_bound() -> None:
    chance = random.Random(0)
    for _ in range(30):
        jobs = [job(str(n), chance.uniform(0, 90), chance.uniform(1, 60), gpus=chance.randint(1, 4)) for n in range(20)]
        of = setting(*sorted(jobs, key=lambda job: job.arrives_at), gpus=4)
        bound = queueing.most_delivered(of)
        for overtaking in (False, True):
            outcome = queueing.run(of, FifoQueue(of.nodes, overtaking=overtaking))
            assert sum(queueing.delivered(of, outcome).values()) <= bound + 1e-9
        assert bound <= 4 * of.ends_at


def test_bound_is_reached_without_contention() -> None:
    of = setting(job("a", 0, 100), job("b", 10, 300), job("c", 20, 50))
    assert queueing.most_delivered(of) == 100 + 90
    assert sum(queueing.delivered(of, queueing.run(of, FifoQueue(of.nodes))).values()) == 190


def test_max_min_fair_shares() -> None:
    assert queueing.max_min_fair_shares({"ann": 10, "bob": 100, "eve": 70}, 100) == {"ann": 10, "eve": 45, "bob": 45}
    assert queueing.max_min_fair_shares({"ann": 10, "bob": 20}, 100) == {"ann": 10, "bob": 20}


def test_jain_index_of_equal_and_unequal_shares() -> None:
    jobs = [job("a", 0, 200, owner="ann"), job("b", 0, 200, owner="bob")]
    both, one = setting(*jobs), setting(*jobs, gpus=1)
    assert queueing.jain_index(both, queueing.run(both, FifoQueue(both.nodes))) == pytest.approx(1)
    assert queueing.jain_index(one, queueing.run(one, FifoQueue(one.nodes))) == pytest.approx(0.5)


def test_gpu_share_is_rounded_up_to_equal_parts() -> None:
    parts = {
        milli: queueing.in_parts(NodeDemand(gpus=1, milli=milli)).milli for milli in (1000, 810, 500, 470, 320, 160)
    }
    assert parts == {1000: 1000, 810: 1000, 500: 500, 470: 500, 320: 333, 160: 166}


def test_the_cluster_is_shrunk_until_it_queues() -> None:
    of = queueing.shrink(trace.parse("generated", generated.node_rows(), generated.pod_rows()))
    assert 1.05 < of.load < 1.35
    assert len(of.nodes) < 60
    assert all(0 <= job.arrives_at <= of.ends_at and job.runs_s <= job.limit_s for job in of.jobs)
    assert len({job.owner for job in of.jobs}) > queueing.USERS / 2


@pytest.mark.parametrize("part", [placement, queueing])
def test_figures_of_the_generated_trace_have_names_of_their_own(
    part: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They cannot be taken for those of the published trace."""
    monkeypatch.delenv("TRACE", raising=False)
    monkeypatch.setattr(trace, "DEFAULT_FOLDER", tmp_path / "none")
    monkeypatch.setattr(part, "_measure", lambda *_: iter([("broker.figure", 1.0, "ratio")]))
    assert list(part.measure()) == [("broker.figure_generated", 1.0, "ratio")]
