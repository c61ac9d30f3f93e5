"""What tests of the hub's pages share: jobs, pictures, and the check of accessibility."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests.support.hub.simulated_hub import SimulatedHub

ROOT = Path(__file__).parents[3]
PICTURES = Path(os.environ.get("GPUHUB_TEST_PICTURES", ROOT / ".cache" / "pictures"))
AXE = ROOT / "tests" / "support" / "browser" / "node_modules" / "axe-core" / "axe.min.js"


def start_job(hub: SimulatedHub, **asked: Any) -> Any:
    """Submit a detached job of ada's."""
    body = {"run_id": f"run-{uuid.uuid4().hex[:12]}", "detached": True, "name": "train.py", **asked}
    return hub.send("POST", "/jobs", status=201, json=body)


def check_accessibility(page: Page, *parts: str) -> None:
    """Run axe-core on the page, or on the parts that the selectors name; nothing serious may be found."""
    # Evaluated, because a page's own policy may forbid scripts.
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        "parts => axe.run(parts.length ? { include: parts } : document, { resultTypes: ['violations'] })",
        [[part] for part in parts],
    )["violations"]
    serious = [
        (one["id"], one["help"], [node["html"][:300] for node in one["nodes"]][:5])
        for one in found
        if one["impact"] in {"serious", "critical"}
    ]
    assert serious == [], serious


def check_keyboard(page: Page) -> None:
    """Press Tab until all of the page's controls had the focus; each of them shows it.

    Of a group of radio buttons one has it. Where a dialog is open, its controls alone.
    """
    page.evaluate(_LIST_CONTROLS)
    for _ in range(page.evaluate("controls.size") + 30):
        page.keyboard.press("Tab")
        if page.evaluate(_VISIT_FOCUS) == 0:
            break
    unreached, unseen = page.evaluate("[[...controls].map(element => element.outerHTML.slice(0, 300)), unseen]")
    assert (unreached, unseen) == ([], []), f"not reached: {unreached}; no mark of the focus: {unseen}"


_LIST_CONTROLS = """() => {
  const root = document.querySelector("dialog:modal") ?? document;
  const isShown = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0;
  const isChosen = (element) => element.type !== "radio" || element.checked;
  const all = root.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]");
  window.controls = new Set([...all].filter((element) =>
    element.tabIndex >= 0 && !element.disabled && isShown(element) && isChosen(element)));
  window.unseen = [];
  document.activeElement?.blur();
}"""
#: Returns the number of controls that are left.
_VISIT_FOCUS = """() => {
  const focused = document.activeElement;
  const hasOutline = (element) => getComputedStyle(element).outlineStyle !== "none";
  const isSeen = hasOutline(focused) || getComputedStyle(focused).boxShadow !== "none"
    || (focused.closest("label") && hasOutline(focused.closest("label")));
  if (controls.delete(focused) && !isSeen) { unseen.push(focused.outerHTML.slice(0, 300)); }
  return controls.size;
}"""


def check_motion(page: Page) -> None:
    """Check that nothing moves for a user who has asked for reduced motion."""
    moving = page.evaluate(
        """() => [...document.querySelectorAll("*")].filter((element) => {
          const style = getComputedStyle(element);
          return style.animationName !== "none" || style.scrollBehavior === "smooth"
            || style.transitionDuration.split(", ").some((time) => parseFloat(time) > 0.01);
        }).map((element) => element.outerHTML.slice(0, 200))"""
    )
    assert moving == [], moving


def take_picture(page: Page, name: str) -> None:
    """Keep a picture of the whole page."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
