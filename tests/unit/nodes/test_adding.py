"""What adding and removing a node would do, and what is sent there."""

from __future__ import annotations

import asyncio
import io
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import requests
from cryptography import x509

from gpuhub import cli, settings
from gpuhub.admin.commands import Console
from gpuhub.broker.client import BrokerClient
from gpuhub.containers import tunnels
from gpuhub.containers.daemons import translate
from gpuhub.containers.ssh import SshFiles
from gpuhub.errors import Conflict, InvalidRequest, NotFound, SettingsError, SetupError
from gpuhub.nodes.adding import certificates, cluster_file, daemon_tls, hostkeys, keys, planning
from gpuhub.nodes.adding.hostkeys import HostKey
from gpuhub.nodes.adding.removing import Farewell, drain, find_leaving
from gpuhub.nodes.adding.target import Target, build_ssh_url, parse_resolved, parse_target, suggest_name
from gpuhub.nodes.doctor.facts import build_probe_words
from gpuhub.paths import Paths
from gpuhub.settings import Node
from tests.support.brokers import Running, Setting, asgi_broker
from tests.support.simulated import build_cluster, wait_until
from tests.unit.broker.test_api import ask, run_notebook

EXAMPLE = Path(__file__).parents[3] / "cluster.example.toml"
GOLDEN = Path(__file__).with_name("golden")
PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIK gpuhub@head"
RIG4 = Node(name="rig4", address="192.168.1.24", docker="ssh://me@192.168.1.24")
NOW = datetime(2026, 11, 21, tzinfo=UTC)


# -- what is named ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("ssh://me@rig2", Target(host="rig2", user="me")),
        ("ssh://rig2.lan", Target(host="rig2.lan")),
        ("ssh://me@192.168.1.22:2222/", Target(host="192.168.1.22", user="me", port=2222)),
        ("ssh://me@[fd00::2]", Target(host="fd00::2", user="me")),
    ],
)
def test_machines_as_they_are_named(text: str, target: Target) -> None:
    assert parse_target(text) == target
    assert target.words()[-2:] == ["--", target.host]


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
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write such as ssh://me@rig2"):
        parse_target(text)


def test_what_ssh_makes_of_it() -> None:
    """The owner's own settings count: another port, another name, a machine in between."""
    found = parse_resolved(
        "user me\nhostname 192.168.1.22\nport 2222\nproxyjump none\n"
        "userknownhostsfile ~/.ssh/known_hosts ~/.ssh/known_hosts2\nglobalknownhostsfile /etc/ssh/ssh_known_hosts\n"
    )
    assert (found.host, found.user, found.port, found.jump) == ("192.168.1.22", "me", 2222, None)
    assert found.known_hosts == ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts")
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
def test_names_for_nodes(host: str, taken: tuple[str, ...], name: str) -> None:
    assert suggest_name(Target(host=host), taken) == name


def test_addresses_for_ssh() -> None:
    assert build_ssh_url("me", "192.168.1.22", 22) == "ssh://me@192.168.1.22"
    assert build_ssh_url("me", "fd00::2", 2222) == "ssh://me@[fd00::2]:2222"


def test_a_name_and_an_address_are_one_nodes() -> None:
    """A second name for an address, and a second address for a name, are refused; both as they are mean that node."""
    cluster = build_cluster()
    first = cluster.nodes[0]
    assert planning._find_old(cluster, None, first.address) == first
    assert planning._find_old(cluster, first.name, first.address) == first
    assert planning._find_old(cluster, "rig9", "192.0.2.9") is None
    for name, address in ((first.name, "192.0.2.9"), ("rig9", first.address)):
        with pytest.raises(InvalidRequest, match="a name and an address are one node's"):
            planning._find_old(cluster, name, address)


# -- host keys and our own ---------------------------------------------------------------------------------------------


