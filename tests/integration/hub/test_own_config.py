"""A real hub that reads an administrator's own files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gpuhub.common import secrets
from gpuhub.ops.deploy.own_config import FOLDER
from tests.support.hub.login_hub import ROOT, LoginHub, login_hub

SETTINGS = '[users]\nlogin = "password"\nallowed = ["ada"]\n'
CULLER = """
import os
c.JupyterHub.services = [{"name": "culler", "api_token": "culler-" * 8}]
c.JupyterHub.load_roles = [{"name": "culler", "scopes": ["list:users", "read:servers"], "services": ["culler"]}]
c.JupyterHub.template_vars = {"announcement_login": "Back at noon"}
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoginHub]:
    """A hub that is not started, with an empty folder for an administrator's files."""
    (tmp_path / FOLDER).mkdir()
    with login_hub("ghown", SETTINGS, start=False) as hub:
        hub.config = Path(shutil.copy(ROOT / "jupyterhub_config.py", tmp_path))
        yield hub


def _write(hub: LoginHub, name: str, text: str) -> Path:
    file = hub.config.parent / FOLDER / name
    file.write_text(text, encoding="utf-8")
    return file


def _list_services(hub: LoginHub, token: str) -> int:
    headers = {"Authorization": f"token {token}"}
    return httpx.get(f"{hub.url}/hub/api/users", headers=headers, timeout=30, trust_env=False).status_code


def test_a_service_is_added_and_gpuhubs_stay(hub: LoginHub) -> None:
    """Although the file replaces the lists; variables of templates reach the pages."""
    _write(hub, "10-culler.py", CULLER)
    hub.start()
    assert _list_services(hub, "culler-" * 8) == 200
    assert _list_services(hub, secrets.read_secret(hub.paths, secrets.BROKER_TOKEN)) == 200
    assert _list_services(hub, "wrong") == 403
    assert "Back at noon" in httpx.get(f"{hub.url}/hub/login", timeout=30, trust_env=False).text


def test_a_hub_with_a_setting_without_effect_does_not_start(hub: LoginHub) -> None:
    """Its log ends with the sentence."""
    file = _write(hub, "20-limits.py", "c.DockerSpawner.mem_limit = '2G'\n")
    assert hub.run_hub().wait(60) != 0
    assert f"{file}: c.DockerSpawner.mem_limit has no effect: set `memory` of a profile" in hub.log


def test_a_hub_that_would_let_other_users_in_does_not_start(hub: LoginHub) -> None:
    """cluster.toml alone decides."""
    file = _write(hub, "20-users.py", "c.Authenticator.allow_all = True\n")
    assert hub.run_hub().wait(60) != 0
    assert f"{file}: c.Authenticator.allow_all is refused: set `allowed` and `allowed_groups` below [users]" in hub.log


def test_a_hub_with_a_wrong_file_does_not_start(hub: LoginHub) -> None:
    """Its log ends with the file, the line and the error."""
    file = _write(hub, "30-typo.py", "\nc.JupyterHub.services.appendd({})\n")
    assert hub.run_hub().wait(60) != 0
    assert f"{file}: line 2: AttributeError: 'list' object has no attribute 'appendd'" in hub.log
