"""Freeing a former user's name: nothing of the former user goes to the next."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpuhub.broker.db.outbox import DestinationRow
from gpuhub.broker.db.store import Store
from gpuhub.common import names
from gpuhub.common.errors import InvalidRequest, NodeUnreachable, NotAllowed, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, StorageSettings, UserSettings
from gpuhub.config.users.identity import choose_uid, read_uids
from gpuhub.domain.notifications import build_test
from gpuhub.login.accounts import AccountBindings
from gpuhub.ops import former_users
from tests.support.docker.simulated_nodes import SimulatedDaemons, SimulatedNode, build_cluster, simulated_nodes

#: A name that no machine has as an account.
NAME = "ghtestnoa"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, SimulatedNode]:
    nodes = simulated_nodes()
    volume = names.scratch_volume_name("ghtest", NAME)
    nodes["rig2"].volumes[volume] = {"Name": volume, "Labels": {}}
    monkeypatch.setattr(
        former_users,
        "DockerClients",
        lambda settings, **_options: SimulatedDaemons(settings, nodes, tmp_path),
    )
    return nodes


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setattr(Paths, "state", property(lambda _self: tmp_path))
    (tmp_path / "uids.json").write_text(json.dumps({NAME: os.getuid(), "ben": 20001}))
    (tmp_path / f"homes/{NAME}").mkdir(parents=True)
    AccountBindings(tmp_path / "login-accounts.json", "github").bind(NAME, "1")
    return Paths("ghtest")


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterSettings:
    return build_cluster(
        users=UserSettings(login="password", allowed=("ada",), uid_first=20000),
        storage=StorageSettings(home=f"{tmp_path}/homes/{{username}}"),
    )


def is_bound(paths: Paths) -> bool:
    return NAME in (paths.state / "login-accounts.json").read_text()


def test_destinations_go_with_the_former_user(
    nodes: dict[str, SimulatedNode], paths: Paths, cluster: ClusterSettings
) -> None:
    """The next user's notifications are not sent to the former one; others keep theirs."""
    store = Store.open_file(paths.store)
    for number, owner in enumerate((NAME, "ben")):
        row = DestinationRow(
            id=f"d{number}", owner=owner, name="", label="ntfy", url="…", kinds=("granted",), created_at=1.0
        )
        assert store.outbox.add_destination(row)
        store.outbox.add_test(build_test(row.id, owner, 1.0), row.id, 1.0)
    store.close()
    lines = former_users.free_name(cluster, paths, NAME)
    assert "Destinations of notifications are removed: 1." in lines
    store = Store.open_file(paths.store)
    assert store.outbox.list_destinations(NAME) == []
    assert store.outbox.list_notifications(NAME, None, 10) == []
    assert len(store.outbox.list_notifications("ben", None, 10)) == 1
    store.close()


def test_files_and_uid_stay_with_the_former_user(
    cluster: ClusterSettings, paths: Paths, nodes: dict[str, SimulatedNode]
) -> None:
    """The home is renamed, scratch is removed, and the UID is taken for ever; repeating does nothing."""
    uid = os.getuid()
    assert former_users.free_name(cluster, paths, NAME) == [
        "The scratch on rig2 is removed.",
        f"The home is {paths.state}/homes/{NAME}~{uid} now.",
        f"UID {uid} is not given to other users.",
        f"The next account of the provider that logs in as {NAME} has the name.",
    ]
    assert [home.name for home in (paths.state / "homes").iterdir()] == [f"{NAME}~{uid}"]
    assert nodes["rig2"].volumes == {}
    assert read_uids(paths.state) == {f"{NAME}~{uid}": uid, "ben": 20001}
    assert choose_uid(read_uids(paths.state), uid, lambda _: False) != uid
    assert not is_bound(paths)
    assert former_users.free_name(cluster, paths, NAME) == []


def test_running_container_blocks(cluster: ClusterSettings, paths: Paths, nodes: dict[str, SimulatedNode]) -> None:
    nodes["rig3"].run_container({names.LABEL_OWNER: NAME})
    with pytest.raises(NotAllowed, match="are on rig3: end"):
        former_users.free_name(cluster, paths, NAME)
    assert is_bound(paths)
    assert nodes["rig2"].volumes != {}


def test_silent_node_blocks(cluster: ClusterSettings, paths: Paths, nodes: dict[str, SimulatedNode]) -> None:
    """Its scratch would be the next user's."""
    nodes["rig1"].is_reachable = False
    with pytest.raises(NodeUnreachable):
        former_users.free_name(cluster, paths, NAME)
    assert is_bound(paths)


def test_user_of_the_hub_blocks(cluster: ClusterSettings, paths: Paths, nodes: dict[str, SimulatedNode]) -> None:
    with closing(sqlite3.connect(paths.state / "jupyterhub.sqlite")) as database, database:
        database.execute("CREATE TABLE users (name TEXT)")
        database.execute("INSERT INTO users VALUES (?)", (NAME,))
    with pytest.raises(NotAllowed, match="still a user of the hub"):
        former_users.free_name(cluster, paths, NAME)
    assert is_bound(paths)


def test_home_on_a_file_server_is_moved_by_the_administrator(
    cluster: ClusterSettings, paths: Paths, nodes: dict[str, SimulatedNode]
) -> None:
    away = cluster.model_copy(update={"storage": StorageSettings(home="nfs://nas/homes/{username}")})
    with pytest.raises(SetupError, match=f"does not see the home nfs://nas/homes/{NAME}"):
        former_users.free_name(away, paths, NAME)
    assert is_bound(paths)
    former_users.free_name(away, paths, NAME, home_moved=True)
    assert not is_bound(paths)


def test_home_that_is_a_link_is_not_moved(
    cluster: ClusterSettings, paths: Paths, nodes: dict[str, SimulatedNode]
) -> None:
    home = paths.state / "homes" / NAME
    home.rmdir()
    home.symlink_to(paths.state)
    with pytest.raises(SetupError, match="is not a folder that belongs to UID"):
        former_users.free_name(cluster, paths, NAME)
    assert is_bound(paths)


def test_accounts_of_the_head_node_are_not_freed(cluster: ClusterSettings, paths: Paths) -> None:
    """Neither are names that could not be a user's."""
    pam = cluster.model_copy(update={"users": UserSettings(login="pam", allowed=("ada",))})
    with pytest.raises(NotAllowed, match="has the account"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(former_users, "find_ordinary_accounts", lambda found: dict.fromkeys(found, 1500))
        former_users.free_name(pam, paths, NAME)
    with pytest.raises(InvalidRequest, match="cannot be a user's name"):
        former_users.free_name(cluster, paths, "../ada")


def test_same_person_keeps_everything(paths: Paths) -> None:
    """A name of an earlier provider is blocked until then."""
    file = paths.state / "login-accounts.json"
    for provider, account in (("github", "2"), ("gitlab", "7")):
        with pytest.raises(NotAllowed, match=f"`gpuhub user free {NAME}`"):
            AccountBindings(file, provider).bind(NAME, account)
    assert former_users.forget_account(paths, NAME) != []
    AccountBindings(file, "gitlab").bind(NAME, "7")
    assert AccountBindings(file, "gitlab").names() == {NAME}
    assert (paths.state / f"homes/{NAME}").is_dir()
    assert read_uids(paths.state)[NAME] == os.getuid()
