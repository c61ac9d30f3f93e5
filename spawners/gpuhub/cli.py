"""The command `gpuhub`: up, down, status, check, the administrator's commands, and what supervisord runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gpuhub import settings
from gpuhub.admin import parser as admin
from gpuhub.errors import GpuhubError, SetupError
from gpuhub.nodes.adding import parser as nodes
from gpuhub.paths import DEFAULT_INSTANCE, Paths


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; expected failures are one or a few lines on standard error and exit status 1."""
    options = build_parser().parse_args(arguments)
    try:
        options.run(options, Paths(options.instance))
    except GpuhubError as error:
        print(f"gpuhub: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("gpuhub: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = argparse.ArgumentParser(prog="gpuhub", description="Share a few GPU machines through JupyterHub.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("up", _up, "bring everything up; safe to call again"),
        ("down", _down, "stop everything and leave nothing running"),
        ("status", _status, "show what runs"),
        ("check", _check, "check cluster.toml without starting anything"),
        ("broker", _broker, "run the broker in the foreground"),
        ("proxy", _proxy, "run JupyterHub's proxy in the foreground"),
        ("certificate", _certificate, "make or renew the hub's certificate for browsers, or check the one given"),
        ("closet-slurm", _closet_slurm, "run one daemon of a practice closet's Slurm in the foreground"),
        ("closet-node", _closet_node, "run the Docker daemon of a practice closet's node in the foreground"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("--instance", default=DEFAULT_INSTANCE, help="default: %(default)s")
        command.add_argument(
            "--cluster-file", type=Path, default=Path("cluster.toml"), help="the settings; default: ./%(default)s"
        )
        if name == "up":
            command.add_argument(
                "--hub-config", type=Path, default=Path("jupyterhub_config.py"), help="default: ./%(default)s"
            )
            command.add_argument(
                "--engine",
                choices=["builtin", "slurm"],
                help="of the practice closet; default: the one that runs, else builtin",
            )
        if name == "closet-node":
            command.add_argument("node", help="its name, such as rig1")
        if name == "closet-slurm":
            command.add_argument("daemon", help="munged, slurmctld, or a node's name for its slurmd")
        if name == "down":
            command.add_argument("--purge", action="store_true", help="remove the practice closet's images as well")
    node = admin.add_commands(commands, _admin)
    nodes.add_commands(commands, node, _nodes)
    return parser


def _up(options: argparse.Namespace, paths: Paths) -> None:
    from gpuhub.head import bring_up
    from gpuhub.head.report import Report

    _need_root("up")
    if not options.hub_config.exists():
        raise SetupError(f"{options.hub_config}: no such file; call `gpuhub up` in gpuhub's own folder")
    asked = bring_up.Options(
        settings_file=options.cluster_file,
        hub_config=options.hub_config.resolve(),
        source=options.hub_config.resolve().parent,
        engine=getattr(options, "engine", None),
    )
    bring_up.bring_up(paths, asked, Report())


def _down(options: argparse.Namespace, paths: Paths) -> None:
    from gpuhub.head.bring_down import bring_down
    from gpuhub.head.report import Report

    _need_root("down")
    bring_down(paths, Report(), purge=options.purge)


def _status(options: argparse.Namespace, paths: Paths) -> None:
    from gpuhub.head.supervisor import Supervisor

    supervisor = Supervisor(paths)
    if not supervisor.is_running():
        print("Nothing runs. Start it with: sudo make up")
        return
    for name, state in supervisor.states().items():
        print(f"{name:<12} {state.lower()}")


def _admin(options: argparse.Namespace, paths: Paths) -> None:
    import asyncio

    from gpuhub.admin import commands
    from gpuhub.admin.client import open_broker

    async def run() -> None:
        client = open_broker(paths)
        try:
            await commands.run(options, client, commands.Console())
        finally:
            await client.close()

    _need_root(options.action.replace("-", " "))
    asyncio.run(run())


def _nodes(options: argparse.Namespace, paths: Paths) -> None:
    from gpuhub.admin.commands import Console
    from gpuhub.nodes.adding import commands

    _need_root(options.action.replace("-", " "))
    commands.run(options, paths, Console(), lambda: _up(options, paths))


def _check(options: argparse.Namespace, paths: Paths) -> None:
    from gpuhub.login import files

    cluster = settings.load(options.cluster_file)
    files.check_files(cluster)
    print(f"{options.cluster_file} is right: {len(cluster.nodes)} nodes, {len(cluster.profiles)} profiles")


def _broker(options: argparse.Namespace, paths: Paths) -> None:
    from gpuhub.broker import main as broker

    broker.run(options.cluster_file, paths)


def _proxy(options: argparse.Namespace, paths: Paths) -> None:
    from gpuhub import secrets, urls
    from gpuhub.head import programs
    from gpuhub.nodes.head import head_address
    from gpuhub.trust import certificates
    from gpuhub.trust.internal import Store

    cluster = settings.load(options.cluster_file)
    https = certificates.find_files(cluster, paths)
    command = programs.build_proxy_command(
        programs.find_proxy(),
        public=(cluster.hub.bind, cluster.hub.port),
        api_port=cluster.hub.proxy_api_port,
        hub_url=urls.hub_origin(cluster, head_address(cluster)),
        internal=Store(paths.internal_certificates) if cluster.has_internal_tls else None,
        https=https,
        has_subdomains=cluster.hub.subdomains,
    )
    is_ours = cluster.hub.tls == "local"
    os.environ |= programs.build_proxy_environment(https, paths, options.cluster_file.resolve(), is_ours=is_ours)
    os.environ["CONFIGPROXY_AUTH_TOKEN"] = secrets.read_secret(paths, secrets.PROXY_TOKEN)
    os.execvp(command[0], command)  # noqa: S606 - the proxy takes this process's place under supervisord


def _certificate(options: argparse.Namespace, paths: Paths) -> None:
    from gpuhub.nodes.head import head_address
    from gpuhub.trust import certificates, trusting

    _need_root("certificate")
    cluster = settings.load(options.cluster_file)
    address = head_address(cluster)
    ready = certificates.ensure(cluster, paths, address)
    print("\n".join(trusting.describe(ready, cluster.hub, paths, address)))


def _closet_node(options: argparse.Namespace, paths: Paths) -> None:
    from gpuhub.closet import lifecycle, plan

    closet = plan.practice_plan(paths.instance)
    names = [node.name for node in closet.nodes]
    if options.node not in names:
        raise SetupError(f"{options.node!r} is no node of the practice closet: there are {', '.join(names)}")
    command = lifecycle.dockerd_command(closet, closet.node(options.node), paths)
    os.execvp(command[0], command)  # noqa: S606 - as above


def _closet_slurm(options: argparse.Namespace, paths: Paths) -> None:
    from gpuhub.closet import plan, slurm, slurm_daemons

    closet = plan.practice_plan(paths.instance)
    forget = options.daemon == slurm_daemons.SLURMCTLD and slurm.take_forget(paths)
    command = slurm_daemons.build_command(closet, paths, options.daemon, forget=forget)
    os.execvp(command[0], command)  # noqa: S606 - as above


def _need_root(command: str) -> None:
    if os.geteuid() != 0:
        raise SetupError(f"`gpuhub {command}` needs root, for Docker and for gpuhub's own secrets: run it with sudo")
