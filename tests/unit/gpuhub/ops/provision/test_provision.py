"""Adding and removing a node: the changes, and the scripts that are sent."""

from __future__ import annotations

import asyncio
import io
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests
from cryptography import x509

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.cli import main
from gpuhub.cli.console import AdminConsole
from gpuhub.common.errors import (
    Conflict,
    GpuhubError,
    InvalidRequest,
    NodeUnreachable,
    NotFound,
    SettingsError,
    SetupError,
)
from gpuhub.common.names import KIND_NOTEBOOK, LABEL_KIND
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.settings import NodeSettings
from gpuhub.docker import ssh
from gpuhub.docker.client import translate_docker_error
from gpuhub.docker.ssh import HostKey, SshFiles
from gpuhub.ops.doctor.node_facts import HostFacts, build_script_arguments
from gpuhub.ops.provision import cluster_file, node_access, node_join, node_removal
from gpuhub.ops.provision.node_join import JoinRequest
from gpuhub.ops.provision.node_removal import RemovalRequest, drain_node, find_removable_node
from gpuhub.ops.provision.ssh_session import (
    ResolvedTarget,
    SshSession,
    SshTarget,
    build_ssh_url,
    parse_resolved,
    parse_target,
    suggest_name,
)
from gpuhub.tls.authority import utc_now
from tests.support.broker.calls import ask, run_notebook
from tests.support.broker.in_process import Running, Setting, asgi_broker, served_broker
from tests.support.docker.simulated_nodes import build_cluster, wait_until
from tests.support.golden import check_golden
from tests.support.paths import FolderPaths

EXAMPLE = Path(__file__).parents[5] / "cluster.example.toml"
GOLDEN = Path(__file__).with_name("golden")
PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIK gpuhub@head"
RIG4 = NodeSettings(name="rig4", address="192.168.1.24", docker="ssh://me@192.168.1.24")
NOW = datetime(2026, 11, 21, tzinfo=UTC)


# -- what is named ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("ssh://me@rig2", SshTarget(host="rig2", user="me")),
        ("ssh://rig2.lan", SshTarget(host="rig2.lan")),
        ("ssh://me@192.168.1.22:2222/", SshTarget(host="192.168.1.22", user="me", port=2222)),
        ("ssh://me@[fd00::2]", SshTarget(host="fd00::2", user="me")),
    ],
)
def test_targets_are_parsed(text: str, target: SshTarget) -> None:
    assert parse_target(text) == target
    assert target.arguments()[-2:] == ["--", target.host]


@pytest.mark.parametrize(
    "text",
    [
        "me@rig2",
        "tcp://rig2:2376",
        "ssh://",
        "ssh://-oProxyCommand=id@rig2",
        "ssh://me@-rig2",
        "ssh://me@rig2;id",
        "ssh://me:secret@rig2",
        "ssh://me@rig2/var",
        "ssh://me@rig2:99999",
        "ssh://$(id)@rig2",
    ],
)
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write such as ssh://me@rig2"):
        parse_target(text)


def test_resolved_targets_are_parsed() -> None:
    """The administrator's settings of ssh count: another port, another name, a machine in between."""
    resolved = parse_resolved(
        "user me\nhostname 192.168.1.22\nport 2222\nproxyjump none\n"
        "userknownhostsfile ~/.ssh/known_hosts ~/.ssh/known_hosts2\nglobalknownhostsfile /etc/ssh/ssh_known_hosts\n"
    )
    assert (resolved.host, resolved.user, resolved.port, resolved.jump) == ("192.168.1.22", "me", 2222, None)
    assert resolved.known_hosts == ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts")
    assert parse_resolved("user me\nhostname x\nport 22\nproxyjump gate\n").jump == "gate"


