"""Which rank is blamed, and what is said of it: the text of every kind of failure."""

from __future__ import annotations

import dataclasses

import pytest

from gpu_launch.common.launch_spec import RankEnd
from gpu_launch.output import failure
from gpu_launch.output.failure import find_gpu_shortage
from gpu_launch.worker.gpu_monitor import format_gpu_name


def end(rank, exit_code, error="", at_ns=0, **parts):
    """How a rank ended."""
    return RankEnd(rank=rank, node=f"rig{rank + 1}", exit_code=exit_code, error=error, at_ns=at_ns, **parts)


OWN = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\nValueError: bad data'
LEFT = 'Traceback (most recent call last):\n  File "t.py", line 9\nRuntimeError: [..] Connection closed by peer [10.0.1.3]:1'
OUT_OF_MEMORY = (
    'Traceback (most recent call last):\n  File "t.py", line 4, in <module>\n    torch.empty(2**31)\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.36 GiB of "
    "which 419.06 MiB is free. Including non-PyTorch memory, this process has 30.90 GiB memory in use."
)
WATCHDOG = (
    "[rank0]:[E1121 12:00:00.5 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds.\n"
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x95 (0x7f) in libc10.so\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)


def test_rank_with_its_own_error_is_the_root_cause():
    """Although its victim's clock says that it ended earlier."""
    assert failure.find_first_failure([end(0, 1, LEFT, 5), end(1, 1, OWN, 9), end(2, None)]).rank == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", True),
        ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
        (OUT_OF_MEMORY, False),
        (OWN, False),
    ],
)
def test_failures_that_may_be_a_gpus_are_recognised(error, expected):
    """For these a launch waits a moment for what the driver reports."""
    assert failure.may_be_hardware(error) is expected


def test_problems_of_gpus_are_above_the_failure():
    problem = "GPU 0 (RTX 5090) of rig1: Xid 79, it has fallen off the bus: reset the GPU or restart the node"
    assert failure.add_gpu_problems("rank 0 on rig1 failed", (problem,)) == f"{problem}\n\nrank 0 on rig1 failed"
    assert failure.add_gpu_problems("rank 0 on rig1 failed", ()) == "rank 0 on rig1 failed"


def test_failed_rank_that_was_then_stopped_is_the_root_cause():
    """Its peers ended of it; what an interrupt does to a rank, or a line of its own, is no failure."""
    ends = [end(0, 1, LEFT, 5), end(1, None, OWN, 9), end(2, None)]
    assert failure.find_first_failure(ends).rank == 1
    assert failure.describe_failure(ends).startswith(f"rank 1 on rig2 failed\n\n{OWN}\n")
    for error in ("", "epoch 3", f"{OWN}\nepoch 3", OWN.replace("ValueError: bad data", "KeyboardInterrupt")):
        assert failure.find_first_failure([end(0, 1, LEFT, 5), end(1, None, error, 9)]).rank == 0


def test_earlier_of_two_errors_is_the_root_cause():
    """By when it was written, not by rank."""
    assert failure.find_first_failure([end(0, 1, OWN, 9), end(1, 1, OWN, 5)]).rank == 1


def test_killed_rank_is_the_root_cause_before_its_peers():
    """Out of memory leaves no traceback."""
    assert failure.find_first_failure([end(0, 1, LEFT, 5), end(1, -9, "", 9), end(2, -15)]).rank == 1
    killed = end(2, -9, "", 99, is_out_of_memory=True)
    assert failure.find_first_failure([end(0, 1, LEFT, 5), end(1, -9, "", 9), killed]).rank == 2


def test_no_root_cause_without_a_failure():
    """Nobody is blamed."""
    assert failure.find_first_failure([end(0, 0), end(1, 0)]) is None
    assert failure.describe_failure([], logs="~/l") == "The launch failed before any rank ran.\nLogs: ~/l"


