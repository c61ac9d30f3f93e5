"""A launch's folder, `~/.gpu_launch/jobs/<run>`: the same on every node, readable by its owner alone."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_launch import order
from gpu_launch.errors import UsageError

#: Names in a run's folder that others than a run itself write.
SETTINGS, ORDER = "run.json", "job.json"
#: Finished runs whose logs stay.
KEPT_RUNS = 20
#: An engine gives its controller up after so many heartbeats of (100 + 500) ms each, by ipyparallel's rule.
HEARTBEAT_MISSES = 20
#: Signs of life older than this belong to a kernel that died without removing them.
_STALE_S = 14 * 24 * 3600.0
#: A detached job that has not begun after so long is not waited for any more.
_WAITING_S = 90 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Paths of one run."""

    root: Path
    #: How often it had been preempted when its present workers were started: what leads them to each other is another
    #: file each time, as those of an earlier start may have been killed before they could remove theirs.
    preemptions: int = 0

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.root.name

    @property
    def settings(self) -> Path:
        """How workers are to start; written before any is asked for."""
        return self.root / SETTINGS

    @property
    def connection(self) -> Path:
        """How engines reach the controller: a secret. There while the run lives."""
        return self.root / f"engine{self._tag}.json"

    @property
    def lived(self) -> Path:
        """There while somebody uses the folder; touched now and then where that may take long."""
        return self.root / "lives"

    @property
    def cell(self) -> Path:
        """The cell's body as a script."""
        return self.root / "cell.py"

    @property
    def order(self) -> Path:
        """A detached job's order, see `order`."""
        return self.root / ORDER

    @property
    def output(self) -> Path:
        """A detached job's whole output as `gpu-launch logs` shows it."""
        return self.root / "output.log"

    @property
    def state(self) -> Path:
        """Where a detached job is, see `order.State`."""
        return self.root / "state.json"

    @property
    def exchange(self) -> Path:
        """What goes from the notebook into the ranks and back, see `ranks.script`. There when something does."""
        return self.root / "exchange"

    @property
    def logs(self) -> Path:
        """Every rank's whole output, a folder a node."""
        return self.root / "logs"

    @property
    def profile(self) -> Path:
        """The IPython profile of a launch's own controller and engines."""
        return self.root / f"profile{self._tag}"

    @property
    def _tag(self) -> str:
        return f"-{self.preemptions}" if self.preemptions else ""

    def failures(self, node_rank: int, attempt: int) -> Path:
        """Which of a node's ranks failed, as its torchrun saw it."""
        return self.root / f"failures-{node_rank}-{attempt}.json"

    def progress(self, rank: int) -> Path:
        """What a rank tells of its progress with `gpu_launch.report`: one JSON object, replaced as a whole."""
        return self.root / f"progress-{rank}.json"

    def log(self, name: str) -> Path:
        """The log file of one of our own processes."""
        return self.logs / f"{name}.log"


def jobs_folder(home: Path) -> Path:
    """Where all runs are."""
    return home / ".gpu_launch" / "jobs"


def folder(home: Path, run_id: str) -> RunFolder:
    """An existing run's folder."""
    return RunFolder(root=jobs_folder(home) / run_id)


def new_id() -> str:
    """A name for a run; those of later runs sort after it."""
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def launch_settings(*, is_detached: bool = False) -> dict[str, Any]:
    """How workers of launches are to start, for `RunFolder.settings`."""
    return {
        "is_launch": True,
        "detached": is_detached,
        "heartbeat_misses": HEARTBEAT_MISSES,
    }


def create(home: Path) -> RunFolder:
    """A new run, with old ones pruned."""
    run = folder(home, new_id())
    run.root.mkdir(parents=True, mode=0o700)
    # mkdir's mode is subject to the umask, and parents do not get it at all.
    for path in (run.root, run.root.parent, run.root.parent.parent):
        path.chmod(0o700)
    run.logs.mkdir()
    prune(run.root.parent)
    return run


def prune(jobs: Path, *, keep: int = KEPT_RUNS) -> None:
    """Remove all but the latest `keep` runs that are over; one that lives, waits, or may do so, stays."""
    runs = sorted((RunFolder(root=path) for path in jobs.iterdir() if path.is_dir()), key=lambda run: run.run_id)
    over = [run for run in runs if not _may_live(run)]
    for run in over[: max(0, len(over) - keep)]:
        shutil.rmtree(run.root, ignore_errors=True)


def _may_live(run: RunFolder) -> bool:
    if any(_age_s(path) < _STALE_S for path in (run.lived, *run.root.glob("engine*.json"))):
        return True
    if run.state.exists():
        return _age_s(run.state) < _STALE_S and not _is_over(run)
    return _age_s(run.order) < _WAITING_S


def _is_over(run: RunFolder) -> bool:
    """Whether a detached job says that it has ended by itself. One that was told to end may begin again."""
    try:
        return order.parse_state(run.state.read_text()).state in order.FINAL
    except (OSError, UsageError):
        return False


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def write_secret(path: Path, data: Any) -> None:
    """Write JSON that only its owner can read; readers see all of it or nothing."""
    write_private(path, json.dumps(data).encode())


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read; readers see all of it or nothing."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600, exist_ok=False)
    draft.write_bytes(data)
    draft.replace(path)


def shown(path: Path, home: Path) -> str:
    """`path` as a person writes it, with `~` for the home."""
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
