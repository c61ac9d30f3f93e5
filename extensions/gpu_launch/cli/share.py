"""The commands `share RUN`, `share list` and `share end`: a job's output for named users, read-only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from gpu_launch.broker.models import parse_time
from gpu_launch.cli import tables
from gpu_launch.cli.context import Context, json_option, pass_context, terminal_columns
from gpu_launch.cli.job_lookup import complete_run
from gpu_launch.cli.jobs import find_job
from gpu_launch.errors import UsageError
from gpu_launch.units import format_span, parse_span

#: Limits of a share's time, seconds, which are the broker's too.
_LEAST_S, _MOST_S = 60, 90 * 86400
_USUAL = "7d"
_COLUMNS = (
    tables.Column(title="RUN", min_width=10),
    tables.Column(title="NAME", min_width=6),
    tables.Column(title="OWNER"),
    tables.Column(title="WITH"),
    tables.Column(title="ENDS IN"),
    tables.Column(title="LINK"),
)


class _ShareGroup(click.Group):
    """A group in which `share RUN …` means `share add RUN …`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args if args and args[0] in self.commands else ["add", *args])


@click.group(
    cls=_ShareGroup,
    short_help="Let colleagues see a job's output.",
    context_settings={"ignore_unknown_options": True},
    subcommand_metavar="RUN --with NAME | list | end RUN",
)
def share() -> None:
    """Let colleagues see a job's output, state and GPUs on a page of the hub, and nothing else.

    `gpu-launch share RUN --with NAME` prints the link for NAME. It is the same as `share add RUN`, which a job whose
    name is that of a command needs.
    """


@share.command(short_help="Share a job's output.")
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option("--with", "viewers", metavar="NAME", multiple=True, required=True, help="The user; may be repeated.")
@click.option(
    "--for", "span", metavar="SPAN", default=_USUAL, show_default=True, help="Time until it ends, such as 2h."
)
@json_option
@pass_context
def add(context: Context, run: str, viewers: tuple[str, ...], span: str) -> None:
    """Share a job's output. A repeated command sets the end of the share again."""
    for_s = parse_span("--for", span, least=_LEAST_S, most=_MOST_S)
    job = find_job(context, run)
    if not job.detached:
        raise UsageError(f"{job.run_id} is a notebook's launch, whose output is in its notebook: share a job.")
    shares = [context.broker.share_output(job.id, viewer, for_s) for viewer in dict.fromkeys(viewers)]
    lines = [
        f"{share['viewer']} sees {job.run_id} for {format_span(for_s)} at {_build_link(context, share)}"
        for share in shares
    ]
    context.console.print_result([_build_json(context, share) for share in shares], "\n".join(lines))


@share.command("list", short_help="List what you share, and what others share with you.")
@json_option
@pass_context
def list_shares(context: Context) -> None:
    """List the outputs that you share, and those that others share with you."""
    user = context.user
    # An administrator gets the shares of all users.
    shares = [share for share in context.broker.list_shares() if not user or user in (share["owner"], share["viewer"])]
    now = datetime.now(UTC)
    rows = [
        (
            share["run_id"],
            share["name"] or "-",
            share["owner"],
            share["viewer"],
            _format_rest(share, now),
            _build_link(context, share),
        )
        for share in shares
    ]
    text = tables.format_table(_COLUMNS, rows, width=terminal_columns()) if rows else "Nothing is shared."
    context.console.print_result([_build_json(context, share) for share in shares], text)


@share.command(short_help="End shares of a job.")
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option("--with", "viewers", metavar="NAME", multiple=True, help="Only with this user (with all).")
@json_option
@pass_context
def end(context: Context, run: str, viewers: tuple[str, ...]) -> None:
    """End the shares of a job; pages that are open end at once."""
    job = find_job(context, run)
    ended = [share for viewer in viewers or (None,) for share in context.broker.end_shares(job.id, viewer)]
    names = ", ".join(share["viewer"] for share in ended)
    wanted = f" with {', '.join(viewers)}" if viewers else ""
    text = f"{job.run_id} is no longer shared with {names}" if ended else f"{job.run_id} was not shared{wanted}"
    context.console.print_result([_build_json(context, share) for share in ended], text)


def _build_link(context: Context, share: dict[str, Any]) -> str:
    """Return the address of the page; its path alone in a notebook's terminal, which does not know the hub's."""
    return f"{context.hub.url}{share['path']}"


def _build_json(context: Context, share: dict[str, Any]) -> dict[str, Any]:
    """Build the JSON of a share. Later versions may add keys but do not change them."""
    return {
        "run_id": share["run_id"],
        "job": share["job"],
        "name": share["name"],
        "owner": share["owner"],
        "viewer": share["viewer"],
        "created_at": share["created_at"],
        "expires_at": share["expires_at"],
        "url": _build_link(context, share),
    }


def _format_rest(share: dict[str, Any], now: datetime) -> str:
    expires_at = parse_time(share["expires_at"])
    return "-" if expires_at is None else format_span(max(0.0, (expires_at - now).total_seconds()))


COMMANDS: tuple[click.Command, ...] = (share,)
