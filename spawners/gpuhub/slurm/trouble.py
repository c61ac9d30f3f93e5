"""What Slurm says when something is wrong, as gpuhub's exceptions. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from gpuhub.errors import SetupError
from gpuhub.slurm.api import SlurmRefused, SlurmUnreachable

#: `--json` and slurmrestd's v0.0.38 are of this version.
OLDEST = (22, 5)
_T = TypeVar("_T")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
#: Before the words that matter: `sbatch: error: Batch job submission failed: `, `slurm_load_jobs error: `.
_WHO = re.compile(r"^(?:[\w-]+: )?(?:error|fatal): |^\w+ error: ")
#: Nobody answers, or cannot yet. A job whose database index is being set can't be changed: there somebody does answer,
#: and where no slurmdbd runs that index is never set again once the job has given nodes back.
_SILENCE = re.compile(
    r"unable to contact slurm|connect failure|connection (?:failure|refused|timed out|reset)|socket timed out"
    r"|if munged is up|munge (?:en|de)code|auth_munge|protocol authentication|unexpected message received"
    r"|zero bytes were transmitted|controller is in standby|not available right now(?!, the db index)|unspecified error"
    r"|temporarily (?:unable|unavailable|disabled)|unable to (?:establish|process) configuration|cannot stat file"
    r"|sending (?:persistconninit|message)|database connection|dns srv",
    re.IGNORECASE,
)
#: A job that has ended, or that slurmctld does not know.
_OVER = re.compile(
    r"invalid job id|already (?:finished|completing|done)|already in a? ?final|(?:not|can not) be altered now"
    r"|job/step already|not? (?:pending|running)",
    re.IGNORECASE,
)


def read(parse: Callable[..., _T], *given: object) -> _T:
    """What a parser makes of Slurm's words.

    Raises:
        SlurmUnreachable: it can't read them: what Slurm's jobs do is unknown then.
    """
    try:
        return parse(*given)
    except ValueError as error:
        raise SlurmUnreachable(f"Slurm answers in words that are not known: {str(error)[:300]}") from error


def is_silence(said: str) -> bool:
    """Whether a command complains that nobody answers; what it printed besides is worth nothing then."""
    return _SILENCE.search(said) is not None


def is_over(said: str) -> bool:
    """Whether a refusal only says that the job has ended, or is known to nobody."""
    return _OVER.search(said) is not None


def last_words(said: str) -> str:
    """What matters of an error: without who says it, and each line once."""
    lines = dict.fromkeys(_WHO.sub("", line.strip()) for line in said.splitlines())
    return "; ".join(line for line in lines if line)[:500]


def parse_refusal(said: str) -> SlurmRefused | SlurmUnreachable:
    """The exception for what a command that failed has said."""
    words = last_words(said) or "a command of Slurm's failed without a word"
    if is_silence(said):
        return SlurmUnreachable(f"Slurm does not answer: {words}")
    return SlurmRefused(f"Slurm says: {words}")


def parse_version(said: str) -> tuple[int, ...]:
    """The version in such as `slurm-wlm 22.05.8`.

    Raises:
        SetupError: there is none.
    """
    match = _VERSION.search(said)
    if match is None:
        raise SetupError(f"Slurm's version can't be told from {said[:100]!r}")
    return tuple(int(part) for part in match.groups() if part is not None)


def require_version(version: tuple[int, ...]) -> None:
    """Raises SetupError for a Slurm of too old a version."""
    if version < OLDEST:
        raise SetupError(f"Slurm {format_version(version)} is too old: 22.05 is the oldest that works")


def format_version(version: tuple[int, ...]) -> str:
    """As Slurm writes it: 22.05.8."""
    year, month, *further = version
    return ".".join([f"{year}", f"{month:02d}", *map(str, further)])
