"""Whole launches on this machine: the real client, workers, engines and torchrun, over loopback.

Only the containers are missing: a small broker that speaks the wire starts every worker as a process. The interpreter
named by GPU_LAUNCH_TEST_PYTHON (this one by default) runs them and must have torch and gpu_launch.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import gpu_launch
from gpuhub.broker import schemas

TOKEN = "notebook-token"
NODES = ("rig1", "rig2", "rig3")
MODELS = ("RTX 5090", "RTX 5070", "RTX 5060")
MEMORY_MIB = (32_607, 12_227, 8_151)
PYTHON = os.environ.get("GPU_LAUNCH_TEST_PYTHON", sys.executable)
DEADLINE_S = 120.0
#: In the environment of all processes of a worker's container.
CONTAINER = "GPU_LAUNCH_TEST_CONTAINER"

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


#: Writes a checkpoint when it is told to end, and goes on from it; ends by itself some steps after having gone on.
CHECKPOINTED = """
    import os, signal, time
    from pathlib import Path
    import torch, torch.distributed as dist

    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    dist.init_process_group("gloo")
    checkpoint = Path("step")
    first = step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print("began at", first, "of", dist.get_world_size(), "preempted", os.environ["GPU_LAUNCH_PREEMPTIONS"])
    while not first or step < first + 5:
        time.sleep(0.05)
        step += 1
        stop = torch.tensor([float(len(told))])
        dist.all_reduce(stop)
        if stop.item():
            if dist.get_rank() == 0:
                time.sleep(1)
                checkpoint.write_text(str(step))
                print("saved", step)
            dist.barrier()
            break
    else:
        print("finished at", step)
    dist.destroy_process_group()
"""


def gpu(node: str) -> schemas.Gpu:
    """The node's one GPU."""
    index = NODES.index(node)
    return schemas.Gpu(uuid=f"GPU-{node}", node=node, index=0, model=MODELS[index], memory_mib=MEMORY_MIB[index])


@dataclass
class Gang:
    """One job of the test's broker."""

    request: schemas.JobRequest
    state: schemas.JobState
    version: int = 1
    nodes: tuple[str, ...] = ()
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    renewed: int = 0
    preemptions: int = 0
    checkpoint_until: datetime | None = None
    #: Workers whose end has been told, and those that the broker took back.
    ended: set[int] = field(default_factory=set)
    given_back: set[int] = field(default_factory=set)

    def has_news(self) -> bool:
        """Whether a worker ended since this was asked last."""
        ended = {index for index, process in enumerate(self.processes) if process.poll() is not None}
        before, self.ended = self.ended, ended
        return ended != before