def test_host_keys_are_compared() -> None:
    """One that was seen before is known, none means asking, and another one than before is refused."""
    shown = hostkeys.parse_keys(
        "# rig2:22 SSH-2.0\nrig2 ssh-ed25519 AAAA\nrig2 ssh-rsa BBBB\n@revoked rig2 ssh-rsa CCCC\n"
    )
    assert shown == [HostKey("ssh-ed25519", "AAAA"), HostKey("ssh-rsa", "BBBB")]
    assert not hostkeys.is_known(shown, [], "rig2")
    assert hostkeys.is_known(shown, [HostKey("ssh-rsa", "BBBB")], "rig2")
    with pytest.raises(SetupError, match="another host key than before"):
        hostkeys.is_known(shown, [HostKey("ssh-rsa", "DDDD")], "rig2")
    assert hostkeys.format_known_hosts("gpuhub-rig2", shown[:1]) == "gpuhub-rig2 ssh-ed25519 AAAA\n"


def test_fingerprints_are_as_ssh_shows_them(tmp_path: Path) -> None:
    file = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    shown = subprocess.run(["ssh-keygen", "-lf", file], check=True, capture_output=True, text=True).stdout
    kind, blob = file.with_suffix(".pub").read_text().split()[:2]
    assert HostKey(kind, blob).fingerprint == shown.split()[1]


def test_the_key_is_made_once_and_is_roots_alone(tmp_path: Path) -> None:
    files = SshFiles(tmp_path / "ssh")
    public = keys.ensure_key(files, "gpuhub")
    assert public.split()[0] == "ssh-ed25519"
    assert public.split()[2].startswith("gpuhub@")
    files.key.chmod(0o644)
    assert keys.ensure_key(files, "gpuhub") == public
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700


def test_ssh_uses_our_key_for_nodes_that_were_added_alone(tmp_path: Path) -> None:
    """Others go on with root's own keys, as cluster.toml has always allowed."""
    files = SshFiles(tmp_path)
    assert files.options("rig2") == []
    files.known_hosts("rig2").write_text("gpuhub-rig2 ssh-ed25519 AAAA\n")
    command = tunnels.build_command("ssh://me@rig2", tmp_path / "rig2.sock", files.options("rig2"))
    assert command[-2:] == ["--", "rig2"]
    assert command[command.index("-i") + 1] == str(files.key)
    assert {"StrictHostKeyChecking=yes", "IdentitiesOnly=yes", "HostKeyAlias=gpuhub-rig2"} <= set(command)
    assert files.options("rig3") == []


def change(home: Path, *, wanted: bool) -> str:
    words = keys.build_words(PUBLIC, wanted=wanted)
    subprocess.run(
        ["sh", "-s", "--", *words],
        input=keys.CHANGE_SCRIPT,
        check=True,
        text=True,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
    )
    return (home / ".ssh/authorized_keys").read_text()


@pytest.mark.parametrize("before", [None, "", "ssh-ed25519 OTHER me@laptop\n", "# mine\nssh-ed25519 OTHER me@laptop"])
def test_the_key_is_let_in_and_taken_out(tmp_path: Path, before: str | None) -> None:
    """Other keys stay as they are; again changes nothing; an older line of the same key is replaced."""
    folder = tmp_path / ".ssh"
    if before is not None:
        folder.mkdir()
        (folder / "authorized_keys").write_text(before)
    first = change(tmp_path, wanted=True)
    assert first.endswith(f"{keys.RESTRICTIONS} {PUBLIC}\n")
    assert first.startswith(before or "")
    (folder / "authorized_keys").write_text(first.replace("restrict,", ""))
    assert change(tmp_path, wanted=True) == first
    assert stat.S_IMODE((folder / "authorized_keys").stat().st_mode) in {0o600, 0o644}
    assert change(tmp_path, wanted=False).strip() == (before or "").strip()
    assert [file.name for file in folder.iterdir()] == ["authorized_keys"]


