"""The main workflow: two users, one GPU that both need, a launch over three nodes, and restarts in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from gpuhub.web.lab_assets import FIRST_FILES
from tests.support.golden import check_golden
from tests.support.hub.browser import Product, User, gpuhub, run_make
from tests.support.product import join_columns, wait_for

NOTEBOOK = "gpuhub-examples/01-first-launch.ipynb"
LAST_LINE = ".jp-OutputArea-output:has-text('all three ranks agree')"
ERROR = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']"


@pytest.fixture(scope="module")
def ada(make_user: Callable[[str], User]) -> User:
    """The first user."""
    return make_user("ada")


@pytest.fixture(scope="module")
def ben(make_user: Callable[[str], User]) -> User:
    """The second user."""
    return make_user("ben")


def test_up_prints_what_users_need(product: Product):
    """`make up` prints the address, who can log in, that the GPUs are simulated, and how to stop."""
    for expected in (product.address, "ada, ben", "simulated", "training runs on the CPU", "sudo make down"):
        assert expected in product.up_output


def test_up_again_changes_nothing(product: Product):
    """A second `make up` restarts no process; `make bench BENCH=setup` measures it."""
    before = {name: product.supervisor.pid(name) for name in product.supervisor.states()}
    run_make("up")
    assert {name: product.supervisor.pid(name) for name in product.supervisor.states()} == before


def test_doctor_finds_no_failure(product: Product):
    """The doctor finds no failure on the running closet and lists what runs there."""
    report = gpuhub("doctor", "--cluster-file", str(product.paths.closet_cluster_file))
    assert "✓ services proxy, broker, hub run" in join_columns(report)
    assert join_columns(report).count("✓ filter in place") == len(product.cluster.nodes)
    assert "✗" not in report


def test_form_shows_free_gpus(ada: User):
    """The first user sees three free GPUs, and the first profile that can start is selected."""
    ada.open_form()
    ada.picture("spawn-form-free")
    assert ada.holders() == {}
    expect(ada.page.locator("input[name=profile]:checked")).to_have_count(1)
    for model in ("RTX 5090", "RTX 5070", "RTX 5060"):
        expect(ada.page.locator(".gpuhub-card", has_text=model).first).to_contain_text("1 of 1 free")


def test_a_wrong_profile_is_refused_before_anything_starts(ada: User):
    """An unknown profile is refused with the list of profiles, and no lease is requested."""
    token = next(c["value"] for c in ada.page.context.cookies() if c["name"] == "_xsrf")
    answer = ada.page.request.post(
        f"{ada.address}/hub/api/users/ada/server",
        data=json.dumps({"profile": "rtx9090"}),
        headers={"X-XSRFToken": token, "Content-Type": "application/json"},
    )
    assert answer.status == 400
    assert "rtx9090" in answer.text()
    assert "rtx5090" in answer.text()
    assert ada.holders() == {}


def test_first_user_gets_the_gpu(ada: User):
    """Choosing the RTX 5090 leads to JupyterLab on the node that has it."""
    ada.open_form()
    ada.choose("rtx5090")
    ada.wait_for_lab()
    expect(ada.page.locator(".gpuhub-status")).to_have_text(re.compile(r"^RTX 5090 · (\d+/)?32 GB"))
    ada.page.locator("[data-id=gpuhub-panel]").click()
    expect(ada.page.locator("#gpuhub-panel .gpuhub-own")).to_contain_text("you (notebook)")
    ada.picture("lab")
    ada.page.locator("[data-id=gpuhub-panel]").click()
    assert ada.holders() == {"RTX 5090": "ada"}


def test_browser_keeps_jupyterlab(ada: User):
    """JupyterLab's files come from the hub, those of its start are fetched while it starts, and none a second time."""
    ada.page.reload()
    ada.wait_for_lab()
    script = "performance.getEntriesByType('resource').map(entry => [entry.name, entry.transferSize])"
    sizes = {url.removeprefix(ada.address): size for url, size in ada.page.evaluate(script)}
    own = [path for path in sizes if path.startswith("/user/") and urlsplit(path).path.endswith(".js")]
    shared = {
        urlsplit(path).path.rpartition("/")[2]: sizes[path] for path in sizes if path.startswith("/hub/gpuhub/lab/")
    }
    assert own == []
    assert len(shared) > 30
    assert {name: size for name, size in shared.items() if size} == {}
    # Those of extensions are in folders of their own.
    files = [urlsplit(path).path.removeprefix("/hub/gpuhub/lab/").partition("/")[2] for path in sizes]
    scripts = sorted(name for name in files if name.endswith(".js") and "/" not in name)
    # After a change of the lock, GPUHUB_UPDATE_GOLDEN=1 writes the list again.
    check_golden("\n".join(scripts) + "\n", FIRST_FILES)


