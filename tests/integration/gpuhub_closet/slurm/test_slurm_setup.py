"""The closet's Slurm: its files and daemons, and the choice of the backend by `make up`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.backends.plugin import find_capabilities
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.users.users import UserSettings
from gpuhub.ops.deploy import cluster_choice
from gpuhub_closet import provider
from gpuhub_closet.cluster_file import SLURM_API, format_cluster
from gpuhub_closet.layouts import build_plan
from gpuhub_closet.slurm import slurm_daemons, slurm_setup
from gpuhub_closet.slurm.slurm_config import format_gres_conf, format_slurm_conf

INSTANCE = "unittest"
PRACTICE = cluster_choice.ClusterChoice(origin=cluster_choice.ClusterOrigin.PROVIDER, cluster_file=Path("closet.toml"))


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Folders of the test, and an instance without a closet, because its processes would be ended."""
    monkeypatch.setattr(Paths, "state", property(lambda self: tmp_path / "state"))
    (tmp_path / "state").mkdir()
    return Paths(INSTANCE)


def test_gres_conf_matches_the_counts_and_types_of_gpus():
    """gres.conf has the counts of slurm.conf, and types are the models in small letters."""
    files = slurm_setup.build_slurm_config(build_plan("ghtest"), Paths("ghtest"))
    assert [node.gpus for node in files.nodes] == [("rtx5090",), ("rtx5070",), ("rtx5060",)]
    conf = format_slurm_conf(files)
    assert "NodeName=rig2 NodeHostname=rig2 NodeAddr=10.87.0.12" in conf
    assert "Gres=gpu:rtx5070:1" in conf
    assert "SlurmctldHost=ghtest-head(10.87.0.1)" in conf
    assert "Epilog=/var/lib/ghtest/closet/slurm/epilog" in conf
    assert "NodeName=rig3 Name=gpu Type=rtx5060 " in format_gres_conf(files)


def test_closets_and_the_systems_slurm_are_separate():
    """Each has its own port, address and files."""
    first, other = (slurm_setup.build_slurm_config(build_plan(name), Paths(name)) for name in ("gpuhub", "ghtest"))
    assert len({first.port, other.port, 6817}) == 3
    assert (first.head_address, other.head_address) == ("10.77.0.1", "10.87.0.1")
    assert not other.conf.is_relative_to(first.folder)
    assert "CommunicationParameters=NoCtldInAddrAny" in format_slurm_conf(first)


def test_the_epilog_uses_the_docker_of_its_node():
    """Every node runs the same file."""
    text = slurm_setup.build_epilog(Paths("ghtest"))
    assert 'DOCKER_HOST="unix:///run/ghtest/closet/$SLURMD_NODENAME/docker.sock" exec ' in text
    assert str(slurm_setup.EPILOG) in text
    assert slurm_setup.EPILOG.exists()


def test_daemons_run_in_namespaces_with_the_closets_accounts(paths):
    """A node's slurmd runs in its network and under its name; all run with the closet's folder over /etc, read-only."""
    plan = build_plan(INSTANCE)
    command = slurm_daemons.build_command(plan, paths, "rig2")
    assert command[:2] == ["nsenter", "--net=/run/netns/unittest-rig2"]
    assert command[-4:] == ["slurmd", "-D", "-N", "rig2"]
    for program in ("munged", "slurmctld", "rig1"):
        command = slurm_daemons.build_command(plan, paths, program)
        assert "--mount" in command
        assert str(slurm_setup.etc_folder(paths)) in command
    assert '"ro,lowerdir=$1:/etc"' in " ".join(command)


