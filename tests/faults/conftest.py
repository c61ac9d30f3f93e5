"""The catalogue's tier: one product for all cases, the oracle after each, and the results for docs/reliability.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.faults.bed import USERS, Bed
from tests.faults.oracle import Oracle
from tests.support.product import ROOT

RESULTS = Path(os.environ.get("GPUHUB_FAULTS_RESULTS", ROOT / ".cache" / "faults" / "results.json"))
FAILURES = RESULTS.with_name("failures.txt")


@dataclass(slots=True)
class Results:
    """What came of the session's cases."""

    oracle: Oracle | None = None
    #: By test that has ended, the oracle's word included: the case's id, and whether it passed.
    tests: dict[str, tuple[str, bool]] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, test: str, case: str, phase: str, *, passed: bool) -> None:
        """A phase of a test is over; a test that is broken off has no last one, and says nothing."""
        if not passed:
            self._failed.add(test)
        if phase == "teardown":
            self.tests[test] = case, test not in self._failed

    def ids(self) -> set[str]:
        """Cases of which something was run."""
        return {case for case, _ in self.tests.values()}

    def write(self) -> None:
        """Into the file, over what it said of the same cases."""
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        for case in self.ids():
            passed = [ok for of, ok in self.tests.values() if of == case]
            known[case] = {
                "runs": len(passed),
                "passed": sum(passed),
                "date": datetime.now(UTC).date().isoformat(),
                "figures": self.figures.get(case, {}),
            }
        fresh = RESULTS.with_suffix(".new")
        fresh.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        fresh.replace(RESULTS)


_KEY = pytest.StashKey[Results]()


def pytest_configure(config: pytest.Config) -> None:
    """Markers of this tier."""
    config.addinivalue_line("markers", "case(id): the case of the catalogue that the test injects")
    config.addinivalue_line("markers", "fast: in the share that `make test` runs")
    config.stash[_KEY] = Results()
    FAILURES.unlink(missing_ok=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--repeats N` injects every case N times."""
    parser.addoption("--repeats", type=int, default=1, help="how often each case is injected")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test as often as asked."""
    repeats = metafunc.config.getoption("--repeats", default=1)
    if repeats > 1:
        metafunc.fixturenames.append("repeat")
        metafunc.parametrize("repeat", range(repeats))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note what came of a case; its set-up and the oracle's word count as well."""
    outcome: Any = yield
    report = outcome.get_result()
    marker = item.get_closest_marker("case")
    if marker is not None:
        item.config.stash[_KEY].note(item.nodeid, marker.args[0], report.when, passed=report.passed)
        if report.failed:
            # A run takes long: who watches it need not wait for its end.
            FAILURES.parent.mkdir(parents=True, exist_ok=True)
            with FAILURES.open("a") as file:
                file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The three lines that a reader looks for."""
    results = config.stash[_KEY]
    if not results.tests:
        return
    results.write()
    oracle = results.oracle
    terminalreporter.write_line(f"faults.cases_run {len(results.ids())} cases")
    terminalreporter.write_line(f"faults.double_leases {oracle.double_leases if oracle else 0} leases")
    terminalreporter.write_line(f"faults.leaks {oracle.leaks if oracle else 0} objects")


@pytest.fixture(scope="session")
def the_bed() -> Iterator[Bed]:
    """The product, up once for all cases."""
    bed = Bed.make()
    try:
        bed.begin()
        yield bed
    finally:
        bed.end()


@pytest.fixture(scope="session")
def oracle(the_bed: Bed, request: pytest.FixtureRequest) -> Oracle:
    """It watches from the moment when every user has a home with a file in it."""
    the_bed.heal()
    the_bed.clear()
    for name in USERS:
        the_bed.ask_start(name, "first")
    for name in USERS:
        the_bed.wait_ready(name, "first", 120)
    the_bed.clear()
    oracle = Oracle(the_bed)
    oracle.begin()
    request.config.stash[_KEY].oracle = oracle
    return oracle


@pytest.fixture
def bed(the_bed: Bed, oracle: Oracle) -> Iterator[Bed]:
    """The product with nothing on it; after the case everything is mended, and the oracle is asked."""
    yield the_bed
    the_bed.heal()
    wrong = oracle.settle()
    the_bed.clear()
    wrong += oracle.emptied()
    assert wrong == []


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Notes a figure of the case, such as seconds until it was detected; the largest of all repeats counts."""
    marker = request.node.get_closest_marker("case")
    figures = request.config.stash[_KEY].figures.setdefault(marker.args[0], {})

    def note(name: str, value: float) -> None:
        figures[name] = round(max(value, figures.get(name, value)), 2)

    return note
