"""From a task file to jobs: one, those of a pipeline, one after another, or those of a job group, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_launch.broker.models import Cluster
from gpu_launch.cli.context import CommandExit, Context
from gpu_launch.cli.submission import job_plan, job_submission, upload
from gpu_launch.cli.submission.job_submission import GROUP_VARIABLE, RunArguments
from gpu_launch.cli.submission.upload import JobSubmission, UploadSet
from gpu_launch.cli.taskfile import file_mounts, parser
from gpu_launch.cli.taskfile.accelerators import Accelerators, find_models
from gpu_launch.cli.taskfile.parser import TaskFile
from gpu_launch.common import job_manifest
from gpu_launch.errors import UsageError
from gpu_launch.options import command
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.training import comm_modes

#: Tasks of a job group.
_MAX_GROUP = 16
#: Options about ranks; a task's commands start their own.
_RANKS_ONLY = {
    "max_restarts": "--max-restarts",
    "cold": "--cold",
    "predict": "--predict",
    "preload": "--preload",
    "tee": "--tee",
    "redirects": "--redirects",
    "shown_ranks": "--local-ranks-filter",
}


def build_jobs(context: Context, asked: RunArguments) -> tuple[JobSubmission, ...]:
    """Return the jobs of a task file in their order: several for a pipeline or a job group.

    Raises:
        UsageError: naming the file, and what in it is not supported.
    """
    if asked.arguments:
        raise UsageError(f"A task file takes no arguments, and {asked.arguments[0]} was given; --env sets variables.")
    _check_options(asked)
    try:
        tasks = parser.parse_task_files(_read(asked.here / Path(asked.script).expanduser()))
        cluster = context.broker.get_cluster()
        checked = [_check_task(asked, _leave_out_unsupported(task, cluster), cluster) for task in tasks]
    except UsageError as error:
        raise UsageError(f"{asked.script}: {error}") from None
    if tasks[0].is_parallel:
        _check_group(asked, tasks)
    if asked.name and len(checked) > 1:
        raise UsageError("--name is for one job, and this file has several tasks: `name` in the file names each.")
    return tuple(_build_job(context, asked, task) for task in checked)


def _check_group(asked: RunArguments, tasks: Sequence[TaskFile]) -> None:
    if len(tasks) > _MAX_GROUP:
        raise UsageError(f"{asked.script}: a job group has {_MAX_GROUP} tasks at most, and this one has {len(tasks)}.")
    names = Counter(task.name for task in tasks)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise UsageError(f"{asked.script}: {count} tasks are named {name!r}: in a job group each has its own name.")


def build_task(context: Context, asked: RunArguments, task: TaskFile) -> JobSubmission:
    """Return the job of one task.

    Raises:
        UsageError: naming `asked.script`, and what the cluster cannot run.
    """
    _check_options(asked)
    try:
        checked = _check_task(asked, task, context.broker.get_cluster())
    except UsageError as error:
        raise UsageError(f"{asked.script}: {error}") from None
    return _build_job(context, asked, checked)


def build_module(
    context: Context, asked: RunArguments, task: TaskFile, module: str, arguments: tuple[str, ...]
) -> JobSubmission:
    """Return the job of a module that gpu-launch starts on every GPU; all of the task except its commands counts.

    Raises:
        UsageError: naming `asked.script`, and what the cluster cannot run.
    """
    if asked.values.get("predict"):
        task = replace(task, nnodes=1, accelerators=task.accelerators and replace(task.accelerators, count=1))
    if task.port is not None or asked.port is not None:
        # A server that nobody asks writes nothing for hours.
        asked = replace(asked, values={"stacks_after_s": 0} | dict(asked.values))
    try:
        checked = _check_task(asked, task, context.broker.get_cluster())
    except UsageError as error:
        raise UsageError(f"{asked.script}: {error}") from None
    job = _build_job(context, asked, checked)
    options = replace(checked.options, module=True, script=module, arguments=arguments)
    manifest = replace(job.manifest, task=None, words=command.format_words(options))
    return replace(job, manifest=manifest)


def run_tasks(context: Context, jobs: Sequence[JobSubmission], *, detach: bool, dry_run: bool) -> None:
    """Run the jobs one after another, up to the first that fails, while this command waits.

    It does not wait with `detach`, nor for a job group.

    Raises:
        UsageError: for options that are for one job.
        BrokerError: a job is refused; nothing was sent, unless the cluster has changed in the meantime.
        Ended: with the exit status of the job that failed.
    """
    if any(job.indexes is not None for job in jobs):
        raise UsageError("--array is for one task: this file has several.")
    is_group = jobs[0].is_parallel
    detach = detach or is_group
    if context.console.is_json and not (detach or dry_run):
        raise UsageError("--json is for one task, or with --detach: this file has several, each with its own result.")
    if is_group:
        job_submission.check(context, jobs[0], jobs[1:])
        if context.broker.get_cluster().has_delayed_grants:
            context.console.print_note(
                "gpu-launch: Slurm starts each task of the group as soon as its GPUs are free, and not all at once"
            )
    else:
        for job in jobs:
            job_submission.check(context, job)
    if dry_run:
        plans = [job_plan.build_plan_json(job, batch=detach) for job in jobs]
        context.console.print_result(plans, "\n\n".join(job_plan.format_plan(job) for job in jobs))
        return
    if detach:
        submit = job_submission.submit_group if is_group else job_submission.submit_tasks
        submit(context, jobs)
        return
    for number, job in enumerate(jobs, start=1):
        context.console.print_note(f"gpu-launch: task {number} of {len(jobs)}: {job.manifest.name}")
        try:
            job_submission.run(context, job, detach=False, dry_run=False)
        except CommandExit:
            if left := [later.manifest.name for later in jobs[number:]]:
                context.console.print_note(f"gpu-launch: not started: {', '.join(left)}")
            raise


def _check_options(asked: RunArguments) -> None:
    for name, flag in _RANKS_ONLY.items():
        if name in asked.values:
            raise UsageError(f"{flag} is about ranks that gpu-launch starts; a task file's commands start their own.")


@dataclass(frozen=True, kw_only=True)
class _CheckedTask:
    """A task that the cluster can run."""

    file: TaskFile
    environ: dict[str, str]
    options: LaunchOptions
    mounts: tuple[file_mounts.PlacedMount, ...]
    notes: tuple[str, ...]


def _leave_out_unsupported(file: TaskFile, cluster: Cluster) -> TaskFile:
    """Return the file without the keys that the cluster's jobs cannot have, with a note for each."""
    if cluster.has_containers:
        return file
    notes = list(file.notes)
    if file.port is not None:
        notes.append(
            "resources.ports is ignored: on nodes without Docker, other users' programs could answer at a job's port"
        )
    if file.retries:
        notes.append(
            "resources.job_recovery.max_restarts_on_errors is ignored: a job on nodes without Docker cannot start again"
        )
    return replace(file, port=None, retries=0, notes=tuple(notes))


