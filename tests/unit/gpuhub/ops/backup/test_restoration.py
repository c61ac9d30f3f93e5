"""A backup of a head node, and its restoration: everything or nothing."""

from __future__ import annotations

import json
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from gpuhub.broker.db import engine
from gpuhub.broker.db.store import Store
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.common.secrets import BROKER_TOKEN, ensure_secrets, read_secret
from gpuhub.config.settings import ClusterSettings, JobSettings
from gpuhub.ops.backup import archive, contents, databases, restoration
from gpuhub.ops.backup.contents import Head, find_named_files
from gpuhub.ops.backup.snapshot import write_backup
from tests.support.clusters import CLUSTER_FILE, build_cluster
from tests.support.paths import FolderPaths


def make_head(folder: Path) -> Head:
    (folder / "state").mkdir(parents=True)
    (folder / "gpuhub").mkdir()
    paths = FolderPaths(folder=folder / "state")
    return Head(
        paths=paths, cluster_file=folder / "gpuhub/cluster.toml", hub_config=folder / "gpuhub/jupyterhub_config.py"
    )


@dataclass(frozen=True)
class Saved:
    """A head node with everything that it may have, and its backup."""

    head: Head
    cluster: ClusterSettings
    file: Path


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    head = make_head(tmp_path / "old")
    paths = head.paths
    ensure_secrets(paths)
    (paths.secrets / "ssh").mkdir()
    (paths.secrets / "ssh/id_ed25519").write_text("key")
    (paths.secrets / "ssh/rig2.known_hosts").write_text("rig2 ssh-ed25519 AAAA")
    (paths.state / "uids.json").write_text('{"ada": 20000}')
    paths.authority.write_text("certificate")
    paths.authority.chmod(0o644)
    paths.stopped_nodes.write_text('{"rig1": null}')
    (paths.state / "homes/ada").mkdir(parents=True)
    (paths.state / "homes/ada/big.bin").write_text("data")
    head.cluster_file.write_text(CLUSTER_FILE)
    head.own_config.mkdir()
    (head.own_config / "mine.py").write_text("c.JupyterHub.admin_access = True")
    Store.open_file(paths.store).close()
    with closing(sqlite3.connect(paths.hub_database)) as database, database:
        database.execute("CREATE TABLE users (name TEXT)")
        database.execute("INSERT INTO users VALUES ('ada')")
    named = tmp_path / "etc/destinations"
    named.parent.mkdir()
    named.write_text("ntfy://x")
    cluster = build_cluster(notifications={"destinations_file": str(named)})
    file = tmp_path / "backup.tar.gz"
    write_backup(file, head, cluster)
    return Saved(head, cluster, file)


def restore(file: Path, head: Head) -> Path | None:
    with restoration.open_backup(file, head, None) as plan:
        return restoration.apply(plan)


def list_tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_empty_head_gets_everything(tmp_path: Path, saved: Saved) -> None:
    """Secrets, keys, accounts, settings and both databases are as they were; nothing of users, no lock, no old proof."""
    head = make_head(tmp_path / "new")
    named = saved.cluster.notifications.destinations_file
    assert named is not None
    named.unlink()
    with restoration.open_backup(saved.file, head, None) as plan:
        assert plan.conflicts == []
        assert restoration.apply(plan) is None
    assert read_secret(head.paths, BROKER_TOKEN) == read_secret(saved.head.paths, BROKER_TOKEN)
    assert stat.S_IMODE(head.paths.secrets.stat().st_mode) == 0o700
    assert stat.S_IMODE((head.paths.secrets / BROKER_TOKEN).stat().st_mode) == 0o600
    assert stat.S_IMODE(head.paths.authority.stat().st_mode) == 0o644
    assert (head.paths.secrets / "ssh/rig2.known_hosts").read_text() == "rig2 ssh-ed25519 AAAA"
    assert head.cluster_file.read_text() == CLUSTER_FILE
    assert (head.own_config / "mine.py").exists()
    assert named.read_text() == "ntfy://x"
    assert {path.name for path in head.paths.state.iterdir()} == {
        "secrets", "uids.json", "authority.pem", "broker.sqlite", "jupyterhub.sqlite", "hub.lock", "broker.lock",
    }  # fmt: skip
    with closing(sqlite3.connect(head.paths.hub_database)) as database:
        assert database.execute("SELECT name FROM users").fetchall() == [("ada",)]
    Store.open_file(head.paths.store).close()


