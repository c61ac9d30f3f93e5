"""Variables for a job, as `--env` and `--secret` give them. Pure but for what is taken over from this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gpu_launch.environment import SECRET_PREFIXES
from gpu_launch.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse(flag: str, words: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` alone for this machine's own value. Values are in no error's text."""
    found = {}
    for word in words:
        name, has_value, value = word.partition("=")
        check_name(flag, name)
        if not has_value:
            if name not in own:
                raise UsageError(f"{flag} {name}: it is not set here; give it as {name}=VALUE.")
            value = own[name]
        if "\0" in value:
            raise UsageError(f"{flag} {name}: a value cannot hold a null character.")
        found[name] = value
    return found


def check_name(flag: str, name: str) -> None:
    """Raises UsageError for what cannot be a variable of a job."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{flag} {name}: a variable's name is needed, such as {flag} LR=0.1.")
    if name.startswith(SECRET_PREFIXES):
        raise UsageError(f"{flag} {name}: variables of JupyterHub and ipyparallel are not handed to jobs.")
