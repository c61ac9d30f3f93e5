"""The commands `share WHAT`, `share list` and `share end`: a job's output or a notebook for named users, read-only."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click

from gpu_launch.broker.models import parse_time
from gpu_launch.cli import tables
from gpu_launch.cli.context import Context, json_option, pass_context, terminal_columns
from gpu_launch.cli.cp import HOME, RemotePath, parse_path, resolve_remote_path
from gpu_launch.cli.job_lookup import complete_run
from gpu_launch.cli.jobs import find_job
from gpu_launch.errors import UsageError
from gpu_launch.units import format_span, parse_span

#: Limits of a share's time, seconds, which are the broker's too.
_LEAST_S, _MOST_S = 60, 90 * 86400
_USUAL = "7d"
_COLUMNS = (
    tables.Column(title="WHAT", min_width=10),
    tables.Column(title="NAME", min_width=6),
    tables.Column(title="OWNER"),
    tables.Column(title="WITH"),
    tables.Column(title="ENDS IN"),
    tables.Column(title="LINK"),
)


class _ShareGroup(click.Group):
    """A group in which `share WHAT …` means `share add WHAT …`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args if args and args[0] in self.commands else ["add", *args])


@click.group(
    cls=_ShareGroup,
    short_help="Let colleagues see a job's output, or a notebook.",
    context_settings={"ignore_unknown_options": True},
    subcommand_metavar="WHAT --with NAME | list | end WHAT",
)
def share() -> None:
    """Let colleagues see a job's output, or a saved notebook, on a page of the hub, and nothing else.

    WHAT is a job, of which they see output, state and GPUs, or home:PATH, a notebook as it was last saved.

    `gpu-launch share WHAT --with NAME` prints the link for NAME. It is the same as `share add WHAT`, which a job whose
    name is that of a command needs.
    """


@share.command(short_help="Share a job's output, or a notebook.")
@click.argument("what", metavar="WHAT", shell_complete=complete_run)
@click.option("--with", "viewers", metavar="NAME", multiple=True, required=True, help="The user; may be repeated.")
@click.option(
    "--for", "span", metavar="SPAN", default=_USUAL, show_default=True, help="Time until it ends, such as 2h."
)
@json_option
@pass_context
def add(context: Context, what: str, viewers: tuple[str, ...], span: str) -> None:
    """Share a job's output, or a notebook. A repeated command sets the end of the share again."""
    for_s = parse_span("--for", span, least=_LEAST_S, most=_MOST_S)
    path = _parse_notebook(what)
    if path:
        shares = [context.broker.share_notebook(path, viewer, for_s) for viewer in dict.fromkeys(viewers)]
    else:
        job = find_job(context, what)
        if not job.detached:
            raise UsageError(
                f"{job.run_id} is a notebook's launch, whose output is in its notebook: share a job, or home:NOTEBOOK."
            )
        shares = [context.broker.share_output(job.id, viewer, for_s) for viewer in dict.fromkeys(viewers)]
    lines = [
        f"{share['viewer']} sees {_format_subject(share)} for {format_span(for_s)} at {_build_link(context, share)}"
        for share in shares
    ]
    context.console.print_result([_build_json(context, share) for share in shares], "\n".join(lines))


@share.command("list", short_help="List what you share, and what others share with you.")
@json_option
@pass_context
def list_shares(context: Context) -> None:
    """List what you share, and what others share with you."""
    user = context.user
    # An administrator gets the shares of all users.
    shares = [share for share in context.broker.list_shares() if not user or user in (share["owner"], share["viewer"])]
    now = datetime.now(UTC)
    rows = [
        (
            _format_subject(share),
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


@share.command(short_help="End shares of a job or notebook.")
@click.argument("what", metavar="WHAT", shell_complete=complete_run)
@click.option("--with", "viewers", metavar="NAME", multiple=True, help="Only with this user (with all).")
@json_option
@pass_context
def end(context: Context, what: str, viewers: tuple[str, ...]) -> None:
    """End the shares of a job or notebook; pages that are open end as well."""
    end_shares: Callable[[str, str | None], list[dict[str, Any]]]
    path = _parse_notebook(what)
    if path:
        title = f"{HOME}:{path}"
        ids = {share["id"] for share in context.broker.list_shares() if share["notebook"] == path}
        subjects, end_shares = sorted(ids), context.broker.end_notebook_shares
    else:
        job = find_job(context, what)
        title, subjects, end_shares = job.run_id, [job.id], context.broker.end_shares
    ended = [share for subject in subjects for viewer in viewers or (None,) for share in end_shares(subject, viewer)]
    names = ", ".join(share["viewer"] for share in ended)
    wanted = f" with {', '.join(viewers)}" if viewers else ""
    text = f"{title} is no longer shared with {names}" if ended else f"{title} was not shared{wanted}"
    context.console.print_result([_build_json(context, share) for share in ended], text)


def _parse_notebook(what: str) -> str:
    """Return the path of a notebook below the home; empty for a job.

    Raises:
        UsageError: It is another file.
    """
    remote = parse_path(what)
    if not isinstance(remote, RemotePath) or remote.root != HOME:
        return ""
    path = resolve_remote_path("", remote.path)
    if not path.endswith(".ipynb"):
        raise UsageError(f"{what} is no notebook: only files whose name ends with .ipynb can be shared.")
    return path


def _format_subject(share: dict[str, Any]) -> str:
    """Return the word that names what is shared; a notebook's place is its owner's alone."""
    return share["run_id"] or (f"{HOME}:{share['notebook']}" if share["notebook"] else "-")


def _build_link(context: Context, share: dict[str, Any]) -> str:
    """Return the address of the page; its path alone in a notebook's terminal, which does not know the hub's."""
    return f"{context.hub.url}{share['path']}"


def _build_json(context: Context, share: dict[str, Any]) -> dict[str, Any]:
    """Build the JSON of a share. Later versions may add keys but do not change them."""
    return {
        "run_id": share["run_id"],
        "job": share["job"],
        "notebook": share["notebook"],
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
