"""The course of `notebooks/learn`: each lesson runs to its end in a user's notebook, from the copy in the home."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.hub.browser import Product
from tests.support.hub.kernel_client import Kernel, open_kernel
from tests.support.hub.users import Client, log_in
from tests.support.product import ROOT, wait_for

SERVER = "course"
FOLDER = "gpuhub-examples/learn"
#: This lesson asks for a lease of another user.
BROKER_LESSON = "02-from-click-to-lab.ipynb"
#: A command that a lesson asks the learner to type in a terminal of the closet's machine.
POWER = re.compile(r"in a terminal: sudo \.venv/bin/gpuhub-closet power (cut|on) (\w+)")
LESSONS = sorted(path.name for path in (ROOT / "notebooks" / "learn").glob("*.ipynb") if path.name != BROKER_LESSON)


@pytest.fixture(scope="module")
def ada(product: Product) -> Iterator[Client]:
    """A user with a notebook on the RTX 5070."""
    with closing(log_in(product.address, "ada", product.password)) as user:
        user.start(SERVER, "rtx5070")
        wait_for(lambda: user.is_ready(SERVER), "the notebook is ready", deadline_s=120)
        yield user
        user.stop(SERVER)
        wait_for(lambda: {gpu["state"] for gpu in user.gpus()} == {"free"}, "all GPUs are free")


@pytest.mark.parametrize("lesson", LESSONS)
def test_lesson_runs_to_its_end(product: Product, ada: Client, lesson: str) -> None:
    """No cell fails, and the last one prints what is proven; afterwards the user has the notebook's GPU only."""
    run_lesson(product, ada, lesson)


def test_lesson_about_the_broker_is_refused_another_users_lease(product: Product, ada: Client) -> None:
    """The lesson finds a request of another user in the queue, and the broker hides its lease."""
    with waiting_request(product, "ben", "rtx5070") as lease:
        output = run_lesson(product, ada, BROKER_LESSON)
    assert f"a waiting request of another user: {lease}" in output
    assert re.search(r"^404  another user's lease: ", output, re.MULTILINE), output


@contextmanager
def waiting_request(product: Product, name: str, profile: str) -> Iterator[str]:
    """Keep a user's request for a notebook in the queue, and yield the id of its lease."""
    with closing(log_in(product.address, name, product.password)) as user:
        user.start(SERVER, profile)
        try:
            yield wait_for(lambda: find_waiting_lease(user), f"{name} waits in the queue")
        finally:
            user.stop(SERVER)
        wait_for(lambda: not find_waiting_lease(user), f"{name}'s request has left the queue")


def find_waiting_lease(user: Client) -> str:
    """Return the id of the user's lease that waits; empty for none."""
    status, leases = user.ask(user.broker, "GET", "/leases")
    assert status == 200, leases
    return next((str(lease["id"]) for lease in leases if lease["state"] == "requested"), "")


def run_lesson(product: Product, user: Client, lesson: str) -> str:
    """Run a lesson's cells in a kernel of its folder and return their output."""
    path = f"{FOLDER}/{lesson}"
    outputs = []
    with (
        restored_power(product) as cut,
        open_kernel(product.address.removeprefix("http://"), user, SERVER, notebook=path) as kernel,
    ):
        for cell in read_cells(product, user, path):
            outputs.append(run_cell(product, kernel, cell, cut))
            print(outputs[-1])  # pytest shows it where a test fails
            assert not kernel.has_failed, f"{lesson}:\n{cell}"
    proofs = [line for line in outputs[-1].splitlines() if line.startswith(f"Lesson {int(lesson[:2])}: ")]
    assert len(proofs) == 1, outputs[-1]
    wait_for(lambda: count_held_gpus(user) == 1, f"the launches of {lesson} have released their GPUs")
    return "".join(outputs)


def run_cell(product: Product, kernel: Kernel, cell: str, cut: set[str]) -> str:
    """Run a cell and return its output; what it asks for is done in a terminal. `cut` has the nodes without power."""
    output, done = "", set[tuple[str, str]]()
    for text in kernel.messages(kernel.begin(cell)):
        output += text
        for what, node in set(POWER.findall(output)) - done:
            done.add((what, node))
            change_power(product, what, node)
            if what == "cut":
                cut.add(node)
            else:
                cut.discard(node)
    return output


def change_power(product: Product, what: str, node: str) -> None:
    program = Path(sys.executable).with_name("gpuhub-closet")
    subprocess.run([program, "power", "--instance", product.paths.instance, what, node], check=True, timeout=120)


@contextmanager
def restored_power(product: Product) -> Iterator[set[str]]:
    """Yield a set for the nodes that a lesson leaves without power, and give it back: the tests that follow need them."""
    cut: set[str] = set()
    try:
        yield cut
    finally:
        for node in cut:
            change_power(product, "on", node)


def read_cells(product: Product, user: Client, path: str) -> list[str]:
    """Return the code cells of a notebook file in the user's home, which must be the repository's."""
    url = f"{product.address}/user/{user.name}/{SERVER}/api/contents/{path}"
    answer = httpx.get(url, headers={"Authorization": f"token {user.token}"}, trust_env=False, timeout=30)
    answer.raise_for_status()
    copied = [cell["source"] for cell in answer.json()["content"]["cells"] if cell["cell_type"] == "code"]
    file = ROOT / "notebooks" / path.removeprefix("gpuhub-examples/")
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert copied == ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return copied


def count_held_gpus(user: Client) -> int:
    """Return the number of GPUs that the user holds."""
    return sum((gpu["holder"] or {}).get("owner") == user.name for gpu in user.gpus())
