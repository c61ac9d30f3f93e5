"""The command `gpuhub`: its commands, of which `usage` and `events` are here, and the exit status of each error."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.cli import deployment, tables
from gpuhub.cli.backup import backup, restore
from gpuhub.cli.bench import bench
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.images import image_group
from gpuhub.cli.leases import lease_group
from gpuhub.cli.limits import limit_group
from gpuhub.cli.node_power import power_group
from gpuhub.cli.nodes import node_group
from gpuhub.cli.options import BrokerRunner, PluginGroup, instance_option, pass_broker
from gpuhub.cli.report import report
from gpuhub.cli.reservations import reservation_group
from gpuhub.cli.services import service_group
from gpuhub.cli.slurm import slurm_group
from gpuhub.cli.users import user_group
from gpuhub.cli.validation import validate
from gpuhub.common.errors import BrokerUnreachable, GpuhubError, Unavailable
from gpuhub.common.paths import Paths

#: Interval between two polls for new events, seconds.
_FOLLOW_S = 1.0
#: The broker sends no more events at once.
_MAX_EVENTS = 1000
#: The exit status of a shell's command that was interrupted.
INTERRUPTED = 130
FAILED = 1


@click.command("usage")
@instance_option
@click.option("--owner", help="Only this user.")
@pass_broker
def usage(broker: BrokerRunner, paths: Paths, owner: str | None) -> None:
    """Show each user's GPUs, GPU hours and limits."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        console.write(tables.format_usage(await client.usage(owner), console.width))

    broker.run("usage", paths, run)


@click.command("events")
@instance_option
@click.option("-f", "--follow", is_flag=True, help="Wait for more, until Ctrl-C.")
@click.option("-n", "--lines", type=int, default=30, show_default=True, metavar="N", help="The last N.")
@pass_broker
def events(broker: BrokerRunner, paths: Paths, follow: bool, lines: int) -> None:
    """Show what the broker did and observed."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        after = await _write_events(client, console, after=None, limit=max(1, min(lines, _MAX_EVENTS)))
        while follow:
            await asyncio.sleep(_FOLLOW_S)
            with suppress(BrokerUnreachable):  # it restarts: the next poll returns the events of that time
                after = await _write_events(client, console, after=after, limit=_MAX_EVENTS)

    broker.run("events", paths, run)


async def _write_events(client: AsyncBrokerClient, console: AdminConsole, *, after: int | None, limit: int) -> int:
    """Write the events after a sequence number, and return the last number."""
    new_events = await client.events(after=after, limit=limit)
    for event in new_events:
        console.write(tables.format_event(event, console.now, console.width))
    return new_events[-1].seq if new_events else after or 0


node_group.add_command(power_group)


@click.group(cls=PluginGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Share a few GPU machines through JupyterHub."""


for command in (
    deployment.up,
    deployment.down,
    deployment.install,
    deployment.uninstall,
    deployment.status,
    deployment.check,
    deployment.broker,
    deployment.proxy,
    deployment.guests,
    deployment.certificate,
    backup,
    restore,
    node_group,
    image_group,
    user_group,
    lease_group,
    reservation_group,
    limit_group,
    service_group,
    slurm_group,
    usage,
    report,
    events,
    deployment.doctor,
    validate,
    bench,
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
        # Other errors say what would be right.
        more = f"\nMore: docs/troubleshooting.md#{error.code}" if isinstance(error, Unavailable) else ""
        _fail(f"gpuhub: {error}{more}", FAILED)
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
