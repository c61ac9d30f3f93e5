"""Scripts that ranks of whole launches run, and a count of the ranks that printed a line.

Equal lines that come close together are merged into one in a launch's output.
"""

from __future__ import annotations

import re

_ONE = re.compile(r"\[rank \d+[^\]]*\] (?P<line>.*)")
_SEVERAL = re.compile(r"\[ranks [^\]]*×(?P<count>\d+)\] (?P<line>.*)")

ALL_REDUCE = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    print("sum", value.item(), "of", dist.get_world_size(), *sys.argv[1:])
    print("warned", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
"""
#: Writes a checkpoint on SIGTERM and continues from it; ends some steps after it has continued.
HANG = """
    import os, time
    def wait_for_ever():
        time.sleep(600)
    def compute():
        time.sleep(601)
    print("hanging", flush=True)
    (wait_for_ever if os.environ["RANK"] == "0" else compute)()
"""
CHECKPOINTED = """
    import os, signal, time
    from pathlib import Path
    import torch, torch.distributed as dist

    terminated = []
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(1))
    dist.init_process_group("gloo")
    checkpoint = Path("step")
    first = step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print("began at", first, "of", dist.get_world_size(), "preempted", os.environ["GPU_LAUNCH_PREEMPTIONS"])
    while not first or step < first + 5:
        time.sleep(0.05)
        step += 1
        stop = torch.tensor([float(len(terminated))])
        dist.all_reduce(stop)
        if stop.item():
            if dist.get_rank() == 0:
                time.sleep(1)
                checkpoint.write_text(str(step))
                print("saved", step)
            dist.barrier()
            break
    else:
        print("finished at", step)
    dist.destroy_process_group()
"""


def count_ranks(text: str, line: str) -> int:
    """Return the number of ranks that printed exactly this line."""
    total = 0
    for shown in text.splitlines():
        if (several := _SEVERAL.fullmatch(shown)) and several["line"] == line:
            total += int(several["count"])
        elif (single := _ONE.fullmatch(shown)) and single["line"] == line:
            total += 1
    return total
