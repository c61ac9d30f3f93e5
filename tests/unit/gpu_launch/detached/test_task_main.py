"""The commands of a task file on one node: their variables, exit codes and signals."""

from __future__ import annotations

import json
import signal

import pytest

from gpu_launch.detached import task_main


def test_task_has_skypilot_variables() -> None:
    """All that SkyPilot documents for `setup` and `run`, the head node's address first."""
    found = task_main.build_variables(
        rank=1, ips=["10.0.0.2", "10.0.0.3"], gpus_per_node=4, task_id="sky-1_x_1", cluster="lab", user="ada"
    )
    assert json.loads(found.pop("SKYPILOT_CLUSTER_INFO"))["cluster_name"] == "lab"
    assert found == {
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.2\n10.0.0.3",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "4",
        "SKYPILOT_SETUP_NODE_RANK": "1",
        "SKYPILOT_SETUP_NODE_IPS": "10.0.0.2\n10.0.0.3",
        "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "4",
        "SKYPILOT_TASK_ID": "sky-1_x_1",
        "SKYPILOT_USER": "ada",
    }
    assert task_main.build_task_id("run-20261121-120000-abc123", "train") == "sky-20261121-120000-abc123_train_1"


def test_task_has_no_variables_of_the_torch_launcher():
    """It may start torchrun itself, which must not take itself for a rank of another."""
    left = task_main.without_rank(
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "x",
            "TORCHELASTIC_RUN_ID": "r",
            "NCCL_DEBUG": "INFO",
            "HOME": "h",
        }
    )
    assert left == {"NCCL_DEBUG": "INFO", "HOME": "h"}


@pytest.mark.process
def test_exit_codes_are_those_of_a_shell():
    """Whatever ended it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        bash = task_main.Bash()
        assert bash.run('exit "$CODE"', {"CODE": "5"}) == 5
        assert bash.run("kill -9 $$", {}) == 137
        assert bash.run("kill -TERM $PPID; exec sleep 60", {}) == 143
        assert bash.run("touch never", {}) == 143, "nothing more is started"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
