"""Whole launches on this machine: the real client, workers, engines and torchrun, over loopback.

Only the containers are missing: a small broker that speaks the wire starts every worker as a process. The interpreter
named by GPU_LAUNCH_TEST_PYTHON (this one by default) runs them and must have torch and gpu_launch.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import gpu_launch
from gpuhub.broker import schemas

TOKEN = "notebook-token"
NODES = ("rig1", "rig2", "rig3")
MODELS = ("RTX 5090", "RTX 5070", "RTX 5060")
PYTHON = os.environ.get("GPU_LAUNCH_TEST_PYTHON", sys.executable)
DEADLINE_S = 90.0

ALL_REDUCE = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    print("sum", value.item(), "of", dist.get_world_size(), *sys.argv[1:])
    print("warned", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
"""


def gpu(node: str) -> schemas.Gpu:
    """The node's one GPU."""
    index = NODES.index(node)
    return schemas.Gpu(uuid=f"GPU-{node}", node=node, index=0, model=MODELS[index], memory_mib=8192)


@dataclass
class Gang:
    """One job of the test's broker."""

    request: schemas.JobRequest
    state: schemas.JobState
    version: int = 1
    nodes: tuple[str, ...] = ()
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    renewed: int = 0


class LocalBroker:
    """Speaks the broker's wire; workers are processes on loopback."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.gangs: dict[str, Gang] = {}
        self.busy = False
        self.changed = threading.Condition()
        broker = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Nothing."""

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
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def handle(self, method: str, path: str, body: bytes) -> tuple[int, bytes | None]:
        """One request."""
        path, _, query = path.partition("?")
        match method, path.strip("/").split("/"):
            case "GET", ["cluster"]:
                return 200, self.view().model_dump_json().encode()
            case "POST", ["jobs"]:
                return 201, self.create(schemas.JobRequest.model_validate_json(body)).model_dump_json().encode()
            case "GET", ["jobs"]:
                return 200, json.dumps([self.job(run).model_dump(mode="json") for run in self.gangs]).encode()
            case "GET", ["jobs", run]:
                version = re.search(r"version=(\d+)", query)
                return 200, self.wait(run, int(version[1]) if version else -1).model_dump_json().encode()
            case "POST", ["jobs", run, "renew"]:
                self.gangs[run].renewed += 1
                return 204, None
            case "DELETE", ["jobs", run]:
                self.end(run)
                return 200, self.job(run).model_dump_json().encode()
        return 404, b"{}"

    def create(self, request: schemas.JobRequest) -> schemas.Job:
        """Grant at once unless busy."""
        run = request.run_id
        self.gangs[run] = Gang(request=request, state=schemas.JobState.WAITING)
        if not self.busy:
            self.grant(run)
        return self.job(run)

    def grant(self, run: str) -> None:
        """Start the workers."""
        gang = self.gangs[run]
        gang.nodes = tuple(node for node in NODES if node not in gang.request.exclude_nodes)[: gang.request.nnodes]
        for index, node in enumerate(gang.nodes):
            own = environment(self, node=node, gpus=(gpu(node).uuid,)) | {
                "GPU_LAUNCH_RUN": run,
                "GPU_LAUNCH_WORKER": str(index),
            }
            own.pop("JUPYTERHUB_API_TOKEN")
            command = [PYTHON, "-m", "gpu_launch.worker"]
            gang.processes.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, start_new_session=True))
        with self.changed:
            gang.state, gang.version = schemas.JobState.RUNNING, gang.version + 1
            self.changed.notify_all()

    def wait(self, run: str, version: int) -> schemas.Job:
        """A long poll; a worker's end is a change."""
        deadline = time.monotonic() + 20
        with self.changed:
            while self.gangs[run].version == version and time.monotonic() < deadline:
                gang = self.gangs[run]
                if gang.state is schemas.JobState.RUNNING and any(
                    process.poll() is not None for process in gang.processes
                ):
                    gang.version += 1
                self.changed.wait(0.1)
        return self.job(run)

    def end(self, run: str) -> None:
        """What `docker rm -f` does to a container."""
        gang = self.gangs[run]
        for process in gang.processes:
            process.terminate()
        for process in gang.processes:
            process.wait()
        with self.changed:
            gang.state, gang.version = schemas.JobState.ENDED, gang.version + 1
            self.changed.notify_all()

    def close(self) -> None:
        """End everything."""
        for run in self.gangs:
            self.end(run)
        self.server.shutdown()
        self.server.server_close()

    def job(self, run: str) -> schemas.Job:
        """The job on the wire."""
        gang, now = self.gangs[run], datetime.now(UTC)
        is_waiting = gang.state is schemas.JobState.WAITING
        lease = schemas.Lease(
            id=f"lease-{run}", owner="ada", purpose=schemas.Purpose.JOB, subject=run, profile=None,
            state=schemas.LeaseState.WAITING if is_waiting else schemas.LeaseState.ACTIVE, version=gang.version,
            position=1 if is_waiting else None, waiting_for="RTX 5070 held by bob" if is_waiting else None,
            nodes=gang.nodes, gpus=tuple(map(gpu, gang.nodes)), epoch=1, created_at=now, granted_at=None if is_waiting else now,
            expires_at=None, reason=None,
        )  # fmt: skip
        return schemas.Job(
            id=run, run_id=run, owner="ada", state=gang.state, version=gang.version, lease=lease,
            workers=tuple(self.worker(gang, index) for index in range(len(gang.nodes))), nnodes=gang.request.nnodes,
            nproc_per_node=gang.request.nproc_per_node, reason=None, renew_within_s=4.0,
        )  # fmt: skip

    @staticmethod
    def worker(gang: Gang, index: int) -> schemas.Worker:
        """A worker on the wire."""
        code = gang.processes[index].poll()
        state = schemas.WorkerState.RUNNING if code is None else schemas.WorkerState.EXITED
        node = gang.nodes[index]
        return schemas.Worker(index=index, node=node, gpus=(gpu(node),), state=state, exit_code=code, message=None)

    @staticmethod
    def view() -> schemas.ClusterView:
        """Three nodes with one GPU each."""
        views = [
            schemas.GpuView(
                **gpu(node).model_dump(),
                state=schemas.GpuState.FREE,
                holder=None,
                utilisation_percent=None,
                memory_used_mib=None,
            )
            for node in NODES
        ]
        nodes = tuple(
            schemas.NodeView(name=view.node, state=schemas.NodeState.UP, message=None, gpus=(view,)) for view in views
        )
        return schemas.ClusterView(nodes=nodes, profiles=(), queue=(), now=datetime.now(UTC))