def test_what_is_sent_is_that_of_the_golden_file() -> None:
    """Scripts are constants; what differs between nodes are words that no shell takes for anything else, and PEM."""
    words = build_probe_words(
        docker_root="/srv/docker",
        head="192.168.1.20",
        places=[("192.168.1.20", 8081), ("nas.lan", 2049)],
        accounts=["ada"],
    )
    made = certificates.NodeCertificates(
        authority=b"AUTHORITY\n",
        server=b"SERVER\n",
        server_key=b"SERVER KEY\n",
        client=b"CLIENT\n",
        client_key=b"CLIENT KEY\n",
    )
    started = "{ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd -H fd:// $OPTIONS ; ignore_errors=no ; pid=1 }"
    parts = [
        "probe " + " ".join(words),
        "let in " + " ".join(keys.build_words(PUBLIC, wanted=True)),
        "take out " + " ".join(keys.build_words(PUBLIC, wanted=False)),
        keys.CHANGE_SCRIPT,
        daemon_tls.build_files_script(made),
        daemon_tls.build_drop_in_script(daemon_tls.build_drop_in(started, "192.168.1.24")),
        daemon_tls.RESTART,
        daemon_tls.REMOVE,
    ]
    sent = "\n----\n".join(parts)
    assert sent == (GOLDEN / "sent.txt").read_text()
    assert "CLIENT" not in sent


# -- TLS ----------------------------------------------------------------------------------------------------------------


def test_flags_replace_our_earlier_ones() -> None:
    """And nothing else of how the daemon is started."""
    first = daemon_tls.build_drop_in("{ path=/d ; argv[]=/usr/sbin/dockerd -H fd:// ; x=y }", "192.168.1.24")
    line = next(line for line in first.splitlines() if line.startswith("ExecStart=/"))
    command = line.removeprefix("ExecStart=")
    again = daemon_tls.build_drop_in(f"{{ path=/d ; argv[]={command} ; x=y }}", "fd00::24")
    assert again.count("--tlsverify") == 1
    assert "-H tcp://[fd00::24]:2376 --tlsverify" in again
    assert "/usr/sbin/dockerd -H fd:// -H" in again
    with pytest.raises(SetupError, match="start dockerd there with these options"):
        daemon_tls.build_drop_in("", "192.168.1.24")


def test_certificates_are_for_one_side_and_one_node(tmp_path: Path) -> None:
    """A node's own opens no daemon; files are root's; a good one stays until it ends soon or the address is another."""
    made = certificates.make("rig4", "192.168.1.24", NOW)
    server, client = (x509.load_pem_x509_certificate(pem) for pem in (made.server, made.client))
    purposes = [
        [purpose._name for purpose in each.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value]
        for each in (server, client)
    ]
    assert purposes == [["serverAuth"], ["clientAuth"]]
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each.value) for each in names] == ["192.168.1.24", "rig4"]
    assert b"PRIVATE" not in made.authority + made.server + made.client
    files = settings.Tls(**{name: tmp_path / "docker/rig4" / f"{name}.pem" for name in ("ca", "cert", "key")})
    assert not certificates.is_good(files, "192.168.1.24", NOW, before=timedelta(days=30))
    certificates.store(files, made)
    certificates.store(files, made)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files.key.parent.iterdir()} == {0o600}
    assert certificates.is_good(files, "192.168.1.24", NOW, before=timedelta(days=30))
    assert not certificates.is_good(files, "203.0.113.4", NOW, before=timedelta(days=30))
    assert not certificates.is_good(files, "192.168.1.24", NOW + certificates.LIFE, before=timedelta(days=30))
    ssl.create_default_context(cafile=str(files.ca)).load_cert_chain(files.cert, files.key)
    certificates.forget(files)
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
        ("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert", "wants a certificate"),
        ("[SSL: SSLV3_ALERT_BAD_CERTIFICATE] sslv3 alert bad certificate", "does not accept tls.cert"),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca", "knows another authority"),
    ],
)
def test_a_refused_certificate_is_told_apart_from_silence(said: str, meaning: str) -> None:
    error = translate("rig3", requests.exceptions.SSLError(said))
    assert str(error).startswith("node rig3: unauthenticated: ")
    assert meaning in str(error)
    assert error.code == "node-unreachable"


