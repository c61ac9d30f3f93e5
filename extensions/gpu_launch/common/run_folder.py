"""A run's folder, `~/.gpu_launch/jobs/<run>`: the same on every node, readable by its owner alone."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_launch.common import job_manifest
from gpu_launch.errors import UsageError

#: Files in a run's folder that are written from outside of the run.
SETTINGS, MANIFEST, STACKS_REQUEST = "run.json", "job.json", "stacks.request"
STACKS = "stacks.json"
#: Number of finished runs whose logs are kept.
KEPT_RUNS = 20
#: Missed heartbeats of (100 + 500) ms each after which ipyparallel's engines give up their controller.
HEARTBEAT_MISSES = 20
#: Age from which a heartbeat belongs to a kernel that died without removing it, seconds.
_STALE_HEARTBEAT_S = 14 * 24 * 3600.0
#: A detached job that has not started after this many seconds counts as over.
_UNSTARTED_JOB_S = 90 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The paths of one run."""

    root: Path
    #: Starts of other workers before the current ones. Each start has other connection files, because workers of an
    #: earlier one may have been killed before they could remove theirs.
    earlier_starts: int = 0

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def settings(self) -> Path:
        """Settings for the start of workers; written before workers are requested."""
        return self.root / SETTINGS

    @property
    def connection(self) -> Path:
        """Connection file of the controller for engines, a secret; exists while the run lives."""
        return self.root / f"engine{self._tag}.json"

    @property
    def heartbeat(self) -> Path:
        """Exists while the folder is in use; touched regularly by long runs."""
        return self.root / "lives"

    @property
    def cell(self) -> Path:
        """The body of a cell as a script."""
        return self.root / "cell.py"

    @property
    def manifest(self) -> Path:
        """The manifest of a detached job, see `JobManifest`."""
        return self.root / MANIFEST

    @property
    def output(self) -> Path:
        """All output of a detached job, as `gpu-launch logs` shows it."""
        return self.root / "output.log"

    @property
    def status(self) -> Path:
        """The status of a detached job, see `JobStatus`."""
        return self.root / "state.json"

    @property
    def exchange(self) -> Path:
        """Values for the ranks and their results, see `exchange`; exists if there are any."""
        return self.root / "exchange"

    @property
    def stacks_request(self) -> Path:
        """A request for the ranks' stacks, and `stacks` the answer, see `output.stack_request`."""
        return self.root / STACKS_REQUEST

    @property
    def stacks(self) -> Path:
        return self.root / STACKS

    @property
    def logs(self) -> Path:
        """All output of every rank, in one folder for each node."""
        return self.root / "logs"

    @property
    def profile(self) -> Path:
        """The IPython profile of a launch's own controller and engines."""
        return self.root / f"profile{self._tag}"

    @property
    def _tag(self) -> str:
        return f"-{self.earlier_starts}" if self.earlier_starts else ""

    def failures_file(self, node_rank: int, attempt: int) -> Path:
        """Return the path of the failed ranks of a node, as its torchrun reports them."""
        return self.root / f"failures-{node_rank}-{attempt}.json"

    def progress_file(self, rank: int) -> Path:
        """Return the path of a rank's `gpu_launch.report`: one JSON object, replaced as a whole."""
        return self.root / f"progress-{rank}.json"

    def display_file(self, rank: int) -> Path:
        """Return the path of what a rank displays, see `displays`: JSON lines, until they are sent."""
        return self.root / f"displays-{rank}.jsonl"

    def log_file(self, name: str) -> Path:
        """Return the path of the log of a gpu_launch process."""
        return self.logs / f"{name}.log"


def jobs_folder(home: Path) -> Path:
    """Return the folder of all runs."""
    return home / ".gpu_launch" / "jobs"


def open_run(home: Path, run_id: str) -> RunFolder:
    """Return the paths of an existing run."""
    return RunFolder(root=jobs_folder(home) / run_id)


def new_run_id() -> str:
    """Return a new name for a run; names of later runs sort after it."""
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def build_settings(*, is_detached: bool = False, python: str = "") -> dict[str, Any]:
    """Return the settings for workers of launches, see `RunFolder.settings`.

    Args:
        python: The interpreter of engines and ranks, in the home; empty for that of the workers' image.
    """
    return {
        "is_launch": True,
        "detached": is_detached,
        "heartbeat_misses": HEARTBEAT_MISSES,
        **build_interpreter(python),
    }


def build_interpreter(python: str) -> dict[str, Any]:
    """Return the setting of the workers' interpreter; nothing for that of their image."""
    return {"python": python} if python else {}


def create_run(home: Path, run_id: str | None = None) -> RunFolder:
    """Create the folder of a new run, with a new id unless one is given, and remove old runs."""
    run = open_run(home, new_run_id() if run_id is None else run_id)
    run.root.mkdir(parents=True, mode=0o700)
    # mkdir's mode is subject to the umask, and is not applied to parents.
    for path in (run.root, run.root.parent, run.root.parent.parent):
        path.chmod(0o700)
    run.logs.mkdir()
    prune_runs(run.root.parent)
    return run


def prune_runs(jobs: Path, *, keep: int = KEPT_RUNS) -> None:
    """Remove all finished runs except the latest `keep`; active and waiting runs stay."""
    runs = sorted((RunFolder(root=path) for path in jobs.iterdir() if path.is_dir()), key=lambda run: run.run_id)
    finished = [run for run in runs if not _may_be_needed(run)]
    for run in finished[: max(0, len(finished) - keep)]:
        shutil.rmtree(run.root, ignore_errors=True)


def _may_be_needed(run: RunFolder) -> bool:
    if any(_age_s(path) < _STALE_HEARTBEAT_S for path in (run.heartbeat, *run.root.glob("engine*.json"))):
        return True
    if run.status.exists():
        return _age_s(run.status) < _STALE_HEARTBEAT_S and not _is_over(run)
    return _age_s(run.manifest) < _UNSTARTED_JOB_S


def _is_over(run: RunFolder) -> bool:
    """Return whether a detached job has reported its end. A cancelled job may start again."""
    try:
        return job_manifest.parse_status(run.status.read_text(encoding="utf-8")).state in job_manifest.FINAL_STATES
    except (OSError, UsageError):
        return False


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def write_secret_json(path: Path, data: Any) -> None:
    """Write JSON that only its owner can read; readers never see a part of it."""
    write_private(path, json.dumps(data).encode())


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read; readers never see a part of it."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600, exist_ok=False)
    draft.write_bytes(data)
    draft.replace(path)


def shorten_path(path: Path, home: Path) -> str:
    """Return `path` with `~` for the home."""
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
