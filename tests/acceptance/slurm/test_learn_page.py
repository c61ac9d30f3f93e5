"""Slurm by hand, as docs/learn.md shows it: the page's own commands, typed on the head node."""

from __future__ import annotations

import json
import os
import re
import subprocess

from gpuhub.common.paths import DEFAULT_INSTANCE, Paths
from tests.support.hub.browser import Product
from tests.support.product import ROOT


def test_commands_of_the_course_work(product: Product) -> None:
    """They list the nodes with their GPUs, submit a job as ada, show it, and cancel it."""
    page = (ROOT / "docs/learn.md").read_text(encoding="utf-8")
    [commands] = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    [conf] = re.findall(r"SLURM_CONF=(\S+)", page)
    conf, commands = (
        text.replace(str(Paths(DEFAULT_INSTANCE).state), str(product.paths.state)) for text in (conf, commands)
    )
    assert conf == str(product.cluster.slurm.conf)
    environment = {"PATH": os.environ["PATH"], "SLURM_CONF": conf}
    done = subprocess.run(
        ["bash", "-euc", commands], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for node, gpu in (("rig1", "rtx5090"), ("rig2", "rtx5070"), ("rig3", "rtx5060")):
        assert re.search(rf"^{node} \w+ gpu:{gpu}:1", done.stdout, re.MULTILINE), done.stdout
    uid = json.loads((product.paths.state / "uids.json").read_text())["ada"]
    assert re.search(rf"^\d+ wrap {uid} (RUNNING|PENDING) ", done.stdout, re.MULTILINE), done.stdout
    assert f"({uid})" in next(line for line in done.stdout.splitlines() if "UserId=" in line)
