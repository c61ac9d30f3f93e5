"""An administrator's own files of JupyterHub's configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from gpuhub.common.errors import SettingsError
from gpuhub.login.oauth import GitHubAuthenticator
from gpuhub.ops.deploy import own_config
from gpuhub.spawners.docker.spawner import GpuDockerSpawner
from gpuhub.spawners.slurm.spawner import GpuSlurmSpawner


@pytest.fixture
def config() -> Config:
    """The part of gpuhub's own configuration that its files may change."""
    config = Config()
    config.JupyterHub.spawner_class = "gpuhub-docker"
    config.JupyterHub.authenticator_class = "gpuhub.login.oauth.GitHubAuthenticator"
    config.Authenticator.allowed_users = {"ada"}
    config.Authenticator.enable_auth_state = False
    config.GitHubAuthenticator.scope = ["read:org"]
    config.JupyterHub.services = [{"name": "broker", "url": "http://127.0.0.1:8010"}]
    config.JupyterHub.load_roles = [{"name": "user", "scopes": ["self", "custom:broker"]}]
    config.JupyterHub.extra_handlers = [("/gpus", object, {})]
    config.JupyterHub.template_paths = ["/gpuhub"]
    config.JupyterHub.template_vars = {"gpuhub_url": "u"}
    config.Spawner.environment = {"GPUHUB_LAB_URL": "/lab"}
    return config


@pytest.fixture
def hub_config(tmp_path: Path) -> Path:
    """jupyterhub_config.py next to an empty folder for an administrator's files."""
    (tmp_path / own_config.FOLDER).mkdir()
    return tmp_path / "jupyterhub_config.py"


def _write(hub_config: Path, text: str, name: str = "own.py") -> Path:
    file = hub_config.parent / own_config.FOLDER / name
    file.write_text(text, encoding="utf-8")
    return file


def _read(config: Config, hub_config: Path, spawner: type[Any] = GpuDockerSpawner) -> None:
    own_config.read(config, hub_config, spawner=spawner, authenticator=GitHubAuthenticator)


def test_files_are_read_in_the_order_of_their_names(config: Config, hub_config: Path) -> None:
    """A later file overrides an earlier one; other files, and folders, are not read."""
    _write(hub_config, "c.JupyterHub.active_server_limit = 2", "20-b.py")
    _write(hub_config, "get_config().JupyterHub.active_server_limit = 1", "10-a.py")
    _write(hub_config, "c.JupyterHub.active_server_limit = 3", "30-c.py.bak")
    (hub_config.parent / own_config.FOLDER / "40.py").mkdir()
    _read(config, hub_config)
    assert config.JupyterHub.active_server_limit == 2


def test_without_a_folder_nothing_changes(config: Config, tmp_path: Path) -> None:
    """Most clusters have none."""
    before = str(config)
    _read(config, tmp_path / "jupyterhub_config.py")
    assert str(config) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nc.JupyterHub.x = 1/0", "line 2: ZeroDivisionError: division by zero"),
        ("import pandoras_box", "line 1: ModuleNotFoundError: No module named 'pandoras_box'"),
        ("c.JupyterHub.x = (", "line 1: '(' was never closed"),
        ("c.JupyterHub.services = [{'name': 'broker'}]", "'broker' is gpuhub's own"),
        ("c.JupyterHub.spawner_class = 'docker'", "spawner_class must be GpuDockerSpawner"),
        ("c.JupyterHub.authenticator_class = 'dummy'", "authenticator_class must be GitHubAuthenticator or a subclass"),
    ],
)
def test_an_error_names_the_file(config: Config, hub_config: Path, text: str, message: str) -> None:
    """With the line, where Python knows it."""
    file = _write(hub_config, text)
    with pytest.raises(SettingsError, match=re.escape(message)) as refused:
        _read(config, hub_config)
    assert str(file) in str(refused.value) or "gpuhub's own" in message


