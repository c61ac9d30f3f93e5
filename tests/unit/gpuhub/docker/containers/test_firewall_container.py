"""The guard's container: made, looked at, replaced and removed, with a Docker daemon in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import docker.errors
import pytest
import requests

from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, ImageMissing
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import CallKind, DockerClients, translate_docker_error
from gpuhub.docker.containers import firewall_container
from tests.support.clusters import build_cluster

T = TypeVar("T")
NAME = "gpuhub-guard"


class FakeDocker:
    """One daemon; the output of its firewall containers is in `lines`."""

    def __init__(self) -> None:
        self.image = "sha256:1"
        self.there: dict[str, dict[str, Any]] = {}
        self.created: list[str] = []
        self.lines: list[dict[str, Any]] = [{"state": "ok", "why": "applied", "rejected": 7}]
        self.exit_code = 0
        self.start_error = ""
        #: Called before output is read.
        self.on_logs: Callable[[], None] = lambda: None

    def inspect_image(self, name: str) -> dict[str, Any]:
        if not self.image:
            raise docker.errors.ImageNotFound("no such image", response=answer(404))
        return {"Id": self.image}

    def create_host_config(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    def create_container(self, **arguments: Any) -> dict[str, str]:
        if arguments["name"] in self.there:
            raise docker.errors.APIError("in use", response=answer(409))
        self.there[arguments["name"]] = {**arguments, "status": "created", "id": f"id-{len(self.created)}"}
        self.created.append(arguments["name"])
        return {"Id": f"id-{len(self.created) - 1}"}

    def _find(self, name: str) -> dict[str, Any]:
        for one, found in self.there.items():
            if name in {one, found["id"]}:
                return found
        raise docker.errors.NotFound("no such container", response=answer(404))

    def inspect_container(self, name: str) -> dict[str, Any]:
        found = self._find(name)
        state = {"Status": found["status"], "StartedAt": "2026-11-21T17:00:00.123456789Z"}
        if found["status"] == "created":
            state["StartedAt"] = "0001-01-01T00:00:00Z"
        return {"Id": found["id"], "State": state, "Config": {"Labels": found["labels"]}}

    def logs(self, name: str, **asked: Any) -> bytes:
        self.on_logs()
        assert asked.get("since", 1795280400.123456) == 1795280400.123456
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        return json.dumps(line).encode() + b"\n" if line else b""

    def start(self, name: str) -> None:
        if self.start_error:
            raise docker.errors.APIError(self.start_error, response=answer(500), explanation=self.start_error)
        self._find(name)["status"] = "running"

    def wait(self, name: str, timeout: float) -> dict[str, int]:
        assert self._find(name)["status"] == "running"
        return {"StatusCode": self.exit_code}

    def containers(self, **asked: Any) -> list[dict[str, Any]]:
        assert asked["filters"]["label"] == ["gpuhub.instance=gpuhub", "gpuhub.kind=guard"]
        return [{"Id": one["id"], "Names": [f"/{name}"], "ImageID": self.image} for name, one in self.there.items()]

    def remove_container(self, name: str, **_: Any) -> None:
        found = self._find(name)
        self.there = {one: each for one, each in self.there.items() if each is not found}


def answer(status: int) -> requests.Response:
    response = requests.Response()
    response.status_code = status
    return response


class FakeDaemons:
    """`Daemons` over it."""

    def __init__(self, client: FakeDocker) -> None:
        self.client = client

    async def run(self, node: str, work: Callable[[Any], T], *, kind: CallKind = CallKind.SHORT) -> T:
        try:
            return work(self.client)
        except docker.errors.DockerException as error:
            raise translate_docker_error(node, error) from error

    async def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.run(node, lambda client: getattr(client, method)(*args, **kwargs))


@pytest.fixture
def client() -> FakeDocker:
    return FakeDocker()


async def ensure(client: FakeDocker, cluster: ClusterSettings | None = None) -> int | None:
    return await firewall_container.ensure_firewall(
        cast(DockerClients, FakeDaemons(client)), cluster or build_cluster(), "gpuhub", "rig1"
    )


async def test_firewall_container_is_created_once(client: FakeDocker) -> None:
    """A firewall that is in place is not changed."""
    client.lines = [{}, {"state": "starting", "why": ""}, {"state": "ok", "why": "applied"}]
    await ensure(client)
    await ensure(client)
    assert client.created == [NAME]
    assert client.there[NAME]["labels"][names.LABEL_KIND] == names.KIND_FIREWALL


async def test_firewall_container_has_one_capability_and_restarts(client: FakeDocker) -> None:
    """No GPU, no file of the node, no other right; Docker starts it with the machine."""
    await ensure(client)
    made = client.there[NAME]
    host = made["host_config"]
    assert (host["cap_drop"], host["cap_add"], host["network_mode"]) == (["ALL"], ["NET_ADMIN"], "host")
    assert (host["read_only"], host["restart_policy"]) == (True, {"Name": "unless-stopped"})
    assert host["security_opt"] == ["no-new-privileges:true"]
    assert not {"mounts", "binds", "devices", "device_requests", "privileged", "pid_mode"} & set(host)
    assert made["environment"] == {"NVIDIA_VISIBLE_DEVICES": "void"}


@pytest.mark.parametrize("status", [409, 500])
async def test_container_that_another_call_replaces_is_waited_for(client: FakeDocker, status: int) -> None:
    """It is listed and inspected still, while its output can no longer be read."""
    await ensure(client)
    reads = 0

    def remove() -> None:
        nonlocal reads
        reads += 1
        if reads == 1:
            text = "can not get logs from container which is dead or marked for removal"
            raise docker.errors.APIError("refused", response=answer(status), explanation=text)
        if reads == 2:
            client.there.clear()
            raise docker.errors.NotFound("no such container", response=answer(404))

    client.on_logs = remove
    await ensure(client)
    assert client.created == [NAME, NAME]
    assert client.there[NAME]["status"] == "running"


async def test_container_that_another_call_removes_before_its_start(client: FakeDocker) -> None:
    """The next container is created and started, as often as it takes."""
    start, refused = client.start, []

    def refuse(name: str) -> None:
        if refused:
            return start(name)
        refused.append(name)
        client.remove_container(name)
        text = "container is marked for removal and cannot be started"
        raise docker.errors.APIError("refused", response=answer(409), explanation=text)

    client.start = refuse  # type: ignore[method-assign]
    await ensure(client)
    assert client.created == [NAME, NAME]
    assert client.there[NAME]["status"] == "running"


@pytest.mark.parametrize("change", ["image", "settings", "stopped"])
async def test_changed_image_or_rules_replace_the_firewall_container(client: FakeDocker, change: str) -> None:
    """A stopped container is replaced as well."""
    await ensure(client)
    cluster = build_cluster()
    if change == "image":
        client.image = "sha256:2"
    elif change == "settings":
        cluster = build_cluster(network={"egress": "none"})
    else:
        client.there[NAME]["status"] = "exited"
    await ensure(client, cluster)
    await ensure(client, cluster)
    assert client.created == [NAME, NAME]


async def test_rules_of_a_process_that_started_later_stay(client: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    """While `gpuhub up` prepares nodes for new settings, the broker with the old ones does not put back its rules."""
    old, new = build_cluster(), build_cluster(network={"egress": "none"})
    started = firewall_container._PROCESS_SINCE
    await ensure(client, old)
    monkeypatch.setattr(firewall_container, "_PROCESS_SINCE", started + 0.001)
    await ensure(client, new)
    monkeypatch.setattr(firewall_container, "_PROCESS_SINCE", started)
    assert await ensure(client, old) == 7
    assert client.created == [NAME, NAME]
    client.there[NAME]["status"] = "exited"
    await ensure(client, old)
    assert client.created == [NAME, NAME, NAME]


async def test_rules_from_the_future_are_replaced(client: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that was wrong must not keep old rules."""
    with monkeypatch.context() as patch:
        patch.setattr(firewall_container, "_PROCESS_SINCE", firewall_container._PROCESS_SINCE + 86400)
        await ensure(client, build_cluster(network={"egress": "none"}))
    await ensure(client)
    assert client.created == [NAME, NAME]


