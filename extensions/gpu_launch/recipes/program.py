"""What the programs of recipes have in common: their arguments, and their end after a usage error."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_launch.errors import UsageError

_USAGE = 2
_PACKAGES = ("torch", "transformers", "peft", "matplotlib")


def read_flag(text: str) -> bool:
    """Return the value of a recipe's flag."""
    return text == "true"


def read_path(text: str) -> Path | None:
    """Return the path; None for an empty text."""
    return Path(text).expanduser() if text else None


def parse_arguments(words: list[str] | None, **types: Callable[[str], Any]) -> argparse.Namespace:
    """Return the arguments of a program, all of which are needed: `adapter_rank=int` is `--adapter-rank N`."""
    parser = argparse.ArgumentParser()
    for name, kind in types.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    return parser.parse_args(words)


@contextmanager
def reported_errors(recipe: str, *needed: str) -> Iterator[None]:
    """End the process with one line for a usage error; first check that the image has the recipe's packages."""
    try:
        _check_packages((*_PACKAGES, *needed))
        yield
    except UsageError as error:
        sys.stderr.write(f"recipe:{recipe}: {error}\n")
        sys.exit(_USAGE)


def _check_packages(names: Sequence[str]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"this image has no {', '.join(missing)}: choose one for language models, such as --image "
            "gpuhub/llm:latest, or --profile."
        )
