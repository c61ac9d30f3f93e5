"""The host keys that `gpuhub node add` trusts, with real SSH servers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gpuhub.cli.console import AdminConsole
from gpuhub.common.errors import SetupError
from gpuhub.docker.ssh import HostKey, SshFiles, format_known_hosts, parse_keys
from gpuhub.ops.provision.node_join import verify_host_keys
from gpuhub.ops.provision.ssh_session import ResolvedTarget, SshSession, SshTarget
from tests.support.closet.ssh_machines import loopback_sshd, make_key

pytestmark = [pytest.mark.root]


class Machine:
    """A machine with an ed25519 key, and an impostor who answers for the key of another kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own_file, self.impostor_file = folder / "own", folder / "impostor"
        make_key(self.own_file)
        make_key(self.impostor_file, "rsa")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.known_hosts = folder / "known_hosts"
        self.target = SshTarget(user="nobody", host="127.0.0.1", port=self.port)

    def verify(self, *known: HostKey, name: str = "rig2") -> list[HostKey]:
        """Return the trusted keys where the administrator's ssh knows these keys."""
        self.known_hosts.write_text(format_known_hosts(f"[127.0.0.1]:{self.port}", known))
        resolved = ResolvedTarget(
            host="127.0.0.1", user="nobody", port=self.port, jump=None, known_hosts=(str(self.known_hosts),)
        )
        return verify_host_keys(resolved, SshFiles(self.folder), name, AdminConsole(), is_confirmed=True)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def read_key(file: Path) -> HostKey:
    [key] = parse_keys(f"host {file.with_suffix('.pub').read_text()}")
    return key


def test_known_key_does_not_vouch_for_another(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """An impostor who answers for one kind of key is neither trusted nor spoken to later."""
    own, impostor = read_key(machine.own_file), read_key(machine.impostor_file)
    with loopback_sshd(machine.folder, machine.port, machine.own_file, machine.impostor_file):
        keys = machine.verify(own)
    assert keys == [own]
    assert f"are not trusted: ssh-rsa {impostor.fingerprint}" in capsys.readouterr().out
    with (
        loopback_sshd(machine.folder, machine.port, machine.impostor_file),
        pytest.raises(SetupError, match="Host key verification failed"),
        SshSession(machine.target, keys),
    ):
        pass


def test_new_machine_is_trusted_by_the_compared_key_alone(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    own, impostor = read_key(machine.own_file), read_key(machine.impostor_file)
    with loopback_sshd(machine.folder, machine.port, machine.own_file, machine.impostor_file):
        keys = machine.verify()
    assert keys == [own]
    text = capsys.readouterr().out
    assert f"Its host key:\n  ssh-ed25519  {own.fingerprint}" in text
    assert f"are not trusted: ssh-rsa {impostor.fingerprint}" in text


def test_repair_compares_with_the_stored_key(machine: Machine) -> None:
    """A node that gpuhub knows must show the stored key, also where the administrator's ssh has never seen it."""
    stored = SshFiles(machine.folder).known_hosts("rig2")
    stored.write_text(format_known_hosts("gpuhub-rig2", [read_key(machine.own_file)]))
    with loopback_sshd(machine.folder, machine.port, machine.impostor_file):
        with pytest.raises(SetupError, match="another host key than before") as refusal:
            machine.verify()
        assert f"remove {stored}" in str(refusal.value)
        assert machine.verify(name="rig3") == [read_key(machine.impostor_file)]
