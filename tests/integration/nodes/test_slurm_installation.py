"""`gpuhub slurm` over real SSH; apt-get, systemctl, MariaDB, useradd and Slurm's commands are stand-ins.

The files are real: they are written by the real shell, with real owners and modes.
"""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpuhub.cli.console import AdminConsole
from gpuhub.common.errors import GpuhubError, InvalidRequest, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.machines.nodes import ExpectedGpus, NodeSettings
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.ssh import scan_host_keys
from gpuhub.ops.provision.ssh_session import SshSession, parse_target
from gpuhub.ops.slurm import users
from gpuhub.ops.slurm.installation import SlurmRequest, initialize_slurm
from tests.support.closet.bare_machines import BareMachine, bare_machine
from tests.support.closet.ssh_machines import make_key, ssh_agent
from tests.support.docker.simulated_nodes import build_cluster

pytestmark = [pytest.mark.root]

#: An instance that does not exist: there are no agents, and no settings that gpuhub runs with.
PATHS = Paths("ghbare")
ADDRESSES = {"rig1": "127.0.0.11", "rig2": "127.0.0.12", "rig3": "127.0.0.13"}
CARDS = {"rig1": "RTX 5060", "rig2": "RTX 5090", "rig3": "RTX 5070"}


@dataclass(frozen=True, slots=True)
class Lab:
    """A head node, which is the node rig1, and two further nodes."""

    machines: dict[str, BareMachine]
    head: SshSession
    cluster: ClusterSettings

    def init(self, request: SlurmRequest, answers: io.StringIO | None = None) -> str:
        """Return the output; the questions are skipped without `answers`."""
        output = io.StringIO()
        request = replace(request, yes=answers is None)
        try:
            initialize_slurm(request, self.cluster, PATHS, AdminConsole(output, answers), self.head)
        except GpuhubError as error:
            error.add_note(output.getvalue())
            raise
        return output.getvalue()

    def calls(self) -> list[list[str]]:
        return [machine.read_calls() for machine in self.machines.values()]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.delenv("SUDO_USER", raising=False)
    make_key(tmp_path / "admin")
    with ExitStack() as stack:
        monkeypatch.setenv("SSH_AUTH_SOCK", stack.enter_context(ssh_agent(tmp_path / "admin")))
        machines = {
            name: stack.enter_context(bare_machine(tmp_path / name, address, tmp_path / "admin"))
            for name, address in ADDRESSES.items()
        }
        target = parse_target(machines["rig1"].root_url)
        assert target.port is not None
        head = stack.enter_context(SshSession(target, scan_host_keys(target.host, target.port)))
        base = build_cluster()
        nodes = tuple(
            NodeSettings(
                name=name,
                address=ADDRESSES[name],
                docker="unix:///run/docker.sock" if name == "rig1" else machine.root_url,
                gpus=(ExpectedGpus.model_validate({"model": CARDS[name], "memory": "8G", "count": 2}),),
            )
            for name, machine in machines.items()
        )
        hub = base.hub.model_copy(update={"address": ADDRESSES["rig1"]})
        yield Lab(machines, head, base.model_copy(update={"nodes": nodes, "hub": hub}))


def test_slurm_is_installed_once(lab: Lab) -> None:
    request = SlurmRequest(has_accounting=True, has_rest=True)
    text = lab.init(request)
    for name, machine in lab.machines.items():
        assert "Gres=gpu:rtx5090:2\n" in machine.read("etc/slurm/slurm.conf")
        assert f"NodeName={name} Name=gpu Type=" in machine.read("etc/slurm/gres.conf")
        assert stat.S_IMODE((machine.folder / "etc/slurm/gpuhub-epilog.sh").stat().st_mode) == 0o755
        key = machine.folder / "etc/munge/munge.key"
        assert (stat.S_IMODE(key.stat().st_mode), key.stat().st_uid) == (0o400, 64997)
        assert "idle" in text
    assert len({(machine.folder / "etc/munge/munge.key").read_bytes() for machine in lab.machines.values()}) == 1
    head, node = lab.machines["rig1"], lab.machines["rig2"]
    installed = [call.rpartition("Timeout=300 ")[2] for call in node.read_calls() if " install " in call]
    assert installed == ["munge slurm-client slurmd slurm-wlm-jwt-plugin"]
    assert [call for call in node.read_calls() if "systemctl restart" in call] == [
        "systemctl restart munge",
        "systemctl restart slurmd",
    ]
    assert "sacctmgr -i add cluster ghbare" in head.read_calls()
    conf = head.folder / "etc/slurm/slurmdbd.conf"
    assert (stat.S_IMODE(conf.stat().st_mode), conf.stat().st_uid) == (0o600, 64030)
    password = conf.read_text().rpartition("StoragePass=")[2].strip()
    assert f"IDENTIFIED BY '{password}'" in head.read("state/sql")
    assert password not in text
    assert password not in "".join(call for calls in lab.calls() for call in calls)
    assert not (node.folder / "etc/slurm/slurmdbd.conf").exists()
    assert 'rest_key = "/etc/slurm/jwt_hs256.key"' in text

    before = lab.calls()
    again = lab.init(request)
    assert lab.calls() == before
    assert again.count("There is nothing to do.") == 3


