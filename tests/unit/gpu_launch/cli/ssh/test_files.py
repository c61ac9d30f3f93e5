"""The files for OpenSSH's client; the client itself reads the settings (`ssh -G`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpu_launch.cli.connection.credentials import Hub
from gpu_launch.cli.ssh.files import SshFiles, build_config, exclude_config, include_config
from gpu_launch.errors import GpuLaunchError, UsageError

HUB = Hub(url="https://gpu.lab.org/a%20b", broker_url="", token="secret-token")
KEY = f"ssh-ed25519 AAAA{'x' * 64}"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshFiles:
    """The files of the default prefix below an empty folder whose name has a space."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "my config"))
    return SshFiles.locate("gpuhub")


def resolve(files: SshFiles, host: str) -> dict[str, str]:
    """Return what OpenSSH's client reads for a host."""
    done = subprocess.run(["ssh", "-G", "-F", files.config, host], capture_output=True, text=True, check=True)
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())


@pytest.mark.process
@pytest.mark.parametrize("host", ["gpuhub", "gpuhub-big", "gpuhub-train.1"])
def test_settings_for_hosts(files: SshFiles, host: str) -> None:
    """OpenSSH's client reads them as they are meant, whatever is in the paths and the URL."""
    files.ensure_key()
    files.write_config(HUB, "ada", ["big"])
    read = resolve(files, host)
    assert (read["user"], read["hostkeyalias"]) == ("ada", "gpuhub")
    assert (read["identityfile"], read["userknownhostsfile"]) == (str(files.private_key), str(files.known_hosts))
    assert (read["stricthostkeychecking"], read["identitiesonly"]) == ("true", "yes")
    assert read["proxycommand"].endswith("--hub https://gpu.lab.org/a%%20b ssh-proxy --prefix gpuhub '%n'")
    assert files.read_hub_url() == HUB.url
    assert files.read_user() == "ada"
    assert "secret-token" not in files.config.read_text()


@pytest.mark.process
@pytest.mark.parametrize("host", ["elsewhere", "gpuhubs", "gpuhub-'$(touch pwned)'"])
def test_other_hosts_are_not_affected(files: SshFiles, host: str) -> None:
    """A name with a quote, such as in a submodule's URL, does not reach the shell of ProxyCommand."""
    files.ensure_key()
    files.write_config(HUB, "ada", [])
    done = subprocess.run(["ssh", "-G", "-F", files.config, host], capture_output=True, text=True, check=False)
    assert "ssh-proxy" not in done.stdout


@pytest.mark.process
def test_key_is_made_once_for_the_user_alone(files: SshFiles) -> None:
    """A second call keeps the key."""
    files.ensure_key()
    key = files.read_public_key()
    assert key.startswith("ssh-ed25519 AAAA")
    assert len(key.split()) == 2
    assert (files.private_key.stat().st_mode & 0o777, files.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    files.ensure_key()
    assert files.read_public_key() == key


def test_missing_key_names_the_command(files: SshFiles) -> None:
    """Also with another prefix."""
    with pytest.raises(UsageError, match=r"\nMake one: gpu-launch ssh-config$"):
        files.read_public_key()
    with pytest.raises(UsageError, match=r"\nMake one: gpu-launch ssh-config --prefix lab$"):
        SshFiles.locate("lab").read_public_key()


def test_include_keeps_the_users_settings(files: SshFiles, tmp_path: Path) -> None:
    """One line at the top, added once and removed again; a link to the file stays one."""
    real, link = tmp_path / "dotfiles", tmp_path / "ssh" / "config"
    real.write_text("Host x\n  User y\n")
    real.chmod(0o644)
    link.parent.mkdir()
    link.symlink_to(real)
    assert include_config(files, link)
    assert not include_config(files, link)
    assert real.read_text() == f'Include "{files.config}"\nHost x\n  User y\n'
    assert link.is_symlink()
    assert exclude_config(files, link)
    assert not exclude_config(files, link)
    assert real.read_text() == "Host x\n  User y\n"


def test_include_makes_the_file(files: SshFiles, tmp_path: Path) -> None:
    """Without any settings of the user's, folder and file are made for the user alone."""
    config = tmp_path / "new" / "config"
    assert include_config(files, config)
    assert (config.stat().st_mode & 0o777, config.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_first_host_key_is_pinned(files: SshFiles) -> None:
    """The same key is accepted again, another one is refused with what to remove."""
    files.folder.mkdir(parents=True)
    files.pin_host_key(KEY)
    files.pin_host_key(KEY)
    assert files.known_hosts.read_text() == f"gpuhub {KEY}\n"
    with pytest.raises(GpuLaunchError, match=r"another one than before\.\n.*known_hosts"):
        files.pin_host_key(KEY.replace("x", "y"))
    assert files.known_hosts.read_text() == f"gpuhub {KEY}\n"


def test_hubs_have_files_of_their_own(files: SshFiles) -> None:
    """The first hub has the short name, another one the name of its host."""
    assert SshFiles.for_hub(HUB).prefix == "gpuhub"
    files.folder.mkdir(parents=True)
    files.write_config(HUB, "ada", [])
    assert SshFiles.for_hub(HUB).prefix == "gpuhub"
    other = Hub(url="https://GPU.other.org:8443", broker_url="", token="t")
    assert SshFiles.for_hub(other).prefix == "gpuhub-gpu-other-org-8443"


@pytest.mark.parametrize("prefix", ["", "a b", "-x", "x-", "a*", "a/b", "Ä"])
def test_other_prefixes_are_refused(prefix: str) -> None:
    """It becomes a host name and a folder."""
    with pytest.raises(UsageError, match="--prefix"):
        SshFiles.locate(prefix)


def test_windows_program_is_quoted_for_its_shell(files: SshFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows' client starts the command without a POSIX shell."""
    monkeypatch.setattr("gpu_launch.cli.ssh.files.sys.executable", r"C:\Program Files\Python\python.exe")
    with monkeypatch.context() as patch:
        patch.setattr("gpu_launch.cli.ssh.files.os.name", "nt")
        text = build_config(files, HUB, "ada", [])
    assert '  ProxyCommand "C:\\Program Files\\Python\\python.exe" -m gpu_launch.cli.main' in text
    assert text.rstrip().endswith('ssh-proxy --prefix gpuhub "%n"')
    assert os.name == "posix"
