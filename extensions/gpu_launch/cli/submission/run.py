"""The command `run`: send the working directory, ask for GPUs, follow the job."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gpu_launch.cli.context import Context, json_option, pass_context
from gpu_launch.cli.recipes import recipe_job
from gpu_launch.cli.recipes.catalogue import PREFIX
from gpu_launch.cli.submission import job_submission, task_submission
from gpu_launch.cli.submission.upload import DEFAULT_MAX_BYTES
from gpu_launch.environment import SECRET_PREFIXES
from gpu_launch.errors import UsageError
from gpu_launch.options.definition import OPTIONS
from gpu_launch.options.option import LaunchOption, Surface
from gpu_launch.training.comm_modes import AUTO, CommMode
from gpu_launch.units import parse_memory

_TASK_ENDINGS = (".yaml", ".yml")
#: Users who reach a job's port besides its owner, as the broker limits them.
MAX_PORT_USERS = 32
_USER = re.compile(r"[a-z][a-z0-9_.-]{0,31}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: `%gpu_launch`'s options that mean the same here.
_LAUNCH_OPTIONS = tuple(option for option in OPTIONS if Surface.COMMAND in option.surfaces)


def _with_sentence(option: LaunchOption) -> LaunchOption:
    """Return the option with its help as a sentence, as all of this command's options have it."""
    same = copy.copy(option)
    text = option.help or ""
    same.help = f"{text[:1].upper()}{text[1:]}."
    return same


def launch_options(options: Sequence[LaunchOption]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options of a launch to a command; checked values reach it by option name."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        # As `click.option` does it, which is applied from the last option to the first.
        params: list[click.Parameter] = command.__dict__.setdefault("__click_params__", [])
        params.extend(_with_sentence(option) for option in reversed(options))
        return command

    return add


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs in all, on as few nodes as are free.")
@launch_options(_LAUNCH_OPTIONS)
@click.option("-e", "--env", multiple=True, metavar="NAME[=VALUE]", help="Set a variable; NAME alone takes yours.")
@click.option(
    "--secret",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="The same; its value is removed from the job's folder when the job has ended.",
)
@click.option("--name", default="", metavar="NAME", help="The job's name (the script's).")
@click.option("--profile", metavar="NAME", help="The profile whose image the job runs in.")
@click.option("--image", metavar="NAME", help="One of the images that the profile, or any of yours, offers.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Reach the server that the job runs on this port at an address of the hub, in a browser or with a token.",
)
@click.option(
    "--sleep", "sleeps", is_flag=True,
    help="When the server has ended by itself and well, start it again at the next request to the port.",
)  # fmt: skip
@click.option(
    "--allow-user", "allow_users", multiple=True, metavar="NAME", help="This user reaches the port as well; repeatable."
)
@click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", help="A parameter of the recipe; repeatable.")
@click.option("--workdir", metavar="DIR", help="The folder that is sent (the current one).")
@click.option("--no-workdir", is_flag=True, help="Send nothing: the script lies in your home on the cluster.")
@click.option("--max-size", metavar="SIZE", help="Send at most this much (512M).")
@click.option("-d", "--detach", is_flag=True, help="Do not wait: print the run's id.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent and asked for, and do nothing.")
@json_option
@click.argument("script", metavar="SCRIPT|TASK.YAML|recipe:NAME")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@pass_context
def run(context: Context, /, script: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Run a script, a SkyPilot task file or a recipe on the cluster.

    The working directory is sent, less what .gitignore and .gpulaunchignore name, to ~/gpu-launch/NAME-XXXX there,
    where results stay. The output is shown as it comes, and the exit status is the job's. Ctrl-C cancels the job; with
    --detach, and with --array, it continues without this command.
    """
    launch_values = {option.name: given[str(option.name)] for option in _LAUNCH_OPTIONS}
    if launch_values["comm"] == AUTO:
        raise UsageError(
            f"--comm {AUTO}: a prediction is for a script in your home on the cluster, so only notebooks have it. Give "
            f"one of {', '.join(CommMode)}, as the table of `gpu-launch run --predict` advises."
        )
    if given["predict"] and (given["gpus"] or given["array"]):
        raise UsageError(f"--predict runs on one card: {'--gpus' if given['gpus'] else '--array'} does not go with it.")
    asked = job_submission.RunArguments(
        script=script,
        arguments=arguments,
        values={str(name): value for name, value in launch_values.items() if value not in (None, False)},
        gpus=given["gpus"],
        array=given["array"],
        after=None if given["after"] is None else job_submission.find_predecessor(context, given["after"]),
        retries=given["retries"],
        envs=parse_variables("--env", given["env"], os.environ),
        secrets=parse_variables("--secret", given["secret"], os.environ),
        name=given["name"],
        profile=given["profile"],
        image=given["image"],
        port=given["port"],
        port_users=check_users(given["allow_users"]),
        sleeps=given["sleeps"],
        workdir=given["workdir"],
        no_workdir=given["no_workdir"],
        most_bytes=parse_size(given["max_size"]),
        here=Path.cwd(),
    )
    if script.startswith(PREFIX):
        job = recipe_job.build_job(context, asked, given["sets"])
        job_submission.run(context, job, detach=given["detach"], dry_run=given["dry_run"])
        return
    if given["sets"]:
        raise UsageError(
            f"--set {given['sets'][0]}: parameters are for recipes, and {script} is none: --env sets variables."
        )
    is_task = script.lower().endswith(_TASK_ENDINGS) and not (given["module"] or given["no_python"])
    jobs = task_submission.build_jobs(context, asked) if is_task else (job_submission.from_script(context, asked),)
    if len(jobs) == 1:
        job_submission.run(context, jobs[0], detach=given["detach"], dry_run=given["dry_run"])
    else:
        task_submission.run_tasks(context, jobs, detach=given["detach"], dry_run=given["dry_run"])


def check_users(names: Sequence[str]) -> tuple[str, ...]:
    """Return the users of `--allow-user`, each once.

    Raises:
        UsageError: A name cannot be a user's, or there are too many.
    """
    for name in names:
        if not _USER.fullmatch(name):
            raise UsageError(f"--allow-user {name}: a user's name on the hub is needed, such as --allow-user ben.")
    users = tuple(dict.fromkeys(names))
    if len(users) > MAX_PORT_USERS:
        raise UsageError(f"--allow-user: {len(users)} users were named; {MAX_PORT_USERS} are the most.")
    return users


def parse_size(text: str | None) -> int:
    """Return the bytes in `512M` or `2G`; the default limit for None."""
    return DEFAULT_MAX_BYTES if text is None else parse_memory("--max-size", text) * 1024**2


def parse_variables(flag: str, words: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `NAME=VALUE`, or `NAME` alone for this machine's value. No error shows a value."""
    variables = {}
    for word in words:
        name, has_value, value = word.partition("=")
        _check_name(flag, name)
        if not has_value:
            if name not in own:
                raise UsageError(f"{flag} {name}: it is not set here; give it as {name}=VALUE.")
            value = own[name]
        if "\0" in value:
            raise UsageError(f"{flag} {name}: a value cannot hold a null character.")
        variables[name] = value
    return variables


def _check_name(flag: str, name: str) -> None:
    """Refuse a name that a job cannot have as a variable.

    Raises:
        UsageError: naming it.
    """
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{flag} {name}: a variable's name is needed, such as {flag} LR=0.1.")
    if name.startswith(SECRET_PREFIXES):
        raise UsageError(f"{flag} {name}: variables of JupyterHub and ipyparallel are not passed to jobs.")


COMMANDS: tuple[click.Command, ...] = (run,)
