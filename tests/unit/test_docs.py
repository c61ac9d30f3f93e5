"""Documentation: links lead somewhere, commands exist, and notebooks are stored without output."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from gpu_launch.cli.main import cli as laptop_command
from gpu_launch.errors import UsageError
from gpu_launch.options import command, gpu_cell, rank_session
from gpuhub.broker.api.problems import CODES
from gpuhub.broker_api import errors as refusals
from gpuhub.cli.main import cli as hub_command
from gpuhub.common import errors
from tests.support.command_lines import parse

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("images/**/*.md")])
NOTEBOOKS = sorted(ROOT.glob("notebooks/**/*.ipynb"))
LESSONS = [path for path in NOTEBOOKS if path.parent.name == "learn"]
#: Folders below which a path in backticks may begin.
BASES = [ROOT, *(ROOT / name for name in ("docs", "images", "tests", "spawners", "spawners/gpuhub", "extensions"))]
BASES += [ROOT / "spawners/gpuhub/broker", ROOT / "extensions/gpu_launch"]
SOURCES = {
    "gpuhub": "spawners/gpuhub",
    "gpuhub.broker": "spawners/gpuhub/broker",
    "gpu_launch": "extensions/gpu_launch",
}
#: Pages with commands of today: neither those of the past, nor the reference, which is written from the commands.
PAGES_WITH_COMMANDS = [
    page for page in PAGES if page.name != "CHANGELOG.md" and not {"decisions", "reference"} & set(page.parts)
]
COMMANDS: dict[str, click.Command] = {"gpuhub": hub_command, "gpu-launch": laptop_command}
MAGICS: dict[str, Callable[[str], object]] = {
    "%gpu_launch": command.parse,
    "%%gpu_launch": lambda line: command.parse(line, cell=True),
    "%gpu_bench": command.parse_bench,
    "%gpu": lambda line: gpu_cell.parse(line, cell=False),
    "%%gpu": lambda line: gpu_cell.parse(line, cell=True),
    "%gpu_ranks": lambda line: rank_session.parse(line, cell=False),
    "%%gpu_ranks": lambda line: rank_session.parse(line, cell=True),
}
#: A choice or a part that is left out, and so no line to type.
IS_PATTERN = re.compile(r"…| \| |\[[-a-zA-Z]|[{(]\w+\|")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path):
    """Every link and picture that is no web address names a file that is there."""
    text = page.read_text(encoding="utf-8")
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_one(page: Path):
    """Every link with `#` names a heading of the page that it leads to."""
    links = re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links if "://" not in path]
    assert [f"{path.name}#{anchor}" for path, anchor in targets if anchor not in list_anchors(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_in_backticks_exist(page: Path):
    """Every Python file with a folder is in the tree, at this path below one of the folders with code or tests."""
    named = re.findall(r"`([\w.-]+/[\w./-]+\.py)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not any((base / path).exists() for base in BASES)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_row_of_a_table_is_there_twice(page: Path):
    """Rows that name code, a command or a key name it once: in the first cell, or in the second below a heading."""
    text = page.read_text(encoding="utf-8")
    tables = re.findall(r"^\|[-| :]+\|\n((?:\|.*\n?)+)", text, re.MULTILINE)
    keys = [[key_of_row(row) for row in table.splitlines()] for table in tables]
    assert [key for rows in keys for key in set(rows) if "`" in key and rows.count(key) > 1] == []


@pytest.mark.parametrize(("page", "heading", "package"), [
    ("docs/architecture.md", "### `gpuhub`, from top to bottom", "gpuhub"),
    ("docs/architecture.md", "### `gpu_launch`, from top to bottom", "gpu_launch"),
    ("docs/architecture.md", "## Inside the broker", "gpuhub.broker"),
    ("CONTRIBUTING.md", "`gpuhub`, top to bottom:", "gpuhub"),
    ("CONTRIBUTING.md", "`gpu_launch`, top to bottom:", "gpu_launch"),
    ("CONTRIBUTING.md", "`gpuhub/broker`, top to bottom:", "gpuhub.broker"),
])  # fmt: skip
def test_tables_of_packages_are_complete_and_in_order(page: str, heading: str, package: str):
    """Each package of a distribution is in one row, in the order of import-linter's layers."""
    (layers,) = [contract["layers"] for contract in CONTRACTS if contract.get("containers") == [package]]
    rank = {name: number for number, layer in enumerate(layers) for name in layer.split(" | ")}
    section = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    cells = [key_of_row(row) for row in table[0].splitlines()[2:]]
    names = [name for cell in cells for name in re.findall(r"`([a-z_]+)/?`", cell)]
    packages = {name for name in rank if (ROOT / SOURCES[package] / name / "__init__.py").exists()}
    assert sorted(name for name in names if name in packages) == sorted(packages)
    assert [rank[name] for name in names if name in rank] == sorted(rank[name] for name in names if name in rank)


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


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_the_documentation_are_accepted(page: Path):
    """Each line of `gpuhub` and `gpu-launch` in a block is a whole command; in a sentence, what it needs may be missing."""
    text = page.read_text(encoding="utf-8")
    refused = [message for line in list_block_lines(text) if (message := explain_refusal(line))]
    sentences = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    refused += [message for line in sentences if (message := explain_refusal(line, may_lack=True))]
    assert refused == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sudo gpuhub node drain rig1; sudo gpuhub node drian rig2", "No such command 'drian'"),
        ("$ gpu-launch run --nodes 2 train.py  # on two nodes", "No such option '--nodes'"),
        ("%gpu_launch --nodes 2 train.py", "--nodes"),
        ("%%gpu --modell 5090", "--modell"),
        ("%gpu_launch train.py  # on one node", "takes a comment for arguments"),
    ],
)
def test_a_wrong_command_is_found(line: str, expected: str):
    """Also behind a prompt or another command."""
    assert expected in explain_refusal(line)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_output(notebook: Path):
    """What a newcomer opens has not been run yet."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    assert len(cells) > 5


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_what_notebooks_import_of_gpu_launch_exists(notebook: Path):
    """A module or a name that moves is missed here, and not by the learner."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = "\n".join(
        TransformerManager().transform_cell("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"
    )
    imports = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "gpu_launch"
    ]
    exec(compile(ast.Module(imports, []), notebook.name, "exec"), {})


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


