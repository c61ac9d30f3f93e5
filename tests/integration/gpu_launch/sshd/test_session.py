"""sshd's settings, read by sshd itself."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.sshd.session import build_config, ensure_host_key


@pytest.fixture
def open_folder() -> Iterator[tuple[Path, dict[str, int]]]:
    """A folder, and the arguments for a process that owns it and is not root: root's sshd needs folders of its own."""
    with tempfile.TemporaryDirectory() as name:
        account = {"user": 65534, "group": 65534} if os.getuid() == 0 else {}
        yield Path(name), account


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
