"""Who may do what, asked of the running product."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest

from gpuhub import secrets
from tests.faults.bed import Bed, home
from tests.faults.ways import PORT
from tests.support.product import wait_for
from tests.support.users import log_in, with_token


@pytest.mark.case("A1")
@pytest.mark.fast
def test_another_ones_lease_and_job(bed: Bed) -> None:
    """404 or 403 for all that ben tries with ada's; hers go on."""
    seen = bed.start("ada", "nb", "on1")
    job = bed.job("ada", 1)
    ben = bed.clients["ben"]
    lease = bed.lease_of("ada", "nb")["id"]
    tries: list[tuple[str, str, Any]] = [
        ("GET", f"/leases/{lease}", None),
        ("GET", f"/leases/{lease}/why", None),
        ("DELETE", f"/leases/{lease}", None),
        ("POST", f"/leases/{lease}/extend", {"time_limit_s": 3600}),
        ("POST", f"/leases/{lease}/activate", {"container_id": "0" * 64}),
        ("POST", f"/leases/{lease}/force", None),
        ("GET", f"/jobs/{job['id']}", None),
        ("DELETE", f"/jobs/{job['id']}", None),
        ("POST", f"/jobs/{job['id']}/renew", None),
        ("POST", "/nodes/rig1/drain", {}),
    ]
    for method, path, body in tries:
        status, said = ben.ask(ben.broker, method, path, body)
        assert status in {403, 404}, (method, path, status, said)
    for method, path in (("DELETE", "/users/ada/servers/nb"), ("GET", "/users/ada"), ("POST", "/users/ada/tokens")):
        status, said = ben.ask(ben.hub, method, path, {} if method == "POST" else None)
        assert status in {403, 404}, (method, path, status, said)
    assert bed.container("ada", "nb") == seen
    assert bed.job_now("ada", job["id"])["state"] == "running"


@pytest.mark.case("A2")
def test_an_owner_in_the_body_or_a_header(bed: Bed) -> None:
    """A user's token is its owner's, whatever else is said."""
    ben = bed.clients["ben"]
    body = {"profile": "light", "server": "x", "key": uuid.uuid4().hex, "owner": "ada"}
    status, said = ben.ask(ben.broker, "POST", "/leases", body)
    assert status == 403, said
    del body["owner"]
    forged = {"X-Forwarded-User": "ada", "X-Remote-User": "ada", "X-JupyterHub-User": "ada"}
    answer = ben.broker.post("/leases", content=json.dumps(body), headers=forged)
    assert answer.status_code == 201, answer.text
    assert answer.json()["owner"] == "ben"
    assert ben.ask(ben.broker, "DELETE", f"/leases/{answer.json()['id']}")[0] == 200


@pytest.mark.case("A3")
def test_wrong_tokens(bed: Bed) -> None:
    """On every route of the broker: 401 without a token that the hub knows, 403 without the scope."""
    schema = httpx.get(f"{bed.address}/services/broker/openapi.json", trust_env=False, timeout=30).json()
    password = secrets.read_secret(bed.paths, secrets.USER_PASSWORD)
    revoked = log_in(bed.address, "eve", password)
    own = revoked.ask(revoked.hub, "GET", "/user")[1]["token_id"]
    made = revoked.ask(revoked.hub, "POST", "/users/eve/tokens", {"scopes": ["read:users!user"]})[1]
    assert revoked.ask(revoked.hub, "DELETE", f"/users/eve/tokens/{own}")[0] == 204
    wrong = {"": {401}, "0" * 32: {401}, revoked.token: {401}, made["token"]: {403}}
    routes = [(path, method.upper()) for path, item in schema["paths"].items() for method in item if "/api/v1/" in path]
    assert len(routes) > 20
    with httpx.Client(base_url=bed.address, trust_env=False, timeout=30) as web:
        for path, method in routes:
            for token, statuses in wrong.items():
                headers = {"Authorization": f"token {token}"} if token else {}
                answer = web.request(method, _filled(path), headers=headers)
                assert answer.status_code in statuses, (method, path, token[:4], answer.text[:200])
    revoked.close()


def _filled(path: str) -> str:
    return (
        path.replace("{name}", "rig1")
        .replace("{lease_id}", "x")
        .replace("{job_id}", "x")
        .replace("{reservation_id}", "x")
    )