def test_page_of_troubleshooting_has_every_error():
    """Each code of a problem document is an anchor, and a heading with `…` is a message that the code has."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    kinds = [kind for module in (errors, refusals) for kind in vars(module).values() if inspect.isclass(kind)]
    codes = {kind.code for kind in kinds if issubclass(kind, errors.GpuhubError)} | set(CODES)
    anchors = re.findall(r'^<a id="([a-z-]+)"></a>\n### .* \(`([a-z-]+)`\)$', page, re.MULTILINE)
    assert [anchor for anchor, code in anchors if anchor != code] == []
    assert {anchor for anchor, _ in anchors} == codes
    headings = re.findall(r"^### (.*?)(?: \(`[a-z-]+`\))?$", page, re.MULTILINE)
    parts = [part for heading in headings if "…" in heading for part in re.split(r" ?… ?", heading) if len(part) > 3]
    assert len(parts) > 20
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("spawners/gpuhub/**/*.py")).lower()
    assert [part for part in parts if part.lower() not in sources] == []


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


def list_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def key_of_row(row: str) -> str:
    """Return what a table's row is about: its first cell, with the second one where code is only there."""
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    return cells[0] if "`" in cells[0] or len(cells) < 2 else f"{cells[0]} {cells[1]}".strip()


def list_block_lines(text: str) -> list[str]:
    """Return the lines of a page's blocks of code; those that a backslash joins are one."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"^ {4}.*\n", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def explain_refusal(line: str, *, may_lack: bool = False) -> str:
    """Return why a line is refused; nothing if it is accepted, or has no command of gpuhub's."""
    for part in re.split(r"; |&& ", line):
        found = re.match(r"\s*(?:[$!] ?)?(?:sudo )?(%{0,2}[\w-]+)(?: +(.*))?$", part)
        if found is None or IS_PATTERN.search(part):
            continue
        name, rest = found[1], found[2] or ""
        try:
            if name in MAGICS and not may_lack:
                if " # " in rest:
                    return f"{part.strip()}: a magic takes a comment for arguments"
                MAGICS[name](rest)
            elif name in COMMANDS and rest:
                parse(COMMANDS[name], cut_redirection(shlex.split(rest, comments=True)))
        except click.exceptions.NoArgsIsHelpError:
            if not may_lack:
                return f"{part.strip()}: a command is missing"
        except (click.MissingParameter, click.BadOptionUsage) as error:
            if not may_lack:
                return f"{part.strip()}: {error.format_message()}"
        except (click.ClickException, UsageError) as error:
            if may_lack and re.search(r"'[A-Z]+' is not", str(error)):
                continue  # a word in capitals stands for a value
            return f"{part.strip()}: {error}"
    return ""


def cut_redirection(words: list[str]) -> list[str]:
    """Return the words up to a redirection or a pipe."""
    return list(itertools.takewhile(lambda word: word not in {"|", ">", ">>", "2>"}, words))
