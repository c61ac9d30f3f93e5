"""Which of a provider's accounts each name here belongs to: the first that came, until the user is deleted.

Providers let people change their names, and give names that have become free to others. So the name decides at the
first login only; from then on it is the account's number, which no provider gives twice.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from gpuhub.errors import NotAllowed


class Accounts:
    """The file, read and written by the hub alone."""

    def __init__(self, file: Path, provider: str) -> None:
        """`provider`: what the numbers belong to, such as "github"; with another provider everybody is new."""
        self._file = file
        self._provider = provider

    def claim(self, name: str, account: str) -> None:
        """Let `account` be `name` here, unless another account is.

        Raises:
            NotAllowed: the name belongs to another account.
        """
        everyone = self._read()
        mine = everyone.setdefault(self._provider, {})
        if mine.get(name) == account:
            return
        if name in mine:
            raise NotAllowed(
                f"the name {name} belongs to another account of the same provider, which came first. An administrator "
                "can free it: by deleting the user on the hub's page for administrators"
            )
        # An account whose name was changed at the provider keeps the old one too: that has a home here.
        mine[name] = account
        self._write(everyone)

    def forget(self, name: str) -> None:
        """The name is free again."""
        everyone = self._read()
        if everyone.get(self._provider, {}).pop(name, None) is not None:
            self._write(everyone)

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            found: dict[str, dict[str, str]] = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return found

    def _write(self, everyone: dict[str, dict[str, str]]) -> None:
        temporary = self._file.with_suffix(".new")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            json.dump(everyone, out, indent=1, sort_keys=True)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(self._file)