def environment(broker: LocalBroker, *, node: str, gpus: tuple[str, ...]) -> dict[str, str]:
    """A container's environment."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(broker.home),
        "IPYTHONDIR": str(broker.home / ".ipython"),
        "GPUHUB_BROKER_URL": broker.url,
        "GPUHUB_NETWORK_SUBNET": "127.0.0.0/8",
        "GPUHUB_NODE": node,
        "GPUHUB_GPU_UUIDS": ",".join(gpus),
        "JUPYTERHUB_API_TOKEN": TOKEN,
    }


class Notebook:
    """Runs code as a notebook on rig1 would, in a process of its own."""

    def __init__(self, broker: LocalBroker) -> None:
        self.broker, self.home = broker, broker.home

    def start(self, code: str, *, gpus: tuple[str, ...] = ("GPU-rig1",)) -> subprocess.Popen[str]:
        """Start it."""
        return subprocess.Popen(
            [PYTHON, "-c", textwrap.dedent(code)],
            env=environment(self.broker, node="rig1", gpus=gpus),
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *, gpus: tuple[str, ...] = ("GPU-rig1",)) -> tuple[int, str, str]:
        """Run it to its end: exit code, stdout, stderr."""
        process = self.start(code, gpus=gpus)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    def script(self, name: str, code: str) -> None:
        """Write a script into the home."""
        (self.home / name).write_text(textwrap.dedent(code))

    def left(self) -> list[str]:
        """Processes of this home that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and f"HOME={self.home}".encode() in (entry / "environ").read_bytes().split(
                    b"\0"
                ):
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        threading.Event().wait(0.05)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    """A home with a broker."""
    probe = subprocess.run([PYTHON, "-c", "import torch, gpu_launch"], check=False, capture_output=True, text=True)
    assert probe.returncode == 0, f"{PYTHON} lacks torch or gpu_launch; set GPU_LAUNCH_TEST_PYTHON.\n{probe.stderr}"
    broker = LocalBroker(tmp_path)
    yield Notebook(broker)
    broker.close()


