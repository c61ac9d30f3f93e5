"""The training scripts under measurement; `%gpu_launch` and plain torchrun run each of them."""

from __future__ import annotations

#: One all-reduce of 4 MB.
HELLO = """
import os, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
print("first line", flush=True)
dist.init_process_group("nccl" if cuda else "gloo")
total = torch.ones(1_000_000, device="cuda" if cuda else "cpu")
dist.all_reduce(total)
print("sum", total[0].item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""

#: Data-parallel steps; rank 0 prints the median time of one, in milliseconds.
STEPS = """
import os, statistics, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
# Containers of different limits have different numbers; this is about what is added to a step.
torch.set_num_threads(1)
device = "cuda" if cuda else "cpu"
width, steps = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("nccl" if cuda else "gloo")
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
optimiser = torch.optim.SGD(model.parameters(), lr=1e-4)
data = torch.randn(64, width, device=device)
times = []
for step in range(steps):
    if step == 3:
        print("going on", flush=True)
    began = time.perf_counter()
    optimiser.zero_grad()
    model(data).square().mean().backward()
    optimiser.step()
    if cuda:
        torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
if dist.get_rank() == 0:
    print("median_ms", statistics.median(times[steps // 5 :]) * 1000, flush=True)
dist.barrier()
sys.stdout.flush()
# DDP's threads over gloo now and then abort an interpreter that takes itself apart.
os._exit(0)
"""

#: Every rank writes a number of lines as fast as it can; rank 0 writes the seconds to a file.
FLOOD = """
import os, sys, time
count = int(sys.argv[1])
began = time.perf_counter()
for number in range(count):
    sys.stdout.write(f"step {number} loss 0.123456 lr 0.001 and some more of a usual line\\n")
sys.stdout.flush()
took = time.perf_counter() - began
if os.environ["RANK"] == "0":
    with open("bench_flood.txt", "w") as file:
        file.write(str(took))
"""

#: Runs until it is stopped.
FOREVER = """
import time
print("going on", flush=True)
while True:
    time.sleep(1)
"""

#: Runs until it is killed: no signal that can be ignored ends it.
IGNORING = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print("going on", flush=True)
while True:
    time.sleep(1)
"""

#: The last rank allocates a number of GiB of its GPU while the others wait for it.
GREEDY = """
import os, sys, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1, device="cuda"))
if dist.get_rank() == dist.get_world_size() - 1:
    torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device="cuda")
dist.barrier()
"""

ALL = {
    "bench_hello.py": HELLO,
    "bench_steps.py": STEPS,
    "bench_flood.py": FLOOD,
    "bench_forever.py": FOREVER,
    "bench_ignoring.py": IGNORING,
    "bench_greedy.py": GREEDY,
}
