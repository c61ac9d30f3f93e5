"""Launches on this machine that fail: which rank is reported, what is restarted, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal

from gpuhub.broker_api import schemas
from tests.support.launch.local_cluster import DEADLINE_S, Notebook, lines_until, until
from tests.support.launch.rank_scripts import count_ranks

CATCHING = """
try:
    {launch}
except gpu_launch.LaunchFailed as error:
    print('FAILED', error, flush=True)
"""
REDUCES_FOREVER = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    print("pid", os.getpid(), flush=True)
    while True:
        dist.all_reduce(torch.ones(1))
"""


def failure(notebook: Notebook, script: str, **options: object) -> str:
    """Return the message of a launch's error."""
    code, out, err = notebook.run("import gpu_launch\n" + CATCHING.format(launch=notebook.call(script, **options)))
    assert code == 0, out + err
    assert "FAILED " in out, out + err
    return out.partition("FAILED ")[2]


def test_the_failing_ranks_own_traceback_comes_first(either: Notebook) -> None:
    """The rank that raised is reported, not those that lost their connection to it."""
    either.script(
        "fail.py",
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("the data is wrong")
        dist.all_reduce(torch.ones(1))
        """,
    )
    text = failure(either, "fail.py", nnodes=3)
    assert re.match(r"rank 1 \(?on rig2.*\n", text)
    assert text.count("ValueError: the data is wrong") == 1
    assert text.index("ValueError: the data is wrong") < text.index("Logs: ")
    until(lambda: not either.left(), "no process left")


def test_failed_launch_is_restarted(either: Notebook) -> None:
    """--max-restarts starts all ranks again with a new store until they succeed, and counts as torchrun does."""
    either.script(
        "flaky.py",
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1 and os.environ["GPU_LAUNCH_ATTEMPT"] < "2":
            raise SystemExit(3)
        value = torch.ones(1)
        dist.all_reduce(value)
        count, most = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
        print("attempt", os.environ["GPU_LAUNCH_ATTEMPT"], "sum", value.item(), "restart", count, "of", most)
        dist.destroy_process_group()
        """,
    )
    code, out, err = either.run(either.call("flaky.py", nnodes=2, max_restarts=2))
    assert code == 0, out + err
    # torchrun itself starts a new group each time, with no restart counted before.
    counted = "restart 0 of 0" if either.is_cold else "restart 2 of 2"
    assert count_ranks(out, f"attempt 2 sum 2.0 {counted}") == 2
    assert "restart 2 of 2 · " in out


def test_restarts_are_limited(notebook: Notebook) -> None:
    """A script that always fails fails the launch after the given number of restarts."""
    notebook.script("fail.py", "import os; raise SystemExit(4 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    assert "exit code 5" in failure(notebook, "fail.py", max_restarts=1)


def test_a_killed_rank_is_named_while_its_peers_wait_for_it(either: Notebook) -> None:
    """SIGKILL of one rank in the middle of collectives ends the launch with that rank's name."""
    either.script("reduce.py", REDUCES_FOREVER)
    process = either.start("import gpu_launch\n" + CATCHING.format(launch=either.call("reduce.py", nnodes=2)))
    lines = lines_until(process, "] pid ", times=2)
    pid = next(int(match[1]) for line in lines if (match := re.search(r"rank 1 · rig2\] pid (\d+)", line)))
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=DEADLINE_S)
    text = out.partition("FAILED ")[2]
    assert text.startswith("rank 1 "), out + err
    assert "rig2" in text.splitlines()[0]
    assert "SIGKILL" in text
    until(lambda: not either.left(), "no process left")


def test_a_dead_worker_fails_the_launch_and_is_named(either: Notebook) -> None:
    """A worker's end is reported with its node while the ranks still run."""
    either.script("reduce.py", REDUCES_FOREVER)
    process = either.start("import gpu_launch\n" + CATCHING.format(launch=either.call("reduce.py", nnodes=2)))
    lines_until(process, "] pid ", times=2)
    (run,) = either.broker.groups
    either.broker.lose(run, 0)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert "rig2" in out.partition("FAILED ")[2], out + err
    until(lambda: not either.left(), "no process left")


def test_a_node_that_is_cut_off_is_named(notebook: Notebook) -> None:
    """A node that stops responding is named, and its workers are not used again."""
    notebook.keep_s = 60
    notebook.script("reduce.py", REDUCES_FOREVER)
    process = notebook.start("import gpu_launch\n" + CATCHING.format(launch=notebook.call("reduce.py", nnodes=2)))
    lines_until(process, "] pid ", times=2)
    (run,) = notebook.broker.groups
    notebook.broker.freeze(run, 0)
    try:
        lines = lines_until(process, "FAILED ")
        assert "rig2" in "".join(lines).partition("FAILED ")[2]
    finally:
        notebook.broker.lose(run, 0)
    process.communicate(timeout=DEADLINE_S)
    assert notebook.broker.groups[run].state is schemas.JobState.ENDED
    until(lambda: not notebook.left(), "no process left")


def test_one_rank_succeeds_and_another_hangs(either: Notebook) -> None:
    """The launch names the rank that it waits for; an interrupt ends all ranks, also those that ignore signals."""
    either.script(
        "hang.py",
        """
        import os, signal, subprocess, sys, time
        if os.environ["RANK"] == "1":
            ignores = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)"
            subprocess.Popen([sys.executable, "-c", ignores], start_new_session=True)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            sys.stdout.buffer.write(bytes(range(128, 256)) + b"\\0\\n")
            time.sleep(600)
        """,
    )
    process = either.start(either.call("hang.py", nnodes=2))
    # torchrun reports the end of its ranks when all nodes have finished.
    lines_until(process, "running on" if either.is_cold else "rank 0 has finished, waiting for rank 1")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert "LaunchInterrupted" in err
    until(lambda: not either.left(), "no process left")
