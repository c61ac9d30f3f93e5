"""gpuhub's extension in a real JupyterLab in Chromium, with a real broker."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from playwright.sync_api import Browser, Page, Response, expect

from gpu_launch.common import run_folder
from gpu_launch.recipes import run_record
from gpuhub.config.containers.profiles import ProfileSettings
from gpuhub.config.users.users import UserSettings
from tests.support.broker.in_process import Running, Setting, served_broker
from tests.support.browser.chromium import chromium
from tests.support.docker.simulated_nodes import build_cluster
from tests.support.hub.browser import PICTURES
from tests.support.hub.jupyter_lab import TOKEN, JupyterLab, build_extension, serve_lab, write_notebook
from tests.support.hub.pages import check_accessibility
from tests.support.product import wait_for

pytestmark = pytest.mark.browser
# On two cores JupyterLab needs long for what takes a moment elsewhere.
expect.set_options(timeout=60_000)
NOTEBOOK = "work.ipynb"
RUN = "run-20261123-101112-abcd"
#: Longest wait for JupyterLab's own start, ms.
TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the module."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """The broker's environment: three nodes, and a profile with a time limit."""
    profiles = (
        ProfileSettings(name="rtx5090", title="RTX 5090", gpu_model="RTX 5090", time_limit="4h"),
        ProfileSettings(name="cpu", title="No GPU", gpu_count=0),
    )
    users = UserSettings(allowed=("ada", "ben"))
    setting = Setting(tmp_path_factory.mktemp("broker"))
    setting.cluster = build_cluster(profiles=profiles, users=users)
    return setting


@pytest.fixture(scope="module")
def brokers() -> Iterator[ExitStack]:
    """The running broker, for the test that restarts it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def broker(setting: Setting, brokers: ExitStack) -> Running:
    """A broker that listens."""
    return brokers.enter_context(served_broker(setting))


@pytest.fixture(scope="module")
def lab(broker: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterLab]:
    """The JupyterLab of ada, who has the RTX 5090 for 70 minutes, a job that runs, and one that waits behind ben's."""
    lease = request_lease(broker, "ada", "rtx5090", time_limit_s=70 * 60)
    submit(broker, "ada", run_id=RUN, name="train.py", nnodes=2, nproc_per_node=1)
    request_lease(broker, "ben", "rtx5090")
    environ = {
        "GPUHUB_BROKER_URL": broker.url.removesuffix("/api/v1"),
        "GPUHUB_LEASE": lease["id"],
        "JUPYTERHUB_API_TOKEN": "ada",
        "JUPYTERHUB_USER": "ada",
    }
    with serve_lab(
        tmp_path_factory.mktemp("lab"), build_extension(tmp_path_factory.mktemp("extension")), environ
    ) as lab:
        # What a job's request sends to the home is seen by the notebook too.
        (broker.setting.home("ada") / ".gpu_launch").mkdir()
        (lab.home / ".gpu_launch").symlink_to(broker.setting.home("ada") / ".gpu_launch")
        run = run_folder.create_run(lab.home, RUN)
        run.output.write_text("step 1\nloss 0.25 of the last step\n", encoding="utf-8")
        write_notebook(lab, NOTEBOOK, "x = 1 + 1", "%%time\nx")
        yield lab


@pytest.fixture(scope="module")
def page(lab: JupyterLab, browser: Browser) -> Iterator[Page]:
    """JupyterLab with a notebook, in a browser that reports requests to other servers as failures."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    foreign: list[str] = []
    page.on("request", lambda sent: None if is_own(lab, sent.url) else foreign.append(sent.url))
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    # Chromium drops its requests when this machine gets a network interface, as from tests next to this one.
    lost = page.locator(".jp-Dialog[aria-label*='Server Connection Error']")
    page.add_locator_handler(lost, lambda dialog: dialog.locator(".jp-Dialog-button").last.click())
    page.on("requestfailed", lambda sent: print(f"{sent.url}: {sent.failure}"))
    page.goto(f"{lab.url}/lab/tree/{NOTEBOOK}?token={TOKEN}")
    page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=TIMEOUT_MS)
    yield page
    assert (foreign, errors) == ([], [])


def is_own(lab: JupyterLab, url: str) -> bool:
    """Return whether a request goes to the notebook's server, or nowhere."""
    return url.startswith((lab.url, lab.url.replace("http", "ws"), "data:", "blob:"))


