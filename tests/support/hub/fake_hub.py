"""A fake hub and broker for the command line: real HTTP and WebSockets, and jobs that tests control."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.websockets import WebSocketDisconnect

TOKEN, USER = "the-token-of-ada", "ada"
BASE = "/services/broker/api/v1"
CARDS = {"rig1": ["RTX 5090", "RTX 5090"], "rig2": ["RTX 5070"], "rig3": ["RTX 5070"]}


@dataclass
class FakeHub:
    """The state of the fake; tests change it from their own thread, and long polls then check again."""

    home: Path
    #: `METHOD path` of every request, without the base.
    requests: list[str] = field(default_factory=list)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Output shares, as the broker sends them.
    shares: list[dict[str, Any]] = field(default_factory=list)
    #: Bodies of `POST /jobs`.
    asked: list[dict[str, Any]] = field(default_factory=list)
    #: Why the broker refuses jobs at their check, empty for none; and at their request, by name.
    check_refusal: str = ""
    #: Its code in the problem document.
    refusal_code: str = "invalid-request"
    job_refusals: dict[str, str] = field(default_factory=dict)
    has_containers: bool = True
    #: False for a broker of an earlier version.
    checks_jobs: bool = True
    #: Responses that replace the broker's; None for none.
    outage: int | None = None
    has_broker: bool = True
    #: When the token expires, as the hub writes it.
    token_ends: str | None = "2027-02-20T10:11:12.000000Z"
    #: The number of bytes after which log streams are cut.
    breaks_after: int | None = None
    limit: int = 1 << 30
    #: Commands and sizes of the requested shells.
    shells: list[dict[str, str]] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    leases: list[dict[str, Any]] = field(default_factory=list)
    #: The user's servers by name, in the form of `add_server`.
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    #: The lab's recipes, files by name; None for a broker that does not know recipes.
    recipes: dict[str, str] | None = field(default_factory=dict)
    #: The reason why the hub refuses a start, and why a start has failed; empty for none.
    refusal: str = ""
    failure: str = ""
    url: str = ""

    def job(self, run: str = "") -> dict[str, Any]:
        """Return a run's job, by default the last one."""
        return next(job for job in reversed(self.jobs.values()) if not run or job["run_id"] == run)

    def change(self, run: str = "", **changes: Any) -> None:
        """Change a job and raise its version."""
        job = self.job(run)
        job.update(changes, version=job["version"] + 1)

    def run(self, run: str = "") -> None:
        """Grant a job and run its workers."""
        workers = [
            {"index": 0, "node": "rig1", "gpus": [_gpu("rig1", 0, "RTX 5090")], "state": "running", "exit_code": None}
        ]
        self.change(run, state="running", workers=workers, started_at=_now(), lease={"id": "l"})

    def write(self, text: str | bytes, run: str = "") -> None:
        """Append to the job's output."""
        folder = self.home / ".gpu_launch" / "jobs" / self.job(run)["run_id"]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "output.log").open("ab") as log:
            log.write(text.encode() if isinstance(text, str) else text)

    def end(self, code: int | None = 0, run: str = "", reason: str | None = None) -> None:
        """End a job."""
        costs = {"text": "GPU 31 % busy, 9.0 of 32 GB, 0.42 kWh; an RTX 5060 would have been enough"}
        self.change(run, state="ended", exit_code=code, reason=reason, ended_at=_now(), costs=costs)

    def add_server(self, name: str, **changes: Any) -> dict[str, Any]:
        """Add a running server, as JupyterHub 6.1's `GET /users/ada` lists it."""
        path = f"/user/{USER}/{name}/" if name else f"/user/{USER}/"
        self.servers[name] = server = {
            "name": name,
            "ready": True,
            "stopped": False,
            "pending": None,
            "url": path,
            "user_options": {"profile": "cpu"},
            "started": _now(),
        }
        server.update(changes)
        return server

    def add_lease(self, server: str, profile: str, **changes: Any) -> dict[str, Any]:
        """Add a notebook's lease that waits, as the broker lists it."""
        lease = {
            "id": f"lease-{server or 'default'}",
            "owner": USER,
            "purpose": "notebook",
            "subject": server,
            "profile": profile,
            "state": "requested",
            "version": 1,
            "position": 2,
            "waiting_for": "1 × RTX 5090: held by ben",
            "nodes": [],
            "gpus": [],
            "expires_at": None,
        } | changes
        self.leases = [*(other for other in self.leases if other["subject"] != server), lease]
        return lease

    def grant(self, server: str, **changes: Any) -> None:
        """Grant a notebook's lease; its server starts on rig1."""
        lease = next(lease for lease in self.leases if lease["subject"] == server)
        lease.update({"state": "active", "position": None, "waiting_for": None, "nodes": ["rig1"]} | changes)
        lease.update(gpus=[_gpu("rig1", 0, "RTX 5090")], version=lease["version"] + 1)

    def add(
        self, run: str, *, name: str = "", owner: str = USER, detached: bool = True, array: str | None = None
    ) -> dict[str, Any]:
        """Add a job that was submitted before."""
        self.jobs[f"job-{run}"] = job = {
            "id": f"job-{run}",
            "run_id": run,
            "owner": owner,
            "state": "waiting",
            "version": 1,
            "workers": [],
            "nnodes": 1,
            "nproc_per_node": 1,
            "lease": {"position": 2, "waiting_for": "1 × any GPU: held by ben"},
            "detached": detached,
            "name": name,
            "array": array,
            "created_at": _now(),
            "exit_code": None,
            "reason": None,
        }
        return job


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _gpu(node: str, index: int, model: str, holder: str = "") -> dict[str, Any]:
    return {
        "uuid": f"GPU-{node}-{index}",
        "node": node,
        "model": model,
        "memory_mib": 32607 if "90" in model else 12227,
        "state": "held" if holder else "free",
        "holder": {"owner": holder} if holder else None,
    }


