"""Launches on this machine that lose GPUs and get others: preempted, shrunk and grown."""

from __future__ import annotations

import re

from gpuhub.broker_api import schemas
from tests.support.launch.local_cluster import DEADLINE_S, Notebook, lines_until, until
from tests.support.launch.rank_scripts import ALL_REDUCE, CHECKPOINTED, count_ranks


def test_preempted_launch_queues_again_and_continues_from_its_checkpoint(either: Notebook) -> None:
    """Every node gets SIGTERM; the launch queues again in its old place and runs the same command again."""
    either.script("train.py", CHECKPOINTED)
    process = either.start(either.call("train.py", nnodes=2, scavenge=True))
    seen = lines_until(process, "] began at 0 of 2 preempted 0")
    (run,) = either.broker.groups
    assert either.broker.groups[run].request.scavenge
    either.broker.preempt(run)
    seen += lines_until(process, "waiting for 1 GPU on 1 node: position 1, expected to start")
    either.broker.held.add("rig2")
    either.broker.grant(run)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, "".join(seen) + out + err
    shown = "".join(seen)
    assert re.search(r"gpu_launch: preempted: others need the GPUs; \d\d s for a checkpoint\n", shown)
    (saved,) = re.findall(r"\[rank 0 · rig1\] saved (\d+)\n", shown)
    assert count_ranks(out, f"began at {saved} of 2 preempted 1") == 2
    assert count_ranks(out, f"finished at {int(saved) + 5}") == 2
    assert "preempted once · " in out
    assert "2 ranks on rig1 RTX 5090, rig3 RTX 5060\n" in out
    assert "mixed cards: 1 × RTX 5090, 1 × RTX 5060; the slowest sets the pace" in out
    assert either.broker.groups[run].state is schemas.JobState.ENDED
    until(lambda: not either.left(), "no process left")


def test_elastic_launch_continues_with_the_remaining_nodes(either: Notebook) -> None:
    """The launch continues from the checkpoint of all ranks, with other node ranks, without using a restart."""
    either.script("train.py", CHECKPOINTED)
    process = either.start(either.call("train.py", nnodes="1:5"), gpus=())
    seen = lines_until(process, "] began at 0 of 3 preempted 0")
    (run,) = either.broker.groups
    request = either.broker.groups[run].request
    assert (request.min_nnodes, request.nnodes) == (1, 3)
    either.broker.waiting = 1
    either.broker.shrink(run, 0)
    either.broker.held.add("rig1")
    seen += lines_until(process, " of 2 preempted 0")
    shown = "".join(seen)
    (first,) = re.findall(r"\] saved (\d+)\n", shown)
    assert "rig1 is released, others need the GPUs; continuing with 2 nodes\n" in shown
    assert f"] began at {first} of 2 preempted 0\n" in shown
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, shown + out + err
    assert len(either.broker.groups) == 1, "no GPU is requested while others wait"
    until(lambda: not either.left(), "no process left")


#: Runs until the number of ranks is its argument.
UNTIL = """
    import os, signal, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist

    terminated = []
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(1))
    dist.init_process_group("gloo")
    world, count = dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("began with", world, "restart", count, flush=True)
    while True:
        time.sleep(0.05)
        # All leave together: who decided alone would leave the others in a collective.
        stop = torch.tensor([float(bool(terminated) or (world == 2 and Path("end").exists()))])
        dist.all_reduce(stop)
        if stop.item():
            break
    dist.destroy_process_group()
"""


def test_elastic_launch_adds_a_node_that_returns(either: Notebook) -> None:
    """A second job joins the first and is released with it; no restart is used."""
    either.script("train.py", UNTIL)
    process = either.start(either.call("train.py", nnodes="1:2", max_restarts=1), gpus=())
    either.broker.held.add("rig3")
    seen = lines_until(process, "] began with 2 restart 0")
    (run,) = either.broker.groups
    either.broker.lose(run, 0)
    # torchrun itself starts a new group each time.
    count = 0 if either.is_cold else 1
    seen += lines_until(process, f"] began with 1 restart {count}")
    assert "rig1 is lost; continuing with 1 node\n" in "".join(seen)
    either.broker.held.discard("rig3")
    seen += lines_until(process, "takes part now; continuing with 2 nodes")
    seen += lines_until(process, f"] began with 2 restart {count}")
    assert "restart 1 of 1 · " in "".join(seen)
    joined = [gang for gang in either.broker.groups.values() if gang.request.joins == run]
    assert [(gang.request.nnodes, gang.request.first_worker) for gang in joined] == [(1, 2)]
    (either.home / "end").touch()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, "".join(seen) + out + err
    assert not [gang for gang in either.broker.groups.values() if gang.state is not schemas.JobState.ENDED]
    assert all(gang.renewed for gang in joined)
    until(lambda: not either.left(), "no process left")


def test_elastic_launch_with_its_own_gpu_does_not_wait(notebook: Notebook) -> None:
    """The launch begins on its own node and does not wait for GPUs that are in use."""
    notebook.broker.busy, notebook.broker.waiting = True, 1
    notebook.script("hello.py", ALL_REDUCE)
    code, out, err = notebook.run(notebook.call("hello.py", nnodes="1:3"))
    assert code == 0, out + err
    assert "sum 1.0 of 1" in out
    assert "1 of up to 3 nodes: rig1 RTX 5090" in out
    (gang,) = notebook.broker.groups.values()
    assert gang.state is schemas.JobState.ENDED