@pytest.mark.parametrize(
    ("host", "taken", "name"),
    [
        ("Rig2.lan", (), "rig2"),
        ("rig2", ("rig2",), "rig1"),
        ("192.168.1.22", ("rig1", "rig2"), "rig3"),
        ("x_y", (), "rig1"),
    ],
)
def test_suggested_node_names(host: str, taken: tuple[str, ...], name: str) -> None:
    assert suggest_name(SshTarget(host=host), taken) == name


def test_ssh_addresses() -> None:
    assert build_ssh_url("me", "192.168.1.22", 22) == "ssh://me@192.168.1.22"
    assert build_ssh_url("me", "fd00::2", 2222) == "ssh://me@[fd00::2]:2222"


def test_names_and_addresses_of_nodes_must_be_unique() -> None:
    """A second name for an address and a second address for a name are refused."""
    cluster = build_cluster()
    first = cluster.nodes[0]
    assert node_join._find_existing_node(cluster, None, first.address) == first
    assert node_join._find_existing_node(cluster, first.name, first.address) == first
    assert node_join._find_existing_node(cluster, "rig9", "192.0.2.9") is None
    for name, address in ((first.name, "192.0.2.9"), ("rig9", first.address)):
        with pytest.raises(InvalidRequest, match="a name and an address belong to one node"):
            node_join._find_existing_node(cluster, name, address)


# -- host keys and our own ---------------------------------------------------------------------------------------------


def test_each_host_key_is_compared() -> None:
    """Only known keys are kept, of a machine without known keys one is compared, and a changed key is refused."""
    shown = ssh.parse_keys("# rig2:22 SSH-2.0\nrig2 ssh-rsa BBBB\nrig2 ssh-ed25519 AAAA\n@revoked rig2 ssh-rsa CCCC\n")
    ed25519, rsa = HostKey("ssh-ed25519", "AAAA"), HostKey("ssh-rsa", "BBBB")
    assert shown == [ed25519, rsa]
    assert ssh.select_known_keys(shown, [], "rig2") == []
    assert ssh.select_known_keys(shown, [rsa], "rig2") == [rsa]
    assert ssh.select_known_keys(shown, [ed25519, HostKey("ssh-rsa", "DDDD")], "rig2") == [ed25519]
    with pytest.raises(SetupError, match="another host key than before"):
        ssh.select_known_keys(shown, [HostKey("ssh-rsa", "DDDD")], "rig2")
    ecdsa = HostKey("ecdsa-sha2-nistp256", "EEEE")
    assert [ssh.choose_key(keys) for keys in ([rsa, ecdsa, ed25519], [rsa, ecdsa], [rsa])] == [ed25519, ecdsa, rsa]
    assert ssh.format_known_hosts("gpuhub-rig2", shown[:1]) == "gpuhub-rig2 ssh-ed25519 AAAA\n"


@pytest.mark.process
def test_fingerprints_have_the_format_of_ssh(tmp_path: Path) -> None:
    file = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    shown = subprocess.run(["ssh-keygen", "-lf", file], check=True, capture_output=True, text=True).stdout
    kind, blob = file.with_suffix(".pub").read_text().split()[:2]
    assert HostKey(kind, blob).fingerprint == shown.split()[1]


@pytest.mark.process
def test_ssh_key_is_created_once_and_readable_by_root_only(tmp_path: Path) -> None:
    files = SshFiles(tmp_path / "ssh")
    public = ssh.ensure_key(files, "gpuhub")
    assert public.split()[0] == "ssh-ed25519"
    assert public.split()[2].startswith("gpuhub@")
    files.key.chmod(0o644)
    assert ssh.ensure_key(files, "gpuhub") == public
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700


def test_ssh_uses_gpuhubs_key_only_for_added_nodes(tmp_path: Path) -> None:
    """For others it uses root's keys."""
    files = SshFiles(tmp_path)
    assert files.options("rig2") == []
    files.known_hosts("rig2").write_text("gpuhub-rig2 ssh-ed25519 AAAA\n")
    command = ssh.build_tunnel_command("ssh://me@rig2", tmp_path / "rig2.sock", files.options("rig2"))
    assert command[-2:] == ["--", "rig2"]
    assert command[command.index("-i") + 1] == str(files.key)
    assert {"StrictHostKeyChecking=yes", "IdentitiesOnly=yes", "HostKeyAlias=gpuhub-rig2"} <= set(command)
    assert files.options("rig3") == []