def test_syntax_is_checked_without_running_a_file(hub_config: Path) -> None:
    """`gpuhub up` does so before it starts anything."""
    _write(hub_config, "1/0")
    own_config.check_syntax(hub_config)
    file = _write(hub_config, "x = 1\nc.JupyterHub.y = = 1", "z.py")
    with pytest.raises(SettingsError, match=rf"{file}: line 2: invalid syntax"):
        own_config.check_syntax(hub_config)


def test_what_gpuhub_needs_stays(config: Config, hub_config: Path) -> None:
    """A replaced list has gpuhub's entries in addition; in roles of the same name both have effect."""
    _write(
        hub_config,
        "c.JupyterHub.services = [{'name': 'culler'}]\n"
        "c.JupyterHub.load_roles = [{'name': 'user', 'scopes': ['self', 'shares']}, {'name': 'culler', 'services': []}]\n"
        "c.JupyterHub.extra_handlers.append(('/mine', object, {}))\n"
        "c.JupyterHub.template_paths = ['/mine']\n"
        "c.JupyterHub.template_vars = {'announcement': 'a'}\n"
        "c.DockerSpawner.environment = {'HF_HOME': '/scratch/hf'}\n",
    )
    _read(config, hub_config)
    hub = config.JupyterHub
    assert [service["name"] for service in hub.services] == ["broker", "culler"]
    assert hub.load_roles[0] == {"name": "user", "scopes": ["self", "shares", "custom:broker"]}
    assert [role["name"] for role in hub.load_roles] == ["user", "culler"]
    assert [path for path, *_ in hub.extra_handlers] == ["/gpus", "/mine"]
    assert hub.template_paths == ["/mine", "/gpuhub"]
    assert hub.template_vars == {"announcement": "a", "gpuhub_url": "u"}
    assert config.DockerSpawner.environment == {"GPUHUB_LAB_URL": "/lab", "HF_HOME": "/scratch/hf"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c.DockerSpawner.mem_limit = '2G'", "c.DockerSpawner.mem_limit has no effect: set `memory` of a profile"),
        ("c.Spawner.cpu_limit = 2", "c.Spawner.cpu_limit has no effect: set `cpus` of a profile"),
        ("c.GpuDockerSpawner.network_name = 'x'", "c.GpuDockerSpawner.network_name has no effect"),
        ("c.KubeSpawner.image = 'x'", "c.KubeSpawner has no effect: GpuDockerSpawner starts notebooks"),
        ("c.SlurmSpawner.req_gres = 'gpu:1'", "c.SlurmSpawner has no effect"),
        (
            "c.DockerSpawner.extra_host_config = {'privileged': True}",
            "'privileged' is not passed to Docker: containers",
        ),
        (
            "c.DockerSpawner.extra_host_config.update({'runtime': 'nvidia'})",
            "'runtime' is not passed to Docker: GPUs come",
        ),
        ("c.Spawner.environment['CUDA_VISIBLE_DEVICES'] = '0'", "CUDA_VISIBLE_DEVICES: GPUs come from leases alone"),
        ("c.Spawner.environment.update({'HOME': '/root'})", "c.Spawner.environment: gpuhub sets HOME itself"),
        (
            "c.DockerSpawner.environment.update({'GPUHUB_NODE': 'a'})",
            "c.DockerSpawner.environment: gpuhub sets GPUHUB_NODE",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(config: Config, hub_config: Path, text: str, message: str) -> None:
    """The sentence names the file, the setting, and what to do instead."""
    file = _write(hub_config, text)
    with pytest.raises(SettingsError, match=re.escape(message)) as refused:
        _read(config, hub_config)
    assert str(refused.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c.SlurmSpawner.req_partition = 'gpu'", "set `partition` of a profile"),
        ("c.BatchSpawnerBase.req_memory = '2G'", "set `memory` of a profile"),
        ("c.SlurmSpawner.batch_script = '#!/bin/sh'", "gpuhub writes the job itself"),
        ("c.DockerSpawner.volumes = {}", "c.DockerSpawner has no effect: GpuSlurmSpawner starts notebooks"),
    ],
)
def test_settings_of_batchspawner_are_refused_with_slurm(
    config: Config, hub_config: Path, text: str, message: str
) -> None:
    """Each has its key in cluster.toml."""
    _write(hub_config, text)
    with pytest.raises(SettingsError, match=re.escape(message)):
        _read(config, hub_config, GpuSlurmSpawner)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "c.Authenticator.allow_all = True",
            "c.Authenticator.allow_all is refused: set `allowed` and `allowed_groups`",
        ),
        ("c.Authenticator.admin_users = {'ada'}", "c.Authenticator.admin_users is refused: set `admins` and"),
        ("c.Authenticator.allowed_users.add('eve')", "c.Authenticator.allowed_users is refused: set `allowed`"),
        ("c.Authenticator.allowed_users |= {'eve'}", "c.Authenticator.allowed_users is refused: set `allowed`"),
        ("c.JupyterHub.admin_users = {'ada'}", "c.JupyterHub.admin_users is refused: set `admins`"),
        ("c.OAuthenticator.admin_groups = {'lab'}", "c.OAuthenticator.admin_groups is refused: set `admins`"),
        (
            "c.GitHubOAuthenticator.allowed_organizations = {'lab'}",
            "c.GitHubOAuthenticator.allowed_organizations is refused: set `allowed` and `allowed_groups` below [users]",
        ),
        (
            "c.GitHubOAuthenticator.scope = ['user', 'read:org']",
            "c.GitHubOAuthenticator.scope has no effect, because c.GitHubAuthenticator.scope has a value: set that one",
        ),
        (
            "c.GoogleOAuthenticator.scope = []",
            "c.GoogleOAuthenticator has no effect: GitHubAuthenticator logs users in",
        ),
    ],
)
def test_settings_that_cluster_toml_decides_about_are_refused(
    config: Config, hub_config: Path, text: str, message: str
) -> None:
    """The sentence names the setting, and the key of cluster.toml."""
    _write(hub_config, text)
    with pytest.raises(SettingsError, match=re.escape(message)):
        _read(config, hub_config)