async def test_missing_packet_filter_is_reported_with_the_reason(
    client: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the node and has the script's or Docker's text; a container without output times out."""
    client.lines = [{"state": "failed", "why": "nft: Operation not permitted"}]
    with pytest.raises(GpuhubError, match=r"node rig1: its firewall is not in place.*Operation not permitted"):
        await ensure(client)
    monkeypatch.setattr(firewall_container, "READY_TIMEOUT_S", 0.1)
    client.lines = [{}]
    with pytest.raises(GpuhubError, match="its container is running and has not set it up yet"):
        await ensure(client)
    client.there.clear()
    client.start_error = "OCI runtime create failed"
    with pytest.raises(GpuhubError, match=r"node rig1: its firewall cannot be set up: .*OCI runtime"):
        await ensure(client)
    assert client.there == {}
    client.image = ""
    with pytest.raises(ImageMissing):
        await ensure(client)


async def test_disabled_firewall_has_no_container(client: FakeDocker) -> None:
    """The table is taken away before the last container of the kind is."""
    off = build_cluster(network={"guard": False})
    await ensure(client, off)
    assert client.created == []
    await ensure(client)
    await ensure(client, off)
    assert (client.created, client.there) == ([NAME, f"{NAME}-off"], {})


async def test_interrupted_firewall_removal_is_repeated(client: FakeDocker) -> None:
    """While the table may exist, a container on the node shows it."""
    await ensure(client)
    client.exit_code = 1
    client.lines = [{"state": "failed", "why": "nft: busy"}]
    with pytest.raises(GpuhubError, match="node rig1: its firewall could not be removed: nft: busy"):
        await firewall_container.remove_firewall(cast(DockerClients, FakeDaemons(client)), "gpuhub", "rig1")
    assert list(client.there) == [f"{NAME}-off"]
    client.exit_code = 0
    await firewall_container.remove_firewall(cast(DockerClients, FakeDaemons(client)), "gpuhub", "rig1")
    assert client.there == {}


async def test_refused_packets_are_returned(client: FakeDocker) -> None:
    """As the script's last line has them; a line without a number, as a starting script prints it, has none."""
    assert await ensure(client) == 7
    client.lines = [{"state": "ok", "why": "unchanged", "rejected": None}]
    assert await ensure(client) is None
    assert firewall_container.parse_rejected(b'{"state": "ok", "why": "applied"}') is None
    assert firewall_container.parse_rejected(b"x") is None


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b"{}", b'{"state": "ok"}', b"\xff"])
def test_invalid_status_lines_are_ignored(line: bytes) -> None:
    """Such as a traceback."""
    assert firewall_container.parse_status_line(line) == ("", "")
