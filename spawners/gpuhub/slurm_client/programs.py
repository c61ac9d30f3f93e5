"""Slurm's programs on the head node: where they are, their environment, and how they run as a user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuhub.slurm_client.models import Submitter


@dataclass(frozen=True, slots=True)
class SlurmPrograms:
    """Slurm's programs on this machine."""

    #: Their folder; None for PATH.
    commands: Path | None
    #: Path of slurm.conf; None for the programs' default.
    conf: Path | None

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment for them: nothing else of this process's own, which contains gpuhub's secrets."""
        path = os.environ.get("PATH", os.defpath)
        return {
            "PATH": path if self.commands is None else f"{self.commands}{os.pathsep}{path}",
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
            **({} if self.conf is None else {"SLURM_CONF": str(self.conf)}),
        }

    @property
    def place(self) -> str:
        """Return where they are looked for, such as `on PATH`."""
        return "on PATH" if self.commands is None else f"in {self.commands}"

    def find(self, program: str) -> str | None:
        """Return the path of a program, or None if it is not installed."""
        return shutil.which(program, path=None if self.commands is None else str(self.commands))


def build_user_command(command: Sequence[str], submitter: Submitter | None) -> list[str]:
    """Return the command line that runs a command as a user: by setpriv for root, else by sudo.

    Args:
        submitter: The user; None for the user of this process.
    """
    own = os.geteuid()
    if submitter is None or submitter.uid == own:
        return list(command)
    if own == 0:
        groups = f"--groups={','.join(map(str, submitter.groups))}" if submitter.groups else "--clear-groups"
        return ["setpriv", f"--reuid={submitter.uid}", f"--regid={submitter.gid}", groups, "--", *command]
    # The user is named by UID, because a name could be an option, or another user.
    return ["sudo", "--non-interactive", f"--user=#{submitter.uid}", "--", *command]
