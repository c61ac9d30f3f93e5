"""The live page of all GPUs in headless Chromium, with the real proxy, hub and broker on simulated nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.broker.bench import build_bench
from tests.support.docker.simulated_nodes import wait_until
from tests.support.hub.pages import check_accessibility, start_job, take_picture
from tests.support.hub.simulated_hub import SimulatedHub, simulated_hub

pytestmark = [pytest.mark.browser, pytest.mark.root]
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHub]:
    """A hub where ada has a notebook and a job, and ben waits."""
    with simulated_hub("ghlive", tmp_path_factory.mktemp("hub"), 18500) as started:
        started.make_tokens("ada", "ben", "root1")
        yield started


@pytest.fixture
def open_page(browser: Browser, hub: SimulatedHub, sessions: dict[str, Any]) -> Iterator[Callable[..., Page]]:
    """Open the page of all GPUs as a user, in a browser context of its own."""
    pages: list[Page] = []

    def open_one(name: str, **options: Any) -> Page:
        page = browser.new_context(storage_state=sessions[name], **options).new_page()
        pages.append(page)
        page.on("pageerror", lambda error: pytest.fail(f"the page's script failed: {error}"))
        page.goto(f"{hub.url}/hub/gpus")
        expect(page.locator("#gpuhub-connection")).to_have_text("live")
        return page

    yield open_one
    for page in pages:
        page.context.close()


@pytest.fixture
def ada(open_page: Callable[..., Page]) -> Page:
    return open_page("ada")


@pytest.fixture
def admin(open_page: Callable[..., Page]) -> Page:
    return open_page("root1")


@pytest.fixture(autouse=True)
def clean(hub: SimulatedHub) -> Iterator[None]:
    """End all leases and cordons after each test."""
    yield
    for lease in hub.send("GET", "/leases", "root1"):
        method = f"/jobs/{lease['subject']}" if lease["purpose"] == "job" else f"/leases/{lease['id']}"
        hub.send("DELETE", method, "root1")
    for node in hub.send("GET", "/nodes"):
        if node["state"] != "up":
            hub.send("POST", f"/nodes/{node['name']}/undrain", "root1")
    wait_until(lambda: not hub.send("GET", "/leases", "root1"), "no lease is left")


def part(page: Page, name: str) -> Any:
    return page.locator(f"[data-gpuhub-part={name}]")


def test_changes_appear_without_polling(hub: SimulatedHub, ada: Page) -> None:
    """Grants, the queue and ends of others and of the user; the browser sends no request for them."""
    asked: list[str] = []
    ada.on("request", lambda request: asked.append(request.url))
    hub.request_notebook("ben", "rtx5090")
    expect(ada.locator("[data-node-name=rig1]")).to_contain_text("held by ben")
    expect(part(ada, "totals")).to_contain_text("2 of 3 GPUs free")
    lease = hub.request_notebook("ada", "rtx5090")
    expect(part(ada, "queue")).to_contain_text("ada waits for profile rtx5090")
    [held] = hub.send("GET", "/leases", "ben")
    hub.send("DELETE", f"/leases/{held['id']}", "ben")
    expect(part(ada, "queue")).to_be_empty()
    expect(part(ada, "own").locator(f"[data-key=lease-{lease['id']}]")).to_contain_text("3 h 59 min left")
    assert asked == []


def test_other_users_see_names_and_nothing_else(hub: SimulatedHub, open_page: Callable[..., Page]) -> None:
    """Ben's stream has the holder of ada's GPU, but neither her lease nor her job's buttons."""
    lease = hub.request_notebook("ada", "rtx5090")
    job = start_job(hub)
    page = open_page("ben")
    expect(page.locator("[data-node-name=rig1]")).to_contain_text("held by ada")
    text = page.evaluate("""async () => (await fetch("/hub/gpuhub/stream?for_s=0")).text()""")
    assert "held by <strong>ada" in text
    assert lease["id"] not in text
    assert job["id"] not in text