def change(home: Path, *, is_authorized: bool) -> str:
    words = ssh.build_script_arguments(PUBLIC, is_authorized=is_authorized)
    subprocess.run(
        ["sh", "-s", "--", *words],
        input=ssh.AUTHORIZED_KEYS_SCRIPT,
        check=True,
        text=True,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
    )
    return (home / ".ssh/authorized_keys").read_text()


@pytest.mark.process
@pytest.mark.parametrize("before", [None, "", "ssh-ed25519 OTHER me@laptop\n", "# mine\nssh-ed25519 OTHER me@laptop"])
def test_ssh_key_is_authorized_and_removed(tmp_path: Path, before: str | None) -> None:
    """Other keys stay; a repetition changes nothing; an older line of the same key is replaced."""
    folder = tmp_path / ".ssh"
    if before is not None:
        folder.mkdir()
        (folder / "authorized_keys").write_text(before)
    first = change(tmp_path, is_authorized=True)
    assert first.endswith(f"{ssh.RESTRICTIONS} {PUBLIC}\n")
    assert first.startswith(before or "")
    (folder / "authorized_keys").write_text(first.replace("restrict,", ""))
    assert change(tmp_path, is_authorized=True) == first
    assert stat.S_IMODE((folder / "authorized_keys").stat().st_mode) in {0o600, 0o644}
    assert change(tmp_path, is_authorized=False).strip() == (before or "").strip()
    assert [file.name for file in folder.iterdir()] == ["authorized_keys"]


def test_scripts_equal_the_golden_file() -> None:
    """Scripts are constants; arguments have no meaning to a shell, and PEM is data."""
    words = build_script_arguments(
        docker_root="/srv/docker",
        head="192.168.1.20",
        addresses=[("192.168.1.20", 8081), ("nas.lan", 2049)],
        accounts=["ada"],
    )
    made = node_access.NodeCertificates(
        authority=b"AUTHORITY\n",
        server=b"SERVER\n",
        server_key=b"SERVER KEY\n",
        client=b"CLIENT\n",
        client_key=b"CLIENT KEY\n",
    )
    started = "{ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd -H fd:// $OPTIONS ; ignore_errors=no ; pid=1 }"
    parts = [
        "probe " + " ".join(words),
        "let in " + " ".join(ssh.build_script_arguments(PUBLIC, is_authorized=True)),
        "take out " + " ".join(ssh.build_script_arguments(PUBLIC, is_authorized=False)),
        ssh.AUTHORIZED_KEYS_SCRIPT,
        node_access.build_files_script(made),
        node_access.build_drop_in_script(node_access.build_drop_in(started, "192.168.1.24")),
        node_access.RESTART_DOCKER_SCRIPT,
        node_access.REMOVE_TLS_SCRIPT,
    ]
    sent = "\n----\n".join(parts)
    check_golden(sent, GOLDEN / "sent.txt")
    assert "CLIENT" not in sent


def test_nodes_in_one_line_are_refused() -> None:
    """They are valid TOML, to which no table can be added."""
    with pytest.raises(SettingsError, match=r"write a table \[\[nodes\]\] for each"):
        cluster_file.put_node('nodes = [{name = "rig1"}]\n', RIG4)


# -- TLS ----------------------------------------------------------------------------------------------------------------


