"""Bad settings and bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomlkit

from gpuhub.common import secrets
from gpuhub_closet import gpu_state
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import gpu_uuid
from tests.faults.testbed.testbed import FaultTestbed, home_of
from tests.support.hub.users import with_token
from tests.support.product import wait_for


def refusal(testbed: FaultTestbed, tmp_path: Path, **changes: Any) -> str:
    """Return the error of a broker that starts with these settings."""
    tables = tomlkit.parse(testbed.settings_text()).unwrap()
    for table, value in changes.items():
        tables[table] = value
    file = tmp_path / "cluster.toml"
    file.write_text(tomlkit.dumps(tables))
    program = str(Path(sys.executable).with_name("gpuhub"))
    command = [program, "broker", "--instance", testbed.paths.instance, "--cluster-file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.case("C1")
@pytest.mark.fast
def test_docker_over_plain_tcp(testbed: FaultTestbed, tmp_path: Path) -> None:
    """The settings are refused before anything starts, and the node is named."""
    node = {"name": "rig9", "address": "10.1.2.3", "docker": "tcp://10.1.2.3:2375"}
    answer = refusal(testbed, tmp_path, nodes=[node])
    assert "rig9" in answer
    assert "tls" in answer.lower()


@pytest.mark.case("C2")
def test_settings_without_allowed_users_are_refused(testbed: FaultTestbed, tmp_path: Path) -> None:
    """The settings are refused before anything starts, with the remedy."""
    answer = refusal(testbed, tmp_path, users={"login": "password", "allowed": [], "uid_first": 20000})
    assert "allowed" in answer


@pytest.mark.case("C3")
def test_one_gpu_on_two_nodes(testbed: FaultTestbed) -> None:
    """The GPU is granted on neither node, both nodes are named, and other GPUs are granted."""
    card, uuid = testbed.plan.node("rig2").gpus[0], gpu_uuid(testbed.plan.instance, "rig1", 0)
    file = node_paths(testbed.paths, "rig2").gpus / "0" / "card"
    before = file.read_text()
    file.write_text(gpu_state.format_gpu(card, index=0, uuid=uuid))
    try:
        wait_for(lambda: "report the same GPU" in (testbed.gpu("rig1").get("message") or ""), "it is reported", 30)
        answer = f"{testbed.node('rig1')['message']} {testbed.node('rig2')['message']}"
        assert "rig1" in answer
        assert "rig2" in answer
        assert testbed.gpu("rig1")["state"] == "unavailable"
        testbed.start("ada", "nb", "on3")
    finally:
        file.write_text(before)
    wait_for(
        lambda: {testbed.gpu("rig1").get("state"), testbed.gpu("rig2").get("state")} == {"free"}, testbed.describe, 60
    )


@pytest.mark.case("C4")
@pytest.mark.parametrize("whose", ["expired", "stranger"])
def test_invalid_certificate_of_a_daemon(testbed: FaultTestbed, whose: str) -> None:
    """The node shows its certificate's error, other nodes are used, and it returns with the right certificate."""
    folder = testbed.relay_folder("rig2")
    testbed.stop_relay("rig2")
    kept = {name: (folder / name).read_bytes() for name in ("server.pem", "server.key")}
    for name in kept:
        (folder / name).write_bytes((folder / name.replace("server", whose)).read_bytes())
    testbed.start_relay("rig2")
    try:
        wait_for(lambda: "unauthenticated" in (testbed.node("rig2").get("message") or ""), testbed.describe, 60)
        assert testbed.node("rig2")["state"] == "unreachable"
        testbed.start("ada", "nb", "on3")
    finally:
        testbed.stop_relay("rig2")
        for name, content in kept.items():
            (folder / name).write_bytes(content)
        testbed.start_relay("rig2")
    wait_for(lambda: testbed.node("rig2").get("state") == "up", "rig2 is up", 90)


