"""Services through a broker with a port: who reaches them and how, with the real relay on simulated nodes."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import websocket

from gpu_launch import environment
from gpu_launch.common import service_gateway
from gpuhub.broker.admission import access
from gpuhub.broker.ports import connections, headers
from gpuhub.common import job_keys
from gpuhub.config.containers.services import GATEWAY_ADDRESS, ServiceSettings
from gpuhub.docker.containers.service_access import build_service_environment
from gpuhub.docker.containers.user_containers import WorkerSpec
from tests.support.broker.in_process import JOB_SECRET, Running, Setting, served_broker, until
from tests.support.docker.simulated_nodes import wait_until
from tests.support.hub.port_server import PortServer, endless_requests


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, module_server: PortServer) -> Iterator[Running]:
    """A broker with a service for all, one for ada, and one for the group lab, of which ben is a member."""
    setting = Setting(tmp_path_factory.mktemp("services"))
    tables = (
        {"name": "all", "variables": ("NOTES={url}",)},
        {"name": "adas", "users": ("ada",)},
        {"name": "labs", "groups": ("lab",), "variables": ("LABS={url}",)},
    )
    services = tuple(
        ServiceSettings.model_validate({"image": "gpuhub/base:latest", "port": module_server.port, **table})
        for table in tables
    )
    setting.cluster = setting.cluster.model_copy(update={"services": services})
    access = ["access:services!service=broker"]
    setting.hub.models["ben"] = {"kind": "user", "name": "ben", "groups": ["lab"], "scopes": access}
    with served_broker(setting) as found:
        wait_until(lambda: all(one["state"] == "running" for one in list_services(found, "root")), "all run")
        yield found


def list_services(running: Running, who: str) -> list[dict[str, str]]:
    answer = running.send("GET", "/api/v1/services", who)
    assert answer.status_code == 200, answer.text
    return list(answer.json())


def ask(running: Running, path: str, who: str | None = "ada", method: str = "GET", **more: str) -> httpx.Response:
    """Send a request to an address below the hub's; `who` is a token, or the value of the header for a job's key."""
    sent = {} if who is None else {"Authorization": who if " " in who else f"Bearer {who}"}
    url = running.url.removesuffix("/services/broker") + path
    return httpx.request(method, url, headers={**sent, **more}, trust_env=False, timeout=30)


def open_visit(running: Running, service: str, who: str = "ada") -> str:
    answer = running.send("POST", f"/api/v1/services/{service}/visits", who)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["path"])


@pytest.mark.parametrize(
    ("who", "seen"),
    [("ada", ["all", "adas"]), ("ben", ["all", "labs"]), ("eve", ["all"]), ("root", ["all", "adas", "labs"])],
)
def test_users_see_what_they_may_use(running: Running, who: str, seen: list[str]) -> None:
    """Administrators see all, with the reason where one does not run; to use one they must be named."""
    assert [one["name"] for one in list_services(running, who)] == seen
    for name in ("all", "adas", "labs"):
        may_use = name in seen and not (who == "root" and name != "all")
        assert ask(running, f"/services/{name}/echo", who).status_code == (200 if may_use else 404)


@pytest.mark.parametrize(("who", "status"), [(None, 401), ("unknown", 401), ("narrow", 403), ("own-token", 404)])
def test_strangers_reach_nothing(running: Running, server: PortServer, who: str | None, status: int) -> None:
    """Without a token of a user's, neither the service nor whether it exists is shown."""
    for path in ("/services/all/", "/services/all/echo?a=1", "/services/adas/"):
        assert ask(running, path, who).status_code == status
    for path in ("/services/all/socket", "/services/broker/service-visits/all/guessed/socket"):
        with pytest.raises(websocket.WebSocketBadStatusException) as refused:
            header = [] if who is None else [f"Authorization: Bearer {who}"]
            url = running.url.replace("http", "ws", 1).removesuffix("/services/broker") + path
            websocket.create_connection(url, header=header, timeout=20, suppress_origin=True)
        assert refused.value.status_code == (401 if "guessed" in path else status)
    assert server.received == []