def build_app(hub: FakeHub) -> FastAPI:
    """Build the broker's routes that a laptop uses."""
    app = FastAPI()

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        path = request.url.path
        hub.requests.append(f"{request.method} {path.removeprefix(BASE)}")
        if path == "/hub/api/":
            return JSONResponse({"version": "6.1.1"})
        if path.startswith(BASE) and not hub.has_broker:
            return Response("<h1>404 : Not Found</h1>", 404)
        if path.startswith(BASE) and hub.outage is not None:
            return Response("<h1>Service Unavailable</h1>", hub.outage)
        if request.headers.get("authorization") != f"token {TOKEN}":
            if path.startswith(BASE):
                return _problem(401, "the hub does not know this token")
            return JSONResponse({"status": 403, "message": "Missing or invalid credentials."}, 403)
        return await call_next(request)

    @app.get("/hub/api/user")
    async def user() -> dict[str, Any]:
        return {"kind": "user", "name": USER, "token_id": "a7"}

    _add_servers(app, hub)

    @app.get("/hub/api/users/{name}")
    async def servers(name: str, include_stopped_servers: bool = False) -> dict[str, Any]:
        assert name == USER
        listed = {key: value for key, value in hub.servers.items() if include_stopped_servers or not value["stopped"]}
        return {"name": USER, "servers": listed}

    @app.get("/hub/api/users/{name}/tokens/{token_id}")
    async def token(name: str, token_id: str) -> dict[str, Any]:
        assert (name, token_id) == (USER, "a7")
        return {"kind": "api_token", "id": token_id, "expires_at": hub.token_ends}

    @app.get(f"{BASE}/usage")
    async def usage() -> list[dict[str, Any]]:
        return [{"owner": USER, "gpus": 0}]

    @app.get(f"{BASE}/cluster")
    async def cluster() -> dict[str, Any]:
        nodes = [
            {
                "name": node,
                "state": "up",
                "message": None,
                "gpus": [
                    _gpu(node, index, model, hub.held.get(f"GPU-{node}-{index}", ""))
                    for index, model in enumerate(models)
                ],
            }
            for node, models in CARDS.items()
        ]
        waiting = sum(job["state"] == "waiting" for job in hub.jobs.values())
        capabilities = {"containers": hub.has_containers}
        return {"nodes": nodes, "waiting": waiting, "profiles": hub.profiles, "capabilities": capabilities}

    @app.get(f"{BASE}/recipes")
    async def recipes() -> Any:
        if hub.recipes is None:
            return _problem(404, "Not Found")
        return [{"name": name, "text": text} for name, text in hub.recipes.items()]

    @app.get(f"{BASE}/leases")
    async def leases() -> list[dict[str, Any]]:
        return hub.leases

    _add_jobs(app, hub)
    _add_files(app, hub)
    _add_shell(app, hub)
    return app


