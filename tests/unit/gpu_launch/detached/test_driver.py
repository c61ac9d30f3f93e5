"""From an order and its containers to a launch, and from a notebook's options to an order."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpu_launch import environment
from gpu_launch.broker import models
from gpu_launch.common import job_manifest, run_folder
from gpu_launch.detached import submit
from gpu_launch.detached.driver import (
    Driver,
    StaticWorkerGroup,
    build_options,
    build_plan,
    find_exchange,
    parse_workers,
)
from gpu_launch.errors import UsageError
from gpu_launch.launch import membership
from gpu_launch.options import command
from gpu_launch.options.launch_options import LaunchOptions

ENV = environment.read({"HOME": "/home/ada", "GPUHUB_NODE": "rig1", "GPU_LAUNCH_PREEMPTIONS": "1"})


def format_worker_list(nodes: int) -> str:
    """GPU_LAUNCH_ROSTER, in no order."""
    gpu = {"uuid": "GPU-1", "node": "rig1", "model": "RTX 5090", "memory_mib": 32_607}
    workers = [{"index": at, "node": f"rig{at + 1}", "gpus": [gpu], "state": "running"} for at in range(nodes)]
    return json.dumps(workers[::-1])


def build_worker_group(tmp_path: Path, nodes: int, *given: str) -> StaticWorkerGroup:
    """The containers of a job with these words."""
    workers = parse_workers(format_worker_list(nodes))
    run = run_folder.RunFolder(root=tmp_path)
    chosen = build_options(job_manifest.JobManifest(name="x", words=(*given, "--", "train.py")), run, nodes)
    return StaticWorkerGroup(build_plan(chosen, workers), run, others=workers[1:], env=ENV)


def test_secrets_of_a_job_that_cannot_begin_are_removed(tmp_path):
    """Its manifest is complete, but its folder does not exist."""
    run = run_folder.RunFolder(root=tmp_path / "run")
    run.root.mkdir()
    order = job_manifest.JobManifest(
        name="x", words=("--", "x.py"), folder="gone", environ={"A": "a", "B": "b"}, secret_names=("B", "C")
    )
    run.manifest.write_text(job_manifest.dump_json(order))
    env = environment.read({"HOME": str(tmp_path), "GPU_LAUNCH_ROSTER": format_worker_list(1)})
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert Driver(run, env).run() == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "does not exist" in run.output.read_text()
    assert job_manifest.parse_manifest(run.manifest.read_text()) == replace(order, environ={"A": "a"})


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"index": 1, "node": "rig2", "state": "running"}]', "null"])
def test_invalid_worker_list_is_refused(text):
    """Also one without worker 0, who reads it."""
    with pytest.raises(UsageError, match="GPU_LAUNCH_ROSTER"):
        parse_workers(text)


def test_the_driver_is_node_0_and_the_others_follow(tmp_path):
    """It has the number of preemptions with which the workers were started, and waits for no worker."""
    given = build_worker_group(tmp_path, 3, "--nnodes=2:3")
    assert given.plan.is_elastic and given.is_started() and not given.is_notebook_only
    found = given.membership()
    assert (found.participants, found.nodes, found.preemptions) == ((None, 1, 2), ("rig2", "rig3"), 1)
    given.drop_workers([1])
    assert given.membership().participants == (None, 2)
    assert [worker.node for worker in given.workers()] == ["rig3"]


def test_granted_number_of_nodes_is_used(tmp_path):
    """`--nnodes 2:4` on two nodes has none to lose."""
    plan = build_worker_group(tmp_path, 2, "--nnodes=2:4").plan
    assert (plan.nnodes, plan.least_nnodes, plan.is_elastic) == (2, 2, False)


def test_sigterm_is_forwarded_to_ranks_without_restart(tmp_path):
    """Nothing is started again here, and the sender of SIGTERM sets the limit."""
    given = build_worker_group(tmp_path, 2)
    found = given.membership()
    assert membership.find_change(given.job, found, given.plan, workers=given.workers(), leaving=[]) is None
    # Another container of the job learns of it sooner.
    sooner = membership.find_change(given.job, found, given.plan, workers=given.workers(), leaving=[1])
    given.mark_leaving()
    told = membership.find_change(given.job, found, given.plan, workers=given.workers(), leaving=[])
    assert sooner == told == membership.MembershipChange(is_complete=True, is_final=True, leaving=frozenset({1}))
    assert membership.checkpoint_seconds(given.job, datetime.now(UTC)) > 3600
    assert "the job ends" in membership.describe_change(told, found, grace_s=None)


def test_elastic_job_releases_a_single_worker(tmp_path):
    """That one of its containers is told to end is no end."""
    given = build_worker_group(tmp_path, 3, "--nnodes=1:3")
    found = membership.find_change(given.job, given.membership(), given.plan, workers=given.workers(), leaving=[2])
    assert found == membership.MembershipChange(is_complete=False, leaving=frozenset({2}))


def test_task_runs_one_program_per_node(tmp_path):
    """Which reads its commands from the folder."""
    run = run_folder.RunFolder(root=tmp_path)
    chosen = build_options(job_manifest.JobManifest(name="x", task=job_manifest.TaskCommands(run="ls")), run, 4)
    assert (chosen.nnodes, chosen.nproc_per_node, chosen.no_python, chosen.detach) == (4, 1, True, True)
    assert chosen.arguments == ("-m", "gpu_launch.detached.task_main", str(tmp_path))


def test_driver_finds_files_of_the_notebook(tmp_path):
    """By the driver, wherever it runs."""
    run = run_folder.RunFolder(root=tmp_path)
    assert find_exchange(run) is None
    run.exchange.mkdir()
    (run.exchange / "send.pkl").write_bytes(b"x")
    found = find_exchange(run)
    assert found is not None and found.files == {"send.pkl": b"x"}


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 2:3 --nproc-per-node 4 --max-restarts 2 train.py --nnodes 9 -- x",
        "--tee 3 --redirects 0:3,1:1 --local-ranks-filter 0,2 --log-dir '~/my logs' train.py 'a b'",
        "-m --cold --role=trainer --virtual-local-rank --monitor-interval=0.5 package.module",
        "--no-python ./program -v",
        "--preload numpy,torch.nn train.py",
        "train.py",
    ],
)
def test_formatted_options_parse_to_the_same_options(line):
    """What they parse to is what was asked for."""
    wanted = command.parse(line)
    assert command.parse_words(list(command.format_words(wanted))) == wanted


def test_formatted_options_of_a_cell_have_no_script():
    """Its arguments follow."""
    wanted = command.parse("--nnodes 2 -- --lr 1", cell=True)
    assert command.parse_words(list(command.format_words(wanted)), cell=True) == wanted


def test_gpu_constraints_are_not_passed_to_the_driver():
    """The driver has what was granted."""
    wanted = command.parse("--model RTX --memory 24G --scavenge --time-limit 2h train.py")
    assert command.parse_words(list(command.format_words(wanted))) == replace(wanted, demand=LaunchOptions().demand)


def test_folders_are_relative_to_the_home(tmp_path):
    """Also when the home is reached by a link; what all nodes have stays as it is."""
    home = tmp_path / "disk" / "ada"
    (home / "work").mkdir(parents=True)
    link = tmp_path / "home"
    link.symlink_to(home)
    assert submit.below_home(link / "work", link) == "work"
    assert submit.below_home(home / "work", link) == "work"
    assert submit.below_home(link, link) == ""
    assert submit.below_home(Path("/datasets/x"), link) == "/datasets/x"


def test_worker_states_use_the_brokers_names():
    """The list has the broker's own names."""
    assert parse_workers(format_worker_list(1))[0].state == models.RUNNING
