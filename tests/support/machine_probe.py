"""Runs the doctor's `probe.sh` on this machine, as `gpuhub node add` does on another one."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from gpuhub.ops.doctor.node_facts import HostFacts, parse_probe, read_probe_script


def probe_this_machine(arguments: Sequence[str]) -> HostFacts:
    """Return the facts that the script prints; it must succeed, and write nothing to its standard error."""
    done = subprocess.run(
        ["sh", "-s", "--", *arguments],
        input=read_probe_script(),
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return parse_probe(done.stdout)
