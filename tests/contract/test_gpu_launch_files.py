"""The laptop's client against the real broker: detached jobs, files, logs, states and terminals, on simulated nodes."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.broker import models
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.cli.connection.credentials import Hub
from gpu_launch.cli.connection.http import Connection, Transfer, open_tar
from gpu_launch.cli.shell import open_shell
from gpu_launch.common import job_manifest, run_folder
from gpu_launch.detached import job_files
from gpu_launch.errors import BrokerError
from tests.support.broker.in_process import Running, Setting, served_broker

RUN = "run-000001"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A broker that listens on a port."""
    with served_broker(Setting(tmp_path)) as served:
        yield served


def hub_of(running: Running, token: str = "ada") -> Hub:
    return Hub(url="", broker_url=running.url, token=token, user=token)


def transfer_of(running: Running, token: str = "ada") -> Transfer:
    return Transfer(Connection(hub_of(running, token)), on_retry=lambda text: None)


def start(client: BrokerClient, **parts: object) -> models.Job:
    """Submit a job and wait until it runs."""
    asked = {"run_id": RUN, "nnodes": 1, "nproc_per_node": 1, "server": "", "exclude_nodes": (), "demand": GpuRequest()}
    job = client.create_job(**{**asked, **parts})  # type: ignore[arg-type]
    deadline = time.monotonic() + 10
    while job.state != models.RUNNING and time.monotonic() < deadline:
        job = client.get_job(job.id, version=job.version, wait_s=2.0)
    assert job.state == models.RUNNING
    return job


def test_job_is_uploaded_and_its_outcome_returns(running: Running) -> None:
    """A job's folder is uploaded, and log and exit code come back, as `gpu-launch run` does it."""
    transfer, client = transfer_of(running), BrokerClient(running.url, "ada", retry_limit_s=5.0)
    sent = job_manifest.JobManifest(name="train.py", words=("train.py",), folder="gpu-launch/train")

    def write(tar: tarfile.TarFile) -> None:
        for name, data in job_files.build_files(sent).items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))

    answer = transfer.put(f".gpu_launch/jobs/{RUN}", write)
    assert answer["files"] == len(job_files.build_files(sent))
    run = run_folder.open_run(running.setting.home("ada"), RUN)
    assert run.manifest.stat().st_mode & 0o777 == 0o600
    assert transfer.read_manifest(RUN) == sent
    job = start(client, detached=True, name="train.py")
    assert (job.detached, job.name, job.exit_code) == (True, "train.py", None)
    assert transfer.read_status(job.id) is None
    state = job_manifest.JobStatus(state="running", text="step 1")
    run.status.write_text(job_manifest.dump_json(state))
    assert transfer.read_status(job.id) == state
    run.output.write_bytes(b"loss 1\nloss 2\n")
    with transfer.open_logs(job.id, offset=7, follow=False, rank=None) as answer:
        assert b"".join(iter(answer.read, b"")) == b"loss 2\n"
    with transfer.open_logs(job.id, offset=0, follow=True, rank=None) as answer:
        got = answer.read()
        node = running.setting.nodes[job.workers[0].node]
        node.end_container(node.of_kind("worker")[0]["Id"], code=3)
        assert got + b"".join(iter(answer.read, b"")) == b"loss 1\nloss 2\n"
    (ended,) = client.list_jobs(ended=True)
    assert (ended.state, ended.exit_code, client.list_jobs()) == (models.ENDED, 3, [])
    assert ended.created_at is not None
    assert ended.started_at is not None
    assert ended.ended_at is not None
    assert ended.created_at <= ended.started_at <= ended.ended_at


def test_workers_join_a_pool(running: Running) -> None:
    """Additional workers have the numbers after the first ones."""
    client = BrokerClient(running.url, "ada", retry_limit_s=5.0)
    start(client)
    joined = start(client, run_id="run-000002", joins=RUN, first_worker=1)
    assert joined.joins == RUN
    assert [(spec.run_id, spec.run_index) for spec in running.workers.specs] == [(RUN, 0), (RUN, 1)]


def test_large_files_are_uploaded_and_downloaded(running: Running) -> None:
    """Uploads are packed and downloads are not."""
    transfer = transfer_of(running)
    data = os.urandom(5 * 1024**2)

    def write(tar: tarfile.TarFile) -> None:
        entry = tarfile.TarInfo("large")
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))

    assert transfer.put("work", write) == {"files": 1, "bytes": len(data)}
    with transfer.get("work") as answer, open_tar(answer) as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar if member.isreg()}  # type: ignore[union-attr]
    assert contents == {"work/large": data}
    with pytest.raises(BrokerError, match="there is no 'nothing' in the home") as refused:
        transfer.get("nothing")
    assert refused.value.status == 404


def test_terminal_returns_the_exit_code(running: Running) -> None:
    """The exit code of a terminal arrives, and other users' jobs do not exist."""
    job = start(BrokerClient(running.url, "ada", retry_limit_s=5.0), detached=True)
    shell = open_shell(hub_of(running), job.id, worker=0, command="exit 5")
    try:
        kind, data = shell.socket.recv_data()
        while kind != 1:
            kind, data = shell.socket.recv_data()
        shell._handle_text(data)
    finally:
        shell.socket.shutdown()
    assert shell.exit_code == 5
    with pytest.raises(BrokerError, match="you have no job") as refused:
        open_shell(hub_of(running, "ben"), job.id, worker=0, command="")
    assert refused.value.status == 404