def request_lease(broker: Running, owner: str, profile: str, **options: Any) -> dict[str, Any]:
    """Request a notebook."""
    answer = broker.send("POST", "/api/v1/leases", owner, json={"profile": profile, "key": uuid4().hex, **options})
    assert answer.is_success, answer.text
    return dict(answer.json())


def submit(broker: Running, owner: str, **options: Any) -> None:
    """Submit a detached job."""
    answer = broker.send("POST", "/api/v1/jobs", owner, json={"server": "", "detached": True, **options})
    assert answer.is_success, answer.text


def picture(page: Page, name: str) -> None:
    """Save a screenshot for inspection."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


def choose_for_cell(page: Page, index: int, entry: str) -> None:
    """Choose an entry of a cell's context menu."""
    page.locator(".jp-Notebook .jp-CodeCell").nth(index).click(button="right", position={"x": 200, "y": 10})
    page.locator(".lm-Menu-item", has_text=entry).click()


def list_cells(page: Page) -> list[str]:
    """Return the text of each code cell."""
    cells = page.locator(".jp-Notebook .jp-CodeCell .cm-content")
    return ["\n".join(cell.locator(".cm-line").all_text_contents()) for cell in cells.all()]


def test_status_bar_shows_gpu_memory_and_time(page: Page) -> None:
    """The GPU of the notebook, its memory, and the time that is left, with a button that has a name."""
    status = page.locator(".gpuhub-status")
    expect(status).to_have_text(re.compile(r"^RTX 5090 · 0/32 GB · 1 h (0\d|10) left · Extend$"), timeout=TIMEOUT_MS)
    expect(status.get_by_role("button", name="Extend the time of this notebook")).to_be_visible()


def test_extend_gives_more_time_within_the_limit(page: Page, broker: Running) -> None:
    """The broker's answer is shown: the new end, or the limit that was exceeded."""
    status = page.locator(".gpuhub-status")
    # ben's request for the same card would be a reason to refuse.
    (lease,) = broker.send("GET", "/api/v1/leases", "ben").json()
    broker.send("DELETE", f"/api/v1/leases/{lease['id']}", "ben")
    status.get_by_role("button").click()
    dialog = page.get_by_role("dialog")
    dialog.locator("select").select_option(label="2 h from now")
    picture(page, "lab-extend")
    check_accessibility(page, ".jp-Dialog-body")
    dialog.get_by_role("button", name="Extend").click()
    expect(status).to_contain_text(re.compile(r"(1 h 5\d|2 h 00) left"))
    status.get_by_role("button").click()
    dialog.locator("select").select_option(label="8 h from now")
    dialog.get_by_role("button", name="Extend").click()
    expect(page.locator(".Toastify__toast", has_text="at most 4 h")).to_be_visible()


@pytest.mark.parametrize("place", ["notebook", "file browser"])
def test_notebook_is_shared_by_its_menu(page: Page, broker: Running, lab: JupyterLab, place: str) -> None:
    """The dialog names what is wrong, such as a notebook that is not in the home; then there is the link."""
    copy = broker.setting.home("ada") / NOTEBOOK
    copy.unlink(missing_ok=True)
    dialog = page.get_by_role("dialog")

    def share(viewer: str = "ben") -> None:
        if place == "notebook":
            page.locator(".jp-Notebook .jp-CodeCell").first.click(button="right", position={"x": 200, "y": 10})
        else:
            if not page.locator(".jp-DirListing").is_visible():
                page.get_by_role("tab", name=re.compile("File Browser")).click()
            page.locator(".jp-DirListing-item", has_text=NOTEBOOK).click(button="right")
        page.locator(".lm-Menu-item", has_text="Share Read-Only…").click()
        expect(dialog.get_by_label("User")).to_be_focused()
        page.keyboard.type(viewer)
        if viewer:
            dialog.get_by_label("Time until it ends").select_option("2 hours")
        check_accessibility(page, ".gpuhub-form")
        picture(page, f"lab-share-{place.replace(' ', '-')}")
        dialog.get_by_role("button", name="Share").click()

    for viewer, problem in (("", "Write the name of a user"), ("ben", f"there is no '{NOTEBOOK}' in the home")):
        share(viewer)
        expect(dialog).to_contain_text(problem)
        dialog.get_by_role("button", name="Close").click()
    shutil.copy(lab.home / NOTEBOOK, copy)
    share()
    toast = page.locator(".Toastify__toast", has_text="ben sees work.ipynb at").last
    expect(toast).to_contain_text("/hub/gpuhub/shared-notebook/nb-")
    expect(toast.get_by_role("button", name="Copy link")).to_be_visible()
    picture(page, "lab-shared")
    (shown,) = broker.send("GET", "/api/v1/shares").json()
    assert (shown["notebook"], shown["viewer"]) == (NOTEBOOK, "ben")
    broker.send("DELETE", f"/api/v1/notebooks/{shown['id']}/shares")
    toast.get_by_role("button", name="Copy link").click()


