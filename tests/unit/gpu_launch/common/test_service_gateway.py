"""What the gateway of a container sends on, to a server that stands for the broker."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from gpu_launch import environment
from gpu_launch.common import service_gateway
from gpu_launch.common.service_gateway import GatewaySettings, ServiceGateway, find_settings, start_in_thread
from gpu_launch.errors import GpuLaunchError

WORKER = {
    "GPUHUB_BROKER_URL": "https://10.77.0.1:8010/services/broker",
    "GPUHUB_SERVICES": "mlflow,packages",
    "GPUHUB_SERVICES_ADDRESS": "127.0.0.1:18034",
    "GPUHUB_JOB_KEY": "j1.secret",
}


def find_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def run_gateway(handler):
    """Yield a client of a gateway whose broker answers with `handler`; without one nothing listens there."""
    broker = find_port()
    runner = web.ServerRunner(web.Server(handler))
    await runner.setup()
    if handler is not None:
        await web.TCPSite(runner, "127.0.0.1", broker).start()
    listener = socket.create_server(("127.0.0.1", 0))
    settings = GatewaySettings(
        host="127.0.0.1",
        port=listener.getsockname()[1],
        broker=f"http://127.0.0.1:{broker}",
        services=frozenset({"mlflow"}),
        authorization="Job j1.secret",
    )
    gateway = ServiceGateway(settings)
    await gateway.start(listener)
    try:
        base = f"http://127.0.0.1:{settings.port}"
        async with aiohttp.ClientSession(base, auto_decompress=False) as client:
            yield client
    finally:
        await gateway.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("changes", "authorization"),
    [
        ({}, "Job j1.secret"),
        ({"GPUHUB_JOB_KEY": "", "JUPYTERHUB_API_TOKEN": "t0"}, "token t0"),
        ({"GPUHUB_JOB_KEY": ""}, None),
        ({"GPUHUB_SERVICES": ""}, None),
        ({"GPUHUB_SERVICES_ADDRESS": ""}, None),
        ({"GPUHUB_BROKER_URL": ""}, None),
    ],
)
def test_where_there_are_services_and_a_right_to_them(changes, authorization):
    """A worker has the key of its job, a notebook its token; without one of them nothing is started."""
    settings = find_settings(environment.read(WORKER | changes))
    if authorization is None:
        assert settings is None
        return
    assert settings.authorization == authorization
    assert (settings.host, settings.port, settings.broker) == ("127.0.0.1", 18034, "https://10.77.0.1:8010")
    assert settings.services == {"mlflow", "packages"}


def test_the_key_is_in_no_text():
    """The environment may be shown in an error."""
    assert "secret" not in repr(environment.read(WORKER))


async def test_a_request_arrives_whole_with_the_containers_own_right():
    """Path, query and body are as sent; what a client says about itself or its connection stays here."""
    seen = []

    async def answer(request):
        seen.append((request.method, request.raw_path, dict(request.headers), await request.read()))
        return web.Response(status=201, body=b"made", headers={"X-Run": "7", "Set-Cookie": "a=b"})

    async with run_gateway(answer) as client:
        sent = {"Authorization": "Bearer own", "Cookie": "c=d", "X-Own": "1", "User-Agent": "mlflow/3"}
        url = "/services/mlflow/api/2.0/runs?name=a%2Fb&x=%20"
        async with client.post(URL(url, encoded=True), data=b"x" * 300_000, headers=sent) as got:
            assert (got.status, await got.read(), got.headers["X-Run"]) == (201, b"made", "7")
    ((method, path, headers, body),) = seen
    assert (method, path, body) == ("POST", url, b"x" * 300_000)
    assert headers["Authorization"] == "Job j1.secret"
    assert (headers["X-Own"], headers["User-Agent"]) == ("1", "mlflow/3")
    assert "Cookie" not in headers


async def test_bodies_pass_in_parts_both_ways():
    """The first part of an answer arrives before the last part of the request is sent, and nothing is decoded."""

    async def echo(request):
        response = web.StreamResponse(headers={"Content-Encoding": "gzip"})
        await response.prepare(request)
        async for part in request.content.iter_any():
            await response.write(part)
        return response

    more = asyncio.Event()

    async def parts():
        yield b"first"
        await more.wait()
        yield b"second"

    async with run_gateway(echo) as client, client.put("/services/mlflow/artifact", data=parts()) as got:
        assert await asyncio.wait_for(got.content.readany(), 20) == b"first"
        more.set()
        assert await asyncio.wait_for(got.content.read(), 20) == b"second"
        assert got.headers["Content-Encoding"] == "gzip"


@pytest.mark.parametrize(
    "path",
    ["/", "/services/", "/services/broker/api/v1/jobs", "/services/other/", "/api/v1/jobs", "/x/services/mlflow/"],
)
async def test_nothing_else_of_the_broker_is_reached(path):
    """The text says what is here."""
    seen = []

    async def note(request):
        seen.append(request.raw_path)
        return web.Response()

    async with run_gateway(note) as client, client.get(path) as got:
        assert (got.status, await got.text()) == (
            404,
            "There is nothing at this address. Here are: /services/mlflow/\n",
        )
    assert seen == []


async def test_a_redirect_is_the_clients_to_follow():
    """So that the address in the client stays right."""

    async def redirect(_request):
        return web.Response(status=307, headers={"Location": "/services/mlflow/next"})

    async with (
        run_gateway(redirect) as client,
        client.get("/services/mlflow/", allow_redirects=False) as got,
    ):
        assert (got.status, got.headers["Location"]) == (307, "/services/mlflow/next")


async def test_a_broker_that_is_away_is_an_error_after_which_clients_try_again():
    """503, as clients of services expect it; a connection that breaks in between is another."""
    async with run_gateway(None) as client, client.get("/services/mlflow/") as got:
        assert (got.status, got.headers["Retry-After"]) == (503, "2")
        assert "gpuhub's broker does not answer" in await got.text()

    async def abort(request):
        request.transport.abort()
        return web.Response()

    async with run_gateway(abort) as client, client.post("/services/mlflow/", data=b"x") as got:
        assert got.status == 502


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one():
    """The broker goes away in the middle of a body without a length: so does the connection here."""

    async def answer(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"the first half")
        request.transport.abort()
        return response

    async with run_gateway(answer) as client:
        with pytest.raises(aiohttp.ClientError):
            async with client.get("/services/mlflow/") as response:
                assert response.status == 200
                await response.read()


def test_a_taken_port_is_reported_and_stops_nothing(caplog):
    """A program of the user's may have it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        env = environment.read(WORKER | {"GPUHUB_SERVICES_ADDRESS": address})
        assert start_in_thread(env) is None
    assert "services cannot be reached from here" in caplog.text


def test_who_asks_before_the_gateway_is_ready_is_not_refused(monkeypatch, caplog):
    """A launch asks MLflow at its start, when the gateway's thread may still load its modules."""
    is_asked = threading.Event()

    def load_late(_env):
        assert is_asked.wait(20)
        raise GpuLaunchError("no certificate")

    monkeypatch.setattr(service_gateway, "load_own_tls", load_late)
    port = find_port()
    thread = start_in_thread(environment.read(WORKER | {"GPUHUB_SERVICES_ADDRESS": f"127.0.0.1:{port}"}))
    with socket.create_connection(("127.0.0.1", port), 20):
        is_asked.set()
        thread.join(20)
    assert not thread.is_alive()
    assert "services cannot be reached from here: no certificate" in caplog.text
