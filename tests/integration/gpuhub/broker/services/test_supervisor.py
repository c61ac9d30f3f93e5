"""Services on a real Docker daemon: started, confined, restarted, replaced and removed, and their data stays."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpcore
import pytest

from gpuhub.broker.controllers import loop
from gpuhub.broker.ports.connections import PortConnections, ServerAddress
from gpuhub.broker.services import supervisor as supervisors
from gpuhub.broker.services.supervisor import ServiceSupervisor
from gpuhub.broker_api.schemas.services import ServiceState
from gpuhub.common import names
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.services.service_container import build_relay_command
from tests.support.broker.in_process import until
from tests.support.clusters import build_cluster
from tests.support.docker.own_daemon import TINY, OwnDaemon, own_daemon

INSTANCE = "ghsvc"
PORT = 8000
#: Serves its folder, and what it is and may do.
PROGRAM = """
import http.server, os
class Handler(http.server.SimpleHTTPRequestHandler):
    def do_POST(self):
        size = int(self.headers["Content-Length"])
        body = self.rfile.read(size)
        if self.path == "/end":
            print("last words", flush=True)
            os._exit(3)
        if self.path == "/run":
            try:
                answer = repr(eval(body.decode()))
            except Exception as error:
                answer = type(error).__name__ + str(error)
        else:
            open("/data/" + self.path.strip("/"), "wb").write(body)
            answer = "stored"
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer.encode())))
        self.end_headers()
        self.wfile.write(answer.encode())