def test_one_launcher_opens_and_none_beside_a_file(ada: User):
    """An empty JupyterLab has one launcher; the address of a file opens the file alone."""
    ada.page.wait_for_timeout(2000)  # JupyterLab itself would have opened its launcher by then
    assert ada.page.locator(".jp-Launcher").count() == 1
    ada.page.goto(f"{ada.address}/user/ada/lab/workspaces/file/tree/{NOTEBOOK}")
    ada.page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    ada.page.wait_for_timeout(2000)
    assert ada.page.locator(".jp-Launcher").count() == 0


def test_first_launch_notebook_runs_to_its_end(ada: User):
    """`01-first-launch.ipynb` runs over three nodes; afterwards only the user's own GPU is leased."""
    ada.page.goto(f"{ada.address}/user/ada/lab/tree/{NOTEBOOK}")
    ada.page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
    wait_for(lambda: ada.fetch("/user/ada/api/kernels"), "a kernel for the notebook", deadline_s=60)
    run_all_cells(ada)
    held: set[str] = set()

    def finished() -> bool:
        held.update(ada.holders())
        return ada.page.locator(LAST_LINE).count() > 0 or ada.page.locator(ERROR).count() > 0

    wait_for(finished, "the notebook runs to its end", deadline_s=240)
    ada.picture("notebook-end")
    text = saved_outputs(ada)
    ada.page.locator(".jp-OutputArea-output", has_text="I am rank").first.scroll_into_view_if_needed()
    # JupyterLab renders cells when they scroll into view.
    expect(ada.page.locator(".jp-OutputArea-output", has_text="I am rank").first).to_be_in_viewport()
    ada.page.mouse.wheel(0, -10)
    ada.page.wait_for_timeout(1000)
    ada.picture("launch")
    assert "all three ranks agree, and the network has learned" in text
    for rank in range(3):
        assert re.search(rf"I am rank {rank} of 3 on \S+; the sum over all ranks is 6", text), text[-3000:]
    assert {"rank 0", "rank 1", "rank 2"} == set(re.findall(r"^(rank \d) on rig\d: weights", text, re.MULTILINE))
    assert len(set(re.findall(r"^rank \d on (rig\d): weights", text, re.MULTILINE))) == 3
    assert held == {"RTX 5090", "RTX 5070", "RTX 5060"}, "the launch held GPUs on other nodes while it ran"
    wait_for(lambda: ada.holders() == {"RTX 5090": "ada"}, "the launch's GPUs are free again")


def test_recipes_are_on_a_page_of_jupyterlab(ada: User):
    """The notebook's own gpu-launch lists and checks them, and a mistake is said before a GPU is asked for."""
    ada.page.locator("[data-id=gpuhub-panel]").click()
    ada.page.locator("#gpuhub-panel").get_by_role("button", name="Recipes…").click()
    form = ada.page.locator(".gpuhub-recipes").get_by_role("form", name="Recipe evaluate")
    # gpu-launch starts in the container for the first time.
    expect(form).to_be_visible(timeout=60_000)
    form.get_by_label("model", exact=True).fill("lab/no-such-model")
    form.get_by_label("data", exact=True).fill("~/no-such-data")
    form.get_by_role("button", name="Check Only").click()
    expect(form.get_by_role("status")).to_contain_text("lab/no-such-model", timeout=60_000)
    ada.picture("lab-recipes")
    tab = ada.page.locator(".lm-TabBar-tab", has_text="Recipes")
    tab.locator(".lm-TabBar-tabCloseIcon").click()
    expect(tab).to_have_count(0)
    ada.page.locator("[data-id=gpuhub-panel]").click()
    assert ada.holders() == {"RTX 5090": "ada"}


