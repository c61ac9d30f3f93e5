"""A name server for the closet that answers at once: there are no other names, since a closet has no way out.

Without one, Docker's own resolver forwards to the machine's, which a node cannot reach, and stays silent: torch's store
looks up the name of each peer's address, and every look-up would stall for ten seconds.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gpuhub.closet import shell
from gpuhub.closet.places import run_folder
from gpuhub.closet.plan import Plan
from gpuhub.paths import Paths

_STOP_TIMEOUT_S = 5.0


def build_command(plan: Plan, pid_file: Path) -> tuple[str, ...]:
    """dnsmasq on the head's address, in the background; every name and address it does not know does not exist."""
    return (
        "dnsmasq",
        "--conf-file=/dev/null",
        "--no-resolv",
        "--no-hosts",
        "--bind-interfaces",
        f"--listen-address={plan.head}",
        "--except-interface=lo",
        "--local=/#/",
        "--user=root",
        f"--pid-file={pid_file}",
    )


def ensure_dns(plan: Plan, paths: Paths) -> None:
    """Have it run; nothing happens when it does."""
    if running(paths) is None:
        shell.run(build_command(plan, _pid_file(paths)))


def running(paths: Paths) -> int | None:
    """Its process id."""
    try:
        pid = int(_pid_file(paths).read_text())
        is_ours = str(_pid_file(paths)) in Path(f"/proc/{pid}/cmdline").read_text()
    except (OSError, ValueError):
        return None
    return pid if is_ours else None


def stop_dns(paths: Paths) -> None:
    """End it, and return when it is gone."""
    pid = running(paths)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        shell.wait_until(lambda: running(paths) is None, timeout_s=_STOP_TIMEOUT_S)


def _pid_file(paths: Paths) -> Path:
    return run_folder(paths) / "dns.pid"
