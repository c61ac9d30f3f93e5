"""The page of a shared job in headless Chromium, with the real proxy, hub and broker on simulated nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.support.hub.pages import check_accessibility, start_job, take_picture
from tests.support.hub.simulated_hub import SimulatedHub, simulated_hub

pytestmark = [pytest.mark.browser, pytest.mark.root]
SCRIPT = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>"
TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHub]:
    """A hub with the users ada, ben and root1."""
    with simulated_hub("ghshare", tmp_path_factory.mktemp("hub"), 18560) as started:
        started.make_tokens("ada", "ben", "root1")
        yield started


@pytest.fixture(autouse=True)
def clean(hub: SimulatedHub) -> Iterator[None]:
    """End all jobs and shares after each test."""
    yield
    for job in hub.send("GET", "/jobs", "root1"):
        hub.send("DELETE", f"/jobs/{job['id']}/shares", job["owner"])
        hub.send("DELETE", f"/jobs/{job['id']}", "root1")


def open_shared(hub: SimulatedHub, context: BrowserContext, job: Any) -> Page:
    page = context.new_page()
    page.on("pageerror", lambda error: pytest.fail(f"the page's script failed: {error}"))
    page.goto(f"{hub.url}/hub/gpuhub/shared/{job['id']}")
    return page


def write(hub: SimulatedHub, job: Any, text: str) -> None:
    folder: Path = hub.running.setting.home("ada") / ".gpu_launch" / "jobs" / job["run_id"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.log").open("ab") as log:
        log.write(text.encode())


def share(hub: SimulatedHub, job: Any, viewer: str = "ben") -> None:
    hub.send("PUT", f"/jobs/{job['id']}/shares/{viewer}", json={"for_s": 3600})


def test_viewer_follows_the_output_until_the_owner_ends_it(
    hub: SimulatedHub, contexts: dict[str, BrowserContext]
) -> None:
    """With colours and progress bars, as text; state, GPUs and times; then all of it is gone within a second."""
    job = start_job(hub, name="train.py")
    share(hub, job)
    write(hub, job, f"epoch 1 {SCRIPT}\n\x1b[1;31mloss 4.2\x1b[0m\n")
    page = open_shared(hub, contexts["ben"], job)
    output, facts = page.locator("#gpuhub-shared-output"), page.locator("#gpuhub-shared-job")
    expect(output).to_have_text(f"epoch 1 {SCRIPT}\nloss 4.2\n", timeout=TIMEOUT_MS)
    loss = page.locator("#gpuhub-shared-output span.gpuhub-ansi-fg-1.gpuhub-ansi-bold")
    expect(loss).to_have_text("loss 4.2")
    expect(facts).to_contain_text("running")
    expect(facts).to_contain_text("1 × RTX 50")
    expect(facts).to_contain_text("Started")
    palette = "".join(
        f"\x1b[{code + number}mcolour {code + number}\x1b[0m\n" for code in (30, 40) for number in range(8)
    )
    write(hub, job, palette)
    expect(output).to_contain_text("colour 47")
    check_accessibility(page)
    write(hub, job, "10 %\r\x1b[38;2;255;128;0m99 %\r")
    expect(output).to_contain_text("99 %")
    write(hub, job, "\x1b[48;5;21m100 %\x1b[m\n" + "x" * 50_000 + "\n\x1b]0;title\x07\x1b[2Jdone \x1b[9")
    expect(output).to_contain_text("done")
    text = output.text_content() or ""
    assert "10 %\r" not in text
    assert "title" not in text
    assert "\x1b" not in text
    assert text.count("x" * 10_000) >= 4
    assert page.evaluate("() => [window.stolen, document.querySelectorAll('#gpuhub-shared-output img').length]") == [
        None,
        0,
    ]
    assert page.locator(".gpuhub-page").locator("button, input, textarea, select, form").count() == 0
    write(hub, job, "".join(f"\x1b[3{number % 8}mstep {number}\x1b[0m\n" for number in range(30)))
    expect(output).to_contain_text("step 29")
    take_picture(page, "shared-job")
    at = time.monotonic()
    hub.send("DELETE", f"/jobs/{job['id']}/shares/ben")
    expect(page.locator("#gpuhub-share-end")).to_contain_text("is not shared with ben, or no longer", timeout=2000)
    assert time.monotonic() - at < 1.5
    expect(output).to_be_hidden()
    assert not output.text_content()
    take_picture(page, "shared-job-ended")
    page.reload()
    expect(page.locator("body")).to_contain_text("is not shared with ben, or no longer")


def test_page_is_for_viewers_and_the_owner_alone(hub: SimulatedHub, contexts: dict[str, BrowserContext]) -> None:
    """Others get the hub's error page, also administrators; without a session it leads to the login."""
    job = start_job(hub)
    for name, status in (("ben", 404), ("root1", 403), ("ada", 200)):
        answer = contexts[name].request.get(f"{hub.url}/hub/gpuhub/shared/{job['id']}")
        assert answer.status == status, name
    for path in (f"{job['id']}x", "..%2f..%2fadmin", "x" * 70):
        assert contexts["ben"].request.get(f"{hub.url}/hub/gpuhub/shared/{path}").status == 404
    stream = contexts["ben"].request.get(f"{hub.url}/hub/gpuhub/shared-stream?job={job['id']}")
    assert "event: refused" in stream.text()
    assert "event: job" not in stream.text()
    wrong = contexts["ben"].request.get(f"{hub.url}/hub/gpuhub/shared-stream?job=../j0")
    assert "this is not the id of a job" in wrong.text()


