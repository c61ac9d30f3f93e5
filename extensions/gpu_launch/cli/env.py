"""The command `env`: a user's own Python environments in the home, as kernels of JupyterLab and for launches.

An environment is a virtual environment made by uv that also finds the packages of the image. What is installed in it
comes first. It refers to the image's folder, so that it has the new image's packages after an update.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import click

from gpu_launch import environment
from gpu_launch.cli.context import Context, json_option, pass_context
from gpu_launch.errors import GpuLaunchError, UsageError

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,30}")
#: Names of kernels that images have.
_TAKEN = frozenset({"python", "python3"})
#: File in the environment that makes the image's packages importable after its own ones, with their own .pth files.
_PATH_FILE = "gpuhub-image.pth"
_CREATE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class PythonEnvironment:
    """An environment in a home; it may be missing or broken."""

    home: Path
    name: str

    @property
    def folder(self) -> Path:
        return self.home / "envs" / self.name

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / "bin" / "python"

    @property
    def kernel(self) -> Path:
        """The folder in which Jupyter finds the kernel."""
        return self.home / ".local" / "share" / "jupyter" / "kernels" / self.name

    @property
    def problem(self) -> str:
        """Why it cannot be used; empty if it can."""
        if not self.python.exists():
            return "its Python is missing: remove and create it again, and install your packages in it"
        return "" if (self.kernel / "kernel.json").exists() else "it is no kernel: create it again"


@click.group("env")
def env_group() -> None:
    """Your own Python environments, as kernels and for launches.

    An environment has everything that the image has. What you install in it comes first, and stays when the image is
    updated: choose its kernel in JupyterLab and run `%pip install NAME`. Launches from that kernel run in it.
    """


@env_group.command("create")
@click.argument("name")
@json_option
@pass_context
def create(context: Context, name: str) -> None:
    """Create the environment NAME in ~/envs, and its kernel."""
    env = create_environment(_find_home(), check_name(name))
    text = f"{env.folder}: choose the kernel {name} in JupyterLab, and install packages there with %pip install"
    context.console.print_result({"name": name, "folder": str(env.folder)}, text)


@env_group.command("list")
@json_option
@pass_context
def list_environments(context: Context) -> None:
    """List your environments."""
    envs = find_environments(_find_home())
    lines = [f"{env.name}  {env.problem or env.folder}" for env in envs]
    rows = [{"name": env.name, "folder": str(env.folder), "problem": env.problem} for env in envs]
    context.console.print_result(rows, "\n".join(lines) or "No environments: gpu-launch env create NAME makes one.")


@env_group.command("remove")
@click.argument("name")
@json_option
@pass_context
def remove(context: Context, name: str) -> None:
    """Remove the environment NAME with its packages and its kernel."""
    env = PythonEnvironment(home=_find_home(), name=check_name(name))
    if not env.folder.exists():
        raise UsageError(f"There is no environment {name}: gpu-launch env list shows yours.")
    for folder in (env.kernel, env.folder):
        shutil.rmtree(folder, ignore_errors=True)
    context.console.print_result({"removed": name}, f"{name} is removed.")


def _find_home() -> Path:
    """Return the home on the cluster.

    Raises:
        UsageError: This is another machine.
    """
    env = environment.read()
    if env.broker_url is None:
        raise UsageError(
            "Environments are in your home on the cluster: use gpu-launch env in a terminal of JupyterLab."
        )
    return env.home


def check_name(name: str) -> str:
    """Return the name of an environment.

    Raises:
        UsageError: It cannot be the name of a folder and a kernel; the text says which can.
    """
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise UsageError(f"{name!r}: a name has 1 to 31 of a-z, 0-9, _ and -, and is not python or python3.")
    return name


def find_environments(home: Path) -> list[PythonEnvironment]:
    """Return the environments in a home, in the order of their names."""
    folders = (home / "envs").glob("*")
    return [PythonEnvironment(home=home, name=path.name) for path in sorted(folders) if _NAME.fullmatch(path.name)]


def create_environment(home: Path, name: str) -> PythonEnvironment:
    """Create an environment with the packages of the running Python, and its kernel; one that is there is completed.

    Raises:
        UsageError: Another folder, or a broken environment, has the name.
        GpuLaunchError: uv is missing or fails.
    """
    env = PythonEnvironment(home=home, name=name)
    if env.folder.exists() and not env.python.exists():
        raise UsageError(f"{env.folder} exists and has no Python: gpu-launch env remove {name} removes it.")
    if not env.folder.exists():
        _run_uv("venv", "--quiet", "--python", sys.executable, str(env.folder))
        (packages,) = env.folder.glob("lib/python3*/site-packages")
        image = sysconfig.get_path("purelib")
        (packages / _PATH_FILE).write_text(f"import site; site.addsitedir({image!r})\n", encoding="utf-8")
    env.kernel.mkdir(parents=True, exist_ok=True)
    (env.kernel / "kernel.json").write_text(json.dumps(_build_kernel(env), indent=1), encoding="utf-8")
    return env


def _run_uv(*arguments: str) -> None:
    # The image's own, next to its Python.
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise GpuLaunchError("uv is not installed here: ask your administrator for an image that has it.")
    done = subprocess.run(
        [uv, *arguments], check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_CREATE_S
    )
    if done.returncode:
        raise GpuLaunchError(f"uv {arguments[0]} failed: {done.stderr.strip()}")


def _build_kernel(env: PythonEnvironment) -> dict[str, object]:
    """Return the kernel's specification; in its cells `!pip` and other commands are those of the environment."""
    return {
        "argv": [str(env.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": env.name,
        "language": "python",
        "metadata": {"debugger": True},
        "env": {"VIRTUAL_ENV": str(env.folder), "PATH": f"{env.folder / 'bin'}{os.pathsep}${{PATH}}"},
    }


COMMANDS = (env_group,)