def _add_servers(app: FastAPI, hub: FakeHub) -> None:
    """Answer as JupyterHub 6.1 does; a start continues until a test changes the server."""

    async def start(name: str, server: str, request: Request) -> Response:
        assert name == USER
        if hub.refusal:
            return JSONResponse({"status": 400, "message": hub.refusal}, 400)
        added = hub.add_server(server, ready=False, pending="spawn", user_options=await request.json())
        hub.add_lease(server, added["user_options"]["profile"])
        return Response(status_code=202)

    async def stop(name: str, server: str, request: Request) -> Response:
        if server not in hub.servers:
            return JSONResponse({"status": 404, "message": f"{name} has no server named '{server}'"}, 404)
        hub.leases = [lease for lease in hub.leases if lease["subject"] != server]
        if server and not (await request.body() and (await request.json()).get("remove")):
            hub.servers[server] |= {"ready": False, "stopped": True}
        else:
            del hub.servers[server]
        return Response(status_code=204)

    async def progress(name: str, server: str) -> Response:
        event = {"progress": 100, "failed": True, "message": f"Spawn failed: {hub.failure}"}
        return Response(f"\n\ndata: {json.dumps(event)}\n\n", media_type="text/event-stream")

    async def start_default(name: str, request: Request) -> Response:
        return await start(name, "", request)

    async def stop_default(name: str, request: Request) -> Response:
        return await stop(name, "", request)

    base = "/hub/api/users/{name}"
    for method, path, route in (
        ("POST", "/servers/{server}", start),
        ("DELETE", "/servers/{server}", stop),
        ("GET", "/servers/{server}/progress", progress),
        ("POST", "/server", start_default),
        ("DELETE", "/server", stop_default),
    ):
        app.add_api_route(base + path, route, methods=[method], response_model=None)

    @app.get(f"{BASE}/leases/{{lease_id}}")
    async def lease(lease_id: str, wait_s: float = 0, version: int | None = None) -> Any:
        found = next((lease for lease in hub.leases if lease["id"] == lease_id), None)
        if found is None:
            return _problem(404, f"you have no lease {lease_id!r}")
        for _ in range(int(wait_s / 0.02)):
            if version != found["version"]:
                break
            await asyncio.sleep(0.02)
        return found

    @app.post(f"{BASE}/leases/{{lease_id}}/extend")
    async def extend(lease_id: str, request: Request) -> Any:
        seconds = (await request.json())["time_limit_s"]
        found = next(lease for lease in hub.leases if lease["id"] == lease_id)
        found["expires_at"] = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        return found

    @app.post(f"{BASE}/leases/{{lease_id}}/suspend")
    async def suspend(lease_id: str) -> Any:
        found = next(lease for lease in hub.leases if lease["id"] == lease_id)
        if found["state"] != "active":
            return _problem(409, "the notebook cannot be suspended: only a notebook that runs can be suspended")
        found["suspension"] = {"state": "suspended", "text": "", "since": _now(), "moved_mib": 8192}
        return found

    @app.post(f"{BASE}/leases/{{lease_id}}/resume")
    async def resume(lease_id: str) -> Any:
        found = next(lease for lease in hub.leases if lease["id"] == lease_id)
        found["suspension"] = {**found["suspension"], "state": "resuming"}
        return found