def test_panel_shows_gpus_queue_and_jobs(page: Page, broker: Running) -> None:
    """Who holds which GPU, who waits, and one's own jobs with the end of their output, which can be cancelled."""
    page.locator("[data-id=gpuhub-panel]").click()
    panel = page.get_by_role("region", name="GPUs, queue and jobs")
    expect(panel).to_contain_text("0 of 3 free")
    expect(panel.locator(".gpuhub-row", has_text="RTX 5090")).to_contain_text("you (notebook) until")
    expect(panel.locator(".gpuhub-row", has_text="RTX 5060")).to_contain_text("you (train.py)")
    waiting = request_lease(broker, "ben", "rtx5090")
    expect(panel.get_by_role("listitem").filter(has_text="1. ben: profile rtx5090")).to_be_visible(timeout=30_000)
    output = panel.get_by_role("button", name=f"Output of train.py, {RUN}")
    output.focus()
    page.keyboard.press("Enter")
    expect(output).to_have_attribute("aria-expanded", "true")
    expect(panel.get_by_role("log")).to_contain_text("loss 0.25 of the last step")
    picture(page, "lab-light")
    check_accessibility(page, ".gpuhub-panel", ".gpuhub-status")
    panel.get_by_role("button", name=f"Cancel train.py, {RUN}").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the Job").click()
    expect(panel.locator(".gpuhub-job")).to_contain_text("ended", timeout=30_000)
    broker.send("DELETE", f"/api/v1/leases/{waiting['id']}", "ben")


def test_launch_writes_the_command(page: Page) -> None:
    """The dialog shows the command while it is filled in by keyboard, and writes it into a new cell."""
    page.get_by_role("button", name="Launch on GPUs…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Path of the script")).to_be_focused()
    page.keyboard.type("my train.py")
    dialog.get_by_label("Nodes").fill("2")
    dialog.get_by_label("Model").select_option("RTX 5090")
    line = "%gpu_launch --nnodes 2 --model 'RTX 5090' 'my train.py'"
    expect(dialog.get_by_label("Command")).to_have_text(line)
    picture(page, "lab-launch")
    check_accessibility(page, ".gpuhub-form")
    dialog.get_by_role("button", name="Insert").click()
    wait_for(lambda: list_cells(page) == ["x = 1 + 1", line, "%%time\nx"], lambda: f"the cells are {list_cells(page)}")


def test_cell_runs_on_a_gpu(page: Page, broker: Running) -> None:
    """The command writes `%%gpu` above the cell and runs it, so that the broker gets a request."""
    choose_for_cell(page, 0, "Run This Notebook's Cell on a GPU")
    wait_for(lambda: list_cells(page)[0] == "%%gpu\nx = 1 + 1", lambda: f"the cells are {list_cells(page)}")
    wait_for(
        lambda: "%%gpu" in [job["name"] for job in broker.send("GET", "/api/v1/jobs?ended=true").json()],
        "the cell requests a GPU",
    )
    page.get_by_role("button", name="Interrupt the kernel").click()


def test_cell_with_another_magic_is_left_alone(page: Page) -> None:
    """Only one cell magic can be in the first line."""
    choose_for_cell(page, 2, "Run This Notebook's Cell on a GPU")
    expect(page.locator(".Toastify__toast", has_text="The cell begins with %%time")).to_be_visible()
    assert list_cells(page)[2] == "%%time\nx"


