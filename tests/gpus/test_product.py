"""The main job on real GPUs: profiles, launches, shares, strangers' processes, and a restart of the broker.

Every step compares what gpuhub says with what nvidia-smi and CUDA say in the container.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpuhub.common.paths import Paths
from gpuhub.ops.deploy.programs import Supervisor
from tests.gpus.conftest import INSTANCE, Gpus, RunningNotebook, gpuhub
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


def test_standing_ranks_keep_their_tensors(product: Gpus, start: Start) -> None:
    """`%%gpu_ranks` computes on each node's GPU, and its variables are there in the next cell."""
    count = len(count_gpus(product))
    notebook = start("ada", "cpu")
    notebook.run(f"%%gpu_ranks --nnodes {count}\nimport torch\nheld = torch.full((4,), float(rank + 1), device='cuda')")
    output = notebook.run("%%gpu_ranks\nprint('rank', rank, 'has', held.sum().item(), held.device)")
    for rank in range(count):
        assert f"rank {rank} has {4.0 * (rank + 1)} cuda:0" in output
    notebook.run("%gpu_ranks --stop")


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


def test_nothing_is_left(product: Gpus) -> None:
    """No container of a user, and no process on any GPU."""
    product.wait_free()
    for node in product.cluster.nodes:
        found = product.containers(node.name)
        assert not [name for name in found if name.startswith((f"{INSTANCE}-nb-", f"{INSTANCE}-job-"))], found
    assert all((gpu["memory_used_mib"] or 0) < 1024 for gpu in product.gpus()), product.gpus()
