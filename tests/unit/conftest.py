"""Keep unit tests in this process, so that they run anywhere within seconds.

A test that runs a short program (a shell script that was built, ssh-keygen) has the marker `process`. What forks, imports
torch or starts a server belongs in tests/integration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_FORBIDDEN = {
    "subprocess.Popen": "starts a process",
    "os.fork": "forks",
    "os.forkpty": "forks",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
}
_running: list[str] = []


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    reason = _FORBIDDEN.get(event)
    if event == "subprocess.Popen" and _is_first_search():
        return
    if event == "import" and arguments[0] == "torch":
        reason = "imports torch"
    if reason and _running:
        # pytest.fail is an exception that tests' own `except Exception` does not swallow.
        pytest.fail(
            f"A unit test {reason} ({arguments[0]!r}): mark it `process`, or move it to tests/integration.",
            pytrace=False,
        )


def _is_first_search() -> bool:
    """Return whether a library looks for files: ctypes at a module's first import, matplotlib for fonts at a home's first chart."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in {"ctypes.util", "matplotlib.font_manager"}:
            return True
        frame = frame.f_back
    return False


sys.addaudithook(_refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> object:
    """Watch while a test of this folder runs: fixtures count as well."""
    # pytest calls this hook for the tests of every folder of a session.
    if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("process") is None:
        _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.clear()
