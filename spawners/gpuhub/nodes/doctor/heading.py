"""Looks at the head node itself; what it finds is judged in `head_checks`."""

from __future__ import annotations

import json
import pwd
import shutil
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from cryptography import x509

from gpuhub.head import programs
from gpuhub.head.supervisor import Supervisor
from gpuhub.nodes.doctor.head_checks import HeadFacts
from gpuhub.nodes.doctor.looking import is_listening, nfs_servers
from gpuhub.nodes.head import head_address
from gpuhub.paths import Paths
from gpuhub.settings import Cluster
from gpuhub.storage.probe import find_trouble
from gpuhub.trust.certificates import SERVER


def look_at_head(cluster: Cluster, paths: Paths) -> HeadFacts:
    """Everything that is checked of the head node; blocks for some seconds at most."""
    states = _states(paths)
    return HeadFacts(
        now=datetime.now(UTC),
        jupyterhub=_version("jupyterhub"),
        programs=states,
        ports=_ports(cluster) if states else {},
        free={str(folder): shutil.disk_usage(folder).free for folder in (paths.state, paths.log) if folder.exists()},
        certificates=find_ends(cluster, paths),
        storage={
            f"the file server {server.shown}": find_trouble(server, cluster.storage.patience)
            for server in nfs_servers(cluster)
        },
        uid_troubles=tuple(find_uid_troubles(paths.state / "uids.json")),
        exposed=tuple(find_exposed(paths.secrets)),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _states(paths: Paths) -> dict[str, str]:
    supervisor = Supervisor(paths)
    if not supervisor.is_running():
        return {}
    wanted = (programs.PROXY, programs.BROKER, programs.HUB)
    found = supervisor.states()
    return {name: found.get(name, "NOT STARTED") for name in wanted}


def _ports(cluster: Cluster) -> dict[str, bool]:
    hub = cluster.hub
    head = head_address(cluster)
    public = "127.0.0.1" if hub.bind in {"0.0.0.0", "127.0.0.1"} else "::1" if hub.bind == "::" else hub.bind  # noqa: S104
    places = {
        f"{public}:{hub.port} (browsers)": (public, hub.port),
        f"{head}:{hub.api_port} (JupyterHub's API)": (head, hub.api_port),
        f"{head}:{hub.broker_port} (broker)": (head, hub.broker_port),
    }
    return {name: is_listening(*place) for name, place in places.items()}


def find_ends(cluster: Cluster, paths: Paths) -> dict[str, datetime | str]:
    """Of all whose end would stop something: browsers', the nodes' Docker daemons', and the first of the parts' own."""
    files = [file for file in (cluster.hub.certificate,) if file is not None]
    files += [file for file in (paths.authority, paths.secrets / SERVER) if file.exists()]
    files += [file for node in cluster.nodes if node.tls is not None for file in (node.tls.ca, node.tls.cert)]
    ends = {str(file): read_end(file) for file in files}
    own = {str(file): read_end(file) for file in paths.internal_certificates.rglob("*.crt")}
    if own:
        # Those that cannot be read first.
        first = min(own, key=lambda file: (isinstance(own[file], datetime), own[file]))
        ends[first] = own[first]
    return ends


def read_end(file: Path) -> datetime | str:
    """When the first certificate of a PEM file ends, or what is wrong with the file."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:
        return "no certificate in PEM form"


def find_uid_troubles(file: Path) -> Iterator[str]:
    """Numbers in `uids.json` that two users have, or that an account of this machine has got meanwhile."""
    if not file.exists():
        return
    kept: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
    owners: dict[int, str] = {}
    for name, number in kept.items():
        if number in owners:
            yield f"{name} and {owners[number]} have {number}"
        owners[number] = name
        try:
            account = pwd.getpwuid(number).pw_name
        except KeyError:
            continue
        if account != name:
            yield f"{name} has {number}, which is the account {account} on this machine"


def find_exposed(folder: Path) -> Iterator[str]:
    """Secrets that others than root can read: all below a folder that others can enter."""
    if not folder.exists():
        return
    if folder.stat().st_uid != 0 or stat.S_IMODE(folder.stat().st_mode) & 0o077:
        yield str(folder)
