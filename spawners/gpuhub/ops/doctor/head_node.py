"""Facts about the head node, and the checks of them."""

from __future__ import annotations

import json
import pwd
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

from cryptography import x509

from gpuhub.common.errors import SettingsError
from gpuhub.common.open_files import WANTED, describe_low_limit, raise_open_file_limit
from gpuhub.common.paths import Paths
from gpuhub.common.required_programs import find_missing_packages
from gpuhub.config.head_address import find_head_address
from gpuhub.config.settings import ClusterSettings
from gpuhub.login.account_checks import check_accounts
from gpuhub.ops.deploy import programs
from gpuhub.ops.deploy.database import describe_problem
from gpuhub.ops.deploy.file_server import find_export_problems
from gpuhub.ops.deploy.programs import Supervisor
from gpuhub.ops.doctor import version_checks
from gpuhub.ops.doctor.findings import Finding, failed, ok, warning
from gpuhub.ops.doctor.nodes.node_queries import find_nfs_servers, is_listening
from gpuhub.storage.probe import probe_server
from gpuhub.tls.public_access import SERVER_FILE

#: A certificate that ends sooner than this must be renewed.
RENEW_BEFORE = timedelta(days=30)
_DISK_NOTED_GIB = 10.0
_DISK_TOO_LITTLE_GIB = 1.0
#: The oldest JupyterHub without known vulnerabilities.
_JUPYTERHUB_FLOOR: version_checks.Version = (5, 5, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """Facts about the head node."""

    now: datetime
    jupyterhub: str
    #: Service → supervisord's name of its state; empty where gpuhub does not run.
    programs: Mapping[str, str] = field(default_factory=dict)
    #: Address and service → something listens there.
    ports: Mapping[str, bool] = field(default_factory=dict)
    #: Folder → free space, bytes.
    free: Mapping[str, int] = field(default_factory=dict)
    #: File → the end of the certificate in it, or the problem with the file.
    certificates: Mapping[str, datetime | str] = field(default_factory=dict)
    #: File server → its problem; None where it answers.
    storage: Mapping[str, str | None] = field(default_factory=dict)
    #: A line for each thing that this machine, as file server, does not export as the settings say.
    export_problems: tuple[str, ...] = ()
    #: A line for each conflict in `uids.json`.
    uid_conflicts: tuple[str, ...] = ()
    #: Debian packages of programs that gpuhub starts here and that are missing.
    missing_packages: tuple[str, ...] = ()
    #: Users for whom cluster.toml must name an account, and notes on names that are accounts of this machine as well.
    account_mistakes: tuple[str, ...] = ()
    account_notes: tuple[str, ...] = ()
    #: The limit of open files that this machine permits.
    open_files: int = WANTED
    #: PostgreSQL's address, where hub and broker use that, and why it cannot be used.
    database: str | None = None
    database_problem: str | None = None
    #: Folders of secrets that other users than root can read.
    exposed_secrets: tuple[str, ...] = ()


def read_head_facts(cluster: ClusterSettings, paths: Paths) -> HeadFacts:
    """Read all facts about the head node; blocks for some seconds at most."""
    states = _states(paths)
    account_mistakes, account_notes = _check_accounts(cluster, paths)
    return HeadFacts(
        now=datetime.now(UTC),
        jupyterhub=_version("jupyterhub"),
        programs=states,
        ports=_ports(cluster) if states else {},
        free={str(folder): shutil.disk_usage(folder).free for folder in (paths.state, paths.log) if folder.exists()},
        certificates=find_certificate_ends(cluster, paths),
        storage={
            f"the file server {server.display_name}": probe_server(server, cluster.storage.patience)
            for server in find_nfs_servers(cluster)
        },
        export_problems=tuple(find_export_problems(cluster, paths)),
        open_files=raise_open_file_limit(),
        uid_conflicts=tuple(find_uid_conflicts(paths.state / "uids.json")),
        missing_packages=tuple(find_missing_packages({"head"})),
        account_mistakes=account_mistakes,
        account_notes=account_notes,
        database=cluster.database.url,
        database_problem=describe_problem(cluster.database, paths),
        exposed_secrets=tuple(find_exposed_secrets(paths.secrets)),
    )


def _check_accounts(cluster: ClusterSettings, paths: Paths) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        return (), tuple(check_accounts(cluster, paths))
    except SettingsError as error:
        return tuple(str(error).splitlines()), ()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _states(paths: Paths) -> dict[str, str]:
    supervisor = Supervisor(paths)
    if not supervisor.is_running():
        return {}
    services = (programs.PROXY, programs.BROKER, programs.HUB)
    states = supervisor.states()
    return {name: states.get(name, "NOT STARTED") for name in services}


def _ports(cluster: ClusterSettings) -> dict[str, bool]:
    hub = cluster.hub
    head = find_head_address(cluster)
    public = "127.0.0.1" if hub.bind in {"0.0.0.0", "127.0.0.1"} else "::1" if hub.bind == "::" else hub.bind  # noqa: S104
    addresses = {
        f"{public}:{hub.port} (browsers)": (public, hub.port),
        f"{head}:{hub.api_port} (JupyterHub's API)": (head, hub.api_port),
        f"{head}:{hub.broker_port} (broker)": (head, hub.broker_port),
    }
    return {name: is_listening(*address) for name, address in addresses.items()}


def find_certificate_ends(cluster: ClusterSettings, paths: Paths) -> dict[str, datetime | str]:
    """Return the ends of the certificates for browsers and Docker daemons, and of the internal one that ends first."""
    files = [file for file in (cluster.hub.certificate,) if file is not None]
    files += [file for file in (paths.authority, paths.secrets / SERVER_FILE) if file.exists()]
    files += [file for node in cluster.nodes if node.tls is not None for file in (node.tls.ca, node.tls.cert)]
    ends = {str(file): read_certificate_end(file) for file in files}
    internal = {str(file): read_certificate_end(file) for file in paths.internal_certificates.rglob("*.crt")}
    if internal:
        # Unreadable files count as the first to end.
        first = min(internal, key=lambda file: (isinstance(internal[file], datetime), internal[file]))
        ends[first] = internal[first]
    return ends


def read_certificate_end(file: Path) -> datetime | str:
    """Return the end of the first certificate in a PEM file, or the problem with the file."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:
        return "no certificate in PEM form"


def find_uid_conflicts(file: Path) -> Iterator[str]:
    """Return a line for each number in `uids.json` that two users, or an account of this machine, have as well."""
    if not file.exists():
        return
    numbers: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
    owners: dict[int, str] = {}
    for name, number in numbers.items():
        if number in owners:
            yield f"{name} and {owners[number]} have {number}"
        owners[number] = name
        try:
            account = pwd.getpwuid(number).pw_name
        except KeyError:
            continue
        if account != name:
            yield f"{name} has {number}, which is the account {account} on this machine"


def find_exposed_secrets(folder: Path, *, owner: int = 0) -> Iterator[str]:
    """Return the folder of secrets if other users than its owner, by default root, can enter it."""
    if not folder.exists():
        return
    if folder.stat().st_uid != owner or stat.S_IMODE(folder.stat().st_mode) & 0o077:
        yield str(folder)


def check_head(head: HeadFacts) -> Iterator[Finding]:
    """Check all facts about the head node."""
    yield from _check_versions(head)
    yield _check_programs(head)
    yield from _check_running(head)
    for folder, free in head.free.items():
        gib = free / 1024**3
        value = f"{gib:.0f} GiB free at {folder}"
        if gib < _DISK_TOO_LITTLE_GIB:
            yield failed("disk", value, "free some space: databases and logs need it")
        elif gib < _DISK_NOTED_GIB:
            yield warning("disk", value, "images are built there and need space")
        else:
            yield ok("disk", value)
    for file, end in head.certificates.items():
        yield check_certificate(file, end, head.now)
    for server, failure in head.storage.items():
        if failure is None:
            yield ok("storage", f"{server} answers")
        else:
            yield failed(
                "storage",
                failure,
                "start it, or let it through its firewall; users cannot start notebooks until it answers",
            )
    yield from _check_database(head)
    for problem in head.export_problems:
        yield failed("file server", problem, "`sudo make up` exports what cluster.toml says")
    yield _check_open_files(head.open_files)
    yield from _check_users(head)
    if head.exposed_secrets:
        yield failed(
            "secrets", f"other users than root can read {', '.join(head.exposed_secrets)}", "chmod 600, and chown root"
        )
    else:
        yield ok("secrets", "only root can read them")


def _check_database(head: HeadFacts) -> Iterator[Finding]:
    if head.database is None:
        return
    if head.database_problem is None:
        yield ok("database", f"{head.database} answers")
    else:
        yield failed("database", head.database_problem, "until it answers, nothing can be started or ended")


def _check_users(head: HeadFacts) -> Iterator[Finding]:
    if head.uid_conflicts:
        yield failed(
            "accounts",
            "; ".join(head.uid_conflicts),
            "two users with one number own each other's files: give one of the accounts another number",
        )
    else:
        yield ok("accounts", "every user has a different number")
    for mistake in head.account_mistakes:
        yield failed("names", mistake, "until then, this user cannot start anything")
    for note in head.account_notes:
        yield warning("names", note, "see *Names and accounts* in docs/login.md")


def check_certificate(file: str, end: datetime | str, now: datetime) -> Finding:
    """Check the end of a certificate, or report that it cannot be read."""
    if isinstance(end, str):
        return failed("certificate", f"{file}: {end}", "install a PEM certificate that root can read")
    if end <= now:
        return failed("certificate", f"{file} ended on {end:%Y-%m-%d}", "renew it")
    if end - now < RENEW_BEFORE:
        return warning("certificate", f"{file} ends on {end:%Y-%m-%d}", "renew it")
    return ok("certificate", f"{file} is valid until {end:%Y-%m-%d}")


def _check_open_files(limit: int) -> Finding:
    if (problem := describe_low_limit(limit)) is None:
        return ok("open files", f"{limit} or more")
    value, _, remedy = problem.partition(". ")
    return warning("open files", value, remedy)


def _check_versions(head: HeadFacts) -> Iterator[Finding]:
    version = version_checks.parse_version(head.jupyterhub)
    floor = version_checks.format_version(_JUPYTERHUB_FLOOR)
    if version is None or version < _JUPYTERHUB_FLOOR:
        yield failed("jupyterhub", head.jupyterhub or "not installed", f"{floor} or newer is needed: `sudo make up`")
    else:
        yield ok("jupyterhub", head.jupyterhub)


def _check_programs(head: HeadFacts) -> Finding:
    if head.missing_packages:
        packages = " ".join(head.missing_packages)
        return failed(
            "programs",
            f"gpuhub starts programs that are missing here, of the packages {packages}",
            f"apt-get install {packages}",
        )
    return ok("programs", "everything that gpuhub starts is installed")


def _check_running(head: HeadFacts) -> Iterator[Finding]:
    if not head.programs:
        yield warning("services", "gpuhub does not run", "`sudo make up`")
        return
    stopped = [f"{name} ({state})" for name, state in head.programs.items() if state != "RUNNING"]
    if stopped:
        yield failed("services", f"not running: {', '.join(stopped)}", "see their logs, then `sudo make up`")
    else:
        yield ok("services", f"{', '.join(head.programs)} run")
    for address, is_open in head.ports.items():
        if not is_open:
            yield failed("ports", f"nothing listens at {address}", "see the service's log, then `sudo make up`")
