"""`%gpu_launch --detach` up to the broker: what it is asked for, and that nothing is left when it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.common import exchange, job_manifest, run_folder
from gpu_launch.detached import submit
from gpu_launch.errors import BrokerError, UsageError
from gpu_launch.options import command
from gpuhub.broker_api import schemas
from tests.support.launch.answering_server import AnsweringServer


class Broker(AnsweringServer):
    """Three nodes with a GPU each; takes jobs, refuses them, or takes them and does not say so."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self.deleted: list[str] = []
        self.refusal: tuple[int, bytes] | None = None
        super().__init__()

    def handle(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """One request."""
        match method, path.removeprefix("/api/v1").strip("/").split("/"):
            case "GET", ["cluster"]:
                gpus = [
                    {"uuid": f"GPU-{at}", "node": f"rig{at}", "model": "RTX 5090", "memory_mib": 32_607}
                    for at in (1, 2, 3)
                ]
                return 200, json.dumps({"nodes": [{"name": gpu["node"], "gpus": [gpu]} for gpu in gpus]}).encode()
            case "POST", ["jobs"]:
                self.asked.append(json.loads(body))
                return self.refusal or (201, json.dumps(self.job(0)).encode())
            case "POST", ["jobs", "arrays"]:
                self.asked.append(asked := json.loads(body))
                run = asked["job"]["run_id"]
                tasks = [self.build_job(f"{run}-{number}", array=run) for number in range(asked["count"])]
                return self.refusal or (201, json.dumps(tasks).encode())
            case "GET", ["jobs" | "jobs?ended=true"]:
                return 200, json.dumps(
                    [self.job(at) for at, asked in enumerate(self.asked) if "run_id" in asked]
                ).encode()
            case "DELETE", ["jobs", job_id]:
                self.deleted.append(job_id)
                return 200, json.dumps(self.job(0)).encode()
        return 404, b"{}"

    def job(self, at: int) -> dict[str, object]:
        """One that waits."""
        return self.build_job(str(self.asked[at]["run_id"]), at=at)

    def build_job(self, run: str, *, at: int = 0, array: str | None = None) -> dict[str, object]:
        """The broker's view of a job that waits."""
        lease = {"position": 2, "waiting_for": "3 GPUs"}
        job = {"id": f"job-{at}", "run_id": run, "state": "waiting", "version": 1, "lease": lease}
        return job | {"detached": True, "array": array}


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """And a notebook on rig1 that asks it."""
    found = Broker()
    home = tmp_path / "ada"
    (home / "work").mkdir(parents=True)
    (home / "work" / "train.py").write_text("")
    monkeypatch.chdir(home / "work")
    for name, value in {
        "HOME": str(home), "GPUHUB_BROKER_URL": found.url, "JUPYTERHUB_API_TOKEN": "token", "GPUHUB_NODE": "rig1",
        "GPUHUB_GPU_UUIDS": "GPU-1", "JUPYTERHUB_SERVER_NAME": "big",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield found
    found.close()


def detach(line: str, cell: str | None = None, given: exchange.ExchangeFiles | None = None) -> submit.Submitted:
    """What the magic does."""
    wanted = command.parse(f"--detach {line}", cell=cell is not None)
    return submit.submit_from_notebook(wanted, cell=cell, before={}, exchange=given)


def jobs(home: Path) -> list[Path]:
    """Runs' folders."""
    folder = run_folder.jobs_folder(home)
    return list(folder.iterdir()) if folder.exists() else []


def test_request_is_for_all_nodes(broker, monkeypatch):
    """The notebook's own GPU stays with it, and its node is not left out; the schema is the broker's own."""
    monkeypatch.setenv("LR", "0.1")
    job = detach("--nnodes 2:3 --model rtx5090 --max-restarts 2 train.py --epochs 3")
    (asked,) = broker.asked
    request = schemas.JobRequest.model_validate(asked)
    assert (request.nnodes, request.min_nnodes, request.nproc_per_node, request.server) == (3, 2, 1, "big")
    assert (request.detached, request.batch, request.name, request.models) == (True, True, "train.py", ("RTX 5090",))
    assert request.exclude_nodes == ()
    assert (job.run_id, job.job_id, job.state) == (request.run_id, "job-0", "waiting")
    assert (job.position, job.waiting_for) == (2, "3 GPUs")
    given = job_manifest.parse_manifest((job.folder / "job.json").read_text())
    assert (given.name, given.folder, given.environ["LR"]) == ("train.py", "work", "0.1")
    assert "JUPYTERHUB_API_TOKEN" not in given.environ
    again = command.parse_words(list(given.words))
    assert (again.script, again.arguments, again.max_restarts) == ("train.py", ("--epochs", "3"), 2)
    assert json.loads((job.folder / "run.json").read_text())["detached"] is True
    assert {path.stat().st_mode & 0o777 for path in job.folder.iterdir() if path.is_file()} == {0o600}


def test_cell_and_its_variables_are_submitted(broker):
    """Also the notebook's variables."""
    job = detach("--nnodes 3 -- --lr 1", cell="print(1)", given=exchange.ExchangeFiles(files={"send.pkl": b"x"}))
    given = job_manifest.parse_manifest((job.folder / "job.json").read_text())
    assert (given.name, given.cell) == ("cell", "print(1)")
    assert command.parse_words(list(given.words), cell=True).arguments == ("--lr", "1")
    assert (job.folder / "exchange" / "send.pkl").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("--nnodes 4 train.py", "--nnodes 4 is more than the cluster has: 3 nodes have 1 GPU"),
        ("trian.py", "There is no script trian.py in ~/work. Did you mean train.py"),
        ("--model A100 train.py", "the cluster has RTX 5090"),
    ],
)
def test_impossible_request_is_refused_before_submission(broker, line, right):
    """Nothing is asked for, and no folder is made."""
    with pytest.raises(UsageError, match=right):
        detach(line)
    assert broker.asked == [] and jobs(Path.home()) == []


