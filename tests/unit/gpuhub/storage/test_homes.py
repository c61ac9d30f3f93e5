"""What comes before a container: accounts, file servers and homes, none of which may hold up the loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhub.common.errors import NotAllowed, StorageUnavailable
from gpuhub.config.settings import StorageSettings, UserSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.storage import homes
from gpuhub.storage.blocking_calls import BlockingCallPool
from gpuhub.storage.probe import NfsProber
from tests.support.broker.in_process import until
from tests.support.nfs import encode_accepted_reply, serve_reply

USERS = UserSettings(allowed=("ada",), uid_first=1_900_000_000)


@pytest.fixture(autouse=True)
def _new_blocking_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockingCallPool()
    monkeypatch.setattr(homes, "BLOCKING_CALLS", pool)
    monkeypatch.setattr(homes, "PROBER", NfsProber(pool))
    monkeypatch.setattr(homes, "find_identity", lambda _users, _state, name, **_options: build_identity(name))


def build_identity(name: str) -> UserIdentity:
    return UserIdentity(name=name, uid=os.getuid(), gid=os.getgid(), group_names=(name,))


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Return an event that hung calls wait for; it is set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def nfs(folder: Path, port: int, **more: object) -> StorageSettings:
    tables = {
        "home": "nfs://127.0.0.1/home/{username}",
        "home_create": f"{folder}/homes/{{username}}",
        "nfs_options": f"nfsvers=4.2,port={port}",
        "patience": "1s",
    }
    return StorageSettings.model_validate(tables | more)


async def test_home_is_created_if_the_server_responds(tmp_path: Path) -> None:
    """The home is created if the head node sees homes."""
    with serve_reply(encode_accepted_reply) as (port, asked):
        found = await homes.prepare_user(USERS, nfs(tmp_path, port), tmp_path, "ada")
    assert (found.name, asked) == ("ada", [4])
    assert (tmp_path / "homes" / "ada").is_dir()


async def test_unresponsive_server_is_reported_and_no_home_is_created(tmp_path: Path) -> None:
    """Within `storage.patience`; the home may well be on that server."""
    began = time.monotonic()
    with (
        serve_reply(lambda _xid: None) as (port, _),
        pytest.raises(StorageUnavailable, match=r"file server 127\.0\.0\.1"),
    ):
        await homes.prepare_user(USERS, nfs(tmp_path, port), tmp_path, "ada")
    assert time.monotonic() - began < 10
    assert sorted(tmp_path.rglob("*")) == []  # noqa: ASYNC240


async def test_datasets_server_is_checked_only_if_mounted(tmp_path: Path) -> None:
    """A courier has none: files are read and written while the datasets' server is away."""
    with serve_reply(lambda _xid: None) as (port, asked):
        away = nfs(tmp_path, port, home=f"{tmp_path}/homes/{{username}}", home_create=None)
        away = away.model_copy(update={"datasets": "nfs://127.0.0.1/data"})
        await homes.prepare_user(USERS, away, tmp_path, "ada", datasets=False)
        assert asked == []
        with pytest.raises(StorageUnavailable):
            await homes.prepare_user(USERS, away, tmp_path, "ada")


async def test_hanging_home_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    """The loop continues; the next start is refused at once, and when the folder is back all is well."""
    storage = StorageSettings.model_validate({"home": f"{tmp_path}/homes/{{username}}", "patience": "1s"})
    monkeypatch.setattr(homes, "ensure_home", lambda _storage, _identity: released.wait())
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.02)

    ticking = asyncio.ensure_future(tick())
    with pytest.raises(StorageUnavailable, match=f"The folder of homes {tmp_path}/homes on the head node does not"):
        await homes.prepare_user(USERS, storage, tmp_path, "ada")
    ticking.cancel()
    assert len(ticks) > 3
    with pytest.raises(StorageUnavailable, match="an earlier request to it has not ended"):
        await homes.prepare_user(USERS, storage, tmp_path, "ben")
    released.set()
    await until(lambda: not homes.BLOCKING_CALLS.count_overdue(f"{tmp_path}/homes"), "the hung call ends")
    assert (await homes.prepare_user(USERS, storage, tmp_path, "ben")).name == "ben"


async def test_hanging_account_lookup_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    """A directory service may hang as a disk does."""
    monkeypatch.setattr(homes, "find_identity", lambda *_, **_options: released.wait())
    storage = StorageSettings.model_validate({"home": f"{tmp_path}/{{username}}", "patience": "1s"})
    with pytest.raises(StorageUnavailable, match="accounts"):
        await homes.prepare_user(USERS, storage, tmp_path, "ada")


async def test_identity_error_is_raised_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As itself, also while a server is silent."""

    def refuse(*_: object, **_options: object) -> None:
        raise NotAllowed("no account")

    monkeypatch.setattr(homes, "find_identity", refuse)
    with serve_reply(lambda _xid: None) as (port, _), pytest.raises(NotAllowed, match="no account"):
        await homes.prepare_user(USERS, nfs(tmp_path, port), tmp_path, "ada")
