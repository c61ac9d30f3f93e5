"""Files for the installers of Ubuntu and Debian."""

from __future__ import annotations

import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from gpuhub.cli.nodes import node_group
from gpuhub.common.errors import InvalidRequest
from gpuhub.ops.provision.installer_files import InstallerRequest, build_installer_file, read_first_line

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIK ada@laptop"
HASH = "$y$j9T$ZKqk9Tv0Vd5Hc1$9mQe2m7Qx/aXb1u3S0yJt6pVn4wK8rLzEo5fGh7DiC2"


def request(**changes: Any) -> InstallerRequest:
    values = {"system": "ubuntu", "name": "rig4", "user": "me", "public_key": KEY, "disk": "/dev/nvme0n1", **changes}
    return InstallerRequest(**values)


def read_preseed(text: str) -> dict[str, tuple[str, str, str]]:
    """Return owner, type and value of each question."""
    lines = [line.split(" ", 3) for line in text.splitlines() if line and not line.startswith("#")]
    return {line[1]: (line[0], line[2], line[3] if len(line) > 3 else "") for line in lines}


def test_ubuntus_file_is_yaml_with_the_documented_keys() -> None:
    """Keys and types as in the installer's autoinstall-schema.json."""
    text = build_installer_file(request())
    assert text.startswith("#cloud-config\n# WARNING: this file ERASES the disk /dev/nvme0n1 ")
    document = yaml.safe_load(text)
    assert list(document) == ["autoinstall"]
    autoinstall = document["autoinstall"]
    assert autoinstall["version"] == 1
    assert autoinstall["identity"] == {"hostname": "rig4", "realname": "me", "username": "me", "password": "!"}
    assert autoinstall["ssh"] == {"install-server": True, "allow-pw": False, "authorized-keys": [KEY]}
    assert autoinstall["storage"] == {"layout": {"name": "direct", "match": {"path": "/dev/nvme0n1"}}}
    assert {"chrony", "nfs-common", "curl"} <= set(autoinstall["packages"])
    assert autoinstall["late-commands"] == [
        "echo 'me ALL=(ALL) NOPASSWD:ALL' >/target/etc/sudoers.d/gpuhub-prepare",
        "chmod 440 /target/etc/sudoers.d/gpuhub-prepare",
    ]
    assert autoinstall["timezone"] == "UTC"  # the schema of Ubuntu's installer has no Etc/UTC
    assert "interactive-sections" not in autoinstall


def test_names_that_yaml_would_read_as_something_else_stay_text() -> None:
    identity = yaml.safe_load(build_installer_file(request(name="no", user="on")))["autoinstall"]["identity"]
    assert (identity["hostname"], identity["username"]) == ("no", "on")


def test_largest_disk_is_named_in_the_warning() -> None:
    text = build_installer_file(request(disk=None))
    assert "ERASES the LARGEST disk" in text
    assert yaml.safe_load(text)["autoinstall"]["storage"] == {"layout": {"name": "direct"}}


def test_debians_answers() -> None:
    text = build_installer_file(request(system="debian", password_hash=HASH))
    assert text.startswith("#_preseed_V1\n# WARNING: this file ERASES the disk /dev/nvme0n1 ")
    answers = read_preseed(text)
    assert answers["partman-auto/disk"] == ("d-i", "string", "/dev/nvme0n1")
    assert answers["grub-installer/bootdev"] == ("d-i", "string", "/dev/nvme0n1")
    assert answers["passwd/user-password-crypted"] == ("d-i", "password", HASH)
    assert answers["passwd/root-login"] == ("d-i", "boolean", "false")
    assert answers["partman-efi/non_efi_system"] == ("d-i", "boolean", "true")
    assert answers["netcfg/get_hostname"] == ("d-i", "string", "rig4")
    assert answers["apt-setup/non-free-firmware"] == ("d-i", "boolean", "true")
    assert "openssh-server" in answers["pkgsel/include"][2]
    late = answers["preseed/late_command"][2]
    assert f"echo '{KEY}' >/target/home/me/.ssh/authorized_keys" in late
    any_disk = read_preseed(build_installer_file(request(system="debian", disk=None)))
    assert "partman-auto/disk" not in any_disk
    assert any_disk["grub-installer/bootdev"][2] == "default"


@pytest.mark.process
def test_debconf_accepts_the_answers() -> None:
    def check(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["debconf-set-selections", "--checkonly"], input=text, capture_output=True, text=True, check=False
        )

    text = build_installer_file(request(system="debian"))
    accepted = check(text)
    assert (accepted.returncode, accepted.stderr) == (0, "")
    assert check(text.replace("d-i passwd/root-login boolean false", "d-i passwd/root-login")).returncode != 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Rig 4"}, "not a name of a machine"),
        ({"user": "me; id"}, "not a name of an account"),
        ({"user": "root"}, "reserve the account 'root'"),
        ({"public_key": "-----BEGIN OPENSSH PRIVATE KEY-----"}, "not a public SSH key"),
        ({"public_key": f"{KEY}'; id; '"}, "not a public SSH key"),
        ({"disk": "nvme0n1"}, "write such as /dev/nvme0n1"),
        ({"disk": "/dev/sd*"}, "write such as /dev/nvme0n1"),
        ({"password_hash": "secret"}, "not a hash of crypt"),
    ],
)
def test_other_values_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refusal:
        request(**changes)
    assert "secret" not in str(refusal.value)


def test_command_writes_a_private_file_once(tmp_path: Path) -> None:
    key, output = tmp_path / "id.pub", tmp_path / "user-data"
    key.write_text(f"{KEY}\n")
    words = ["autoinstall", "--system", "ubuntu", "--name", "rig4", "--user", "me", "--ssh-key", str(key)]
    for disks in ([], ["--disk", "/dev/sda", "--any-disk"]):
        refused = CliRunner().invoke(node_group, [*words, *disks])
        assert isinstance(refused.exception, InvalidRequest)
        assert "--any-disk" in str(refused.exception)
    words += ["--disk", "/dev/sda", "--output", str(output)]
    assert CliRunner().invoke(node_group, words).exit_code == 0
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert output.read_text() == build_installer_file(request(disk="/dev/sda"))
    again = CliRunner().invoke(node_group, words)
    assert isinstance(again.exception, InvalidRequest)
    assert "exists: remove it first" in str(again.exception)


def test_files_of_keys_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_first_line(tmp_path / "nothing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidRequest, match="is empty"):
        read_first_line(tmp_path / "empty")
