"""Networks and scratch volumes of users whose names give the same hash are never shared."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.common import names
from gpuhub.common.errors import Conflict, NotFound
from gpuhub.config.settings import StorageSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker.containers.container_lifecycle import inject_identity
from gpuhub.docker.networks import ensure_user_network
from tests.support.docker.simulated_nodes import build_cluster

ADA = UserIdentity(name="ada.l", uid=20000, gid=20000, group_names=("ada.l",))


class OneObject:
    """A daemon with one network or volume of an owner; stands for `DockerClients`."""

    instance = "ghtest"
    swarm_manager = None

    def __init__(self, owner: str | None) -> None:
        self._owner = owner
        self.archives = 0

    async def call(self, _node: str, method: str, name: str) -> dict[str, Any]:
        assert name in {names.user_network_name("ghtest", ADA.name), names.scratch_volume_name("ghtest", ADA.name)}
        if self._owner is None:
            raise NotFound(f"{method}: {name}")
        return {
            "Id": "1",
            "Driver": "overlay",
            "Labels": {names.LABEL_OWNER: self._owner},
            "IPAM": {"Config": [{"Subnet": "10.201.0.0/24"}]},
        }

    async def run(self, _node: str, _work: object, **_options: object) -> None:
        self.archives += 1


async def test_network_of_another_user_is_not_joined() -> None:
    own = await ensure_user_network(OneObject(ADA.name), build_cluster(), "ghtest", ADA.name)  # type: ignore[arg-type]
    assert own.subnet == "10.201.0.0/24"
    with pytest.raises(Conflict, match="has the same name as that of ada_l"):
        await ensure_user_network(OneObject("ada_l"), build_cluster(), "ghtest", ADA.name)  # type: ignore[arg-type]


@pytest.mark.parametrize(("owner", "is_given"), [(ADA.name, True), (None, True), ("ada_l", False)])
async def test_scratch_of_another_user_is_not_given(owner: str | None, is_given: bool) -> None:
    """The container exists then, and is never started."""
    daemon = OneObject(owner)
    if is_given:
        await inject_identity(daemon, "rig1", "c1", ADA, StorageSettings())  # type: ignore[arg-type]
    else:
        with pytest.raises(Conflict, match="has the same name as that of ada_l"):
            await inject_identity(daemon, "rig1", "c1", ADA, StorageSettings())  # type: ignore[arg-type]
    assert daemon.archives == int(is_given)