def test_the_hubs_secrets_stay_outside(running: Running, server: PortServer) -> None:
    """The service learns who asks, and gets neither token nor cookie; a name that a client makes up is replaced."""
    made_up = {"Cookie": "jupyterhub-session-id=secret", "X-Forwarded-User": "root", "X-XSRFToken": "secret"}
    answer = ask(running, "/services/all/echo?x=%2F", **made_up)
    assert answer.text.startswith("x=%2F|")
    (received,) = server.received
    assert received["x-forwarded-user"] == "ada"
    assert received["x-forwarded-prefix"] == "/services/all"
    assert not {"cookie", "authorization", "x-xsrftoken"} & {name.lower() for name in received}
    assert "secret" not in str(received)


def test_browsers_go_through_the_hub_to_a_sandboxed_page(running: Running, server: PortServer) -> None:
    """Without a token a navigation is sent to the hub; a visit's key opens the one service, while its token lasts."""
    to_hub = ask(running, "/services/adas/some/page?q=1", None, Accept="text/html")
    assert (to_hub.status_code, to_hub.headers["location"]) == (
        303,
        "/hub/gpuhub/services/adas?to=%2Fsome%2Fpage%3Fq%3D1",
    )
    path = open_visit(running, "adas")
    page = ask(running, f"{path}echo", None)
    assert page.status_code == 200
    assert page.headers["content-security-policy"] == headers.SANDBOX.decode()
    assert "set-cookie" not in page.headers
    assert ask(running, path.replace("/adas/", "/all/"), None).status_code == 401
    job_visit = path.replace("service-visits/adas", "visits/service:adas")
    assert ask(running, job_visit, None).status_code in {401, 404}
    running.setting.hub.models["ada"] = None
    authenticator = running.app.state.authenticator
    authenticator._known.clear()
    try:
        assert ask(running, f"{path}echo", None).status_code in {401, 303}
    finally:
        del running.setting.hub.models["ada"]
        authenticator._unknown.clear()


def test_the_address_without_a_slash_is_completed(running: Running) -> None:
    """The redirect names neither host nor scheme, which the broker does not know."""
    answer = ask(running, "/services/all")
    assert (answer.status_code, answer.headers["location"]) == (308, "/services/all/")


def test_administrators_restart_a_service(running: Running) -> None:
    """It has a new relay, and continues."""
    before = running.app.state.services._supervisor.status("labs").relay_id
    assert running.send("POST", "/api/v1/services/labs/restart", "ada").status_code == 403
    assert running.send("POST", "/api/v1/services/gone/restart", "root").status_code == 404
    assert running.send("POST", "/api/v1/services/labs/restart", "root").status_code == 200
    wait_until(lambda: ask(running, "/services/labs/echo", "ben").status_code == 200, "it runs again")
    assert running.app.state.services._supervisor.status("labs").relay_id != before
    assert running.send("GET", "/api/v1/services/labs/logs?lines=5", "root").status_code == 200


def test_one_user_cannot_take_all_connections(running: Running) -> None:
    """Further WebSockets of the user are refused, and another user still gets an answer."""
    url = running.url.replace("http", "ws", 1).removesuffix("/services/broker") + "/services/all/socket"
    opened = []
    try:
        with pytest.raises(websocket.WebSocketBadStatusException) as refused:
            for _ in range(access.SERVICES.per_owner + 1):
                header = ["Authorization: Bearer ada"]
                opened.append(websocket.create_connection(url, header=header, timeout=60, suppress_origin=True))
        assert (refused.value.status_code, len(opened)) == (429, access.SERVICES.per_owner)
        assert ask(running, "/services/all/echo", "eve").status_code == 200
    finally:
        for connection in opened:
            connection.close()


