"""`run`: send the working directory, ask for GPUs, follow the job."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpu_launch.cli import submit, variables
from gpu_launch.cli.context import Context, json_option, pass_cli
from gpu_launch.cli.sending import DEFAULT_MOST_BYTES
from gpu_launch.errors import UsageError
from gpu_launch.quantities import parse_memory

_TASK_ENDINGS = (".yaml", ".yml")
#: `%gpu_launch`'s flags that mean the same here, in the order of the help; a metavar of None makes a switch.
_FLAGS = (
    ("--nnodes", "N|MIN:MAX", "Nodes that take part (1); MIN:MAX begins with what is free."),
    ("--nproc-per-node", "N", "Ranks, and GPUs, a node (1)."),
    ("--model", "NAME[,NAME...]", "Only GPUs of these models, best liked first."),
    ("--memory", "SIZE", "Only GPUs with at least so much memory, such as 24G."),
    ("--same-model", None, "All GPUs of one model."),
    ("--exclusive", None, "Nothing else may run on the nodes."),
    ("--scavenge", None, "Give the GPUs back when others need them; the job then waits and starts anew."),
    ("--priority", "N", "-100 to 100, higher goes first; above 0 for administrators."),
    ("--time-limit", "SPAN", "The longest time with the GPUs, such as 30m, 2h or 1d."),
    ("--max-restarts", "N", "Start all ranks again after a failure, up to N times (0)."),
    ("--cold", None, "Start every rank with torchrun itself, nothing imported beforehand."),
    ("--preload", "MODULE[,MODULE...]", "Import these, besides torch, before ranks are forked."),
    ("-t/--tee", "STREAMS", "Redirected streams that are shown as well: 1 stdout, 2 stderr, 3 both."),
    ("-r/--redirects", "STREAMS", "Streams that go to the ranks' log files only."),
    ("--local-ranks-filter", "RANKS", "Show only these local ranks, such as 0,2."),
)


def launch_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `_FLAGS`, whose words reach the command as `words`."""
    for names, metavar, text in reversed(_FLAGS):
        kind: dict[str, Any] = {"is_flag": True} if metavar is None else {"metavar": metavar}
        command = click.option(*names.split("/"), help=text, **kind)(command)
    return command


def _words(given: dict[str, Any]) -> tuple[str, ...]:
    """The flags as `%gpu_launch` has them."""
    words = []
    for names, metavar, _ in _FLAGS:
        flag = names.rpartition("/")[2]
        value = given[flag[2:].replace("-", "_")]
        if value:
            words.append(flag if metavar is None else f"{flag}={value}")
        elif value == "":
            raise UsageError(f"{flag} needs a value.")
    return tuple(words)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs in all, on as few nodes as are free.")
@launch_flags
@click.option("-m", "--module", is_flag=True, help="The script is a module's name.")
@click.option("--no-python", is_flag=True, help="The script is a program.")
@click.option("-e", "--env", multiple=True, metavar="NAME[=VALUE]", help="Set a variable; NAME alone takes yours.")
@click.option("--secret", multiple=True, metavar="NAME[=VALUE]", help="The same, for a task file's secrets.")
@click.option("--name", default="", metavar="NAME", help="The job's name (the script's).")
@click.option("--profile", metavar="NAME", help="The profile whose image the job runs in.")
@click.option("--workdir", metavar="DIR", help="The folder that is sent (the current one).")
@click.option("--no-workdir", is_flag=True, help="Send nothing: the script lies in your home on the cluster.")
@click.option("--max-size", metavar="SIZE", help="Send at most so much (512M).")
@click.option("-d", "--detach", is_flag=True, help="Do not wait: print the run's id.")
@click.option("--dry-run", is_flag=True, help="Say what would be sent and asked for, and do nothing.")
@json_option
@click.argument("script", metavar="SCRIPT|TASK.YAML")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@pass_cli
def run(context: Context, /, script: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Run a script, or a SkyPilot task file, on the cluster.

    The working directory is sent, less what .gitignore and .gpulaunchignore name, and lands in ~/gpu-launch/NAME-XXXX
    there, where results stay. The output is shown as it comes, and the exit status is the job's. Ctrl-C cancels the
    job; with --detach it goes on by itself.
    """
    wish = submit.Wish(
        script=script,
        arguments=arguments,
        words=_words(given),
        module=given["module"],
        no_python=given["no_python"],
        gpus=given["gpus"],
        envs=variables.parse("--env", given["env"], os.environ),
        secrets=variables.parse("--secret", given["secret"], os.environ),
        name=given["name"],
        profile=given["profile"],
        workdir=given["workdir"],
        no_workdir=given["no_workdir"],
        most_bytes=parse_size(given["max_size"]),
        here=Path.cwd(),
    )
    is_task = script.lower().endswith(_TASK_ENDINGS) and not (wish.module or wish.no_python)
    wanted = submit.from_task(context, wish) if is_task else submit.from_script(context, wish)
    submit.run(context, wanted, detach=given["detach"], dry_run=given["dry_run"])


def parse_size(text: str | None) -> int:
    """Bytes from `512M` or `2G`."""
    return DEFAULT_MOST_BYTES if text is None else parse_memory("--max-size", text) * 1024**2


COMMANDS: tuple[click.Command, ...] = (run,)
