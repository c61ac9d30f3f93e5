"""The commands `instance start`, `list`, `ssh`, `stop`, `suspend`, `resume`, `extend` and `rm`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from datetime import UTC, datetime

import click
from click.shell_completion import CompletionItem

from gpu_launch.cli import tables
from gpu_launch.cli.connection.hub_client import HubClient
from gpu_launch.cli.context import Context, exit_with, json_option, pass_context, terminal_columns
from gpu_launch.cli.follow import INTERRUPTED, convert_exit_code
from gpu_launch.cli.instances import selection, status
from gpu_launch.cli.instances.status import Instance, describe_name
from gpu_launch.cli.ssh.commands import prepare
from gpu_launch.cli.ssh.files import SshFiles
from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.units import format_span, parse_span

#: Limits of a span that can be asked for, seconds; the cluster's own are checked by the broker.
_LEAST_S, _MOST_S = 60, 366 * 86400
_SSH_ARGUMENTS = "gpu_launch.ssh_arguments"


@click.group(short_help="Start and use notebook servers without a browser.")
def instance() -> None:
    """Start and use your notebook servers without a browser. Without a NAME, commands mean the default one."""


def _complete_name(context: click.Context, _: click.Parameter, prefix: str) -> list[CompletionItem]:
    hub = Context(hub_url=context.find_root().params.get("hub"))
    try:
        servers = HubClient(hub.hub, hub.user).list_servers()
    except (GpuLaunchError, OSError, ValueError):
        return []
    return [CompletionItem(server.name) for server in servers if server.name.startswith(prefix)]


_name_argument = click.argument("name", metavar="[NAME]", default="", shell_complete=_complete_name)


@instance.command(short_help="Start an instance, and wait until it is ready.")
@click.option("--profile", metavar="NAME", help="The profile, as on the hub's page.")
@click.option("--model", metavar="GPU", help="A GPU model; the smallest profile that has it.")
@click.option("--image", metavar="IMAGE", help="An image; the smallest profile that has it.")
@click.option("--name", default="", metavar="NAME", help="A name, to have several at once (the default instance).")
@click.option(
    "--keep",
    is_flag=True,
    help="Ask again for its GPU if its node reboots or its container is lost, until you stop it.",
)
@click.option(
    "--no-suspend",
    is_flag=True,
    help="Do not lend its GPU to others while it is idle, where the cluster suspends idle notebooks.",
)
@click.option("-d", "--detach", is_flag=True, help="Do not wait until it is ready.")
@json_option
@pass_context
def start(context: Context, /, *, name: str, keep: bool, no_suspend: bool, detach: bool, **wanted: str | None) -> None:
    """Start an instance, show its place in the queue, and wait until it is ready.

    Ctrl-C leaves it waiting, or running; the same command waits again.
    """
    selection.check_name(name)
    client = HubClient(context.hub, context.user)
    server = client.find_server(name)
    if server is not None and server.is_ready:
        raise UsageError(f"{describe_name(name)} runs already.\nUse it: {_build_command('ssh', name)}")
    if server is not None and server.pending == "stop":
        raise UsageError(f"{describe_name(name)} is being stopped.\nStart it when it is gone: gpu-launch instance list")
    if server is not None and (keep or no_suspend):
        flag = "--keep" if keep else "--no-suspend"
        raise UsageError(
            f"{describe_name(name)} is starting already.\n{flag} is for a new start: {_build_command('stop', name)}"
        )
    if server is None:
        chosen = selection.choose_profile(context.broker.get_cluster(), **wanted)
        image = wanted["image"] and selection.find_image(chosen, wanted["image"])
        # An older hub knows no choice of images.
        other = image if image != chosen.image else None
        client.start(name, chosen.name, image=other, keep=keep, suspend=not no_suspend)
        context.console.print_note(f"gpu-launch: {describe_name(name)} is requested with profile {chosen.name}")
    if detach:
        target = _find_instance(context, client, name)
        context.console.print_result(_build_json(context, target), f"{describe_name(name)}: {target.state}")
        return
    try:
        ready = status.wait_until_ready(
            context, client, name, lambda text: context.console.print_note(f"gpu-launch: {text}")
        )
    except KeyboardInterrupt:
        _report_interrupt(context, client, name)
    _refresh_ssh_config(context)
    text = f"{status.describe_ready(ready)}\nOpen {ready.server.url}lab or: {_build_command('ssh', name)}"
    context.console.print_result(_build_json(context, ready), text)


def _report_interrupt(context: Context, client: HubClient, name: str) -> None:
    """Report that the instance continues, and end the command."""
    server = client.find_server(name)
    if server is None:
        context.console.print_note(f"\ngpu-launch: {describe_name(name)} was not started")
    else:
        target = Instance(server=server, lease=status.find_lease(context, name))
        context.console.print_note(
            f"\ngpu-launch: {describe_name(name)} continues without this command: {status.describe_progress(target)}\n"
            f"gpu-launch: wait again: {_build_command('start', name)}; give it up: {_build_command('stop', name)}"
        )
        if context.console.is_json:
            context.console.print_result(_build_json(context, target), "")
    exit_with(INTERRUPTED)


def _refresh_ssh_config(context: Context) -> None:
    """Add the instance to the hosts that editors offer, if the user has made settings for SSH."""
    files = SshFiles.for_hub(context.hub)
    if files.config.exists():
        prepare(context, files, user=files.read_user())


@instance.command("list")
@json_option
@pass_context
def list_all(context: Context) -> None:
    """List your instances: those that run, start or wait, and names of ended ones."""
    instances = status.sort_instances(status.list_instances(context, HubClient(context.hub, context.user)))
    now = datetime.now(UTC)
    rows = [status.build_row(target, now) for target in instances]
    text = tables.format_table(status.COLUMNS, rows, width=terminal_columns())
    context.console.print_result(
        [_build_json(context, target) for target in instances],
        text if rows else "You have no instances. Start one: gpu-launch instance start --profile PROFILE",
    )


class _SshCommand(click.Command):
    """Takes everything after `--` for ssh, also without a NAME before it."""

    def parse_args(self, context: click.Context, words: list[str]) -> list[str]:
        own = words[: words.index("--")] if "--" in words else words
        context.meta[_SSH_ARGUMENTS] = words[len(own) + 1 :]
        return super().parse_args(context, own)


@instance.command(
    cls=_SshCommand,
    short_help="Open a terminal in an instance, or run a command there.",
)
@_name_argument
@pass_context
def ssh(context: Context, name: str) -> None:
    """Open a terminal in an instance with OpenSSH's client; what follows -- is for ssh, such as a command or -L.

    \b
    gpu-launch instance ssh big
    gpu-launch instance ssh big -- nvidia-smi
    """
    client = HubClient(context.hub, context.user)
    target = client.find_server(name)
    if target is None:
        raise UsageError(f"{describe_name(name)} does not run.\nStart it: {_build_command('start', name)}")
    files = SshFiles.for_hub(context.hub)
    prepare(context, files, user=files.read_user() or None)
    host = files.build_host(name)
    command = ["ssh", "-F", str(files.config), host, *click.get_current_context().meta[_SSH_ARGUMENTS]]
    try:
        code = subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise GpuLaunchError("ssh is missing on this machine: install OpenSSH's client.") from None
    if code:
        exit_with(convert_exit_code(code if code > 0 else 128 - code))


@instance.command(short_help="Stop an instance, or give up its place in the queue.")
@_name_argument
@json_option
@pass_context
def stop(context: Context, name: str) -> None:
    """Stop an instance, or give up its place in the queue; its GPUs are free when its container is gone."""
    client = HubClient(context.hub, context.user)
    _find_instance(context, client, name)
    client.stop(name)
    context.console.print_result({"name": name, "state": "stopping"}, f"{describe_name(name)} is being stopped.")


@instance.command(short_help="Stop an instance and forget its name.")
@_name_argument
@json_option
@pass_context
def rm(context: Context, name: str) -> None:
    """Stop an instance and forget its name, which counts towards the hub's limit; files in the home stay."""
    if not name:
        raise UsageError("The default instance has no name to forget.\nStop it: gpu-launch instance stop")
    client = HubClient(context.hub, context.user)
    if name not in {server.name for server in client.list_servers(stopped=True)}:
        raise _build_missing_error(client, name)
    client.stop(name, remove=True)
    context.console.print_result({"name": name, "state": "removed"}, f"{describe_name(name)} is removed.")


