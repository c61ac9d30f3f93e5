"""From a provider's name of somebody to the name here; pure.

Two providers' names never give one name here, but for capitals (`accounts` refuses the second of those): a plain name
stays as it is, and an address `ada@uni.edu` becomes `ada_uni.edu`, which can be undone because no domain has an
underscore; only where the settings name one single domain does it become `ada`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuhub import names
from gpuhub.errors import InvalidRequest

#: Of text that somebody else chose, so much is shown and logged.
_SHOWN = 40


def name_here(value: object, domains: Sequence[str] = ()) -> str:
    """The user's name here, from the provider's claim.

    Raises:
        InvalidRequest: it cannot be one; says why.
    """
    if not isinstance(value, str) or not value:
        raise InvalidRequest("the provider did not say a name")
    local, at, domain = value.rpartition("@")
    address = local if tuple(domains) == (domain.lower(),) else f"{local}_{domain}"
    text = address if at else value
    # Some letters of other alphabets become a-z in small print: only what is ASCII already is changed.
    name = text.lower() if text.isascii() else text
    if not is_valid(name):
        raise InvalidRequest(f"the name {shorten(value)} cannot be a user's name here: {explain_pattern()}")
    return name


def is_valid(name: str) -> bool:
    """Whether it can be a user's name here."""
    return re.fullmatch(names.USERNAME_PATTERN, name) is not None


def explain_pattern() -> str:
    """What a name looks like."""
    return "a letter a-z, then at most 31 letters, digits, '.', '-' and '_' are needed"


def shorten(text: str, length: int = _SHOWN) -> str:
    """Somebody else's text for a message or a log: quoted, escaped, and never long."""
    cut = text if len(text) <= length else f"{text[:length]}…"
    return ascii(cut).replace("\\u2026'", "…'") + ("" if cut is text else f" ({len(text)} characters)")
