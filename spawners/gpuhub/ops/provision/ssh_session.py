"""The administrator's SSH connection to a machine: its target, and a session with their keys, agent or password."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import urlsplit

from gpuhub.common.errors import InvalidRequest, SetupError
from gpuhub.docker.ssh import REMOTE_SOCKET, HostKey, format_known_hosts

#: Users and hosts without a special meaning to ssh and to a shell.
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,252}[A-Za-z0-9])?")
_ALIAS = "gpuhub-new-node"
#: Arguments without a meaning to a shell.
_PLAIN = re.compile(r"[A-Za-z0-9/._:,+=@-]+")
#: Maximum wait for a login, which may ask for a password, seconds.
_LOGIN_S = 120
#: Maximum duration of a script, seconds.
_SCRIPT_S = 90
#: Under `sudo`, the keys and the agent of its caller are used.
_CALLER = "SUDO_USER"


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """A machine as it was named; None means the value in the administrator's settings of ssh."""

    host: str
    user: str | None = None
    port: int | None = None

    def arguments(self) -> list[str]:
        """Return the arguments of ssh, with the machine after the end of the options."""
        port = [] if self.port is None else ["-p", str(self.port)]
        user = [] if self.user is None else ["-l", self.user]
        return [*port, *user, "--", self.host]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTarget:
    """A target as the administrator's ssh resolves it (`ssh -G`)."""

    host: str
    user: str
    port: int
    #: Another machine that the connection goes through.
    jump: str | None = None
    known_hosts: tuple[str, ...] = ()


def parse_target(text: str) -> SshTarget:
    """Parse a target such as `ssh://me@rig2:22`; user and port are optional.

    Raises:
        InvalidRequest: The text has another form.
    """
    url = urlsplit(text)
    try:
        port = url.port
    except ValueError:
        port = -1
    user_fits = url.username is None or _USER.fullmatch(url.username)
    if (
        url.scheme != "ssh"
        or url.hostname is None
        or not _HOST.fullmatch(url.hostname)
        or not user_fits
        or url.password is not None
        or url.path not in {"", "/"}
        or url.query
        or url.fragment
        or port == -1
    ):
        raise InvalidRequest(f"{text!r} is not an SSH address: write such as ssh://me@rig2 or ssh://me@192.168.1.22:22")
    return SshTarget(host=url.hostname, user=url.username, port=port)