def _add_jobs(app: FastAPI, hub: FakeHub) -> None:
    @app.get(f"{BASE}/jobs")
    async def jobs(ended: bool = False) -> list[dict[str, Any]]:
        return [job for job in hub.jobs.values() if ended or job["state"] != "ended"]

    @app.post(f"{BASE}/jobs", status_code=201)
    async def post(request: Request) -> Any:
        body = await request.json()
        if not (hub.home / ".gpu_launch" / "jobs" / body["run_id"] / "job.json").is_file():
            return _problem(422, "there is no order")
        if body.get("name") in hub.job_refusals:
            return _problem(422, hub.job_refusals[body["name"]])
        job = hub.add(body["run_id"], name=body.get("name", ""), detached=body.get("detached", False))
        job.update(nnodes=body["nnodes"], nproc_per_node=body["nproc_per_node"], after=body.get("after"))
        # Last: a test that waits for it finds the job.
        job.update(port=body.get("port"), port_users=body.get("port_users", []))
        hub.asked.append(body)
        return job

    @app.post(f"{BASE}/jobs/check")
    async def check() -> Response:
        if not hub.checks_jobs:
            return _problem(405, "Method Not Allowed")
        return _problem(422, hub.check_refusal, hub.refusal_code) if hub.check_refusal else Response(status_code=204)

    @app.post(f"{BASE}/jobs/arrays", status_code=201)
    async def post_array(request: Request) -> Any:
        body = await request.json()
        ordered, count = body["job"], body["count"]
        if (ordered["nnodes"], ordered["nproc_per_node"], ordered.get("min_nnodes", 1)) != (1, 1, 1):
            return _problem(422, "job: each job of an array is for one GPU")
        runs = [f"{ordered['run_id']}-{number}" for number in range(count)]
        if not all((hub.home / ".gpu_launch" / "jobs" / run / "job.json").is_file() for run in runs):
            return _problem(422, "there is no order")
        jobs = [hub.add(run, name=ordered.get("name", ""), detached=ordered.get("detached", False)) for run in runs]
        for job in jobs:
            job["array"] = ordered["run_id"]
        hub.asked.append(body)
        return jobs

    @app.post(f"{BASE}/jobs/groups", status_code=201)
    async def post_group(request: Request) -> Any:
        body = await request.json()
        jobs = [hub.add(job["run_id"], name=job.get("name", ""), detached=True) for job in body["jobs"]]
        for job, ordered in zip(jobs, body["jobs"], strict=True):
            job.update(array=body["run_id"], after=ordered.get("after"))
        hub.asked += body["jobs"]
        return jobs

    @app.get(BASE + "/jobs/{job_id}")
    async def one(job_id: str, wait_s: float = 0, version: int | None = None) -> Any:
        job = hub.jobs.get(job_id)
        if job is None:
            return _problem(404, f"there is no job {job_id}")
        for _ in range(int(wait_s / 0.02)):
            if version != job["version"] or hub.outage is not None:
                break
            await asyncio.sleep(0.02)
        return job

    _add_shares(app, hub)

    @app.delete(BASE + "/jobs/{job_id}")
    async def delete(job_id: str) -> Any:
        job = hub.jobs[job_id]
        hub.end(None, job["run_id"], reason="stopped")
        return job


def _add_shares(app: FastAPI, hub: FakeHub) -> None:
    @app.get(f"{BASE}/shares")
    async def shares() -> list[dict[str, Any]]:
        return hub.shares

    @app.put(BASE + "/jobs/{job_id}/shares/{viewer}")
    async def share(job_id: str, viewer: str, request: Request) -> Any:
        if viewer == "bne":
            return _problem(404, "the hub has no user 'bne'")
        ends = datetime.now(UTC) + timedelta(seconds=(await request.json())["for_s"])
        job, path = hub.jobs[job_id], f"/hub/gpuhub/shared/{job_id}"
        hub.shares.append(
            {"id": job_id, "job": job_id, "run_id": job["run_id"], "notebook": "", "name": job["name"],
             "owner": job["owner"], "viewer": viewer, "created_at": _now(), "expires_at": ends.isoformat(),
             "path": path}
        )  # fmt: skip
        return hub.shares[-1]

    @app.put(BASE + "/notebooks/shares/{viewer}")
    async def share_notebook(viewer: str, request: Request) -> Any:
        body = await request.json()
        name = body["path"].rpartition("/")[2]
        if not (hub.home / body["path"]).exists():
            return _problem(404, f"there is no {body['path']!r} in the home")
        ends = datetime.now(UTC) + timedelta(seconds=body["for_s"])
        hub.shares.append(
            {"id": f"nb-{name}", "job": "", "run_id": "", "notebook": body["path"], "name": name, "owner": USER,
             "viewer": viewer, "created_at": _now(), "expires_at": ends.isoformat(),
             "path": f"/hub/gpuhub/shared-notebook/nb-{name}"}
        )  # fmt: skip
        return hub.shares[-1]

    @app.delete(BASE + "/jobs/{subject}/shares")
    @app.delete(BASE + "/jobs/{subject}/shares/{viewer}")
    @app.delete(BASE + "/notebooks/{subject}/shares")
    @app.delete(BASE + "/notebooks/{subject}/shares/{viewer}")
    async def end(subject: str, viewer: str | None = None) -> list[dict[str, Any]]:
        ended = [share for share in hub.shares if share["id"] == subject and viewer in (None, share["viewer"])]
        hub.shares = [share for share in hub.shares if share not in ended]
        return ended


