"""The practice closet with this machine's own GPUs in one of its nodes: `make test-gpu-closet REAL_GPU=rig2`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from gpuhub.common.gpu import shorten_model
from gpuhub.common.paths import Paths
from gpuhub_closet import layouts
from gpuhub_closet.topology import ClosetPlan
from tests.gpus.conftest import INSTANCE, REAL_GPU, Gpus, RunningNotebook, run_nvidia_smi

Start = Callable[[str, str], RunningNotebook]

COMPUTE = """import torch
left, right = torch.randn(512, 512), torch.randn(512, 512)
product = (left.cuda() @ right.cuda()).cpu()
print("on", torch.cuda.get_device_name(), "of", torch.cuda.device_count(), "deviation", (product - left @ right).abs().max().item())
"""
#: Adds up the ranks' numbers, with the backend that most scripts choose.
REDUCE = """%%writefile reduce.py
import torch, torch.distributed as dist
has_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if has_gpu else "gloo")
total = torch.full((1 << 16,), dist.get_rank() + 1.0, device="cuda" if has_gpu else "cpu")
dist.all_reduce(total)
print("sum", int(total[-1].item()), "by", dist.get_backend(), "on", total.device.type, flush=True)
dist.destroy_process_group()
"""
#: DistributedDataParallel over gloo: each rank computes on what its node has.
MIXED = """%%writefile mixed.py
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
for step in range(3):
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(32, 64).to(device)).square().mean().backward()
    with torch.no_grad():
        for value in model.parameters():
            value -= 0.1 * value.grad
            value.grad = None
sums = [None] * dist.get_world_size()
dist.all_gather_object(sums, sum(value.double().sum().item() for value in model.parameters()))
print("rank on", device.type, "differs by", max(sums) - min(sums), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def plan(product: Gpus) -> ClosetPlan:
    """The closet as it runs."""
    return layouts.find_plan(Paths(INSTANCE))


def find_profile(product: Gpus, model: str) -> str:
    """Return the profile with one whole GPU of a model."""
    return next(
        profile.name
        for profile in product.cluster.profiles
        if (profile.gpu_model, profile.gpu_count, profile.gpu_share) == (model, 1, 1)
    )


def test_broker_shows_the_gpus_of_nvidia_smi_on_the_node(product: Gpus, plan: ClosetPlan) -> None:
    """With their UUIDs, models and memory; the other nodes have their simulated ones."""
    product.wait_free()
    lines = run_nvidia_smi("--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits")
    real = {tuple(line.split(", ")) for line in lines}
    seen = {gpu["uuid"]: gpu for gpu in product.gpus() if gpu["node"] == REAL_GPU}
    assert {(uuid, shorten_model(name), int(mib)) for uuid, name, mib in real} == {
        (uuid, gpu["model"], gpu["memory_mib"]) for uuid, gpu in seen.items()
    }
    simulated = {uuid for node in plan.nodes for uuid in plan.gpu_uuids(node)}
    assert {gpu["uuid"] for gpu in product.gpus() if gpu["node"] != REAL_GPU} == simulated


def test_notebook_on_the_node_computes_on_its_real_gpu(product: Gpus, plan: ClosetPlan, start: Start) -> None:
    """nvidia-smi shows the GPU that is leased and no other one; CUDA computes on it what the CPU computes."""
    model = plan.node(REAL_GPU).real_gpus[0].model
    notebook = start("ada", find_profile(product, model))
    [uuid] = notebook.uuids()
    assert [gpu["state"] for gpu in product.gpus() if gpu["uuid"] == uuid and gpu["node"] == REAL_GPU] == ["held"]
    assert "simulated" not in notebook.run("!nvidia-smi")
    found = re.search(r"on (.+) of (\d+) deviation ([0-9.e-]+)", output := notebook.run(COMPUTE))
    assert found, output
    assert (shorten_model(found[1]), found[2]) == (model, "1")
    assert float(found[3]) < 0.05, output


def test_notebook_on_another_node_has_its_simulated_gpu(product: Gpus, plan: ClosetPlan, start: Start) -> None:
    """And no CUDA, while another user computes on the real one."""
    node = next(node for node in plan.nodes if node.name != REAL_GPU)
    start("ben", find_profile(product, plan.node(REAL_GPU).real_gpus[0].model)).run(COMPUTE)
    notebook = start("ada", find_profile(product, node.gpus[0].model))
    [uuid] = notebook.uuids()
    assert uuid in {uuid for node in plan.nodes for uuid in plan.gpu_uuids(node)}
    assert "simulated" in notebook.run("!nvidia-smi")
    seen = notebook.run(
        "import torch, warnings; warnings.simplefilter('ignore'); print('CUDA', torch.cuda.is_available())"
    )
    assert "CUDA False" in seen


def test_launch_over_both_kinds_computes_on_the_cpu(plan: ClosetPlan, start: Start) -> None:
    """With the backend that scripts choose by themselves; on the real GPU alone it is NCCL."""
    ranks = len(plan.nodes)
    notebook = start("ada", "cpu")
    notebook.run(REDUCE)
    output = notebook.run(f"%gpu_launch --nnodes {ranks} reduce.py")
    assert f"those of {REAL_GPU} are real" in output
    assert set(re.findall(r"sum \d+ by \w+ on \w+", output)) == {f"sum {ranks * (ranks + 1) // 2} by gloo on cpu"}
    notebook.run("%gpu_release")
    output = notebook.run(f"%gpu_launch --model '{plan.node(REAL_GPU).real_gpus[0].model}' reduce.py")
    assert "sum 1 by nccl on cuda" in output


def test_ranks_on_both_kinds_of_gpus_train_over_gloo(plan: ClosetPlan, start: Start) -> None:
    """Where the user wants it: the real GPU computes with CUDA, and all ranks end with the same weights."""
    notebook = start("ada", "cpu")
    notebook.run(MIXED)
    notebook.run("%env CUDA_VISIBLE_DEVICES=0")
    output = notebook.run(f"%gpu_launch --nnodes {len(plan.nodes)} mixed.py")
    ranks = re.findall(r"rank on (\w+) differs by ([0-9.e-]+)", output)
    assert {device for device, _ in ranks} == {"cuda", "cpu"}, output
    assert all(float(difference) < 1e-4 for _, difference in ranks), output