def test_users_can_read_what_they_need(paths):
    """All users can read slurm.conf, gres.conf and munge's socket; only root can read the key and the queue."""
    slurm_setup.prepare_slurm(build_plan(INSTANCE), paths, UserSettings(allowed=("ada", "ben"), uid_first=20000))
    files = slurm_setup.build_slurm_config(build_plan(INSTANCE), paths)
    modes = {
        path: path.stat().st_mode & 0o777
        for path in (files.conf, files.gres_conf, files.munge_socket.parent, files.state, slurm_setup.key_file(paths))
    }
    assert list(modes.values()) == [0o644, 0o644, 0o755, 0o700, 0o600]
    assert all(device.is_char_device() for device in files.devices)


def test_users_have_the_uids_of_gpuhub(paths):
    """Slurm's daemons have them in addition to the machine's accounts, whose files do not change."""
    before = Path("/etc/passwd").read_text()
    slurm_setup.prepare_slurm(build_plan(INSTANCE), paths, UserSettings(allowed=("ada", "ben"), uid_first=20000))
    lines = (slurm_setup.etc_folder(paths) / "passwd").read_text().splitlines()
    numbers = {line.split(":")[0]: line.split(":")[2] for line in lines}
    assert {numbers["root"], numbers["ada"], numbers["ben"]} == {"0", "20000", "20001"}
    assert Path("/etc/passwd").read_text() == before


def test_a_new_closet_drops_old_jobs_once(paths):
    """slurmctld drops them at its first start after `make down`, and keeps its queue at a restart."""
    plan, users = build_plan(INSTANCE), UserSettings(allowed=("ada",), uid_first=20000)
    slurm_setup.prepare_slurm(plan, paths, users)
    key = slurm_setup.key_file(paths).read_text()
    assert slurm_setup.consume_drop_marker(paths)
    assert slurm_daemons.build_command(plan, paths, "slurmctld", drop_jobs=True)[-1] == "-c"
    slurm_setup.prepare_slurm(plan, paths, users)
    assert not slurm_setup.consume_drop_marker(paths)
    assert slurm_daemons.build_command(plan, paths, "slurmctld")[-1] == "-D"
    slurm_daemons.stop_daemons(plan, paths)
    slurm_setup.prepare_slurm(plan, paths, users)
    assert slurm_setup.consume_drop_marker(paths)
    assert slurm_setup.key_file(paths).read_text() == key


@pytest.mark.parametrize(
    ("state", "is_heard"),
    [("idle", True), ("mixed", True), ("drained", True), ("idle*", False), ("down*", False), ("unknown", False), ("", False)],
)  # fmt: skip
def test_a_node_is_ready_when_its_slurmd_answers(state, is_heard):
    """A drained node is ready: the administrator drained it."""
    assert slurm_daemons.is_answering_state(state) is is_heard


def test_the_cluster_file_for_slurm_has_no_keys_of_the_builtin_backend(tmp_path):
    """gpuhub's parser accepts it: no shares, no preemption, the closet's slurm.conf."""
    file = tmp_path / "cluster.toml"
    file.write_text(format_cluster(build_plan("ghtest"), Paths("ghtest"), cpus=2, backend="slurm"))
    cluster = settings.load(file)
    assert cluster.engine == "slurm"
    assert cluster.slurm.conf == Path("/var/lib/ghtest/closet/slurm/slurm.conf")
    assert [profile.name for profile in cluster.profiles] == ["rtx5090", "rtx5070", "rtx5060", "cpu"]
    assert not cluster.scheduling.preemption
    assert find_capabilities(cluster).containers


@pytest.mark.parametrize(
    ("asked", "running", "expected"),
    [
        (None, None, "builtin"),
        ("slurm", None, "slurm"),
        (None, "slurm", "slurm"),
        ("slurm", "slurm", "slurm"),
        ("builtin", "builtin", "builtin"),
    ],
)
def test_the_closet_keeps_its_backend_until_it_is_down(asked, running, expected):
    """`make up` without ENGINE continues with the running first."""
    assert cluster_choice.choose_engine(asked, running) == expected


