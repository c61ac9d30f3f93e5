"""Nodes with one real GPU each, and a broker that grants all of them to every request.

Containers run the host's Python and torch, mounted read-only, in their node's network.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import docker

TOKEN = "no-secret"
IMAGE = "bare:1"
ROOT = Path(__file__).parents[3]
#: Existing folders of the host's system: the containers have none.
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt")
_FOLDERS = ("proc", "sys", "dev", "tmp", "run", "root", "var/tmp", "home/ada", "work", "site")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A Docker daemon with one GPU."""

    name: str
    address: str
    socket: str
    gpu: int
    uuid: str
    model: str
    memory_mib: int
    client: Any

    def start(
        self,
        command: list[str],
        environ: dict[str, str],
        *,
        home: Path,
        site: str,
        gpus: tuple[int, ...] | None = None,
        **how: Any,
    ) -> Any:
        """Start a container with the node's GPU, or with `gpus` by number, for as long as the command runs.

        Further arguments go to Docker.
        """
        cards = [f"/dev/nvidia{gpu}" for gpu in ((self.gpu,) if gpus is None else gpus)]
        devices = [*cards, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
        system = {path: {"bind": path, "mode": "ro"} for path in _SYSTEM if Path(path).is_dir()}
        surroundings = {
            "HOME": "/home/ada",
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
            "PYTHONPATH": "/work/extensions:/site",
            "NCCL_NVLS_ENABLE": "0",
            "GPUHUB_NODE": self.name,
            "GPUHUB_GPU_UUIDS": self.uuid,
            "GPUHUB_NETWORK_SUBNET": "10.78.0.0/24",
            "OMP_NUM_THREADS": "4",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return self.client.containers.run(
            IMAGE,
            command,
            detach=True,
            hostname=self.name,
            network_mode="host",
            working_dir="/home/ada",
            environment=surroundings | environ,
            devices=[f"{path}:{path}" for path in devices if Path(path).exists()],
            volumes={
                **system,
                str(home): {"bind": "/home/ada", "mode": "rw"},
                str(ROOT): {"bind": "/work", "mode": "ro"},
                site: {"bind": "/site", "mode": "ro"},
            },
            **{"shm_size": "8g", **how},
        )

    def bare_image(self) -> None:
        """Build an image that has only mount points."""
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for name in (*_FOLDERS, *(path.strip("/") for path in _SYSTEM)):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
                tar.addfile(entry)
        repository, _, tag = IMAGE.partition(":")
        self.client.api.import_image_from_data(data.getvalue(), repository=repository, tag=tag)


def parse_nodes(lines: list[str]) -> list[Node]:
    """Parse `NAME ADDRESS DOCKER-URL` lines; GPUs are in the driver's order."""
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    cards = [line.split(", ") for line in subprocess.check_output(query, text=True).splitlines()]
    return [
        Node(
            name=name,
            address=address,
            socket=socket,
            gpu=index,
            uuid=cards[index][0],
            model=cards[index][1].removeprefix("NVIDIA "),
            memory_mib=int(cards[index][2]),
            client=docker.DockerClient(base_url=socket, timeout=60),
        )
        for index, (name, address, socket) in enumerate(line.split() for line in lines)
    ]


@dataclass
class _Job:
    body: dict[str, Any]
    state: str = "running"
    version: int = 1
    containers: list[Any] = field(default_factory=list)


class GrantingBroker:
    """Implements the part of the broker's API that a launch uses."""

    def __init__(self, nodes: list[Node], *, home: Path, site: str, address: str) -> None:
        self._nodes, self._home, self._site = nodes, home, site
        #: The memory limit of each worker's GPU, MiB; None for all of it.
        self.cap_mib: int | None = None
        self._jobs: dict[str, _Job] = {}
        self._changed = threading.Condition()
        broker = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Log nothing."""

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                text = json.dumps(broker.handle(self.command, self.path.partition("/api/v1")[2], body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{address}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving and remove the containers."""
        for job in self._jobs.values():
            self._remove(job)
        self._server.shutdown()
        self._server.server_close()

    def handle(self, method: str, path: str, body: bytes) -> Any:
        """Return the response to one request."""
        path, _, query = path.partition("?")
        parts = path.strip("/").split("/")
        if parts[0] == "cluster":
            nodes = [{"name": node.name, "gpus": [self._gpu(node)]} for node in self._nodes]
            return {"nodes": nodes, "waiting": 0, "queue": []}
        if method == "POST" and len(parts) == 1:
            return self._create(json.loads(body))
        if len(parts) == 1:
            return [self._view(name) for name in self._jobs]
        job = self._jobs[parts[1]]
        if method == "DELETE":
            self._remove(job)
        elif "wait_s" in query:
            with self._changed:
                version = int(query.rpartition("version=")[2])
                self._changed.wait_for(lambda: job.version != version, timeout=5)
        return self._view(parts[1]) if method != "POST" else None

    def _create(self, body: dict[str, Any]) -> Any:
        job = _Job(body)
        for index, node in enumerate(self._nodes[: body["nnodes"]]):
            environ = {"GPU_LAUNCH_RUN": body["run_id"], "GPU_LAUNCH_WORKER": str(index)}
            if self.cap_mib is not None:
                environ["GPUHUB_GPU_MEMORY_CAP_MIB"] = str(self.cap_mib)
            command = ["python3", "-m", "gpu_launch.worker.main"]
            job.containers.append(node.start(command, environ, home=self._home, site=self._site))
        name = f"job-{len(self._jobs)}"
        self._jobs[name] = job
        return self._view(name)

    def _remove(self, job: _Job) -> None:
        for container in job.containers:
            container.remove(force=True)
        job.containers.clear()
        job.state = "ended"
        with self._changed:
            job.version += 1
            self._changed.notify_all()

    def _gpu(self, node: Node) -> dict[str, Any]:
        return {"uuid": node.uuid, "node": node.name, "model": node.model, "memory_mib": node.memory_mib}

    def _view(self, name: str) -> dict[str, Any]:
        job = self._jobs[name]
        workers = [
            {
                "index": index,
                "node": node.name,
                "gpus": [self._gpu(node)],
                "state": "running" if job.containers else "exited",
                "exit_code": None,
                "message": None,
            }
            for index, node in enumerate(self._nodes[: job.body["nnodes"]])
        ]
        return {
            "id": name, "run_id": job.body["run_id"], "state": job.state, "version": job.version, "lease": {},
            "workers": workers, "reason": None, "renew_within_s": 30,
        }  # fmt: skip
