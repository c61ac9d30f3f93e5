"""The command `gpuhub`: its commands, and the exit status of each error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from gpuhub.cli import deployment, usage
from gpuhub.cli.broker import BrokerRunner
from gpuhub.cli.leases import lease_group
from gpuhub.cli.nodes import node_group
from gpuhub.cli.options import PluginGroup
from gpuhub.cli.reservations import reservation_group
from gpuhub.common.errors import GpuhubError

#: The exit status of a shell's command that was interrupted.
INTERRUPTED = 130
FAILED = 1


@click.group(cls=PluginGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Share a few GPU machines through JupyterHub."""


for command in (
    deployment.up,
    deployment.down,
    deployment.status,
    deployment.check,
    deployment.broker,
    deployment.proxy,
    deployment.certificate,
    node_group,
    lease_group,
    reservation_group,
    usage.usage,
    usage.events,
    deployment.doctor,
):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; an expected failure is one or a few lines on standard error and exit status 1."""
    try:
        # Outside of standalone mode click neither prints errors nor ends the process.
        status = cli.main(
            args=None if arguments is None else list(arguments),
            prog_name="gpuhub",
            obj=BrokerRunner(),
            standalone_mode=False,
        )
    except GpuhubError as error:
        _fail(f"gpuhub: {error}", FAILED)
    except (click.Abort, KeyboardInterrupt):
        _fail("gpuhub: interrupted", INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        _fail(error.format_message(), error.exit_code)
    except click.UsageError as error:
        usage_line = f"{error.ctx.get_usage()}\n" if error.ctx else ""
        _fail(f"{usage_line}gpuhub: {error.format_message()}", error.exit_code)
    except click.ClickException as error:
        _fail(f"gpuhub: {error.format_message()}", error.exit_code)
    else:
        if isinstance(status, int) and status:
            raise SystemExit(status)


def _fail(text: str, status: int) -> None:
    print(text, file=sys.stderr)
    raise SystemExit(status) from None


if __name__ == "__main__":
    main()