GOLDEN = [
    (
        "a rank's own error, a victim, and ranks that were stopped or had finished",
        [end(0, 1, LEFT, 5), end(1, 1, OWN, 9), end(2, -15), end(3, None), end(4, -9), end(5, 0)],
        f"rank 1 on rig2 failed: exit code 1\n\n{OWN}\n\n"
        "rank 0 (rig1): lost a peer, RuntimeError: [..] Connection closed by peer [10.0.1.3]:1\n"
        "ranks 2-4 were stopped\nrank 5 had finished\nLogs: ~/l",
    ),
    (
        "the same error on all ranks",
        [end(rank, 1, OWN, rank + 1) for rank in range(4)],
        f"rank 0 on rig1 failed: exit code 1\n\n{OWN}\n\n"
        "ranks 1-3 (rig2, rig3, rig4): exit code 1, ValueError: bad data\nLogs: ~/l",
    ),
    (
        "a GPU's memory",
        [end(0, -15), end(1, 1, OUT_OF_MEMORY, gpu="NVIDIA GeForce RTX 5090 GPU-1a2b3c4d-0000")],
        "rank 1 on rig2 ran out of GPU memory: asked for 2.00 GiB, 0.41 GiB of 31.4 GiB free on RTX 5090 (GPU-1a2b…)"
        f"\n\n{OUT_OF_MEMORY}\n\nrank 0 was stopped\nLogs: ~/l",
    ),
    (
        "the container's memory",
        [end(0, -9, "", is_out_of_memory=True, memory_limit_mib=16384), end(1, 1, LEFT)],
        "rank 0 on rig1 was killed: its container reached its memory limit of 16.0 GiB\n\nIt wrote nothing to stderr.\n\n"
        "rank 1 (rig2): lost a peer, RuntimeError: [..] Connection closed by peer [10.0.1.3]:1\nLogs: ~/l",
    ),
    (
        "a child's death for want of memory",
        [end(0, 1, OWN, is_out_of_memory=True)],
        f"rank 0 on rig1 failed (exit code 1): its container reached its memory limit\n\n{OWN}\n\nLogs: ~/l",
    ),
    (
        "SIGKILL by somebody",
        [end(0, -9)],
        "rank 0 on rig1 failed: SIGKILL (killed; out of memory is the usual reason)\n\nIt wrote nothing to stderr.\n\n"
        "Logs: ~/l",
    ),
    (
        "a collective that waits for a rank that hangs, and one that had finished",
        [end(0, -6, WATCHDOG), end(1, None), end(2, 0)],
        "rank 0 on rig1 waited for its peers for 10 min without an answer: rank 2 (rig3) had finished already, "
        "rank 1 (rig2) did not answer\n\n"
        "[E1121 12:00:00.5 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n\n"
        "rank 1 was stopped\nrank 2 had finished\nLogs: ~/l",
    ),
    (
        "a peer that only gloo misses",
        [end(0, 1, LEFT), end(1, None)],
        f"rank 0 on rig1 lost a peer: rank 1 (rig2) did not answer\n\n{LEFT}\n\nrank 1 was stopped\nLogs: ~/l",
    ),
    (
        "C++ crashes",
        [end(0, -11, "")],
        "rank 0 on rig1 failed: SIGSEGV (crashed in native code)\n\nIt wrote nothing to stderr.\n\nLogs: ~/l",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("ends", "text"), [kind[1:] for kind in GOLDEN], ids=[kind[0] for kind in GOLDEN])
def test_failure_summary(ends, text):
    """Golden: the first failing rank's own error first and once, a line for each way in which others ended."""
    assert failure.describe_failure(ends, logs="~/l") == text


def test_lost_node_is_named_in_the_failure():
    """When nobody has an error of his own."""
    text = failure.describe_failure([end(0, 1, LEFT), end(1, None)], lost=["no message from rig2 (rank 1) for 4 s"])
    assert text.startswith("rank 0 on rig1 lost a peer: no message from rig2 (rank 1) for 4 s\n")
    assert failure.describe_failure([end(1, 1, OWN)], lost=["x"]).startswith("rank 1 on rig2 failed: exit code 1\n")


@pytest.mark.parametrize(
    ("error", "figures"),
    [
        (OUT_OF_MEMORY, ("2.00 GiB", 0.409, 31.36, None, 0)),
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 3.95 GiB total capacity; 3.41 GiB already allocated; "
         "10.75 MiB free; 3.50 GiB reserved in total by PyTorch)", ("20.00 MiB", 0.01, 3.95, None, 1)),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 100.00 GiB "
         "is free. 8.00 GiB allowed; Of the allocated", ("2.00 GiB", 100.0, 139.8, 8.0, 0)),
        ("CUDA out of memory. Tried to allocate 512 bytes", ("512 bytes", None, None, None, None)),
        ("RuntimeError: CUDA error: an illegal memory access", None),
    ],
)  # fmt: skip
def test_parse_memory_figures_of_torch(error, figures):
    """As it writes them now, as it used to, with a cap, and without any."""
    found = find_gpu_shortage(error)
    if figures is None:
        assert found is None
        return
    sizes = [size if size is None else round(size, 3) for size in (found.free, found.total, found.allowed)]
    assert (found.requested, *sizes, found.index) == figures


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA GeForce RTX 5090 GPU-1a2b3c", "RTX 5090 (GPU-1a2b…)"),
        ("RTX 5070 (GPU-1a2b3c4d-1)", "RTX 5070 (GPU-1a2b…)"),
        ("GPU-1a2b3c", "GPU-1a2b…"),
        ("Tesla T4 GPU-1a2b3c", "T4 (GPU-1a2b…)"),
        ("NVIDIA H200 MIG 1g.18gb MIG-99aa-1", "H200 MIG 1g.18gb (MIG-99aa…)"),
        ("", ""),
    ],
)
def test_format_gpu_name(told, name):
    """Model and a short UUID, as far as they are told."""
    assert format_gpu_name(told) == name


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (3, "exit code 3"), (None, "stopped"), (-15, "SIGTERM"), (-99, "signal 99")]
)
def test_format_exit_codes(code, text):
    """Signals by name."""
    assert failure.format_exit_code(code) == text


def test_only_the_first_rank_of_a_container_is_reported_oom_killed():
    """The launch kills the others, with the same signal."""
    ends = [dataclasses.replace(end(rank, -9, "", 9 - rank, is_out_of_memory=True), node="rig1") for rank in range(3)]
    text = failure.describe_failure(ends)
    assert text.startswith("rank 2 on rig1 was killed: its container reached its memory limit\n")
    assert text.endswith("\nranks 0-1 were stopped")


def test_messages_of_other_ranks_are_one_line_of_limited_length():
    """gloo's messages are long."""
    text = failure.describe_failure([end(0, 1, LEFT + "x" * 999), end(1, 1, OWN)])
    (line,) = [line for line in text.splitlines() if line.startswith("rank 0 (rig1): lost a peer")]
    assert len(line) < 200
    assert line.endswith("x…")


def test_memory_limit_is_shown_only_if_known():
    """An agent may not be able to read it."""
    killed = end(0, -9, "", is_out_of_memory=True)
    assert "its memory limit\n" in failure.describe_failure([killed])
    assert "limit of 512.0 GiB\n" in failure.describe_failure(
        [dataclasses.replace(killed, memory_limit_mib=512 * 1024)]
    )