def test_recipe_is_started_from_its_page(page: Page, broker: Running, lab: JupyterLab) -> None:
    """A form with the parameters; what is wrong is said before a job is asked for; then state, curve and result."""
    (lab.home / "models" / "tiny").mkdir(parents=True)
    (lab.home / "models" / "tiny" / "config.json").write_text("{}")
    (lab.home / "texts").mkdir()
    (lab.home / "texts" / "a.txt").write_text("a text")
    page.get_by_role("button", name="Recipes…").click()
    tab = page.locator(".gpuhub-recipes")
    expect(tab.get_by_role("form", name="Recipe evaluate")).to_be_visible()
    tab.get_by_role("button", name="serve").click()
    expect(tab.get_by_role("form", name="Recipe serve")).to_be_visible()
    tab.get_by_role("button", name="finetune").click()
    form = tab.get_by_role("form", name="Recipe finetune")
    form.get_by_label("data", exact=True).fill("~/text")
    form.get_by_role("button", name="Choose model").click()
    dialog = page.get_by_role("dialog")
    dialog.locator(".jp-DirListing-item", has_text="models").dblclick()
    dialog.locator(".jp-DirListing-item", has_text="tiny").click()
    dialog.get_by_role("button", name="Select").click()
    expect(form.get_by_label("model", exact=True)).to_have_value("~/models/tiny")
    form.get_by_label("steps", exact=True).fill("50")
    form.get_by_label("method").select_option("full")
    form.get_by_role("button", name="Check Only").click()
    expect(form.get_by_role("status")).to_contain_text("there is no text in your home")
    form.get_by_label("data", exact=True).fill("~/texts")
    form.get_by_label("GPUs in all").fill("2")
    form.get_by_role("button", name="Check Only").click()
    expect(form.get_by_role("status")).to_contain_text("on each of 2 nodes")
    picture(page, "lab-recipe-form")
    check_accessibility(page, ".gpuhub-recipes")
    form.get_by_role("button", name="Start").click()
    expect(form.get_by_role("status")).to_contain_text(re.compile(r"The job is run-\S+; see below"))
    (job,) = [job for job in broker.send("GET", "/api/v1/jobs").json() if job["name"] == "finetune"]
    assert (job["nnodes"], job["nproc_per_node"], job["detached"]) == (2, 1, True)
    run = tab.get_by_role("listitem", name=f"finetune, {job['run_id']}")
    expect(run).to_be_visible()
    (sent,) = (broker.setting.home("ada") / "gpu-launch").glob("finetune-*")
    folder = lab.home / "gpu-launch" / sent.name
    folder.mkdir(parents=True)
    run_record.draw_curves(folder / "loss.png", {"training": [(0, 4.0), (10, 2.5)]}, x="step", y="loss")
    (folder / "result.json").write_text('{"loss_after": 2.345678, "adapter": "adapter", "best": NaN}')
    expect(run.get_by_role("img", name="Loss of finetune by step")).to_be_visible(timeout=30_000)
    is_loaded = "image => image.complete && image.naturalWidth > 100"
    wait_for(lambda: run.get_by_role("img").evaluate(is_loaded), "the chart is loaded")
    expect(run).to_contain_text("2.3457")
    run.locator("summary").click()
    expect(run).to_contain_text("home/models/tiny")
    picture(page, "lab-recipe-run")
    check_accessibility(page, ".gpuhub-recipes")
    run.get_by_role("button", name="Open Folder").click()
    expect(page.locator(".jp-DirListing-item", has_text="result.json")).to_be_visible()
    run.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the Job").click()
    expect(run).to_contain_text("ended", timeout=30_000)
    # JupyterLab saves which panel is open a while later, and opens that one after a reload.
    with page.expect_response(saves_open_panel, timeout=TIMEOUT_MS):
        page.locator("[data-id=gpuhub-panel]").click()


def saves_open_panel(answer: Response) -> bool:
    """Return whether an answer is that to JupyterLab's saving of a layout in which the panel is open."""
    request = answer.request
    if request.method != "PUT" or "/api/workspaces/" not in request.url:
        return False
    layout = request.post_data_json["data"]["layout-restorer:data"]
    return any(layout.get(side, {}).get("current") == "gpuhub-panel" for side in ("left", "right"))


