"""A launch's folder, `~/.gpu_launch/jobs/<run>`: the same on every node, readable by its owner alone."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Finished runs whose logs stay.
KEPT_RUNS = 20
#: A connection file older than this belongs to a kernel that died without removing it.
_STALE_S = 14 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.root.name

    @property
    def settings(self) -> Path:
        """How workers are to start; written before any is asked for."""
        return self.root / "run.json"

    @property
    def connection(self) -> Path:
        """How engines reach the controller: a secret. There while the run lives."""
        return self.root / "engine.json"

    @property
    def cell(self) -> Path:
        """The cell's body as a script."""
        return self.root / "cell.py"

    @property
    def logs(self) -> Path:
        """Every rank's whole output, a folder a node."""
        return self.root / "logs"

    @property
    def profile(self) -> Path:
        """The IPython profile of a launch's own controller and engines."""
        return self.root / "profile"

    def failures(self, node_rank: int, attempt: int) -> Path:
        """Which of a node's ranks failed, as its torchrun saw it."""
        return self.root / f"failures-{node_rank}-{attempt}.json"

    def log(self, name: str) -> Path:
        """The log file of one of our own processes."""
        return self.logs / f"{name}.log"


def jobs_folder(home: Path) -> Path:
    """Where all runs are."""
    return home / ".gpu_launch" / "jobs"


def folder(home: Path, run_id: str) -> RunFolder:
    """An existing run's folder."""
    return RunFolder(root=jobs_folder(home) / run_id)


def create(home: Path) -> RunFolder:
    """A new run, with old ones pruned."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    run = folder(home, f"run-{stamp}-{secrets.token_hex(3)}")
    run.root.mkdir(parents=True, mode=0o700)
    # mkdir's mode is subject to the umask, and parents do not get it at all.
    for path in (run.root, run.root.parent, run.root.parent.parent):
        path.chmod(0o700)
    run.logs.mkdir()
    prune(run.root.parent)
    return run


def prune(jobs: Path, *, keep: int = KEPT_RUNS) -> None:
    """Remove all but the latest `keep` runs; one that lives, or may live, stays."""
    for old in sorted((path for path in jobs.iterdir() if path.is_dir()), reverse=True)[keep:]:
        connection = old / "engine.json"
        try:
            is_live = time.time() - connection.stat().st_mtime < _STALE_S
        except FileNotFoundError:
            is_live = False
        if not is_live:
            shutil.rmtree(old, ignore_errors=True)


def write_secret(path: Path, data: Any) -> None:
    """Write JSON that only its owner can read; readers see all of it or nothing."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600, exist_ok=False)
    draft.write_text(json.dumps(data))
    draft.replace(path)


def shown(path: Path, home: Path) -> str:
    """`path` as a person writes it, with `~` for the home."""
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
