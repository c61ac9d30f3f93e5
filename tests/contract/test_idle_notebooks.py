"""Reports of a notebook's server against the real broker, over HTTP, and what another user's client sees."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpu_launch.broker.client import BrokerClient
from gpu_launch.errors import BrokerError
from gpu_launch.launch.workers.worker_group import BrokerWorkerGroup
from gpuhub.broker_api.schemas import IdleView, SuspensionView
from gpuhub.common import names
from gpuhub.config.settings import IdleSettings
from tests.support.broker.in_process import Running, Setting, served_broker
from tests.support.docker.simulated_nodes import build_cluster, wait_until


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A broker that has notebooks stopped after an hour without activity, and suspended for others after ten minutes."""
    cluster = build_cluster().model_copy(update={"idle": IdleSettings(stop_after="1h", suspend_after="10m")})
    with served_broker(Setting(tmp_path, cluster=cluster, spawner_token="spawner")) as served:
        yield served


@pytest.fixture
def lease(running: Running) -> dict[str, Any]:
    """The lease of ada's notebook, whose container runs."""
    lease: dict[str, Any] = running.send(
        "POST", "/api/v1/leases", "ada", json={"profile": "rtx5090", "key": "k"}
    ).json()
    labels = {
        names.LABEL_KIND: names.KIND_NOTEBOOK,
        names.LABEL_LEASE: lease["id"],
        names.LABEL_EPOCH: str(lease["epoch"]),
        names.LABEL_OWNER: "ada",
    }
    container = running.setting.nodes[lease["nodes"][0]].run_container(labels)
    answer = running.send("POST", f"/api/v1/leases/{lease['id']}/activate", "ada", json={"container_id": container})
    assert answer.status_code == 200, answer.text
    return lease


def test_reports_and_keeping(running: Running, lease: dict[str, Any]) -> None:
    """The broker's answers are what the notebook's server and JupyterLab read; a refusal has its text."""
    client = BrokerClient(running.url, "ada", retry_limit_s=5.0)
    answer = client.report_activity(lease["id"], is_busy=True, inactive_s=0.0)
    assert answer == {"idle": None, "report_in_s": 10.0, "gpu_problems": [], "suspension": None}
    with pytest.raises(BrokerError, match="the notebook is not idle: it need not be kept"):
        client.keep_notebook(lease["id"])
    answer = client.report_activity(lease["id"], is_busy=False, inactive_s=55 * 60)
    assert answer["idle"].keys() == IdleView.model_fields.keys()
    assert answer["idle"]["is_warned"] is True
    kept = client.keep_notebook(lease["id"])
    assert kept is not None
    assert kept["is_warned"] is False
    left_s = (datetime.fromisoformat(kept["kept_until"]) - datetime.now(UTC)).total_seconds()
    assert 3500 < left_s <= 3600


def test_suspension_reaches_the_notebook_and_instances(running: Running, lease: dict[str, Any]) -> None:
    """The state that a report is answered with is the one that `gpu-launch instance list` shows."""
    client = BrokerClient(running.url, "ada", retry_limit_s=5.0)

    def read() -> tuple[str, bool]:
        [shown] = [one for one in client.list_leases() if one.id == lease["id"]]
        return shown.suspension, shown.is_granted

    client.report_activity(lease["id"], is_busy=False, inactive_s=1.0, last_cell_s=60.0)
    client.suspend_notebook(lease["id"])
    wait_until(lambda: read() == ("suspended", False), "the GPU is lent")
    answer = client.report_activity(lease["id"], is_busy=False, inactive_s=2.0, last_cell_s=61.0)
    assert answer["suspension"].keys() == SuspensionView.model_fields.keys()
    client.resume_notebook(lease["id"])
    wait_until(lambda: read() == ("", True), "the GPU is back")


def test_gpu_problems_reach_the_notebook_and_launches(running: Running, lease: dict[str, Any]) -> None:
    """The notebook's server gets them with its report, and a launch that failed asks for those of its nodes."""
    running.setting.nodes["rig1"].xids["GPU-rig1-0"] = [(119, 1, 5.0)]
    ada = BrokerClient(running.url, "ada", retry_limit_s=5.0)
    group = BrokerWorkerGroup(Mock(workers=0), Mock(), env=Mock(), broker=ada)
    problems = wait_until(lambda: group.list_gpu_problems(["rig1", "rig2"]), "the error is read")
    assert problems == (
        "GPU 0 (RTX 5090) of rig1: Xid 119, its GSP firmware does not answer: reset the GPU or restart the node",
    )
    assert ada.report_activity(lease["id"], is_busy=True, inactive_s=0.0)["gpu_problems"] == list(problems)
    assert group.list_gpu_problems(["rig2"]) == ()
    ben = BrokerWorkerGroup(Mock(workers=0), Mock(), env=Mock(), broker=BrokerClient(running.url, "ben"))
    assert ben.list_gpu_problems(["rig1"]) == ()
    unreachable = BrokerClient("http://127.0.0.1:1/services/broker", "ada", retry_limit_s=0.1)
    assert BrokerWorkerGroup(Mock(workers=0), Mock(), env=Mock(), broker=unreachable).list_gpu_problems(["rig1"]) == ()


def test_others_see_idle_gpus_while_they_wait(running: Running, lease: dict[str, Any]) -> None:
    """`%gpu_status` and `gpu-launch status` get since when; nobody does while none waits."""
    ada, ben = (BrokerClient(running.url, name, retry_limit_s=5.0) for name in ("ada", "ben"))
    ada.report_activity(lease["id"], is_busy=False, inactive_s=30 * 60)

    def find_idle() -> list[str]:
        gpus = [gpu for node in ben.get_cluster().nodes for gpu in node.gpus]
        return [gpu.holder for gpu in gpus if gpu.idle_since is not None]

    assert find_idle() == []
    running.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"})
    assert wait_until(find_idle, "ben sees that the GPU is not used") == ["ada"]
