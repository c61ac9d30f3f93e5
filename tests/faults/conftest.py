"""Fixtures of the fault cases: one product for all, the invariants after each, and the results for docs/reliability.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.faults.testbed.invariants import InvariantChecker
from tests.faults.testbed.testbed import USERS, FaultTestbed
from tests.support.markers import mark_users_of_fixtures
from tests.support.product import ROOT

RESULTS = Path(os.environ.get("GPUHUB_FAULTS_RESULTS", ROOT / ".cache" / "faults" / "results.json"))
FAILURES = RESULTS.with_name("failures.txt")


@dataclass(slots=True)
class Results:
    """The results of the session's cases."""

    invariants: InvariantChecker | None = None
    #: By test that has ended, invariants included: the case's id, and whether it passed.
    tests: dict[str, tuple[str, bool]] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, test: str, case: str, phase: str, *, passed: bool) -> None:
        """Record the end of a test's phase; an interrupted test has no teardown and does not count."""
        if not passed:
            self._failed.add(test)
        if phase == "teardown":
            self.tests[test] = case, test not in self._failed

    def ids(self) -> set[str]:
        """Return the cases of which a test ended."""
        return {case for case, _ in self.tests.values()}

    def write(self) -> None:
        """Update these cases in the results' file."""
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        for case in self.ids():
            passed = [ok for tested, ok in self.tests.values() if tested == case]
            stored[case] = {
                "runs": len(passed),
                "passed": sum(passed),
                "date": datetime.now(UTC).date().isoformat(),
                "figures": self.figures.get(case, {}),
            }
        fresh = RESULTS.with_suffix(".new")
        fresh.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        fresh.replace(RESULTS)


_KEY = pytest.StashKey[Results]()


def pytest_configure(config: pytest.Config) -> None:
    """Start with empty results."""
    config.stash[_KEY] = Results()
    FAILURES.unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need."""
    mark_users_of_fixtures(items, Path(__file__).parent, {"testbed": ("closet", "docker", "root")})


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--repeats N`, which injects every case N times."""
    parser.addoption("--repeats", type=int, default=1, help="how often each case is injected")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat each test as often as `--repeats` asks."""
    repeats = metafunc.config.getoption("--repeats", default=1)
    if repeats > 1:
        metafunc.fixturenames.append("repeat")
        metafunc.parametrize("repeat", range(repeats))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record each phase of a case's test; set-up and invariants count as well."""
    outcome: Any = yield
    report = outcome.get_result()
    marker = item.get_closest_marker("case")
    if marker is not None:
        item.config.stash[_KEY].note(item.nodeid, marker.args[0], report.when, passed=report.passed)
        if report.failed:
            # A run takes long: failures are written at once for those who watch it.
            FAILURES.parent.mkdir(parents=True, exist_ok=True)
            with FAILURES.open("a") as file:
                file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the three lines of figures."""
    results = config.stash[_KEY]
    if not results.tests:
        return
    results.write()
    invariants = results.invariants
    terminalreporter.write_line(f"faults.cases_run {len(results.ids())} cases")
    terminalreporter.write_line(f"faults.double_leases {invariants.double_leases if invariants else 0} leases")
    terminalreporter.write_line(f"faults.leaks {invariants.leaks if invariants else 0} objects")


@pytest.fixture(scope="session")
def running_testbed() -> Iterator[FaultTestbed]:
    """The product, started once for all cases."""
    testbed = FaultTestbed.make()
    try:
        testbed.begin()
        yield testbed
    finally:
        testbed.end()


@pytest.fixture(scope="session")
def invariants(running_testbed: FaultTestbed, request: pytest.FixtureRequest) -> InvariantChecker:
    """The invariants' checker, which watches once every user has a home with a file in it."""
    running_testbed.heal()
    running_testbed.clear()
    for name in USERS:
        running_testbed.ask_start(name, "first")
    for name in USERS:
        running_testbed.wait_ready(name, "first", 120)
    running_testbed.clear()
    invariants = InvariantChecker(running_testbed)
    invariants.begin()
    request.config.stash[_KEY].invariants = invariants
    return invariants


@pytest.fixture
def testbed(running_testbed: FaultTestbed, invariants: InvariantChecker) -> Iterator[FaultTestbed]:
    """The product without servers or leases; after the case every fault is ended, and the invariants are checked."""
    yield running_testbed
    running_testbed.heal()
    wrong = invariants.check_leases()
    running_testbed.clear()
    wrong += invariants.check_empty()
    assert wrong == []


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Return a function that records a figure of the case, such as seconds to detection; the largest of all repeats
    counts.
    """
    marker = request.node.get_closest_marker("case")
    figures = request.config.stash[_KEY].figures.setdefault(marker.args[0], {})

    def note(name: str, value: float) -> None:
        figures[name] = round(max(value, figures.get(name, value)), 2)

    return note