def test_a_job_is_followed_and_cancelled(hub: SimulatedHub, ada: Page) -> None:
    """Its output comes line by line, its countdown runs, and it ends after a confirmation."""
    job = start_job(hub)
    entry = ada.locator(f"[data-key=job-{job['id']}]")
    expect(entry.locator(".badge")).to_have_text("running")
    folder = hub.running.setting.home("ada") / ".gpu_launch" / "jobs" / job["run_id"]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.log"
    log.write_bytes(b"loss 4.2 <b>\n")
    entry.locator("details[data-output] summary").click()
    expect(entry.locator("pre")).to_have_text("loss 4.2 <b>\n")
    with log.open("ab") as file:
        file.write(b"10 %\r99 %\r\n\x1b[32mloss 3.1\x1b[0m\n")
    expect(entry.locator("pre")).to_have_text("loss 4.2 <b>\n99 %\nloss 3.1\n")
    # Changes elsewhere leave it as it is.
    hub.request_notebook("ben", "cpu")
    hub.request_notebook("ada", "any", "second")
    expect(part(ada, "own")).to_contain_text("second")
    expect(entry.locator("pre")).to_contain_text("loss 3.1")
    check_accessibility(ada)
    entry.get_by_role("button", name="Cancel").click()
    dialog = ada.get_by_role("dialog")
    take_picture(ada, "gpus-live-output")
    expect(dialog).to_contain_text("Cancel train.py?")
    dialog.get_by_role("button", name="Cancel the job").click()
    expect(dialog).to_be_hidden()
    expect(entry.locator(".badge")).to_have_text("ended")
    expect(entry).to_contain_text("complete")
    expect(ada.locator("#gpuhub-announcer")).to_contain_text("Your job train.py has ended: stopped.")


def test_keyboard_alone_extends_a_lease(hub: SimulatedHub, ada: Page) -> None:
    """The focus stays where it is while the page changes around it, and returns after the dialog."""
    lease = hub.request_notebook("ada", "rtx5090")
    button = ada.locator(f"[data-key=extend-{lease['id']}]")
    button.wait_for()
    for _ in range(60):
        ada.keyboard.press("Tab")
        if button.evaluate("element => element === document.activeElement"):
            break
    expect(button).to_be_focused()
    hub.request_notebook("ada", "cpu", "second")
    expect(part(ada, "own")).to_contain_text("second")
    expect(button).to_be_focused()
    ada.keyboard.press("Enter")
    expect(ada.get_by_role("dialog")).to_be_visible()
    for key in ("Tab", "Tab", "Enter"):
        ada.keyboard.press(key)
    expect(ada.get_by_role("dialog")).to_be_hidden()
    assert hub.send("GET", f"/leases/{lease['id']}")["expires_at"] > lease["expires_at"]
    expect(button).to_be_focused()
    hub.send("DELETE", f"/leases/{lease['id']}")
    expect(button).to_have_count(0)
    # What had the focus is gone, and the keyboard continues at its part of the page.
    expect(part(ada, "own")).to_be_focused()


def extend(page: Page, what: str, choice: str) -> Any:
    """Ask for more time in the dialog of a node's leases, and return the dialog."""
    page.locator("[data-node-name=rig1]").get_by_role("button", name="Leases on rig1").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name=f"Extend ada's {what} on rig1").click()
    expect(dialog.get_by_role("heading")).to_have_text(f"Extend ada's {what} on rig1")
    dialog.get_by_label("Time from now until it ends").select_option(choice)
    dialog.get_by_role("button", name="Extend", exact=True).click()
    return dialog


