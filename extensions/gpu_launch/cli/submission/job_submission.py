"""From the command line of `run` to a job: check it, choose its nodes, send its files, and ask the broker for it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from gpu_launch.broker.holdings import format_holdings, list_holdings
from gpu_launch.broker.models import WAITING, Cluster, Job
from gpu_launch.cli import follow, job_lookup, tables
from gpu_launch.cli.context import Context
from gpu_launch.cli.jobs import build_port_url, list_own_jobs, note_port
from gpu_launch.cli.submission import job_plan, node_layout, upload
from gpu_launch.cli.submission.upload import JobSubmission, UploadSet, send_job
from gpu_launch.common import job_manifest, run_folder
from gpu_launch.errors import BrokerError, UsageError
from gpu_launch.launch import plan
from gpu_launch.options import command
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.options.value_types import ArrayTasks

_MOST_NAME = 80
#: The id of a job group, which is part of the names by which its tasks find each other, as in SkyPilot.
GROUP_VARIABLE = "SKYPILOT_JOBGROUP_NAME"


def build_name(name: str, *, script: str) -> str:
    """Return the job's name for people: as given, else the script's.

    Raises:
        UsageError: for a name that is not one line of text.
    """
    chosen = name or PurePosixPath(script.replace("\\", "/")).name
    if not chosen.strip() or not chosen.isprintable() or len(chosen) > _MOST_NAME:
        raise UsageError(f"--name: a name of 1 to {_MOST_NAME} printable characters is needed.")
    return chosen


def build_folder(name: str) -> str:
    """Return a new folder's path below the home: `gpu-launch/train-3f2a91`."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower().removesuffix(".py")).strip("-")[:40].rstrip("-")
    return f"{job_manifest.UPLOADS}/{plain or 'job'}-{secrets.token_hex(3)}"


def place_script(script: str, *, load: UploadSet, here: Path) -> str:
    """Return the script's path within the files that are sent.

    Raises:
        UsageError: where it is not among them.
    """
    relative = Path(script).expanduser()
    for path in (here / relative, load.root / relative):
        # Links are not resolved: one within the folder is sent as a link.
        if path.is_file():
            parent = path.parent.resolve()
            if not parent.is_relative_to(load.root):
                raise UsageError(
                    f"{script} lies outside of {load.root}, which is what is sent: run it from its own folder, or name "
                    "a folder that holds it with --workdir."
                )
            name = (parent.relative_to(load.root) / path.name).as_posix()
            if not load.contains(name):
                raise UsageError(f"{script} is named by an ignore file, so it would not be sent.")
            return name
    if (here / relative).is_dir():
        raise UsageError(f"{script} is a folder; name the script in it.")
    raise UsageError(f"There is no script {script} in {here if here == load.root else f'{here} or {load.root}'}.")


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """The command line of `run`."""

    script: str
    arguments: tuple[str, ...]
    #: The options of a launch that were typed, checked, by option name.
    values: Mapping[str, Any]
    gpus: int | None
    #: None for a single job.
    array: ArrayTasks | None = None
    #: The run id of the job or array that must succeed before; None for none.
    after: str | None = None
    #: None where it was not given.
    retries: int | None = None
    envs: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    name: str
    profile: str | None
    image: str | None = None
    #: Port of the job's server, and who reaches it besides the owner.
    port: int | None = None
    port_users: tuple[str, ...] = ()
    #: It starts again at the next request to the port, after it has ended by itself and well.
    sleeps: bool = False
    workdir: str | None = None
    no_workdir: bool
    most_bytes: int
    here: Path

    @property
    def indexes(self) -> tuple[int, ...] | None:
        """Return the indexes of the array's tasks; None for a single job."""
        return None if self.array is None else self.array.indexes


def find_predecessor(context: Context, text: str) -> str:
    """Return the run id of the job, or of the array, that the user named for `--after`.

    Raises:
        UsageError: There is none, or it is a notebook's launch.
    """
    jobs = job_lookup.match_jobs(text, list_own_jobs(context, ended=True))
    if not jobs[0].detached:
        raise UsageError(f"--after {text}: {jobs[0].run_id} is a notebook's launch; only jobs can be waited for.")
    return jobs[0].run_id if len(jobs) == 1 or jobs[0].array is None else jobs[0].array


def from_script(context: Context, asked: RunArguments) -> JobSubmission:
    """Return the job of a script, module or program.

    Raises:
        UsageError: for what cannot be, before anything is sent.
    """
    options = command.build(asked.values, script=asked.script, arguments=asked.arguments)
    name = build_name(asked.name, script=asked.script)
    load = scan_workdir(asked, asked.workdir or ".")
    if load is not None and not (options.module or options.no_python):
        options = replace(options, script=place_script(asked.script, load=load, here=asked.here))
    options = fit_to_cluster(asked, options, context.broker.get_cluster())
    manifest = job_manifest.JobManifest(
        name=name,
        words=command.format_words(options),
        folder=build_folder(name) if load is not None else "",
        environ=asked.envs | asked.secrets,
        secret_names=tuple(sorted(asked.secrets)),
    )
    return build_submission(asked, manifest, options, load)