def test_three_nodes_agree_and_everything_is_freed(notebook: Notebook) -> None:
    """The notebook's own GPU and two workers reduce to one value, with ranks and nodes named, and nothing is left."""
    notebook.script("hello.py", ALL_REDUCE)
    code, out, err = notebook.run("import gpu_launch; print(gpu_launch.run('hello.py', ['x y'], nnodes=3))")
    assert code == 0, out + err
    for rank, node in enumerate(NODES):
        assert f"[rank {rank} · {node}] sum 6.0 of 3 x y\n" in out
        assert f"[rank {rank} · {node}] warned\n" in err
    (gang,) = notebook.broker.gangs.values()
    assert (gang.request.nnodes, gang.request.exclude_nodes) == (2, ("rig1",))
    assert gang.state is schemas.JobState.ENDED
    until(lambda: not notebook.left(), "no process left")
    assert not list(notebook.home.glob(".gpu_launch/jobs/*/engine.json"))


def test_cpu_notebook_asks_for_every_node(notebook: Notebook) -> None:
    """Without GPUs of its own a notebook asks for all nodes, and node 0 is a worker."""
    notebook.script("hello.py", ALL_REDUCE)
    code, out, err = notebook.run("import gpu_launch; gpu_launch.run('hello.py', nnodes=2)", gpus=())
    assert code == 0, out + err
    assert "[rank 0 · rig1] sum 3.0 of 2\n" in out
    assert "[rank 1 · rig2] sum 3.0 of 2\n" in out


