"""A cluster for whole launches on this machine: the real client, workers, engines and ranks, over loopback.

Only the containers are missing: a small broker with the real wire format starts every worker as a process. The
interpreter named by GPU_LAUNCH_TEST_PYTHON (this one by default) runs them and must have torch and gpu_launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gpu_launch
from gpuhub.broker_api import schemas

TOKEN = "notebook-token"
NODES = ("rig1", "rig2", "rig3")
MODELS = ("RTX 5090", "RTX 5070", "RTX 5060")
MEMORY_MIB = (32_607, 12_227, 8_151)
PYTHON = os.environ.get("GPU_LAUNCH_TEST_PYTHON", sys.executable)
DEADLINE_S = 120.0
#: In the environment of all processes of a worker's container.
CONTAINER = "GPU_LAUNCH_TEST_CONTAINER"


def gpu(node: str) -> schemas.LeasedGpuView:
    """Return the node's GPU."""
    index = NODES.index(node)
    return schemas.LeasedGpuView(
        uuid=f"GPU-{node}", node=node, index=0, model=MODELS[index], memory_mib=MEMORY_MIB[index]
    )


@dataclass
class WorkerGroup:
    """A job of the test's broker."""

    request: schemas.JobRequest
    state: schemas.JobState
    version: int = 1
    nodes: tuple[str, ...] = ()
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    renewed: int = 0
    preemptions: int = 0
    checkpoint_until: datetime | None = None
    #: Workers whose end has been reported, and those that the broker released.
    ended: set[int] = field(default_factory=set)
    reason: str | None = None
    released: set[int] = field(default_factory=set)

    def has_news(self) -> bool:
        """Return whether a worker has ended since the last call."""
        ended = {index for index, process in enumerate(self.processes) if process.poll() is not None}
        before, self.ended = self.ended, ended
        return ended != before


