"""The closet's Slurm: what its daemons and the product are told of it, and which engine `make up` brings up."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub import settings
from gpuhub.closet import slurm, slurm_daemons
from gpuhub.closet.cluster_file import SLURM_API, format_cluster
from gpuhub.closet.plan import practice_plan
from gpuhub.closet.slurm_files import format_gres_conf, format_slurm_conf
from gpuhub.errors import SettingsError, SetupError
from gpuhub.head import choice, programs
from gpuhub.paths import Paths
from gpuhub.policy import Users

INSTANCE = "unittest"
PRACTICE = choice.Choice(kind=choice.Kind.PRACTICE, cluster_file=Path("closet.toml"))


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Folders of a test's own, and an instance that no closet has: its processes would be ended."""
    monkeypatch.setattr(Paths, "state", property(lambda self: tmp_path / "state"))
    monkeypatch.setattr(slurm, "PROGRAMS", {})
    (tmp_path / "state").mkdir()
    return Paths(INSTANCE)


def test_every_card_is_a_gpu_of_its_type():
    """gres.conf counts what slurm.conf says, and types are the models in small letters."""
    files = slurm.build_files(practice_plan("ghtest"), Paths("ghtest"))
    assert [node.gpus for node in files.nodes] == [("rtx5090",), ("rtx5070",), ("rtx5060",)]
    conf = format_slurm_conf(files)
    assert "NodeName=rig2 NodeHostname=rig2 NodeAddr=10.87.0.12" in conf
    assert "Gres=gpu:rtx5070:1" in conf
    assert "SlurmctldHost=ghtest-head(10.87.0.1)" in conf
    assert "Epilog=/var/lib/ghtest/closet/slurm/epilog" in conf
    assert "NodeName=rig3 Name=gpu Type=rtx5060 " in format_gres_conf(files)


def test_two_closets_and_a_system_s_slurm_are_apart():
    """Each has a port of its own, listens on its own address, and has files of its own."""
    one, other = (slurm.build_files(practice_plan(name), Paths(name)) for name in ("gpuhub", "ghtest"))
    assert len({one.port, other.port, 6817}) == 3
    assert (one.head_address, other.head_address) == ("10.77.0.1", "10.87.0.1")
    assert not other.conf.is_relative_to(one.folder)
    assert "CommunicationParameters=NoCtldInAddrAny" in format_slurm_conf(one)


def test_the_epilog_asks_the_docker_of_its_own_node():
    """Every node runs the same file."""
    text = slurm.build_epilog(Paths("ghtest"))
    assert 'DOCKER_HOST="unix:///run/ghtest/closet/$SLURMD_NODENAME/docker.sock" exec ' in text
    assert str(slurm.EPILOG) in text
    assert slurm.EPILOG.exists()


def test_a_daemon_sees_the_closet_s_accounts_and_nobody_else_does(paths):
    """A node's slurmd runs in its network and under its name; all run with our folder over /etc, read-only."""
    plan = practice_plan(INSTANCE)
    command = slurm_daemons.build_command(plan, paths, "rig2")
    assert command[:2] == ["nsenter", "--net=/run/netns/unittest-rig2"]
    assert command[-4:] == ["slurmd", "-D", "-N", "rig2"]
    for program in ("munged", "slurmctld", "rig1"):
        command = slurm_daemons.build_command(plan, paths, program)
        assert "--mount" in command
        assert str(slurm.etc_folder(paths)) in command
    assert '"ro,lowerdir=$1:/etc"' in " ".join(command)


def test_what_users_must_read_they_can(paths):
    """slurm.conf, gres.conf and munge's socket are for everybody; the key and the queue are root's."""
    slurm.prepare(practice_plan(INSTANCE), paths, Users(allowed=("ada", "ben"), uid_first=20000))
    files = slurm.build_files(practice_plan(INSTANCE), paths)
    modes = {
        path: path.stat().st_mode & 0o777
        for path in (files.conf, files.gres_conf, files.munge_socket.parent, files.state, slurm.key_file(paths))
    }
    assert list(modes.values()) == [0o644, 0o644, 0o755, 0o700, 0o600]
    assert all(device.is_char_device() for device in files.devices)


def test_users_have_the_numbers_that_gpuhub_gives_them(paths):
    """Slurm's daemons know them beside the machine's own accounts, whose files stay as they are."""
    before = Path("/etc/passwd").read_text()
    slurm.prepare(practice_plan(INSTANCE), paths, Users(allowed=("ada", "ben"), uid_first=20000))
    lines = (slurm.etc_folder(paths) / "passwd").read_text().splitlines()
    known = {line.split(":")[0]: line.split(":")[2] for line in lines}
    assert {known["root"], known["ada"], known["ben"]} == {"0", "20000", "20001"}
    assert Path("/etc/passwd").read_text() == before


