"""Runs Prometheus and Alertmanager on free ports of the loopback, with all data in a folder."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.product import wait_for


def find_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def run_prometheus(folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """Run Prometheus with a configuration."""
    file, port = folder / "prometheus.yml", find_port()
    file.write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with _run(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], folder / "prometheus.log", f"http://127.0.0.1:{port}"
    ):
        yield Prometheus(f"http://127.0.0.1:{port}")


@contextmanager
def run_alertmanager(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """Run Alertmanager with a configuration, and yield its host and port."""
    file, address = folder / "alertmanager.yml", f"127.0.0.1:{find_port()}"
    file.write_text(json.dumps(config))
    command = ["prometheus-alertmanager", f"--config.file={file}", f"--storage.path={folder / 'alertmanager'}"]
    options = [f"--web.listen-address={address}", "--cluster.listen-address="]
    with _run([*command, *options], folder / "alertmanager.log", f"http://{address}"):
        yield address


@contextmanager
def _run(command: list[str], log: Path, url: str) -> Iterator[None]:
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            wait_for(lambda: process.poll() is not None or _is_ready(url), lambda: f"{command[0]} answers", 60)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


class Prometheus:
    """The HTTP API of a Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of a query, which has a value for each series."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, trust_env=False, timeout=30)
        assert answer.status_code == httpx.codes.OK, f"{expression}: {answer.text}"
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result

    def targets(self) -> dict[str, str]:
        """Return the health of each scraped service, and the last error in place of `down`."""
        answer = httpx.get(f"{self.url}/api/v1/targets", trust_env=False, timeout=30).json()
        return {
            target["labels"]["job"]: target["lastError"] or target["health"]
            for target in answer["data"]["activeTargets"]
        }
