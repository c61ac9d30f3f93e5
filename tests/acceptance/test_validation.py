"""`gpuhub validate` on the practice closet, as its owner runs it."""

from __future__ import annotations

import json
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


def start_validate(*words: str | Path) -> subprocess.Popen[str]:
    """Start the command as root on the head node."""
    command = [ROOT / ".venv" / "bin" / "gpuhub", "validate", *words, "--instance", INSTANCE]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_closet_is_valid(product: Product, tmp_path: Path):
    """Every check holds on three simulated nodes, and the report says so."""
    report_file, page = tmp_path / "report.json", tmp_path / "report.html"
    process = start_validate("--json", report_file, "--html", page)
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


def test_interrupt_leaves_nothing(product: Product):
    """After Ctrl-C the command has ended its jobs, and all GPUs become free."""

    def states() -> set[str]:
        return {gpu["state"] for gpu in ada.gpus()}

    with closing(log_in(product.address, "ada", product.password)) as ada, start_validate() as process:
        wait_for(lambda: "held" in states() or process.poll() is not None, "a job of the validation has a GPU", 120)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 130, output
        wait_for(lambda: states() == {"free"}, lambda: f"all GPUs are free: {states()}", 90)