print("serving", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def docker_daemon() -> Iterator[OwnDaemon]:
    with own_daemon() as found:
        yield found


@pytest.fixture
def data() -> Iterator[Path]:
    """A folder that is permitted and does not exist yet."""
    folder = Path("/srv") / f"gpuhub-test-{uuid4().hex[:8]}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often."""
    monkeypatch.setattr(supervisors, "PERIOD_S", 0.2)


def build_settings(docker_daemon: OwnDaemon, *services: dict[str, Any]) -> ClusterSettings:
    """Return a cluster whose first node is the daemon."""
    node = {"name": "rig1", "address": "192.168.1.21", "docker": docker_daemon.url}
    profile = {"name": "cpu", "title": "No GPU", "gpu_count": 0}
    return build_cluster(nodes=[node], profiles=[profile], services=list(services))


def service(data: Path | None = None, **changes: Any) -> dict[str, Any]:
    """Return the table of a service with the program above."""
    kept = {} if data is None else {"data": str(data)}
    return {
        "name": "notes",
        "image": TINY,
        "command": ["python3", "-c", PROGRAM],
        "port": PORT,
        "memory": "128M",
        **kept,
        **changes,
    }


class Services:
    """A supervisor that runs, and connections to its services."""

    def __init__(self, cluster: ClusterSettings, folder: Path) -> None:
        self.daemons = DockerClients(cluster.nodes, instance=INSTANCE, run_dir=folder)
        self.supervisor = ServiceSupervisor(cluster, self.daemons)
        self.connections = PortConnections(self.daemons)

    async def wait(self, state: ServiceState = ServiceState.RUNNING, name: str = "notes") -> None:
        await until(lambda: self.supervisor.status(name).state is state, f"{name} is {state}")

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Send a request, as soon as the service listens."""
        relay = self.supervisor.status("notes").relay_id
        address = ServerAddress(node="rig1", container_id=relay, port=PORT, command=build_relay_command(PORT))
        request: Callable[..., Any] = httpcore.Request

        async def send() -> bytes:
            async with self.connections.use_pool(address, "ada") as pool:
                sent = request(method, f"http://localhost:{PORT}{path}", content=body, headers={"Host": "localhost"})
                if body:
                    sent.headers.append((b"content-length", str(len(body)).encode()))
                async with asyncio.timeout(20):
                    response = await pool.handle_async_request(sent)
                    content: bytes = await response.aread()
                    await response.aclose()
                return content

        return await send()

    async def run_inside(self, expression: str) -> str:
        """Return the value of an expression in the service."""
        return (await self.ask("POST", "/run", expression.encode())).decode()

    def inspect(self, name: str) -> Any:
        return self.daemons.client("rig1").inspect_container(name)


@asynccontextmanager
async def supervised(docker_daemon: OwnDaemon, folder: Path, *tables: dict[str, Any]) -> AsyncIterator[Services]:
    """Run a supervisor; its containers stay afterwards."""
    services = Services(build_settings(docker_daemon, *tables), folder)
    running = asyncio.ensure_future(services.supervisor.run())
    try:
        yield services
    finally:
        await loop.stop([running])
        await services.connections.close()
        services.daemons.close()


@pytest.fixture(autouse=True)
def clean(docker_daemon: OwnDaemon) -> Iterator[None]:
    """Remove what a test has left."""
    yield
    with closing(docker_daemon.client()) as client:
        for container in client.containers.list(all=True, ignore_removed=True):
            container.remove(force=True)


def list_names(docker_daemon: OwnDaemon) -> list[str]:
    with closing(docker_daemon.client()) as client:
        return sorted(container.name for container in client.containers.list(all=True, ignore_removed=True))


async def test_a_service_is_confined_and_its_data_stays(docker_daemon: OwnDaemon, data: Path, tmp_path: Path) -> None:
    """It has no rights, no network and no file system but its data, which survives removal and a new start."""
    async with supervised(docker_daemon, tmp_path, service(data)) as services:
        await services.wait()
        await until(lambda: answers(services), "it listens")
        assert await services.ask("POST", "/greeting", b"hello") == b"stored"
        assert await services.run_inside("(os.getuid(), os.getgid(), os.getgroups())") == "(65533, 65533, [65533])"
        status = await services.run_inside("open('/proc/self/status').read()")
        assert "CapEff:\\t0000000000000000" in status
        assert "CapBnd:\\t0000000000000000" in status
        assert "NoNewPrivs:\\t1" in status
        assert await services.run_inside("os.listdir('/sys/class/net')") == "['lo']"
        for path in ("/x", "/etc/x", "/usr/x"):
            assert "Read-only file system" in await services.run_inside(f"open('{path}', 'w')")
        assert "OSError" in await services.run_inside("__import__('socket').create_connection(('192.0.2.1', 80), 2)")
        assert "docker.sock" not in await services.run_inside("open('/proc/self/mounts').read()")
        environment = await services.run_inside("sorted(os.environ)")
        assert "TOKEN" not in environment
        inspected = services.inspect(names.service_container_name(INSTANCE, "notes"))
        assert inspected["HostConfig"]["Memory"] == 128 * 1024**2
        assert inspected["NetworkSettings"]["Ports"] == {}
    # As `gpuhub down` does when no supervisor runs any more, which would start the service again.
    daemons = DockerClients(build_settings(docker_daemon).nodes, instance=INSTANCE, run_dir=tmp_path)
    with closing(daemons):
        await container_lifecycle.remove_instance_objects(daemons, "rig1", INSTANCE, "container")
    assert list_names(docker_daemon) == []
    assert (data / "greeting").read_bytes() == b"hello"
    assert find_owner(data) == (65533, 0o700)
    async with supervised(docker_daemon, tmp_path, service(data)) as services:
        await services.wait()
        await until(lambda: answers(services), "it listens again")
        assert await services.run_inside("open('/data/greeting').read()") == "'hello'"


def find_owner(folder: Path) -> tuple[int, int]:
    """Return the user and the mode of a folder."""
    found = folder.stat()
    return found.st_uid, found.st_mode & 0o777


async def answers(services: Services) -> bool:
    try:
        return await services.run_inside("1 + 1") == "2"
    except Exception:  # noqa: BLE001 - whatever it is, it does not answer yet
        return False


async def test_a_service_that_ends_is_started_again(docker_daemon: OwnDaemon, tmp_path: Path) -> None:
    """The state names the exit code and the last line; so it is where its network or both containers vanish."""
    async with supervised(docker_daemon, tmp_path, service()) as services:
        await services.wait()
        await until(lambda: answers(services), "it listens")
        with pytest.raises(httpcore.RemoteProtocolError):
            await services.ask("POST", "/end", b"now")
        await services.wait(ServiceState.FAILED)
        assert services.supervisor.status("notes").message == "it ended with exit code 3: last words"
        await until(lambda: answers(services), "it was started again")
        assert services.supervisor.status("notes").restarts == 1
        first = services.inspect(names.service_container_name(INSTANCE, "notes"))
        with closing(docker_daemon.client()) as client:
            client.containers.get(names.service_relay_name(INSTANCE, "notes")).kill()
            await until(lambda: answers(services), "it has a network again")
            second = services.inspect(names.service_container_name(INSTANCE, "notes"))
            assert (first["Id"], first["State"]["StartedAt"]) < (second["Id"], second["State"]["StartedAt"])
            for container in client.containers.list(ignore_removed=True):
                container.kill()
            await until(lambda: answers(services), "it runs again after the node was off")
            for container in client.containers.list(all=True, ignore_removed=True):
                container.remove(force=True)
            await until(lambda: answers(services), "it has new containers")
        before = services.supervisor.status("notes").relay_id
        await services.supervisor.restart("notes")
        await until(lambda: answers(services), "it was replaced")
        assert services.supervisor.status("notes").relay_id != before
        assert b"serving" in await services.supervisor.read_log("notes", 50)


async def test_changed_settings_replace_and_remove_containers(docker_daemon: OwnDaemon, tmp_path: Path) -> None:
    """The same settings adopt what runs; others replace it; a service that is gone is removed."""
    async with supervised(docker_daemon, tmp_path, service()) as services:
        await services.wait()
        first = services.inspect(names.service_container_name(INSTANCE, "notes"))["Id"]
    async with supervised(docker_daemon, tmp_path, service()) as services:
        await services.wait()
        assert services.inspect(names.service_container_name(INSTANCE, "notes"))["Id"] == first
    async with supervised(docker_daemon, tmp_path, service(environment=["MOOD=good"])) as services:
        await services.wait()
        await until(lambda: answers(services), "it listens")
        assert await services.run_inside("os.environ['MOOD']") == "'good'"
        assert services.inspect(names.service_container_name(INSTANCE, "notes"))["Id"] != first
    async with supervised(docker_daemon, tmp_path):
        await until(lambda: list_names(docker_daemon) == [], "the former service is gone")


@pytest.fixture
def foreign_data(data: Path) -> Path:
    """A folder of root's that has a file."""
    data.mkdir(mode=0o755)
    (data / "file").write_text("of root")
    return data


async def test_what_cannot_start_says_why(docker_daemon: OwnDaemon, foreign_data: Path, tmp_path: Path) -> None:
    """A missing image, data of another user and a missing parent are named, and another service runs beside them."""
    data = foreign_data
    tables = (
        service(),
        service(name="missing", image="registry.invalid/none:1"),
        service(data, name="other"),
        service(data.with_name(f"{data.name}-gone") / "lost", name="lost"),
    )
    async with supervised(docker_daemon, tmp_path, *tables) as services:
        await services.wait()
        for name in ("missing", "other", "lost"):
            await services.wait(ServiceState.FAILED, name)
        status = services.supervisor.status
        assert "the image registry.invalid/none:1 is missing, and cannot be pulled" in status("missing").message
        assert "it belongs to user 0, and the service runs as 65533" in status("other").message
        assert "bind source path does not exist" in status("lost").message
        assert (data / "file").read_text() == "of root"
