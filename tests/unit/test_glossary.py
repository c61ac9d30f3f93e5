"""The glossary and CONTRIBUTING.md name modules and classes that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASES = [ROOT, *(ROOT / folder for folder in ("spawners/gpuhub", "spawners", "extensions", "extensions/gpu_launch"))]
SOURCES = [*ROOT.glob("spawners/gpuhub*/**/*.py"), *ROOT.glob("extensions/gpu_launch/**/*.py")]
TERMS = re.findall(r"^\| \*\*.*$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", ["docs/glossary.md", "CONTRIBUTING.md"])
def test_modules_exist(page: str):
    """Every Python module in backticks that has a folder is in the tree."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`([\w./-]+/[\w.-]+\.py)`", text)
    assert len(named) > 10
    assert [path for path in named if not any((base / path).exists() for base in BASES)] == []


def test_classes_exist():
    """Every class that a row of the glossary names is defined."""
    defined = {
        name
        for path in SOURCES
        for name in re.findall(r"^(?:class )?([A-Z]\w+)\b", path.read_text(encoding="utf-8"), re.M)
    }
    named = {name for row in TERMS for name in re.findall(r"`([A-Z][a-z]\w+)(?:\.\w+)?`", row.split(" | ")[2])}
    assert len(named) > 50
    assert named - defined == set()


def test_terms_are_unique():
    """No term has two rows."""
    terms = [re.split(r"\*\*", row)[1] for row in TERMS]
    assert len(terms) == len(set(terms))
