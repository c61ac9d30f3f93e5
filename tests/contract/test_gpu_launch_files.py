"""The laptop's own client against the real broker: detached jobs, files, logs, states and terminals, on simulated nodes."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch import order, runs, wire
from gpu_launch.broker import Broker
from gpu_launch.cli.connection import Connection
from gpu_launch.cli.hubs import Hub
from gpu_launch.cli.shells import open_shell
from gpu_launch.cli.transfer import Transfer, open_tar
from gpu_launch.demand import Demand
from gpu_launch.detached import folder
from gpu_launch.errors import BrokerError
from tests.support.brokers import Running, Setting, served_broker

RUN = "run-000001"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A broker with a port."""
    with served_broker(Setting(tmp_path)) as found:
        yield found


def hub_of(running: Running, token: str = "ada") -> Hub:
    return Hub(url="", broker_url=running.url, token=token, user=token)


def transfer_of(running: Running, token: str = "ada") -> Transfer:
    return Transfer(Connection(hub_of(running, token)), on_retry=lambda text: None)


def start(client: Broker, **parts: object) -> wire.Job:
    """A job of ours that runs."""
    asked = {"run_id": RUN, "nnodes": 1, "nproc_per_node": 1, "server": "", "exclude_nodes": (), "demand": Demand()}
    job = client.create_job(**{**asked, **parts})  # type: ignore[arg-type]
    deadline = time.monotonic() + 10
    while job.state != wire.RUNNING and time.monotonic() < deadline:
        job = client.job(job.id, version=job.version, wait_s=2.0)
    assert job.state == wire.RUNNING
    return job


def test_an_order_goes_up_and_its_outcome_comes_back(running: Running) -> None:
    """As `gpu-launch run` does it, to the log's last line and the exit code."""
    transfer, client = transfer_of(running), Broker(running.url, "ada", patience_s=5.0)
    sent = order.Order(name="train.py", words=("train.py",), folder="gpu-launch/train")

    def write(tar: tarfile.TarFile) -> None:
        for name, data in folder.files(sent).items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))

    answer = transfer.put(f".gpu_launch/jobs/{RUN}", write)
    assert answer["files"] == len(folder.files(sent))
    run = runs.folder(running.setting.home("ada"), RUN)
    assert run.order.stat().st_mode & 0o777 == 0o600
    assert transfer.order(RUN) == sent
    job = start(client, detached=True, name="train.py")
    assert (job.detached, job.name, job.exit_code) == (True, "train.py", None)
    assert transfer.state(job.id) is None
    state = order.State(state="running", text="step 1")
    run.state.write_text(order.dump(state))
    assert transfer.state(job.id) == state
    run.output.write_bytes(b"loss 1\nloss 2\n")
    with transfer.logs(job.id, offset=7, follow=False, rank=None) as answer:
        assert b"".join(iter(answer.read, b"")) == b"loss 2\n"
    with transfer.logs(job.id, offset=0, follow=True, rank=None) as answer:
        got = answer.read()
        node = running.setting.nodes[job.workers[0].node]
        node.end_container(node.of_kind("worker")[0]["Id"], code=3)
        assert got + b"".join(iter(answer.read, b"")) == b"loss 1\nloss 2\n"
    (ended,) = client.jobs(ended=True)
    assert (ended.state, ended.exit_code, client.jobs()) == (wire.ENDED, 3, [])
    assert ended.created_at is not None
    assert ended.started_at is not None
    assert ended.ended_at is not None
    assert ended.created_at <= ended.started_at <= ended.ended_at


def test_workers_join_a_crew(running: Running) -> None:
    """Numbered after its own."""
    client = Broker(running.url, "ada", patience_s=5.0)
    start(client)
    joined = start(client, run_id="run-000002", joins=RUN, first_worker=1)
    assert joined.joins == RUN
    assert [(spec.run_id, spec.number) for spec in running.workers.specs] == [(RUN, 0), (RUN, 1)]


def test_large_files_pass_both_ways(running: Running) -> None:
    """Packed on the way up, plain on the way down."""
    transfer = transfer_of(running)
    data = os.urandom(5 * 1024**2)

    def write(tar: tarfile.TarFile) -> None:
        entry = tarfile.TarInfo("large")
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))

    assert transfer.put("work", write) == {"files": 1, "bytes": len(data)}
    with transfer.get("work") as answer, open_tar(answer) as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar if member.isreg()}  # type: ignore[union-attr]
    assert found == {"work/large": data}
    with pytest.raises(BrokerError, match="there is no 'nothing' in the home") as refused:
        transfer.get("nothing")
    assert refused.value.status == 404


def test_a_terminal_of_ones_own(running: Running) -> None:
    """The exit code arrives; somebody else's job does not exist."""
    job = start(Broker(running.url, "ada", patience_s=5.0), detached=True)
    shell = open_shell(hub_of(running), job.id, worker=0, command="exit 5")
    try:
        kind, data = shell.socket.recv_data()
        while kind != 1:
            kind, data = shell.socket.recv_data()
        shell._hear(data)
    finally:
        shell.socket.shutdown()
    assert shell.exit_code == 5
    with pytest.raises(BrokerError, match="there is no job") as refused:
        open_shell(hub_of(running, "ben"), job.id, worker=0, command="")
    assert refused.value.status == 404