class LocalBroker:
    """A broker with the real wire format whose workers are processes on loopback."""

    def __init__(self, home: Path) -> None:
        self.home = home
        #: The subnet of the data network, in containers that start from now on; empty for none.
        self.data_subnet = ""
        self.groups: dict[str, WorkerGroup] = {}
        self.busy = False
        #: Nodes leased to other users.
        self.held: set[str] = set()
        #: The user's leases of notebooks.
        self.leases: list[dict[str, object]] = []
        #: The number of other users' waiting requests, and their owners by node; an older broker names none.
        self.waiting = 0
        self.wanted_by: dict[str, tuple[str, ...]] | None = None
        #: Every request except renewals and long polls, such as `POST /jobs`.
        self.calls: list[str] = []
        self.changed = threading.Condition()
        broker = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Log nothing."""

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                assert self.headers["Authorization"] == f"token {TOKEN}"
                status, value = broker.handle(self.command, self.path.partition("/api/v1")[2], body)
                text = b"" if value is None else value
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/services/broker"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def handle(self, method: str, path: str, body: bytes) -> tuple[int, bytes | None]:
        """Return the status and body of the response to one request."""
        path, _, query = path.partition("?")
        if not path.endswith("/renew") and "version=" not in query:
            self.calls.append(f"{method} {path}")
        match method, path.strip("/").split("/"):
            case "GET", ["cluster"]:
                return 200, self.view().model_dump_json().encode()
            case "POST", ["jobs"]:
                return 201, self.create(schemas.JobRequest.model_validate_json(body)).model_dump_json().encode()
            case "GET", ["jobs"]:
                return 200, json.dumps([self.job(run).model_dump(mode="json") for run in self.groups]).encode()
            case "GET", ["leases"]:
                return 200, json.dumps(self.leases).encode()
            case "GET", ["jobs", run]:
                version = re.search(r"version=(\d+)", query)
                return 200, self.wait(run, int(version[1]) if version else -1).model_dump_json().encode()
            case "POST", ["jobs", run, "renew"]:
                self.groups[run].renewed += 1
                return 204, None
            case "DELETE", ["jobs", run]:
                self.end(run)
                return 200, self.job(run).model_dump_json().encode()
        return 404, b"{}"

    def create(self, request: schemas.JobRequest) -> schemas.JobView:
        """Create a job and grant it unless nodes are busy."""
        run = request.run_id
        self.groups[run] = WorkerGroup(request=request, state=schemas.JobState.WAITING)
        taken = self.held.union(request.exclude_nodes)
        if not self.busy and len(set(NODES) - taken) >= (request.min_nnodes or request.nnodes):
            self.grant(run)
        return self.job(run)

    def grant(self, run: str) -> None:
        """Start the workers."""
        group = self.groups[run]
        taken = self.held.union(group.request.exclude_nodes)
        group.nodes = tuple(node for node in NODES if node not in taken)[: group.request.nnodes]
        assert len(group.nodes) >= (group.request.min_nnodes or group.request.nnodes)
        for index, node in enumerate(group.nodes):
            own = environment(self, node=node, gpus=(gpu(node).uuid,)) | {
                "GPU_LAUNCH_RUN": group.request.joins or run,
                "GPU_LAUNCH_WORKER": str(group.request.first_worker + index),
                CONTAINER: self.container(run, index),
            }
            own.pop("JUPYTERHUB_API_TOKEN")
            command = [PYTHON, "-m", "gpu_launch.worker.main"]
            group.processes.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, start_new_session=True))
        self.set_state(run, schemas.JobState.RUNNING)

    def wait(self, run: str, version: int) -> schemas.JobView:
        """Long-poll a job; a worker's end is a change."""
        deadline = time.monotonic() + 20
        with self.changed:
            while self.groups[run].version == version and time.monotonic() < deadline:
                group = self.groups[run]
                group.version += group.has_news()
                self.changed.wait(0.1)
        return self.job(run)

    def jobs(self, state: schemas.JobState) -> list[str]:
        """Return the runs of jobs in this state."""
        return [run for run, group in self.groups.items() if group.state is state]

    def end(self, run: str) -> None:
        """Stop the workers as the broker does, with two seconds from SIGTERM to SIGKILL."""
        group = self.groups[run]
        self.stop(run, range(len(group.processes)), within_s=2.0)
        self.set_state(run, schemas.JobState.ENDED)

    def preempt(self, run: str) -> None:
        """Preempt a job with time for checkpoints, and return when it waits again."""
        group = self.groups[run]
        group.checkpoint_until = datetime.now(UTC) + timedelta(seconds=60)
        self.set_state(run, schemas.JobState.PREEMPTING)
        self.stop(run, range(len(group.processes)), within_s=60.0)
        group.checkpoint_until, group.nodes, group.processes = None, (), []
        group.preemptions += 1
        self.set_state(run, schemas.JobState.WAITING)

    def shrink(self, run: str, index: int) -> None:
        """Release one worker of a job that continues, with time for a checkpoint."""
        self.groups[run].released.add(index)
        self.set_state(run, schemas.JobState.RUNNING)
        self.stop(run, [index], within_s=60.0)

    def lose(self, run: str, index: int) -> None:
        """Remove a worker's container."""
        kill_all(f"{CONTAINER}={self.container(run, index)}")
        with self.changed:
            self.changed.notify_all()

    def freeze(self, run: str, index: int) -> None:
        """Freeze a worker, as if its node were cut off."""
        signal_all(f"{CONTAINER}={self.container(run, index)}", signal.SIGSTOP)

    def container(self, run: str, index: int) -> str:
        """Return a worker's container name."""
        return f"{run}-{self.groups[run].preemptions}-{index}"

    def stop(self, run: str, indexes: Iterable[int], *, within_s: float) -> None:
        """Send SIGTERM to the first process, and SIGKILL to all after the time, as Docker does."""
        group = self.groups[run]
        for index in indexes:
            group.processes[index].terminate()
        deadline = time.monotonic() + within_s
        for index in indexes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                group.processes[index].wait(max(0.0, deadline - time.monotonic()))
            kill_all(f"{CONTAINER}={self.container(run, index)}")

    def set_state(self, run: str, state: schemas.JobState) -> None:
        """Set and publish a job's state."""
        with self.changed:
            self.groups[run].state = state
            self.groups[run].version += 1
            self.changed.notify_all()

    def close(self) -> None:
        """End all workers and stop serving."""
        for run in self.groups:
            self.end(run)
        self.server.shutdown()
        self.server.server_close()

    def job(self, run: str) -> schemas.JobView:
        """Return the job's wire model."""
        group, now = self.groups[run], datetime.now(UTC)
        has_costs = group.state is schemas.JobState.ENDED and group.nodes
        is_waiting = group.state is schemas.JobState.WAITING
        lease = schemas.LeaseView(
            id=f"lease-{run}", owner="ada", purpose=schemas.Purpose.JOB, subject=run, profile=None,
            state=schemas.LeaseState.REQUESTED if is_waiting else schemas.LeaseState.ACTIVE, version=group.version,
            position=1 if is_waiting else None, waiting_for="RTX 5070 held by bob" if is_waiting else None,
            expected_start=now + timedelta(minutes=24) if is_waiting else None,
            nodes=group.nodes, gpus=tuple(map(gpu, group.nodes)), epoch=1, created_at=now, granted_at=None if is_waiting else now,
            expires_at=None, reason=None,
        )  # fmt: skip
        return schemas.JobView(
            id=run, run_id=run, owner="ada", state=group.state, version=group.version, lease=lease,
            workers=tuple(self.worker(group, index) for index in range(len(group.nodes)) if index not in group.released),
            nnodes=group.request.nnodes,
            nproc_per_node=group.request.nproc_per_node, reason=group.reason, renew_within_s=4.0,
            min_nnodes=group.request.min_nnodes or group.request.nnodes, scavenge=group.request.scavenge,
            preemptions=group.preemptions, checkpoint_until=group.checkpoint_until, joins=group.request.joins, created_at=now,
            costs=self.costs(run, now) if has_costs else None,
        )  # fmt: skip

    def costs(self, run: str, now: datetime) -> schemas.CostView:
        """Return what a job has used."""
        count = len(self.groups[run].nodes)
        return schemas.CostView(
            id=run, owner="ada", purpose=schemas.Purpose.JOB, name="", model="RTX 5070", gpu_count=count, started_at=now,
            ended_at=now, gpu_hours=0.1, busy_percent=31.0, peak_memory_mib=2048, memory_mib=12288, energy_kwh=None,
            is_energy_estimated=False, cost=None, currency="", smaller_gpu=None, text=f"{count} × 31 % busy, 2 of 12 GB",
        )  # fmt: skip

    @staticmethod
    def worker(group: WorkerGroup, index: int) -> schemas.WorkerView:
        """Return a worker's wire model."""
        code = group.processes[index].poll()
        state = schemas.WorkerState.RUNNING if code is None else schemas.WorkerState.EXITED
        node = group.nodes[index]
        return schemas.WorkerView(index=index, node=node, gpus=(gpu(node),), state=state, exit_code=code, message=None)

    def view(self) -> schemas.ClusterView:
        """Return the wire model of three nodes with one GPU each."""
        used = self.held.union(
            *(group.nodes for group in self.groups.values() if group.state is not schemas.JobState.ENDED)
        )
        views = [
            schemas.GpuView(
                **gpu(node).model_dump(exclude={"memory_cap_mib"}),
                state=schemas.GpuState.HELD if node in used else schemas.GpuState.FREE,
                holder=None,
                utilisation_percent=None,
                memory_used_mib=None,
            )
            for node in NODES
        ]
        nodes = tuple(
            schemas.NodeView(
                name=view.node,
                state=schemas.NodeState.UP,
                message=None,
                gpus=(view,),
                wanted_by=None if self.wanted_by is None else self.wanted_by.get(view.node, ()),
            )
            for view in views
        )
        return schemas.ClusterView(nodes=nodes, profiles=(), queue=(), waiting=self.waiting, now=datetime.now(UTC))