def test_second_user_sees_the_owner_and_queues(ada: User, ben: User):
    """The second user sees the owner of the RTX 5090's lease, queues for it, and sees the position."""
    ben.open_form()
    card = ben.page.locator(".gpuhub-card", has_text="RTX 5090").first
    expect(card).to_contain_text("ada")
    expect(card).to_contain_text("0 of 1 free")
    expect(ben.page.locator("#gpuhub-rtx5090")).not_to_be_checked()
    ben.picture("spawn-form-held")
    ben.choose("rtx5090")
    ben.page.wait_for_url("**/hub/spawn-pending/ben**", timeout=30_000)
    expect(ben.page.locator("#progress-message")).to_contain_text(
        re.compile(r"position 1", re.IGNORECASE), timeout=30_000
    )
    ben.picture("queue")
    assert [(entry["owner"], entry["position"]) for entry in ada.cluster()["queue"]] == [("ben", 1)]


def test_restart_of_hub_and_broker_ends_no_notebook(product: Product, ada: User, ben: User):
    """After kill -9 of hub and broker the notebook keeps running, and the queued request keeps its place."""
    before = ada.cluster()["queue"][0]["lease"]
    kernels = ada.fetch("/user/ada/api/kernels")
    killed = {name: product.supervisor.pid(name) for name in ("hub", "broker")}
    for pid in killed.values():
        os.kill(pid, signal.SIGKILL)
    wait_for(
        lambda: all(product.supervisor.pid(name) not in (0, old) for name, old in killed.items()),
        "supervisord starts both again",
    )

    def is_back() -> bool:
        answer = ada.page.request.get(f"{ada.address}/hub/gpuhub/cluster")
        return answer.ok and answer.json()["cluster"] is not None

    wait_for(is_back, "hub and broker answer again", deadline_s=60)
    assert [kernel["id"] for kernel in ada.fetch("/user/ada/api/kernels")] == [kernel["id"] for kernel in kernels]
    assert ada.holders() == {"RTX 5090": "ada"}
    assert [(entry["owner"], entry["lease"]) for entry in ada.cluster()["queue"]] == [("ben", before)]


def test_second_user_gets_the_gpu_when_the_first_stops(ada: User, ben: User):
    """When the first user stops, the second one's request becomes a notebook."""
    ada.click_stop()
    wait_for(lambda: ada.holders().get("RTX 5090") == "ben", "ben holds the 5090", deadline_s=60)
    # The page that was open when hub and broker were killed has continued without a click.
    ben.wait_for_lab(deadline_s=90)
    assert ada.holders() == {"RTX 5090": "ben"}


def test_every_gpu_is_free_at_the_end(ben: User):
    """After the last stop every GPU is free, and no page had a script error."""
    ben.click_stop()
    wait_for(lambda: ben.holders() == {}, "every GPU is free")
    assert ben.errors == []


def run_all_cells(user: User) -> None:
    """Run all cells through JupyterLab's menu, which does nothing before the notebook's kernel is connected."""
    user.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=60_000)
    user.page.click("text=Run >> nth=0")
    user.page.click("text=Run All Cells >> nth=0")


def saved_outputs(user: User) -> str:
    """Return the output of the notebook's cells from the file that JupyterLab saves."""
    path = f"/user/{user.name}/api/contents/{NOTEBOOK}"
    before = user.fetch(f"{path}?content=0")["last_modified"]
    user.page.keyboard.press("Control+s")
    wait_for(lambda: user.fetch(f"{path}?content=0")["last_modified"] != before, "Lab saves the notebook")
    texts = []
    # Jupyter Server empties the file before it writes, and reads an empty file as a notebook without cells.
    for cell in wait_for(lambda: user.fetch(path)["content"]["cells"], "the notebook is written"):
        for output in cell.get("outputs", []):
            texts.append("".join(output.get("text", "")))
            texts.append("".join(output.get("data", {}).get("text/plain", "")))
            texts.append(f"{output.get('ename', '')} {output.get('evalue', '')}".strip())
    return "\n".join(texts)
