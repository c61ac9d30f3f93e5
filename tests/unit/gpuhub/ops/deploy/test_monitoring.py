"""Prometheus' configuration and files on the head node."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.deploy import monitoring, programs
from gpuhub.ops.deploy.programs import build_config as build_supervisor_config
from tests.support.docker.simulated_nodes import build_cluster
from tests.support.paths import FolderPaths

HEAD = "192.168.1.20"
SOURCE = Path(__file__).parents[5]
LOCAL = {"bind": "0.0.0.0", "hostnames": ["gpuhub.lan"], "port": 443}
FILES = {**LOCAL, "https": "files", "certificate": "/c.pem", "key": "/k.pem"}


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """An instance with its token; this process's user is Debian's user."""
    monkeypatch.setattr(pwd, "getpwnam", lambda _name: pwd.getpwuid(os.getuid()))
    paths = FolderPaths("ghunit", tmp_path)
    paths.secrets.mkdir()
    (paths.secrets / "metrics-token").write_text("4711")
    return paths


def cluster(hub: dict[str, Any] | None = None, **values: Any) -> ClusterSettings:
    raw = build_cluster().model_dump(mode="json", exclude_unset=True)
    return ClusterSettings.model_validate({**raw, "hub": hub or {}, "monitoring": values})


def scrape(config: dict[str, Any]) -> dict[str, Any]:
    """Return the one configuration that both services share."""
    broker, hub = config["scrape_configs"]
    assert (broker.pop("job_name"), broker.pop("metrics_path")) == ("gpuhub-broker", "/services/broker/api/v1/metrics")
    assert (hub.pop("job_name"), hub.pop("metrics_path")) == ("gpuhub-hub", "/hub/metrics")
    assert broker == hub
    return broker


@pytest.mark.parametrize(
    ("hub", "scheme", "target", "tls"),
    [
        ({}, "http", "127.0.0.1:8000", None),
        ({"https": "proxy", "url": "https://gpu.example.org"}, "http", "127.0.0.1:8000", None),
        (LOCAL, "https", "127.0.0.1:443", {"ca_file": "{state}/authority.pem", "server_name": "localhost"}),
        ({"bind": "::"}, "https", "[::1]:8000", {"ca_file": "{state}/authority.pem", "server_name": "localhost"}),
        (FILES, "https", "127.0.0.1:443", {"insecure_skip_verify": True}),
        (
            {**LOCAL, "bind": "10.0.0.7"},
            "https",
            "10.0.0.7:443",
            {"ca_file": "{state}/authority.pem", "server_name": "localhost"},
        ),
        ({**LOCAL, "subdomains": True}, "https", "gpuhub.lan:443", {"ca_file": "{state}/authority.pem"}),
        ({**FILES, "subdomains": True}, "https", "gpuhub.lan:443", None),
    ],
)
def test_hub_is_scraped_at_its_own_address(
    paths: Paths, hub: dict[str, Any], scheme: str, target: str, tls: dict[str, Any] | None
) -> None:
    """On this machine by address, except where the proxy routes by name; gpuhub's own authority is trusted."""
    found = scrape(monitoring.build_config(cluster(hub), paths, HEAD))
    wanted = tls and {
        key: value.format(state=paths.state) if isinstance(value, str) else value for key, value in tls.items()
    }
    assert (found["scheme"], found["static_configs"], found.get("tls_config")) == (
        scheme,
        [{"targets": [target]}],
        wanted,
    )
    assert found["authorization"] == {"type": "token", "credentials_file": str(paths.prometheus / "token")}


def test_alerts_go_where_the_settings_say(paths: Paths) -> None:
    assert "alerting" not in monitoring.build_config(cluster(), paths, HEAD)
    alerting = monitoring.build_config(cluster(alertmanager="mail.lan:9093"), paths, HEAD)["alerting"]
    assert alerting == {"alertmanagers": [{"static_configs": [{"targets": ["mail.lan:9093"]}]}]}


def test_files_can_be_read_by_prometheus_alone(paths: Paths) -> None:
    """The token is in no argument and in no file of others; a second call changes nothing."""
    assert monitoring.ensure_files(cluster(), paths, SOURCE, HEAD)
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in paths.prometheus.iterdir()}
    assert files == {"data": 0o700, "prometheus.yml": 0o400, "alerts.yml": 0o400, "token": 0o400}
    assert stat.S_IMODE(paths.prometheus.stat().st_mode) == 0o700
    assert (paths.prometheus / "token").read_text() == "4711"
    assert "4711" not in (paths.prometheus / "prometheus.yml").read_text()
    assert not monitoring.ensure_files(cluster(), paths, SOURCE, HEAD)
    assert monitoring.ensure_files(cluster(alertmanager="mail.lan:9093"), paths, SOURCE, HEAD)


def test_missing_user_and_program_are_named(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", refuse)
    with pytest.raises(SetupError, match="there is no user 'prometheus': Debian's package prometheus makes it"):
        monitoring.ensure_files(cluster(), paths, SOURCE, HEAD)
    monkeypatch.setattr(monitoring.shutil, "which", lambda _name: None)
    with pytest.raises(SetupError, match="`sudo make up MONITORING=1` installs it"):
        monitoring.build_program(cluster(), paths)


def test_port_of_another_program_is_refused() -> None:
    """Otherwise the other program's answers would seem to be those of gpuhub's Prometheus."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            SetupError, match=rf"cannot listen on 127\.0\.0\.1:{port} \(Address already in use\): set anoth"
        ):
            monitoring.check_port(port)
    monitoring.check_port(port)


def test_program_listens_on_loopback_and_keeps_a_limited_amount(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's user, with retention by time and size."""
    monkeypatch.setattr(monitoring.shutil, "which", lambda name: f"/usr/bin/{name}")
    program = monitoring.build_program(cluster(port=9191, retention="7d", max_size="1G"), paths)
    assert {"--web.listen-address=127.0.0.1:9191", "--storage.tsdb.retention.time=604800s"} < set(program.command)
    assert "--storage.tsdb.retention.size=1073741824B" in program.command
    lines = build_supervisor_config(paths, [program, programs.Program(name="x", command=("y",), directory=paths.state)])
    assert lines.count("user=prometheus") == lines.count("user=") == 1
