"""A real JupyterLab with the extensions of gpuhub's image, on loopback and without a hub."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from gpuhub.ops.images import build_plan, wheels
from tests.support.product import ROOT, wait_for

TOKEN = "lab-token"
_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JupyterLab:
    """A running JupyterLab."""

    url: str
    home: Path

    def request(self, method: str, path: str, *, is_authorized: bool = True, body: object = None) -> httpx.Response:
        """Send one request to the server."""
        headers = {"Authorization": f"token {TOKEN}"} if is_authorized else {}
        return httpx.request(method, f"{self.url}{path}", headers=headers, json=body, timeout=30, trust_env=False)


def build_extension(folder: Path) -> Path:
    """Build the wheel as `gpuhub up` does; return a folder of JUPYTER_PATH with its files."""
    files = build_plan.read_sources(ROOT).lab
    (wheel,) = wheels.ensure_lab_wheel(folder, key="test", files=files, report=lambda _step: None).iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    (data,) = (folder / "unpacked").glob("*.data/data/share/jupyter")
    return data


@contextmanager
def serve_lab(folder: Path, extension: Path, environ: Mapping[str, str]) -> Iterator[JupyterLab]:
    """Run JupyterLab in a process of its own; end it with the block.

    Args:
        folder: A new folder for home and settings.
        extension: What `build_extension` returned.
        environ: What the spawner would set.
    """
    home, ipython = folder / "home", folder / "ipython" / "profile_default"
    for path in (home, ipython):
        path.mkdir(parents=True)
    # As /etc/ipython in the image.
    config = ROOT / "extensions/gpu_launch/image_config/ipython_config.py"
    (ipython / config.name).write_bytes(config.read_bytes())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "GPUHUB_"))}
    env |= {
        "HOME": str(home),
        "IPYTHONDIR": str(ipython.parent),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_PATH": str(extension),
        **environ,
    }
    extensions = {"gpu_launch.notebook_server.extension": True, "jupyter_lsp": False}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={home}"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1"]
    command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.jpserver_extensions={extensions!r}"]
    log = folder / "lab.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=home, env=env, stdout=output, stderr=subprocess.STDOUT)
        lab = JupyterLab(url=f"http://127.0.0.1:{port}", home=home)
        try:
            wait_for(lambda: _is_ready(lab, process, log), "JupyterLab answers", deadline_s=_DEADLINE_S)
            yield lab
        finally:
            # Kernels end with it.
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _is_ready(lab: JupyterLab, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")[-4000:]
    try:
        return lab.request("GET", "/api/status").is_success
    except httpx.TransportError:
        return False


def write_notebook(lab: JupyterLab, name: str, *cells: str) -> None:
    """Write a notebook with code cells into the home."""
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
    made = [
        {
            "cell_type": "code",
            "source": text,
            "id": f"cell{index}",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for index, text in enumerate(cells)
    ]
    content = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    (lab.home / name).write_text(json.dumps(content), encoding="utf-8")
