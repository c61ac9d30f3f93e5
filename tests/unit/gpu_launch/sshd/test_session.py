"""sshd's settings, checked by sshd itself, and the host key."""

from __future__ import annotations

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


def test_settings_have_one_line_of_variables() -> None:
    """sshd takes the first SetEnv alone; what sshd or a shell sets, and line breaks, are left out."""
    environ = {
        "PATH": "/bin",
        "ODD": 'a "b" \\c',
        "LINES_2": "a\nPermitRootLogin yes",
        "HOME": "/x",
        "SSH_TTY": "x",
        "A-B": "x",
    }
    text = build_config(user="ada", host_key=Path("/k"), authorized_keys=Path("/a"), environ=environ)
    assert [line for line in text.splitlines() if line.startswith("SetEnv")] == [
        r'SetEnv "ODD=a \"b\" \\c" "PATH=/bin"'
    ]
    assert "PermitRootLogin yes" not in text
    assert {'AllowUsers "ada"', "UsePAM no", "PasswordAuthentication no", "AllowTcpForwarding local"} <= set(
        text.splitlines()
    )


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