async def test_some_users_cannot_take_all_connections(running: Running) -> None:
    """With as many requests as each of them may send, others still get an answer."""
    url, most = f"{running.url.removesuffix('/services/broker')}/services/all", connections.MAX_OF_VISITOR
    async with (
        endless_requests(url, "ada", access.SERVICES.per_owner) as of_ada,
        endless_requests(url, "ben", access.SERVICES.per_owner) as of_ben,
    ):
        await until(lambda: (len(of_ada), len(of_ben)) == (most, most), "a part of them runs")
        answer = await asyncio.to_thread(ask, running, "/services/all/echo", "eve")
        assert (answer.status_code, len(of_ada), len(of_ben)) == (200, most, most)
    await until(lambda: not running.app.state.user_files.streams._open, "all have ended")


@contextmanager
def running_job(running: Running, who: str) -> Iterator[tuple[str, WorkerSpec]]:
    """Run a job of one worker; yield the header with its key, and the worker."""
    made = running.send("POST", "/api/v1/jobs", who, json={"run_id": f"run-{secrets.token_hex(3)}", "detached": True})
    assert made.status_code == 201, made.text
    job = f"/api/v1/jobs/{made.json()['id']}"
    wait_until(lambda: running.send("GET", job, who).json()["state"] == "running", "the job runs")
    try:
        yield f"Job {job_keys.build_key(JOB_SECRET, made.json()['id'])}", running.workers.specs[-1]
    finally:
        running.send("DELETE", job, who)


def test_a_job_reaches_its_owners_services(running: Running, server: PortServer) -> None:
    """As its owner, who belongs to a group in the hub; those that set variables are named to its containers."""
    with running_job(running, "ben") as (key, worker):
        assert [service.name for service in worker.services] == ["all", "labs"]
        assert ask(running, "/services/labs/echo?a=1", key).text == "a=1|"
        assert ask(running, "/services/all/echo", key, "POST").status_code == 200
        assert ask(running, "/services/adas/echo", key).status_code == 404
    assert [one["x-forwarded-user"] for one in server.received] == ["ben", "ben"]
    assert "Job " not in str(server.received)


def test_a_jobs_key_opens_nothing_else(running: Running) -> None:
    """Neither the broker's other routes, nor services once the job is over, nor with a code that is made up."""
    with running_job(running, "ada") as (key, worker):
        for path in ("/jobs", "/leases", "/services", f"/jobs/{worker.job_id}"):
            assert ask(running, f"/services/broker/api/v1{path}", key).status_code == 401
        assert ask(running, f"/services/broker/ports/{worker.job_id}/", key).status_code == 401
        running.setting.hub.models[key.removeprefix("Job ")] = None
        assert ask(running, "/services/all/echo", key.replace("Job", "Bearer")).status_code == 401
        assert ask(running, "/services/all/echo", key[:-1]).status_code == 401
        assert ask(running, "/services/all/echo", f"Job {worker.job_id}").status_code == 401
        assert ask(running, "/services/all/echo", key).status_code == 200
    wait_until(lambda: ask(running, "/services/all/echo", key).status_code == 401, "the key ends with its job")


async def test_programs_reach_a_service_through_the_gateway_of_their_container(running: Running) -> None:
    """With the variable alone: the gateway of gpu_launch adds the job's key, and large bodies arrive."""
    listener = socket.create_server(("127.0.0.1", 0))
    with running_job(running, "ada") as (key, worker), listener:
        port = listener.getsockname()[1]
        environ = build_service_environment(worker.services) | {
            "GPUHUB_BROKER_URL": running.url,
            "GPUHUB_SERVICES_ADDRESS": f"127.0.0.1:{port}",
            "GPUHUB_JOB_KEY": key.removeprefix("Job "),
        }
        settings = service_gateway.find_settings(environment.read(environ))
        assert settings is not None
        gateway = service_gateway.ServiceGateway(settings)
        try:
            await gateway.start(listener)
            url = environ["NOTES"].replace(GATEWAY_ADDRESS, f"127.0.0.1:{port}")
            async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
                sent = await client.post(f"{url}/echo?a=%2F", content=b"x" * 2_000_000)
                assert sent.text == "a=%2F|" + "x" * 2_000_000
                large = await client.get(f"{url}/large")
                assert len(large.content) == 16 * 65536 * 4
        finally:
            await gateway.close()
