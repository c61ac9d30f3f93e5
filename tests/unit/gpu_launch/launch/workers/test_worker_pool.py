"""Which launches an idle worker pool is for, and more workers for one that lacks some."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from gpu_launch import environment
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.common import run_folder
from gpu_launch.common.launch_spec import Membership, StartMethod
from gpu_launch.errors import UsageError
from gpu_launch.launch.plan import LaunchPlan
from gpu_launch.launch.request import LaunchRequest, ValidatedRequest, choose_start_method
from gpu_launch.launch.workers.worker_group import BrokerWorkerGroup
from gpu_launch.launch.workers.worker_pool import WorkerPool, WorkerPools
from gpu_launch.options.launch_options import LaunchOptions

ENV = environment.read({"GPUHUB_NODE": "rig1", "HOME": "/home/ada"})
PLAN = LaunchPlan(
    nnodes=3, least_nnodes=3, nproc_per_node=1, includes_notebook=False, notebook_gpus=(), exclude_nodes=(), demand=GpuRequest()
)  # fmt: skip
ELASTIC = replace(PLAN, least_nnodes=1)


class GrantingBroker(BrokerClient):
    """A broker that grants what is free, at once."""

    def __init__(self, *free):
        super().__init__("http://nowhere", "token")
        self.free, self.waiting, self.requests = list(free), 0, []
        self.jobs_by_id, self.over = {}, threading.Event()
        #: How often a job with Slurm is asked for until it is granted; None: nothing is granted later.
        self.polls_until_granted: int | None = None

    def _request(self, method, path, *, body=None, **_):
        if path == "/cluster":
            nodes = [
                {"name": node, "gpus": [{"uuid": node, "node": node, "model": "RTX 5090", "state": "free"}]}
                for node in self.free
            ]
            return {
                "nodes": nodes,
                "waiting": self.waiting,
                "engine": "builtin" if self.polls_until_granted is None else "slurm",
            }
        if (method, path) == ("POST", "/jobs"):
            self.requests.append(body)
            nodes = [node for node in self.free if node not in body["exclude_nodes"]][: body["nnodes"]]
            self.free = [node for node in self.free if self.polls_until_granted or node not in nodes]
            job = {"id": f"j{len(self.requests)}", "run_id": body["run_id"], "version": 1, "renew_within_s": 60}
            job |= {"state": "running" if nodes else "waiting"}
            job |= {"workers": [{"index": index, "node": node, "state": "running"} for index, node in enumerate(nodes)]}
            if self.polls_until_granted:
                job["state"] = "waiting"
            return self.jobs_by_id.setdefault(job["id"], job)
        job = self.jobs_by_id[path.split("/")[2].partition("?")[0]]
        if method == "DELETE":
            job["state"] = "ended"
        elif self.polls_until_granted:
            self.polls_until_granted -= 1
            job["state"] = "waiting" if self.polls_until_granted or not job["workers"] else "running"
        elif "version=" in path and job["state"] != "ended":
            self.over.wait(20)
            return job | {"state": "ended"}
        return json.loads(json.dumps(job))


@pytest.fixture
def broker():
    """With three free nodes."""
    broker = GrantingBroker("rig1", "rig2", "rig3")
    yield broker
    broker.over.set()


@pytest.fixture
def run(tmp_path):
    """A folder."""
    folder = run_folder.RunFolder(root=tmp_path)
    folder.logs.mkdir()
    return folder


def start_group(plan, run, broker):
    """A gang that has asked."""
    group = BrokerWorkerGroup(plan, run, env=ENV, broker=broker)
    group.start(settings={})
    return group


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (PLAN, True),
        (replace(PLAN, nnodes=2, least_nnodes=2), True),
        (replace(PLAN, nnodes=4, least_nnodes=4), False),
        (replace(PLAN, nproc_per_node=2), False),
        (replace(PLAN, includes_notebook=True), False),
        (replace(PLAN, exclude_nodes=("rig1",)), False),
        (replace(PLAN, demand=GpuRequest(scavenge=True)), False),
        (ELASTIC, False),
    ],
    ids=["same", "less", "more", "more a node", "own part", "elsewhere", "other demands", "elastic"],
)
def test_pool_serves_launches_of_the_same_or_smaller_size(wanted, fits, run, broker):
    """Of nodes only: everything else is equal."""
    assert WorkerPool(start_group(PLAN, run, broker), address="127.0.0.1").matches(wanted) is fits


def test_complete_elastic_pool_serves_launches_of_the_same_range(run, broker):
    """Less would be all that a launch gets that could have more."""
    group = start_group(ELASTIC, run, broker)
    pool = WorkerPool(group, address="127.0.0.1")
    assert pool.matches(ELASTIC)
    assert not pool.matches(replace(ELASTIC, least_nnodes=2))
    group.drop_workers([1])
    assert not pool.matches(ELASTIC)


def test_pool_past_half_of_its_time_limit_is_not_reused(run, broker, monkeypatch):
    """Who asks for two hours has at least one."""
    limited = replace(PLAN, demand=GpuRequest(time_limit_s=7200))
    pool = WorkerPool(start_group(limited, run, broker), address="127.0.0.1")
    assert pool.matches(limited)
    now = pool.created_at + 3601
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert not pool.matches(limited)


def test_smaller_launch_uses_the_first_nodes_of_the_pool(run, broker):
    """In the order of the crew, with the own container first where it takes part."""
    pool = WorkerPool(start_group(PLAN, run, broker), address="127.0.0.1")
    assert pool.membership(replace(PLAN, nnodes=2)).nodes == ("rig1", "rig2")
    membership = Membership(includes_notebook=True, workers=(0, 1), nodes=("rig2", "rig3"), nproc_per_node=1)
    assert membership.limited_to(2).participants == (None, 0)
    assert membership.limited_to(1).participants == (None,)


def test_unknown_or_busy_pool_is_not_released(run, broker):
    """And is named."""
    pools = WorkerPools()
    with pytest.raises(UsageError, match="no workers called run-x"):
        pools.free_idle("run-x")
    assert pools.free_idle() == []


def test_worker_group_grows_by_free_nodes(run, broker):
    """New workers have numbers of their own; the second job says whom it joins, and is freed with the first."""
    broker.free = ["rig1"]
    group = start_group(ELASTIC, run, broker)
    assert group.membership().nodes == ("rig1",)
    broker.free = ["rig3"]
    assert group.scale_up()
    assert broker.requests[1] | {"run_id": ""} == {
        "run_id": "", "nnodes": 2, "min_nnodes": 1, "nproc_per_node": 1, "server": "", "exclude_nodes": ["rig1"],
        "joins": run.run_id, "first_worker": 3,
    }  # fmt: skip
    assert (group.membership().workers, group.membership().nodes) == ((0, 3), ("rig1", "rig3"))
    assert group.job_ids == ("j1", "j2")
    group.drop_workers([3])
    assert group.membership().workers == (0,)
    assert broker.jobs_by_id["j2"]["state"] == "ended"
    broker.free = ["rig2"]
    assert group.scale_up()
    assert broker.requests[2]["first_worker"] == 5
    group.stop()
    assert {job["state"] for job in broker.jobs_by_id.values()} == {"ended"}


def test_with_slurm_free_nodes_are_awaited_briefly(run, broker):
    """There every request goes through another queue first."""
    broker.free, broker.polls_until_granted = ["rig1"], 0
    group = start_group(ELASTIC, run, broker)
    broker.free, broker.polls_until_granted = ["rig3"], 3
    assert group.scale_up()
    assert group.membership().nodes == ("rig1", "rig3")


def test_with_slurm_launch_with_own_gpus_starts_with_free_nodes(run, broker, monkeypatch):
    """And alone where nothing is: nobody waits for more."""
    monkeypatch.setattr("gpu_launch.launch.workers.worker_group.start_local_worker", lambda _: None)
    own = replace(ELASTIC, includes_notebook=True, exclude_nodes=("rig1",))
    broker.free, broker.polls_until_granted = ["rig2"], 3
    group = start_group(own, run, broker)
    assert group.membership().nodes == ("rig2",)
    broker.free, broker.polls_until_granted = [], 3
    alone = start_group(own, run, broker)
    assert alone.is_notebook_only
    assert broker.polls_until_granted == 3
    assert [job["state"] for job in broker.jobs_by_id.values()] == ["running", "ended"]


@pytest.mark.parametrize("reason", ["others wait", "nothing is free", "it is whole"])
def test_worker_group_does_not_grow_when_growth_is_unwanted(run, broker, reason):
    """Nobody is kept waiting for what comes on top."""
    broker.free = ["rig1", "rig2", "rig3"] if "whole" in reason else ["rig1"]
    group = start_group(ELASTIC, run, broker)
    broker.waiting = int("wait" in reason)
    broker.free = [] if "nothing" in reason else ["rig2"]
    assert not group.scale_up()
    assert len(broker.requests) == 1


def test_ungranted_growth_request_is_withdrawn(run, broker):
    """It was free a moment ago."""
    broker.free = ["rig1"]
    group = start_group(ELASTIC, run, broker)
    broker.free = ["rig2"]
    taken = broker.get_cluster

    def cluster():
        seen = taken()
        broker.free = []
        return seen

    broker.get_cluster = cluster
    assert not group.scale_up()
    assert broker.jobs_by_id["j2"]["state"] == "ended"


@pytest.mark.parametrize(
    ("options", "is_task", "method", "reason"),
    [
        (LaunchOptions(), False, StartMethod.FORK, ""),
        (LaunchOptions(cold=True), False, StartMethod.TORCHRUN, ""),
        (LaunchOptions(no_python=True), False, StartMethod.TORCHRUN, ""),
        (
            LaunchOptions(torchrun_flags=("--role=trainer", "--numa-binding=node")),
            False,
            StartMethod.TORCHRUN,
            "--numa-binding is its own",
        ),
        (LaunchOptions(no_python=True), True, StartMethod.TASK, ""),
    ],
)
def test_ranks_are_forked_unless_torchrun_is_required(options, is_task, method, reason, tmp_path):
    """With the reason where nobody asked for it."""
    request = LaunchRequest(options=options, cell=None, cwd=tmp_path, env=ENV, environ={})
    assert choose_start_method(ValidatedRequest(request=request, plan=PLAN, script="a.py", is_task=is_task)) == (
        method,
        reason,
    )