def test_settings_of_logins_with_effect_are_accepted(config: Config, hub_config: Path) -> None:
    """Hooks, the provider's further rights, and a class that does more than gpuhub's."""
    _write(
        hub_config,
        "c.Authenticator.enable_auth_state = True\n"
        "c.Authenticator.post_auth_hook = lambda authenticator, handler, model: model\n"
        "c.GitHubOAuthenticator.github_url = 'https://github.lan'\n"
        "c.GitHubAuthenticator.scope = ['read:org', 'user:email']\n"
        "class Mine(__import__('gpuhub.login.oauth', fromlist=['x']).GitHubAuthenticator): pass\n"
        "c.JupyterHub.authenticator_class = Mine\n",
    )
    _read(config, hub_config)
    assert config.Authenticator.enable_auth_state
    assert config.Authenticator.allowed_users == {"ada"}


def test_settings_with_effect_are_accepted(config: Config, hub_config: Path) -> None:
    """Hooks, variables, volumes, and Docker's options that change no rights."""
    _write(
        hub_config,
        "c.Spawner.environment['HF_HOME'] = '/scratch/hf'\n"
        "c.Spawner.pre_spawn_hook = lambda spawner: None\n"
        "c.DockerSpawner.volumes = {'/data': '/data'}\n"
        "c.DockerSpawner.extra_host_config = {'extra_hosts': {'git.lan': '10.0.0.9'}}\n"
        "class Mine(__import__('gpuhub.spawners.docker.spawner', fromlist=['x']).GpuDockerSpawner): pass\n"
        "c.JupyterHub.spawner_class = Mine\n",
    )
    _read(config, hub_config)
    assert config.DockerSpawner.volumes == {"/data": "/data"}
    assert config.Spawner.environment == {"GPUHUB_LAB_URL": "/lab", "HF_HOME": "/scratch/hf"}