def _check_task(asked: RunArguments, file: TaskFile, cluster: Cluster) -> _CheckedTask:
    if file.is_parallel and not cluster.has_containers and GROUP_VARIABLE in file.setup + file.run:
        raise UsageError(
            f"the commands name {GROUP_VARIABLE}: on nodes without Docker, tasks have no names in the network. They "
            "have one home: let them exchange files there."
        )
    environ = parser.build_environ(file, envs=asked.envs, secrets=asked.secrets)
    mounts = tuple(
        file_mounts.place_mount(mount, environ=environ, here=asked.here, commands=file.setup + "\n" + file.run)
        for mount in file.file_mounts
    )
    if mounts and asked.no_workdir:
        raise UsageError("file_mounts are sent with the job's folder, which --no-workdir leaves out.")
    notes = list(file.notes)
    if file.image and asked.profile is None and asked.image is None:
        raise UsageError(
            f"resources.image_id: {file.image} is a container image, and jobs run in the images of the cluster's "
            "profiles. --profile NAME runs the commands in that profile's image, --image NAME in another one that a "
            "profile offers; an administrator can add one."
        )
    if file.image:
        taken_image = asked.image or f"the image of the profile {asked.profile}"
        notes.append(f"resources.image_id is ignored: the job runs in {taken_image}")
    options, taken = _fit_task(asked, file, cluster)
    if file.alternatives:
        notes.append(f"resources: {_format_gpus(taken)} is taken, the first alternative that the cluster can have")
    elif taken is None:
        each = "one GPU" if options.nproc_per_node == 1 else f"{options.nproc_per_node} GPUs"
        notes.append(f"no accelerators are named; every node has {each}")
    return _CheckedTask(file=file, environ=environ, options=options, mounts=mounts, notes=tuple(notes))


