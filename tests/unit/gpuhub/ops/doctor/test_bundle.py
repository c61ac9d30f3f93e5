"""The archive for a bug report: what is in it, and that no secret is."""

from __future__ import annotations

import json
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuhub.broker.db import engine
from gpuhub.common.errors import SetupError
from gpuhub.common.secrets import BROKER_TOKEN, ensure_secrets, read_secret
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.doctor import bundle
from gpuhub.ops.doctor.bundle import REMOVED, find_secrets, remove_secrets, write_bundle
from gpuhub.ops.doctor.findings import failed, ok
from tests.support.clusters import build_cluster
from tests.support.paths import FolderPaths

CLIENT_SECRET = "provider-secret-3f9a"
MACHINES = [("head", [ok("clock", "0.1 s ahead")]), ("rig1", [failed("driver", "not found", "install it")])]


@dataclass(frozen=True, slots=True)
class HeadPaths(FolderPaths):
    """An instance whose logs and runtime files are below the same folder."""

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def run(self) -> Path:
        return self.folder / "run"


@pytest.fixture
def paths(tmp_path: Path) -> HeadPaths:
    """A head node with secrets, a broker's database and logs that have what no log should have."""
    paths = HeadPaths(folder=tmp_path)
    ensure_secrets(paths)
    (tmp_path / "log").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "client-secret").write_text(f"{CLIENT_SECRET}\n")
    (tmp_path / "log/hub.log").write_text(
        f"ada started\nsent {read_secret(paths, BROKER_TOKEN)}\nGET /hub/oauth_callback?code=abc123&state=x-9 from ada\n"
        f"Authorization: token 0123456789abcdef0123\nasked with {CLIENT_SECRET}\n"
    )
    database = engine.build_engine(f"sqlite:///{paths.store}")
    with database.begin() as connection:
        engine.migrate(connection)
    database.dispose()
    return paths


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterSettings:
    """A cluster whose users log in with a provider."""
    return build_cluster(
        users={"allowed": ["ada"], "login": "github"},
        login={"client_id": "gpuhub", "client_secret_file": str(tmp_path / "client-secret")},
        hub={"address": "192.168.1.20", "https": "local"},
    )


def read_members(file: Path) -> dict[str, str]:
    """Return the texts of an archive by their names."""
    with tarfile.open(file) as archive:
        return {
            member.name.removeprefix("gpuhub-bundle/"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
        }


def test_bundle_has_what_a_report_needs(paths: HeadPaths, cluster: ClusterSettings, tmp_path: Path) -> None:
    settings = tmp_path / "cluster.toml"
    settings.write_text('[users]\nallowed = ["ada"]\n')
    file = tmp_path / "report.tar.gz"
    names = write_bundle(file, cluster, settings, paths, MACHINES)
    members = read_members(file)
    assert list(members) == names
    assert "✗ driver not found" in members["doctor.txt"]
    assert [machine["machine"] for machine in json.loads(members["doctor.json"])] == ["head", "rig1"]
    assert "Python 3." in members["versions.txt"]
    assert "\njupyterhub " in members["versions.txt"]
    rows = json.loads(members["broker.json"])
    assert rows["revision"]
    assert rows["rows"]["leases"] == 0
    assert members["cluster.toml"] == settings.read_text()
    assert members["logs/hub.log"].startswith("ada started\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_no_secret_leaves_the_machine(paths: HeadPaths, cluster: ClusterSettings, tmp_path: Path) -> None:
    """Neither those that gpuhub knows, nor what looks like one."""
    file = tmp_path / "report.tar.gz"
    write_bundle(file, cluster, tmp_path / "none.toml", paths, MACHINES)
    text = "".join(read_members(file).values())
    known = find_secrets(cluster, paths)
    assert CLIENT_SECRET in known
    assert read_secret(paths, BROKER_TOKEN) in known
    assert [secret for secret in known if secret in text] == []
    for shown in ("abc123", "x-9", "0123456789abcdef0123"):
        assert shown not in text
    assert f"sent {REMOVED}\n" in text
    assert f"?code={REMOVED}&state={REMOVED} from ada\n" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://ada:pass-word@hub.example/x", f"https://ada:{REMOVED}@hub.example/x"),
        ('client_secret = "0123456789"', f'client_secret = "{REMOVED}"'),
        ('client_secret_file = "/etc/gpuhub/secret"', 'client_secret_file = "/etc/gpuhub/secret"'),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\nnext", f"{REMOVED}\nnext"),
        ("lease lease-1: state=granted, 3 tokens are left", "lease lease-1: state=granted, 3 tokens are left"),
        ("longest_token = 7776000", "longest_token = 7776000"),
    ],
)
def test_text_that_looks_secret_is_removed(text: str, expected: str) -> None:
    assert remove_secrets(text, frozenset()) == expected


def test_logs_are_bounded(
    paths: HeadPaths, cluster: ClusterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of each, and a limit for all."""
    monkeypatch.setattr(bundle, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(bundle, "MAX_LOGS_BYTES", 150)
    for name in ("a", "b", "hub"):
        (paths.log / f"{name}.log").write_text("x" * 500 + f"end of {name}")
    file = tmp_path / "report.tar.gz"
    write_bundle(file, cluster, tmp_path / "none.toml", paths, MACHINES)
    logs = {name: text for name, text in read_members(file).items() if name.startswith("logs/")}
    assert {name: len(text) for name, text in logs.items()} == {"logs/a.log": 100, "logs/b.log": 50, "logs/hub.log": 0}
    assert logs["logs/a.log"].endswith("end of a")


def test_existing_file_stays(paths: HeadPaths, cluster: ClusterSettings, tmp_path: Path) -> None:
    file = tmp_path / "report.tar.gz"
    file.write_text("mine")
    with pytest.raises(SetupError, match="exists: name another file"):
        write_bundle(file, cluster, tmp_path / "none.toml", paths, MACHINES)
    assert file.read_text() == "mine"


def test_damaged_database_is_named(paths: HeadPaths, cluster: ClusterSettings, tmp_path: Path) -> None:
    paths.store.write_bytes(b"no database" * 100)
    file = tmp_path / "report.tar.gz"
    write_bundle(file, cluster, tmp_path / "none.toml", paths, MACHINES)
    assert json.loads(read_members(file)["broker.json"])["error"] == "file is not a database"