@pytest.mark.case("A4")
def test_a_worker_asks_the_hub(bed: Bed) -> None:
    """Its environment has no token, and without one the hub tells nothing."""
    bed.job("ada", 1)
    worker = next(seen for seen in bed.observer.running() if seen.kind == "worker")
    _, environment = bed.execute(worker, "env")
    for secret in secrets.BROKER_TOKEN, secrets.SPAWNER_TOKEN, secrets.PROXY_TOKEN:
        assert secrets.read_secret(bed.paths, secret) not in environment
    assert "TOKEN" not in environment
    for path in ("/hub/api/users", "/hub/api/proxy", "/hub/api/services"):
        answer = httpx.get(f"{bed.address}{path}", trust_env=False, timeout=10)
        assert answer.status_code in {401, 403}


@pytest.mark.case("A6")
def test_a_user_scans_another(bed: Bed) -> None:
    """From ben's container none of ada's ports answers, no Docker, no SSH, no metadata."""
    ada, ben = bed.start("ada", "nb", "on1"), bed.start("ben", "nb", "on2")
    bed.job("ada", 1)
    targets = [("169.254.169.254", 80)]
    for seen in bed.observer.running():
        if seen.owner == "ada":
            targets += [(address, port) for address in _addresses(bed, seen) for port in (8888, 29500, 22)]
    for node in bed.plan.nodes:
        targets += [(str(node.address), port) for port in (PORT, 2375, 22, 2377, 7946)]
    targets += [(str(bed.plan.node("rig1").address), port) for port in _published(bed, ada)]
    probe = (
        "import json,socket,sys\n"
        "for host, port in json.loads(sys.argv[1]):\n"
        "    with socket.socket() as s:\n"
        "        s.settimeout(1)\n"
        "        try: s.connect((host, port)); print(host, port)\n"
        "        except OSError: pass\n"
    )
    status, answered = bed.execute(ben, "python3", "-c", probe, json.dumps(targets))
    assert status == 0, answered
    assert answered.split("\n") == [""], answered


def _addresses(bed: Bed, seen: Any) -> list[str]:
    with closing(bed.client_of(seen.node)) as client:
        found = client.inspect_container(seen.id)["NetworkSettings"]["Networks"].values()
    return [network["IPAddress"] for network in found if network["IPAddress"]]


def _published(bed: Bed, seen: Any) -> list[int]:
    with closing(bed.client_of(seen.node)) as client:
        ports = client.inspect_container(seen.id)["NetworkSettings"]["Ports"] or {}
    return [int(one["HostPort"]) for bound in ports.values() for one in bound or ()]


@pytest.mark.case("A7")
def test_another_gpus_device_and_another_ones_home(bed: Bed) -> None:
    """A device that was not given can be neither made nor opened; only the own home is there."""
    bed.start("ada", "nb", "on1")
    ben = bed.start("ben", "nb", "light")
    status, said = bed.execute(ben, "sh", "-c", "mknod /tmp/card c 195 0 || mknod ~/card c 195 0")
    assert status != 0
    assert "ermitted" in said or "denied" in said
    assert bed.execute(ben, "sh", "-c", "ls /dev/nvidia*")[0] != 0
    assert bed.execute(ben, "cat", f"/home/ada/{home(bed, 'ada').name}")[0] != 0
    _, listed = bed.execute(ben, "ls", "/home")
    assert listed.split() == ["ben"]


@pytest.mark.case("A8")
def test_the_same_request_again(bed: Bed) -> None:
    """Twenty at once with one key, and one later: one lease."""
    ben = bed.clients["ben"]
    body = {"profile": "light", "server": "x", "key": uuid.uuid4().hex}
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: ben.ask(ben.broker, "POST", "/leases", body), range(20)))
    ids = {said["id"] for status, said in answers if status == 201}
    assert {status for status, _ in answers} <= {201, 409}
    assert len(ids) == 1
    again = ben.ask(ben.broker, "POST", "/leases", body)[1]["id"]
    assert {again} == ids
    ben.ask(ben.broker, "DELETE", f"/leases/{again}")
    wait_for(lambda: bed.leases() == [], "the lease has ended", 30)
    assert ben.ask(ben.broker, "POST", "/leases", body)[1]["state"] == "released"


@pytest.mark.case("A3")
def test_the_spawners_token_is_the_spawners(bed: Bed) -> None:
    """A user's token with a wish for any owner's rights gets none of them."""
    ben = bed.clients["ben"]
    status, said = ben.ask(ben.hub, "POST", "/users/ben/tokens", {"scopes": ["custom:gpuhub:any-owner"]})
    assert status in {400, 403}, said
    other = with_token(bed.address, "ben", ben.token)
    assert all(row["owner"] == "ben" for row in other.ask(other.broker, "GET", "/leases")[1])
    other.close()