def test_dark_theme(page: Page, lab: JupyterLab) -> None:
    """The panel has the theme's colours, and is open again after a reload."""
    themes = "/lab/api/settings/@jupyterlab/apputils-extension:themes"
    assert lab.request("PUT", themes, body={"raw": '{"theme": "JupyterLab Dark"}'}).is_success
    page.reload()
    expect(page.locator("#gpuhub-panel")).to_be_visible()
    expect(page.locator("#gpuhub-panel .gpuhub-job").first).to_be_visible()
    expect(page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    panel = page.locator("#gpuhub-panel")
    brightness = panel.evaluate("node => getComputedStyle(node).backgroundColor.match(/\\d+/g).map(Number)")
    assert max(brightness[:3]) < 80
    picture(page, "lab-dark")
    check_accessibility(page, ".gpuhub-panel", ".gpuhub-status")
    page.get_by_role("button", name="Recipes…").click()
    expect(page.locator(".gpuhub-recipes").get_by_role("form")).to_be_visible()
    picture(page, "lab-recipes-dark")
    check_accessibility(page, ".gpuhub-recipes")


def test_routes_need_a_login_and_check_what_they_get(lab: JupyterLab) -> None:
    """Without the server's token there is nothing; bad requests are refused before the broker is asked."""
    paths = [
        ("GET", "overview"),
        ("POST", "extend"),
        ("DELETE", "jobs/j0"),
        ("GET", f"runs/{RUN}/log"),
        ("POST", "shares"),
        ("GET", "recipes"),
        ("POST", "recipes/finetune"),
        ("GET", "recipe-runs"),
    ]
    for method, path in paths:
        assert lab.request(method, f"/gpuhub/{path}", is_authorized=False).status_code in (401, 403), path
    for body in ({}, [], {"time_limit_s": "60"}, {"time_limit_s": 59}, {"time_limit_s": True}, {"x": "y" * 5000}):
        answer = lab.request("POST", "/gpuhub/extend", body=body)
        assert (answer.status_code, "time_limit_s" in answer.json()["message"]) == (400, True), body
    for body in ({}, [], {"path": "x.ipynb", "viewer": "ben"}, {"path": 1, "viewer": "ben", "for_s": 60}):
        answer = lab.request("POST", "/gpuhub/shares", body=body)
        assert (answer.status_code, "for_s" in answer.json()["message"]) == (400, True), body
    good = {"do": "check", "values": {}, "gpus": None, "model": "", "profile": ""}
    for change in ({"do": "x"}, {"values": []}, {"values": {"a": 1}}, {"gpus": 0}, {"gpus": True}, {"model": "a\nb"}):
        answer = lab.request("POST", "/gpuhub/recipes/finetune", body=good | change)
        assert (answer.status_code, '"do"' in answer.json()["message"]) == (400, True), change
    for name in ("finetun", "finetune.yaml"):
        assert lab.request("POST", f"/gpuhub/recipes/{name}", body=good).status_code == 404
    refused = lab.request("POST", "/gpuhub/recipes/finetune", body=good | {"values": {"epochs": "-1"}})
    assert refused.json()["message"].startswith("epochs='-1': a number from 0.01 to 1000 is needed"), refused.text
    outside = {"path": "/etc/x.ipynb", "viewer": "ben", "for_s": 60}
    assert "not in your home" in lab.request("POST", "/gpuhub/shares", body=outside).json()["message"]
    assert lab.request("DELETE", "/gpuhub/jobs/j0a1b2").status_code == 404
    for path in ("/gpuhub/runs/..%2F..%2Fsecret/log", "/gpuhub/runs/.hidden/log"):
        assert lab.request("GET", path).status_code == 404
    text = lab.request("GET", "/gpuhub/overview").text
    assert '"ada"' not in text.replace('"owner": "ada"', "")


def test_panel_says_that_the_broker_is_away_and_recovers(
    page: Page, broker: Running, brokers: ExitStack, setting: Setting
) -> None:
    """What was known stays, with the reason; it is current again when the broker is back."""
    panel = page.locator("#gpuhub-panel")
    problem = panel.get_by_role("status")
    expect(problem).to_have_text("")
    brokers.close()
    expect(problem).to_contain_text("cannot be reached", timeout=30_000)
    expect(panel).to_contain_text("RTX 5090")
    port = urlsplit(broker.url).port
    assert port is not None
    brokers.enter_context(served_broker(setting, port=port))
    expect(problem).to_have_text("", timeout=60_000)


def test_each_problem_of_a_gpu_is_shown_once(page: Page) -> None:
    """The server's answer is given by the test: no GPU here has a problem."""
    problem = "GPU 0 (RTX 5090) of rig1: Xid 79, it has fallen off the bus: reset the GPU or restart the node"
    page.route("**/gpuhub/idle*", lambda route: route.fulfill(json={"idle": None, "gpu_problems": [problem]}))
    notice = page.locator(".Toastify__toast", has_text="Xid 79")
    expect(notice).to_be_visible()
    with page.expect_response("**/gpuhub/idle*", timeout=TIMEOUT_MS):
        pass
    assert notice.count() == 1
    page.unroute("**/gpuhub/idle*")
