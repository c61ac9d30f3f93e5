"""The command `gpu-launch`: its subcommands, error messages and exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from itertools import takewhile
from typing import NoReturn

import click

from gpu_launch.cli import bench, cp, debug, env, jobs, login, serve, share, shell, stacks
from gpu_launch.cli.context import CommandExit, Context, json_option
from gpu_launch.cli.instances import commands as commands_instances
from gpu_launch.cli.recipes import commands as commands_recipes
from gpu_launch.cli.ssh import commands as commands_ssh
from gpu_launch.cli.submission import run as commands_run
from gpu_launch.errors import BrokerError, GpuLaunchError, UsageError

#: Exit status of an interrupted command, as in shells.
INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--hub", metavar="URL", help="The hub to use, of those you are logged in to (the last one).")
@json_option
@click.version_option(package_name="gpu-launch", message="gpu-launch %(version)s")
@click.pass_obj
def cli(context: Context, hub: str | None) -> None:
    """Run training jobs on your lab's GPUs, from your own machine.

    Begin with `gpu-launch login https://YOUR-HUB`, then `gpu-launch run --gpus 2 train.py`. RUN in other commands is
    a run's id, the beginning of one, or the name of a job: then the last one of that name.
    """
    context.hub_url = hub


modules = (
    login,
    commands_run,
    commands_recipes,
    serve,
    bench,
    jobs,
    share,
    cp,
    shell,
    stacks,
    debug,
    commands_instances,
    commands_ssh,
    env,
)
for module in modules:
    for command in module.COMMANDS:
        cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and end the process with its status."""
    command_line = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal cannot show are replaced.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    end_process(run_command(command_line))


def end_process(status: int) -> NoReturn:
    """End the process with a status.

    After Ctrl-C threads may wait for the hub, which nothing can end. Python crashes at times when one of them gets its
    answer while the interpreter ends, so the process ends at once then.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others and all(thread.daemon for thread in others):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


def run_command(arguments: list[str]) -> int:
    """Run a command and return its exit status.

    It is 2 for a wrong command line, 1 for a failure, 130 after Ctrl-C, and a job's own for `run`.
    """
    context = Context()
    try:
        # In standalone mode click would print errors and end the process itself.
        status = cli.main(args=arguments, prog_name="gpu-launch", standalone_mode=False, obj=context)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output, such as `head`, has gone. Without this Python would report it again at its end.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except (click.ClickException, GpuLaunchError) as error:
        text, status = _describe_error(error)
        is_json = context.console.is_json or _has_json_option(error, arguments)
        _print_error(text, is_json=is_json, help_url=error.help_url if isinstance(error, BrokerError) else "")
    return status if isinstance(status, int) else 0


def _has_json_option(error: click.ClickException | GpuLaunchError, arguments: list[str]) -> bool:
    """Return whether a command line that click could not parse has gpu-launch's own `--json`."""
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return False
    if error.ctx.allow_interspersed_args:
        return "--json" in takewhile(lambda word: word != "--", arguments)
    # What follows a script is the script's own; before a wrong option there is none. An empty one begins every word.
    wrong_option = getattr(error, "option_name", "")
    return "--json" in takewhile(lambda word: not word.startswith(wrong_option), arguments)


def _describe_error(error: click.ClickException | GpuLaunchError) -> tuple[str, int]:
    """Return one line of text and the exit status."""
    match error:
        case CommandExit():
            return str(error), error.status
        case click.UsageError():
            return _format_usage_error(error), 2
        case click.ClickException():
            return error.format_message(), error.exit_code
        case UsageError():
            return str(error), 2
        case BrokerError(status=401):
            # Tokens expire; a notebook's own is replaced with the notebook.
            return f"{str(error).rstrip('.')}. Log in again with a new token: gpu-launch login HUB_URL", 1
    return str(error), 1


def _format_usage_error(error: click.UsageError) -> str:
    path = error.ctx.command_path if error.ctx else "gpu-launch"
    text = error.format_message()
    return f"{text}{'' if text.endswith(('.', '?')) else '.'} See {path} --help."


def _print_error(text: str, *, is_json: bool, help_url: str) -> None:
    if not text:
        return
    if is_json:
        text = json.dumps({"error": text} | ({"more": help_url} if help_url else {}), ensure_ascii=False)
    else:
        text = f"gpu-launch: {text}" + (f"\nMore: {help_url}" if help_url else "")
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
