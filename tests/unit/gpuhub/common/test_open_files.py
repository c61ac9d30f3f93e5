"""The limit of open files, in processes that begin with that of a login shell."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from gpuhub.common.open_files import WANTED, describe_low_limit

pytestmark = pytest.mark.process

#: The usual soft limit.
USUAL = 1024
LOWER = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({USUAL}, {{hard}}))
"""
#: The last words are this process's limit, and a child's.
SHOW = """
import os
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.popen("ulimit -n").read())
"""
#: What each program does before it reads its settings, which there are none of here.
PROGRAMS = {
    "function": "from gpuhub.common.open_files import raise_open_file_limit\nraise_open_file_limit()",
    "broker": (
        "from pathlib import Path\nfrom gpuhub.broker import app\nfrom gpuhub.common.errors import SettingsError\n"
        "try:\n    app.run(Path('/nonexistent/cluster.toml'), None)\nexcept SettingsError: pass"
    ),
    "hub": (
        "import runpy, sys\nsys.argv = ['hub', '--version']\n"
        "try:\n    runpy.run_module('gpuhub.ops.deploy.hub_process', run_name='__main__')\nexcept SystemExit: pass"
    ),
    "startup": (
        "from gpuhub.ops.deploy import startup\nstartup._check_head = lambda *_: None\n"
        "try:\n    startup.start_hub(None, None, None)\nexcept AttributeError: pass"
    ),
}


def read_limits(program: str, hard: int) -> list[int]:
    """Run a program with the usual limit and this hard one; return its limit then, and a child's."""
    code = LOWER.format(hard=hard) + PROGRAMS[program] + SHOW
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(word) for word in run.stdout.split()[-2:]]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_raise_their_limit_and_that_of_their_children(program: str) -> None:
    """As far as this machine permits."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    own, childs = read_limits(program, hard)
    assert own == childs
    assert own == WANTED or (hard < WANTED and own == hard)


def test_a_low_hard_limit_is_used_up_and_named() -> None:
    """Root may raise the hard limit too, unless the container takes the right away."""
    own, childs = read_limits("function", 4 * USUAL)
    assert own == childs
    assert own in (4 * USUAL, WANTED)
    assert describe_low_limit(WANTED) is None
    assert (describe_low_limit(4 * USUAL) or "").startswith(f"at most 4096 open files, and {WANTED} are wanted: ")
