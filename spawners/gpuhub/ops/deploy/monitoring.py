"""Prometheus beside the hub: its files, and its program under supervisord.

It runs as Debian's user `prometheus`, listens on loopback only, and scrapes hub and broker through the hub's own
address with the token of the service `gpuhub-metrics`, as a Prometheus anywhere else would.
"""

from __future__ import annotations

import ipaddress
import json
import os
import pwd
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpuhub.common.errors import SetupError
from gpuhub.common.files import replace_file
from gpuhub.common.paths import Paths
from gpuhub.common.secrets import METRICS_TOKEN, read_secret
from gpuhub.config.head_address import format_host
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.deploy.programs import PROMETHEUS, Program
from gpuhub.tls import public_access

#: The user of Debian's package, and of the data folder.
USER = "prometheus"
#: Path of the alert rules below gpuhub's source tree.
RULES = Path("docs/monitoring/alerts.yml")
#: Path of each scraped service below the hub's address, by Prometheus' name of the job; the rules use these names.
TARGETS = {"gpuhub-broker": "/services/broker/api/v1/metrics", "gpuhub-hub": "/hub/metrics"}
SCRAPE_INTERVAL = "15s"


def build_config(cluster: ClusterSettings, paths: Paths, head_address: str) -> dict[str, Any]:
    """Return Prometheus' configuration; its file has it as JSON, which is YAML as well."""
    scheme, target, tls = _find_target(cluster, paths, head_address)
    common = {
        "scheme": scheme,
        "authorization": {"type": "token", "credentials_file": str(paths.prometheus / "token")},
        **({"tls_config": tls} if tls else {}),
        "static_configs": [{"targets": [target]}],
    }
    alertmanager = cluster.monitoring.alertmanager
    alerting = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    return {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL},
        "rule_files": [str(paths.prometheus / "alerts.yml")],
        **({"alerting": alerting} if alertmanager else {}),
        "scrape_configs": [{"job_name": name, "metrics_path": path, **common} for name, path in TARGETS.items()],
    }


def _find_target(cluster: ClusterSettings, paths: Paths, head_address: str) -> tuple[str, str, Mapping[str, Any]]:
    """Return scheme, host with port, and TLS options of the hub's address as this machine reaches it."""
    hub = cluster.hub
    if hub.subdomains:
        # The proxy routes by name.
        url = urlsplit(public_access.build_public_url(hub, head_address))
        default = 443 if url.scheme == "https" else 80
        host = f"{format_host(url.hostname or '')}:{url.port or default}"
        return url.scheme, host, {"ca_file": str(paths.authority)} if hub.tls == "local" else {}
    bound = ipaddress.ip_address(hub.bind)
    loopback = "::1" if bound.version == 6 else "127.0.0.1"
    host = f"{format_host(loopback if bound.is_unspecified else hub.bind)}:{hub.port}"
    match hub.tls:
        case "local":
            return "https", host, {"ca_file": str(paths.authority), "server_name": "localhost"}
        case "files":
            # The connection stays on this machine, whose addresses are not in the certificate.
            return "https", host, {"insecure_skip_verify": True}
        case _:
            return "http", host, {}


def check_port(port: int) -> None:
    """Check that no other program, such as a Prometheus of the site, listens on the port.

    Raises:
        SetupError: One does.
    """
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise SetupError(
            f"Prometheus cannot listen on 127.0.0.1:{port} ({os.strerror(error.errno or 0)}): set another port in "
            "cluster.toml, [monitoring] port, or `sudo make up MONITORING=0` and scrape gpuhub from the Prometheus "
            "that runs (docs/monitoring.md)"
        ) from error


def build_program(cluster: ClusterSettings, paths: Paths) -> Program:
    """Return the program.

    Raises:
        SetupError: Prometheus is not installed.
    """
    command = shutil.which("prometheus")
    if command is None:
        raise SetupError(
            "Prometheus is not installed: `sudo make up MONITORING=1` installs it, MONITORING=0 does without"
        )
    settings = cluster.monitoring
    return Program(
        name=PROMETHEUS,
        command=(
            command,
            f"--config.file={paths.prometheus / 'prometheus.yml'}",
            f"--storage.tsdb.path={paths.prometheus / 'data'}",
            f"--storage.tsdb.retention.time={settings.retention}s",
            f"--storage.tsdb.retention.size={settings.max_size}B",
            f"--web.listen-address=127.0.0.1:{settings.port}",
        ),
        directory=paths.state,
        priority=400,
        stop_wait_s=30,
        user=USER,
    )


def ensure_files(cluster: ClusterSettings, paths: Paths, source: Path, head_address: str) -> bool:
    """Write Prometheus' files, which only it and root can read; return whether any of them changed.

    Args:
        source: gpuhub's source tree, which has the rules.

    Raises:
        SetupError: Debian's user `prometheus` is missing.
    """
    try:
        owner = pwd.getpwnam(USER)
    except KeyError:
        raise SetupError(f"there is no user {USER!r}: Debian's package prometheus makes it") from None
    for folder in (paths.prometheus, paths.prometheus / "data"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    files = {
        "prometheus.yml": json.dumps(build_config(cluster, paths, head_address), indent=2) + "\n",
        "alerts.yml": (source / RULES).read_text(encoding="utf-8"),
        "token": read_secret(paths, METRICS_TOKEN),
    }
    changed = [name for name, text in files.items() if _ensure_file(paths.prometheus / name, text, owner)]
    return bool(changed)


def _ensure_file(file: Path, text: str, owner: pwd.struct_passwd) -> bool:
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return False
    replace_file(file, text, mode=0o400, owner=(owner.pw_uid, owner.pw_gid))
    return True
