"""What this machine's kernel says about encrypted overlays, and the firewall's rules for them in a real nftables."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from gpuhub.docker import esp_script
from gpuhub.firewall.rules import build_policy, format_rules
from tests.support.clusters import build_cluster
from tests.support.docker.ipsec import ask_kernel

pytestmark = [pytest.mark.root]


def test_script_finds_what_iproute2_finds() -> None:
    """Both ask in an empty network of their own; a kernel without ESP refuses both with the same words."""
    refusal = ask_kernel()
    command = ["unshare", "--net", sys.executable, "-c", inspect.getsource(esp_script)]
    line = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    expected = "ok" if refusal is None else f"error: {refusal}"
    assert line.startswith(expected)


def test_nftables_accepts_the_rules_for_encrypted_overlays() -> None:
    cluster = build_cluster(network={"encrypt": True})
    rules = format_rules(build_policy(cluster, "ghtest", head="192.168.1.20", callers=()))
    script = "nft -f - && nft list chain inet gpuhub_ghtest overlay"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script], input=rules, check=True, capture_output=True, text=True, timeout=60
    )
    [accepting] = [line.strip() for line in done.stdout.splitlines() if "return" in line]
    assert "meta ipsec exists return" in accepting