def test_a_connection_that_breaks_off_may_mean_the_same() -> None:
    """With TLS 1.3 the refusal may get lost; without TLS nothing was refused."""
    reset = requests.exceptions.ConnectionError(
        "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"
    )
    assert "unauthenticated" in str(translate("rig3", reset, is_tls=True))
    assert str(translate("rig3", reset)) == "node rig3: its Docker daemon cannot be reached"


# -- cluster.toml --------------------------------------------------------------------------------------------------------


def test_a_node_is_put_below_the_others_and_taken_out_again(tmp_path: Path) -> None:
    """Comments and order stay; the new table stands before the next heading, and is all that differs."""
    before = EXAMPLE.read_text()
    after = cluster_file.put_node(before, RIG4)
    assert [line for line in after.splitlines() if line not in before.splitlines()] == [
        'name = "rig4"',
        'address = "192.168.1.24"',
        'docker = "ssh://me@192.168.1.24"',
    ]
    assert after.index('name = "rig3"') < after.index('name = "rig4"') < after.index("# ── Profiles")
    assert cluster_file.put_node(after, RIG4) == after
    assert cluster_file.take_node(after, "rig4") == before
    assert [node.name for node in cluster_file.check(after, tmp_path / "cluster.toml").nodes] == [
        "rig1", "rig2", "rig3", "rig4",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ['[[nodes]]\nname = "a"\n[users]\nallowed = ["x"]\n', '[users]\nx = 1\n[[nodes]]\nname = "a"']
)
def test_files_without_comments_or_an_end(text: str) -> None:
    after = cluster_file.put_node(text, RIG4)
    assert settings.tomllib.loads(after)["nodes"][1]["name"] == "rig4"
    taken = cluster_file.take_node(after, "rig4")
    assert settings.tomllib.loads(taken) == settings.tomllib.loads(text)


def test_a_nodes_way_is_changed_in_place() -> None:
    """From SSH to TLS and back; what else is said of it stays."""
    before = EXAMPLE.read_text()
    files = settings.Tls(ca=Path("/c/ca.pem"), cert=Path("/c/cert.pem"), key=Path("/c/key.pem"))
    over_tls = Node(name="rig2", address="192.168.1.22", docker="tcp://192.168.1.22:2376", tls=files)
    after = cluster_file.put_node(before, over_tls)
    node = settings.tomllib.loads(after)["nodes"][1]
    assert node["tls"] == {"ca": "/c/ca.pem", "cert": "/c/cert.pem", "key": "/c/key.pem"}
    assert node["gpus"] == [{"model": "RTX 5070", "memory": "12G"}]
    back = Node(name="rig2", address="192.168.1.22", docker="ssh://gpuhub@192.168.1.22")
    assert cluster_file.put_node(after, back) == before


def test_the_middle_and_an_unknown_node_are_taken_out() -> None:
    before = EXAMPLE.read_text()
    nodes = settings.tomllib.loads(cluster_file.take_node(before, "rig2"))["nodes"]
    assert [node["name"] for node in nodes] == ["rig1", "rig3"]
    with pytest.raises(NotFound, match="no node 'rig9'"):
        cluster_file.take_node(before, "rig9")


def test_a_wrong_file_is_never_written(tmp_path: Path) -> None:
    """What would not be right is said under the file's own name; what is right replaces it whole, with a copy."""
    file = tmp_path / "cluster.toml"
    file.write_text(EXAMPLE.read_text())
    file.chmod(0o640)
    twice = cluster_file.put_node(EXAMPLE.read_text(), RIG4.model_copy(update={"address": "192.168.1.22"}))
    with pytest.raises(SettingsError, match=rf"{file}: nodes: address = '192.168.1.22' stands 2 times"):
        cluster_file.check(twice, file)
    before = cluster_file.write(file, cluster_file.put_node(EXAMPLE.read_text(), RIG4))
    assert before.read_text() == EXAMPLE.read_text()
    assert "rig4" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cluster.toml", "cluster.toml.before"]