def test_only_the_difference_is_changed(lab: Lab) -> None:
    """A further partition's name changes slurm.conf everywhere, and restarts only what reads it."""
    lab.init(SlurmRequest())
    before = lab.machines["rig2"].read_calls()
    text = lab.init(SlurmRequest(partition="long"))
    assert "/etc/slurm/slurm.conf on rig1, rig2, rig3:" in text
    assert "-PartitionName=gpu Nodes=ALL State=UP Default=YES" in text
    assert "+PartitionName=long Nodes=ALL State=UP Default=YES" in text
    assert lab.machines["rig2"].read_calls()[len(before) :] == [
        "systemctl daemon-reload",
        "systemctl enable slurmd",
        "systemctl restart slurmd",
    ]


def test_slurm_of_the_site_is_not_changed(lab: Lab, tmp_path: Path) -> None:
    """Files can be written elsewhere nevertheless, for root alone."""
    foreign = lab.machines["rig3"].folder / "etc/slurm/slurm.conf"
    foreign.parent.mkdir()
    foreign.write_text("ClusterName=site\n")
    with pytest.raises(SetupError, match=r"rig3: /etc/slurm/slurm\.conf was not written by gpuhub"):
        lab.init(SlurmRequest())
    output = tmp_path / "files"
    lab.init(SlurmRequest(output=output, has_accounting=True))
    assert stat.S_IMODE(output.stat().st_mode) == 0o700
    assert {str(path.relative_to(output)): stat.S_IMODE(path.stat().st_mode) for path in output.rglob("*.*")} == {
        "etc/munge/munge.key": 0o400,
        "etc/slurm/slurm.conf": 0o644,
        "etc/slurm/gres.conf": 0o644,
        "etc/slurm/cgroup.conf": 0o644,
        "etc/slurm/gpuhub-epilog.sh": 0o755,
        "etc/slurm/slurmdbd.conf": 0o600,
    }
    with pytest.raises(InvalidRequest, match="is not an empty folder"):
        lab.init(SlurmRequest(output=output))
    assert lab.calls() == [[], [], []]
    assert foreign.read_text() == "ClusterName=site\n"


def test_failed_node_is_named_and_continued(lab: Lab) -> None:
    lab.machines["rig2"].miss_package("slurmd")
    with pytest.raises(GpuhubError, match=r"rig2: on 127\.0\.0\.12: E: Unable to locate package slurmd") as failure:
        lab.init(SlurmRequest())
    assert "rig3 | ✓ done" in failure.value.__notes__[0]
    (lab.machines["rig2"].folder / "state/missing").unlink()
    before = lab.machines["rig3"].read_calls()
    assert "rig2 idle" in lab.init(SlurmRequest())
    assert lab.machines["rig3"].read_calls() == before


def test_head_without_slurmd(lab: Lab) -> None:
    lab.init(SlurmRequest(head_computes=False))
    head = lab.machines["rig1"]
    assert "NodeName=rig1" not in head.read("etc/slurm/slurm.conf")
    assert "systemctl restart slurmd" not in head.read_calls()


def test_head_that_is_not_a_node(lab: Lab) -> None:
    """It has slurmctld alone, and cannot compute without its table in cluster.toml."""
    others = replace(lab, cluster=lab.cluster.model_copy(update={"nodes": lab.cluster.nodes[1:]}))
    with pytest.raises(InvalidRequest, match=r"--head-computes: the head node is not a node of cluster\.toml"):
        others.init(SlurmRequest(head_computes=True))
    text = others.init(SlurmRequest())
    assert "head | … enable and restart slurmctld" in text
    assert "systemctl restart slurmd" not in lab.machines["rig1"].read_calls()


def test_nothing_changes_without_a_terminal(lab: Lab) -> None:
    with pytest.raises(GpuhubError):
        lab.init(SlurmRequest(), answers=io.StringIO())
    assert lab.calls() == [[], [], []]


def test_unreachable_node_stops_everything(lab: Lab) -> None:
    gone = NodeSettings(name="rig4", address="127.0.0.14", docker="ssh://root@127.0.0.14:9", gpus=())
    lab = replace(lab, cluster=lab.cluster.model_copy(update={"nodes": (*lab.cluster.nodes, gone)}))
    with pytest.raises(SetupError, match=r"not all nodes can be reached:\n  rig4: "):
        lab.init(SlurmRequest())
    assert lab.calls() == [[], [], []]


def test_users_get_the_same_accounts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a second call there is nothing to do, and a different number is refused with both."""
    monkeypatch.setattr(users, "find_uids", lambda *_: {"ada": 50001, "ben": 50002})
    output = io.StringIO()
    users.create_accounts(lab.cluster, PATHS, AdminConsole(output), lab.head, yes=True)
    for machine in lab.machines.values():
        assert "ada:x:50001:50001:" in machine.read("etc/passwd")
        assert "ben:x:50002:\n" in machine.read("etc/group")
    before = lab.calls()
    users.create_accounts(lab.cluster, PATHS, AdminConsole(output), lab.head, yes=True)
    assert lab.calls() == before
    assert output.getvalue().count("There is nothing to do.") == 3

    monkeypatch.setattr(users, "find_uids", lambda *_: {"ada": 50003, "eve": 50002})
    with pytest.raises(GpuhubError) as refusal:
        users.create_accounts(lab.cluster, PATHS, AdminConsole(output), lab.head, yes=True)
    assert "rig3: ada must have the UID 50003 and has 50001" in str(refusal.value)
    assert "rig2: the UID 50002 must be eve's and is ben's" in str(refusal.value)
    assert lab.calls() == before