def kill_all(variable: str) -> None:
    """End every process that has this variable in its environment."""
    signal_all(variable, signal.SIGKILL)


def signal_all(variable: str, number: int) -> None:
    """Signal every process that has this variable in its environment."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), number)


def environment(broker: LocalBroker, *, node: str, gpus: tuple[str, ...]) -> dict[str, str]:
    """Return a container's environment."""
    temporary = broker.home / "tmp"
    temporary.mkdir(exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(temporary),
        # As containers have it, from their limit of CPUs.
        "OMP_NUM_THREADS": "1",
        "HOME": str(broker.home),
        "IPYTHONDIR": str(broker.home / ".ipython"),
        "GPUHUB_BROKER_URL": broker.url,
        "GPUHUB_NETWORK_SUBNET": "127.0.0.0/8",
        **({"GPUHUB_DATA_SUBNET": broker.data_subnet} if broker.data_subnet else {}),
        "GPUHUB_NODE": node,
        "GPUHUB_GPU_UUIDS": ",".join(gpus),
        "JUPYTERHUB_API_TOKEN": TOKEN,
    }


class Notebook:
    """Runs code as a notebook on rig1 would, in a separate process."""

    def __init__(self, broker: LocalBroker) -> None:
        self.broker, self.home = broker, broker.home
        #: Seconds that idle workers stay after a launch.
        self.keep_s = 0
        #: Whether torchrun itself starts the ranks.
        self.is_cold = False
        #: The kernel's interpreter.
        self.python = PYTHON

    def call(self, script: str, **options: Any) -> str:
        """Return the code of one launch."""
        words = "".join(f", {name}={value!r}" for name, value in options.items())
        return f"import gpu_launch; gpu_launch.run({script!r}, cold={self.is_cold}{words})"

    def environment(self, gpus: tuple[str, ...]) -> dict[str, str]:
        """Return what a kernel of this notebook has in its environment."""
        return environment(self.broker, node="rig1", gpus=gpus) | {"GPUHUB_KEEP_WORKERS_S": str(self.keep_s)}

    def start(
        self, code: str, *, gpus: tuple[str, ...] = ("GPU-rig1",), interactive: bool = False
    ) -> subprocess.Popen[str]:
        """Start the code; with `interactive` the caller writes its input later."""
        return subprocess.Popen(
            [self.python, "-c", textwrap.dedent(code)],
            env=self.environment(gpus),
            cwd=self.home,
            stdin=subprocess.PIPE if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, code: str, *, gpus: tuple[str, ...] = ("GPU-rig1",), limit_s: float = DEADLINE_S
    ) -> tuple[int, str, str]:
        """Run the code to its end and return exit code, stdout and stderr."""
        process = self.start(code, gpus=gpus)
        out, err = process.communicate(timeout=limit_s)
        return process.returncode, out, err

    def script(self, name: str, code: str) -> None:
        """Write a script into the home."""
        (self.home / name).write_text(textwrap.dedent(code))

    def left(self) -> list[str]:
        """Return the processes of this home that still run."""
        return list(find_processes(self.home).values())


def use_image_settings(notebook: Notebook) -> None:
    """Give the notebook the image's settings of ipyparallel."""
    profile = notebook.home / ".ipython" / "profile_default"
    profile.mkdir(parents=True)
    for settings in (Path(gpu_launch.__file__).parent / "image_config").glob("*.py"):
        shutil.copy(settings, profile)


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        threading.Event().wait(0.05)


def lines_until(process: subprocess.Popen[str], wanted: str, *, times: int = 1) -> list[str]:
    """Return the output's lines until the wanted one has come `times` times."""
    assert process.stdout is not None
    lines = []
    deadline = threading.Timer(DEADLINE_S, process.kill)
    deadline.start()
    try:
        for line in process.stdout:
            lines.append(line)
            times -= wanted in line
            if not times:
                return lines
    finally:
        deadline.cancel()
    raise AssertionError(f"ended without {wanted!r}: {''.join(lines)}{process.stderr.read() if process.stderr else ''}")


def find_processes(home: Path) -> dict[int, str]:
    """Return the command lines, by id, of the processes that were started with this HOME."""
    commands = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"HOME={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return commands
