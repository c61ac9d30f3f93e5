"""`gpuhub validate` and `gpuhub bench` on the practice closet, as its owner runs them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.hub.browser import INSTANCE, Product
from tests.support.hub.users import log_in
from tests.support.product import ROOT, wait_for

#: It was not tried with Slurm, whose queue starts jobs in its own time.
pytestmark = pytest.mark.backend("builtin")


def start(command: str, *words: str | Path) -> subprocess.Popen[str]:
    """Start a command of gpuhub as root on the head node."""
    whole = [ROOT / ".venv" / "bin" / "gpuhub", command, *words, "--instance", INSTANCE]
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_closet_is_valid(product: Product, tmp_path: Path):
    """Every check holds on three simulated nodes, and the report says so."""
    report_file, page = tmp_path / "report.json", tmp_path / "report.html"
    process = start("validate", "--json", report_file, "--html", page)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    report = json.loads(report_file.read_text())
    checks = {check["name"]: check for part in report["parts"] for check in part["checks"]}
    assert {check["outcome"] for check in checks.values()} == {"pass", "info"}
    assert (report["user"], report["is_simulated"]) == ("ada", True)
    assert [node["name"] for node in report["nodes"]] == ["rig1", "rig2", "rig3"]
    for node in report["nodes"]:
        [gpu] = node["gpus"]
        assert checks[f"{node['name']}: visible GPUs"]["seen"] == gpu["uuid"]
        assert checks[f"{node['name']} GPU 0: visible GPUs"]["seen"] == gpu["uuid"]
    assert checks["all: jobs at once over one"]["outcome"] == "info"
    assert checks["ddp: all-reduce"]["seen"] == "sums 6 on all ranks"
    names = {figure["name"] for part in report["parts"] for figure in part["figures"]}
    assert {"closet.jobs_at_once_over_one", "rig1.throughput", "network.rig3-rig1.bandwidth"} <= names
    assert "simulated" in output
    assert "rig2" in page.read_text()


def test_figures_of_the_closet_are_measured_for_all_users(product: Product):
    """Of those that are named, and shown with them."""
    process = start("bench", "--node", "rig1", "--node", "rig2")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert re.search(r"^rig1 .*FLOP/s .*MB/s$", output, re.MULTILINE), output
    assert re.search(r"^rig[12] +rig[12] .*µs .*bit/s", output, re.MULTILINE), output
    with closing(log_in(product.address, "ada", product.password)) as ada:
        status, nodes = ada.ask(ada.broker, "GET", "/nodes")
        assert status == 200, nodes
        figures = {node["name"]: node["bench"] for node in nodes}
        assert figures["rig1"]["flops"] > 0
        assert figures["rig2"]["link_bytes_s"][0] > 0
        assert figures["rig3"] is None


def test_interrupt_leaves_nothing(product: Product):
    """After Ctrl-C the command has ended its jobs, and all GPUs become free."""

    def states() -> set[str]:
        return {gpu["state"] for gpu in ada.gpus()}

    with closing(log_in(product.address, "ada", product.password)) as ada, start("validate") as process:
        wait_for(lambda: "held" in states() or process.poll() is not None, "a job of the validation has a GPU", 120)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 130, output
        wait_for(lambda: states() == {"free"}, lambda: f"all GPUs are free: {states()}", 90)
