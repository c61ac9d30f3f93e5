"""Translates Slurm's error messages into gpuhub's exceptions, and checks Slurm's version."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from gpuhub.common.errors import SetupError
from gpuhub.slurm_client.interface import SlurmRefused, SlurmUnreachable

#: Oldest supported version, the first with `--json` and slurmrestd's v0.0.38.
MIN_VERSION = (22, 5)
_T = TypeVar("_T")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
#: Prefixes of messages, such as `sbatch: error: ` and `slurm_load_jobs error: `.
_PREFIX = re.compile(r"^(?:[\w-]+: )?(?:error|fatal): |^\w+ error: ")
#: Messages of a Slurm that does not answer, or cannot yet. The message about a job's missing database index is not one:
#: slurmctld does answer then, and without slurmdbd the index is never set again once the job has released nodes.
_UNREACHABLE = re.compile(
    r"unable to contact slurm|connect failure|connection (?:failure|refused|timed out|reset)|socket timed out"
    r"|if munged is up|munge (?:en|de)code|auth_munge|protocol authentication|unexpected message received"
    r"|zero bytes were transmitted|controller is in standby|not available right now(?!, the db index)|unspecified error"
    r"|temporarily (?:unable|unavailable|disabled)|unable to (?:establish|process) configuration|cannot stat file"
    r"|sending (?:persistconninit|message)|database connection|dns srv",
    re.IGNORECASE,
)
#: Messages about a job that has ended, or that slurmctld does not know.
_JOB_OVER = re.compile(
    r"invalid job id|already (?:finished|completing|done)|already in a? ?final|(?:not|can not) be altered now"
    r"|job/step already|not? (?:pending|running)",
    re.IGNORECASE,
)


def parse_output(parse: Callable[..., _T], *arguments: object) -> _T:
    """Return a parser's result for Slurm's output.

    Raises:
        SlurmUnreachable: The parser fails, so the state of Slurm's jobs is unknown.
    """
    try:
        return parse(*arguments)
    except ValueError as error:
        raise SlurmUnreachable(f"Slurm's answer has an unknown form: {str(error)[:300]}") from error


def is_unreachable(message: str) -> bool:
    """Return whether a message reports that Slurm does not answer; the command's other output is invalid then."""
    return _UNREACHABLE.search(message) is not None


def is_job_over(message: str) -> bool:
    """Return whether a refusal means that the job has ended or is unknown."""
    return _JOB_OVER.search(message) is not None


def shorten_error(message: str) -> str:
    """Return an error's lines without prefixes and duplicates."""
    lines = dict.fromkeys(_PREFIX.sub("", line.strip()) for line in message.splitlines())
    return "; ".join(line for line in lines if line)[:500]


def parse_refusal(message: str) -> SlurmRefused | SlurmUnreachable:
    """Return the exception for the output of a failed command."""
    short = shorten_error(message) or "a Slurm command failed without a message"
    if is_unreachable(message):
        return SlurmUnreachable(f"Slurm does not answer: {short}")
    return SlurmRefused(f"Slurm says: {short}")


def parse_version(text: str) -> tuple[int, ...]:
    """Return the version in a text such as `slurm-wlm 22.05.8`.

    Raises:
        SetupError: The text has no version.
    """
    match = _VERSION.search(text)
    if match is None:
        raise SetupError(f"Slurm's version is not in {text[:100]!r}")
    return tuple(int(part) for part in match.groups() if part is not None)


def require_version(version: tuple[int, ...]) -> None:
    """Raise SetupError if Slurm's version is too old."""
    if version < MIN_VERSION:
        raise SetupError(f"Slurm {format_version(version)} is too old: 22.05 or newer is needed")


def format_version(version: tuple[int, ...]) -> str:
    """Return the version in Slurm's form, such as 22.05.8."""
    year, month, *further = version
    return ".".join([f"{year}", f"{month:02d}", *map(str, further)])