def test_owner_shares_and_ends_on_the_page_of_gpus(hub: SimulatedHub, contexts: dict[str, BrowserContext]) -> None:
    """Both users' pages list it; a wrong name is refused in the dialog."""
    job = start_job(hub, name="train.py")
    ada, ben = (contexts[name].new_page() for name in ("ada", "ben"))
    for page in (ada, ben):
        page.goto(f"{hub.url}/hub/gpus")
    entry = ada.locator(f"[data-key=job-{job['id']}]")
    entry.get_by_role("button", name="Share").click(timeout=TIMEOUT_MS)
    dialog = ada.get_by_role("dialog")
    dialog.get_by_label("User").fill("bne")
    dialog.get_by_role("button", name="Share", exact=True).click()
    expect(dialog).to_contain_text("the hub has no user 'bne'")
    take_picture(ada, "share-dialog")
    dialog.get_by_label("User").fill("ben")
    dialog.get_by_role("button", name="Share", exact=True).click()
    expect(dialog).to_be_hidden()
    part = "[data-gpuhub-part=shares]"
    expect(ada.locator(part)).to_contain_text("yours, with ben")
    expect(ben.locator(part)).to_contain_text("of ada")
    assert ben.locator(f"{part} button").count() == 0
    take_picture(ada, "gpus-shares")
    check_accessibility(ada)
    ben.locator(f"{part} a").click()
    expect(ben.locator("#gpuhub-shared-job")).to_contain_text("ada", timeout=TIMEOUT_MS)
    ada.locator(part).get_by_role("button", name="End").click()
    expect(ada.locator(part)).to_be_empty()
    expect(ben.locator("#gpuhub-share-end")).to_be_visible()


def test_waiting_job_shows_its_place_and_ended_one_its_end(
    hub: SimulatedHub, contexts: dict[str, BrowserContext]
) -> None:
    """Before there is output, and after its end."""
    running = [start_job(hub) for _ in range(3)]
    waiting = start_job(hub, name="later.py")
    share(hub, waiting)
    page = open_shared(hub, contexts["ben"], waiting)
    facts = page.locator("#gpuhub-shared-job")
    expect(facts).to_contain_text("waiting")
    expect(page.locator("#gpuhub-output-note")).to_contain_text("Its output appears when it starts.")
    for job in running:
        hub.send("DELETE", f"/jobs/{job['id']}")
    expect(facts).to_contain_text("running", timeout=TIMEOUT_MS)
    write(hub, waiting, "begun\n")
    expect(page.locator("#gpuhub-shared-output")).to_have_text("begun\n", timeout=TIMEOUT_MS)
    hub.send("DELETE", f"/jobs/{waiting['id']}")
    expect(facts).to_contain_text("Ended", timeout=TIMEOUT_MS)
    expect(page.locator("#gpuhub-output-note")).to_contain_text("The output is complete.", timeout=TIMEOUT_MS)