@instance.command(short_help="Lend an instance's GPU; its variables stay.")
@_name_argument
@json_option
@pass_context
def suspend(context: Context, name: str) -> None:
    """Lend an instance's GPU to others: what is on it goes to its node's memory, until a cell runs or `resume`."""
    _change_suspension(context, name, context.broker.suspend_notebook)


@instance.command(short_help="Ask for the GPU again that an instance has lent.")
@_name_argument
@json_option
@pass_context
def resume(context: Context, name: str) -> None:
    """Have a suspended instance wait for its GPU; it continues as soon as it has it."""
    _change_suspension(context, name, context.broker.resume_notebook)


def _change_suspension(context: Context, name: str, change: Callable[[str], None]) -> None:
    client = HubClient(context.hub, context.user)
    target = _find_instance(context, client, name)
    if target.lease is None:
        raise UsageError(f"{describe_name(name)} has no GPU to lend.")
    change(target.lease.id)
    target = _find_instance(context, client, name)
    context.console.print_result(_build_json(context, target), f"{describe_name(name)}: {target.state}")


@instance.command(short_help="Let an instance run for longer.")
@_name_argument
@click.option("--time-limit", required=True, metavar="SPAN", help="The time from now, such as 30m, 4h or 2d.")
@json_option
@pass_context
def extend(context: Context, name: str, time_limit: str) -> None:
    """Let an instance end after SPAN from now, within the cluster's limits and unless others wait for its GPUs."""
    seconds = parse_span("--time-limit", time_limit, least=_LEAST_S, most=_MOST_S)
    target = _find_instance(context, HubClient(context.hub, context.user), name)
    if target.lease is None or not target.lease.is_granted:
        raise UsageError(f"{describe_name(name)} is {target.state}.\nIts time begins when it has its GPUs.")
    if target.lease.expires_at is None:
        raise UsageError(f"{describe_name(name)} has no time limit.\nIt runs until you stop it.")
    lease = context.broker.extend_lease(target.lease.id, seconds)
    context.console.print_result(
        _build_json(context, Instance(server=target.server, lease=lease)),
        f"{describe_name(name)} ends in {format_span(seconds)}.",
    )


def _find_instance(context: Context, client: HubClient, name: str) -> Instance:
    """Return a running, starting or waiting instance.

    Raises:
        UsageError: There is none of that name.
    """
    for target in status.list_instances(context, client, stopped=False):
        if target.server.name == name:
            return target
    raise _build_missing_error(client, name)


def _build_missing_error(client: HubClient, name: str) -> UsageError:
    names = ", ".join(server.name or "(default)" for server in client.list_servers()) or "none"
    missing = f"There is no instance {name}" if name else "Your default instance does not run"
    return UsageError(f"{missing}.\nYour instances: {names}. Start one: {_build_command('start', name)}")


def _build_command(verb: str, name: str) -> str:
    option = f" --name {name}" if verb == "start" and name else f" {name}" if name else ""
    return f"gpu-launch instance {verb}{option}"


def _build_json(context: Context, target: Instance) -> dict[str, object]:
    return status.build_json(target, SshFiles.for_hub(context.hub).build_host(target.server.name))


COMMANDS: tuple[click.Command, ...] = (instance,)
