"""From a wish to a job: what is checked, what is sent, what is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_launch import options, order, plan, runs, wire
from gpu_launch.cli import ending, finding, sending, shape, views, wanted
from gpu_launch.cli.context import Context
from gpu_launch.detached import folder
from gpu_launch.errors import BrokerError, UsageError
from gpu_launch.options import Options
from gpu_launch.taskfile import accelerators, task

#: Flags that are about ranks; a task's commands start their own.
_RANKS_ONLY = ("--max-restarts", "--cold", "--preload", "--tee", "--redirects", "--local-ranks-filter")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """`run`'s command line."""

    script: str
    arguments: tuple[str, ...]
    #: `%gpu_launch`'s flags.
    words: tuple[str, ...]
    module: bool
    no_python: bool
    gpus: int | None
    envs: dict[str, str]
    secrets: dict[str, str]
    name: str
    profile: str | None
    workdir: str | None
    no_workdir: bool
    most_bytes: int
    here: Path


def from_script(context: Context, wish: Wish) -> wanted.Wanted:
    """A script, module or program. Raises UsageError for what cannot be, before anything is sent."""
    kind = [flag for flag, is_on in (("--module", wish.module), ("--no-python", wish.no_python)) if is_on]
    flags = (*kind, *wish.words)
    found = options.parse_words([*flags, "--", wish.script, *wish.arguments])
    name = wanted.build_name(wish.name, script=wish.script)
    load = _scan(wish, wish.workdir or ".")
    script = wish.script
    if load is not None and not (wish.module or wish.no_python):
        script = wanted.place_script(script, load=load, here=wish.here)
    found = _shaped(wish, found, context.broker.cluster())
    shaped = ("--nnodes=", "--nproc-per-node=", "--model=")
    rest = tuple(word for word in flags if not word.startswith(shaped))
    job = order.Order(
        name=name,
        words=wanted.build_words(rest, found, script),
        folder=wanted.build_folder(name) if load is not None else "",
        environ=wish.envs | wish.secrets,
    )
    return _wanted(wish, job, found, load)


def from_task(context: Context, wish: Wish) -> wanted.Wanted:
    """A task file. Raises UsageError that names the file and what in it is not supported."""
    if wish.arguments:
        raise UsageError(f"A task file takes no arguments, and {wish.arguments[0]} was given; --env sets variables.")
    for flag in _RANKS_ONLY:
        if any(word.partition("=")[0] == flag for word in wish.words):
            raise UsageError(f"{flag} is about ranks that gpu-launch starts; a task file's commands start their own.")
    try:
        read = task.parse(_read(wish.here / Path(wish.script).expanduser()))
        environ = task.with_values(read, envs=wish.envs, secrets=wish.secrets)
        cluster = context.broker.cluster()
        found = _shaped(wish, _task_options(wish, read, cluster), cluster)
    except UsageError as error:
        raise UsageError(f"{wish.script}: {error}") from None
    name = wanted.build_name(wish.name or read.name, script=wish.script)
    workdir = wish.workdir or read.workdir
    # Without a workdir SkyPilot sends nothing; the commands begin in an empty folder then, as they do there.
    load = _scan(wish, workdir) if workdir else None
    for note in read.notes:
        context.said.note(f"gpu-launch: {wish.script}: {note}")
    if read.accelerators is None:
        each = "one GPU" if found.nproc_per_node == 1 else f"{found.nproc_per_node} GPUs"
        context.said.note(f"gpu-launch: {wish.script}: no accelerators are named; every node has {each}")
    job = order.Order(
        name=name,
        task=order.Task(setup=read.setup, run=read.run),
        folder="" if wish.no_workdir else wanted.build_folder(name),
        environ=environ,
    )
    return _wanted(wish, job, found, load)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"it cannot be read: {error.strerror}.") from None
    except UnicodeError:
        raise UsageError("it is no text in UTF-8.") from None


def _task_options(wish: Wish, read: task.TaskFile, cluster: wire.Cluster) -> Options:
    """The file's shape as options, with the command line's own flags over it."""
    found = options.parse_words([*wish.words, "--", "task"])
    if found.least_nnodes is not None:
        raise UsageError("--nnodes MIN:MAX is for scripts: a task file's commands know one number of nodes.")
    given = {word.partition("=")[0] for word in wish.words}
    if read.accelerators is not None:
        each = found.nproc_per_node if "--nproc-per-node" in given else read.accelerators.count
        models = found.demand.models
        if not models:
            try:
                models = accelerators.find_models(read.accelerators, cluster)
            except UsageError as error:
                raise UsageError(f"resources.accelerators {error}") from None
        found = replace(found, nproc_per_node=each, demand=replace(found.demand, models=models))
    return found if "--nnodes" in given else replace(found, nnodes=read.nnodes)


def _shaped(wish: Wish, found: Options, cluster: wire.Cluster) -> Options:
    """With the cluster's own names of models, and the shape that `--gpus` asks for. Raises UsageError for what the
    cluster never has.
    """
    given = {word.partition("=")[0] for word in wish.words}
    if wish.gpus is not None and given & {"--nnodes", "--nproc-per-node"}:
        raise UsageError("--gpus stands instead of --nnodes and --nproc-per-node.")
    models = tuple(plan.find_model(cluster, model) for model in found.demand.models)
    found = replace(found, demand=replace(found.demand, models=models))
    if wish.gpus is not None:
        found = wanted.with_shape(found, *shape.choose(wish.gpus, cluster, found.demand))
    least = found.nnodes if found.least_nnodes is None else found.least_nnodes
    shape.check(least, found.nproc_per_node, cluster, found.demand)
    return found