class LocalBroker:
    """Speaks the broker's wire; workers are processes on loopback."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.gangs: dict[str, Gang] = {}
        self.busy = False
        #: Nodes that others hold.
        self.held: set[str] = set()
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
        taken = self.held.union(gang.request.exclude_nodes)
        gang.nodes = tuple(node for node in NODES if node not in taken)[: gang.request.nnodes]
        assert len(gang.nodes) >= (gang.request.min_nnodes or gang.request.nnodes)
        for index, node in enumerate(gang.nodes):
            own = environment(self, node=node, gpus=(gpu(node).uuid,)) | {
                "GPU_LAUNCH_RUN": run,
                "GPU_LAUNCH_WORKER": str(index),
                CONTAINER: f"{run}-{gang.preemptions}-{index}",
            }
            own.pop("JUPYTERHUB_API_TOKEN")
            command = [PYTHON, "-m", "gpu_launch.worker"]
            gang.processes.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, start_new_session=True))
        self.set_state(run, schemas.JobState.RUNNING)

    def wait(self, run: str, version: int) -> schemas.Job:
        """A long poll; a worker's end is a change."""
        deadline = time.monotonic() + 20
        with self.changed:
            while self.gangs[run].version == version and time.monotonic() < deadline:
                gang = self.gangs[run]
                gang.version += gang.has_news()
                self.changed.wait(0.1)
        return self.job(run)

    def end(self, run: str) -> None:
        """Stop the workers as the broker does, with two seconds from SIGTERM to SIGKILL."""
        gang = self.gangs[run]
        self.stop(run, range(len(gang.processes)), within_s=2.0)
        self.set_state(run, schemas.JobState.ENDED)

    def preempt(self, run: str) -> None:
        """SIGTERM, time for checkpoints, and the job waits again; returns when it does."""
        gang = self.gangs[run]
        gang.checkpoint_until = datetime.now(UTC) + timedelta(seconds=60)
        self.set_state(run, schemas.JobState.PREEMPTING)
        self.stop(run, range(len(gang.processes)), within_s=60.0)
        gang.checkpoint_until, gang.nodes, gang.processes = None, (), []
        gang.preemptions += 1
        self.set_state(run, schemas.JobState.WAITING)

    def shed(self, run: str, index: int) -> None:
        """Take one worker back from a job that goes on: it is no worker any more, and has time for a checkpoint."""
        self.gangs[run].given_back.add(index)
        self.set_state(run, schemas.JobState.RUNNING)
        self.stop(run, [index], within_s=60.0)

    def stop(self, run: str, indexes: Iterable[int], *, within_s: float) -> None:
        """What Docker does: SIGTERM to the first process, and SIGKILL to all when the time is over."""
        gang = self.gangs[run]
        for index in indexes:
            gang.processes[index].terminate()
        deadline = time.monotonic() + within_s
        for index in indexes:
            try:
                gang.processes[index].wait(max(0.0, deadline - time.monotonic()))
            finally:
                kill_all(f"{CONTAINER}={run}-{gang.preemptions}-{index}")

    def set_state(self, run: str, state: schemas.JobState) -> None:
        """Tell of a new state."""
        with self.changed:
            self.gangs[run].state = state
            self.gangs[run].version += 1
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
            state=schemas.LeaseState.REQUESTED if is_waiting else schemas.LeaseState.ACTIVE, version=gang.version,
            position=1 if is_waiting else None, waiting_for="RTX 5070 held by bob" if is_waiting else None,
            expected_start=now + timedelta(minutes=24) if is_waiting else None,
            nodes=gang.nodes, gpus=tuple(map(gpu, gang.nodes)), epoch=1, created_at=now, granted_at=None if is_waiting else now,
            expires_at=None, reason=None,
        )  # fmt: skip
        return schemas.Job(
            id=run, run_id=run, owner="ada", state=gang.state, version=gang.version, lease=lease,
            workers=tuple(self.worker(gang, index) for index in range(len(gang.nodes)) if index not in gang.given_back),
            nnodes=gang.request.nnodes,
            nproc_per_node=gang.request.nproc_per_node, reason=None, renew_within_s=4.0,
            min_nnodes=gang.request.min_nnodes or gang.request.nnodes, scavenge=gang.request.scavenge,
            preemptions=gang.preemptions, checkpoint_until=gang.checkpoint_until,
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
                **gpu(node).model_dump(exclude={"memory_cap_mib"}),
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


def kill_all(variable: str) -> None:
    """End every process that has this in its environment."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


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
    wanted = (
        "waiting for 1 GPU on 1 node: position 1, expected to start in about 25 min; waits for RTX 5070 held by bob"
    )
    assert any(wanted in line for line in process.stdout)
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


def test_a_preempted_launch_writes_a_checkpoint_waits_again_and_goes_on_from_it(notebook: Notebook) -> None:
    """SIGTERM on every node, the notebook's own included; the place in the queue; the same command anew."""
    notebook.script("train.py", CHECKPOINTED)
    process = notebook.start("import gpu_launch; gpu_launch.run('train.py', nnodes=2, scavenge=True)")
    assert process.stdout is not None
    seen = lines_until(process, "] began at 0 of 2 preempted 0", times=2)
    (run,) = notebook.broker.gangs
    assert notebook.broker.gangs[run].request.scavenge
    notebook.broker.preempt(run)
    seen += lines_until(process, "waiting for 1 GPU on 1 node: position 1, expected to start")
    notebook.broker.held.add("rig2")
    notebook.broker.grant(run)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, "".join(seen) + out + err
    shown = "".join(seen)
    assert re.search(r"gpu_launch: preempted: others need the GPUs; (59|60) s for a checkpoint\n", shown)
    (saved,) = re.findall(r"\[rank 0 · rig1\] saved (\d+)\n", shown)
    for rank, node in enumerate(("rig1", "rig3")):
        assert f"[rank {rank} · {node}] began at {saved} of 2 preempted 1\n" in out
        assert f"[rank {rank} · {node}] finished at {int(saved) + 5}\n" in out
    assert "preempted once · running on rig1 RTX 5090, rig3 RTX 5060" in out
    assert "mixed cards: 1 × RTX 5090, 1 × RTX 5060; the slowest sets the pace" in out
    assert notebook.broker.gangs[run].state is schemas.JobState.ENDED
    until(lambda: not notebook.left(), "no process left")


@pytest.mark.parametrize("moment", ["while ranks write checkpoints", "while it waits again"])
def test_an_interrupt_ends_a_preempted_launch(notebook: Notebook, moment: str) -> None:
    """Cleanly, with all that it asked for freed."""
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if "write" in moment else ""
    notebook.script("sleep.py", f"import signal, time\n{ignores}\nprint('sleeping')\ntime.sleep(600)")
    process = notebook.start("import gpu_launch; gpu_launch.run('sleep.py', nnodes=2, scavenge=True)")
    lines_until(process, "] sleeping", times=2)
    (run,) = notebook.broker.gangs
    preempting = threading.Thread(target=notebook.broker.preempt, args=(run,))
    preempting.start()
    if "write" in moment:
        lines_until(process, "ranks write their checkpoints and end")
    else:
        preempting.join(DEADLINE_S)
        lines_until(process, "waiting for 1 GPU on 1 node")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert "LaunchInterrupted" in err
    preempting.join(DEADLINE_S)
    until(lambda: not notebook.left(), "no process left")


def test_an_elastic_launch_goes_on_with_what_is_left(notebook: Notebook) -> None:
    """From the checkpoint that all ranks were told to write, on other node ranks, without using up a restart."""
    notebook.script("train.py", CHECKPOINTED)
    process = notebook.start("import gpu_launch; gpu_launch.run('train.py', nnodes='1:5')", gpus=())
    seen = lines_until(process, "] began at 0 of 3 preempted 0", times=3)
    (run,) = notebook.broker.gangs
    request = notebook.broker.gangs[run].request
    assert (request.min_nnodes, request.nnodes) == (1, 3)
    notebook.broker.shed(run, 0)
    seen += lines_until(process, "] began at", times=2)
    notebook.broker.shed(run, 2)
    out, err = process.communicate(timeout=DEADLINE_S)
    shown = "".join(seen) + out
    assert process.returncode == 0, shown + err
    assert "rig1 is given back, others need the GPUs; going on with 2 nodes\n" in shown
    assert "rig3 is given back, others need the GPUs; going on with 1 node\n" in shown
    first, second = re.findall(r"\] saved (\d+)\n", shown)
    assert f"[rank 0 · rig2] began at {first} of 2 preempted 0\n" in shown
    assert f"[rank 1 · rig3] began at {first} of 2 preempted 0\n" in shown
    assert f"[rank 0 · rig2] began at {second} of 1 preempted 0\n" in out
    assert f"[rank 0 · rig2] finished at {int(second) + 5}\n" in out
    until(lambda: not notebook.left(), "no process left")


def test_an_elastic_launch_with_its_own_gpu_waits_for_nobody(notebook: Notebook) -> None:
    """Its own node is enough to begin with: what is not free now is not waited for."""
    notebook.broker.busy = True
    notebook.script("hello.py", ALL_REDUCE)
    code, out, err = notebook.run("import gpu_launch; gpu_launch.run('hello.py', nnodes='1:3')")
    assert code == 0, out + err
    assert "sum 1.0 of 1" in out
    assert "1 of up to 3 nodes: rig1 RTX 5090" in out
    (gang,) = notebook.broker.gangs.values()
    assert gang.state is schemas.JobState.ENDED


def lines_until(process: subprocess.Popen[str], wanted: str, *, times: int = 1) -> list[str]:
    """What a notebook shows, until a line has been there so often."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        times -= wanted in line
        if not times:
            return lines
    raise AssertionError(f"ended without {wanted!r}: {''.join(lines)}{process.stderr.read() if process.stderr else ''}")