def test_administrator_extends_what_other_users_run(hub: SimulatedHub, admin: Page, ada: Page) -> None:
    """A notebook and a job; never beyond a limit, which the dialog names; no choice would end it sooner."""
    notebook = hub.request_notebook("ada", "rtx5090")
    dialog = extend(admin, "notebook", "8 hours")
    expect(dialog.get_by_role("alert")).to_contain_text("at most 4 h from now")
    assert dialog.get_by_role("option").all_text_contents() == ["4 hours", "8 hours", "12 hours", "24 hours"]
    dialog.get_by_role("combobox").select_option("4 hours")
    dialog.get_by_role("button", name="Extend", exact=True).click()
    expect(dialog).to_be_hidden()
    assert hub.send("GET", f"/leases/{notebook['id']}")["expires_at"] > notebook["expires_at"]
    hub.send("DELETE", f"/leases/{notebook['id']}")
    start_job(hub, models=["RTX 5090"], time_limit_s=3000)
    expect(part(ada, "jobs")).to_contain_text("49 min left")
    expect(extend(admin, "job", "12 hours")).to_be_hidden()
    expect(part(ada, "jobs")).to_contain_text("11 h 59 min left")


def test_administrator_stops_and_drains_after_a_confirmation(hub: SimulatedHub, admin: Page, ada: Page) -> None:
    """Leases of a node with their owners; a drained node is shown to all at once."""
    hub.request_notebook("ada", "rtx5090")
    # A notebook that ends before her page has shown it is not announced.
    expect(ada.locator("[data-gpuhub-part=own]")).to_contain_text("RTX 5090")
    node = admin.locator("[data-node-name=rig1]")
    node.get_by_role("button", name="Leases on rig1").click()
    dialog = admin.get_by_role("dialog")
    expect(dialog).to_contain_text("ada")
    check_accessibility(admin)
    take_picture(admin, "gpus-live-leases")
    dialog.get_by_role("button", name="Stop ada's notebook on rig1").click()
    expect(dialog).to_contain_text("Stop ada's notebook on rig1?")
    expect(dialog.get_by_role("button", name="Close")).to_be_focused()
    dialog.get_by_role("button", name="Stop", exact=True).click()
    expect(ada.locator("#gpuhub-announcer")).to_contain_text("Your notebook has ended.")
    node.get_by_role("button", name="Drain rig1").click()
    dialog.get_by_label("Reason").fill("new fan")
    dialog.get_by_role("button", name="Drain rig1").click()
    expect(ada.locator("[data-node-name=rig1]")).to_contain_text("new fan")
    node.get_by_role("button", name="Uncordon rig1").click()
    dialog.get_by_role("button", name="Uncordon").click()
    expect(ada.locator("[data-node-name=rig1] .badge")).to_have_text("up")


def test_administrator_sets_limits_of_a_user(hub: SimulatedHub, admin: Page, ada: Page) -> None:
    """They count at once, are marked with who set them and why, and an empty form gives cluster.toml's back."""
    hub.request_notebook("ada", "rtx5090")
    table = part(admin, "all_usage")
    table.locator("summary").click()
    row = table.get_by_role("row", name="ada")
    row.get_by_role("button", name="Limits of ada").click()
    dialog = admin.get_by_role("dialog")
    expect(dialog).to_contain_text("Limits of ada")
    expect(dialog.get_by_label("Requests waiting")).to_have_attribute("placeholder", "now 16")
    dialog.get_by_label("GPUs at once").fill("3")
    dialog.get_by_label("Longest time").fill("1.5")
    dialog.get_by_label("Reason").fill("a paper")
    check_accessibility(admin)
    take_picture(admin, "gpus-live-limits")
    dialog.get_by_role("button", name="Set limits").click()
    expect(row.locator(".badge")).to_have_text("own limits")
    expect(row.locator(".badge")).to_have_attribute("title", "Set by root1: a paper")
    expect(part(ada, "own")).to_contain_text("1 of 3")
    own_limits = "Limits of your own: GPUs at once 3, longest lease 1 h 30 min. Set by root1: a paper"
    expect(part(ada, "own")).to_contain_text(own_limits)
    check_accessibility(ada)
    take_picture(ada, "gpus-live-own-limits")
    row.get_by_role("button", name="Limits of ada").click()
    expect(dialog.get_by_label("Longest time")).to_have_value("1.5")
    dialog.get_by_label("GPUs at once").fill("0.5")
    dialog.get_by_role("button", name="Set limits").click()
    expect(dialog).to_be_visible()
    dialog.get_by_label("GPUs at once").fill("")
    dialog.get_by_label("Longest time").fill("")
    dialog.get_by_role("button", name="Set limits").click()
    expect(row.locator(".badge")).to_have_count(0)
    expect(part(ada, "own")).not_to_contain_text("1 of 3")


