"""Settings with any way to log in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuhub.config.settings import ClusterSettings, load

REST = """
[[nodes]]
name = "rig1"
address = "10.0.0.11"
docker = "unix:///run/docker.sock"
[[profiles]]
name = "cpu"
title = "No GPU"
gpu_count = 0
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A client's secret as it should be."""
    file = tmp_path / "secret"
    file.write_text("s3cret\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def cluster(tmp_path: Path, secret: Path) -> Callable[[str, str, str], ClusterSettings]:
    """`cluster(login, users, keys)`: the lines of [users] and of [login]; SECRET stands for the file."""

    def read(login: str, users: str = 'allowed = ["ada"]', keys: str = "") -> ClusterSettings:
        table = f"[login]\n{keys}\n".replace("SECRET", f'client_id = "gpuhub"\nclient_secret_file = "{secret}"')
        file = tmp_path / "cluster.toml"
        file.write_text(f'[users]\nlogin = "{login}"\n{users}\n{table if keys else ""}{REST}')
        return load(file)

    return read
