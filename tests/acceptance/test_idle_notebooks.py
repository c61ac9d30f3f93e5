"""An idle notebook in a real JupyterLab: its owner is warned, keeps it, works in it, and later it goes to who waits.

And one that is suspended: its GPU goes to who waits, its variables stay, and its next cell waits for the GPU. And a
scavenging job, which is suspended in the same manner.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest
import tomlkit
from playwright.sync_api import Page, expect

from gpuhub_closet.paths import node_paths
from tests.support.closet import practice_closet
from tests.support.hub.browser import PICTURES, Product, User
from tests.support.product import wait_for

NOTEBOOK = "idle.ipynb"
#: Short, but each longer than the culler's and the reports' intervals.
STOP_AFTER_S, WARNING_S, KEEP_S = 70, 45, 50
LIMITS = {
    "stop_after": f"{STOP_AFTER_S}s",
    "warn_before": f"{WARNING_S}s",
    "keep": f"{KEEP_S}s",
    "longest_keep": f"{KEEP_S}s",
}
#: Longer than the time after which an idle notebook would have been stopped.
LONG_CELL = f"import time; time.sleep({STOP_AFTER_S + 20}); print('still', 'here')"
#: A profile whose notebooks are suspended instead, and the memory that one has on its GPU.
SUSPENDED, MODEL, SUSPEND_AFTER_S, USED_MIB = "rtx5070", "RTX 5070", 15, 2048
#: The simulated driver counts a process that has loaded the CUDA driver, and that the test names, as one that uses CUDA.
BEGIN = "import ctypes, os\ndriver = ctypes.CDLL('libcuda.so.1')\nanswer = 40\nprint('kernel', os.getpid())"
#: A job that counts, and has loaded the CUDA driver, until its user's folder `counting` has a file `enough`.
COUNTING = """
import ctypes, pathlib, time
driver = ctypes.CDLL("libcuda.so.1")
folder, counted = pathlib.Path.home() / "counting", 0
while not (folder / "enough").exists():
    counted += 1
    (folder / "counted").write_text(str(counted))
    time.sleep(0.1)
"""
WAITING = ".Toastify__toast:has-text('its cells wait')"
WARNING = ".Toastify__toast:has-text('will be stopped in')"
TIMEOUT_MS = 2 * (STOP_AFTER_S + 30) * 1000
pytestmark = pytest.mark.backend("builtin")


@pytest.fixture(scope="module")
def limits(product: Product) -> Iterator[None]:
    """The closet with short times for idle notebooks; at the end with its own settings again."""
    file = product.paths.closet_cluster_file
    before = file.read_text(encoding="utf-8")
    settings = {**tomlkit.parse(before).unwrap(), "idle": LIMITS}
    settings["scheduling"] = settings.get("scheduling", {}) | {"preemption": True, "suspend_scavengers": True}
    [profile] = [one for one in settings["profiles"] if one["name"] == SUSPENDED]
    profile["idle"] = {"stop_after": "0s", "suspend_after": f"{SUSPEND_AFTER_S}s"}
    product.restart(tomlkit.dumps(settings))
    yield
    product.restart(before)
    # JupyterLab would open this module's notebook again for the tests that follow.
    shutil.rmtree(product.paths.state / "homes" / "ada" / ".jupyter" / "lab" / "workspaces", ignore_errors=True)


@pytest.fixture(scope="module")
def ada(product: Product, limits: None, make_user: Callable[[str], User]) -> User:
    """The owner of a notebook with the RTX 5090, in JupyterLab."""
    ada = make_user("ada")
    ada.open_form()
    ada.choose("rtx5090")
    ada.wait_for_lab()
    return ada


@pytest.fixture(scope="module")
def ben(ada: User, make_user: Callable[[str], User]) -> User:
    """A user who waits for ada's GPU."""
    ben = make_user("ben")
    ben.open_form()
    ben.choose("rtx5090")
    ben.page.wait_for_url("**/hub/spawn-pending/ben**", timeout=30_000)
    return ben