def _scan(wish: Wish, workdir: str) -> sending.Load | None:
    if wish.no_workdir:
        if wish.workdir:
            raise UsageError("--workdir and --no-workdir exclude each other.")
        return None
    load = sending.scan(wish.here / Path(workdir).expanduser())
    sending.check_size(load, most=wish.most_bytes)
    return load


def _wanted(wish: Wish, job: order.Order, found: Options, load: sending.Load | None) -> wanted.Wanted:
    return wanted.Wanted(
        order=job,
        nnodes=found.nnodes,
        least_nnodes=found.least_nnodes,
        nproc_per_node=found.nproc_per_node,
        demand=found.demand,
        profile=wish.profile,
        load=load,
    )


def run(context: Context, job: wanted.Wanted, *, detach: bool, dry_run: bool) -> None:
    """Send it, ask for it, and follow it. Raises Ended with the job's exit status."""
    if dry_run:
        context.said.result(_plan_json(job, batch=detach), _plan_text(job))
        return
    run_id = runs.new_id()
    send(context, job, run_id)
    try:
        asked = _ask(context, job, run_id, batch=detach)
    except KeyboardInterrupt:
        # It may have been taken: what was interrupted must not go on unseen.
        for other in context.broker.jobs():
            if other.run_id == run_id:
                context.broker.delete_job(other.id)
        raise
    if not detach:
        context.said.note(f"gpu-launch: {run_id}, in ~/{job.order.folder}".rstrip("/"))
        ending.follow_to_end(context, asked, cancels=True)
        return
    context.said.note(f"gpu-launch: it goes on by itself: gpu-launch attach {finding.short(run_id)}")
    context.said.result(views.job_json(asked) | {"folder": job.order.folder}, run_id)


def _ask(context: Context, job: wanted.Wanted, run_id: str, *, batch: bool) -> wire.Job:
    return context.broker.create_job(
        run_id=run_id,
        nnodes=job.nnodes,
        min_nnodes=job.least_nnodes,
        nproc_per_node=job.nproc_per_node,
        server="",
        exclude_nodes=(),
        demand=job.demand,
        batch=batch,
        detached=True,
        profile=job.profile,
        name=job.order.name,
    )


def send(context: Context, job: wanted.Wanted, run_id: str) -> None:
    """The working directory and the order into the home on the cluster. Raises BrokerError."""
    load = job.load
    try:
        if load is not None:
            context.said.note(f"gpu-launch: {load_text(load)} to ~/{job.order.folder}")
            send_load(context, load, job.order.folder)
        elif job.order.folder:
            context.transfer.put(job.order.folder, lambda tar: None)
        context.transfer.put(
            f".gpu_launch/jobs/{run_id}",
            lambda tar: sending.add_texts(tar, folder.files(job.order)),
        )
    except BrokerError as error:
        raise BrokerError(f"The files could not be sent: {error}", status=error.status) from None


def send_load(context: Context, load: sending.Load, path: str) -> None:
    """The files of a folder, with a line of progress on a terminal."""
    sent = 0

    def count(size: int) -> None:
        nonlocal sent
        sent += size
        part = f"{100 * sent // load.size} %" if load.size else "100 %"
        context.said.redraw(f"gpu-launch: {part} of {sending.format_size(load.size)} sent")

    def write(tar: Any) -> None:
        nonlocal sent
        sent = 0
        sending.add_to(tar, load, on_bytes=count)

    context.transfer.put(path, write)
    context.said.end_line()


def load_text(load: sending.Load) -> str:
    """`sending 12 files, 3.4 MiB`."""
    files = "1 file" if load.files == 1 else f"{load.files} files"
    without = f", without {', '.join(load.left_out)}" if load.left_out else ""
    return f"sending {files}, {sending.format_size(load.size)}{without}"


def _plan_json(job: wanted.Wanted, *, batch: bool) -> dict[str, Any]:
    load = job.load
    return {
        "name": job.order.name,
        "folder": job.order.folder,
        "words": list(job.order.words),
        "environ": sorted(job.order.environ),
        "nnodes": job.nnodes,
        "min_nnodes": job.least_nnodes,
        "nproc_per_node": job.nproc_per_node,
        "batch": batch,
        "demand": job.demand.body(),
        "files": [entry.name.as_posix() for entry in load.entries if not entry.is_folder] if load else [],
        "bytes": load.size if load else 0,
    }


def _plan_text(job: wanted.Wanted) -> str:
    nodes = str(job.nnodes) if job.least_nnodes is None else f"{job.least_nnodes} to {job.nnodes}"
    lines = [
        f"would send: {load_text(job.load).removeprefix('sending ') if job.load else 'nothing'}",
        f"to:         ~/{job.order.folder}".rstrip("/"),
        f"ask for:    {job.demand.describe(job.nproc_per_node)} on each of {nodes} node{'' if nodes == '1' else 's'}",
    ]
    if job.order.task is None:
        lines.append(f"and run:    %gpu_launch {' '.join(job.order.words)}")
    else:
        lines.append("and run:    the task's commands on every node")
    if job.order.environ:
        lines.append(f"with:       {', '.join(sorted(job.order.environ))}")
    return "\n".join(lines)
