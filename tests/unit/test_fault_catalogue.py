"""The fault catalogue is whole: every id is a case with a test, or is not run for a reason."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults import catalogue, results_table
from tests.faults.conftest import Results
from tests.support.closet.observer import SeenContainer, find_overused_gpus

FAULTS = Path(__file__).parents[1] / "faults"


def test_every_id_is_a_case_or_has_a_reason_not_to_run() -> None:
    """None is forgotten, none is made up, and none is twice a case."""
    cases = [case.id for case in catalogue.CASES]
    assert len(cases) == len(set(cases))
    assert {*cases, *(one.id for one in catalogue.NOT_RUN)} == set(catalogue.IDS)
    assert all(one.why for one in catalogue.NOT_RUN)


def test_every_case_has_a_test_and_every_test_a_case() -> None:
    """As the markers in the tests say."""
    text = "".join(file.read_text(encoding="utf-8") for file in FAULTS.glob("test_*.py"))
    assert set(re.findall(r'mark\.case\("(\w+)"\)', text)) == {case.id for case in catalogue.CASES}


def test_tests_of_other_folders_exist() -> None:
    """The node ids that `test_other_tiers` runs name existing tests, and paths in the catalogue existing files."""
    text = (FAULTS / "test_other_tiers.py").read_text(encoding="utf-8")
    node_ids = re.findall(r'"(tests/[^":]+)(?:::(\w+))?"', text)
    assert len(node_ids) >= 10
    for path, test in node_ids:
        assert not test or f"def {test}(" in (FAULTS.parents[1] / path).read_text(encoding="utf-8"), (path, test)
        assert (FAULTS.parents[1] / path).is_file(), path
    for case in catalogue.NOT_RUN:
        for path in re.findall(r"`(tests/[^`]+)`", case.why):
            assert (FAULTS.parents[1] / path).is_file(), path


def test_the_page_has_every_case() -> None:
    """The table in docs/reliability.md was made since the catalogue was changed."""
    page = results_table.PAGE.read_text(encoding="utf-8")
    shown = page.split(results_table.BEGIN)[1].split(results_table.END)[0]
    for case in catalogue.CASES:
        assert f"| {case.id} | {case.title} |" in shown
    for one in catalogue.NOT_RUN:
        assert f"| {one.id} | {one.title} |" in shown


def test_results_table_shows_failures() -> None:
    """Outcome, figures, date and repeats of a case; one that was not run says so."""
    made = results_table.build({"C1": {"runs": 3, "passed": 2, "date": "2026-11-21", "figures": {"told_s": 1.5}}})
    assert "**1 of 3 failed** (told_s 1.5) | 2026-11-21 | 3 |" in made
    assert "not run yet" in made


def test_case_is_recorded_only_after_its_teardown() -> None:
    """The invariants is asked last: what fails there has failed, and what is broken off before was not run."""
    results = Results()
    for phase in ("setup", "call"):
        results.note("one", "K1", phase, passed=True)
        results.note("two", "K2", phase, passed=True)
    results.note("two", "K2", "teardown", passed=False)
    results.note("three", "K3", "setup", passed=False)
    results.note("three", "K3", "teardown", passed=True)
    assert results.tests == {"two": ("K2", False), "three": ("K3", False)}
    assert results.ids() == {"K2", "K3"}


def test_observer_counts_parts_of_a_gpu() -> None:
    """Two whole leases of one GPU are reported, and three halves; two halves are not."""

    def seen(lease: str, share: int = 1) -> SeenContainer:
        return SeenContainer(
            node="rig1", id=lease, kind="notebook", owner="ada", lease=lease, uuids=("GPU-a",), share=share
        )

    assert find_overused_gpus([seen("a"), seen("b")]) == {
        "GPU-a: ada's notebook a of lease a, ada's notebook b of lease b"
    }
    assert len(find_overused_gpus([seen("a", 2), seen("b", 2), seen("c", 2)])) == 1
    assert len(find_overused_gpus([seen("a"), seen("b", 4)])) == 1
    assert find_overused_gpus([seen("a", 2), seen("b", 2)]) == set()