def _fit_task(asked: RunArguments, file: TaskFile, cluster: Cluster) -> tuple[LaunchOptions, Accelerators | None]:
    """Return the options of the first alternative that the cluster can have, and that alternative."""
    reasons = []
    for accelerators in file.alternatives or (file.accelerators,):
        try:
            options = _build_options(asked, file, accelerators, cluster)
            return job_submission.fit_to_cluster(asked, options, cluster), accelerators
        except UsageError as error:
            if not file.alternatives:
                raise
            reasons.append(f"{_format_gpus(accelerators)}: {error}")
    raise UsageError(f"resources: the cluster can have none of the alternatives. {' '.join(reasons)}")


def _format_gpus(accelerators: Accelerators | None) -> str:
    return "one GPU of any model" if accelerators is None else accelerators.format()


def _build_options(
    asked: RunArguments, file: TaskFile, accelerators: Accelerators | None, cluster: Cluster
) -> LaunchOptions:
    """Return the file's shape as options, with the command line's own options over it."""
    options = command.build(asked.values)
    if options.least_nnodes is not None:
        raise UsageError("--nnodes MIN:MAX is for scripts: a task file's commands know one number of nodes.")
    if accelerators is not None:
        each = options.nproc_per_node if "nproc_per_node" in asked.values else accelerators.count
        models = options.demand.models
        if not models:
            try:
                models = find_models(accelerators, cluster)
            except UsageError as error:
                raise UsageError(f"resources.accelerators {error}") from None
        options = replace(options, nproc_per_node=each, demand=replace(options.demand, models=models))
    if file.cpus is not None and "cpus" not in asked.values:
        options = replace(options, demand=replace(options.demand, cpus=file.cpus))
    if file.ram is not None and "ram_mib" not in asked.values:
        options = replace(options, demand=replace(options.demand, ram_mib=file.ram))
    if file.stage and "stage" not in asked.values:
        options = replace(options, demand=replace(options.demand, stage=file.stage))
    if file.guests:
        options = replace(options, demand=replace(options.demand, guests=True))
    return options if "nnodes" in asked.values else replace(options, nnodes=file.nnodes)


def _build_job(context: Context, asked: RunArguments, task: _CheckedTask) -> JobSubmission:
    """Return the job, after notes about what has no effect."""
    file = task.file
    name = job_submission.build_name(asked.name or file.name, script=asked.script)
    folder = "" if asked.no_workdir else job_submission.build_folder(name)
    load = _scan_files(asked, file, task.mounts)
    commands = job_manifest.TaskCommands(
        setup=_replace_paths(asked, file.setup, folder, task.mounts),
        run=_replace_paths(asked, file.run, folder, task.mounts),
    )
    notes = list(task.notes)
    if (commands.setup, commands.run) != (file.setup, file.run):
        notes.append(f"the commands find ~/sky_workdir and file_mounts in the job's own folder, ~/{folder}")
    for note in notes:
        context.console.print_note(f"gpu-launch: {asked.script}: {note}")
    manifest = job_manifest.JobManifest(
        name=name,
        task=commands,
        folder=folder,
        environ=task.environ | ({comm_modes.VARIABLE: task.options.comm} if task.options.comm else {}),
        secret_names=tuple(sorted(file.secrets.keys() | asked.secrets.keys())),
    )
    job = job_submission.build_submission(asked, manifest, task.options, load, retries=file.retries, port=file.port)
    return replace(job, is_parallel=file.is_parallel, auxiliary_s=file.auxiliary_s)


def _replace_paths(asked: RunArguments, commands: str, folder: str, mounts: tuple[file_mounts.PlacedMount, ...]) -> str:
    replaced = file_mounts.replace_paths(commands, folder=folder, mounts=mounts)
    if not folder and replaced != commands:
        raise UsageError(
            f"{asked.script}: the commands name ~/sky_workdir, which is the folder that --no-workdir leaves out."
        )
    return replaced


def _scan_files(asked: RunArguments, file: TaskFile, mounts: tuple[file_mounts.PlacedMount, ...]) -> UploadSet | None:
    """Return the files of the working directory and the mounts, None for none."""
    workdir = asked.workdir or file.workdir
    # Without a workdir SkyPilot sends nothing, and the commands begin in an empty folder.
    load = job_submission.scan_workdir(asked, workdir) if workdir else None
    if not mounts:
        return load
    load = load or UploadSet(root=asked.here, entries=())
    load = replace(load, entries=(*load.entries, *file_mounts.list_entries(mounts)))
    upload.check_size(load, limit=asked.most_bytes)
    return load


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"it cannot be read: {error.strerror}.") from None
    except UnicodeError:
        raise UsageError("it is not a text in UTF-8.") from None
