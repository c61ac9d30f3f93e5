"""sshd's settings, checked by sshd itself, and the host key."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.errors import UsageError
from gpu_launch.sshd.session import Greeting, SshdError, build_config, check_public_key, ensure_host_key

KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'x' * 43}"


def test_one_form_of_keys_is_accepted() -> None:
    """Exactly what `ssh-keygen -t ed25519` makes, without the comment."""
    check_public_key(KEY)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"{KEY} comment",
        f"{KEY}\n{KEY}",
        f"{KEY}\n",
        f'command="x" {KEY}',
        KEY.replace("ssh-ed25519", "ssh-rsa"),
        KEY[:-1],
        f"{KEY}=",
        KEY.replace("x", "\0", 1),
    ],
)
def test_other_keys_are_refused(text: str) -> None:
    """Options, several lines and other types would change what sshd accepts."""
    with pytest.raises(UsageError, match="a public key such as"):
        check_public_key(text)


@pytest.fixture
def open_folder() -> Iterator[tuple[Path, dict[str, int]]]:
    """A folder, and the arguments for a process that owns it and is not root: root's sshd needs folders of its own."""
    with tempfile.TemporaryDirectory() as name:
        account = {"user": 65534, "group": 65534} if os.getuid() == 0 else {}
        yield Path(name), account


@pytest.mark.process
def test_sshd_reads_the_settings(open_folder: tuple[Path, dict[str, int]]) -> None:
    """`sshd -T` shows them as they are meant, with every character of the variables."""
    folder, account = open_folder
    key = ensure_host_key(folder / "a folder" / "host key")
    environ = {
        "PATH": "/opt/gpuhub/bin:/usr/bin",
        "ODD": "a \"b\" 'c' \\d # $e %f",
        "EMPTY": "",
        "LINES_2": "a\nPermitRootLogin yes",
        "HOME": "/x",
        "TERM": "x",
        "SSH_AUTH_SOCK": "x",
        "BAD-NAME": "x",
    }
    config = folder / "sshd_config"
    config.write_text(
        build_config(user="ada.b", host_key=key, authorized_keys=folder / "authorized_keys", environ=environ)
    )
    if account:
        for path in (folder, key.parent, key, config):
            os.chown(path, account["user"], account["group"])
    command = ["/usr/sbin/sshd", "-T", "-f", config]
    done = subprocess.run(command, capture_output=True, text=True, check=True, **account)
    shown = done.stdout.splitlines()
    for line in (
        "permitrootlogin no",
        "usepam no",
        "pidfile none",
        "passwordauthentication no",
        "kbdinteractiveauthentication no",
        "authenticationmethods publickey",
        "allowtcpforwarding local",
        "allowstreamlocalforwarding local",
        "x11forwarding no",
        "gatewayports no",
        "permituserenvironment no",
        "allowusers ada.b",
        "subsystem sftp internal-sftp",
    ):
        assert line in shown, line
    assert [line for line in shown if line.startswith("setenv ")] == [
        "setenv EMPTY=",
        "setenv ODD=a \"b\" 'c' \\d # $e %f",
        "setenv PATH=/opt/gpuhub/bin:/usr/bin",
    ]


@pytest.mark.process
def test_host_key_is_made_once(tmp_path: Path) -> None:
    """For its user alone, and the same for all containers of the home."""
    path = tmp_path / "ssh" / "host_ed25519"
    ensure_host_key(path)
    made = path.read_bytes()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    ensure_host_key(path)
    assert path.read_bytes() == made
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.process
def test_home_that_cannot_be_written(tmp_path: Path) -> None:
    """The reason names the folder."""
    (tmp_path / "file").touch()
    with pytest.raises(SshdError, match=r"no host key can be made in .*/file/ssh: Not a directory"):
        ensure_host_key(tmp_path / "file" / "ssh" / "host")


def test_greeting_is_one_line() -> None:
    """The client reads it before sshd's own bytes."""
    assert Greeting(host_key=KEY, user="ada").build_line() == f'{{"host_key": "{KEY}", "user": "ada"}}\n'.encode()
