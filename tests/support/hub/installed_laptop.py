"""A laptop's folder into which pip has installed the hub's own gpu-launch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.support.hub.browser import Product


@dataclass
class Laptop:
    """A machine with only gpu-launch installed."""

    program: Path
    home: Path
    work: Path

    def start(self, *words: str, folder: Path | None = None) -> subprocess.Popen[str]:
        """Start the command in the work folder."""
        return subprocess.Popen(
            [self.program, *words],
            cwd=folder or self.work,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, code: int = 0, stdin: str | None = None) -> str:
        """Run the command, check its exit status, and return its output."""
        done = subprocess.run(
            [self.program, *words],
            cwd=self.work,
            env=self.environ(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + (done.stderr if code else "")

    def environ(self) -> dict[str, str]:
        """An environment with a separate home and without this checkout."""
        return {"HOME": str(self.home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "dumb"}

    def write(self, name: str, text: str) -> None:
        """Write a file in the work folder."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip(), encoding="utf-8")


def install_laptop(folder: Path, product: Product) -> Laptop:
    """Install gpu-launch from the hub into a new environment."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    wheel = f"{product.address}/hub/gpuhub/gpu_launch-{version('gpu-launch')}-py3-none-any.whl"
    subprocess.run([folder / "venv/bin/pip", "install", "--quiet", wheel], check=True, capture_output=True)
    installed = Laptop(program=folder / "venv/bin/gpu-launch", home=folder / "home", work=folder / "work")
    installed.home.mkdir()
    installed.work.mkdir()
    return installed
