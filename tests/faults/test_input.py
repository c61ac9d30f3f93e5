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

from gpuhub import secrets
from gpuhub.closet import cards
from gpuhub.closet.places import node_places
from gpuhub.closet.plan import gpu_uuid
from tests.faults.bed import Bed, home
from tests.support.product import wait_for
from tests.support.users import with_token


def refusal(bed: Bed, tmp_path: Path, **changes: Any) -> str:
    """What a broker says that is to start with these settings."""
    made = tomlkit.parse(bed.settings_text()).unwrap()
    for table, value in changes.items():
        made[table] = value
    file = tmp_path / "cluster.toml"
    file.write_text(tomlkit.dumps(made))
    program = str(Path(sys.executable).with_name("gpuhub"))
    command = [program, "broker", "--instance", bed.paths.instance, "--cluster-file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.case("C1")
@pytest.mark.fast
def test_docker_over_plain_tcp(bed: Bed, tmp_path: Path) -> None:
    """Refused before anything starts; the node is named."""
    node = {"name": "rig9", "address": "10.1.2.3", "docker": "tcp://10.1.2.3:2375"}
    said = refusal(bed, tmp_path, nodes=[node])
    assert "rig9" in said
    assert "tls" in said.lower()


@pytest.mark.case("C2")
def test_nobody_may_log_in(bed: Bed, tmp_path: Path) -> None:
    """Refused before anything starts; what to write is said."""
    said = refusal(bed, tmp_path, users={"login": "password", "allowed": [], "uid_first": 20000})
    assert "allowed" in said


@pytest.mark.case("C3")
def test_one_gpu_on_two_nodes(bed: Bed) -> None:
    """Given on neither, both nodes are named, others are given."""
    card, uuid = bed.plan.node("rig2").cards[0], gpu_uuid(bed.plan.instance, "rig1", 0)
    file = node_places(bed.paths, "rig2").cards / "0" / "card"
    before = file.read_text()
    file.write_text(cards.format_card(card, index=0, uuid=uuid))
    try:
        wait_for(lambda: "report the same GPU" in (bed.gpu("rig1").get("message") or ""), "it is told", 30)
        said = f"{bed.node('rig1')['message']} {bed.node('rig2')['message']}"
        assert "rig1" in said
        assert "rig2" in said
        assert bed.gpu("rig1")["state"] == "unavailable"
        bed.start("ada", "nb", "on3")
    finally:
        file.write_text(before)
    wait_for(lambda: {bed.gpu("rig1").get("state"), bed.gpu("rig2").get("state")} == {"free"}, bed.describe, 60)


@pytest.mark.case("C4")
@pytest.mark.parametrize("whose", ["expired", "stranger"])
def test_a_daemons_certificate_is_wrong(bed: Bed, whose: str) -> None:
    """The node says what is wrong with it; others serve; with the right certificate it is back."""
    folder = bed.wire_folder("rig2")
    bed.stop_wire("rig2")
    kept = {name: (folder / name).read_bytes() for name in ("server.pem", "server.key")}
    for name in kept:
        (folder / name).write_bytes((folder / name.replace("server", whose)).read_bytes())
    bed.start_wire("rig2")
    try:
        wait_for(lambda: "unauthenticated" in (bed.node("rig2").get("message") or ""), bed.describe, 60)
        assert bed.node("rig2")["state"] == "unreachable"
        bed.start("ada", "nb", "on3")
    finally:
        bed.stop_wire("rig2")
        for name, content in kept.items():
            (folder / name).write_bytes(content)
        bed.start_wire("rig2")
    wait_for(lambda: bed.node("rig2").get("state") == "up", "rig2 is up", 90)


@pytest.mark.case("U1")
def test_names_that_mean_something_elsewhere(bed: Bed) -> None:
    """None logs in, and nothing is made."""
    hub = with_token(bed.address, "broker", secrets.read_secret(bed.paths, secrets.BROKER_TOKEN))
    log = bed.paths.log / "hub.log"
    password, size = secrets.read_secret(bed.paths, secrets.USER_PASSWORD), log.stat().st_size
    homes = sorted(path.name for path in home(bed, "ada").parent.iterdir())
    before = {one["name"] for one in hub.ask(hub.hub, "GET", "/users")[1]}
    for name in ("..", ".", "~root", "$(id)", "a;b", "-rf", "ädä", "аda", "ada b", "a" * 5000, "root"):
        with httpx.Client(base_url=bed.address, trust_env=False, follow_redirects=True, timeout=30) as web:
            web.get("/hub/login")
            xsrf = next(one.value for one in web.cookies.jar if one.name == "_xsrf" and one.path == "/hub/")
            answer = web.post("/hub/login", data={"username": name, "password": password, "_xsrf": xsrf})
            assert answer.status_code in {400, 403}, name
    assert {one["name"] for one in hub.ask(hub.hub, "GET", "/users")[1]} == before
    assert sorted(path.name for path in home(bed, "ada").parent.iterdir()) == homes
    assert log.stat().st_size - size < 100_000
    hub.close()


@pytest.mark.case("U2")
def test_server_names_that_differ_in_case(bed: Bed) -> None:
    """The second is refused; the first goes on."""
    seen = bed.start("ada", "gpu", "on1")
    client = bed.clients["ada"]
    status, said = client.ask(client.hub, "POST", "/users/ada/servers/GPU", {"profile": "light"})
    assert status == 400, said
    assert "GPU" in said["message"]
    assert bed.container("ada", "gpu") == seen


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
def test_options_that_nobody_offers(bed: Bed, options: dict[str, Any], names: str) -> None:
    """400, and the field is named; nothing is made."""
    _refused(bed, options, names)


@pytest.mark.case("U4")
@pytest.mark.parametrize(
    ("options", "names"),
    [({"profile": "light", "image": "evil:1"}, "image"), ({"profile": "gpuhub/light:other"}, "gpuhub/light:other")],
)
def test_an_image_of_ones_own(bed: Bed, options: dict[str, Any], names: str) -> None:
    """400; only profiles of the settings name images."""
    _refused(bed, options, names)


def _refused(bed: Bed, options: dict[str, Any], names: str) -> None:
    client = bed.clients["ada"]
    status, said = client.ask(client.hub, "POST", "/users/ada/servers/nb", options)
    assert status == 400, said
    assert names in said["message"]
    assert bed.leases() == []


@pytest.mark.case("U5")
def test_numbers_that_are_none(bed: Bed) -> None:
    """422, and the field is named."""
    client = bed.clients["ada"]
    for field in ("nnodes", "nproc_per_node", "gpus"):
        for value in ("-1", "0", "1e9", "NaN", '"1; rm"', "1e999"):
            answer = client.broker.post("/jobs", content=f'{{"run_id": "run-12345678", "{field}": {value}}}')
            assert answer.status_code == 422, (field, value, answer.text)
            assert field in answer.json()["detail"]


@pytest.mark.case("U6")
def test_a_home_that_leads_elsewhere(bed: Bed, tmp_path: Path) -> None:
    """The start is refused, and nothing is written where the link leads."""
    elsewhere, place = tmp_path / "elsewhere", home(bed, "eve")
    elsewhere.mkdir()
    kept = place.with_name("eve.kept")
    place.rename(kept)
    place.symlink_to(elsewhere)
    try:
        assert "home" in bed.refusal("eve", "nb", "light").lower()
        assert list(elsewhere.iterdir()) == []
        assert elsewhere.stat().st_uid == os.getuid()
        assert bed.leases() == []
    finally:
        place.unlink()
        kept.rename(place)