def test_docker_drop_in_replaces_earlier_options() -> None:
    """The rest of the daemon's command stays."""
    first = node_access.build_drop_in("{ path=/d ; argv[]=/usr/sbin/dockerd -H fd:// ; x=y }", "192.168.1.24")
    line = next(line for line in first.splitlines() if line.startswith("ExecStart=/"))
    command = line.removeprefix("ExecStart=")
    again = node_access.build_drop_in(f"{{ path=/d ; argv[]={command} ; x=y }}", "fd00::24")
    assert again.count("--tlsverify") == 1
    assert "-H tcp://[fd00::24]:2376 --tlsverify" in again
    assert "/usr/sbin/dockerd -H fd:// -H" in again
    with pytest.raises(SetupError, match="start dockerd there with these additional options"):
        node_access.build_drop_in("", "192.168.1.24")


def test_a_daemon_that_is_not_to_be_restarted_keeps_its_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After "no" nothing has changed. After an interrupted restart, the next call restarts with the same certificates."""
    paths = FolderPaths("x", folder=tmp_path)
    paths.secrets.mkdir()
    files = node_access.find_client_files(paths, "rig4")
    address = "192.168.1.24"
    node = NodeSettings(name="rig4", address=address, docker=f"tcp://{address}:2376", tls=settings.DockerTlsFiles(
        ca=files.ca, cert=files.cert, key=files.key
    ))  # fmt: skip
    host = HostFacts(sudo="root", systemd=True, docker_start="{ path=/d ; argv[]=/usr/bin/dockerd -H fd:// ; x=y }")
    request = node_access.TlsSetupRequest(node=node, host=host, live_restore=True, skip_confirmation=False)
    sent: list[str] = []
    session = cast("SshSession", SimpleNamespace(run=lambda script, **_: sent.append(script)))

    async def verify(*_: object) -> str:
        if node_access.RESTART_DOCKER_SCRIPT not in sent:
            raise SetupError("not yet")
        return "28.0"

    monkeypatch.setattr(node_access, "verify_docker", verify)
    with pytest.raises(InvalidRequest):
        node_access.set_up_tls(session, request, paths, AdminConsole(io.StringIO(), io.StringIO("no\n")))
    assert sent == []
    assert not files.key.exists()
    node_access.store_certificates(files, node_access.make_certificates("rig4", address, utc_now()))
    key = files.key.read_bytes()
    node_access.set_up_tls(session, replace(request, skip_confirmation=True), paths, AdminConsole(io.StringIO()))
    assert len(sent) == 2
    assert files.key.read_bytes() == key


def test_certificates_are_valid_for_one_role_and_one_node(tmp_path: Path) -> None:
    """A node's certificate opens no daemon; only root can read the files; a valid one is kept."""
    made = node_access.make_certificates("rig4", "192.168.1.24", NOW)
    server, client = (x509.load_pem_x509_certificate(pem) for pem in (made.server, made.client))
    purposes = [
        [purpose._name for purpose in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value]
        for certificate in (server, client)
    ]
    assert purposes == [["serverAuth"], ["clientAuth"]]
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["192.168.1.24", "rig4"]
    assert b"PRIVATE" not in made.authority + made.server + made.client
    files = settings.DockerTlsFiles(
        **{name: tmp_path / "docker/rig4" / f"{name}.pem" for name in ("ca", "cert", "key")}
    )
    assert not node_access.are_certificates_valid(files, "192.168.1.24", NOW, margin=timedelta(days=30))
    node_access.store_certificates(files, made)
    node_access.store_certificates(files, made)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files.key.parent.iterdir()} == {0o600}
    assert node_access.are_certificates_valid(files, "192.168.1.24", NOW, margin=timedelta(days=30))
    assert not node_access.are_certificates_valid(files, "203.0.113.4", NOW, margin=timedelta(days=30))
    assert not node_access.are_certificates_valid(
        files, "192.168.1.24", NOW + node_access.CERTIFICATE_LIFETIME, margin=timedelta(days=30)
    )
    ssl.create_default_context(cafile=str(files.ca)).load_cert_chain(files.cert, files.key)
    node_access.remove_certificates(files)
    assert not files.ca.exists()


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        (
            "certificate verify failed: certificate has expired (_ssl.c:1)",
            "has expired: `gpuhub node add --tls` renews it",
        ),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate in chain", "not of the authority in tls.ca"),
        ("certificate verify failed: IP address mismatch", "is for another address"),
        ("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert", "requires a certificate"),
        ("[SSL: SSLV3_ALERT_BAD_CERTIFICATE] sslv3 alert bad certificate", "does not accept tls.cert"),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca", "trusts another authority"),
    ],
)
def test_refused_certificate_is_not_reported_as_unreachable_node(said: str, meaning: str) -> None:
    error = translate_docker_error("rig3", requests.exceptions.SSLError(said))
    assert str(error).startswith("node rig3: unauthenticated: ")
    assert meaning in str(error)
    assert error.code == "node-unreachable"


