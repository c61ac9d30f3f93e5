"""A launch in MLflow: a run with what was launched, what rank 0 reports with `gpu_launch.report`, and how it ended.

It speaks MLflow's REST API (https://mlflow.org/docs/latest/rest-api.html), so that images need no client of it. Runs
that the script itself starts with MLflow become children of this one.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_launch.broker.client import NoRedirect
from gpu_launch.common.job_manifest import UPLOADS
from gpu_launch.errors import GpuLaunchError
from gpu_launch.launch.request import ValidatedRequest

_URI, _TOKEN, _EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_EXPERIMENT_NAME"
#: Tags of every run that a process starts, as JSON.
_CONTEXT = "MLFLOW_RUN_CONTEXT"
_REQUEST_S = 10.0
#: Maximum time that the start waits for the id of MLflow's run, seconds.
_CREATED_S = 3.0
#: Maximum time that the end of a launch waits for what is not sent yet, seconds.
_FINISHED_S = 10.0
#: Interval between two batches of metrics, seconds.
_BATCH_S = 1.0
#: Maximum number of reports in one batch: MLflow takes 1,000 metrics at once.
_MAX_BATCH = 50
_MAX_METRICS = 20  # of one report
#: Reports that wait for an MLflow that is slow; further ones are left out.
_MAX_WAITING = 1000
_MAX_VALUE = 500  # characters
_MAX_ANSWER = 2**20  # bytes
_NOT_IN_NAMES = re.compile(r"[^\w\-./: ]")
STATUSES = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings:
    """Where a launch is logged, and what is known of it before it starts."""

    uri: str
    token: str = field(default="", repr=False)
    experiment: str
    name: str
    user: str
    params: Mapping[str, str]


def find_settings(validated: ValidatedRequest, environ: Mapping[str, str], run_id: str) -> ExperimentSettings | None:
    """Return where a launch is logged; None where no MLflow server is named.

    Args:
        validated: The checked request.
        environ: The variables of this process; those that the user set for the ranks take precedence.
        run_id: The launch's own id.
    """
    request, options = validated.request, validated.request.options
    variables = {**environ, **request.environ}
    uri = variables.get(_URI, "").rstrip("/")
    if not uri.startswith(("http://", "https://")):
        return None
    env, plan = request.env, validated.plan
    name = "cell" if request.cell is not None else options.script.rpartition("/")[2]
    params = {
        "command": " ".join([options.script, *options.arguments]).strip(),
        "nodes": str(plan.nnodes),
        "ranks": str(plan.nnodes * plan.nproc_per_node),
        "models": ", ".join(plan.demand.models),
        "communication": str(options.comm),
        "image": env.image,
        "launch": run_id,
    }
    return ExperimentSettings(
        uri=uri,
        token=variables.get(_TOKEN, ""),
        experiment=variables.get(_EXPERIMENT) or _name_experiment(env.user or "gpuhub", request.cwd, env.home),
        name=name or "launch",
        user=env.user,
        params={key: value[:_MAX_VALUE] for key, value in params.items() if value},
    )


def _name_experiment(user: str, folder: Path, home: Path) -> str:
    """Return the user's name and that of the project's folder: the same for all launches of a project."""
    if folder == home:
        return user
    if folder.parent == home / UPLOADS:
        # Each launch from a laptop has a folder of its own.
        return f"{user}/{folder.name.rpartition('-')[0]}"
    return f"{user}/{folder.name}"


class ExperimentLog:
    """Sends a launch's run to MLflow in a thread: the launch waits for it only for a moment at start and end."""

    def __init__(self, settings: ExperimentSettings | None) -> None:
        """Create the log; with `settings` None nothing is sent."""
        self._settings = settings
        self._reports: queue.Queue[tuple[int, int, Mapping[str, Any]]] = queue.Queue(_MAX_WAITING)
        self._created, self._over = threading.Event(), threading.Event()
        self._status = self._gpus = ""
        self._run_id = ""
        self._notes: list[str] = []
        self._thread = threading.Thread(target=self._work, name="experiment log", daemon=True)
        # A redirect would take the token along.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect)

    def start(self) -> None:
        """Begin the run."""
        if self._settings is not None:
            self._thread.start()

    def build_rank_environ(self) -> dict[str, str]:
        """Return variables for the ranks, with which runs of the script itself belong to this one.

        Waits a moment for MLflow.
        """
        if self._settings is None or not self._created.wait(_CREATED_S) or not self._run_id:
            return {}
        tags = {"mlflow.parentRunId": self._run_id}
        return {_EXPERIMENT: self._settings.experiment, _CONTEXT: json.dumps(tags)}

    def report(self, step: Any, metrics: Any) -> None:
        """Log metrics of a rank's report; values that are no numbers are left out."""
        if self._settings is not None and isinstance(step, int) and isinstance(metrics, Mapping):
            with contextlib.suppress(queue.Full):
                self._reports.put_nowait((time.time_ns() // 10**6, step, metrics))

    def pop_notes(self) -> list[str]:
        """Return the notes for the user that have come since the last call."""
        notes = self._notes[:]
        del self._notes[: len(notes)]
        return notes

    def finish(self, outcome: str, gpus: str) -> None:
        """End the run. Waits for what is not sent yet, but not for long.

        Args:
            outcome: A key of `STATUSES`.
            gpus: The nodes and GPUs that the launch had, as a text.
        """
        if self._settings is None:
            return
        self._status, self._gpus = STATUSES[outcome], gpus
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_FINISHED_S)

    def _work(self) -> None:
        assert self._settings is not None  # noqa: S101 - `start` has checked it
        try:
            self._create(self._settings)
            self._created.set()
            while not self._over.wait(_BATCH_S):
                self._send_reports()
            while self._send_reports():
                pass
            if self._gpus:
                params = [{"key": "gpus", "value": self._gpus[:_MAX_VALUE]}]
                self._call("runs/log-batch", run_id=self._run_id, params=params)
            self._call("runs/update", run_id=self._run_id, status=self._status, end_time=time.time_ns() // 10**6)
        except GpuLaunchError as error:
            self._give_up(str(error))
        except (KeyError, TypeError):
            self._give_up("its answers are not MLflow's")
        finally:
            self._created.set()

    def _give_up(self, reason: str) -> None:
        what = "The rest of this launch" if self._run_id else "This launch"
        self._notes.append(f"MLflow: {reason.rstrip('.')}. {what} is not logged.")

    def _create(self, settings: ExperimentSettings) -> None:
        begun = time.time_ns() // 10**6
        created = self._call(
            "runs/create",
            experiment_id=self._find_experiment(settings.experiment),
            run_name=settings.name,
            user_id=settings.user,
            start_time=begun,
            tags=[
                {"key": "mlflow.user", "value": settings.user},
                {"key": "mlflow.source.name", "value": settings.params.get("command", "")},
                {"key": "mlflow.source.type", "value": "LOCAL"},
            ],
        )
        self._run_id = str(created["run"]["info"]["run_id"])
        params = [{"key": key, "value": value} for key, value in settings.params.items()]
        self._call("runs/log-batch", run_id=self._run_id, params=params)

    def _find_experiment(self, name: str) -> str:
        try:
            query = urllib.parse.urlencode({"experiment_name": name})
            return str(self._call(f"experiments/get-by-name?{query}")["experiment"]["experiment_id"])
        except _RefusedError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
        try:
            return str(self._call("experiments/create", name=name)["experiment_id"])
        except _RefusedError as error:
            # Another launch has just created it.
            if error.code != "RESOURCE_ALREADY_EXISTS":
                raise
            return self._find_experiment(name)

    def _send_reports(self) -> bool:
        """Send what waits, as one batch; return whether there was anything."""
        metrics, count = [], 0
        with contextlib.suppress(queue.Empty):
            while count < _MAX_BATCH:
                at, step, values = self._reports.get_nowait()
                count += 1
                for name, value in list(values.items())[:_MAX_METRICS]:
                    if isinstance(value, (int, float)) and math.isfinite(value):
                        key = _NOT_IN_NAMES.sub("_", str(name))[:_MAX_VALUE]
                        metrics.append({"key": key, "value": float(value), "timestamp": at, "step": step})
        if metrics:
            self._call("runs/log-batch", run_id=self._run_id, metrics=metrics)
        return count > 0

    def _call(self, path: str, **body: Any) -> dict[str, Any]:
        """Call a method of the API: without a body by GET."""
        assert self._settings is not None  # noqa: S101 - `start` has checked it
        headers = {"Content-Type": "application/json"}
        if self._settings.token:
            headers["Authorization"] = f"Bearer {self._settings.token}"
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"{self._settings.uri}/api/2.0/mlflow/{path}", data=data, headers=headers)  # noqa: S310 - http or https, as `find_settings` has checked
        try:
            with self._opener.open(request, timeout=_REQUEST_S) as answer:
                found: dict[str, Any] = json.loads(answer.read(_MAX_ANSWER))
                return found
        except urllib.error.HTTPError as error:
            raise _parse_refusal(error) from None
        except (OSError, ValueError) as error:
            raise GpuLaunchError(f"{self._settings.uri} does not answer ({getattr(error, 'reason', error)})") from None


class _RefusedError(GpuLaunchError):
    """MLflow's refusal; `code` is its error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _parse_refusal(error: urllib.error.HTTPError) -> GpuLaunchError:
    with error:
        body = error.read(_MAX_ANSWER)
    try:
        problem = json.loads(body)
        return _RefusedError(str(problem["error_code"]), str(problem.get("message", ""))[:_MAX_VALUE])
    except (ValueError, KeyError, TypeError):
        return GpuLaunchError(f"{error.url} answered {error.code}")
