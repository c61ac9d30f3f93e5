"""`gpuhub up`, `down`, `install`, `status`, `check`, `certificate`, `doctor`, and what supervisord runs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import click

from gpuhub.cli.console import AdminConsole
from gpuhub.cli.options import cluster_file_option, hub_config_option, instance_option, require_root
from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.backends import find_backends
from gpuhub.config.machines.data_network import DATA_NETWORK_NOTE
from gpuhub.config.settings import ClusterSettings


@click.command()
@instance_option
@cluster_file_option
@hub_config_option
@click.option(
    "--engine",
    type=click.Choice(list(find_backends())),
    help="Scheduling backend of the practice closet; default: the one that runs, else builtin.",
)
@click.option(
    "--closet",
    metavar="NAME",
    help="The practice closet, also where this machine has GPUs: practice (three nodes), house (five) or lab (three "
    "with four GPUs each); default: the one that runs or ran last.",
)
@click.option(
    "--real-gpu",
    metavar="NODE",
    help="The node of the practice closet, such as rig3, that has this machine's own GPUs in place of simulated ones; "
    "default: as chosen last, or none with --closet.",
)
@click.option("--refresh", is_flag=True, help="Build all images again, with Debian's current packages.")
@click.option(
    "--monitoring/--no-monitoring",
    default=None,
    help="Run Prometheus on the head node, on loopback; default: as chosen last.",
)
def up(
    paths: Paths,
    cluster_file: Path,
    hub_config: Path,
    *,
    engine: str | None,
    closet: str | None,
    real_gpu: str | None,
    refresh: bool,
    monitoring: bool | None,
) -> None:
    """Start everything; safe to call again."""
    start_instance(
        paths,
        cluster_file,
        hub_config,
        engine=engine,
        closet=closet,
        real_gpu=real_gpu,
        refresh=refresh,
        monitoring=monitoring,
    )


def start_instance(
    paths: Paths,
    cluster_file: Path,
    hub_config: Path,
    *,
    engine: str | None = None,
    closet: str | None = None,
    real_gpu: str | None = None,
    refresh: bool = False,
    monitoring: bool | None = None,
) -> None:
    """Start the instance, as `gpuhub up` does."""
    from gpuhub.ops.console import StepReport
    from gpuhub.ops.deploy import startup

    require_root("up")
    if not hub_config.exists():
        raise SetupError(f"{hub_config}: no such file; call `gpuhub up` in gpuhub's own folder")
    options = startup.StartupOptions(
        settings_file=cluster_file,
        hub_config=hub_config.resolve(),
        source=hub_config.resolve().parent,
        engine=engine,
        closet=closet,
        real_gpu=real_gpu,
        refresh=refresh,
        monitoring=monitoring,
    )
    startup.start_hub(paths, options, StepReport())


@click.command()
@instance_option
@cluster_file_option
@click.option("--purge", is_flag=True, help="Remove the practice closet's images as well.")
def down(paths: Paths, cluster_file: Path, purge: bool) -> None:
    """Stop everything, and leave nothing running."""
    from gpuhub.ops.console import StepReport
    from gpuhub.ops.deploy.shutdown import stop_hub

    require_root("down")
    stop_hub(paths, StepReport(), purge=purge)


@click.command()
@instance_option
@cluster_file_option
@hub_config_option
def install(paths: Paths, cluster_file: Path, hub_config: Path) -> None:
    """Have systemd start everything at each boot of this machine."""
    from gpuhub.ops.deploy import boot_unit

    require_root("install")
    if not hub_config.exists():
        raise SetupError(f"{hub_config}: no such file; call `gpuhub install` in gpuhub's own folder")
    unit = boot_unit.BootUnit(paths=paths, source=hub_config.resolve().parent, cluster_file=cluster_file.resolve())
    is_changed = unit.install(boot_unit.run_systemctl)
    AdminConsole().write(
        f"{unit.file}: {'written' if is_changed else 'up to date'}; systemd starts {paths.instance} at each boot.\n"
        f"Now: sudo systemctl start {unit.name}"
    )


@click.command()
@instance_option
@cluster_file_option
def uninstall(paths: Paths, cluster_file: Path) -> None:
    """Undo `gpuhub install`; what runs continues."""
    from gpuhub.ops.deploy import boot_unit

    require_root("uninstall")
    unit = boot_unit.BootUnit(paths=paths, source=Path.cwd(), cluster_file=cluster_file)
    was_there = unit.uninstall(boot_unit.run_systemctl)
    AdminConsole().write(f"{unit.file}: {'removed' if was_there else 'was not there'}")


@click.command()
@instance_option
@cluster_file_option
def status(paths: Paths, cluster_file: Path) -> None:
    """Show the state of each service."""
    from gpuhub.ops.deploy.programs import Supervisor

    console, supervisor = AdminConsole(), Supervisor(paths)
    if not supervisor.is_running():
        console.write("Nothing runs. Start it with: sudo make up")
        return
    for name, state in supervisor.states().items():
        console.write(f"{name:<12} {state.lower()}")


@click.command()
@instance_option
@cluster_file_option
def check(paths: Paths, cluster_file: Path) -> None:
    """Check cluster.toml without starting anything."""
    from gpuhub.login import kinds
    from gpuhub.login.account_checks import check_accounts
    from gpuhub.notifications import machine_destinations

    console, cluster = AdminConsole(), settings.load(cluster_file)
    kinds.check_files(cluster)
    machine_destinations.load(cluster.notifications)
    for note in (*check_accounts(cluster, paths), *([DATA_NETWORK_NOTE] if cluster.has_data_network else [])):
        console.write(f"{note}.")
    console.write(f"{cluster_file} is valid: {len(cluster.nodes)} nodes, {len(cluster.profiles)} profiles")


@click.command(short_help="Make or renew the hub's certificate, or check the given one.")
@instance_option
@cluster_file_option
def certificate(paths: Paths, cluster_file: Path) -> None:
    """Make or renew the hub's certificate for browsers, or check the one given."""
    from gpuhub.config.head_address import find_head_address
    from gpuhub.tls import public_access

    require_root("certificate")
    cluster = settings.load(cluster_file)
    address = find_head_address(cluster)
    ready = public_access.ensure_certificate(cluster, paths, address)
    AdminConsole().write("\n".join(public_access.describe_certificate(ready, cluster.hub, paths, address)))


