"""The main job on real GPUs: profiles, launches, shares, strangers' processes, and a restart of the broker.

Every step compares what gpuhub says with what nvidia-smi and CUDA say in the container.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuhub.common.paths import Paths
from gpuhub.ops.deploy.programs import Supervisor
from tests.gpus.conftest import INSTANCE, Gpus, RunningNotebook, gpuhub
from tests.support.hub.kernel_client import open_kernel
from tests.support.hub.users import Client
from tests.support.product import wait_for

Start = Callable[[str, str], RunningNotebook]

ALL_REDUCE = """%%writefile reduce.py
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
total = torch.full((1 << 20,), dist.get_rank() + 1.0, device=device)
dist.all_reduce(total)
print("sum", int(total[0].item()), "on", torch.cuda.get_device_properties(device).uuid, flush=True)
dist.destroy_process_group()
"""
OUT_OF_MEMORY = """%%writefile large.py
import os, torch
if os.environ["RANK"] == "0":
    torch.empty(1 << 44, device="cuda", dtype=torch.uint8)
"""


#: Computes for 15 seconds, and says what its GPU's counter of energy took meanwhile.
HEAT = """%%writefile heat.py
import time, pynvml, torch
x = torch.randn(1 << 13, 1 << 13, device="cuda", dtype=torch.bfloat16)
held = torch.zeros(4 << 30, device="cuda", dtype=torch.uint8)
uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
before, begun = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu), time.monotonic()
while (seconds := time.monotonic() - begun) < 15:
    for _ in range(100):
        x @ x
    torch.cuda.synchronize()
joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - before) / 1000
print("took", joules, "J in", seconds, "s of", uuid, flush=True)
"""
#: Rank 0 does not call the second collective.
HANG = """%%writefile hang.py
import os, time, torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
x = torch.ones(1, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
if dist.get_rank() == 0:
    time.sleep(600)
dist.all_reduce(x)
torch.cuda.synchronize()
"""
#: What `%gpu_stacks` shows of it when all ranks are there, by their number.
HANGING = {
    1: re.compile(r"time\.sleep\(600\)"),
    2: re.compile(r"time\.sleep\(600\)[\s\S]*synchronize|synchronize[\s\S]*time\.sleep\(600\)"),
}
#: A kernel that writes where nothing is, in PTX, which the driver compiles.
WILD_WRITE = """import ctypes, torch
torch.ones(1, device="cuda")
ptx = b'''.version 7.0
.target sm_70
.address_size 64
.visible .entry wild()
{
    .reg .u64 %a;
    .reg .u32 %v;
    mov.u64 %a, 64;
    mov.u32 %v, 1;
    st.global.u32 [%a], %v;
    ret;
}
'''
cuda = ctypes.CDLL("libcuda.so.1")
module, wild = ctypes.c_void_p(), ctypes.c_void_p()
print("loaded", cuda.cuModuleLoadData(ctypes.byref(module), ptx))
print("found", cuda.cuModuleGetFunction(ctypes.byref(wild), module, b"wild"))
print("launched", cuda.cuLaunchKernel(wild, 1, 1, 1, 1, 1, 1, 0, None, None, None))
print("ended with", cuda.cuCtxSynchronize())
"""
ADD_IN_NEW_PROCESS = "!python -c \"import torch; print('sum', torch.ones(9, device='cuda').sum().item())\""


def count_gpus(product: Gpus) -> Counter[str]:
    """Return the number of GPUs of each node."""
    return Counter(gpu["node"] for gpu in product.gpus())


def read_ranks(output: str) -> tuple[set[int], list[str]]:
    """Return the sums that the ranks of reduce.py printed, and their GPUs."""
    found = re.findall(r"sum (\d+) on ([0-9a-f-]{36})", output)
    return {int(total) for total, _ in found}, [f"GPU-{uuid}" for _, uuid in found]


def test_broker_shows_the_driver_s_gpus(product: Gpus, start: Start) -> None:
    """All are free; the agent of each node and nvidia-smi there report the same GPUs, with the same memory."""
    product.wait_free()
    for node in product.view()["nodes"]:
        query = ["nvidia-smi", "--query-gpu=uuid,memory.total,memory.used", "--format=csv,noheader,nounits"]
        rows = [line.split(", ") for line in product.run_in_agent(node["name"], *query)]
        assert {uuid: int(total) for uuid, total, _ in rows} == {gpu["uuid"]: gpu["memory_mib"] for gpu in node["gpus"]}
        used = {gpu["uuid"]: gpu["memory_used_mib"] for gpu in node["gpus"]}
        assert all(abs(used[uuid] - int(value)) <= 64 for uuid, _, value in rows), (used, rows)


#: DCGM's name of a metric, the same value of nvidia-smi, and by how much two readings may differ. An idle GPU may slow
#: its link down, so only what card and slot can do is compared.
METRICS = (
    ("FB_TOTAL", "memory.total", 0),
    ("FB_USED", "memory.used", 64),
    ("GPU_UTIL", "utilization.gpu", 10),
    ("POWER_USAGE", "power.draw", 40),
    ("ENFORCED_POWER_LIMIT", "enforced.power.limit", 0.1),
    ("GPU_TEMP", "temperature.gpu", 4),
    ("CLOCKS_EVENT_REASONS", "clocks_event_reasons.active", 0),
    ("PCIE_MAX_LINK_GEN", "pcie.link.gen.max", 0),
    ("PCIE_MAX_LINK_WIDTH", "pcie.link.width.max", 0),
)


def find_differences(product: Gpus) -> list[tuple[str, str, float, str]]:
    """Return the readings that differ by more than they may: UUID, name, what the metrics show, and nvidia-smi."""
    metrics, driver = product.metrics(), product.ask_driver(",".join(query for _, query, _ in METRICS))
    assert set(driver) == set(product.states())
    found = []
    for uuid, values in driver.items():
        for (name, _, tolerance), value in zip(METRICS, values, strict=True):
            shown = metrics.value(f"DCGM_FI_DEV_{name}", UUID=uuid)
            expected = float(int(value, 16) if value.startswith("0x") else value)
            if abs(shown - expected) > tolerance:
                found.append((uuid, name, shown, value))
    return found


def test_metrics_are_the_driver_s_values(product: Gpus, start: Start) -> None:
    """Idle GPUs have the readings that nvidia-smi shows, no fault, and a counter of energy just behind NVML's."""
    product.wait_free()
    # Readings are some seconds old, and a GPU that has just computed becomes cooler meanwhile.
    wait_for(lambda: not find_differences(product), lambda: f"equal readings: {find_differences(product)}", 60)
    metrics = product.metrics()
    for uuid in product.states():
        assert metrics.value("DCGM_FI_DEV_XID_ERRORS", UUID=uuid) == 0
        assert not metrics.list("gpuhub_gpu_fault", UUID=uuid)
        # A reading is some seconds old, in which an idle GPU takes some 100 J each.
        counted_j = product.energy(uuid)
        shown_j = metrics.value("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", UUID=uuid) / 1000
        assert counted_j - 2000 < shown_j <= counted_j


def test_each_profile_has_the_gpus_that_it_names(product: Gpus, start: Start) -> None:
    """A notebook sees the leased GPUs and no other, and CUDA computes on each of them."""
    for profile in product.cluster.profiles:
        if profile.gpu_share > 1:
            continue
        notebook = start("ada", profile.name)
        held = {gpu["uuid"] for gpu in product.gpus() if gpu["state"] == "held"}
        assert len(held) == profile.gpu_count
        if held:
            assert notebook.uuids() == held
            code = "import torch; print([int(torch.ones(1000, device=f'cuda:{i}').sum()) for i in range(torch.cuda.device_count())])"
            assert str([1000] * len(held)) in notebook.run(code)
        notebook.user.stop(notebook.server)
        product.wait_free()


def test_no_gpu_is_given_twice(product: Gpus, start: Start) -> None:
    """With every GPU held, a further request waits and says who holds them; it is granted when one is released."""
    notebooks = [start(("ada", "ben")[number % 2], "gpu") for number in range(len(product.gpus()))]
    seen = [notebook.uuids() for notebook in notebooks]
    assert all(len(uuids) == 1 for uuids in seen)
    assert len(set().union(*seen)) == len(notebooks)
    eve = product.users["eve"]
    eve.start("late", "gpu")
    try:
        wait_for(lambda: [entry for entry in product.view()["queue"] if entry["owner"] == "eve"], "eve waits")
        assert set(product.states().values()) == {"held"}
        notebooks[0].user.stop(notebooks[0].server)
        wait_for(lambda: eve.is_ready("late"), "eve's notebook starts when a GPU is free", 120)
        holders = {gpu["holder"]["owner"]: gpu["uuid"] for gpu in product.gpus() if gpu["state"] == "held"}
        assert holders["eve"] in seen[0]
    finally:
        eve.stop("late")


def test_launch_over_all_nodes_and_gpus(product: Gpus, start: Start) -> None:
    """NCCL's sum is right, each rank has its own GPU, the second launch reuses the workers, and all is free afterwards."""
    nodes = count_gpus(product)
    each = min(nodes.values())
    ranks = each * len(nodes)
    notebook = start("ada", "cpu")
    notebook.run(ALL_REDUCE)
    for _ in range(2):
        output = notebook.run(f"%gpu_launch --nnodes {len(nodes)} --nproc-per-node {each} reduce.py")
        sums, gpus = read_ranks(output)
        assert sums == {ranks * (ranks + 1) // 2}, output
        assert len(set(gpus)) == ranks, output
        assert set(gpus) <= set(product.states()), output
    for node, count in nodes.items():
        if count > 1:
            output = notebook.run(f"%gpu_launch --nnodes 1 --nproc-per-node {count} reduce.py")
            assert len(set(read_ranks(output)[1])) == count, (node, output)
            break


def report(*words: str) -> list[dict[str, Any]]:
    """Return the rows of `gpuhub report`."""
    rows: list[dict[str, Any]] = json.loads(gpuhub("report", "--json", *words))["rows"]
    return rows


def test_costs_of_a_job_are_what_the_driver_counts(product: Gpus, start: Start) -> None:
    """Time, use, memory and energy of a detached job fit what it measured itself, in its line and in `gpuhub report`."""
    ada, notebook = product.users["ada"], start("ada", "cpu")
    notebook.run(HEAT)
    before = {uuid: product.energy(uuid) for uuid in product.states()}
    begun = time.monotonic()
    notebook.run("%gpu_launch --detach heat.py")
    [job] = wait_for(
        lambda: [job for job in list_jobs(ada) if job["detached"] and job["ended_at"]],
        lambda: f"the job has ended: {list_jobs(ada)}",
        180,
    )
    [costs] = wait_for(
        lambda: [record for record in ada.ask(ada.broker, "GET", "/costs")[1] if record["id"] == job["id"]],
        "the job's costs",
    )
    elapsed_s = time.monotonic() - begun
    output = notebook.run("%gpu_logs")
    found = re.search(r"took ([0-9.]+) J in ([0-9.]+) s of (GPU-[0-9a-f-]{36})", output)
    assert found, output
    own_j, own_s, uuid = float(found[1]), float(found[2]), found[3]
    # The lease is longer than the measurement in it, and ends are known to two seconds.
    energy_j, held_s = costs["energy_kwh"] * 3.6e6, costs["gpu_hours"] * 3600
    assert 0.95 * own_j < energy_j < product.energy(uuid) - before[uuid] + 1, (costs, output)
    assert not costs["is_energy_estimated"]
    assert own_s < held_s < elapsed_s + 1, costs
    assert costs["busy_percent"] > 100 * 0.8 * own_s / held_s, costs
    assert 4096 < costs["peak_memory_mib"] < 8192, costs
    assert re.match(r"GPU \d+ % busy, \d+\.\d of \d+ GB, [0-9.]+ k?Wh", costs["text"]), costs
    [row] = wait_for(
        lambda: [row for row in report("--by", "profile", "--owner", "ada") if row["key"] == "jobs"], "the report"
    )
    assert row["energy_kwh"] >= 0.99 * costs["energy_kwh"], row
    assert row["peak_memory_mib"] >= costs["peak_memory_mib"], row


def list_jobs(user: Client) -> list[dict[str, Any]]:
    """Return a user's jobs, also those that have ended."""
    status, jobs = user.ask(user.broker, "GET", "/jobs?ended=true")
    assert status == 200, jobs
    return list(jobs)


def test_stacks_of_ranks_that_hang_in_nccl(product: Gpus, start: Start) -> None:
    """`%gpu_stacks` shows which rank waits for NCCL, where the other one is, and which collectives they have called.

    Where there is one GPU, its rank hangs alone.
    """
    gpus = count_gpus(product)
    nodes = min(2, len(gpus))
    ranks = min(2, gpus.total())
    notebook = start("ada", "cpu")
    notebook.run(HANG)
    notebook.run("%env GPU_LAUNCH_TORCH_SERVER=1")
    notebook.run(f"%gpu_launch --detach --nnodes {nodes} --nproc-per-node {ranks // nodes} hang.py")
    hanging = HANGING[ranks]
    try:
        shown = wait_for(
            lambda: text if hanging.search(text := notebook.kernel.run("%gpu_stacks")) else None,
            lambda: notebook.kernel.run("%gpu_logs") + notebook.kernel.run("%gpu_stacks --full"),
            60,
            every_s=1,
        )
        assert re.search(r"rank 0: at hang\.py:\d+\s+time\.sleep\(600\)", shown), shown
        if ranks == 2:
            assert re.search(r"rank 1: in synchronize at hang\.py:\d+\s+torch\.cuda\.synchronize\(\)", shown), shown
            counts = "rank 1 called number 2 (all_reduce); rank 0 called number 1 (all_reduce)"
            assert f"collectives of default_pg (nccl): {counts}" in shown, shown
    finally:
        notebook.kernel.run("%gpu_cancel all")


def test_standing_ranks_keep_their_tensors(product: Gpus, start: Start) -> None:
    """`%%gpu_ranks` computes on each node's GPU, and its variables are there in the next cell."""
    count = len(count_gpus(product))
    notebook = start("ada", "cpu")
    notebook.run(f"%%gpu_ranks --nnodes {count}\nimport torch\nheld = torch.full((4,), float(rank + 1), device='cuda')")
    output = notebook.run("%%gpu_ranks\nprint('rank', rank, 'has', held.sum().item(), held.device)")
    for rank in range(count):
        assert f"rank {rank} has {4.0 * (rank + 1)} cuda:0" in output
    notebook.run("%gpu_ranks --stop")


#: Whole numbers, so that every result is exact: what is on the GPU after a number of steps is known.
BEGIN_STEPS = """import torch
x = torch.arange(1 << 28, device="cuda") % 1000
graph_in, graph_out = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    graph_out += graph_in
def step(count):
    global x
    for _ in range(count):
        x = (x * 3 + 1) % 1000
        graph.replay()
    return int(x.sum()), int(graph_out[7])
print("begun", torch.cuda.get_device_properties(0).uuid)
"""


def expect_steps(count: int) -> str:
    """Return what `print(step(n))` shows after that many steps in all."""
    repeats, rest = divmod(1 << 28, 1000)
    values = list(range(1000))
    for _ in range(count):
        values = [(value * 3 + 1) % 1000 for value in values]
    return str((repeats * sum(values) + sum(values[:rest]), count))


def find_lease(user: Client, notebook: RunningNotebook) -> dict[str, Any]:
    """Return the lease of a notebook, as the broker shows it to its owner."""
    leases = user.ask(user.broker, "GET", "/leases")[1]
    return next(dict(lease) for lease in leases if lease["subject"] == notebook.server)


def read_suspension(user: Client, notebook: RunningNotebook) -> str | None:
    suspension = find_lease(user, notebook)["suspension"]
    return None if suspension is None else str(suspension["state"])


def test_idle_notebook_lends_its_gpu_and_goes_on(product: Gpus, start: Start) -> None:
    """Eve gets the GPU of ada's idle notebook and fills it; ada's next cell waits for it, and finds her tensors."""
    ada, eve = product.users["ada"], product.users["eve"]
    notebook = start("ada", "lent")
    begun = notebook.run(BEGIN_STEPS)
    assert expect_steps(3) in notebook.run("print(step(3))"), begun
    [uuid] = notebook.uuids()
    for number in range(len(product.gpus()) - 1):
        start(("ben", "eve")[number % 2], "gpu")
    other = start("eve", "gpu")
    assert other.uuids() == {uuid}
    assert read_suspension(ada, notebook) == "suspended"
    moved_mib = find_lease(ada, notebook)["suspension"]["moved_mib"]
    assert moved_mib > 2048
    total = next(gpu["memory_mib"] for gpu in product.gpus() if gpu["uuid"] == uuid)
    fill = f"import torch; held = torch.ones({int(total * 0.9)} << 20, dtype=torch.uint8, device='cuda'); print(held[-1].item())"
    assert "1" in other.run(fill)
    assert int(product.ask_driver("memory.used")[uuid][0]) < total * 0.9 + 1024
    cell = notebook.kernel.begin("print(step(2))")
    wait_for(lambda: read_suspension(ada, notebook) == "resuming", "ada's notebook waits for its GPU")
    time.sleep(5)
    assert read_suspension(ada, notebook) == "resuming"
    begin = time.monotonic()
    eve.stop(other.server)
    output = "".join(notebook.kernel.messages(cell, 240))
    print(f"{moved_mib} MiB were back {time.monotonic() - begin:.1f} s after the other notebook was stopped")
    assert expect_steps(5) in output
    assert notebook.uuids() == {uuid}


def test_suspensions_by_hand_lose_nothing(product: Gpus, start: Start) -> None:
    """Again and again, some with a cell that runs meanwhile: every result is right, also of a second kernel."""
    ada, notebook, done = product.users["ada"], start("ada", "lent"), 0
    notebook.run(BEGIN_STEPS)
    [uuid] = notebook.uuids()
    lease = find_lease(ada, notebook)["id"]
    with open_kernel(product.address.removeprefix("http://"), ada, notebook.server) as second:
        # It has initialised CUDA, and has nothing on the GPU.
        assert "True" in second.run("import torch; print(torch.cuda.is_available())")
        for cycle in range(int(os.environ.get("GPUHUB_TEST_SUSPENSIONS", "3"))):
            wait_for(lambda: find_lease(ada, notebook)["may_suspend"], "the notebook may be suspended", 60)
            begin = time.monotonic()
            status, answer = ada.ask(ada.broker, "POST", f"/leases/{lease}/suspend")
            assert status == 200, answer
            if cycle % 3 != 2:
                wait_for(
                    lambda: read_suspension(ada, notebook) == "suspended",
                    lambda: f"it is suspended: {ada.ask(ada.broker, 'GET', '/events')}",
                    120,
                )
                assert int(product.ask_driver("memory.used")[uuid][0]) < 1024
            out_s, begin = time.monotonic() - begin, time.monotonic()
            done += cycle + 1
            assert expect_steps(done) in notebook.run(f"print(step({cycle + 1}))")
            assert f"sum {9 + cycle}" in second.run(f"print('sum', int(torch.ones({9 + cycle}, device='cuda').sum()))")
            wait_for(lambda: read_suspension(ada, notebook) is None, "it has its GPU", 60)
            print(f"cycle {cycle}: out in {out_s:.1f} s, back in {time.monotonic() - begin:.1f} s")


#: Trains until the file `enough` is there, or for a number of steps (0: no limit), with 8 GiB beside the model. Writes its GPU, and every
#: 20 steps a checksum of all parameters.
TRAINING = """%%writefile training.py
import os, pathlib, sys, zlib
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
file, steps = open(sys.argv[1], "w", buffering=1), int(sys.argv[2])
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
held = torch.arange(1 << 30, device="cuda")
expected = (1 << 30) * ((1 << 30) - 1) // 2
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6))).cuda()
data = torch.randn(512, 2048, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
number = 0
while number < (steps or number + 1) and not pathlib.Path("enough").exists():
    for _ in range(20):
        optimizer.zero_grad()
        ((model(data) - data) ** 2).mean().backward()
        optimizer.step()
    number += 20
    assert held.sum().item() == expected, "what it holds has changed"
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(number, zlib.crc32(parameters.cpu().numpy().tobytes()), file=file)
print("on", torch.cuda.get_device_properties(0).uuid, file=file)
"""
#: The memory that it holds, and the end of its file.
TRAINING_MIB, TRAINED_ON = 8192, re.compile(r"on ([0-9a-f-]{36})")


def list_detached(user: Client) -> list[dict[str, Any]]:
    """Return a user's detached jobs, the last one first."""
    return sorted((job for job in list_jobs(user) if job["detached"]), key=lambda job: job["created_at"], reverse=True)


def read_job_suspension(user: Client) -> str | None:
    suspension = list_detached(user)[0]["lease"]["suspension"]
    return None if suspension is None else str(suspension["state"])


def test_scavenging_job_is_suspended_and_continues(product: Gpus, start: Start) -> None:
    """At random moments eve gets its GPU and fills it; the job's results are those of an uninterrupted run."""
    ada, eve, notebook = product.users["ada"], product.users["eve"], start("ada", "cpu")
    notebook.run("!rm -f enough seen.txt whole.txt")
    notebook.run(TRAINING)
    notebook.run("%gpu_launch --detach --scavenge --cpus 4 --ram 16G training.py seen.txt 0")

    def read_lines(name: str = "seen.txt") -> list[str]:
        return notebook.run(f"import pathlib; print(pathlib.Path('{name}').read_text())").split("\n")[:-2]

    def wait_for_sums(count: int) -> None:
        wait_for(
            lambda: len(read_lines()) >= count,
            lambda: f"{count} checksums: {notebook.run('%gpu_logs')}",
            120,
            every_s=1,
        )

    wait_for(lambda: "seen.txt" in notebook.run("!ls"), lambda: f"it trains: {notebook.run('%gpu_logs')}", 120)
    wait_for_sums(3)
    [gpu] = [gpu for gpu in product.gpus() if gpu["state"] == "held"]
    uuid, total = gpu["uuid"], gpu["memory_mib"]
    for number in range(len(product.gpus()) - 1):
        start(("ben", "eve")[number % 2], "gpu")
    for cycle in range(int(os.environ.get("GPUHUB_TEST_SUSPENSIONS", "2"))):
        time.sleep(random.uniform(0, 3))
        other = start("eve", "gpu")
        assert other.uuids() == {uuid}
        assert read_job_suspension(ada) in ("suspended", "resuming"), list_detached(ada)[0]
        moved_mib = list_detached(ada)[0]["lease"]["suspension"]["moved_mib"]
        assert moved_mib > TRAINING_MIB
        before = read_lines()
        fill = f"import torch; held = torch.ones({int(total * 0.85)} << 20, dtype=torch.uint8, device='cuda'); print(held[-1].item())"
        assert "1" in other.run(fill)
        time.sleep(2)
        assert read_lines() == before
        begin = time.monotonic()
        eve.stop(other.server)
        wait_for_sums(len(before) + 2)
        print(f"cycle {cycle}: {moved_mib} MiB, went on {time.monotonic() - begin:.1f} s after the other stopped")
        wait_for(lambda: read_job_suspension(ada) is None, "it has its GPU", 30)
        assert next(one["holder"]["owner"] for one in product.gpus() if one["uuid"] == uuid) == "ada"
    notebook.run("!touch enough")
    [job] = wait_for(
        lambda: [job for job in list_detached(ada)[:1] if job["ended_at"]],
        lambda: f"the job has ended: {list_detached(ada)}",
        60,
    )
    assert job["exit_code"] == 0, (job, notebook.run("%gpu_logs"))
    assert job["preemptions"] == 0
    *sums, last = read_lines()
    found = TRAINED_ON.fullmatch(last)
    assert found, last
    assert f"GPU-{found[1]}" == uuid
    notebook.run("!rm enough")
    model = gpu["model"]
    output = notebook.run(f"%gpu_launch --model '{model}' --cpus 4 --ram 16G training.py whole.txt {20 * len(sums)}")
    *whole, _ = read_lines("whole.txt")
    assert sums == whole, (output, next(pair for pair in zip(sums, whole, strict=False) if pair[0] != pair[1]))
    print(f"{len(sums)} checksums are equal")


def test_out_of_memory_names_rank_and_gpu(product: Gpus, start: Start) -> None:
    """The message has the rank, what was asked for and what the card has; the GPUs are released."""
    notebook = start("ada", "cpu")
    notebook.run(OUT_OF_MEMORY)
    output = notebook.kernel.run("%gpu_launch large.py")
    assert re.search(r"rank 0 .*ran out of GPU memory: asked for 16384\.00 GiB", output), output


def test_shares_of_one_gpu(product: Gpus, start: Start) -> None:
    """Two notebooks with a quarter each are on one GPU, and each has a quarter of its memory."""
    shares = [start(name, "quarter") for name in ("ada", "ben")]
    assert shares[0].uuids() == shares[1].uuids()
    [uuid] = shares[0].uuids()
    total = next(gpu["memory_mib"] for gpu in product.gpus() if gpu["uuid"] == uuid)
    too_much = f"torch.empty({total // 3} << 20, dtype=torch.uint8, device='cuda')"
    fits = f"torch.empty({total // 6} << 20, dtype=torch.uint8, device='cuda')"
    for notebook in shares:
        assert "OutOfMemoryError" in notebook.kernel.run(f"import torch; x = {too_much}")
        assert "Traceback" not in notebook.run(f"x = {fits}; print(x.numel())")


@contextmanager
def stranger(uuid: str) -> Iterator[None]:
    """A process on this machine, not started by gpuhub, that holds memory of a GPU."""
    code = "import torch, sys; x = torch.zeros(1 << 28, device='cuda'); print('ready', flush=True); sys.stdin.read()"
    python = os.environ.get("GPUHUB_TEST_TORCH_PYTHON", sys.executable)
    process = subprocess.Popen(
        [python, "-c", code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": uuid},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def test_gpu_that_a_stranger_uses_is_not_given(product: Gpus, start: Start) -> None:
    """It is shown as used from outside; requests get the others; it is free again when the process has ended."""
    local = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    here = [uuid for uuid in product.states() if uuid in local]
    assert here, "this test needs a GPU in the machine that runs it"
    with stranger(here[0]):
        wait_for(lambda: product.states()[here[0]] == "outside", lambda: f"seen as outside: {product.gpus()}", 60)
        if len(product.states()) > 1:
            assert here[0] not in start("ada", "gpu").uuids()
    wait_for(lambda: product.states()[here[0]] != "outside", "the GPU is free again", 60)


def test_interrupted_launch_releases_its_gpus(product: Gpus, start: Start) -> None:
    """An interrupt ends the ranks, and `keep` over, the GPUs are free."""
    notebook = start("ada", "cpu")
    notebook.run(
        "%%writefile busy.py\nimport torch\nx = torch.ones(4096, 4096, device='cuda')\nprint('busy', flush=True)\nwhile True: x = x @ x * 1e-4"
    )
    cell = notebook.kernel.begin(f"%gpu_launch --nnodes {len(count_gpus(product))} busy.py")
    messages = notebook.kernel.messages(cell)
    for text in messages:
        if "busy" in text:
            break
    notebook.interrupt(product.address)
    rest = "".join(messages)
    assert "interrupt" in rest.lower(), rest


def test_wild_write_of_a_user_is_counted_and_blocks_nothing(product: Gpus, start: Start) -> None:
    """The driver's Xid error is shown for this GPU and no other, and the GPU computes on."""
    notebook = start("ada", "gpu")
    [uuid] = notebook.uuids()
    output = notebook.run(WILD_WRITE)
    # CUDA_ERROR_ILLEGAL_ADDRESS
    assert "ended with 700" in output, output
    errors = wait_for(
        lambda: product.metrics().list("gpuhub_gpu_xid_errors_total", UUID=uuid),
        lambda: f"the Xid error is counted: {product.run_in_agent(product.cluster.nodes[0].name, 'nvidia-smi')}",
        30,
    )
    # An exception of the graphics engine, or a fault of its memory unit: both are errors of the user's program.
    assert {error["xid"] for error in errors} <= {"13", "31"}, errors
    metrics = product.metrics()
    assert metrics.value("DCGM_FI_DEV_XID_ERRORS", UUID=uuid) in (13, 31)
    others = set(product.states()) - {uuid}
    assert all(metrics.value("DCGM_FI_DEV_XID_ERRORS", UUID=other) == 0 for other in others)
    assert not metrics.list("gpuhub_gpu_fault")
    assert product.states()[uuid] == "held"
    assert "sum 9.0" in notebook.run(ADD_IN_NEW_PROCESS)


def test_drained_node_takes_no_work(product: Gpus, start: Start) -> None:
    """New work goes elsewhere or waits; after `undrain` the node takes work again."""
    node = product.cluster.nodes[0].name
    gpuhub("node", "drain", node)
    try:
        wait_for(lambda: all(gpu["state"] == "unavailable" for gpu in product.gpus() if gpu["node"] == node), "drained")
        if len(product.cluster.nodes) > 1:
            notebook = start("ada", "gpu")
            [uuid] = notebook.uuids()
            assert next(gpu["node"] for gpu in product.gpus() if gpu["uuid"] == uuid) != node
    finally:
        gpuhub("node", "undrain", node)


def test_notebook_computes_on_while_the_broker_restarts(product: Gpus, start: Start) -> None:
    """The lease, the GPU and the tensors on it stay, and nobody else gets the GPU."""
    notebook = start("ada", "gpu")
    [uuid] = notebook.uuids()
    notebook.run("import torch; x = torch.arange(10, device='cuda')")
    supervisor = Supervisor(Paths(INSTANCE))
    broker = supervisor.pid("broker")
    os.kill(broker, signal.SIGKILL)
    wait_for(lambda: supervisor.pid("broker") not in (0, broker), "the broker runs again", 60)
    wait_for(
        lambda: product.users["eve"].ask(product.users["eve"].broker, "GET", "/cluster")[0] == 200, "it answers", 60
    )
    wait_for(lambda: product.states().get(uuid) == "held", "the GPU is held as before", 60)
    assert "45" in notebook.run("print(x.sum().item())")
    assert notebook.uuids() == {uuid}


def test_validate_passes(product: Gpus, tmp_path: Path) -> None:
    """Every check holds: each GPU alone and all at once, the network, and torch over all nodes, on the driver's GPUs."""
    product.wait_free()
    file = tmp_path / "report.json"
    gpuhub("validate", "--cluster-file", product.file, "--user", "ada", "--json", file)
    report = json.loads(file.read_text())
    assert report["is_simulated"] is False
    assert {gpu["uuid"] for node in report["nodes"] for gpu in node["gpus"]} == set(product.states())


def test_nothing_is_left(product: Gpus) -> None:
    """No container of a user, and no process on any GPU."""
    product.wait_free()
    for node in product.cluster.nodes:
        found = product.containers(node.name)
        assert not [name for name in found if name.startswith((f"{INSTANCE}-nb-", f"{INSTANCE}-job-"))], found
    assert all((gpu["memory_used_mib"] or 0) < 1024 for gpu in product.gpus()), product.gpus()