def _add_files(app: FastAPI, hub: FakeHub) -> None:
    @app.put(f"{BASE}/files")
    async def put(path: str, request: Request) -> Any:
        return _unpack(hub, path, await request.body())

    @app.get(f"{BASE}/files")
    def get(path: str) -> Response:
        file = hub.home / path
        if not file.exists():
            return _problem(404, f"there is no {path!r} in the home")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            tar.add(file, arcname=file.name)
        return Response(buffer.getvalue(), media_type="application/x-tar")

    @app.get(BASE + "/jobs/{job_id}/state")
    def state(job_id: str) -> Response:
        file = hub.home / ".gpu_launch" / "jobs" / hub.jobs[job_id]["run_id"] / "state.json"
        return (
            Response(file.read_bytes()) if file.is_file() else _problem(404, "the job has not written its status yet")
        )

    @app.get(BASE + "/jobs/{job_id}/logs")
    async def logs(job_id: str, offset: int = 0, follow: bool = False, rank: int | None = None) -> Response:
        job = hub.jobs[job_id]
        folder = hub.home / ".gpu_launch" / "jobs" / job["run_id"]
        path = folder / ("output.log" if rank is None else f"rank-{rank}.log")
        return StreamingResponse(_follow(hub, job, path, offset, follow=follow), media_type="text/plain")


def _unpack(hub: FakeHub, path: str, data: bytes) -> Any:
    folder = hub.home / path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = size = 0
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as tar:
        # Debian 12's Python has no filters, later ones warn where none is set.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        for member in tar:
            size += member.size
            if size > hub.limit:
                return _problem(413, f"more than the {hub.limit} bytes that may be sent at once")
            tar.extract(member, folder)
            files += not member.isdir()
    return {"files": files, "bytes": size}


def _rest(path: Path, offset: int) -> bytes:
    return path.read_bytes()[offset:] if path.is_file() else b""


async def _follow(hub: FakeHub, job: dict[str, Any], path: Path, offset: int, *, follow: bool) -> AsyncIterator[bytes]:
    sent = 0
    while True:
        is_over = job["state"] == "ended" or not follow
        data = _rest(path, offset)
        if hub.breaks_after is not None:
            data = data[: hub.breaks_after - sent]
        offset, sent = offset + len(data), sent + len(data)
        if data:
            yield data
        if hub.breaks_after is not None and sent >= hub.breaks_after:
            return
        if hub.outage is not None or is_over:
            return
        await asyncio.sleep(0.01)


def _add_shell(app: FastAPI, hub: FakeHub) -> None:
    @app.websocket(BASE + "/jobs/{job_id}/shell")
    async def shell(websocket: WebSocket, job_id: str) -> None:
        """Answer each line in capitals, and end with the exit code after `exit`."""
        if websocket.headers.get("authorization") != f"token {TOKEN}":
            await websocket.send_denial_response(_problem(401, "the hub does not know this token"))
            return
        hub.shells.append(dict(websocket.query_params))
        await websocket.accept()
        command = websocket.query_params.get("command", "")
        if command:
            await websocket.send_bytes(f"ran {command}\r\n".encode())
            await websocket.send_text(json.dumps({"exit": 3}))
            await websocket.close()
            return
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                message = await websocket.receive()
                websocket._raise_on_disconnect(message)
                if text := message.get("text"):
                    hub.shells.append(json.loads(text))
                    continue
                typed = message["bytes"].decode()
                if typed.startswith("exit") or typed[0] == "\x04":
                    await websocket.send_text(json.dumps({"exit": int(typed[4:] or 0) if typed[0] != "\x04" else 4}))
                    await websocket.close()
                    return
                await websocket.send_bytes(typed.upper().encode())


def _problem(status: int, detail: str, code: str = "error") -> JSONResponse:
    problem = {"type": f"/hub/gpuhub/troubleshooting#{code}", "detail": detail, "status": status, "code": code}
    return JSONResponse(problem, status)


@contextlib.contextmanager
def served(hub: FakeHub, *, port: int = 0, ssl_files: tuple[Path, Path] | None = None) -> Iterator[FakeHub]:
    """Serve the hub on a port of the loopback, with TLS when certificate and key are given."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        scheme = "http" if ssl_files is None else "https"
        hub.url = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            build_app(hub),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
            lifespan="off",
            ws="websockets-sansio",
            ssl_certfile=ssl_files[0] if ssl_files else None,
            ssl_keyfile=ssl_files[1] if ssl_files else None,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="hub")
        thread.start()
        try:
            while not server.started:
                thread.join(0.01)
            yield hub
        finally:
            server.should_exit = True
            thread.join()
