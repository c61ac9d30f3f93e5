"""The folder of a model that a user names: by its path, or by its name among shared or downloaded models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gpu_launch.common import shared_models
from gpu_launch.errors import UsageError
from gpu_launch.serving.model_files import CONFIG

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def find_folder(model: str, *, cwd: Path, environ: Mapping[str, str], home: Path) -> Path:
    """Return the folder of a model: a path, a name in the cluster's folder of models, or one in the user's cache.

    Raises:
        UsageError: there is none.
    """
    if not model.strip() or "\0" in model or len(model) > 4096:
        raise UsageError("MODEL: a folder with a model, or a model's name, is needed.")
    path = cwd / Path(model).expanduser()
    if path.is_dir():
        return path
    shared = environ.get(shared_models.VARIABLE, "")
    if _NAME.fullmatch(model):
        places = [Path(shared) / "hub"] if shared else []
        for cache in (*places, shared_models.find_cache(environ, home)):
            if (folder := _find_snapshot(cache / f"models--{model.replace('/', '--')}")) is not None:
                return folder
        if shared and (Path(shared) / model / CONFIG).is_file():
            return Path(shared) / model
    known = list_names(environ, home)
    names = f" Models by name here: {', '.join(known[:10])}{' …' if len(known) > 10 else ''}." if known else ""
    raise UsageError(
        f"{model}: there is no such folder in {cwd}, and no model of that name in the cluster's models or in your "
        f"Hugging Face cache.{names} Download one with: hf download {model if '/' in model else 'NAME'}"
    )


def check_shared(folder: Path, *, environ: Mapping[str, str], home: Path) -> None:
    """Refuse a folder that other nodes do not have.

    Raises:
        UsageError: naming it.
    """
    roots = [home, Path("/datasets"), *([Path(shared)] if (shared := environ.get(shared_models.VARIABLE)) else [])]
    real = folder.resolve()
    if not any(real.is_relative_to(root.resolve()) for root in roots):
        raise UsageError(f"{folder} is not on other nodes. Use a folder in {', '.join(map(str, roots))}.")


def list_names(environ: Mapping[str, str], home: Path) -> list[str]:
    """Return the models that can be named."""
    names: set[str] = set()
    shared = environ.get(shared_models.VARIABLE, "")
    for cache in (*([Path(shared) / "hub"] if shared else []), shared_models.find_cache(environ, home)):
        try:
            entries = sorted(cache.glob("models--*"))
        except OSError:
            continue
        names |= {
            entry.name.removeprefix("models--").replace("--", "/", 1) for entry in entries if _find_snapshot(entry)
        }
    return sorted(names)


def _find_snapshot(model: Path) -> Path | None:
    """Return the folder of a model's revision in a cache: that of `main`, else the only one."""
    try:
        commit = (model / "refs" / "main").read_text(encoding="ascii")[:64].strip()
    except (OSError, UnicodeError):
        commit = ""
    if _COMMIT.fullmatch(commit) and (model / "snapshots" / commit / CONFIG).is_file():
        return model / "snapshots" / commit
    try:
        complete = [folder for folder in (model / "snapshots").iterdir() if (folder / CONFIG).is_file()]
    except OSError:
        return None
    return complete[0] if len(complete) == 1 else None
