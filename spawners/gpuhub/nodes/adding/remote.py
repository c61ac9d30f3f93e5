"""The administrator's own SSH connection to a machine: opened once, with their keys, agent or password."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from gpuhub.containers.ssh import REMOTE_SOCKET
from gpuhub.errors import SetupError
from gpuhub.nodes.adding.hostkeys import HostKey, format_known_hosts
from gpuhub.nodes.adding.target import Resolved, Target, parse_resolved

_ALIAS = "gpuhub-new-node"
#: Words that a shell takes as they are.
_PLAIN = re.compile(r"[A-Za-z0-9/._:,+=@-]+")
_LOGIN_S = 120
_SCRIPT_S = 90
#: Under `sudo`, the keys and the agent are those of who called it.
_CALLER = "SUDO_USER"


class Remote:
    """Runs scripts on the machine, and brings its Docker socket here; use as a context."""

    def __init__(self, target: Target, host_keys: Iterable[HostKey]) -> None:
        self._target = target
        self._prefix = _as_caller()
        self._folder = Path(tempfile.mkdtemp(prefix="gpuhub-ssh-"))
        known = self._folder / "known_hosts"
        known.write_text(format_known_hosts(_ALIAS, host_keys), encoding="ascii")
        known.chmod(0o644)
        caller = os.environ.get(_CALLER)
        if caller and self._prefix:
            os.chown(self._folder, pwd.getpwnam(caller).pw_uid, -1)
        # The keys were compared a moment ago: ssh asks nothing, and accepts nothing else.
        self._options = [
            "-o", f"UserKnownHostsFile={known}",
            "-o", "GlobalKnownHostsFile=/dev/null",
            "-o", f"HostKeyAlias={_ALIAS}",
            "-o", "StrictHostKeyChecking=yes",
            "-o", "UpdateHostKeys=no",
            # What the administrator has set for sittings of their own would be in the way.
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
        """End the connection and forget the files."""
        self._ssh(["-O", "exit"], timeout_s=10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, script: str, words: Sequence[str] = (), *, as_root: bool = False, data: str = "") -> str:
        """Run a POSIX script there, and return what it prints; `data` stands after it where the script reads on.

        Raises:
            SetupError: it fails, with its last words.
            ValueError: a word would mean something to a shell.
        """
        for word in words:
            if not _PLAIN.fullmatch(word):
                raise ValueError(f"{word!r} is no plain word")
        shell = ["sudo", "-n", "sh", "-s"] if as_root else ["sh", "-s"]
        done = self._ssh([], [*shell, "--", *words] if words else shell, stdin=script + data, timeout_s=_SCRIPT_S)
        if done.returncode:
            raise SetupError(f"on {self._target.host}: {_last_line(done.stderr or done.stdout, done.returncode)}")
        return done.stdout

    def bring_docker(self) -> Path:
        """A socket here that leads to the machine's Docker, until the connection is closed.

        Raises:
            SetupError: its SSH server forwards no sockets.
        """
        local = self._folder / "docker.sock"
        done = self._ssh(["-o", "StreamLocalBindMask=0177", "-O", "forward", "-L", f"{local}:{REMOTE_SOCKET}"])
        if done.returncode:
            raise SetupError(
                f"{REMOTE_SOCKET} of {self._target.host} cannot be brought here: {_last_line(done.stderr, 1)}"
            )
        return local

    def _open(self) -> None:
        """Log in; ssh itself asks for passwords at the terminal."""
        errors = self._folder / "errors"
        command = [*self._prefix, "ssh", *self._options, "-o", "ControlMaster=yes", "-o", "ControlPersist=yes"]
        command += ["-o", "ClearAllForwardings=yes", "-fN"]
        with errors.open("w") as output:
            try:
                done = subprocess.run(
                    [*command, *self._target.words()], check=False, stdout=output, stderr=output, timeout=_LOGIN_S
                )
            except subprocess.TimeoutExpired:
                raise SetupError(f"{self._target.host} did not let you in within {_LOGIN_S} s") from None
        if done.returncode:
            raise SetupError(
                f"{self._target.host} does not let you in: {_last_line(errors.read_text(errors='replace'), 255)}. "
                f"`ssh {' '.join(self._target.words()[:-2])} {self._target.host}` must work first; under sudo, with "
                "the agent's keys: sudo --preserve-env=SSH_AUTH_SOCK"
            )

    def _ssh(
        self, options: Sequence[str], command: Sequence[str] = (), *, stdin: str = "", timeout_s: float = 30
    ) -> subprocess.CompletedProcess[str]:
        line = [*self._prefix, "ssh", *self._options, *options, *self._target.words(), *command]
        try:
            return subprocess.run(line, check=False, capture_output=True, text=True, input=stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise SetupError(f"{self._target.host} did not come to an end within {timeout_s:.0f} s") from None


def resolve(target: Target) -> Resolved:
    """Where the administrator's own settings of ssh lead.

    Raises:
        SetupError: ssh is missing, or its settings are wrong.
    """
    try:
        done = subprocess.run(
            [*_as_caller(), "ssh", "-G", *target.words()], check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise SetupError("ssh is missing: install openssh-client") from None
    if done.returncode:
        raise SetupError(f"ssh cannot be asked for {target.host}: {_last_line(done.stderr, done.returncode)}")
    found = parse_resolved(done.stdout)
    home = _home()
    return Resolved(
        host=found.host,
        user=found.user,
        port=found.port,
        jump=found.jump,
        known_hosts=tuple(file.replace("~", home, 1) for file in found.known_hosts),
    )


def _as_caller() -> list[str]:
    caller = os.environ.get(_CALLER, "root")
    return [] if caller == "root" or os.geteuid() != 0 else ["runuser", "-u", caller, "--"]


def _home() -> str:
    caller = os.environ.get(_CALLER)
    return pwd.getpwnam(caller).pw_dir if caller and _as_caller() else pwd.getpwuid(os.geteuid()).pw_dir


def _last_line(text: str, status: int) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else f"it ended with status {status} and without a word"
