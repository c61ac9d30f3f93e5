"""%gpu_status, %gpu_cancel, and --dry-run, with a broker that only notes what it is asked."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gpu_launch import environment
from gpu_launch.broker import client, models, own_jobs
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.holdings import LAUNCH
from gpu_launch.common import exchange, job_manifest, run_folder
from gpu_launch.detached import submit
from gpu_launch.errors import UsageError
from gpu_launch.launch import dry_run
from gpu_launch.launch.workers import worker_group
from gpu_launch.launch.workers.worker_pool import WorkerPoolView
from gpu_launch.magics import status
from gpu_launch.options import command
from gpu_launch.worker import nccl_env
from tests.support.golden import check_golden

GOLDEN = Path(__file__).with_name("golden")

NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
MODELS = {"rig1": "RTX 5090", "rig2": "RTX 5070", "rig3": "RTX 5070"}


def job(run: str, state: str, **more: object) -> dict[str, object]:
    """As the broker tells it."""
    return {"id": f"job-{run}", "run_id": f"run-{run}", "state": state, "version": 1} | more


@pytest.fixture
def broker(monkeypatch, tmp_path):
    """Three nodes of one GPU each, the notebook's own on rig1; what it was asked in `asked`."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            server.asked.append((self.command, self.path.partition("/api/v1")[2], body))
            answer = json.dumps(server.answer(self.command, server.asked[-1][1])).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - as http.server asks

        def log_message(self, *_):
            pass

    def answer(method, path):
        if path == "/cluster":
            return {"nodes": [
                {"name": name, "gpus": [{"uuid": f"GPU-{name}", "node": name, "model": model, "memory_mib": 12000,
                                         "state": server.states.get(name, "free")}]}
                for name, model in MODELS.items()
            ], "waiting": server.waiting}  # fmt: skip
        if path.startswith("/jobs/"):
            return job(path.removeprefix("/jobs/job-"), "stopping")
        return server.jobs if method == "GET" else job("new", "waiting")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.jobs, server.states, server.waiting, server.answer = [], [], {"rig1": "held"}, 0, answer
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    for name, value in {
        "GPUHUB_BROKER_URL": f"http://127.0.0.1:{server.server_port}",
        "JUPYTERHUB_API_TOKEN": "token",
        "GPUHUB_NODE": "rig1",
        "GPUHUB_GPU_UUIDS": "GPU-rig1",
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def build_dry_run(line: str, *, cell: str | None = None, **more: object) -> dry_run.DryRunReport:
    """What a line would do."""
    before = {name: value for name, value in os.environ.items() if name != "MY_SETTING"}
    options = command.parse(line, cell=cell is not None)
    build = submit.build_dry_run if options.detach else dry_run.build_report
    return build(options, cell=cell, before=before, **more)


def test_a_dry_run_shows_the_request_and_a_command_for_each_node(broker, monkeypatch):
    """Nothing is asked for; what the notebook set is there, and why each setting is."""
    monkeypatch.setenv("MY_SETTING", "5")
    text = dry_run.format_report(build_dry_run("--nnodes 3 --time-limit 2h train.py --epochs 2"))
    assert {method for method, _, _ in broker.asked} == {"GET"}
    body = json.loads(text[text.index("{") : text.index("\n}") + 2])
    assert body == {
        "run_id": "RUN", "nnodes": 2, "nproc_per_node": 1, "server": "", "exclude_nodes": ["rig1"], "time_limit_s": 7200,
        "name": "%gpu_launch",
    }  # fmt: skip
    commands = [line for line in text.splitlines() if line.startswith("  torchrun")]
    assert [line.split()[2] for line in commands] == ["--node-rank=0", "--node-rank=1", "--node-rank=2"]
    assert all(line.endswith("train.py --epochs 2") for line in commands)
    assert "--local-addr=127.0.0.1 " in commands[0]
    assert "--local-addr=NODE2 " in commands[2]
    assert "Free now: rig2, rig3. It would start at once." in text
    assert "MY_SETTING=5" in text
    assert "no /dev/infiniband" in text
    assert not Path.home().joinpath(".gpu_launch").exists()


def test_dry_run_shows_the_request_that_is_sent(broker, tmp_path):
    """Whatever the flags."""
    for line in ("--nnodes 3", "--nnodes 2:3 --scavenge", "--nnodes 2 --exclusive --model rtx5070 --priority -3"):
        shown = build_dry_run(f"{line} train.py")
        made = worker_group.BrokerWorkerGroup(
            shown.plan,
            run_folder.create_run(tmp_path),
            env=replace(environment.read(), gpu_uuids=()),
            broker=BrokerClient(os.environ["GPUHUB_BROKER_URL"], "token", retry_limit_s=0.0),
            name=LAUNCH,
        )
        broker.asked.clear()
        made._request_workers(made._broker)
        sent = next(body for method, path, body in broker.asked if (method, path) == ("POST", "/jobs"))
        made._first_job.stop()
        assert sent | {"run_id": "RUN"} == shown.body


@pytest.mark.parametrize(
    ("states", "waiting", "said"),
    [
        ({"rig2": "held"}, 0, "2 nodes needed, free now: rig3; 0 requests of others wait"),
        ({}, 1, "1 request of others waits, so its place in the queue would be about 2."),
    ],
)
def test_dry_run_shows_the_queue(broker, states, waiting, said):
    """As far as the cluster tells."""
    broker.states |= states
    broker.waiting = waiting
    assert said in dry_run.format_report(build_dry_run("--nnodes 3 train.py"))


def test_a_dry_run_of_the_notebooks_own_gpu(broker):
    """The broker would not be asked; a cell's files are named."""
    cell = exchange.CellSource(label="Cell In[1]", source="%%gpu_launch\npass", skipped=1)
    found = build_dry_run("", cell="pass\n", exchange=exchange.build_exchange(returns=["x"], cell=cell))
    text = dry_run.format_report(found)
    assert text.startswith("The broker would not be asked")
    assert "--module gpu_launch.worker.rank_main --exchange " in text
    assert "with returns.json, sources.json in ~/.gpu_launch/jobs/RUN/exchange." in text


def test_dry_run_of_a_detached_job_shows_its_manifest(broker):
    """All nodes are asked for, and the notebook's own takes no part."""
    found = build_dry_run("--detach --nnodes 2 train.py --a")
    assert (found.body["detached"], found.body["nnodes"], found.body["name"]) == (True, 2, "train.py")
    assert job_manifest.parse_manifest(job_manifest.dump_json(found.manifest)).words[-2:] == ("train.py", "--a")
    text = dry_run.format_report(found)
    assert "Written to ~/.gpu_launch/jobs/RUN/job.json:" in text
    assert "--local-addr=NODE0 " in text
    assert {method for method, _, _ in broker.asked} == {"GET"}


def test_dry_run_refuses_invalid_launches(broker):
    """In the same words."""
    with pytest.raises(UsageError, match=r"There is no script trian\.py"):
        build_dry_run("trian.py")
    with pytest.raises(UsageError, match="--nnodes 4 is more than the cluster has"):
        build_dry_run("--nnodes 4 train.py")


def test_warnings_of_the_container_are_shown(broker, monkeypatch):
    """Such as a small /dev/shm."""
    facts = nccl_env.ContainerFacts(interface="eth1", shm_mib=64)
    monkeypatch.setattr(nccl_env, "inspect_container", lambda interface, with_path_mtu: facts)
    assert "Note: /dev/shm has 64 MiB" in dry_run.format_report(build_dry_run("train.py"))


def test_status_shows_jobs_with_queue_position_and_time(broker):
    """And what is not known is left out."""
    lease = {"position": 2, "expected_start": (NOW + timedelta(minutes=3)).isoformat(), "waiting_for": "1 GPU"}
    worker = {
        "index": 0,
        "node": "rig2",
        "gpus": [{"uuid": "u", "node": "rig2", "model": "RTX 5070"}],
        "state": "running",
    }
    jobs = [
        job("a", "waiting", lease=lease, detached=True, name="train.py", nnodes=2),
        job("b", "running", workers=[worker], started_at=(NOW - timedelta(minutes=5)).isoformat()),
        job("c", "waiting", gpus=4),
    ]
    table = status.build_jobs_table(map(models.parse_job, jobs), now=NOW, nothing="None.")
    assert table.rows == (
        (
            "run-a",
            "train.py",
            "2 nodes × 1 GPU",
            "waiting: position 2, expected to start in about 3 min; waits for 1 GPU",
        ),
        ("run-b", "launch", "rig2 RTX 5070", "running for 5 min"),
        ("run-c", "launch", "4 GPUs", "waiting"),
    )


def test_gpus_that_are_held_and_not_used_are_shown():
    """With their holder and for how long; without any there is no such table."""
    data = {"uuid": "u", "node": "rig1", "model": "RTX 5090"}
    since = (NOW - timedelta(minutes=40)).isoformat()
    idle = models.parse_gpu({**data, "holder": {"owner": "ben", "idle_since": since}})
    table = status.build_idle_table([idle, models.parse_gpu(data)], now=NOW)
    assert table.rows == (("RTX 5090", "rig1", "ben", "40 min"),)


def test_tables_are_text_and_html():
    """With names as they are in both."""
    views = [
        WorkerPoolView(run_id="run-<b>", nodes="rig1 RTX 5090", jobs=("j1",), is_busy=False, remaining_s=300.0),
        WorkerPoolView(run_id="run-2", nodes="rig2", jobs=(), is_busy=True, remaining_s=None),
    ]
    tables = [status.build_pool_table(views), status.build_pool_table([])]
    check_golden(status.format_text(tables), GOLDEN / "worker-tables.txt")
    text = status.format_html(tables)
    assert "run-&lt;b&gt;" in text
    assert "<p>None.</p>" in text


def test_status_without_the_broker_shows_the_rest(monkeypatch, tmp_path):
    """The rest is there, and why the jobs are not."""
    monkeypatch.setenv("GPUHUB_BROKER_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "token")
    monkeypatch.setattr(client, "_QUERY_RETRY_LIMIT_S", 0.0)
    tables = status.collect_tables(replace(environment.read(), home=tmp_path))
    assert "cannot be reached" in tables[1].nothing


@pytest.mark.parametrize(
    ("run", "deleted"),
    [("run-a1", ["a1"]), ("job-b1", ["b1"]), ("b1", ["b1"]), ("all", ["a1", "b1"])],
)
def test_jobs_are_cancelled_by_name_or_all(broker, run, deleted, monkeypatch):
    """And the person is told which."""
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    # An administrator is told of everybody's jobs; those are not theirs to end by "all".
    broker.jobs = [job("a1", "running", owner="ada"), job("b1", "waiting"), job("c-b1", "waiting", owner="bob")]
    said = own_jobs.cancel_jobs(environment.read(), run)
    assert [path for method, path, _ in broker.asked if method == "DELETE"] == [f"/jobs/job-{name}" for name in deleted]
    assert all(f"run-{name} ends" in said for name in deleted)


@pytest.mark.parametrize(
    ("run", "said"), [("1", "several jobs"), ("run-x", "no job of yours; there are: run-a1, run-b1")]
)
def test_cancel_of_an_unknown_or_ambiguous_job_is_refused(broker, run, said):
    """With what there is."""
    broker.jobs = [job("a1", "running"), job("b1", "waiting")]
    with pytest.raises(UsageError, match=said):
        own_jobs.cancel_jobs(environment.read(), run)
    assert not [path for method, path, _ in broker.asked if method == "DELETE"]