@pytest.mark.case("U1")
def test_reserved_names(testbed: FaultTestbed) -> None:
    """No such name logs in, and no user is made."""
    hub = with_token(testbed.address, "broker", secrets.read_secret(testbed.paths, secrets.BROKER_TOKEN))
    log = testbed.paths.log / "hub.log"
    password, size = secrets.read_secret(testbed.paths, secrets.USER_PASSWORD), log.stat().st_size
    homes = sorted(path.name for path in home_of(testbed, "ada").parent.iterdir())
    before = {item["name"] for item in hub.ask(hub.hub, "GET", "/users")[1]}
    for name in ("..", ".", "~root", "$(id)", "a;b", "-rf", "ädä", "аda", "ada b", "a" * 5000, "root"):
        with httpx.Client(base_url=testbed.address, trust_env=False, follow_redirects=True, timeout=30) as web:
            web.get("/hub/login")
            xsrf = next(item.value for item in web.cookies.jar if item.name == "_xsrf" and item.path == "/hub/")
            answer = web.post("/hub/login", data={"username": name, "password": password, "_xsrf": xsrf})
            assert answer.status_code in {400, 403}, name
    assert {item["name"] for item in hub.ask(hub.hub, "GET", "/users")[1]} == before
    assert sorted(path.name for path in home_of(testbed, "ada").parent.iterdir()) == homes
    assert log.stat().st_size - size < 100_000
    hub.close()


@pytest.mark.case("U2")
def test_server_names_that_differ_in_case(testbed: FaultTestbed) -> None:
    """The second server is refused, and the first keeps running."""
    seen = testbed.start("ada", "gpu", "on1")
    client = testbed.clients["ada"]
    status, answer = client.ask(client.hub, "POST", "/users/ada/servers/GPU", {"profile": "light"})
    assert status == 400, answer
    assert "GPU" in answer["message"]
    assert testbed.container("ada", "gpu") == seen


@pytest.mark.case("U3")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"profile": {"name": ["light"]}}, "profile"),
        ({"profile": 7}, "7"),
        ({"profile": "light", "mounts": ["/:/host"]}, "mounts"),
        ({"profile": "light", "privileged": True}, "privileged"),
        ({"profile": "light", "environment": {"NVIDIA_VISIBLE_DEVICES": "all"}}, "environment"),
        ({"profile": "light", "NVIDIA_VISIBLE_DEVICES": "all"}, "NVIDIA_VISIBLE_DEVICES"),
    ],
)
def test_unknown_options(testbed: FaultTestbed, options: dict[str, Any], names: str) -> None:
    """The option is refused with status 400 and the field's name, and no server is made."""
    _check_refused(testbed, options, names)


@pytest.mark.case("U4")
@pytest.mark.parametrize(
    ("options", "names"),
    [({"profile": "light", "image": "evil:1"}, "image"), ({"profile": "gpuhub/light:other"}, "gpuhub/light:other")],
)
def test_image_chosen_by_a_user_is_refused(testbed: FaultTestbed, options: dict[str, Any], names: str) -> None:
    """The image is refused with status 400: only profiles name images."""
    _check_refused(testbed, options, names)


def _check_refused(testbed: FaultTestbed, options: dict[str, Any], names: str) -> None:
    client = testbed.clients["ada"]
    status, answer = client.ask(client.hub, "POST", "/users/ada/servers/nb", options)
    assert status == 400, answer
    assert names in answer["message"]
    assert testbed.leases() == []


@pytest.mark.case("U5")
def test_invalid_numbers(testbed: FaultTestbed) -> None:
    """The request is refused with status 422 and the field's name."""
    client = testbed.clients["ada"]
    for field in ("nnodes", "nproc_per_node", "gpus"):
        for value in ("-1", "0", "1e9", "NaN", '"1; rm"', "1e999"):
            answer = client.broker.post("/jobs", content=f'{{"run_id": "run-12345678", "{field}": {value}}}')
            assert answer.status_code == 422, (field, value, answer.text)
            assert field in answer.json()["detail"]


@pytest.mark.case("U6")
def test_home_that_is_a_symlink(testbed: FaultTestbed, tmp_path: Path) -> None:
    """The start is refused, and nothing is written where the link points."""
    elsewhere, home = tmp_path / "elsewhere", home_of(testbed, "eve")
    elsewhere.mkdir()
    kept = home.with_name("eve.kept")
    home.rename(kept)
    home.symlink_to(elsewhere)
    try:
        assert "home" in testbed.find_refusal("eve", "nb", "light").lower()
        assert list(elsewhere.iterdir()) == []
        assert elsewhere.stat().st_uid == os.getuid()
        assert testbed.leases() == []
    finally:
        home.unlink()
        kept.rename(home)
