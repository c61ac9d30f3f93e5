"""Whole launches on this machine that lose GPUs and get others: preempted, shrunk, and grown back."""

from __future__ import annotations

import re

from gpuhub.broker import schemas
from tests.support.folded import times
from tests.support.local_cluster import DEADLINE_S, Notebook, lines_until, until
from tests.support.rank_scripts import ALL_REDUCE, CHECKPOINTED


def test_a_preempted_launch_writes_a_checkpoint_waits_again_and_goes_on_from_it(either: Notebook) -> None:
    """SIGTERM on every node, the notebook's own included; the place in the queue; the same command anew."""
    either.script("train.py", CHECKPOINTED)
    process = either.start(either.call("train.py", nnodes=2, scavenge=True))
    seen = lines_until(process, "] began at 0 of 2 preempted 0")
    (run,) = either.broker.gangs
    assert either.broker.gangs[run].request.scavenge
    either.broker.preempt(run)
    seen += lines_until(process, "waiting for 1 GPU on 1 node: position 1, expected to start")
    either.broker.held.add("rig2")
    either.broker.grant(run)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, "".join(seen) + out + err
    shown = "".join(seen)
    assert re.search(r"gpu_launch: preempted: others need the GPUs; \d\d s for a checkpoint\n", shown)
    (saved,) = re.findall(r"\[rank 0 · rig1\] saved (\d+)\n", shown)
    assert times(out, f"began at {saved} of 2 preempted 1") == 2
    assert times(out, f"finished at {int(saved) + 5}") == 2
    assert "preempted once · " in out
    assert "2 ranks on rig1 RTX 5090, rig3 RTX 5060\n" in out
    assert "mixed cards: 1 × RTX 5090, 1 × RTX 5060; the slowest sets the pace" in out
    assert either.broker.gangs[run].state is schemas.JobState.ENDED
    until(lambda: not either.left(), "no process left")


def test_an_elastic_launch_goes_on_with_what_is_left(either: Notebook) -> None:
    """From the checkpoint that all ranks were told to write, on other node ranks, without using up a restart."""
    either.script("train.py", CHECKPOINTED)
    process = either.start(either.call("train.py", nnodes="1:5"), gpus=())
    seen = lines_until(process, "] began at 0 of 3 preempted 0")
    (run,) = either.broker.gangs
    request = either.broker.gangs[run].request
    assert (request.min_nnodes, request.nnodes) == (1, 3)
    either.broker.waiting = 1
    either.broker.shed(run, 0)
    either.broker.held.add("rig1")
    seen += lines_until(process, " of 2 preempted 0")
    shown = "".join(seen)
    (first,) = re.findall(r"\] saved (\d+)\n", shown)
    assert "rig1 is given back, others need the GPUs; going on with 2 nodes\n" in shown
    assert f"] began at {first} of 2 preempted 0\n" in shown
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, shown + out + err
    assert len(either.broker.gangs) == 1, "nothing more is asked for while others wait"
    until(lambda: not either.left(), "no process left")


#: Runs until there are as many ranks as its argument says.
UNTIL = """
    import os, signal, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist

    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    dist.init_process_group("gloo")
    world, count = dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("began with", world, "restart", count, flush=True)
    while True:
        time.sleep(0.05)
        # All leave together: who decided alone would leave the others in a collective.
        stop = torch.tensor([float(bool(told) or (world == 2 and Path("end").exists()))])
        dist.all_reduce(stop)
        if stop.item():
            break
    dist.destroy_process_group()
"""


def test_an_elastic_launch_takes_a_node_that_comes_back(either: Notebook) -> None:
    """A second job joins the first; its GPUs are freed with the others at the end; no restart is used."""
    either.script("train.py", UNTIL)
    process = either.start(either.call("train.py", nnodes="1:2", max_restarts=1), gpus=())
    either.broker.held.add("rig3")
    seen = lines_until(process, "] began with 2 restart 0")
    (run,) = either.broker.gangs
    either.broker.lose(run, 0)
    # A literal torchrun is one of its own each time.
    count = 0 if either.is_cold else 1
    seen += lines_until(process, f"] began with 1 restart {count}")
    assert "rig1 is lost; going on with 1 node\n" in "".join(seen)
    either.broker.held.discard("rig3")
    seen += lines_until(process, "takes part now; going on with 2 nodes")
    seen += lines_until(process, f"] began with 2 restart {count}")
    assert "restart 1 of 1 · " in "".join(seen)
    joined = [gang for gang in either.broker.gangs.values() if gang.request.joins == run]
    assert [(gang.request.nnodes, gang.request.first_worker) for gang in joined] == [(1, 2)]
    (either.home / "end").touch()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, "".join(seen) + out + err
    assert not [gang for gang in either.broker.gangs.values() if gang.state is not schemas.JobState.ENDED]
    assert all(gang.renewed for gang in joined)
    until(lambda: not either.left(), "no process left")


def test_an_elastic_launch_with_its_own_gpu_waits_for_nobody(notebook: Notebook) -> None:
    """Its own node is enough to begin with: what is not free now is not waited for."""
    notebook.broker.busy, notebook.broker.waiting = True, 1
    notebook.script("hello.py", ALL_REDUCE)
    code, out, err = notebook.run(notebook.call("hello.py", nnodes="1:3"))
    assert code == 0, out + err
    assert "sum 1.0 of 1" in out
    assert "1 of up to 3 nodes: rig1 RTX 5090" in out
    (gang,) = notebook.broker.gangs.values()
    assert gang.state is schemas.JobState.ENDED