def test_a_reset_connection_with_tls_may_be_a_refusal() -> None:
    """With TLS 1.3 the refusal may get lost; without TLS nothing was refused."""
    reset = requests.exceptions.ConnectionError(
        "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"
    )
    assert "unauthenticated" in str(translate_docker_error("rig3", reset, is_tls=True))
    assert str(translate_docker_error("rig3", reset)) == "node rig3: its Docker daemon cannot be reached"


# -- cluster.toml --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("head_address")
def test_node_is_added_after_the_others_and_removed(tmp_path: Path) -> None:
    """Comments and order stay, and the only difference is the new table before the next heading."""
    before = EXAMPLE.read_text()
    after = cluster_file.put_node(before, RIG4)
    assert [line for line in after.splitlines() if line not in before.splitlines()] == [
        'name = "rig4"',
        'address = "192.168.1.24"',
        'docker = "ssh://me@192.168.1.24"',
    ]
    assert after.index('name = "rig3"') < after.index('name = "rig4"') < after.index("# ── Profiles")
    assert cluster_file.put_node(after, RIG4) == after
    assert cluster_file.remove_node(after, "rig4") == before
    assert [node.name for node in cluster_file.check_text(after, tmp_path / "cluster.toml").nodes] == [
        "rig1", "rig2", "rig3", "rig4",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_interface_of_a_new_node_is_written_and_kept() -> None:
    """A repair without the option changes nothing of it."""
    after = cluster_file.put_node(EXAMPLE.read_text(), RIG4.model_copy(update={"data_interface": "eth1"}))
    assert settings.tomllib.loads(after)["nodes"][3]["data_interface"] == "eth1"
    assert cluster_file.put_node(after, RIG4) == after


@pytest.mark.parametrize(
    "text", ['[[nodes]]\nname = "a"\n[users]\nallowed = ["x"]\n', '[users]\nx = 1\n[[nodes]]\nname = "a"']
)
def test_nodes_are_edited_in_files_without_comments_or_final_newline(text: str) -> None:
    after = cluster_file.put_node(text, RIG4)
    assert settings.tomllib.loads(after)["nodes"][1]["name"] == "rig4"
    taken = cluster_file.remove_node(after, "rig4")
    assert settings.tomllib.loads(taken) == settings.tomllib.loads(text)


def test_a_nodes_docker_address_is_changed_in_place() -> None:
    """From SSH to TLS and back; its other keys stay."""
    before = EXAMPLE.read_text()
    files = settings.DockerTlsFiles(ca=Path("/c/ca.pem"), cert=Path("/c/cert.pem"), key=Path("/c/key.pem"))
    over_tls = NodeSettings(name="rig2", address="192.168.1.22", docker="tcp://192.168.1.22:2376", tls=files)
    after = cluster_file.put_node(before, over_tls)
    node = settings.tomllib.loads(after)["nodes"][1]
    assert node["tls"] == {"ca": "/c/ca.pem", "cert": "/c/cert.pem", "key": "/c/key.pem"}
    assert node["gpus"] == [{"model": "RTX 5070", "memory": "12G"}]
    back = NodeSettings(name="rig2", address="192.168.1.22", docker="ssh://gpuhub@192.168.1.22")
    assert cluster_file.put_node(after, back) == before


def test_middle_node_is_removed_and_unknown_node_is_refused() -> None:
    before = EXAMPLE.read_text()
    nodes = settings.tomllib.loads(cluster_file.remove_node(before, "rig2"))["nodes"]
    assert [node["name"] for node in nodes] == ["rig1", "rig3"]
    with pytest.raises(NotFound, match="no node 'rig9'"):
        cluster_file.remove_node(before, "rig9")


def test_invalid_settings_are_never_written(tmp_path: Path) -> None:
    """The error names the file itself; valid settings replace the whole file, and a copy is kept."""
    file = tmp_path / "cluster.toml"
    file.write_text(EXAMPLE.read_text())
    file.chmod(0o640)
    twice = cluster_file.put_node(EXAMPLE.read_text(), RIG4.model_copy(update={"address": "192.168.1.22"}))
    with pytest.raises(SettingsError, match=rf"{file}: nodes: address = '192.168.1.22' occurs 2 times"):
        cluster_file.check_text(twice, file)
    before = cluster_file.replace_file(file, cluster_file.put_node(EXAMPLE.read_text(), RIG4))
    assert before.read_text() == EXAMPLE.read_text()
    assert "rig4" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cluster.toml", "cluster.toml.before"]


# -- leaving -------------------------------------------------------------------------------------------------------------


def test_the_only_node_cannot_be_removed() -> None:
    cluster = build_cluster()
    assert find_removable_node(cluster, "rig1") == cluster.nodes[0]
    with pytest.raises(NotFound, match="there are rig1, rig2, rig3"):
        find_removable_node(cluster, "rig9")
    with pytest.raises(InvalidRequest, match="the only node"):
        find_removable_node(cluster.model_copy(update={"nodes": cluster.nodes[:1]}), "rig1")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with asgi_broker(Setting(tmp_path, cluster=build_cluster())) as running:
        yield running


async def test_node_with_leases_is_removed_only_by_force(running: Running, tmp_path: Path) -> None:
    """They are shown and nothing is changed; with force they end, and the node takes nothing new."""
    container = await run_notebook(running, await ask(running, "ada"))
    client = AsyncBrokerClient(running.url, "own-token", transport=running.transport, retry_limit_s=0)
    (held,) = await client.leases()
    node = next(node for node in build_cluster().nodes if node.name in held.nodes)
    output = io.StringIO()

    async def list_lease_states() -> set[str]:
        return {view.state.value for view in await client.nodes()}

    async def stop_as_the_hub_does() -> None:
        await asyncio.to_thread(wait_until, lambda: running.setting.hub.stopped == [("ada", "")], "the hub is asked")
        running.setting.nodes[node.name].containers.pop(container)

    try:
        request = RemovalRequest(name=node.name, cluster_file=tmp_path / "cluster.toml", yes=True)
        with pytest.raises(Conflict, match=f"gpuhub node drain {node.name}"):
            await drain_node(request, node, client, AdminConsole(output))
        assert "ada" in output.getvalue()
        with pytest.raises(InvalidRequest, match="no terminal to confirm it"):
            await drain_node(replace(request, force=True, yes=False), node, client, AdminConsole(output, io.StringIO()))
        assert await list_lease_states() == {"up"}
        forced = replace(request, force=True)
        await asyncio.gather(drain_node(forced, node, client, AdminConsole(output)), stop_as_the_hub_does())
        assert await client.leases() == []
        assert await list_lease_states() == {"up", "draining"}
    finally:
        await client.close()


NODES = "".join(
    f'[[nodes]]\nname = "{node.name}"\naddress = "{node.address}"\ndocker = "{node.docker}"\n'
    for node in build_cluster().nodes
)
REST = '[[profiles]]\nname = "any"\ntitle = "Any"\n[users]\nlogin = "pam"\nallowed = ["ada"]\n'


class OneDaemon:
    """The daemon of the node that is to be removed, with containers or an error."""

    def __init__(self, answer: list[dict[str, Any]] | GpuhubError) -> None:
        self._answer = answer

    async def call(self, *_arguments: object, **_options: object) -> list[dict[str, Any]]:
        if isinstance(self._answer, GpuhubError):
            raise self._answer
        return self._answer

    def close(self) -> None:
        """Close nothing."""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([], "nothing was changed"),
        ([{"Names": ["/gh-nb-ada"], "Labels": {LABEL_KIND: KIND_NOTEBOOK}}], "on rig2 run gh-nb-ada"),
        (NodeUnreachable("node rig2: ssh ended"), "ssh ended. With --force"),
    ],
    ids=["the answer is no", "a container without a lease", "it does not answer"],
)
def test_a_node_that_is_not_removed_takes_work_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: list[dict[str, Any]] | GpuhubError, reason: str
) -> None:
    """It was drained before the administrator was asked, and nobody would notice."""
    file = tmp_path / "cluster.toml"
    file.write_text(NODES + REST)
    monkeypatch.setattr(node_removal, "_is_running", lambda *_: True)
    monkeypatch.setattr(node_removal, "DockerClients", lambda *_, **__: OneDaemon(answer))
    request = RemovalRequest(name="rig2", cluster_file=file)
    with served_broker(Setting(tmp_path, cluster=build_cluster())) as running:
        monkeypatch.setattr(
            node_removal, "connect_to_broker", lambda _: AsyncBrokerClient(running.url, "own-token", retry_limit_s=0)
        )
        with pytest.raises(GpuhubError, match=reason):
            node_removal.remove_node(request, Paths("ghnone"), AdminConsole(answers=io.StringIO()), lambda: None)
        nodes = running.send("GET", "/api/v1/nodes", token="own-token").json()
    assert {node["name"]: node["state"] for node in nodes} == dict.fromkeys(["rig1", "rig2", "rig3"], "up")
    assert file.read_text() == NODES + REST