def fit_to_cluster(asked: RunArguments, options: LaunchOptions, cluster: Cluster) -> LaunchOptions:
    """Return the options with the cluster's own names of models, and the shape that `--gpus` asks for.

    Raises:
        UsageError: for what the cluster never has.
    """
    if asked.gpus is not None and not {"nnodes", "nproc_per_node"}.isdisjoint(asked.values):
        raise UsageError("--gpus replaces --nnodes and --nproc-per-node.")
    if asked.gpus is not None and asked.indexes is not None:
        raise UsageError("--array and --gpus exclude each other: each task of an array has one GPU.")
    options = replace(options, demand=plan.name_models(options.demand, cluster))
    if asked.gpus is not None:
        nodes, each = node_layout.choose_layout(asked.gpus, cluster, options.demand)
        options = replace(options, nnodes=nodes, least_nnodes=None, nproc_per_node=each)
    plan.check_array(options)
    plan.check_guests(options)
    least = options.nnodes if options.least_nnodes is None else options.least_nnodes
    node_layout.check_layout(least, options.nproc_per_node, cluster, options.demand)
    return options


def scan_workdir(asked: RunArguments, workdir: str) -> UploadSet | None:
    """Return the files of the working directory; None with `--no-workdir`.

    Raises:
        UsageError: The folder cannot be sent.
    """
    if asked.no_workdir:
        if asked.workdir:
            raise UsageError("--workdir and --no-workdir exclude each other.")
        return None
    load = upload.scan_project(asked.here / Path(workdir).expanduser())
    upload.check_size(load, limit=asked.most_bytes)
    return load


def build_submission(
    asked: RunArguments,
    manifest: job_manifest.JobManifest,
    options: LaunchOptions,
    load: UploadSet | None,
    *,
    retries: int = 0,
    port: int | None = None,
) -> JobSubmission:
    """Return the job of these parts; `retries` and `port` count where the command line has no `--retry` and `--port`.

    Raises:
        UsageError: The port and other options exclude each other.
    """
    port = port if asked.port is None else asked.port
    if asked.port_users and port is None:
        raise UsageError("--allow-user is for a job with a port: add --port, such as --port 8000.")
    if asked.sleeps and port is None:
        raise UsageError("--sleep is for a job with a port, whose requests wake it: add --port, such as --port 8000.")
    if port is not None and asked.indexes is not None:
        raise UsageError("--array and --port exclude each other: the tasks of an array have no port.")
    return JobSubmission(
        manifest=manifest,
        nnodes=options.nnodes,
        least_nnodes=options.least_nnodes,
        nproc_per_node=options.nproc_per_node,
        demand=options.demand,
        profile=asked.profile,
        image=asked.image,
        load=load,
        indexes=asked.indexes,
        max_running=None if asked.array is None else asked.array.limit,
        after=asked.after,
        retries=retries if asked.retries is None else asked.retries,
        port=port,
        port_users=asked.port_users,
        sleeps=asked.sleeps,
    )


def run(context: Context, job: JobSubmission, *, detach: bool, dry_run: bool) -> None:
    """Send the job, ask for it, and follow it; an array is not followed.

    Raises:
        Ended: with the job's exit status.
        BrokerError: the job is refused; nothing was sent, unless the cluster has changed during the upload.
    """
    is_followed = not detach and job.indexes is None
    check(context, job)
    if dry_run:
        context.console.print_result(job_plan.build_plan_json(job, batch=not is_followed), job_plan.format_plan(job))
        return
    run_id = run_folder.new_run_id()
    send_job(context, job, run_id)
    try:
        jobs = _request_jobs(context, job, run_id, batch=not is_followed)
    except BrokerError:
        _note_folder(context, job)
        raise
    except KeyboardInterrupt:
        _cancel_runs(context, {run_id})
        raise
    _note_holdings(context, job, jobs)
    if is_followed:
        context.console.print_note(f"gpu-launch: {run_id}, in ~/{job.manifest.folder}".rstrip("/"))
        note_port(context, jobs[0])
        follow.follow_to_end(context, jobs[0], cancels=True)
    elif job.indexes is None:
        context.console.print_note(
            f"gpu-launch: it runs without this command: gpu-launch attach {job_lookup.shorten_run_id(run_id)}"
        )
        note_port(context, jobs[0])
        context.console.print_result(_build_detached_json(context, job, jobs[0]), run_id)
    else:
        context.console.print_note(
            f"gpu-launch: {len(jobs)} tasks, {jobs[0].run_id} to {jobs[-1].run_id}: gpu-launch ps lists them, "
            f"gpu-launch logs {jobs[0].run_id} shows one's output, gpu-launch cancel {run_id} ends all of them"
        )
        tasks = [
            tables.build_job_json(task_job) | {"index": index}
            for task_job, index in zip(jobs, job.indexes, strict=True)
        ]
        context.console.print_result({"array": run_id, "folder": job.manifest.folder, "tasks": tasks}, run_id)


