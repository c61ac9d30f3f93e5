"""One connection to OpenSSH's server, which runs as the container's own user on a socket without an address.

Nothing listens: `sshd -i` serves the one connection that the hub has passed on, and ends with it. It accepts the public
key that came with this connection and no other, so no list of keys is kept anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpu_launch.errors import GpuLaunchError, UsageError

#: The form of accepted public keys, without a comment; `gpu-launch ssh-config` makes keys of this type.
_PUBLIC_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]{68}")
_SYSTEM_FOLDERS = "/usr/sbin:/usr/local/sbin"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Variables that sshd, the login shell or the client's terminal set.
_OWN_VARIABLES = frozenset({"HOME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER", "_"})
#: Time between the end of the connection and SIGTERM for an sshd that has not ended, seconds.
_END_TIMEOUT_S = 5.0


class SshdError(GpuLaunchError):
    """The server for SSH cannot be started."""


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """What the client has to know before the first byte: the server's public host key and the user's name there."""

    host_key: str
    user: str

    def build_line(self) -> bytes:
        """Build the first line of a connection, before sshd's own bytes."""
        return json.dumps({"host_key": self.host_key, "user": self.user}).encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class SshdSession:
    """A running sshd and this side of its connection."""

    greeting: Greeting
    connection: socket.socket
    _process: subprocess.Popen[bytes]
    #: Settings and the accepted key, for this connection alone.
    _folder: Path

    @classmethod
    def start(cls, public_key: str, *, environ: Mapping[str, str] | None = None) -> Self:
        """Start sshd for one connection of the owner of `public_key`.

        Args:
            public_key: The client's public key, such as `ssh-ed25519 AAAA…`.
            environ: The variables that sessions get; None for those of this process.

        Raises:
            UsageError: It is not an Ed25519 key in OpenSSH's form.
            SshdError: There is no sshd here, or no host key can be made in the home.
        """
        check_public_key(public_key)
        program = shutil.which("sshd", path=f"{_SYSTEM_FOLDERS}:{os.environ.get('PATH', '')}")
        if program is None:
            raise SshdError("there is no sshd here: the image needs the Debian package openssh-server")
        account = pwd.getpwuid(os.getuid())
        host_key = ensure_host_key(Path.home() / ".gpu_launch" / "ssh" / "host_ed25519")
        folder = Path(tempfile.mkdtemp(prefix="gpu-launch-ssh-"))
        try:
            accepted = folder / "authorized_keys"
            accepted.write_text(f"{public_key}\n", encoding="ascii")
            config = folder / "sshd_config"
            config.touch(mode=0o600)
            config.write_text(
                build_config(
                    user=account.pw_name,
                    host_key=host_key,
                    authorized_keys=accepted,
                    environ=os.environ if environ is None else environ,
                ),
                encoding="utf-8",
            )
            greeting = Greeting(host_key=_read_public_key(host_key), user=account.pw_name)
            ours, theirs = socket.socketpair()
            with theirs:
                # An absolute path: sshd refuses to start from another one. Its errors go to the container's log.
                process = subprocess.Popen(
                    [program, "-i", "-e", "-f", str(config)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise SshdError(f"sshd cannot be started: {error.strerror or error}") from None
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(greeting=greeting, connection=ours, _process=process, _folder=folder)

    def close(self) -> None:
        """Close the connection, and end sshd if it does not end by itself; may block for some seconds."""
        self.connection.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def check_public_key(text: str) -> None:
    """Refuse what is not the one form of keys that sshd gets.

    Raises:
        UsageError: It is another form.
    """
    if not _PUBLIC_KEY.fullmatch(text):
        raise UsageError("key: a public key such as `ssh-ed25519 AAAA…` without a comment is needed")


def ensure_host_key(path: Path) -> Path:
    """Make the user's host key if there is none, and return its path. It is the same for all containers of the user.

    Raises:
        SshdError: It cannot be made.
    """
    try:
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / "key"
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpuhub", "-f", str(draft)],
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
            # A link instead of a rename: of two containers that make a key at the same time, one wins for both.
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)
    except subprocess.CalledProcessError as error:
        raise SshdError(f"ssh-keygen made no host key: {error.stderr.decode('utf-8', 'replace').strip()}") from None
    except OSError as error:
        raise SshdError(f"no host key can be made in {path.parent}: {error.strerror or error}") from None
    return path


def _read_public_key(private: Path) -> str:
    """Return type and key of a private key's public half."""
    try:
        done = subprocess.run(["ssh-keygen", "-y", "-f", str(private)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        raise SshdError(
            f"the host key {private} cannot be read: remove it, and a new one is made for the next connection"
        ) from None
    return " ".join(done.stdout.split()[:2])


def build_config(*, user: str, host_key: Path, authorized_keys: Path, environ: Mapping[str, str]) -> str:
    """Build sshd's settings: this user and this key alone, and nothing that listens for others."""
    lines = [
        f"HostKey {_quote(str(host_key))}",
        f"AuthorizedKeysFile {_quote(str(authorized_keys))}",
        f"AllowUsers {_quote(user)}",
        # The key's folder is the session's own; the modes of the folders above it do not matter.
        "StrictModes no",
        "AuthenticationMethods publickey",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin no",
        # PAM and a PID file need root.
        "UsePAM no",
        "PidFile none",
        # -L and -D connect from the container as any of its programs does; -R would listen there.
        "AllowTcpForwarding local",
        "AllowStreamLocalForwarding local",
        "GatewayPorts no",
        "PermitTunnel no",
        "X11Forwarding no",
        "PrintMotd no",
        "PrintLastLog no",
        "UseDNS no",
        "LogLevel ERROR",
        # The hub's proxies report a vanished laptop late or never.
        "ClientAliveInterval 30",
        "ClientAliveCountMax 4",
        "Subsystem sftp internal-sftp",
    ]
    variables = " ".join(
        _quote(f"{name}={value}") for name, value in sorted(environ.items()) if _is_passed_on(name, value)
    )
    if variables:
        # One line, because sshd takes the first one alone.
        lines.append(f"SetEnv {variables}")
    return "\n".join(lines) + "\n"


def _is_passed_on(name: str, value: str) -> bool:
    is_own = name in _OWN_VARIABLES or name.startswith("SSH_")
    return bool(_VARIABLE.fullmatch(name)) and not is_own and value.isprintable()


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