def test_folder_that_other_nodes_lack_is_refused(broker, tmp_path, monkeypatch):
    """As for a launch on other nodes."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="other nodes do not have"):
        detach("train.py")


def test_refused_job_leaves_nothing_behind(broker):
    """Its folder is removed, and a job that was taken without a word as well."""
    broker.refusal = (409, b'{"detail": "Too many jobs."}')
    with pytest.raises(BrokerError, match="Too many jobs"):
        detach("train.py")
    assert broker.deleted == ["job-0"]
    assert jobs(Path.home()) == []


def test_detached_job_without_a_broker_is_refused(broker, monkeypatch):
    """The reason is named."""
    monkeypatch.delenv("GPUHUB_BROKER_URL")
    with pytest.raises(UsageError, match="--detach needs the broker: GPUHUB_BROKER_URL is not set"):
        detach("train.py")


def test_tasks_of_an_array_have_folders_of_their_own(broker):
    """One request, whose ids are those of the folders; after a job, with tries."""
    broker.asked.append({"run_id": "run-20260101-000000-abc123"})
    sent = detach("--array 0-20:10%2 --after abc123 --retry 1 train.py")
    request = schemas.ArrayRequest.model_validate(broker.asked[-1])
    assert (request.count, request.max_running, request.job.run_id) == (3, 2, sent.run_id)
    assert (request.job.after, request.job.max_retries) == ("run-20260101-000000-abc123", 1)
    assert sent.tasks == tuple(f"{sent.run_id}-{number}" for number in range(3))
    home = Path(os.environ["HOME"])
    assert sorted(folder.name for folder in jobs(home)) == list(sent.tasks)
    manifests = [
        job_manifest.parse_manifest((run_folder.open_run(home, task).manifest).read_text()) for task in sent.tasks
    ]
    assert [manifest.environ["GPU_LAUNCH_ARRAY_INDEX"] for manifest in manifests] == ["0", "10", "20"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--array 0-3 --nnodes 2 train.py", "--array and --nnodes 2 exclude each other"),
        ("--after other train.py", "--after other: you have no such job"),
    ],
)
def test_impossible_arrays_and_chains_are_refused(broker, line, text):
    """Before anything is written or asked for."""
    with pytest.raises(UsageError, match=text):
        detach(line)
    assert (broker.asked, jobs(Path(os.environ["HOME"]))) == ([], [])


@pytest.mark.parametrize("flag", ["--array 0-3", "--after run-1", "--retry 1"])
def test_options_of_jobs_need_detach(flag):
    with pytest.raises(UsageError, match="is for jobs that run without this notebook: add --detach"):
        command.parse(f"{flag} train.py")