def test_nothing_is_unencrypted_next_to_an_encrypted_backup(
    tmp_path: Path, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may be on another machine, and a kill or a power cut leaves there what is being made."""
    folder = tmp_path / "share"
    folder.mkdir()
    found: list[bytes] = []
    write = archive.write_archive

    def look(file: Path, *arguments: Any) -> None:
        found.extend(list_tree(folder).values())
        write(file, *arguments)

    monkeypatch.setattr(archive, "write_archive", look)
    write_backup(folder / "backup", saved.head, saved.cluster, "four words of it")
    assert found == []
    assert list(list_tree(folder)) == ["backup"]
    assert not list(saved.head.paths.state.glob(".backup-*"))


def test_databases_are_copied_while_they_are_written(tmp_path: Path, saved: Saved) -> None:
    """A transaction that is open is not in the copy, one that is committed only in the log is."""
    store = saved.head.paths.store
    with closing(sqlite3.connect(store, isolation_level=None)) as writer:
        writer.execute("INSERT INTO lease_ends VALUES ('ada', 'rig1', 5.0)")
        assert store.with_name("broker.sqlite-wal").stat().st_size
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO lease_ends VALUES ('ben', 'rig1', 5.0)")
        write_backup(tmp_path / "second", saved.head, saved.cluster)
        writer.execute("ROLLBACK")
    head = make_head(tmp_path / "new")
    restore(tmp_path / "second", head)
    with closing(sqlite3.connect(head.paths.store)) as database:
        assert database.execute("SELECT owner FROM lease_ends").fetchall() == [("ada",)]


def test_what_was_there_is_listed_and_kept_aside(tmp_path: Path, saved: Saved) -> None:
    """Files of an earlier state do not mix with those of the backup, and homes stay."""
    head = make_head(tmp_path / "new")
    ensure_secrets(head.paths)
    (head.paths.secrets / "guests.json").write_text("{}")
    (head.paths.state / "login-accounts.json").write_text("{}")
    (head.paths.state / "homes").mkdir()
    head.paths.stopped_nodes.write_text('{"rig1": null}')
    head.paths.store.with_name("broker.sqlite-wal").write_bytes(b"of another file")
    with restoration.open_backup(saved.file, head, None) as plan:
        listed = {Path(path).name for path in plan.conflicts}
        assert listed == {"secrets", "login-accounts.json", "stopped-nodes.json", "broker.sqlite-wal"}
        aside = restoration.apply(plan)
    assert aside is not None
    assert {path.name.split("-", 1)[1] for path in aside.iterdir()} == listed
    assert not (head.paths.secrets / "guests.json").exists()
    assert not head.paths.stopped_nodes.exists()
    assert (head.paths.state / "homes").is_dir()
    assert stat.S_IMODE(aside.stat().st_mode) == 0o700


@pytest.mark.parametrize("step", range(1, 8))
def test_a_failure_leaves_everything_as_it_was(
    tmp_path: Path, saved: Saved, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Whatever move fails, those before it are undone."""
    head = make_head(tmp_path / "new")
    ensure_secrets(head.paths)
    (head.paths.state / "uids.json").write_text("{}")
    before = list_tree(tmp_path / "new")
    calls = iter(range(1, 1000))
    move = restoration._move

    def fail_once(source: Path, target: Path) -> None:
        if next(calls) == step:
            raise OSError(28, "No space left on device", str(target))
        move(source, target)

    monkeypatch.setattr(restoration, "_move", fail_once)
    with pytest.raises(SetupError, match=r"nothing was restored: .*No space left"):
        restore(saved.file, head)
    after = list_tree(tmp_path / "new")
    assert {name: text for name, text in after.items() if not name.endswith(".lock")} == before
    restoration.check_finished(head.paths)


def test_nothing_starts_after_a_broken_off_restoration(tmp_path: Path) -> None:
    """Half of the files would be of one state and half of another."""
    paths = FolderPaths(folder=tmp_path)
    restoration.check_finished(paths)
    paths.unfinished_restore.write_text("x")
    with pytest.raises(SetupError, match="run it again with --replace"):
        restoration.check_finished(paths)


def test_running_broker_is_refused(tmp_path: Path, saved: Saved) -> None:
    """Its database would be replaced under it."""
    head = make_head(tmp_path / "new")
    store = Store.open_file(head.paths.store)
    with pytest.raises(SetupError, match="the broker runs"):
        restore(saved.file, head)
    store.close()


def test_backup_of_a_newer_version_or_another_instance_is_refused(tmp_path: Path, saved: Saved) -> None:
    """Each error says what would be right."""
    with closing(sqlite3.connect(saved.head.paths.store)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    write_backup(tmp_path / "newer", saved.head, saved.cluster)
    head = make_head(tmp_path / "new")
    with pytest.raises(SetupError, match="written by a newer version of gpuhub: its tables have revision 9999"):
        restore(tmp_path / "newer", head)
    other = replace(saved.head, paths=OtherPaths(folder=saved.head.paths.state))
    write_backup(tmp_path / "other", other, saved.cluster)
    with pytest.raises(SettingsError, match="use --instance lab"):
        restore(tmp_path / "other", head)
    assert {path.name for path in head.paths.state.iterdir()} <= {"hub.lock", "broker.lock"}


class OtherPaths(FolderPaths):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder=folder)
        object.__setattr__(self, "instance", "lab")


def test_damaged_database_is_not_backed_up(tmp_path: Path, saved: Saved) -> None:
    """A backup that cannot be restored would be worse than an error."""
    file = saved.head.paths.hub_database
    content = bytearray(file.read_bytes())
    content[4096:4196] = b"\xff" * 100
    file.write_bytes(content)
    with pytest.raises(SetupError, match=r"jupyterhub\.sqlite (is damaged|cannot be copied)"):
        write_backup(tmp_path / "second", saved.head, saved.cluster)
    assert not (tmp_path / "second").exists()
    assert not list(tmp_path.glob(".second*"))


def test_missing_and_large_files_are_named(tmp_path: Path, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backup is written without them, and says so."""
    monkeypatch.setattr(contents, "MAX_FILE_BYTES", 1 << 20)
    (saved.head.paths.state / "dump").write_bytes(bytes((1 << 20) + 1))
    nodes = [{"name": "rig9", "address": "192.168.1.9", "docker": "ssh://me@rig9"}]
    cluster = build_cluster(
        nodes=nodes, notifications={"destinations_file": "/nowhere/file"}, profiles=[{"name": "a", "title": "A"}]
    )
    notes = write_backup(tmp_path / "second", saved.head, cluster).notes
    assert [note.split(":")[0] for note in notes] == [
        "/nowhere/file, which cluster.toml names, does not exist",
        f"{saved.head.paths.state / 'dump'} is larger than 1 MiB, and is left out",
        "rig9",
    ]


def find_path_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys of cluster.toml that are paths."""
    for name, field in model.model_fields.items():
        kinds = _flatten(field.annotation)
        if Path in kinds:
            yield f"{prefix}{name}"
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from find_path_fields(kind, f"{prefix}{name}.")


def _flatten(annotation: Any) -> set[Any]:
    return {annotation}.union(*(_flatten(part) for part in get_args(annotation)))


def test_every_file_that_settings_name_is_saved() -> None:
    """A new key with a path has to be thought of here."""
    ours = {
        "hub.certificate", "hub.key", "login.client_secret_file", "login.ca", "notifications.destinations_file",
        "slurm.rest_key", "database.password_file", "nodes.tls.ca", "nodes.tls.cert", "nodes.tls.key",
        "power.ipmi_password_file", "nodes.power.ipmi_password_file", "jobs.recipes",
    }  # fmt: skip
    # Programs and files of the site, and folders of users.
    others = {"slurm.commands", "slurm.conf", "slurm.image", "slurm.command"}
    found = set(find_path_fields(ClusterSettings))
    assert found - others == ours


def test_recipes_of_the_lab_are_saved(tmp_path: Path) -> None:
    """All recipes of the folder that cluster.toml names, and nothing else of it."""
    for name in ("tune.yaml", "notes.txt"):
        (tmp_path / name).write_text("x")
    cluster = build_cluster(jobs=JobSettings(recipes=tmp_path))
    assert tmp_path / "tune.yaml" in find_named_files(cluster)
    assert tmp_path / "notes.txt" not in find_named_files(cluster)


def test_uninitialised_machine_is_refused(tmp_path: Path) -> None:
    """There is nothing to copy."""
    with pytest.raises(SetupError, match="gpuhub was never started on this machine"):
        write_backup(tmp_path / "b", make_head(tmp_path / "new"), build_cluster())


def test_named_file_goes_only_where_settings_may_name_one(tmp_path: Path, saved: Saved) -> None:
    """A path with `..` or one for another kind of file is refused."""
    with restoration.open_backup(saved.file, make_head(tmp_path / "new"), None) as plan:
        files = tuple(
            entry.model_copy(update={"target": "/etc/../root/x"}) if entry.target else entry
            for entry in plan.manifest.files
        )
        wrong = plan.manifest.model_copy(update={"files": files})
        with pytest.raises(SettingsError, match="which is not a path that it may have"):
            list(restoration._find_targets(wrong, plan.folder, plan.head))
        assert json.loads(plan.manifest.model_dump_json())["instance"] == Paths().instance


def test_revision_is_in_the_manifest(tmp_path: Path, saved: Saved) -> None:
    """It decides whether a program can use the backup."""
    with restoration.open_backup(saved.file, make_head(tmp_path / "new"), None) as plan:
        assert plan.manifest.revision == engine.find_newest_revision()
        assert (plan.folder / "databases" / databases.BROKER_COPY).exists()