def submit_tasks(context: Context, tasks: Sequence[JobSubmission]) -> None:
    """Send the files of all jobs of a task file, and request all of them, or none.

    Each starts when the one before has succeeded.

    Raises:
        BrokerError: a job is refused, and those before it are cancelled.
    """
    run_ids = [run_folder.new_run_id() for _ in tasks]
    for job, run_id in zip(tasks, run_ids, strict=True):
        send_job(context, job, run_id)
    requested: list[Job] = []
    try:
        for job, run_id in zip(tasks, run_ids, strict=True):
            after = requested[-1].run_id if requested else job.after
            requested += _request_jobs(context, replace(job, after=after), run_id, batch=True)
    except (BrokerError, KeyboardInterrupt):
        _cancel_runs(context, run_ids)
        for job in tasks:
            _note_folder(context, job)
        raise
    context.console.print_note(
        f"gpu-launch: {len(tasks)} tasks run one after another without this command: gpu-launch ps lists them, "
        "gpu-launch cancel RUN ends one and those after it"
    )
    _print_requested(context, tasks, requested)


def submit_group(context: Context, tasks: Sequence[JobSubmission]) -> None:
    """Send the files of all jobs of a job group, and request all of them, or none; they start at the same time.

    Raises:
        BrokerError: the group is refused, and nothing was requested.
    """
    group = run_folder.new_run_id()
    requests = []
    for number, job in enumerate(tasks):
        manifest = replace(job.manifest, environ=job.manifest.environ | {GROUP_VARIABLE: group})
        send_job(context, replace(job, manifest=manifest), f"{group}-{number}")
        requests.append(_build_request(job, f"{group}-{number}", batch=True))
    auxiliary = {
        f"{group}-{number}": job.auxiliary_s for number, job in enumerate(tasks) if job.auxiliary_s is not None
    }
    try:
        requested = context.broker.create_group(group, requests, auxiliary)
    except BrokerError:
        for job in tasks:
            _note_folder(context, job)
        raise
    except KeyboardInterrupt:
        _cancel_runs(context, {group})
        raise
    context.console.print_note(
        f"gpu-launch: {len(tasks)} tasks start together and run without this command: gpu-launch ps {group} lists "
        f"them, gpu-launch cancel {group} ends all of them"
    )
    _print_requested(context, tasks, requested)


def _print_requested(context: Context, tasks: Sequence[JobSubmission], requested: Sequence[Job]) -> None:
    _note_holdings(context, tasks[0], requested[:1])
    for view in requested:
        note_port(context, view)
    context.console.print_result(
        [_build_detached_json(context, job, view) for job, view in zip(tasks, requested, strict=True)],
        "\n".join(view.run_id for view in requested),
    )


def _note_folder(context: Context, job: JobSubmission) -> None:
    if job.manifest.folder:
        context.console.print_note(f"gpu-launch: the files that were sent are in ~/{job.manifest.folder}")


def _note_holdings(context: Context, job: JobSubmission, requested: Sequence[Job]) -> None:
    """Print which GPUs of the user's own a waiting job could use."""
    if requested[0].state == WAITING:
        holdings = list_holdings(context.broker, requested, job.demand, server=None)
        for text in format_holdings(holdings, cancel="gpu-launch cancel"):
            context.console.print_note(f"gpu-launch: {text}")


def _cancel_runs(context: Context, run_ids: Collection[str]) -> None:
    """Cancel those that the broker has accepted: an interrupted request must not run unseen."""
    for job in context.broker.list_jobs():
        if job.run_id in run_ids or job.array in run_ids:
            context.broker.delete_job(job.id)


def _build_detached_json(context: Context, job: JobSubmission, requested: Job) -> dict[str, Any]:
    url = {} if job.port is None else {"url": build_port_url(context, requested)}
    return tables.build_job_json(requested) | {"folder": job.manifest.folder} | url


def check(context: Context, job: JobSubmission, others: Sequence[JobSubmission] = ()) -> None:
    """Let the broker check a job, or a job group with `others`, before the files are sent.

    Raises:
        BrokerError: it would be refused.
    """
    count = None if job.indexes is None else len(job.indexes)
    requests = [_build_request(one, run_folder.new_run_id(), batch=True) for one in (job, *others)]
    context.broker.check_job(count=count, others=requests[1:], **requests[0])


def _request_jobs(context: Context, job: JobSubmission, run_id: str, *, batch: bool) -> list[Job]:
    request = _build_request(job, run_id, batch=batch)
    if job.indexes is None:
        return [context.broker.create_job(**request)]
    return context.broker.create_array(count=len(job.indexes), max_running=job.max_running, **request)


def _build_request(job: JobSubmission, run_id: str, *, batch: bool) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "nnodes": job.nnodes,
        "min_nnodes": job.least_nnodes,
        "nproc_per_node": job.nproc_per_node,
        "server": "",
        "exclude_nodes": (),
        "demand": job.demand,
        "batch": batch,
        "detached": True,
        "profile": job.profile,
        "image": job.image,
        "name": job.manifest.name,
        "after": job.after,
        "max_retries": job.retries,
        "port": job.port,
        "port_users": job.port_users,
        "sleeps": job.sleeps,
    }
