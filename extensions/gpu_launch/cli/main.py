"""The command `gpu-launch`: its subcommands, and how errors become one line and an exit status."""

from __future__ import annotations

import contextlib
import json
import os
import sys

import click

from gpu_launch.cli import commands_files, commands_hub, commands_jobs, commands_run, commands_shell
from gpu_launch.cli.context import Context
from gpu_launch.cli.said import Ended
from gpu_launch.errors import GpuLaunchError, UsageError

#: What a shell gives for a command that was interrupted.
INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--hub", metavar="URL", help="The hub to use, of those you are logged in to (the last one).")
@click.version_option(package_name="gpu-launch", message="gpu-launch %(version)s")
@click.pass_context
def cli(context: click.Context, hub: str | None) -> None:
    """Run training jobs on your lab's GPUs, from your own machine.

    Begin with `gpu-launch login https://YOUR-HUB`, then `gpu-launch run --gpus 2 train.py`. RUN in other commands is
    a run's id, the beginning of one, or the name of a job: then the last one of that name.
    """
    context.obj = Context(hub_url=hub)


for module in (commands_hub, commands_run, commands_jobs, commands_files, commands_shell):
    for command in module.COMMANDS:
        cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """The entry point: runs a command and ends the process with its status."""
    words = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        # A name or a log line that the terminal cannot show is shown with a mark instead.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    raise SystemExit(run(words))


def run(words: list[str]) -> int:
    """A command's exit status: 2 for a wrong command line, 1 for a failure, 130 after Ctrl-C, a job's own for `run`."""
    try:
        # Without standalone mode click neither prints errors nor ends the process.
        status = cli.main(args=words, prog_name="gpu-launch", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output, `head` say, has gone. Python would complain of it once more at its end.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except (click.ClickException, GpuLaunchError) as error:
        text, status = _explain(error)
        is_json = "--json" in (words[: words.index("--")] if "--" in words else words)
        _complain(text, is_json=is_json)
    return status if isinstance(status, int) else 0


def _explain(error: click.ClickException | GpuLaunchError) -> tuple[str, int]:
    """One line, and the exit status."""
    match error:
        case Ended():
            return str(error), error.status
        case click.UsageError():
            return _usage_text(error), 2
        case click.ClickException():
            return error.format_message(), error.exit_code
        case UsageError():
            return str(error), 2
    return str(error), 1


def _usage_text(error: click.UsageError) -> str:
    path = error.ctx.command_path if error.ctx else "gpu-launch"
    text = error.format_message()
    return f"{text}{'' if text.endswith(('.', '?')) else '.'} See {path} --help."


def _complain(text: str, *, is_json: bool) -> None:
    if not text:
        return
    text = json.dumps({"error": text}, ensure_ascii=False) if is_json else f"gpu-launch: {text}"
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
