"""The command line needs nothing that only the notebook images, or only POSIX systems, have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_launch

pytestmark = pytest.mark.process

#: What a laptop does not have: the notebook images' packages, and modules of POSIX systems alone.
ABSENT = (
    "torch", "ipyparallel", "IPython", "zmq", "psutil", "cloudpickle", "traitlets", "numpy", "ipywidgets",
    "fcntl", "termios", "tty", "pwd", "grp", "resource", "pty",
)  # fmt: skip

PROBE = """
import importlib, pkgutil, sys

ABSENT = {absent!r}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

for name in [name for name in sys.modules if name.partition(".")[0] in ABSENT]:
    del sys.modules[name]
sys.meta_path.insert(0, Absent())

import gpu_launch.cli
for module in pkgutil.iter_modules(gpu_launch.cli.__path__):
    importlib.import_module(f"gpu_launch.cli.{{module.name}}")
from gpu_launch.cli import main
for words in ([], *([name] for name in main.cli.commands)):
    status = main.run_command([*words, "--help"])
    assert status == 0, words
print("all of it")
"""


def _python(code: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(gpu_launch.__file__).parents[1]),
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_commands_work_without_heavy_packages(tmp_path: Path) -> None:
    """Every module of the command line is imported, and every command's help is shown."""
    done = _python(PROBE.format(absent=ABSENT), tmp_path)
    assert done.stderr == ""
    assert done.stdout.endswith("all of it\n")


@pytest.mark.parametrize("module", ["gpu_launch", "gpu_launch.cli.main", "gpu_launch.detached.task_main"])
def test_heavy_packages_are_not_imported(tmp_path: Path, module: str) -> None:
    """`import gpu_launch` and the command line load none of the heavy packages, though they are installed."""
    code = f"import sys, {module}; print(sorted({{n.partition('.')[0] for n in sys.modules}} & set({ABSENT[:9]!r})))"
    done = _python(code, tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_script_is_printed_and_fails_silently(tmp_path: Path, shell: str) -> None:
    """The shell's own code; completing a run without a login gives nothing, and says nothing."""
    code = "from gpu_launch.cli.main import main; main()"
    printed = _python(f"import sys; sys.argv[1:] = ['completion', '{shell}']; {code}", tmp_path)
    assert "_GPU_LAUNCH_COMPLETE" in printed.stdout
    environ = f"import os; os.environ.update(_GPU_LAUNCH_COMPLETE='{shell}_complete', COMP_WORDS='gpu-launch logs r',"
    asked = f"{environ} COMP_CWORD='2'); import sys; sys.argv[:] = ['gpu-launch']; {code}"
    done = _python(asked, tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("", "")
