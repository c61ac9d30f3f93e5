"""Fixtures of the fault cases: one product for all, the invariants after each, and the results for docs/reliability.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
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

#: Names of a test's properties: its case, figures, and violations of the invariants.
CASE, FIGURE, DOUBLE_LEASES, LEAKS = "case", "figure.", "double_leases", "leaks"


@dataclass(slots=True)
class Results:
    """The results of the session's cases."""

    #: By test that has ended, invariants included: the case's id, and whether it passed.
    tests: dict[str, tuple[str, bool]] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    double_leases: int = 0
    leaks: int = 0

    def add_properties(self, case: str, properties: Iterable[tuple[str, Any]]) -> None:
        """Add what a test recorded: figures, of which the largest counts, and violations of the invariants."""
        for name, value in properties:
            if name == DOUBLE_LEASES:
                self.double_leases += value
            elif name == LEAKS:
                self.leaks += value
            elif name.startswith(FIGURE):
                figures, figure = self.figures.setdefault(case, {}), name.removeprefix(FIGURE)
                figures[figure] = round(max(value, figures.get(figure, value)), 2)

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
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Recorder(config.stash[_KEY]))
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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the reports of a test name its case: with pytest-xdist they are all that leaves the test's process."""
    marker = item.get_closest_marker("case")
    if marker is not None:
        item.user_properties.append((CASE, marker.args[0]))


class _Recorder:
    """Records each phase of a case's test; set-up and invariants count as well."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cases = [str(value) for name, value in report.user_properties if name == CASE]
        if not cases:
            return
        case = cases[0]
        self._results.note(report.nodeid, case, report.when or "", passed=report.passed)
        if report.when == "teardown":
            self._results.add_properties(case, report.user_properties)
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
    terminalreporter.write_line(f"faults.cases_run {len(results.ids())} cases")
    terminalreporter.write_line(f"faults.double_leases {results.double_leases} leases")
    terminalreporter.write_line(f"faults.leaks {results.leaks} objects")


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
def invariants(running_testbed: FaultTestbed) -> InvariantChecker:
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
    return invariants


@pytest.fixture(scope="session")
def networks(invariants: InvariantChecker) -> Iterator[None]:
    """Checks users' networks after the last test, because the broker takes half a minute to remove them."""
    yield
    assert invariants.check_networks() == []


@pytest.fixture
def testbed(
    running_testbed: FaultTestbed, invariants: InvariantChecker, networks: None, request: pytest.FixtureRequest
) -> Iterator[FaultTestbed]:
    """The product without servers or leases; after the case every fault is ended, and the invariants are checked."""
    yield running_testbed
    try:
        running_testbed.heal()
        wrong = invariants.check_leases()
        running_testbed.clear()
        wrong += invariants.check_empty()
    finally:
        request.node.user_properties += [(DOUBLE_LEASES, invariants.double_leases), (LEAKS, invariants.leaks)]
        invariants.double_leases = invariants.leaks = 0
    assert wrong == []


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Return a function that records a figure of the case, such as seconds to detection."""

    def note(name: str, value: float) -> None:
        request.node.user_properties.append((FIGURE + name, float(value)))

    return note
