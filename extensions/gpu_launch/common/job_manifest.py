"""Files of a detached job that exist before the job is requested. A laptop imports this module too.

A notebook writes them into `~/.gpu_launch/jobs/RUN/` itself (`detached.submit`). A laptop sends them as a tar to `PUT
/files?path=.gpu_launch/jobs/RUN` before it requests the job, each with mode 0600. They do not depend on the location of
the home: `JobManifest.folder` is relative to it, and the job creates missing folders.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from gpu_launch.errors import UsageError

VERSION = 1
#: A job in one of these states has ended for good. A cancelled job may have been preempted and starts again then.
FINAL_STATES = frozenset({"done", "failed"})
#: The folder below the home for the working directories that are sent.
UPLOADS = "gpu-launch"
#: It starts again at the next request to its port.
ASLEEP = "asleep"


@dataclass(frozen=True, kw_only=True)
class TaskCommands:
    """The commands of a task file, run by bash on every node: `setup` first, once in each container."""

    setup: str = ""
    run: str = ""


@dataclass(frozen=True, kw_only=True)
class JobManifest:
    """The specification of a detached job."""

    #: The name of the script or task, for people.
    name: str
    #: Flags and script as typed after `%gpu_launch`; empty for a task.
    words: tuple[str, ...] = ()
    task: TaskCommands | None = None
    #: Working directory below the home: `gpu-launch/train-3f2a`, or empty for the home itself.
    folder: str = ""
    #: Additional variables of the ranks.
    environ: dict[str, str] = field(default_factory=dict)
    #: Names of those that are secrets: their values are removed when the job has ended. An older driver ignores this.
    secret_names: tuple[str, ...] = ()
    #: The body of a cell; None for a script.
    cell: str | None = None
    version: int = VERSION


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """Status of a detached job; the file is replaced as a whole."""

    #: `starting`, `running`, `done`, `failed` or `cancelled`.
    state: str
    #: Number of the ranks' start, from 0.
    attempt: int = 0
    #: Seconds since 1970; None before that.
    started_at: float | None = None
    ended_at: float | None = None
    #: Exit status of the job: that of the first failing rank, 128 + N for a signal.
    exit_code: int | None = None
    #: Description of the failure, beginning with the first failing rank's traceback.
    error: str = ""
    #: Current step in one line, for a person.
    text: str = ""


def dump_json(value: JobManifest | JobStatus) -> str:
    """Return the value as JSON."""
    return json.dumps(asdict(value), indent=1)


def remove_secrets(manifest: JobManifest) -> JobManifest:
    """Return the manifest without the values of secrets; their names remain."""
    environ = {name: value for name, value in manifest.environ.items() if name not in manifest.secret_names}
    return replace(manifest, environ=environ)


def parse_manifest(text: str) -> JobManifest:
    """Parse a job manifest.

    Raises:
        UsageError: It is not a manifest of this version.
    """
    data = _parse_object(text, "job manifest")
    if data.get("version") != VERSION:
        raise UsageError(
            f"The job manifest has version {data.get('version')!r}, but the cluster needs version {VERSION}: "
            "install the gpu-launch that the cluster has."
        )
    task = data.pop("task", None)
    fields_by_name = _known_fields(JobManifest, data)
    for name in ("words", "secret_names"):
        fields_by_name[name] = tuple(fields_by_name.get(name) or ())
    try:
        return JobManifest(**fields_by_name, task=None if task is None else TaskCommands(**task))
    except TypeError as error:
        raise UsageError(f"The job manifest is not complete: {error}.") from None


def parse_status(text: str) -> JobStatus:
    """Parse a job status.

    Raises:
        UsageError: It is not a job status.
    """
    try:
        return JobStatus(**_known_fields(JobStatus, _parse_object(text, "job status")))
    except TypeError as error:
        raise UsageError(f"The job status is not complete: {error}.") from None


def _parse_object(text: str, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"The {what} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise UsageError(f"The {what} is a {type(data).__name__}, not an object.")
    return data


def _known_fields(kind: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of this version, without those that a later version may add."""
    return {item.name: data[item.name] for item in fields(kind) if item.name in data}
