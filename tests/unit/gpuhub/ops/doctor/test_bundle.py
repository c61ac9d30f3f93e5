"""The archive for a bug report: what is in it, and that no secret is."""

from __future__ import annotations

import json
import re
import stat
import tarfile
import tomllib
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
from tests.support.product import ROOT

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
        ('rest_key = "/etc/slurm/jwt.key"', 'rest_key = "/etc/slurm/jwt.key"'),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", f"AWS_SECRET_ACCESS_KEY={REMOVED}"),
        ("API_KEY=abc started", f"API_KEY={REMOVED} started"),
        ("WANDB_API_KEY: 0123456789", f"WANDB_API_KEY: {REMOVED}"),
        ("DB_PASS=x,y DEBUG=1", f"DB_PASS={REMOVED} DEBUG=1"),
        ("PGPASSWORD=/short", f"PGPASSWORD={REMOVED}"),
        ("'password': 'two words'", f"'password': '{REMOVED}'"),
        (r'"text": "set token = \"a b\" here"', rf'"text": "set token = \"{REMOVED}\" here"'),
        ("redis://:hunter2@cache.lan/0", f"redis://:{REMOVED}@cache.lan/0"),
        ("https://ghp_1234@github.com/lab/x", f"https://{REMOVED}@github.com/lab/x"),
        ("Cookie: a=1; b=2", f"Cookie: {REMOVED}"),
        ("docker = ssh://root@10.0.0.12", "docker = ssh://root@10.0.0.12"),
    ],
)
def test_text_that_looks_secret_is_removed(text: str, expected: str) -> None:
    assert remove_secrets(text, frozenset()) == expected


def test_no_secret_of_the_settings_leaves_the_machine(
    paths: HeadPaths, cluster: ClusterSettings, tmp_path: Path
) -> None:
    """Of cluster.toml, names of variables and first words of commands stay; comments and all other values of them do not."""
    settings = tmp_path / "cluster.toml"
    settings.write_text(
        """# the old password was swordfish
[[services]]
name = "track"
environment = ["WANDB_MODE=s3cr", "DSN=postgresql://u:hunter2@db/x"]
variables = ["TRACK_AUTH=let-me-in"]
command = ["serve", "--login", "opensesame"]
[services.other.environment]
PIN = "4711"
[power]
on = ["curl", "-u", "eve:apple"]
off = "ipmi"
[images]
torch_index = "https://deploy:pear@pypi.lan/simple"
[users]
allowed = ["ada"]
""",
        encoding="utf-8",
    )
    file = tmp_path / "report.tar.gz"
    write_bundle(file, cluster, settings, paths, MACHINES)
    text = read_members(file)["cluster.toml"]
    for secret in ("swordfish", "s3cr", "hunter2", "let-me-in", "opensesame", "4711", "apple", "pear"):
        assert secret not in text
    parsed = tomllib.loads(text)
    assert parsed["users"] == {"allowed": ["ada"]}
    assert parsed["power"] == {"on": ["curl", REMOVED], "off": "ipmi"}
    assert parsed["services"][0]["environment"] == [f"WANDB_MODE={REMOVED}", f"DSN={REMOVED}"]


def test_secrets_of_files_and_services_are_found_in_logs(paths: HeadPaths, tmp_path: Path) -> None:
    """Destinations of notifications also in parts, short passwords where they stand alone, and values of variables."""
    (tmp_path / "destinations").write_text("# the lab\ntgram://123456:bot-token-0815/chat42\n")
    (tmp_path / "ipmi").write_text("abc12\n")
    cluster = build_cluster(
        users={"allowed": ["ada"]},
        notifications={"destinations_file": str(tmp_path / "destinations")},
        power={"ipmi_password_file": str(tmp_path / "ipmi")},
        services=[{"name": "track", "image": "lab/track", "port": 80, "environment": ["X=from-the-lab"]}],
    )
    secrets = find_secrets(cluster, paths)
    log = "tgram: bot-token-0815 refused; ipmitool -P abc12; xabc123; from-the-lab; the lab"
    assert remove_secrets(log, secrets) == (
        f"tgram: {REMOVED} refused; ipmitool -P {REMOVED}; xabc123; {REMOVED}; the lab"
    )


def test_no_key_of_cluster_toml_is_taken_for_a_secret() -> None:
    """Of secrets, cluster.toml has files alone, and a report needs the values of all keys."""
    text = (ROOT / "docs/reference/cluster-toml.md").read_text(encoding="utf-8")
    lines = [f"{key} = 1" for key in re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)]
    assert len(lines) > 100
    assert [line for line in lines if remove_secrets(line, frozenset()) != line] == []


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
