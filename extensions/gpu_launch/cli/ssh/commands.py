"""The commands `ssh-config` and `ssh-proxy`."""

from __future__ import annotations

from pathlib import Path

import click

from gpu_launch.cli.connection.hub_client import HubClient
from gpu_launch.cli.context import Context, json_option, pass_context
from gpu_launch.cli.ssh import proxy
from gpu_launch.cli.ssh.files import DEFAULT_PREFIX, SshFiles, build_config, exclude_config, include_config
from gpu_launch.errors import GpuLaunchError


@click.command("ssh-config", short_help="Let ssh, VS Code and rsync reach your notebooks and jobs.")
@click.option("--prefix", metavar="NAME", help=f"First part of the hosts' names ({DEFAULT_PREFIX}).")
@click.option("--user", metavar="NAME", help="Your user name in the containers (that at the hub).")
@click.option("--print", "is_printed", is_flag=True, help="Print the settings; change no file.")
@click.option("--remove", "is_removed", is_flag=True, help="Take the hosts out of ~/.ssh/config.")
@json_option
@pass_context
def ssh_config(context: Context, prefix: str | None, user: str | None, is_printed: bool, is_removed: bool) -> None:
    """Let OpenSSH's client reach your notebooks and running jobs through the hub.

    \b
    ssh gpuhub             your default instance
    ssh gpuhub-big         the instance `big`, or the running job of that name or run id
    ssh gpuhub-train.1     worker 1 of the job `train`

    It makes a key for this machine, and adds one Include line to ~/.ssh/config. scp, sftp, rsync, -L and VS Code's
    Remote-SSH use the same names.
    """
    files = SshFiles.for_hub(context.hub) if prefix is None else SshFiles.locate(prefix)
    prefix = files.prefix
    user_config = Path.home() / ".ssh" / "config"
    if is_removed:
        is_changed = exclude_config(files, user_config)
        text = f"{'Removed from' if is_changed else 'There was nothing to remove in'} {user_config}."
        context.console.print_result({"config": str(user_config), "changed": is_changed}, text)
        return
    if is_printed:
        settings = build_config(files, context.hub, user or context.user, list_server_names(context))
        context.console.print_result({"settings": settings}, settings.rstrip("\n"))
        return
    prepare(context, files, user=user)
    is_changed = include_config(files, user_config)
    value = {"host": prefix, "config": str(files.config), "user_config": str(user_config), "changed": is_changed}
    added = f"{user_config} includes {files.config}." if is_changed else f"{files.config} is up to date."
    context.console.print_result(value, f"{added}\nYour default instance: ssh {prefix}; NAME: ssh {prefix}-NAME")


def prepare(context: Context, files: SshFiles, *, user: str | None = None) -> None:
    """Make the key, and write the settings with the servers that there are now."""
    names = list_server_names(context)
    files.ensure_key()
    files.write_config(context.hub, user or context.user, names)


def list_server_names(context: Context) -> list[str]:
    """Return the names of the user's servers, those that have ended too, without the default one."""
    servers = HubClient(context.hub, context.user).list_servers(stopped=True)
    return [server.name for server in servers if server.name]


@click.command("ssh-proxy", hidden=True)
@click.option("--prefix", required=True)
@click.argument("host", metavar="HOST")
@pass_context
def ssh_proxy(context: Context, prefix: str, host: str) -> None:
    """Connect stdin and stdout with the sshd of a container; ssh runs this command."""
    files = SshFiles.locate(prefix)
    if not (host == prefix or host.startswith(f"{prefix}-")):
        raise GpuLaunchError(f"{host} is not a host of ssh-config: such are {prefix} and {prefix}-NAME.")
    proxy.connect(context, files, host).relay()


COMMANDS: tuple[click.Command, ...] = (ssh_config, ssh_proxy)