def test_page_recovers_from_an_interruption(hub: SimulatedHub, ada: Page) -> None:
    """While it is away, a notice; afterwards the page has what happened in the meantime."""
    hub.served.end("proxy")
    try:
        expect(ada.locator("#gpuhub-connection")).to_contain_text("not live", timeout=60_000)
        expect(ada.locator(".gpuhub-stale")).to_have_count(1)
        hub.request_notebook("ben", "rtx5090")
    finally:
        hub.served.begin("proxy")
        hub.served.wait_ready()
    expect(ada.locator("[data-node-name=rig1]")).to_contain_text("held by ben", timeout=60_000)
    expect(ada.locator("#gpuhub-connection")).to_have_text("live")
    expect(ada.locator(".gpuhub-stale")).to_have_count(0)


def test_number_of_streams_is_limited(hub: SimulatedHub, ada: Page) -> None:
    """A page above the limit says so; those that a browser has left are free again."""
    cookies = {cookie["name"]: cookie["value"] for cookie in ada.context.cookies(f"{hub.url}/hub/")}
    with httpx.Client(base_url=f"{hub.url}/hub", cookies=cookies, timeout=20, trust_env=False) as client:
        opened = [client.send(client.build_request("GET", "/gpuhub/stream"), stream=True) for _ in range(5)]
        refused = client.get("/gpuhub/stream")
        assert "event: refused" in refused.text
        assert "You have 6 pages open, which is the limit." in refused.text
        for answer in opened:
            answer.close()
        wait_until(lambda: "event: update" in client.get("/gpuhub/stream?for_s=0").text, "the streams are free")


def test_page_needs_no_inline_script_or_style(hub: SimulatedHub, ada: Page) -> None:
    """Our part of the page works under a Content-Security-Policy that forbids them."""
    own = ada.locator(".gpuhub-page")
    assert own.locator("script, style, [style], [onclick]").count() == 0
    script = ada.locator("script[type=module]").get_attribute("src")
    assert script is not None
    answer = httpx.get(f"{hub.url}{script}", trust_env=False)
    assert answer.headers["Content-Type"].startswith("text/javascript")
    assert "immutable" in answer.headers["Cache-Control"]


def test_error_of_the_api_leads_to_its_explanation(hub: SimulatedHub, browser: Browser) -> None:
    """Without a login, and in the dark."""
    problem = hub.send("GET", "/jobs/unknown", status=404)
    page = browser.new_page(color_scheme="dark")
    page.goto(hub.url + problem["type"])
    heading = page.get_by_role("heading", name="You have no … (not-found)")
    expect(heading).to_be_in_viewport()
    assert page.evaluate("[...document.styleSheets].every((sheet) => sheet.cssRules.length > 0)")
    check_accessibility(page)
    take_picture(page, "troubleshooting")
    page.close()


def test_figures_of_the_bench_appear_with_their_nodes(admin: Page, hub: SimulatedHub) -> None:
    """Without loading the page again, and for the nodes that were measured."""
    node = admin.get_by_role("article", name="Node rig1")
    expect(node).not_to_contain_text("measured")
    hub.send("PUT", "/bench", "root1", json=build_bench())
    expect(node).to_contain_text("measured 61.2 TFLOP/s, 2.4 Gbit/s with another node")
    expect(admin.get_by_role("article", name="Node rig3")).not_to_contain_text("measured")
    take_picture(admin, "gpus-bench")
    admin.set_viewport_size({"width": 390, "height": 844})
    take_picture(admin, "gpus-bench-phone")