@pytest.fixture
def joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JoinRequest:
    """A request to add rig4, whose machine passes all checks; nothing is sent to it."""
    file = tmp_path / "cluster.toml"
    file.write_text(NODES + REST)

    async def join_swarm(*_arguments: object) -> None:
        """Change no Swarm."""

    monkeypatch.setattr(node_join, "SshSession", lambda *_: nullcontext())
    monkeypatch.setattr(node_join, "_check_machine", lambda *_: (None, None))
    monkeypatch.setattr(node_join, "_show_changes", lambda *_: None)
    monkeypatch.setattr(node_join, "_authorize", lambda *_: None)
    monkeypatch.setattr(node_join, "_join_swarm", join_swarm)
    monkeypatch.setattr(node_join, "verify_host_keys", lambda *_, **__: [])
    monkeypatch.setattr(
        node_join, "resolve_direct_target", lambda _: ResolvedTarget(host=RIG4.address, user="me", port=22)
    )
    return JoinRequest(target=SshTarget(host="rig4", user="me"), cluster_file=file, yes=True)


def test_nodes_that_are_added_at_the_same_time_all_stay(
    joining: JoinRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one joins the Swarm, the command in another terminal ends; the first must not write what it read before."""
    rig5 = NodeSettings(name="rig5", address="192.168.1.25", docker="ssh://me@192.168.1.25")

    async def add_another(*_arguments: object) -> None:
        text = cluster_file.put_node(joining.cluster_file.read_text(), rig5)
        cluster_file.replace_file(joining.cluster_file, text)

    monkeypatch.setattr(node_join, "_join_swarm", add_another)
    paths = FolderPaths("ghnone", folder=tmp_path / "state")
    node_join.add_node(joining, paths, AdminConsole(io.StringIO()), None)
    names = [node.name for node in settings.load(joining.cluster_file).nodes]
    assert names == ["rig1", "rig2", "rig3", "rig5", "rig4"]


def test_a_file_that_was_changed_before_the_answer_is_read_again(
    joining: JoinRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node may even have got the same name, under which its host key is stored."""

    def fail(*_arguments: object) -> None:
        raise AssertionError("nothing may be changed there")

    monkeypatch.setattr(node_join, "_authorize", fail)
    console = AdminConsole(io.StringIO())
    monkeypatch.setattr(console, "confirm", lambda _: joining.cluster_file.write_text(NODES + REST + "# another\n"))
    with pytest.raises(SetupError, match="changed in the meantime: run the command again"):
        node_join.add_node(replace(joining, yes=False), FolderPaths("ghnone", folder=tmp_path / "state"), console, None)
    assert joining.cluster_file.read_text() == NODES + REST + "# another\n"


def test_a_node_that_is_added_during_a_removal_stays(
    joining: JoinRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal waits for the end of leases, up to two minutes."""
    file = joining.cluster_file

    async def end_work(*_arguments: object) -> bool:
        file.write_text(cluster_file.put_node(file.read_text(), RIG4))
        return False

    async def change_swarm(*_arguments: object, **_options: object) -> list[str]:
        return []

    monkeypatch.setattr(node_removal, "_end_all_work", end_work)
    monkeypatch.setattr(node_removal, "_hand_over_swarm", change_swarm)
    monkeypatch.setattr(node_removal, "_remove_from_swarm", change_swarm)
    paths = FolderPaths("ghnone", folder=tmp_path / "state")
    request = RemovalRequest(name="rig2", cluster_file=file, force=True, yes=True)
    node_removal.remove_node(request, paths, AdminConsole(io.StringIO()), lambda: None)
    assert [node.name for node in settings.load(file).nodes] == ["rig1", "rig3", "rig4"]


@pytest.fixture
def root_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands take this process for root's: nothing here needs root's rights."""
    monkeypatch.setattr("os.geteuid", lambda: 0)


@pytest.mark.process
@pytest.mark.usefixtures("root_user", "head_address")
def test_unreachable_node_is_removed_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed from the file, nothing is changed on it, and the output says so, and what the others miss."""
    monkeypatch.setattr(Paths, "state", property(lambda self: tmp_path / "state"))
    monkeypatch.setattr(Paths, "run", property(lambda self: tmp_path / "run"))
    file = tmp_path / "cluster.toml"
    text = EXAMPLE.read_text().replace("ssh://gpuhub@192.168.1.22", "ssh://gpuhub@127.0.0.1:1")
    text = text.replace("unix:///run/docker.sock", "ssh://gpuhub@127.0.0.1:2")
    file.write_text(text)
    line = ["node", "remove", "rig2", "--yes", "--cluster-file", str(file), "--instance", "ghnone"]
    with pytest.raises(SystemExit):
        main.main(line)
    assert "With --force it is removed from cluster.toml" in capsys.readouterr().err
    assert file.read_text() == text
    with pytest.raises(SystemExit):
        main.main([*line, "--force"])
    output = capsys.readouterr()
    assert "nothing was undone on rig2" in output.out
    assert "the other nodes did not take over the Swarm" in output.err
    assert [node.name for node in settings.load(file).nodes] == ["rig1", "rig3"]


# -- the command line ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("root_user")
def test_the_error_of_a_missing_cluster_file_has_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["node", "add", "ssh://me@rig2", "--cluster-file", str(tmp_path / "cluster.toml")])
    assert ended.value.code == 1
    assert "copy cluster.example.toml to it" in capsys.readouterr().err


@pytest.mark.usefixtures("root_user", "head_address")
def test_commands_refuse_unknown_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["node", "firewall", "rig9", "--cluster-file", str(EXAMPLE)])
    assert "there is no node 'rig9'; there are rig1, rig2, rig3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["doctor", "rig9", "--cluster-file", str(EXAMPLE), "--instance", "ghnone"])
    assert "there is no node 'rig9'" in capsys.readouterr().err
