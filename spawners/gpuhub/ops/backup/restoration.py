"""`gpuhub restore`: puts the state of a backup onto a head node where nothing runs, all of it or nothing."""

from __future__ import annotations

import filecmp
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuhub.broker.db.engine import check_revision
from gpuhub.broker.db.store import lock_path
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths, acquire_lock
from gpuhub.config import settings
from gpuhub.config.database import DatabaseSettings, password_path
from gpuhub.ops.backup import archive, databases
from gpuhub.ops.backup.archive import Manifest
from gpuhub.ops.backup.contents import CLUSTER_FILE, DATABASES, OWN_CONFIG, STATE_FOLDERS, Head, is_state_file

#: Ends of the files next to a SQLite database that belong to it.
_SQLITE_ENDS = ("", "-wal", "-shm", "-journal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A file or folder that a restoration puts into its place, or removes from there."""

    target: Path
    #: None: nothing replaces what is there.
    source: Path | None
    #: What is there now differs.
    is_conflict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """An extracted backup, checked, and what it replaces."""

    manifest: Manifest
    folder: Path
    head: Head
    database: DatabaseSettings
    replacements: tuple[Replacement, ...]
    #: PostgreSQL has tables of this instance.
    replaces_schemas: bool

    @property
    def conflicts(self) -> list[str]:
        """Return what is there now and will be replaced."""
        paths = [str(item.target) for item in self.replacements if item.is_conflict]
        return [*paths, *(["the tables in PostgreSQL"] if self.replaces_schemas else [])]


@contextmanager
def open_backup(file: Path, head: Head, passphrase: str | None) -> Iterator[Restoration]:
    """Extract a backup next to where it goes, check it, and keep hub and broker from starting.

    Raises:
        SettingsError: It is not a whole backup of gpuhub, or is one of another instance.
        SetupError: Hub or broker run, a newer version wrote the backup, or the disk is full.
    """
    paths = head.paths
    paths.state.mkdir(mode=0o711, parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_hold_locks(paths))
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix=".restore-", dir=paths.state))
        folder = Path(name)
        manifest = archive.extract_archive(file, folder, passphrase)
        if manifest.instance != paths.instance:
            raise SettingsError(
                f"{file} is a backup of the instance {manifest.instance!r}, whose containers carry its name: use "
                f"--instance {manifest.instance}"
            )
        check_revision(manifest.revision, f"the store in {file}")
        for database in sorted((folder / DATABASES).glob("*.sqlite")):
            databases.check_sqlite(database, f"{database.name} in {file}")
        stored = folder / CLUSTER_FILE
        cluster = settings.load(stored) if stored.exists() else None
        database_settings = DatabaseSettings() if cluster is None else cluster.database
        yield Restoration(
            manifest=manifest,
            folder=folder,
            head=head,
            database=database_settings,
            replacements=tuple(_plan(manifest, folder, head)),
            replaces_schemas=(folder / DATABASES / databases.DUMP).exists()
            and databases.has_schemas(database_settings, paths, folder / "state/secrets" / password_path(paths).name),
        )


def apply(restoration: Restoration) -> Path | None:
    """Put everything into its place, and return the folder with what was there before; None if there was nothing.

    Raises:
        SetupError: Something failed; everything is as it was before.
    """
    paths = restoration.head.paths
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    aside = paths.state / f"before-restore-{now}"
    aside.mkdir(mode=0o700)
    paths.unfinished_restore.write_text(f"{aside}\n", encoding="utf-8")
    undo: list[Callable[[], None]] = []
    try:
        for number, item in enumerate(restoration.replacements):
            _replace(item, aside / f"{number}-{item.target.name}", undo)
        dump = restoration.folder / DATABASES / databases.DUMP
        if dump.exists():
            databases.restore_dump(restoration.database, paths, dump)
    except BaseException as error:
        for step in reversed(undo):
            step()
        shutil.rmtree(aside)
        paths.unfinished_restore.unlink()
        if isinstance(error, OSError):
            raise SetupError(f"nothing was restored: {error.filename}: {error.strerror}") from error
        raise
    os.sync()
    paths.unfinished_restore.unlink()
    if any(aside.iterdir()):
        return aside
    aside.rmdir()
    return None


