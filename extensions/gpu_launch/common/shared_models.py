"""The cluster's models in the user's own cache of Hugging Face, so that programs find them by name.

Hugging Face's libraries have one cache, and write to it. The one in the home stays theirs: for each model of the
cluster's it gets the revisions' names and a link for each revision, a few hundred bytes. What is newer, or another
model, is downloaded into the home as ever; so are tokens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

#: The variable with the folder of the cluster's models.
VARIABLE = "GPUHUB_MODELS"
#: The cache in it, in Hugging Face's own format.
_CACHE = "hub"
_MODEL = re.compile(r"(models|datasets)--[A-Za-z0-9._-]{1,200}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: Maximum number of models that are linked.
_MOST_MODELS = 2000
#: Maximum number of revisions of a model, and of names of revisions, that are linked.
_MOST_REVISIONS = 50

log = logging.getLogger(__name__)


def find_cache(environ: Mapping[str, str], home: Path) -> Path:
    """Return the user's cache, where Hugging Face's libraries look for it."""
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache)
    if folder := environ.get("HF_HOME"):
        return Path(folder) / "hub"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface" / "hub"


def start_linking(environ: Mapping[str, str], home: Path) -> None:
    """Link the cluster's models in a thread: nothing waits for a file server that does not answer."""
    if environ.get(VARIABLE):
        threading.Thread(target=link_models, args=(environ, home), name="shared models", daemon=True).start()


def link_models(environ: Mapping[str, str], home: Path) -> int:
    """Link the cluster's models into the user's cache; return the number of models that it has from there.

    It may run in several containers of a home at once. A cache that cannot be written is reported in the log.
    """
    folder = environ.get(VARIABLE)
    if not folder:
        return 0
    cache, count = find_cache(environ, home), 0
    try:
        for shared in _list(Path(folder) / _CACHE, _MODEL, _MOST_MODELS):
            count += _link_model(shared, cache / shared.name)
    except OSError as error:
        log.warning("the cluster's models are not in %s: %s", cache, error)
    return count


def _link_model(shared: Path, own: Path) -> bool:
    revisions = list(_list(shared / "snapshots", _COMMIT, _MOST_REVISIONS))
    if not revisions or own.is_symlink():
        return False
    (own / "snapshots").mkdir(parents=True, exist_ok=True)
    (own / "refs").mkdir(exist_ok=True)
    for revision in revisions:
        with contextlib.suppress(FileExistsError):  # another container's, or what the user downloaded
            (own / "snapshots" / revision.name).symlink_to(revision)
    for ref in _list(shared / "refs", _REF, _MOST_REVISIONS):
        _copy_ref(ref, own)
    for link in _list(own / "snapshots", _COMMIT, _MOST_REVISIONS):
        if link.is_symlink() and not link.exists():  # a revision that the administrator has removed
            link.unlink(missing_ok=True)
    return True


def _copy_ref(shared: Path, own: Path) -> None:
    """Give a revision's name the cluster's commit, unless the user has downloaded another one under this name."""
    commit = _read_commit(shared)
    target = own / "refs" / shared.name
    before = _read_commit(target)
    if commit is None or commit == before:
        return
    if before is not None and (own / "snapshots" / before).is_dir() and not (own / "snapshots" / before).is_symlink():
        return
    draft = target.with_name(f".{shared.name}.{os.getpid()}")
    draft.write_text(commit, encoding="ascii")
    draft.replace(target)


def _read_commit(ref: Path) -> str | None:
    try:
        with ref.open(encoding="ascii", errors="replace") as file:
            commit = file.read(64).strip()
    except OSError:
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _list(folder: Path, names: re.Pattern[str], most: int) -> Iterator[Path]:
    """Return the entries with such names, `most` at most; none if there is no folder."""
    try:
        entries = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return iter(())
    return iter([entry for entry in entries if names.fullmatch(entry.name)][:most])
