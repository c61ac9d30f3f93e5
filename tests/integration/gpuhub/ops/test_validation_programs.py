"""The programs of `gpuhub validate` on this machine: their measurements on the CPU, over loopback and with gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpu_launch.common.network import find_free_port
from gpuhub.ops.validation import checks
from gpuhub.ops.validation.jobs import JobResult
from gpuhub.ops.validation.report import Outcome
from tests.support.launch.local_cluster import PYTHON

pytestmark = pytest.mark.torch

PROGRAMS = Path(checks.__file__).parent / "programs"


def start(program: str, folder: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Start a program in a run folder of its own, as a rank of a launch."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{program}.py"
    script.write_bytes((PROGRAMS / f"{program}.py").read_bytes())
    return subprocess.Popen(
        [PYTHON, script, *arguments],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output


def run_ranks(program: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a program as two ranks, as if on two nodes, and return its result."""
    port = str(find_free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    ranks = [
        start(program, folder, *arguments, RANK=str(rank), LOCAL_RANK="0", GPUHUB_NODE=f"rig{rank + 1}", **common)
        for rank in range(2)
    ]
    finish(ranks)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_jobs_measure_in_turns_and_then_at_once(tmp_path: Path) -> None:
    """Two jobs wait for each other's turns; both report their throughput alone and together, and their own files."""
    folders = [tmp_path / ".gpu_launch/jobs" / name for name in ("run-1", "run-2")]
    shared = ".gpu_launch/jobs/run-1/turns"
    finish(
        [
            start("single_gpu", folder, "0.2", shared, str(number), "2", HOME=str(tmp_path), GPUHUB_NODE="rig1")
            for number, folder in enumerate(folders)
        ]
    )
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        assert result["alone_tflops"] > 0
        assert result["together_tflops"] > 0
        assert result["deviation"] < 1e-4
        assert {result["uid"], result["home_uid"], result["file_uid"]} == {os.getuid()}
    assert {mark.name for mark in (tmp_path / shared).iterdir()} == {"ready-0", "ready-1", "measured-0", "measured-1"}


def test_a_gpu_that_is_faster_after_a_pause_has_the_same_throughput_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a job waits for its turn its GPU cools down; it has to be warm in both measurements."""
    from gpuhub.ops.validation.programs import single_gpu

    now = warm_since = last = 0.0

    def compute() -> float:
        nonlocal now, warm_since, last
        if now > last:
            warm_since = now
        now += 0.1
        last = now
        return 2e12 if now - warm_since < 0.9 else 1e12

    def pause(*_: object) -> None:
        nonlocal now
        now += 5

    monkeypatch.setattr(single_gpu.time, "perf_counter", lambda: now)
    monkeypatch.setattr(single_gpu, "wait_for_marks", pause)
    found = single_gpu.measure_in_turns(compute, 3.0, folder=tmp_path / "turns", number=0, count=1)
    assert found["alone_tflops"] == pytest.approx(found["together_tflops"])


def test_paths_between_two_ranks(tmp_path: Path) -> None:
    """Both directions are measured, without loss on loopback."""
    result = run_ranks("network", tmp_path / "run", "0.1")
    found, figures = checks.check_network(JobResult(result=result), ["rig1", "rig2"])
    assert [(path["from"], path["to"]) for path in result["paths"]] == [("rig1", "rig2"), ("rig2", "rig1")]
    assert all(path["gbit_per_s"] > 0 and path["lost"] == 0 for path in result["paths"])
    assert all(node["interface"] == "lo" for node in result["nodes"])
    assert len(figures) == 4
    assert next(check.name for check in found if check.outcome is Outcome.PASS) == "all: nodes of the launch"


def test_collectives_of_two_ranks(tmp_path: Path) -> None:
    """The checks pass; a step of both ranks together, and of each alone, was measured."""
    result = run_ranks("ddp", tmp_path / "run")
    found, [gain] = checks.check_collectives(JobResult(result=result), 2)
    assert [check.outcome for check in found] == [Outcome.PASS] * 4 + [Outcome.INFO] * 2
    [one, both] = result["scaling"]
    assert one["nodes"] == both["nodes"][:1]
    assert sorted(both["nodes"]) == ["rig1", "rig2"]
    assert 0 < one["step_s"] <= both["alone_s"]
    assert gain.value == 2 * one["step_s"] / both["step_s"]


def test_gateway_is_that_of_the_most_specific_route() -> None:
    """Lines as Linux writes them in /proc/net/route: a default route, a neighbour network, and one behind a gateway."""
    from gpuhub.ops.validation.programs.network import find_gateway

    table = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth1\t0001010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "eth1\t0002010A\t0901010A\t0003\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    assert find_gateway("10.1.1.5", table) == ""
    assert find_gateway("10.1.2.5", table) == "10.1.1.9"
    assert find_gateway("192.0.2.1", table) == "10.0.0.1"


def test_packets_that_do_not_come_back_are_lost() -> None:
    """Nobody answers on a closed port, and a packet above the interface's MTU cannot be sent."""
    from gpuhub.ops.validation.programs import network

    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent,
        closing(network.open_datagram_socket("127.0.0.1")) as probe,
    ):
        silent.bind(("127.0.0.1", 0))
        probe.connect(silent.getsockname())
        probe.settimeout(0.05)
        assert network.send_echo(probe, 56) is None
        assert network.send_echo(probe, 1 << 17) is None
