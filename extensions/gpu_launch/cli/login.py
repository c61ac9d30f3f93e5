"""The commands `login`, `logout`, `hubs`, `status`, `completion` and `skill`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from gpu_launch.cli import tables
from gpu_launch.cli.connection import credentials
from gpu_launch.cli.connection.hub_api import check_hub, check_token, fetch_token_end
from gpu_launch.cli.context import Context, json_option, pass_context, terminal_columns
from gpu_launch.errors import GpuLaunchError, UsageError

_MAX_TOKEN_LENGTH = 4096


@click.command()
@click.argument("hub_url", metavar="HUB_URL")
@click.option(
    "--token-file", metavar="FILE", type=click.Path(allow_dash=True), help="Read the token from a file; - for stdin."
)
@click.option("--ca", metavar="FILE", type=click.Path(), help="The hub's own certificate authority, as PEM.")
@json_option
@pass_context
def login(context: Context, hub_url: str, token_file: str | None, ca: str | None) -> None:
    """Keep a token for a hub, and use that hub from now on.

    The token is made on the hub's page HUB_URL/hub/token. It is asked for here, not shown, and kept in a file that only
    you can read.
    """
    url = credentials.parse_url(hub_url)
    hub = credentials.Hub(url=url, broker_url=credentials.build_broker_url(url), token="", ca=_read_ca(ca))
    # Checked before asking for the token, so that it is sent to a hub only.
    check_hub(hub)
    hub = check_token(replace(hub, token=_read_token(url, token_file)))
    path = credentials.get_config_file()
    credentials.save_hubs(path, credentials.load_hubs(path).with_hub(hub))
    end = fetch_token_end(hub)
    text = f"Logged in to {url} as {hub.user}."
    if end is not None:
        text += f" The token is valid until {end[:10]}."
    context.console.print_result({"hub": url, "user": hub.user, "expires_at": end}, text)


def _read_ca(path: str | None) -> str:
    if path is None:
        return ""
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError as error:
        raise UsageError(f"--ca {path} cannot be read: {error.strerror}.") from None
    except UnicodeError:
        raise UsageError(
            f"--ca {path} is not a certificate in PEM form: such a file begins with -----BEGIN CERTIFICATE-----."
        ) from None


def _read_token(url: str, path: str | None) -> str:
    if path == "-" or (path is None and not sys.stdin.isatty()):
        text = sys.stdin.read(_MAX_TOKEN_LENGTH)
    elif path is not None:
        try:
            text = Path(path).read_text(encoding="ascii", errors="replace")[:_MAX_TOKEN_LENGTH]
        except OSError as error:
            raise UsageError(f"--token-file {path} cannot be read: {error.strerror}.") from None
    else:
        click.echo(f"Open {url}/hub/token, request a token, and paste it here.", err=True)
        text = click.prompt("Token", hide_input=True, err=True)
    token = text.strip()
    if not token:
        raise UsageError("No token was given.")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UsageError("This is not a token: a token is one word of letters and digits.")
    return token


@click.command()
@click.argument("hub_url", metavar="[HUB_URL]", required=False)
@json_option
@pass_context
def logout(context: Context, hub_url: str | None) -> None:
    """Forget the token for a hub (the one in use). Revoke it on the hub's page HUB_URL/hub/token."""
    path = credentials.get_config_file()
    hubs = credentials.load_hubs(path)
    url = credentials.parse_url(hub_url or context.hub_url or hubs.default) if hub_url or hubs.default else ""
    if hubs.find(url) is None:
        raise UsageError(f"You are not logged in{f' to {url}' if url else ''}.")
    credentials.save_hubs(path, hubs.without_hub(url))
    text = f"Logged out of {url}. The token itself is still valid: revoke it at {url}/hub/token."
    context.console.print_result({"hub": url}, text)


@click.command("hubs", short_help="List the hubs you are logged in to.")
@click.option("--use", "hub_url", metavar="URL", help="Use this one from now on.")
@json_option
@pass_context
def list_hubs(context: Context, hub_url: str | None) -> None:
    """List the hubs you are logged in to; * marks the one in use."""
    path = credentials.get_config_file()
    hubs = credentials.load_hubs(path)
    if hub_url is not None:
        hub = hubs.find(credentials.parse_url(hub_url))
        if hub is None:
            raise UsageError(f"You are not logged in to {hub_url}: gpu-launch login {hub_url}")
        hubs = hubs.with_hub(hub)
        credentials.save_hubs(path, hubs)
    sorted_hubs = sorted(hubs.hubs, key=lambda hub: hub.url)
    lines = [f"{'*' if hub.url == hubs.default else ' '} {hub.url} as {hub.user}" for hub in sorted_hubs]
    value = [{"hub": hub.url, "user": hub.user, "is_default": hub.url == hubs.default} for hub in sorted_hubs]
    context.console.print_result(value, "\n".join(lines) or "You are not logged in: gpu-launch login https://YOUR-HUB")


@click.command()
@json_option
@pass_context
def status(context: Context) -> None:
    """Show the nodes, their GPUs, and what is free."""
    cluster = context.broker.get_cluster()
    rows = [tables.build_node_row(node) for node in cluster.nodes]
    text = tables.format_table(tables.NODE_COLUMNS, rows, width=terminal_columns())
    gpus = [gpu for node in cluster.nodes for gpu in node.gpus]
    free = sum(map(tables.is_free, gpus))
    text += f"\n\n{free} of {len(gpus)} GPUs free, {cluster.waiting} waiting"
    context.console.print_result(tables.build_cluster_json(cluster), text)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete gpu-launch's words.

    \b
    bash: eval "$(gpu-launch completion bash)" in ~/.bashrc
    zsh:  eval "$(gpu-launch completion zsh)" in ~/.zshrc
    fish: gpu-launch completion fish > ~/.config/fish/completions/gpu-launch.fish
    """
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    root = click.get_current_context().find_root().command
    if completion_class is None:
        raise GpuLaunchError(f"This version of click has no completion for {shell}.")
    click.echo(completion_class(root, {}, "gpu-launch", "_GPU_LAUNCH_COMPLETE").source())


@click.command()
def skill() -> None:
    """Print instructions for an AI agent that uses this command, as a SKILL.md."""
    click.echo(Path(__file__).with_name("SKILL.md").read_text(encoding="utf-8"), nl=False)


COMMANDS: tuple[click.Command, ...] = (login, logout, list_hubs, status, completion, skill)
