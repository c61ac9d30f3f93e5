"""What `gpuhub slurm init` does without a machine: roles, readiness, the head node, its errors."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuhub.cli import main
from gpuhub.cli.console import AdminConsole
from gpuhub.common.errors import GpuhubError, InvalidRequest, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.machines.nodes import NodeSettings
from gpuhub.ops.doctor.node_facts import GpuFacts
from gpuhub.ops.provision import node_access
from gpuhub.ops.slurm import installation
from gpuhub.ops.slurm.installation import SlurmRequest, check_ready, initialize_slurm
from gpuhub.ops.slurm.machines import LocalShell, find_head_node
from tests.support.docker.simulated_nodes import build_cluster
from tests.support.slurm.installed import CLUSTER


class Head:
    """A head node with answers of `sinfo -h -N -o '%N %T'`, as Slurm 22.05 writes them; the last one stays."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def run(self, script: str, arguments: Sequence[str] = (), *, as_root: bool = False, timeout_s: float = 90.0) -> str:
        assert script.startswith("sinfo ")
        assert not arguments
        assert not as_root
        assert timeout_s
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not answer:
            raise SetupError("on head: slurm_load_partitions: Unable to contact slurm controller (connect failure)")
        return answer


def test_nodes_become_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmctld does not answer at once, then a node does not, and one has work already."""
    monkeypatch.setattr(installation, "_POLL_S", 0.0)
    output = io.StringIO()
    check_ready(Head("", "rig2 idle\nrig3 idle*\n", "rig2 mixed\nrig3 idle\n"), CLUSTER, AdminConsole(output))
    assert output.getvalue() == "\n`sinfo`: rig2 mixed, rig3 idle\n"


def test_nodes_that_take_no_work_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_READY_S", 0.0)
    with pytest.raises(GpuhubError, match=r"take no work yet: rig2 \(down\*\), rig3 \(unknown\)\. See `sinfo -R`"):
        check_ready(Head("rig2 down*\n"), CLUSTER, AdminConsole(io.StringIO()))


def test_head_node_is_found_by_socket_or_address() -> None:
    near = NodeSettings(name="rig1", address="10.0.0.1", docker="unix:///run/docker.sock")
    far = NodeSettings(name="rig2", address="10.0.0.2", docker="ssh://me@rig2")
    base = build_cluster()
    cluster = base.model_copy(update={"nodes": (far, near)})
    assert find_head_node(cluster, "10.0.0.9") == near
    cluster = base.model_copy(update={"nodes": (far,)})
    assert find_head_node(cluster, "10.0.0.2") == far
    assert find_head_node(cluster, "10.0.0.9") is None


def test_unknown_gpus_end_before_anything_starts() -> None:
    with pytest.raises(SetupError, match="nothing says which GPUs rig1, rig2, rig3 have"):
        initialize_slurm(
            SlurmRequest(), build_cluster(), Paths("ghnone"), AdminConsole(io.StringIO()), Head("never asked")
        )


@pytest.mark.parametrize(
    ("uuid", "message"),
    [("GPU-1", "which GPUs rig2, rig3 have"), ("MIG-1", "rig1: gpuhub under Slurm does not know MIG")],
)
def test_agents_name_the_gpus(uuid: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gpuhub runs; nodes whose agents do not answer need `gpus` in their tables."""

    async def query(*_: object, **__: object) -> tuple[dict[str, tuple[GpuFacts, ...]], dict[str, str], None]:
        gpu = GpuFacts(uuid=uuid, model="RTX 5090", memory_mib=32607, driver="580.95.05")
        return {"rig1": (gpu,), "rig2": ()}, {}, None

    monkeypatch.setattr(node_access, "query_other_nodes", query)
    monkeypatch.setattr(settings, "load", lambda _: build_cluster())
    monkeypatch.setattr(Paths, "used_cluster_file", tmp_path)
    with pytest.raises(SetupError, match=message):
        initialize_slurm(
            SlurmRequest(), build_cluster(), Paths("ghnone"), AdminConsole(io.StringIO()), Head("never asked")
        )


@pytest.mark.parametrize("value", ["gpu Nodes=ALL", "", "-x"])
def test_partition_is_a_plain_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(InvalidRequest, match="--partition"):
        main.cli.main(["slurm", "init", f"--partition={value}"], standalone_mode=False)


@pytest.mark.parametrize("command", ["init", "users"])
def test_commands_need_root(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SetupError, match=f"`gpuhub slurm {command}` needs root"):
        main.cli.main(["slurm", command], standalone_mode=False)


@pytest.mark.process
def test_scripts_run_on_this_machine() -> None:
    shell = LocalShell()
    assert shell.run('echo "$1"\n', ("ada",), as_root=True) == "ada\n"
    with pytest.raises(SetupError, match="on this machine: no such thing"):
        shell.run("echo no such thing >&2\nexit 3\n")
    with pytest.raises(SetupError, match="on this machine: it ended with status 4 and no output"):
        shell.run("exit 4\n")
