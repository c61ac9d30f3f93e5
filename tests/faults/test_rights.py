"""Permissions in the running product."""

from __future__ import annotations

import json
import os
import stat
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest

from gpuhub.common import secrets
from gpuhub.config import head_address, settings
from tests.faults.testbed.node_access import PORT
from tests.faults.testbed.testbed import KEPT, FaultTestbed, home_of
from tests.support.hub.users import log_in, with_token
from tests.support.product import wait_for


@pytest.mark.case("A1")
@pytest.mark.fast
def test_other_users_lease_and_job(testbed: FaultTestbed) -> None:
    """Every request of ben's on ada's lease and job gets 404 or 403, and hers continue."""
    seen = testbed.start("ada", "nb", "on1")
    job = testbed.submit_job("ada", 1)
    ben = testbed.clients["ben"]
    lease = testbed.lease_of("ada", "nb")["id"]
    tries: list[tuple[str, str, Any]] = [
        ("GET", f"/leases/{lease}", None),
        ("GET", f"/leases/{lease}/why", None),
        ("DELETE", f"/leases/{lease}", None),
        ("POST", f"/leases/{lease}/stage", None),
        ("POST", f"/leases/{lease}/extend", {"time_limit_s": 3600}),
        ("POST", f"/leases/{lease}/activate", {"container_id": "0" * 64}),
        ("POST", f"/leases/{lease}/force", None),
        ("GET", f"/jobs/{job['id']}", None),
        ("DELETE", f"/jobs/{job['id']}", None),
        ("POST", f"/jobs/{job['id']}/renew", None),
        ("POST", "/nodes/rig1/drain", {}),
    ]
    for method, path, body in tries:
        status, answer = ben.ask(ben.broker, method, path, body)
        assert status in {403, 404}, (method, path, status, answer)
    for method, path in (("DELETE", "/users/ada/servers/nb"), ("GET", "/users/ada"), ("POST", "/users/ada/tokens")):
        status, answer = ben.ask(ben.hub, method, path, {} if method == "POST" else None)
        assert status in {403, 404}, (method, path, status, answer)
    assert testbed.container("ada", "nb") == seen
    assert testbed.find_job("ada", job["id"])["state"] == "running"


@pytest.mark.case("A2")
def test_an_owner_in_the_body_or_a_header(testbed: FaultTestbed) -> None:
    """A user's token acts for its owner, whatever body and headers name."""
    ben = testbed.clients["ben"]
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
def test_wrong_tokens(testbed: FaultTestbed) -> None:
    """Every route of the broker gives 401 for a token that the hub does not know, and 403 without the scope."""
    schema = httpx.get(f"{testbed.address}/services/broker/openapi.json", trust_env=False, timeout=30).json()
    password = secrets.read_secret(testbed.paths, secrets.USER_PASSWORD)
    revoked = log_in(testbed.address, "eve", password)
    own = revoked.ask(revoked.hub, "GET", "/user")[1]["token_id"]
    created = revoked.ask(revoked.hub, "POST", "/users/eve/tokens", {"scopes": ["read:users!user"]})[1]
    assert revoked.ask(revoked.hub, "DELETE", f"/users/eve/tokens/{own}")[0] == 204
    wrong = {"": {401}, "0" * 32: {401}, revoked.token: {401}, created["token"]: {403}}
    routes = [(path, method.upper()) for path, item in schema["paths"].items() for method in item if "/api/v1/" in path]
    assert len(routes) > 20
    with httpx.Client(base_url=testbed.address, trust_env=False, timeout=30) as web:
        for path, method in routes:
            for token, statuses in wrong.items():
                headers = {"Authorization": f"token {token}"} if token else {}
                answer = web.request(method, _fill_path(path), headers=headers)
                assert answer.status_code in statuses, (method, path, token[:4], answer.text[:200])
    revoked.close()


def _fill_path(path: str) -> str:
    return (
        path.replace("{name}", "rig1")
        .replace("{lease_id}", "x")
        .replace("{job_id}", "x")
        .replace("{reservation_id}", "x")
    )


@pytest.mark.case("A4")
def test_worker_has_no_access_to_the_hub(testbed: FaultTestbed) -> None:
    """A worker's environment has no token, and whatever it asks the hub or the broker is refused."""
    testbed.submit_job("ada", 1)
    worker = next(seen for seen in testbed.observer.running() if seen.kind == "worker")
    _, environment = testbed.execute(worker, "env")
    for secret in secrets.BROKER_TOKEN, secrets.SPAWNER_TOKEN, secrets.PROXY_TOKEN:
        assert secrets.read_secret(testbed.paths, secret) not in environment
    assert "TOKEN" not in environment
    cluster = settings.load(testbed.paths.closet_cluster_file)
    head = str(testbed.plan.head)
    hub, broker = head_address.build_hub_origin(cluster, head), head_address.build_broker_url(cluster, head)
    urls = [f"{hub}/hub/api/{path}" for path in ("users", "proxy", "services")]
    urls += [f"{broker}/api/v1/{path}" for path in ("leases", "jobs", "events")]
    status, answers = testbed.execute(worker, "python3", "-c", _REQUESTS, json.dumps(urls))
    assert status == 0, answers
    # A worker has no certificate, so that the connections are closed. Not `unreachable`: requests do leave the container.
    assert set(json.loads(answers)) <= {"closed", 401, 403}, answers
    # A notebook has one, and is refused for lack of a token.
    notebook = testbed.start("ada", "nb", "light")
    status, answers = testbed.execute(notebook, "python3", "-c", _REQUESTS, json.dumps([f"{broker}/health", *urls]))
    assert status == 0, answers
    health, *refused = json.loads(answers)
    assert health == 200, answers
    assert set(refused) <= {401, 403}, answers