def check_finished(paths: Paths) -> None:
    """Check that no restoration was broken off.

    Raises:
        SetupError: One was, by a power cut or a kill.
    """
    if paths.unfinished_restore.exists():
        raise SetupError(
            f"a `gpuhub restore` was broken off: run it again with --replace. What was there before is in "
            f"{paths.state}/before-restore-*; {paths.unfinished_restore} marks this"
        )


@contextmanager
def _hold_locks(paths: Paths) -> Iterator[None]:
    with ExitStack() as stack:
        for file, who in ((paths.state / "hub.lock", "the hub runs"), (lock_path(paths.store), "the broker runs")):
            stack.callback(os.close, acquire_lock(file, who))
        yield


def _plan(manifest: Manifest, folder: Path, head: Head) -> Iterator[Replacement]:
    """Yield what goes where, and what of an earlier state must go."""
    seen = set()
    for source, target in _find_targets(manifest, folder, head):
        seen.add(target)
        if not _is_same(source, target):
            yield Replacement(target=target, source=source, is_conflict=os.path.lexists(target))
    for target in _find_earlier_state(head):
        if target not in seen:
            yield Replacement(target=target, source=None, is_conflict=True)


def _find_targets(manifest: Manifest, folder: Path, head: Head) -> Iterator[tuple[Path, Path]]:
    for entry in manifest.files:
        (folder / entry.name).chmod(entry.mode)
    if (folder / "state").exists():
        for path in sorted((folder / "state").iterdir()):
            yield path, head.paths.state / path.name
    for name, target in ((databases.BROKER_COPY, head.paths.store), (databases.HUB_COPY, head.paths.hub_database)):
        if (folder / DATABASES / name).exists():
            yield folder / DATABASES / name, target
    if (folder / CLUSTER_FILE).exists():
        yield folder / CLUSTER_FILE, head.cluster_file
    if (folder / OWN_CONFIG).exists():
        for path in sorted((folder / OWN_CONFIG).iterdir()):
            yield path, head.own_config / path.name
    for entry in manifest.files:
        if entry.target is not None:
            target = Path(entry.target)
            if not entry.name.startswith("named/") or not target.is_absolute() or ".." in target.parts:
                raise SettingsError(f"the backup has a file for {entry.target!r}, which is not a path that it may have")
            yield folder / entry.name, target


def _find_earlier_state(head: Head) -> Iterator[Path]:
    paths = head.paths
    for database in (paths.store, paths.hub_database):
        yield from (path for end in _SQLITE_ENDS if (path := database.with_name(database.name + end)).exists())
    if paths.stopped_nodes.exists():
        yield paths.stopped_nodes
    yield from (path for path in sorted(paths.state.iterdir()) if is_state_file(path, paths))
    yield from (path for name in STATE_FOLDERS if (path := paths.state / name).is_dir())
    yield from sorted(head.own_config.glob("*.py"))


def _is_same(source: Path, target: Path) -> bool:
    """Return whether two files, or all files of two folders, have the same content."""
    if source.is_dir():
        if not target.is_dir():
            return False
        names = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in (source, target)]
        return names[0] == names[1] and all(
            (target / name).is_file() and filecmp.cmp(source / name, target / name, shallow=False)
            for name in names[0]
            if (source / name).is_file()
        )
    return target.is_file() and filecmp.cmp(source, target, shallow=False)


def _replace(item: Replacement, kept: Path, undo: list[Callable[[], None]]) -> None:
    """Move what is there aside and the source into its place; each step is undone by what is added to `undo`."""
    target, source = item.target, item.source
    if os.path.lexists(target):
        _move(target, kept)
        undo.append(lambda: _move(kept, target))
    if source is None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    undo.append(lambda: _remove(target))
    _move(source, target)


def _move(source: Path, target: Path) -> None:
    shutil.move(source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
