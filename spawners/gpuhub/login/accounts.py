"""User names from a provider's names, and the binding of each name to one account of the provider.

Two names of a provider never give the same user name, except for capital letters: a plain name stays as it is, and an
address `ada@uni.edu` becomes `ada_uni.edu`, which is unique because no domain has an underscore. Only where the
settings name one single domain does it become `ada`.

Providers let users change their names, and give names that have become free to others. So the name decides at the first
login only; from then on the account's number does, which no provider gives twice. The binding outlives the user's
deletion, because home, scratch and UID do: `gpuhub user free` removes it.

Which UID, home and account of the head node a user name gets is decided in `config.users.identity`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpuhub.common import names
from gpuhub.common.errors import InvalidRequest, NotAllowed
from gpuhub.common.files import replace_file

#: Maximum length of a text from outside that is shown and logged, characters.
_MAX_SHOWN = 40


class AccountBindings:
    """The file of bindings, which the hub and `gpuhub user free` read and write."""

    def __init__(self, file: Path, provider: str) -> None:
        """Use the bindings of one provider in the file.

        Args:
            file: The file of all providers' bindings.
            provider: The scope of account numbers, such as "github".
        """
        self._file = file
        self._provider = provider

    def names(self) -> frozenset[str]:
        """Return the names that belong to accounts of the provider."""
        return frozenset(self._read().get(self._provider, ()))

    def bind(self, name: str, account: str) -> None:
        """Bind the name to the account.

        Raises:
            NotAllowed: The name belongs to another account, of this provider or of an earlier one.
        """
        with self._locked():
            providers = self._read()
            bindings = providers.setdefault(self._provider, {})
            if bindings.get(name) == account:
                return
            if name in bindings:
                raise NotAllowed(
                    f"the name {name} belongs to another account of the same provider, which logged in first. "
                    f"{_describe_remedy(name)}"
                )
            if any(name in others for others in providers.values()):
                raise NotAllowed(
                    f"the name {name} belongs to an account of the provider that this hub used before. "
                    f"{_describe_remedy(name)}"
                )
            # An account with a changed name keeps its old name as well, because that has a home here.
            bindings[name] = account
            self._write(providers)

    @classmethod
    def release(cls, file: Path, name: str) -> bool:
        """Remove the bindings of a name with all providers, and return whether there were any."""
        bindings = cls(file, "")
        with bindings._locked():
            providers = bindings._read()
            released = [others.pop(name) for others in providers.values() if name in others]
            if released:
                bindings._write(providers)
        return bool(released)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with os.fdopen(os.open(self._file.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, 0o600), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            content: dict[str, dict[str, str]] = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return content

    def _write(self, providers: dict[str, dict[str, str]]) -> None:
        replace_file(self._file, json.dumps(providers, indent=1, sort_keys=True))


def _describe_remedy(name: str) -> str:
    return f"An administrator can free it: `gpuhub user free {name}`, see docs/login.md"


def build_user_name(value: object, domains: Sequence[str] = ()) -> str:
    """Build the user name from the provider's claim.

    Raises:
        InvalidRequest: The claim cannot be a user name.
    """
    if not isinstance(value, str) or not value:
        raise InvalidRequest("the provider sent no name")
    local, at, domain = value.rpartition("@")
    address = local if tuple(domains) == (domain.lower(),) else f"{local}_{domain}"
    text = address if at else value
    # Some letters of other alphabets have a-z as their small letters, so only ASCII text is changed.
    name = text.lower() if text.isascii() else text
    if not is_valid_name(name):
        raise InvalidRequest(
            f"the name {quote_shortened(value)} cannot be a user's name here: {describe_name_pattern()}"
        )
    return name


def is_valid_name(name: str) -> bool:
    """Return whether the text can be a user name."""
    return re.fullmatch(names.USERNAME_PATTERN, name) is not None


def describe_name_pattern() -> str:
    """Return the form of user names, for messages."""
    return "a letter a-z, then at most 31 letters, digits, '.', '-' and '_' are needed"


def quote_shortened(text: str, length: int = _MAX_SHOWN) -> str:
    """Return untrusted text for a message or a log: quoted, escaped, and shortened."""
    cut = text if len(text) <= length else f"{text[:length]}…"
    return ascii(cut).replace("\\u2026'", "…'") + ("" if cut is text else f" ({len(text)} characters)")