def open_notebook(user: User) -> None:
    """Make a notebook file and open it, with a kernel that waits for its first cell."""
    token = next(c["value"] for c in user.page.context.cookies() if c["name"] == "_xsrf" and "/user/" in c["path"])
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
    content = {"cells": [], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    answer = user.page.request.put(
        f"{user.address}/user/{user.name}/api/contents/{NOTEBOOK}",
        data=json.dumps({"type": "notebook", "content": content}),
        headers={"X-XSRFToken": token, "Content-Type": "application/json"},
    )
    assert answer.ok, answer.text()
    user.page.goto(f"{user.address}/user/{user.name}/lab/tree/{NOTEBOOK}")
    idle = user.page.get_by_role("button", name="Python 3 (ipykernel) | Idle")
    expect(idle).to_be_visible(timeout=60_000)


def run_cell(user: User, code: str) -> None:
    """Write a cell at the end of the notebook, run it, and save the file, so that no automatic save follows."""
    cell = user.page.locator(".jp-Notebook .jp-CodeCell .cm-content").last
    cell.fill(code)
    cell.press("Shift+Enter")
    user.page.keyboard.press("Control+s")


def open_page(user: User, path: str) -> Page:
    """Open a page of the hub beside JupyterLab."""
    page = user.page.context.new_page()
    page.goto(f"{user.address}{path}")
    return page


def test_owner_is_warned_in_lab_and_at_the_hub(product: Product, ada: User, ben: User) -> None:
    """A countdown with a button in JupyterLab and on the hub's pages, and others who wait see that nobody uses the GPU."""
    open_notebook(ada)
    run_cell(ada, "print('kept', 'variables')")
    expect(ada.page.locator(".jp-OutputArea-output", has_text="kept variables")).to_be_visible(timeout=60_000)
    warning = ada.page.locator(WARNING)
    expect(warning).to_be_visible(timeout=TIMEOUT_MS)
    expect(warning).to_contain_text(re.compile(r"No activity for \d+ s\. This notebook will be stopped in 0:\d\d min"))
    expect(warning.get_by_role("button", name=f"Keep for {KEEP_S} s")).to_be_visible()
    ada.page.wait_for_timeout(1500)  # it slides in
    ada.picture("idle-lab")
    for path, name in (("/hub/home", "idle-home"), ("/hub/gpus", "idle-gpus"), ("/hub/token", "idle-token")):
        page = open_page(ada, path)
        notice = page.locator("#gpuhub-idle .alert")
        expect(notice).to_contain_text(
            re.compile(r"Your notebook with RTX 5090: no activity for .* stopped in 0:\d\d min")
        )
        expect(notice.get_by_role("button")).to_contain_text("Keep for")
        page.screenshot(path=PICTURES / f"{name}.png")
        page.close()
    others = open_page(ben, "/hub/gpus")
    # Shown after the time that the warning lasts.
    expect(others.locator(".gpuhub-idle")).to_contain_text("not used since", timeout=WARNING_S * 1000)
    expect(others.locator("#gpuhub-idle .alert")).to_have_count(0)
    others.screenshot(path=PICTURES / "idle-others.png")
    others.close()


def test_owner_keeps_it_once(ada: User) -> None:
    """The button moves the end and says until when; the next warning has no button, since the limit is reached."""
    ada.page.locator(WARNING).get_by_role("button", name="Keep for").click()
    expect(ada.page.locator(".Toastify__toast:has-text('is kept until')")).to_be_visible()
    ada.picture("idle-kept")
    warning = ada.page.locator(WARNING)
    without_button = warning.filter(has_not=ada.page.get_by_role("button", name="Keep for"))
    expect(without_button).to_have_count(1, timeout=TIMEOUT_MS)
    # The first one may still be sliding away.
    expect(warning).to_have_count(1)


def test_a_running_cell_survives(ada: User) -> None:
    """A cell that is started in the countdown ends it, and runs to its end, however long."""
    run_cell(ada, LONG_CELL)
    warning, address = ada.page.locator(WARNING), f"{ada.address}/user/{ada.name}/gpuhub/idle"
    wait_for(
        lambda: warning.count() == 0,
        lambda: f"{warning.all_inner_texts()} go; the server has {ada.page.request.get(address).text()}",
    )
    output = ada.page.locator(".jp-OutputArea-output", has_text="still here")
    expect(output).to_be_visible(timeout=(STOP_AFTER_S + 60) * 1000)
    assert ada.holders()["RTX 5090"] == "ada"
    # JupyterLab would save the output some time later by itself, and a saved file is activity.
    ada.page.keyboard.press("Control+s")


def test_idle_gpu_goes_to_who_waits(product: Product, ada: User, ben: User) -> None:
    """Nobody keeps it: the GPU is granted to ben, and ada's pages and the audit log have the reason; files are kept."""
    expect(ada.page.locator(WARNING)).to_be_visible(timeout=TIMEOUT_MS)
    wait_for(lambda: ben.holders().get("RTX 5090") == "ben", "the GPU is granted to ben", deadline_s=120)
    home = open_page(ada, "/hub/home")
    expect(home.locator("#gpuhub-idle .alert-info")).to_contain_text(
        re.compile(r"Your notebook \(RTX 5090 on rig\d\): stopped after .* without activity; files are kept\.")
    )
    home.screenshot(path=PICTURES / "idle-stopped.png")
    home.close()
    lines = (product.paths.log / "audit.log").read_text(encoding="utf-8").splitlines()
    *_, line = [found for found in map(json.loads, lines) if found["action"] == "POST /reclaims"]
    assert (line["who"], line["owner"], line["outcome"]) == ("gpuhub-idle-culler", "ada", "done")
    assert "without activity" in line["reason"]
    ben.wait_for_lab()
    wait_for(lambda: ada.fetch("/hub/api/users/ada")["servers"] == {}, "ada's server has stopped")
    assert (product.paths.state / "homes" / "ada" / NOTEBOOK).exists()
    ben.click_stop()
    wait_for(lambda: ben.holders() == {}, "every GPU is free")


@pytest.fixture(scope="module")
def node(product: Product, ada: User) -> Iterator[str]:
    """The node of ada's notebook that is suspended, where the driver lists its kernel."""
    ada.open_form()
    ada.choose(SUSPENDED)
    ada.wait_for_lab()
    open_notebook(ada)
    run_cell(ada, BEGIN)
    expect(ada.page.locator(".jp-OutputArea-output", has_text="kernel")).to_be_visible(timeout=60_000)
    [node] = [one["name"] for one in ada.cluster()["nodes"] if any(gpu["model"] == MODEL for gpu in one["gpus"])]
    pid = find_process(product, node)
    practice_closet.set_load(product.paths, node, 0, 0, USED_MIB, processes=((pid, USED_MIB - 48),))
    yield node
    practice_closet.set_load(product.paths, node, 0, 0, 0)
    ada.click_stop()


@contextmanager
def find_container(product: Product, node: str, kind: str = "notebook") -> Iterator[Any]:
    """Yield the container of ada's notebook, or of her job (kind `worker`)."""
    with closing(docker.DockerClient(base_url=node_paths(product.paths, node).docker_url, version="auto")) as client:
        [container] = client.containers.list(filters={"label": [f"gpuhub.kind={kind}", "gpuhub.owner=ada"]})
        yield container


def find_process(product: Product, node: str, kind: str = "notebook") -> int:
    """Return the number, on its node, of the process in ada's container that has loaded the CUDA driver."""
    with find_container(product, node, kind) as container:
        found = [
            read_numbers(folder)[-2]
            for folder in Path("/proc").iterdir()
            if folder.name.isdecimal()
            and container.id in read(folder / "cgroup")
            and "libcuda.so" in read(folder / "maps")
        ]
    [pid] = found
    return pid


def read_numbers(folder: Path) -> list[int]:
    """Return the numbers of a process: on this machine, on its node, and in its container."""
    [line] = [line for line in read(folder / "status").splitlines() if line.startswith("NSpid:")]
    return [int(number) for number in line.split()[1:]]


def read(file: Path) -> str:
    """Return the text of a file of /proc; empty for a process that has ended."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def read_live(product: Product, node: str) -> str:
    return (node_paths(product.paths, node).gpus / "0" / "live").read_text()


def read_mounts(product: Product, node: str) -> str:
    with find_container(product, node) as container:
        return str(container.exec_run(["cat", "/proc/self/mountinfo"]).output.decode())


def read_memory_limit(product: Product, node: str) -> int:
    with find_container(product, node) as container:
        return int(container.attrs["HostConfig"]["Memory"])


def test_suspended_gpu_goes_to_who_waits(product: Product, ada: User, ben: User, node: str) -> None:
    """Ben gets the GPU; ada's notebook runs on, its device is hidden, and Lab and the page say where its variables are."""
    before = read_memory_limit(product, node)
    ben.open_form()
    ben.choose(SUSPENDED)
    ben.wait_for_lab()
    assert ben.holders()["RTX 5070"] == "ben"
    # His own notebook would lend it as well if no cell ran.
    open_notebook(ben)
    run_cell(ben, "import time; time.sleep(900)")
    live = read_live(product, node)
    assert re.search(rf"^moved \d+ {USED_MIB - 48}$", live, re.MULTILINE), live
    assert re.search(r" /null /dev/nvidia0 ", read_mounts(product, node))
    with find_container(product, node) as container:
        refused = container.exec_run(["umount", "/dev/nvidia0"])
    assert refused.exit_code != 0, refused.output
    assert re.search(r" /null /dev/nvidia0 ", read_mounts(product, node))
    assert read_memory_limit(product, node) > before + (USED_MIB - 48) * 1024**2
    status = ada.page.locator(".gpuhub-status")
    expect(status).to_contain_text("RTX 5070 · suspended", timeout=20_000)
    page = open_page(ada, "/hub/gpus")
    expect(page.locator(".gpuhub-lease")).to_contain_text(
        re.compile(r"suspended for .* of GPU memory are kept in host memory")
    )
    page.screenshot(path=PICTURES / "suspended-gpus.png")
    page.close()
    ada.picture("suspended-lab")


def test_a_cell_waits_for_the_gpu_and_finds_its_variables(product: Product, ada: User, ben: User, node: str) -> None:
    """The cell waits and says for whom; when ben stops, the same GPU comes back, and the cell runs."""
    run_cell(ada, "print('the answer is', answer + 2)")
    expect(ada.page.locator(WAITING)).to_contain_text("number 1 in the queue", timeout=30_000)
    ada.page.wait_for_timeout(1500)  # it slides in
    ada.picture("suspended-waiting")
    answer = ada.page.locator(".jp-OutputArea-output", has_text="the answer is")
    expect(answer).to_have_count(0)
    ben.click_stop()
    expect(answer).to_contain_text("the answer is 42", timeout=90_000)
    expect(ada.page.locator(WAITING)).to_have_count(0, timeout=20_000)
    assert ada.holders()["RTX 5070"] == "ada"
    live = read_live(product, node)
    assert re.search(rf"^process \d+ {USED_MIB - 48}$", live, re.MULTILINE), live
    assert "moved" not in live
    assert "/dev/nvidia0" not in read_mounts(product, node)


def test_owner_lends_it_by_hand(product: Product, ada: User, node: str) -> None:
    """*Suspend* on the page frees the GPU at once, and *Resume* brings it back."""
    page = open_page(ada, "/hub/gpus")
    page.get_by_role("button", name="Suspend your notebook").click()
    page.get_by_role("button", name="Suspend", exact=True).last.click()
    wait_for(lambda: "RTX 5070" not in ada.holders(), "the GPU is free")
    resume = page.get_by_role("button", name="Resume your notebook")
    expect(resume).to_be_visible(timeout=30_000)
    resume.click()
    page.get_by_role("button", name="Resume", exact=True).last.click()
    wait_for(lambda: ada.holders().get("RTX 5070") == "ada", "the notebook has its GPU")
    expect(page.get_by_role("button", name="Suspend your notebook")).to_be_visible(timeout=60_000)
    page.close()
    assert re.search(r"^process ", read_live(product, node), re.MULTILINE)


def test_a_scavenging_job_is_suspended_and_continues(product: Product, ada: User, ben: User, node: str) -> None:
    """Ben's notebook gets the GPU of ada's job at once; when he stops, the job counts on where it was."""
    folder = product.paths.state / "homes" / "ada" / "counting"
    run_cell(ada, "!mkdir -p counting")
    run_cell(ada, f"%%writefile counting/count.py{COUNTING}")
    run_cell(ada, "!cd counting && gpu-launch run --detach --scavenge --model 'RTX 5090' count.py")
    wait_for((folder / "counted").exists, "the job counts", 120)
    place = next(one["name"] for one in ada.cluster()["nodes"] if any(g["model"] == "RTX 5090" for g in one["gpus"]))
    pid = find_process(product, place, "worker")
    practice_closet.set_load(product.paths, place, 0, 0, USED_MIB, processes=((pid, USED_MIB - 48),))
    ben.open_form()
    ben.choose("rtx5090")
    ben.wait_for_lab()
    assert ben.holders()["RTX 5090"] == "ben"
    live = read_live(product, place)
    assert re.search(rf"^moved {pid} {USED_MIB - 48}$", live, re.MULTILINE), live
    page = open_page(ada, "/hub/gpus")
    job = page.locator("[data-key^=job-]", has_text="count.py")
    expect(job).to_contain_text("suspended", timeout=30_000)
    expect(job).to_contain_text("which others use: number 1 in the queue")
    expect(page.get_by_role("button", name="Leave the queue")).to_have_count(0)
    page.screenshot(path=PICTURES / "suspended-job.png")
    page.close()
    before = int((folder / "counted").read_text())
    ben.click_stop()
    wait_for(lambda: f"process {pid}" in read_live(product, place), "its memory is back", 60)
    (folder / "enough").touch()
    practice_closet.set_load(product.paths, place, 0, 0, 0)
    wait_for(lambda: "RTX 5090" not in ada.holders(), "the job has ended", 60)
    assert int((folder / "counted").read_text()) > before > 0