def test_a_new_closet_forgets_an_old_one_s_jobs_once(paths):
    """slurmctld drops them at its first start after `make down`, and keeps its queue when it is started anew."""
    plan, users = practice_plan(INSTANCE), Users(allowed=("ada",), uid_first=20000)
    slurm.prepare(plan, paths, users)
    key = slurm.key_file(paths).read_text()
    assert slurm.take_forget(paths)
    assert slurm_daemons.build_command(plan, paths, "slurmctld", forget=True)[-1] == "-c"
    slurm.prepare(plan, paths, users)
    assert not slurm.take_forget(paths)
    assert slurm_daemons.build_command(plan, paths, "slurmctld")[-1] == "-D"
    slurm_daemons.stop(plan, paths)
    slurm.prepare(plan, paths, users)
    assert slurm.take_forget(paths)
    assert slurm.key_file(paths).read_text() == key


@pytest.mark.parametrize(
    ("state", "is_heard"),
    [("idle", True), ("mixed", True), ("drained", True), ("idle*", False), ("down*", False), ("unknown", False), ("", False)],
)  # fmt: skip
def test_a_node_is_ready_when_its_slurmd_was_heard(state, is_heard):
    """Drained is the administrator's wish, and no fault."""
    assert slurm_daemons.is_heard(state) is is_heard


def test_the_cluster_file_for_slurm_has_nothing_of_gpuhub_s_own_queue(tmp_path):
    """The product's reader takes it: no shares, no preemption, the closet's slurm.conf."""
    file = tmp_path / "cluster.toml"
    file.write_text(format_cluster(practice_plan("ghtest"), Paths("ghtest"), cpus=2, engine="slurm"))
    cluster = settings.load(file)
    assert cluster.engine == "slurm"
    assert cluster.slurm.conf == Path("/var/lib/ghtest/closet/slurm/slurm.conf")
    assert [profile.name for profile in cluster.profiles] == ["rtx5090", "rtx5070", "rtx5060", "cpu"]
    assert not cluster.scheduling.preemption
    assert cluster.has_docker


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
def test_the_closet_keeps_its_engine_until_it_is_down(asked, running, expected):
    """`make up` without a word goes on with what runs."""
    assert choice.choose_engine(asked, running) == expected


def test_a_running_closet_does_not_change_its_engine():
    """Notebooks that run could not be carried over: the user is told what to do."""
    with pytest.raises(SetupError, match="make down` first, then `sudo make up ENGINE=slurm"):
        choice.choose_engine("slurm", "builtin")


def test_a_cluster_file_says_its_engine_itself():
    """ENGINE= that contradicts it is refused, and what agrees is taken."""
    given = choice.Choice(kind=choice.Kind.SETTINGS, cluster_file=Path("/etc/cluster.toml"))
    choice.refuse_other_engine(given, "slurm", None)
    choice.refuse_other_engine(given, "slurm", "slurm")
    choice.refuse_other_engine(PRACTICE, "slurm", "slurm")
    with pytest.raises(SettingsError, match=r'/etc/cluster.toml is for engine = "builtin": to use ENGINE=slurm'):
        choice.refuse_other_engine(given, "builtin", "slurm")
    own = choice.Choice(kind=choice.Kind.THIS_MACHINE, cluster_file=Path("this-machine.toml"))
    with pytest.raises(SettingsError, match="this machine has a GPU of its own"):
        choice.refuse_other_engine(own, "builtin", "slurm")


def test_tests_may_have_slurmrestd_asked(tmp_path, paths, monkeypatch):
    """It runs as a user of its own, at a socket that root alone reaches besides; the key is root's."""
    monkeypatch.setenv(SLURM_API, "rest")
    plan, file = practice_plan(INSTANCE), tmp_path / "cluster.toml"
    file.write_text(format_cluster(plan, paths, cpus=2, engine="slurm"))
    table = settings.load(file).slurm
    socket, key = slurm.rest_socket(paths), slurm.jwt_key_file(paths)
    assert (table.api, table.rest_url, table.rest_key) == ("rest", f"unix://{socket}", key)
    slurm.prepare(plan, paths, Users(allowed=("ada",), uid_first=20000), has_rest=True)
    assert f"AuthAltParameters=jwt_key={key}" in slurm.build_files(plan, paths).conf.read_text()
    assert (socket.parent.stat().st_mode & 0o777, key.stat().st_mode & 0o777) == (0o700, 0o600)
    command = slurm_daemons.build_command(plan, paths, "slurmrestd")
    assert f"--reuid={socket.parent.stat().st_uid}" in command
    assert command[-1] == f"unix:{socket}"
    queue = programs.build_slurm_programs(paths, Path("/x/slurm.conf"), ["rig1"], has_rest=True)
    assert queue[-1].name == "slurmrestd"


def test_slurm_stops_before_docker_and_munged_last():
    """supervisord stops the highest priority first: services, slurmds, slurmctld, munged, dockerds."""
    paths = Paths("ghtest")
    daemons = programs.build_closet_programs(paths, ["rig1"])
    queue = programs.build_slurm_programs(paths, Path("/x/slurm.conf"), ["rig1", "rig2"])
    assert [program.name for program in queue] == ["munged", "slurmctld", "slurmd-rig1", "slurmd-rig2"]
    order = [program.priority for program in [*daemons, *queue]]
    assert order == sorted(order)
    assert len(set(order)) == len(order)
    assert all(program.environment == {"SLURM_CONF": "/x/slurm.conf"} for program in queue)
