"""Documentation: links lead somewhere, commands exist, and notebooks are stored without output."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("images/**/*.md")])
NOTEBOOKS = sorted(ROOT.glob("notebooks/**/*.ipynb"))
LESSONS = [path for path in NOTEBOOKS if path.parent.name == "learn"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path):
    """Every link and picture that is no web address names a file that is there."""
    text = page.read_text(encoding="utf-8")
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


def test_list_for_language_models_has_every_page():
    """`docs/llms.txt`, but for what `make references` writes about a folder, and the decisions' own list."""
    listed = re.findall(r"\]\(([^)]+)\)", (ROOT / "docs/llms.txt").read_text(encoding="utf-8"))
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/*.md")}
    assert [path for path in listed if not (ROOT / "docs" / path).exists()] == []
    assert pages <= set(listed)


def test_make_targets_of_the_documentation_exist():
    """Every `make …` that a page tells to type is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    told = {
        name for page in PAGES for name in re.findall(r"(?:sudo |`)make ([a-z-]+)", page.read_text(encoding="utf-8"))
    }
    assert told <= targets
    assert {"up", "down", "test"} <= told


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_output(notebook: Path):
    """What a newcomer opens has not been run yet."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    assert len(cells) > 5


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.name)
def test_lessons_are_short_and_end_with_a_proof(lesson: Path):
    """The last cell asserts something and prints one line that begins with the lesson's number."""
    cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
    number = int(lesson.name.partition("-")[0])
    assert 10 <= len(cells) <= 20
    assert "".join(cells[0]["source"]).startswith(f"# {number}. ")
    assert "## Prove it" in "".join(cells[-2]["source"])
    assert cells[-1]["cell_type"] == "code"
    proof = "".join(cells[-1]["source"]).splitlines()
    assert any(line.startswith("assert ") for line in proof)
    assert re.match(rf'print\(f?"Lesson {number}: ', proof[-1])
    assert sum(line.startswith("print(") for line in proof) == 1


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.name)
def test_files_that_lessons_name_exist(lesson: Path):
    """Paths in code style lead to files of the repository, or of a user's home."""
    cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    paths = re.findall(r"`((?:docs|spawners|notebooks|gpuhub-examples)/[^`\s]+)`", text)
    assert [path for path in paths if not (ROOT / path.replace("gpuhub-examples", "notebooks", 1)).exists()] == []


def test_page_of_the_course_has_every_lesson():
    """Lessons are numbered without a gap, and docs/learn.md names each."""
    page = (ROOT / "docs/learn.md").read_text(encoding="utf-8")
    assert [path.name[:3] for path in LESSONS] == [f"{number:02}-" for number in range(1, len(LESSONS) + 1)]
    assert [path.name for path in LESSONS if path.name not in page] == []


def test_arithmetic_of_the_documentation_is_right():
    """Each formula `a × b / c = d` of the page has the result that it states, to the digits that it shows."""
    page = (ROOT / "docs/what-a-cluster-is-not.md").read_text(encoding="utf-8")
    formulas = re.findall(r"`([\d.+×/() ]+) = ([\d.]+)`", page)
    assert len(formulas) > 20
    assert [f"{formula} = {stated}" for formula, stated in formulas if not is_rounded(formula, stated)] == []


def is_rounded(formula: str, stated: str) -> bool:
    """Return whether `stated` is the formula's value, rounded to its number of digits."""
    value = eval(formula.replace("×", "*"), {"__builtins__": {}})
    return abs(value - float(stated)) <= 0.5001 * 10 ** -len(stated.partition(".")[2])