def parse_resolved(text: str) -> ResolvedTarget:
    """Parse the output of `ssh -G`: a name, a space and its value on each line."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key.lower(), value.strip())
    jump = next((values[key] for key in ("proxyjump", "proxycommand") if values.get(key, "none") != "none"), None)
    files = f"{values.get('userknownhostsfile', '')} {values.get('globalknownhostsfile', '')}".split()
    return ResolvedTarget(
        host=values["hostname"], user=values["user"], port=int(values["port"]), jump=jump, known_hosts=tuple(files)
    )


def suggest_name(target: SshTarget, taken: Sequence[str]) -> str:
    """Return a free name for a node: the first part of the machine's name, or `rigN` for an address."""
    first = target.host.split(".")[0].lower()
    if re.fullmatch(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?", first) and first not in taken:
        return first
    return next(name for number in range(1, len(taken) + 2) if (name := f"rig{number}") not in taken)


def build_ssh_url(user: str, address: str, port: int) -> str:
    """Return the SSH address for cluster.toml."""
    host = f"[{address}]" if ":" in address else address
    return f"ssh://{user}@{host}{'' if port == 22 else f':{port}'}"


class SshSession:
    """A connection that runs scripts on the machine and forwards its Docker socket; use as a context."""

    def __init__(self, target: SshTarget, host_keys: Iterable[HostKey]) -> None:
        self._target = target
        self._prefix = _as_caller()
        self._folder = Path(tempfile.mkdtemp(prefix="gpuhub-ssh-"))
        known_hosts = self._folder / "known_hosts"
        known_hosts.write_text(format_known_hosts(_ALIAS, host_keys), encoding="ascii")
        known_hosts.chmod(0o644)
        caller = os.environ.get(_CALLER)
        if caller and self._prefix:
            os.chown(self._folder, pwd.getpwnam(caller).pw_uid, -1)
        # The keys were compared before: ssh does not ask, and accepts no others.
        self._options = [
            "-o", f"UserKnownHostsFile={known_hosts}",
            "-o", "GlobalKnownHostsFile=/dev/null",
            "-o", f"HostKeyAlias={_ALIAS}",
            "-o", "StrictHostKeyChecking=yes",
            "-o", "UpdateHostKeys=no",
            # The administrator's settings for interactive sessions would interfere.
            "-a", "-x", "-T",
            "-o", "RemoteCommand=none",
            "-o", f"ControlPath={self._folder / 'master'}",
        ]  # fmt: skip

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and remove its files."""
        self._ssh(["-O", "exit"], timeout_s=10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        as_root: bool = False,
        data: str = "",
        timeout_s: float = _SCRIPT_S,
    ) -> str:
        """Run a POSIX script there, and return its output; `data` follows the script on its standard input.

        Raises:
            SetupError: It fails; the text has its last line.
            ValueError: An argument has a meaning to a shell.
        """
        _check_plain(arguments)
        shell = ["sudo", "-n", "sh", "-s"] if as_root else ["sh", "-s"]
        done = self._ssh(
            [], [*shell, "--", *arguments] if arguments else shell, stdin=script + data, timeout_s=timeout_s
        )
        if done.returncode:
            raise SetupError(f"on {self._target.host}: {_last_line(done.stderr or done.stdout, done.returncode)}")
        return done.stdout

    def send_file(
        self, file: Path, script: str, arguments: Sequence[str] = (), *, as_root: bool = False, timeout_s: float
    ) -> None:
        """Run a POSIX script of one line there, with a file on its standard input.

        Raises:
            SetupError: It fails; the text has its last line.
            ValueError: An argument has a meaning to a shell.
        """
        _check_plain(arguments)
        shell = [*(["sudo", "-n"] if as_root else []), "sh", "-c", shlex.quote(script), "sh", *arguments]
        with file.open("rb") as stream:
            done = self._ssh([], shell, stdin=stream, timeout_s=timeout_s)
        if done.returncode:
            raise SetupError(f"on {self._target.host}: {_last_line(done.stderr or done.stdout, done.returncode)}")

    def forward_docker_socket(self) -> Path:
        """Return a local socket that leads to the machine's Docker until the connection is closed.

        Raises:
            SetupError: Its SSH server does not forward sockets.
        """
        local = self._folder / "docker.sock"
        done = self._ssh(["-o", "StreamLocalBindMask=0177", "-O", "forward", "-L", f"{local}:{REMOTE_SOCKET}"])
        if done.returncode:
            raise SetupError(
                f"{REMOTE_SOCKET} of {self._target.host} cannot be forwarded: {_last_line(done.stderr, 1)}"
            )
        return local

    def _open(self) -> None:
        """Log in; ssh asks for passwords at the terminal."""
        errors = self._folder / "errors"
        command = [*self._prefix, "ssh", *self._options, "-o", "ControlMaster=yes", "-o", "ControlPersist=yes"]
        command += ["-o", "ClearAllForwardings=yes", "-fN"]
        with errors.open("w") as output:
            try:
                done = subprocess.run(
                    [*command, *self._target.arguments()], check=False, stdout=output, stderr=output, timeout=_LOGIN_S
                )
            except subprocess.TimeoutExpired:
                raise SetupError(f"the login to {self._target.host} took longer than {_LOGIN_S} s") from None
        if done.returncode:
            raise SetupError(
                f"{self._target.host} refused the login: {_last_line(errors.read_text(errors='replace'), 255)}. "
                f"`ssh {' '.join(self._target.arguments()[:-2])} {self._target.host}` must work first; under sudo, "
                "with the agent's keys: sudo --preserve-env=SSH_AUTH_SOCK"
            )

    def _ssh(
        self, options: Sequence[str], command: Sequence[str] = (), *, stdin: str | IO[bytes] = "", timeout_s: float = 30
    ) -> subprocess.CompletedProcess[str]:
        line = [*self._prefix, "ssh", *self._options, *options, *self._target.arguments(), *command]
        given: dict[str, Any] = {"input": stdin} if isinstance(stdin, str) else {"stdin": stdin}
        try:
            return subprocess.run(line, check=False, capture_output=True, text=True, timeout=timeout_s, **given)
        except subprocess.TimeoutExpired:
            raise SetupError(f"the command on {self._target.host} took longer than {timeout_s:.0f} s") from None


def _check_plain(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if not _PLAIN.fullmatch(argument):
            raise ValueError(f"{argument!r} has a meaning to a shell")


def resolve_target(target: SshTarget) -> ResolvedTarget:
    """Resolve a target with the administrator's settings of ssh.

    Raises:
        SetupError: ssh is missing, or its settings are wrong.
    """
    try:
        done = subprocess.run(
            [*_as_caller(), "ssh", "-G", *target.arguments()], check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise SetupError("ssh is missing: install openssh-client") from None
    if done.returncode:
        raise SetupError(f"ssh cannot resolve {target.host}: {_last_line(done.stderr, done.returncode)}")
    resolved = parse_resolved(done.stdout)
    home = _home()
    return ResolvedTarget(
        host=resolved.host,
        user=resolved.user,
        port=resolved.port,
        jump=resolved.jump,
        known_hosts=tuple(file.replace("~", home, 1) for file in resolved.known_hosts),
    )


def resolve_direct_target(target: SshTarget) -> ResolvedTarget:
    """Resolve a target that the head node reaches without another machine in between.

    Raises:
        InvalidRequest: ssh goes through another machine.
        SetupError: ssh is missing, or its settings are wrong.
    """
    resolved = resolve_target(target)
    if resolved.jump is not None:
        raise InvalidRequest(
            f"ssh reaches {target.host} through {resolved.jump}: hub and broker need an address that the head "
            "node can reach directly"
        )
    return resolved


def _as_caller() -> list[str]:
    caller = os.environ.get(_CALLER, "root")
    return [] if caller == "root" or os.geteuid() != 0 else ["runuser", "-u", caller, "--"]


def _home() -> str:
    caller = os.environ.get(_CALLER)
    return pwd.getpwnam(caller).pw_dir if caller and _as_caller() else pwd.getpwuid(os.geteuid()).pw_dir


def _last_line(text: str, status: int) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else f"it ended with status {status} and no output"
