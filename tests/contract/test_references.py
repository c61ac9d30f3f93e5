"""docs/reference/ says what the code does."""

from __future__ import annotations

import pytest

from tests.support import references

FILES = references.build_all()


@pytest.mark.parametrize("name", sorted(FILES))
def test_reference_pages_match_the_code(name: str) -> None:
    """A change of the public surface comes with its page: `make references`."""
    assert (references.FOLDER / name).read_text(encoding="utf-8") == FILES[name], "run `make references`"


def test_no_reference_page_is_obsolete() -> None:
    """Every file in the folder is a page that is built."""
    assert {path.name for path in references.FOLDER.iterdir()} == FILES.keys()


def test_every_settings_key_is_described() -> None:
    """A key without one is found here rather than by its user."""
    rows = [line for line in FILES["cluster-toml.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if row.endswith("|  |")] == []