#: In a container, with its certificate but without a token: the status of each answer, `closed` if the connection was
#: closed without one, `unreachable` if there was none. The server's certificate is not checked.
_REQUESTS = """
import json, os, socket, ssl, sys, urllib.error, urllib.parse, urllib.request
context = ssl._create_unverified_context()
if "JUPYTERHUB_SSL_CERTFILE" in os.environ:
    context.load_cert_chain(os.environ["JUPYTERHUB_SSL_CERTFILE"], os.environ["JUPYTERHUB_SSL_KEYFILE"])
answers = []
for url in json.loads(sys.argv[1]):
    parts = urllib.parse.urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=5).close()
    except OSError:
        answers.append("unreachable")
        continue
    try:
        answers.append(urllib.request.urlopen(url, timeout=5, context=context).status)
    except urllib.error.HTTPError as error:
        answers.append(error.code)
    except OSError:
        answers.append("closed")
print(json.dumps(answers))
"""


@pytest.mark.case("A6")
def test_network_isolation_between_users(testbed: FaultTestbed) -> None:
    """From ben's container neither ada's ports nor Docker, SSH or metadata services answer."""
    ada, ben = testbed.start("ada", "nb", "on1"), testbed.start("ben", "nb", "on2")
    testbed.submit_job("ada", 1)
    targets = [("169.254.169.254", 80)]
    for seen in testbed.observer.running():
        if seen.owner == "ada":
            targets += [(address, port) for address in _addresses(testbed, seen) for port in (8888, 29500, 22)]
    for node in testbed.plan.nodes:
        targets += [(str(node.address), port) for port in (PORT, 2375, 22, 2377, 7946)]
    targets += [(str(testbed.plan.node("rig1").address), port) for port in _published(testbed, ada)]
    probe = (
        "import json,socket,sys\n"
        "for host, port in json.loads(sys.argv[1]):\n"
        "    with socket.socket() as s:\n"
        "        s.settimeout(1)\n"
        "        try: s.connect((host, port)); print(host, port)\n"
        "        except OSError: pass\n"
    )
    status, answered = testbed.execute(ben, "python3", "-c", probe, json.dumps(targets))
    assert status == 0, answered
    assert answered.split("\n") == [""], answered


def _addresses(testbed: FaultTestbed, seen: Any) -> list[str]:
    with closing(testbed.client_of(seen.node)) as client:
        networks = client.inspect_container(seen.id)["NetworkSettings"]["Networks"].values()
    return [network["IPAddress"] for network in networks if network["IPAddress"]]


def _published(testbed: FaultTestbed, seen: Any) -> list[int]:
    with closing(testbed.client_of(seen.node)) as client:
        ports = client.inspect_container(seen.id)["NetworkSettings"]["Ports"] or {}
    return [int(binding["HostPort"]) for bound in ports.values() for binding in bound or ()]


@pytest.mark.case("A7")
def test_no_access_to_other_gpus_or_other_users_homes(testbed: FaultTestbed) -> None:
    """On the other user's node the GPU's device can neither be made nor opened, and only the user's home is mounted."""
    ben = testbed.start_beside("ben", testbed.start("ada", "nb", "on1"))
    status, answer = testbed.execute(ben, "sh", "-c", "mknod /tmp/card c 195 0 || mknod ~/card c 195 0")
    assert status != 0
    assert "ermitted" in answer or "denied" in answer
    assert testbed.execute(ben, "sh", "-c", "ls /dev/nvidia*")[0] != 0
    left = home_of(testbed, "ben") / "card"
    os.mknod(left, stat.S_IFCHR | 0o666, os.makedev(195, 0))
    try:
        left.chmod(0o666)
        status, answer = testbed.execute(ben, "sh", "-c", ": <> ~/card")
    finally:
        left.unlink()
    # No driver has this number here: without a rule against it the answer would be "No such device".
    assert status != 0
    assert "ermitted" in answer or "denied" in answer
    assert (home_of(testbed, "ada") / KEPT).is_file()
    assert testbed.execute(ben, "cat", f"/home/ben/{KEPT}")[0] == 0
    assert testbed.execute(ben, "cat", f"/home/ada/{KEPT}")[0] != 0
    _, listed = testbed.execute(ben, "ls", "/home")
    assert listed.split() == ["ben"]


@pytest.mark.case("A8")
def test_repeated_request_is_idempotent(testbed: FaultTestbed) -> None:
    """Twenty concurrent requests with one key, and one later, give one lease."""
    ben = testbed.clients["ben"]
    body = {"profile": "light", "server": "x", "key": uuid.uuid4().hex}
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: ben.ask(ben.broker, "POST", "/leases", body), range(20)))
    ids = {answer["id"] for status, answer in answers if status == 201}
    assert {status for status, _ in answers} <= {201, 409}
    assert len(ids) == 1
    again = ben.ask(ben.broker, "POST", "/leases", body)[1]["id"]
    assert {again} == ids
    ben.ask(ben.broker, "DELETE", f"/leases/{again}")
    wait_for(lambda: testbed.leases() == [], "the lease has ended", 30)
    assert ben.ask(ben.broker, "POST", "/leases", body)[1]["state"] == "released"


@pytest.mark.case("A3")
def test_user_token_has_no_spawner_rights(testbed: FaultTestbed) -> None:
    """A user's token gets none of the spawner's rights."""
    ben = testbed.clients["ben"]
    status, answer = ben.ask(ben.hub, "POST", "/users/ben/tokens", {"scopes": ["custom:gpuhub:any-owner"]})
    assert status in {400, 403}, answer
    other = with_token(testbed.address, "ben", ben.token)
    assert all(row["owner"] == "ben" for row in other.ask(other.broker, "GET", "/leases")[1])
    other.close()
