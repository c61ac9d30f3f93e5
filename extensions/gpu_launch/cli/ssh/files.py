"""The files that OpenSSH's client uses for a hub: its settings, the laptop's key, and the pinned host key."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_launch.cli.connection.credentials import Hub, get_config_file
from gpu_launch.common import run_folder
from gpu_launch.errors import GpuLaunchError, UsageError

DEFAULT_PREFIX = "gpuhub"
_PREFIX = re.compile(r"[a-z0-9](-?[a-z0-9]+)*")
#: Begins the settings, before the hub's URL.
_MARK = "# Made by gpu-launch ssh-config for"


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that is not a plain host name.

    Raises:
        UsageError: It has other characters.
    """
    if not _PREFIX.fullmatch(prefix):
        raise UsageError(
            f"--prefix {prefix}: a name of a-z, 0-9 and - is needed, such as {DEFAULT_PREFIX} or gpu.\n"
            f"gpu-launch ssh-config --prefix {DEFAULT_PREFIX}"
        )


@dataclass(frozen=True, kw_only=True)
class SshFiles:
    """The files for one prefix, in a folder that only the user can read."""

    prefix: str
    folder: Path

    @classmethod
    def locate(cls, prefix: str) -> SshFiles:
        """Return the paths; nothing is written."""
        check_prefix(prefix)
        return cls(prefix=prefix, folder=get_config_file().parent / "ssh" / prefix)

    @classmethod
    def for_hub(cls, hub: Hub) -> SshFiles:
        """Return the paths for a hub: `gpuhub`, unless that is another hub's; then with the name of its host."""
        files = cls.locate(DEFAULT_PREFIX)
        written_for = files.read_hub_url()
        if written_for in ("", hub.url):
            return files
        host = urllib.parse.urlsplit(hub.url).netloc.lower()
        return cls.locate(f"{DEFAULT_PREFIX}-{re.sub('[^a-z0-9]+', '-', host).strip('-')}")

    @property
    def config(self) -> Path:
        return self.folder / "config"

    @property
    def private_key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def build_host(self, name: str) -> str:
        """Return the host name of an instance; empty for the default one."""
        return f"{self.prefix}-{name}" if name else self.prefix

    def read_public_key(self) -> str:
        """Return type and key of the laptop's public key, without its comment.

        Raises:
            UsageError: There is no key.
        """
        try:
            return " ".join(self.private_key.with_suffix(".pub").read_text(encoding="ascii").split()[:2])
        except (OSError, ValueError):
            raise UsageError(
                f"There is no key in {self.folder}.\n"
                f"Make one: gpu-launch ssh-config{'' if self.prefix == DEFAULT_PREFIX else f' --prefix {self.prefix}'}"
            ) from None

    def read_hub_url(self) -> str:
        """Return the hub that the settings are for, empty if they are not written."""
        match = re.match(rf"{re.escape(_MARK)} (\S+)", _read_text(self.config))
        return match[1] if match else ""

    def read_user(self) -> str:
        """Return the user name in the settings, empty if they are not written."""
        match = re.search(r"^  User (\S+)$", _read_text(self.config), re.MULTILINE)
        return match[1] if match else ""

    def ensure_key(self) -> None:
        """Make the laptop's key if there is none.

        Raises:
            GpuLaunchError: ssh-keygen is missing or fails.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.private_key.exists():
            return
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpu-launch", "-f", str(self.private_key)]
        try:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except FileNotFoundError:
            raise GpuLaunchError(
                "ssh-keygen is missing on this machine: install OpenSSH's client (Debian: apt install openssh-client)."
            ) from None
        except subprocess.CalledProcessError as error:
            raise GpuLaunchError(f"ssh-keygen made no key: {error.stderr.strip()}") from None

    def write_config(self, hub: Hub, user: str, servers: Sequence[str]) -> None:
        """Write the settings for OpenSSH's client."""
        run_folder.write_private(self.config, build_config(self, hub, user, servers).encode())

    def pin_host_key(self, host_key: str) -> None:
        """Store the host key of the user's containers at the first connection; later ones must show the same.

        The key comes over the connection to the hub, before SSH begins: OpenSSH's client then checks it by itself.

        Raises:
            GpuLaunchError: Another key is stored.
        """
        line = f"{self.prefix} {host_key}\n"
        with contextlib.suppress(FileNotFoundError):
            if self.known_hosts.read_text(encoding="utf-8") == line:
                return
            raise GpuLaunchError(
                "The host key of your containers is another one than before.\n"
                "If you removed ~/.gpu_launch/ssh in your home there, remove this machine's copy of the old key: "
                f"{self.known_hosts}"
            )
        run_folder.write_private(self.known_hosts, line.encode())


def build_config(files: SshFiles, hub: Hub, user: str, servers: Sequence[str]) -> str:
    """Build the settings. The hosts of existing servers are listed, because programs such as VS Code offer those."""
    prefix = files.prefix
    listed = " ".join(f"{prefix}-{name}" for name in servers if name)
    # The client passes the host's name to a shell, in quotes: a name with a quote in it does not match.
    hosts = " ".join(part for part in (prefix, listed, f"{prefix}-*", '"!*\'*"') if part)
    # This interpreter, because gpu-launch may be in an environment that other programs do not know.
    command = [sys.executable, "-m", "gpu_launch.cli.main", "--hub", hub.url, "ssh-proxy", "--prefix", prefix]
    words = subprocess.list2cmdline(command) if os.name == "nt" else shlex.join(command)
    host = '"%n"' if os.name == "nt" else "'%n'"
    lines = [
        f"{_MARK} {hub.url}",
        f"Host {hosts}",
        f"  User {user}",
        f"  HostKeyAlias {prefix}",
        "  HostKeyAlgorithms ssh-ed25519",
        f'  UserKnownHostsFile "{files.known_hosts.as_posix()}"',
        "  StrictHostKeyChecking yes",
        "  CheckHostIP no",
        "  UpdateHostKeys no",
        f'  IdentityFile "{files.private_key.as_posix()}"',
        "  IdentitiesOnly yes",
        "  ServerAliveInterval 30",
        f"  ProxyCommand {words.replace('%', '%%')} {host}",
    ]
    return "\n".join(lines) + "\n"


def include_config(files: SshFiles, user_config: Path) -> bool:
    """Make OpenSSH's client read the settings; return whether its file was changed.

    Raises:
        GpuLaunchError: The user's settings cannot be read or written.
    """
    line = _build_include(files)
    text = _read_text(user_config)
    if line in text.splitlines():
        return False
    # At the top: below the first Host it would count for that host alone.
    _write_text(user_config, f"{line}\n{text}")
    return True


def exclude_config(files: SshFiles, user_config: Path) -> bool:
    """Undo `include_config`; return whether the file was changed.

    Raises:
        GpuLaunchError: The user's settings cannot be read or written.
    """
    line, text = _build_include(files), _read_text(user_config)
    if line not in text.splitlines():
        return False
    _write_text(user_config, "".join(kept for kept in text.splitlines(keepends=True) if kept.rstrip("\r\n") != line))
    return True


def _build_include(files: SshFiles) -> str:
    return f'Include "{files.config.as_posix()}"'


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeError) as error:
        raise GpuLaunchError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def _write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The file itself, which may be a link into a folder under version control.
        run_folder.write_private(path.resolve(), text.encode())
    except OSError as error:
        raise GpuLaunchError(f"{path} cannot be written: {error.strerror or error}.") from None