# -- leaving -------------------------------------------------------------------------------------------------------------


def test_nodes_that_the_others_need_stay() -> None:
    cluster = build_cluster()
    assert find_leaving(cluster, "rig2") == cluster.nodes[1]
    with pytest.raises(InvalidRequest, match="the first node and keeps the Swarm"):
        find_leaving(cluster, "rig1")
    with pytest.raises(NotFound, match="there are rig1, rig2, rig3"):
        find_leaving(cluster, "rig9")
    with pytest.raises(InvalidRequest, match="the only node"):
        find_leaving(cluster.model_copy(update={"nodes": cluster.nodes[:1]}), "rig1")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with asgi_broker(Setting(tmp_path, cluster=build_cluster())) as running:
        yield running


async def test_leases_keep_a_node_unless_forced(running: Running, tmp_path: Path) -> None:
    """They are shown, and nothing is changed; forced, they end, and the node takes nothing new."""
    container = await run_notebook(running, await ask(running, "ada"))
    client = BrokerClient(running.url, "own-token", transport=running.transport, patience_s=0)
    (held,) = await client.leases()
    node = next(node for node in build_cluster().nodes if node.name in held.nodes)
    output = io.StringIO()

    async def states() -> set[str]:
        return {view.state.value for view in await client.nodes()}

    async def stop_as_the_hub_does() -> None:
        await asyncio.to_thread(wait_until, lambda: running.setting.hub.stopped == [("ada", "")], "the hub is asked")
        running.setting.nodes[node.name].containers.pop(container)

    try:
        wish = Farewell(name=node.name, cluster_file=tmp_path / "cluster.toml", yes=True)
        with pytest.raises(Conflict, match=f"gpuhub node drain {node.name}"):
            await drain(wish, node, client, Console(output))
        assert "ada" in output.getvalue()
        with pytest.raises(InvalidRequest, match="nobody is there to confirm it"):
            await drain(replace(wish, force=True, yes=False), node, client, Console(output, io.StringIO()))
        assert await states() == {"up"}
        forced = replace(wish, force=True)
        await asyncio.gather(drain(forced, node, client, Console(output)), stop_as_the_hub_does())
        assert await client.leases() == []
        assert await states() == {"up", "draining"}
    finally:
        await client.close()


def test_a_node_that_does_not_answer_leaves_by_force_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file forgets it; what is there stays there, and that is said."""
    monkeypatch.setattr(Paths, "state", property(lambda self: tmp_path / "state"))
    monkeypatch.setattr(Paths, "run", property(lambda self: tmp_path / "run"))
    file = tmp_path / "cluster.toml"
    text = EXAMPLE.read_text().replace("ssh://gpuhub@192.168.1.22", "ssh://gpuhub@127.0.0.1:1")
    file.write_text(text)
    line = ["node", "remove", "rig2", "--yes", "--cluster-file", str(file), "--instance", "ghnone"]
    with pytest.raises(SystemExit):
        cli.main(line)
    assert "With --force it is taken out of cluster.toml" in capsys.readouterr().err
    assert file.read_text() == text
    cli.main([*line, "--force"])
    assert "nothing was undone on rig2" in capsys.readouterr().out
    assert [node.name for node in settings.load(file).nodes] == ["rig1", "rig3"]


# -- the command line ------------------------------------------------------------------------------------------------------


def test_a_missing_cluster_file_says_where_to_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["node", "add", "ssh://me@rig2", "--cluster-file", str(tmp_path / "cluster.toml")])
    assert ended.value.code == 1
    assert "copy cluster.example.toml to it" in capsys.readouterr().err


def test_the_firewall_of_an_unknown_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["node", "firewall", "rig9", "--cluster-file", str(EXAMPLE)])
    assert "there is no node 'rig9'; there are rig1, rig2, rig3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["doctor", "rig9", "--cluster-file", str(EXAMPLE), "--instance", "ghnone"])
    assert "there is no node 'rig9'" in capsys.readouterr().err