def test_the_failing_ranks_own_traceback_comes_first(notebook: Notebook) -> None:
    """The rank that raised is blamed, not those that lost it."""
    notebook.script(
        "fail.py",
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("the data is wrong")
        dist.all_reduce(torch.ones(1))
        """,
    )
    code, out, err = notebook.run(
        """
        import gpu_launch
        try:
            gpu_launch.run('fail.py', nnodes=3)
        except gpu_launch.LaunchFailed as error:
            print('FAILED', error)
        """
    )
    assert code == 0, out + err
    text = out.partition("FAILED ")[2]
    assert text.startswith("rank 1 on rig2 failed: exit code 1\n\nTraceback (most recent call last):\n")
    assert "ValueError: the data is wrong" in text.split("\n\n")[1]
    assert "rank 0 (rig1): " in text
    until(lambda: not notebook.left(), "no process left")


def test_an_interrupt_stops_every_rank(notebook: Notebook) -> None:
    """SIGINT ends ranks that ignore nothing, frees the GPUs and is raised on."""
    notebook.script("sleep.py", "import time; print('sleeping'); time.sleep(600)")
    process = notebook.start("import gpu_launch; gpu_launch.run('sleep.py', nnodes=2)")
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        seen += "] sleeping" in line
        if seen == 2:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "LaunchInterrupted" in err
    (gang,) = notebook.broker.gangs.values()
    assert gang.state is schemas.JobState.ENDED
    until(lambda: not notebook.left(), "no process left")


def test_a_killed_kernel_leaves_nothing_in_its_container(notebook: Notebook) -> None:
    """After SIGKILL of the kernel its controller, engine, torchrun and ranks end by themselves, and renewals stop."""
    notebook.script("sleep.py", "import time; print('sleeping'); time.sleep(600)")
    process = notebook.start("import gpu_launch; gpu_launch.run('sleep.py', nnodes=1)")
    assert process.stdout is not None
    assert any("] sleeping" in line for line in process.stdout)
    process.kill()
    process.communicate(timeout=20)
    until(lambda: not notebook.left(), "no process left")
    assert not notebook.broker.gangs


def test_a_dead_worker_fails_the_launch_and_is_named(notebook: Notebook) -> None:
    """A worker's end is reported with its node while the ranks still run."""
    notebook.script("sleep.py", "import time; print('sleeping'); time.sleep(600)")
    process = notebook.start("import gpu_launch; gpu_launch.run('sleep.py', nnodes=2)")
    assert process.stdout is not None
    assert any("rank 1 · rig2] sleeping" in line for line in process.stdout)
    (gang,) = notebook.broker.gangs.values()
    os.killpg(gang.processes[0].pid, signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert "rig2" in err.strip().splitlines()[-1]


def test_a_cluster_of_engines_works_with_nothing_else_set(notebook: Notebook) -> None:
    """With the image's settings `ipp.Cluster(engines="gpuhub", n=3)` gives one engine a node, encrypted."""
    profile = notebook.home / ".ipython" / "profile_default"
    profile.mkdir(parents=True)
    for settings in (Path(gpu_launch.__file__).parent / "image_config").glob("*.py"):
        shutil.copy(settings, profile)
    code, out, err = notebook.run(
        """
        import json
        import ipyparallel as ipp
        with ipp.Cluster(engines="gpuhub", n=3) as client:
            print(sorted(client[:].apply_sync(lambda: __import__("os").environ["GPUHUB_NODE"])))
            print("CURVE", bool(json.load(open(client.cluster.controller.connection_files["engine"]))["curve_serverkey"]))
        """
    )
    assert code == 0, out + err
    assert "['rig1', 'rig2', 'rig3']" in out
    assert "CURVE True" in out
    until(lambda: not notebook.left(), "no process left")


def test_too_many_nodes_are_refused_before_anything_is_asked(notebook: Notebook) -> None:
    """More nodes than the cluster has are refused with the number that would be right."""
    notebook.script("hello.py", ALL_REDUCE)
    code, _, err = notebook.run("import gpu_launch; gpu_launch.run('hello.py', nnodes=4)")
    assert code == 1
    assert "Use --nnodes 3 or less" in err
    assert not notebook.broker.gangs


def test_a_waiting_launch_says_what_it_waits_for(notebook: Notebook) -> None:
    """The queue's position and holder are shown until the grant."""
    notebook.broker.busy = True
    notebook.script("hello.py", ALL_REDUCE)
    process = notebook.start("import gpu_launch; gpu_launch.run('hello.py', nnodes=2)")
    assert process.stdout is not None
    assert any("waiting for 1 GPU on 1 node: position 1 (RTX 5070 held by bob)" in line for line in process.stdout)
    notebook.broker.grant(next(iter(notebook.broker.gangs)))
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out + err
    assert "sum 3.0 of 2" in out


def test_ranks_have_no_token(notebook: Notebook) -> None:
    """The notebook's credentials are in no rank's environment; what the user set is."""
    notebook.script(
        "show.py",
        "import os; print('HAS', [n for n in os.environ if 'TOKEN' in n or 'IPP_' in n], os.environ['MINE'])",
    )
    code, out, err = notebook.run(
        "import gpu_launch, os; os.environ['MINE'] = 'yes'; gpu_launch.run('show.py', nnodes=2)"
    )
    assert code == 0, out + err
    assert out.count("HAS [] yes") == 2


def test_a_failed_launch_is_started_again_as_often_as_asked(notebook: Notebook) -> None:
    """--max-restarts starts all ranks again, on fresh ports, until they succeed."""
    notebook.script(
        "flaky.py",
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1 and os.environ["GPU_LAUNCH_ATTEMPT"] == "0":
            raise SystemExit(3)
        value = torch.ones(1)
        dist.all_reduce(value)
        print("attempt", os.environ["GPU_LAUNCH_ATTEMPT"], "sum", value.item())
        dist.destroy_process_group()
        """,
    )
    code, out, err = notebook.run("import gpu_launch; gpu_launch.run('flaky.py', nnodes=2, max_restarts=1)")
    assert code == 0, out + err
    assert out.count("attempt 1 sum 2.0") == 2


def test_a_cell_runs_as_the_script_beside_its_notebook(notebook: Notebook) -> None:
    """The cell's body is every rank's script, with the notebook's folder to import from and its own arguments."""
    notebook.script("helper.py", "WORD = 'imported'")
    code, out, err = notebook.run(
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "gpu_launch")
        cell = "import helper, sys\\nprint(helper.WORD, sys.argv[1:])"
        shell.run_cell_magic("gpu_launch", "--nnodes 2 -- a 'b c'", cell)
        shell.run_cell("%gpu_launch --nnodes 2 missing.py")
        """
    )
    assert code == 0, out + err
    assert out.count("imported ['a', 'b c']") == 2
    assert "UsageError: There is no script missing.py in ~/." in out
    assert "Traceback" not in out + err
