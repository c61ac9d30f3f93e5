"""Nodes with four GPUs each, on the practice closet `lab`: the profiles, launches with several ranks in a node, and
another closet afterwards.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest

from gpuhub_closet import layouts
from tests.support import product as support
from tests.support.hub.browser import INSTANCE, Product
from tests.support.hub.kernel_client import Kernel, open_kernel
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

SERVER = "several"
REDUCE = """%%writefile reduce.py
import os, subprocess, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
seen = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines())
print("sum", int(total), "rank", dist.get_rank(), "local", os.environ["LOCAL_RANK"], "on", os.environ["GPUHUB_NODE"], "sees", seen)
dist.destroy_process_group()
"""


@dataclass(frozen=True, kw_only=True)
class Notebook:
    """A user's notebook with one kernel."""

    user: Client
    kernel: Kernel

    def held(self, owner: str) -> dict[str, str]:
        """Return the node of each GPU that a user holds."""
        return {gpu["uuid"]: gpu["node"] for gpu in self.user.gpus() if (gpu["holder"] or {}).get("owner") == owner}


@pytest.fixture
def start(product: Product) -> Iterator[Callable[[str, str], Notebook]]:
    """Return a function that starts a user's notebook with a profile; all stop at the end, and their GPUs are free."""
    with ExitStack() as stack:
        observer = stack.enter_context(closing(log_in(product.address, "ada", product.password)))
        stack.callback(wait_for, lambda: {gpu["state"] for gpu in observer.gpus()} == {"free"}, "all GPUs are free", 90)

        def start_one(name: str, profile: str) -> Notebook:
            user = stack.enter_context(closing(log_in(product.address, name, product.password)))
            user.start(SERVER, profile)
            stack.callback(user.stop, SERVER)
            wait_for(lambda: user.is_ready(SERVER), f"{name}'s notebook is ready", deadline_s=120)
            kernel = stack.enter_context(open_kernel(product.address.removeprefix("http://"), user, SERVER))
            return Notebook(user=user, kernel=kernel)

        yield start_one


def test_lab_has_twelve_gpus_in_three_nodes(product: Product, start: Callable[[str, str], Notebook]) -> None:
    """`make up CLOSET=lab` says so, and the broker sees them."""
    assert "Practice closet (no cluster.toml): rig1, rig2, rig3" in product.up_output
    notebook = start("ada", "cpu")
    assert Counter(gpu["node"] for gpu in notebook.user.gpus()) == {"rig1": 4, "rig2": 4, "rig3": 4}
    assert {gpu["model"] for gpu in notebook.user.gpus()} == {"A100-SXM4-80GB"}


def test_profile_has_all_gpus_of_one_node(start: Callable[[str, str], Notebook]) -> None:
    """Four in one node for the first user, and one in another node for the second; each sees its own only."""
    ada, ben = start("ada", "a100x4"), start("ben", "a100")
    for notebook, owner, count in ((ada, "ada", 4), (ben, "ben", 1)):
        held = notebook.held(owner)
        assert (len(held), len(set(held.values()))) == (count, 1)
        listed = notebook.kernel.run("!nvidia-smi -L")
        assert set(re.findall(r"GPU-[0-9a-f-]{36}", listed)) == set(held)
    assert not set(ada.held("ada").values()) & set(ben.held("ben").values())


@pytest.mark.parametrize(("nodes", "each"), [(1, 4), (3, 2)])
def test_launch_with_several_ranks_in_a_node(start: Callable[[str, str], Notebook], nodes: int, each: int) -> None:
    """The ranks' sum is right; each node's ranks are numbered from 0, and see that many GPUs."""
    notebook, ranks = start("ada", "cpu"), nodes * each
    notebook.kernel.run(REDUCE)
    output = notebook.kernel.run(f"%gpu_launch --nnodes {nodes} --nproc-per-node {each} reduce.py")
    found = re.findall(r"sum (\d+) rank (\d+) local (\d+) on (\w+) sees (\d+)", output)
    assert {int(total) for total, *_ in found} == {ranks * (ranks + 1) // 2}, output
    assert sorted(int(rank) for _, rank, *_ in found) == list(range(ranks)), output
    assert {int(seen) for *_, seen in found} == {each}, output
    for node in {node for *_, node, _ in found}:
        assert sorted(int(local) for _, _, local, on, _ in found if on == node) == list(range(each)), output
    assert len({node for *_, node, _ in found}) == nodes, output


def test_launch_beside_another_user_gets_what_is_left_of_nodes(start: Callable[[str, str], Notebook]) -> None:
    """With a GPU of one node taken, four in a node are there on the two others only."""
    ada, ben = start("ada", "a100"), start("ben", "cpu")
    [taken] = ada.held("ada").values()
    ben.kernel.run(REDUCE)
    output = ben.kernel.run("%gpu_launch --nnodes 2 --nproc-per-node 4 reduce.py")
    assert set(re.findall(r"local \d on (\w+)", output)) == {"rig1", "rig2", "rig3"} - {taken}, output


def test_more_gpus_than_a_node_has_are_refused(start: Callable[[str, str], Notebook]) -> None:
    """The error has the number that a node has, and nothing is taken."""
    notebook = start("ada", "cpu")
    notebook.kernel.run(REDUCE)
    output = notebook.kernel.run("%gpu_launch --nproc-per-node 5 reduce.py")
    assert "no node of the cluster has 5 GPUs. Use --nproc-per-node 4 or less." in output, output
    assert not notebook.held("ada")


def test_another_closet_has_its_own_gpus(product: Product) -> None:
    """It cannot start while this one runs; after `make down` it does, without a GPU of this one, and is kept."""
    with pytest.raises(AssertionError, match=r"runs with CLOSET=lab: `sudo make down` first"):
        support.run_make(INSTANCE, "up", closet="practice")
    support.run_make(INSTANCE, "down")
    try:
        support.run_make(INSTANCE, "up", closet="practice")
        with closing(log_in(product.address, "ada", product.password)) as user:
            gpus = user.gpus()
        assert {gpu["model"]: gpu["state"] for gpu in gpus} == dict.fromkeys(
            ("RTX 5090", "RTX 5070", "RTX 5060"), "free"
        )
        assert layouts.find_layout(product.paths) == "practice"
    finally:
        support.run_make(INSTANCE, "down")
