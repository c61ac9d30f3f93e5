"""Launches on this machine that are interrupted at every moment: all ranks end, and the workers can be reused."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from gpuhub.broker_api import schemas
from tests.support.launch.local_cluster import DEADLINE_S, Notebook, lines_until, until
from tests.support.launch.rank_scripts import ALL_REDUCE

SLEEPS = "import time; print('sleeping', flush=True); time.sleep(600)"
IGNORES = """
    import signal, time
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print("sleeping", flush=True)
    while True:
        time.sleep(600)
"""
#: Python notices a signal only when this call returns, which takes years.
COMPUTES = """
    print("sleeping", flush=True)
    sum(range(10**16))
"""
#: From SIGINT to the error in the notebook, seconds. The aim is 2 on a machine that has nothing else to do.
INTERRUPTED_S = 15
#: Launches, is interrupted, and launches again at once.
TWICE = """
import time, gpu_launch
try:
    {first}
except KeyboardInterrupt as error:
    print("INTERRUPTED", type(error).__name__, flush=True)
{then}
print("BOTH", flush=True)
"""


@pytest.mark.parametrize("script", [SLEEPS, IGNORES, COMPUTES], ids=["ends", "ignores it", "is in native code"])
def test_an_interrupt_stops_every_rank_and_the_next_launch_starts_at_once(either: Notebook, script: str) -> None:
    """The second launch reuses the workers and sends no request to the broker."""
    either.keep_s = 60
    either.script("sleep.py", script)
    either.script("hello.py", ALL_REDUCE)
    code = TWICE.format(first=either.call("sleep.py", nnodes=2), then=either.call("hello.py", nnodes=2))
    process = either.start(code)
    lines_until(process, "] sleeping")
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    lines_until(process, "INTERRUPTED LaunchInterrupted")
    assert time.monotonic() - began < INTERRUPTED_S
    out, err = process.communicate(timeout=DEADLINE_S)
    assert "sum 3.0 of 2" in out, out + err
    assert "BOTH" in out
    assert either.broker.calls.count("POST /jobs") == 1
    until(lambda: not either.left(), "no process left")


def test_a_second_interrupt_ends_ranks_at_once(notebook: Notebook) -> None:
    """Ranks that ignore the first interrupt end too."""
    notebook.script("sleep.py", IGNORES)
    process = notebook.start(notebook.call("sleep.py", nnodes=2))
    lines_until(process, "] sleeping")
    process.send_signal(signal.SIGINT)
    lines_until(process, "interrupted, stopping")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert "LaunchInterrupted" in err
    until(lambda: not notebook.left(), "no process left")


@pytest.mark.parametrize("moment", ["waiting for 1 GPU", "starting 2 ranks"])
def test_an_interrupt_before_any_rank_runs_frees_everything(notebook: Notebook, moment: str) -> None:
    """An interrupt releases everything while the launch is queued and while workers and engines start."""
    notebook.broker.busy = moment.startswith("waiting")
    notebook.keep_s = 60
    notebook.script("sleep.py", SLEEPS)
    process = notebook.start(notebook.call("sleep.py", nnodes=2))
    lines_until(process, moment)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert "LaunchInterrupted" in err
    (gang,) = notebook.broker.groups.values()
    assert gang.state is schemas.JobState.ENDED
    until(lambda: not notebook.left(), "no process left")


@pytest.mark.parametrize("moment", ["while ranks write checkpoints", "while it waits again"])
def test_an_interrupt_ends_a_preempted_launch(notebook: Notebook, moment: str) -> None:
    """The launch ends cleanly and releases all that it requested."""
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if "write" in moment else ""
    notebook.script("sleep.py", f"import signal, time\n{ignores}\nprint('sleeping')\ntime.sleep(600)")
    process = notebook.start(notebook.call("sleep.py", nnodes=2, scavenge=True))
    lines_until(process, "] sleeping")
    (run,) = notebook.broker.groups
    preempting = threading.Thread(target=notebook.broker.preempt, args=(run,))
    preempting.start()
    if "write" in moment:
        lines_until(process, "ranks write their checkpoints and end")
    else:
        preempting.join(DEADLINE_S)
        lines_until(process, "waiting for 1 GPU on 1 node")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert "LaunchInterrupted" in err
    preempting.join(DEADLINE_S)
    until(lambda: not notebook.left(), "no process left")
