"""A daemon that hangs, and one that does not while a mount does."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.common.errors import (
    Conflict,
    GpuhubError,
    NodeSilent,
    NodeUnreachable,
    NotFound,
    StorageUnavailable,
)
from gpuhub.config.settings import StorageSettings
from gpuhub.docker.container_lifecycle import ensure_created
from gpuhub.docker.mount_errors import translate_mount_errors
from tests.support.clusters import build_cluster
from tests.support.container_specs import worker

STORAGE = StorageSettings(home="nfs://nas/home/{username}")
SILENT = NodeSilent("node rig1: its Docker daemon does not answer in time")


class Daemon:
    """Answers `/_ping` or raises; stands for `Daemons`."""

    def __init__(self, ping: Any) -> None:
        self.ping = ping

    async def call(self, _node: str, method: str) -> Any:
        assert method == "ping"
        if isinstance(self.ping, Exception):
            raise self.ping
        return self.ping


async def fail(error: Exception, ping: Any = "OK") -> None:
    async with translate_mount_errors(Daemon(ping), "rig1", STORAGE, "ada"):  # type: ignore[arg-type]
        raise error


async def test_a_daemon_that_answers_is_not_blamed() -> None:
    """Hanging storage is reported only if the daemon answers a ping."""
    with pytest.raises(
        StorageUnavailable, match=r"Docker on node rig1 answers.*storage hangs there, nfs://nas/home/ada"
    ):
        await fail(SILENT)
    with pytest.raises(NodeSilent):
        await fail(SILENT, NodeUnreachable("node rig1: its Docker daemon cannot be reached"))
    with pytest.raises(NodeSilent):
        await fail(SILENT, TimeoutError())


async def test_a_node_that_cannot_be_reached_is_no_matter_of_storage() -> None:
    """Nor is what has nothing to do with a mount."""
    for error in (NodeUnreachable("node rig1: cut off"), Conflict("node rig1: taken"), GpuhubError("node rig1: runc")):
        with pytest.raises(type(error), match=str(error)):
            await fail(error)
    with pytest.raises(StorageUnavailable, match="no NFS client"):
        await fail(GpuhubError("node rig1: failed to mount local volume: no such device"))


async def test_a_name_that_is_kept_for_a_hung_container_is_told() -> None:
    """The daemon refuses the name, and knows no such container yet."""

    class Busy:
        async def run(self, *_arguments: Any, **_more: Any) -> str:
            raise Conflict("node rig1: name in use")

        async def call(self, *_arguments: Any) -> Any:
            raise NotFound("node rig1: no such container")

    with pytest.raises(StorageUnavailable, match="still creating an earlier container"):
        await ensure_created(Busy(), "rig1", worker(build_cluster()), adopt=True)  # type: ignore[arg-type]


async def test_an_earlier_request_that_comes_to_its_end_meanwhile_is_adopted() -> None:
    """The daemon is through with it between two of the questions: whichever they are, there is one container."""
    spec = worker(build_cluster())

    class Late:
        """The daemon lists the container after the given number of calls."""

        def __init__(self, made_after: int) -> None:
            self.left = made_after

        def there(self) -> bool:
            self.left -= 1
            return self.left < 0

        async def run(self, *_arguments: Any, **_more: Any) -> str:
            self.there()
            raise Conflict("node rig1: name in use")

        async def call(self, *_arguments: Any) -> Any:
            if not self.there():
                raise NotFound("node rig1: no such container")
            return {"Id": "c1", "State": {"Running": False}, "Config": {"Labels": spec.labels}}

    for questions in range(5):
        made = await ensure_created(Late(questions), "rig1", spec, adopt=True)  # type: ignore[arg-type]
        assert (made.id, made.is_running) == ("c1", False)