def test_a_running_closet_does_not_change_its_backend():
    """Running notebooks could not move: the error has the remedy."""
    with pytest.raises(SetupError, match="make down` first, then `sudo make up ENGINE=slurm"):
        cluster_choice.choose_engine("slurm", "builtin")


def test_a_cluster_file_has_its_own_backend():
    """A contradicting ENGINE= is refused, and an equal one is accepted."""
    given = cluster_choice.ClusterChoice(
        origin=cluster_choice.ClusterOrigin.SETTINGS, cluster_file=Path("/etc/cluster.toml")
    )
    cluster_choice.check_requested_engine(given, "slurm", None)
    cluster_choice.check_requested_engine(given, "slurm", "slurm")
    cluster_choice.check_requested_engine(PRACTICE, "slurm", "slurm")
    with pytest.raises(SettingsError, match=r'/etc/cluster.toml is for engine = "builtin": to use ENGINE=slurm'):
        cluster_choice.check_requested_engine(given, "builtin", "slurm")
    own = cluster_choice.ClusterChoice(
        origin=cluster_choice.ClusterOrigin.THIS_MACHINE, cluster_file=Path("this-machine.toml")
    )
    with pytest.raises(SettingsError, match="this machine has a GPU: write a cluster"):
        cluster_choice.check_requested_engine(own, "builtin", "slurm")


def test_tests_may_use_slurmrestd(tmp_path, paths, monkeypatch):
    """It runs as its own user, at a socket that only this user and root can reach; only root can read the key."""
    monkeypatch.setenv(SLURM_API, "rest")
    plan, file = build_plan(INSTANCE), tmp_path / "cluster.toml"
    file.write_text(format_cluster(plan, paths, cpus=2, backend="slurm"))
    table = settings.load(file).slurm
    socket, key = slurm_setup.rest_socket(paths), slurm_setup.jwt_key_file(paths)
    assert (table.api, table.rest_url, table.rest_key) == ("rest", f"unix://{socket}", key)
    slurm_setup.prepare_slurm(plan, paths, UserSettings(allowed=("ada",), uid_first=20000), has_rest=True)
    assert f"AuthAltParameters=jwt_key={key}" in slurm_setup.build_slurm_config(plan, paths).conf.read_text()
    assert (socket.parent.stat().st_mode & 0o777, key.stat().st_mode & 0o777) == (0o700, 0o600)
    command = slurm_daemons.build_command(plan, paths, "slurmrestd")
    assert f"--reuid={socket.parent.stat().st_uid}" in command
    assert command[-1] == f"unix:{socket}"
    queue = provider.build_slurm_programs(paths, Path("/x/slurm.conf"), ["rig1"], has_rest=True)
    assert queue[-1].name == "slurmrestd"


def test_slurm_stops_before_docker_and_munged_last():
    """supervisord stops the highest priority first: services, slurmds, slurmctld, munged, dockerds."""
    paths = Paths("ghtest")
    daemons = provider.build_docker_programs(paths, ["rig1"])
    queue = provider.build_slurm_programs(paths, Path("/x/slurm.conf"), ["rig1", "rig2"])
    assert [program.name for program in queue] == ["munged", "slurmctld", "slurmd-rig1", "slurmd-rig2"]
    order = [program.priority for program in [*daemons, *queue]]
    assert order == sorted(order)
    assert len(set(order)) == len(order)
    assert all(program.environment == {"SLURM_CONF": "/x/slurm.conf"} for program in queue)


@pytest.mark.parametrize(
    ("supervised", "backend"),
    [
        (["proxy", "broker", "hub"], None),
        (["rig1", "rig2", "proxy", "broker", "hub"], "builtin"),
        (["rig1", "munged", "slurmctld", "slurmd-rig1", "hub"], "slurm"),
    ],
)
def test_running_backend_is_read_from_the_programs(supervised, backend):
    """Without programs of the closet none runs."""
    assert provider.PracticeCloset().find_running_backend(supervised) == backend