@click.command()
@instance_option
@cluster_file_option
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs.")
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write findings, versions, settings and logs to FILE, a .tar.gz for a bug report, without secrets.",
)
def doctor(paths: Paths, cluster_file: Path, names: tuple[str, ...], as_json: bool, bundle: Path | None) -> None:
    """Check the head node, every node and the room, or only the nodes NAME."""
    from gpuhub.ops.doctor import bundle as bundles
    from gpuhub.ops.doctor import findings as finding_formats
    from gpuhub.ops.doctor.diagnosis import diagnose

    require_root("doctor")
    console = AdminConsole()
    if bundle is not None and bundle.exists():
        raise GpuhubError(f"{bundle} exists: name another file, or remove it")
    cluster = load_settings(cluster_file, paths)
    machines = asyncio.run(diagnose(cluster, paths, names))
    if as_json:
        console.write(json.dumps(finding_formats.build_json(machines), indent=2, ensure_ascii=False))
    else:
        for name, findings in machines:
            console.write(f"{name}\n{finding_formats.format_findings(findings, console.width)}\n")
    if bundle is not None:
        bundles.write_bundle(bundle, cluster, cluster_file, paths, machines)
        if not as_json:
            console.write(
                f"{bundle} has findings, versions, settings and the ends of the logs. Secrets are removed; names of "
                "users and addresses of machines are not. Look through it before you send it."
            )
    failing = [name for name, findings in machines if finding_formats.has_failed(findings)]
    if failing:
        raise GpuhubError(f"checks failed on {', '.join(failing)}")


def load_settings(file: Path, paths: Paths) -> ClusterSettings:
    """Load the settings in this folder or, where there are none, those that the services run with."""
    return settings.load(file if file.exists() or not paths.used_cluster_file.exists() else paths.used_cluster_file)


@click.command()
@instance_option
@cluster_file_option
def broker(paths: Paths, cluster_file: Path) -> None:
    """Run the broker in the foreground."""
    from gpuhub.broker import app

    app.run(cluster_file, paths)


@click.command()
@instance_option
@cluster_file_option
def guests(paths: Paths, cluster_file: Path) -> None:
    """Run WireGuard for guests, and answer them, in the foreground."""
    from gpuhub.ops.guests import service

    require_root("guests")
    service.serve(cluster_file, paths)


@click.command()
@instance_option
@cluster_file_option
def proxy(paths: Paths, cluster_file: Path) -> None:
    """Run JupyterHub's proxy in the foreground."""
    from gpuhub.common import secrets
    from gpuhub.common.open_files import raise_open_file_limit
    from gpuhub.config.head_address import build_hub_origin, find_head_address
    from gpuhub.ops.deploy.proxy import build_proxy_command, build_proxy_environment, find_proxy
    from gpuhub.tls import public_access
    from gpuhub.tls.internal_certificates import CertificateStore

    cluster = settings.load(cluster_file)
    https = public_access.find_certificate_files(cluster, paths)
    command = build_proxy_command(
        find_proxy(),
        public=(cluster.hub.bind, cluster.hub.port),
        api_port=cluster.hub.proxy_api_port,
        hub_url=build_hub_origin(cluster, find_head_address(cluster)),
        internal=CertificateStore(paths.internal_certificates) if cluster.has_internal_tls else None,
        https=https,
        has_subdomains=cluster.hub.subdomains,
    )
    is_ours = cluster.hub.tls == "local"
    os.environ |= build_proxy_environment(https, paths, cluster_file.resolve(), is_ours=is_ours)
    raise_open_file_limit()
    os.environ["CONFIGPROXY_AUTH_TOKEN"] = secrets.read_secret(paths, secrets.PROXY_TOKEN)
    os.execvp(command[0], command)  # noqa: S606 - the proxy replaces this process under supervisord
