"""SlurmCli with scripts in place of Slurm's commands: the arguments that it passes, and how it parses their output."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhub.backends.slurm.gpu_drains import PREFIX
from gpuhub.common.errors import SetupError
from gpuhub.slurm_client import programs
from gpuhub.slurm_client.cli import SlurmCliClient
from gpuhub.slurm_client.interface import UNDRAIN_REASON, SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.messages import parse_refusal, parse_version, require_version, shorten_error
from gpuhub.slurm_client.models import SlurmJobState, SlurmSubmission, Submitter
from gpuhub.slurm_client.submission import HOLDER_SCRIPT

pytestmark = pytest.mark.root

DATA = Path(__file__).parents[3] / "unit" / "gpuhub" / "slurm_client" / "data"


class Commands:
    """A folder of commands that print what tests set, and record their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        for program in ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "sacct", "sacctmgr"):
            self.respond(program)

    def respond(self, program: str, out: str = "", *, err: str = "", status: int = 0, first: str = "") -> None:
        for kind, text in (("out", out), ("err", err)):
            (self.folder / f"{program}.{kind}").write_text(text)
        at = self.folder
        script = at / program
        script.write_text(
            f'#!/bin/sh\necho {program} "$@" >> {self.log}\nenv > {at}/{program}.env\nid -u > {at}/{program}.uid\n{first}\n'
            f"cat > {at}/{program}.in\ncat {at}/{program}.out\ncat {at}/{program}.err >&2\nexit {status}\n"
        )
        script.chmod(0o755)

    def read_calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def environment(self, program: str) -> dict[str, str]:
        return dict(line.partition("=")[::2] for line in (self.folder / f"{program}.env").read_text().splitlines())


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


@pytest.fixture
def api(commands: Commands) -> SlurmCliClient:
    return SlurmCliClient(commands=commands.folder, timeout_s=10)


def submission(uid: int) -> SlurmSubmission:
    return SlurmSubmission(
        name="gh-lease-1", submitter=Submitter(name="ada", uid=uid, gid=uid), script=HOLDER_SCRIPT, gpus_per_node=1
    )


async def test_read_snapshot_runs_squeue_and_sinfo(api: SlurmCliClient, commands: Commands) -> None:
    commands.respond("squeue", (DATA / "squeue-22.05.json").read_text())
    commands.respond("sinfo", (DATA / "sinfo-22.05.json").read_text())
    look = await api.read_snapshot()
    assert (len(look.jobs), len(look.nodes)) == (9, 3)
    assert sorted(commands.read_calls()) == ["sinfo --json --all", "squeue --json --all --states=all"]
    job = await api.find_job(37)
    assert job is not None
    assert job.state is SlurmJobState.RUNNING
    assert await api.find_job(36) is None


async def test_nodes_of_later_versions_are_listed_by_scontrol(api: SlurmCliClient, commands: Commands) -> None:
    commands.respond("squeue", json.dumps({"jobs": [], "errors": []}))
    commands.respond("sinfo", json.dumps({"sinfo": [{"nodes": {"nodes": ["sx1"]}}], "errors": []}))
    commands.respond("scontrol", (DATA / "nodes-24.11.json").read_text())
    for _ in range(2):
        nodes = {node.name: node for node in (await api.read_snapshot()).nodes}
        assert (nodes["sx1"].gpus, nodes["sx1"].used, nodes["sx1"].state) == ({"rtx5090": 2}, {"rtx5090": 2}, "mixed")
        assert (nodes["sx2"].gpus, nodes["sx2"].used, nodes["sx2"].takes_work) == ({"": 2}, {}, True)
    asked = [call for call in commands.read_calls() if not call.startswith("squeue")]
    assert asked == ["sinfo --json --all", *["scontrol --json --all show nodes"] * 2]


async def test_a_job_that_later_versions_do_not_know_is_none(api: SlurmCliClient, commands: Commands) -> None:
    commands.respond("squeue", err="slurm_load_jobs error: Invalid job id specified", status=1)
    assert await api.find_job(36, name="gh-lease-1") is None
    await api.cancel(36, name="gh-lease-1", at_once=True)
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        await api.set_time_limit(36, 60, name="gh-lease-1")
    commands.respond("squeue", err="slurm_load_jobs error: Access/permission denied", status=1)
    with pytest.raises(SlurmRefused, match="permission denied"):
        await api.find_job(36)


async def test_submit_runs_sbatch_with_a_clean_environment(
    api: SlurmCliClient, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret")
    commands.respond("sbatch", "42;lab\n")
    assert await api.submit(submission(os.geteuid())) == 42
    assert (commands.folder / "sbatch.in").read_text() == HOLDER_SCRIPT
    assert set(commands.environment("sbatch")) - {"PWD", "SHLVL", "_", "OLDPWD"} == {
        "PATH", "LANG", "LC_ALL", "SLURM_TIME_FORMAT",
    }  # fmt: skip
    commands.respond("sbatch", "well\n")
    with pytest.raises(SlurmUnreachable, match="no job number"):
        await api.submit(submission(os.geteuid()))
    commands.respond(
        "sbatch", "", err="sbatch: error: Batch job submission failed: Invalid qos specification\n", status=1
    )
    with pytest.raises(SlurmRefused, match=r"^Slurm says: Batch job submission failed: Invalid qos specification$"):
        await api.submit(submission(os.geteuid()))


@pytest.fixture
def open_commands() -> Iterator[Commands]:
    """Commands in a folder that all users can write to, because pytest's own folders belong to one user."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-sbatch-") as name:
        Path(name).chmod(0o777)
        yield Commands(Path(name))


async def test_sbatch_runs_as_the_submitter(open_commands: Commands) -> None:
    assert os.geteuid() == 0, "only root can run commands as the submitter: run this test as root"
    open_commands.respond("sbatch", "7\n")
    assert await SlurmCliClient(commands=open_commands.folder, timeout_s=10).submit(submission(61077)) == 7
    assert (open_commands.folder / "sbatch.uid").read_text().strip() == "61077"


def test_sudo_is_used_if_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs.os, "geteuid", lambda: 1000)
    ada = Submitter(name="--user=root", uid=71001, gid=71001, groups=(5,))
    command = programs.build_user_command(["/usr/bin/sbatch", "--parsable"], ada)
    assert command == ["sudo", "--non-interactive", "--user=#71001", "--", "/usr/bin/sbatch", "--parsable"]
    assert programs.build_user_command(["sbatch"], Submitter(name="me", uid=1000, gid=1000)) == ["sbatch"]


def test_user_has_their_own_numbers_only() -> None:
    """root's groups and capabilities are gone."""
    for groups, shown in (((5,), ["5", "71002"]), ((), ["71002"])):
        ada = Submitter(name="ada", uid=71001, gid=71002, groups=groups)
        show = "id -u; id -g; id -G | tr ' ' '\\n' | sort -n | xargs; grep CapEff /proc/self/status"
        done = subprocess.run(
            programs.build_user_command(["sh", "-c", show], ada), capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["71001", "71002", *shown, "CapEff:", "0" * 16]


async def test_json_errors_with_exit_status_0_mean_unreachable(api: SlurmCliClient, commands: Commands) -> None:
    empty = {"errors": [{"error": "Unspecified error", "description": "Failed while looking for jobs"}], "jobs": []}
    commands.respond("squeue", json.dumps(empty))
    commands.respond("sinfo", json.dumps({"errors": [], "nodes": []}))
    with pytest.raises(SlurmUnreachable, match="Failed while looking for jobs"):
        await api.read_snapshot()
    with pytest.raises(SlurmUnreachable):
        await api.find_job(1)
    for words in ("", "[]", "{", '{"jobs": 3}'):
        commands.respond("squeue", words)
        with pytest.raises(SlurmUnreachable, match="answer has an unknown form"):
            await api.read_snapshot()


async def test_hanging_or_missing_command_means_unreachable(commands: Commands) -> None:
    commands.respond("squeue", first="echo 'squeue: error: cannot stat file' >&2; exec sleep 60")
    hasty = SlurmCliClient(commands=commands.folder, timeout_s=0.5)
    with pytest.raises(SlurmUnreachable, match="more than"):
        await hasty.find_job(1)
    await hasty.close()
    (commands.folder / "squeue").unlink()
    patient = SlurmCliClient(commands=commands.folder, timeout_s=30)
    with pytest.raises(SlurmUnreachable, match="is not installed"):
        await patient.find_job(1)
    with pytest.raises(SetupError, match=r"are not in .*: squeue"):
        await patient.read_site()
    await patient.close()


async def test_cancel_of_an_ended_job_is_not_an_error(api: SlurmCliClient, commands: Commands) -> None:
    commands.respond("squeue", (DATA / "squeue-22.05.json").read_text())
    await api.cancel(7)
    await api.cancel(8, at_once=True)  # it is pending according to Slurm, so it is not signalled
    first, *others, last = [call for call in commands.read_calls() if "scancel" in call]
    assert (first, set(others), last) == ("scancel 7", {"scancel --state=PENDING 8"}, "scancel 8")
    await api.cancel(37, at_once=True)  # it keeps running
    signals = [call for call in commands.read_calls() if "--signal" in call]
    assert len(signals) > 1
    assert set(signals) == {"scancel --state=RUNNING --batch --signal=USR1 37"}
    assert commands.read_calls()[-1] == "scancel 37"
    commands.respond("scancel", err="scancel: error: Kill job error on job id 7: Invalid job id specified", status=1)
    await api.cancel(7, at_once=True)
    commands.respond("scancel", err="scancel: error: Kill job error on job id 7: Access/permission denied", status=1)
    with pytest.raises(SlurmRefused, match="permission denied"):
        await api.cancel(7)
    commands.respond("scancel", err="scancel: error: Unable to contact slurm controller (connect failure)", status=1)
    with pytest.raises(SlurmUnreachable):
        await api.cancel(7)
    commands.respond("scontrol", err="Job has already finished for job 7", status=1)
    await api.persist_job(7)
    with pytest.raises(SlurmRefused, match="already finished"):
        await api.set_time_limit(7, 61)
    assert commands.read_calls()[-1] == "scontrol update JobId=7 TimeLimit=2"
    setting = "Job update not available right now, the DB index is being set, try again in a bit for job 7"
    commands.respond("scontrol", err=setting, status=1)
    with pytest.raises(SlurmRefused, match="DB index"):
        await api.shrink(7, ["sx1", "sx3"])
    assert commands.read_calls()[-1] == "scontrol update JobId=7 NodeList=sx1,sx3"


async def test_only_a_job_with_the_expected_name_is_changed(api: SlurmCliClient, commands: Commands) -> None:
    """A slurmctld that crashed assigns job numbers again."""
    commands.respond("squeue", (DATA / "squeue-22.05.json").read_text())
    job = await api.find_job(37)
    assert job is not None
    assert await api.find_job(37, name=job.name) == job
    assert await api.find_job(37, name="another") is None
    await api.cancel(37, name="another", at_once=True)
    await api.persist_job(37, name="another")
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        await api.set_time_limit(37, 60, name="another")
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        await api.shrink(37, ["sx1"], name="another")
    asked = [call for call in commands.read_calls() if not call.startswith("squeue")]
    assert asked == ["scancel --name=another 37"]
    await api.persist_job(37, name=job.name)
    assert commands.read_calls()[-1].startswith("scontrol update JobId=37 ")


async def test_end_of_a_drain_replaces_its_reason(api: SlurmCliClient, commands: Commands) -> None:
    """Slurm may keep a node's last reason; that of gpuhub's drain would stand for a GPU that fails."""
    await api.undrain_node("sx1")
    assert commands.read_calls() == [
        f"scontrol update NodeName=sx1 State=UNDRAIN Reason={UNDRAIN_REASON}",
    ]
    assert not UNDRAIN_REASON.startswith(PREFIX)


async def test_unsupported_slurm_versions_are_refused(api: SlurmCliClient, commands: Commands) -> None:
    for said, word in (("slurm 21.08.8", "too old"), ("slurm 20.02.7", "too old"), ("hello", "version is not in")):
        commands.respond("sbatch", said)
        with pytest.raises(SetupError, match=word):
            await api.read_site()
    with pytest.raises(SetupError, match="there is no /nowhere"):
        await SlurmCliClient(commands=commands.folder, conf=Path("/nowhere")).read_site()
    assert parse_version("slurm-wlm 22.05.8") == (22, 5, 8)
    require_version((22, 5))


async def test_concurrent_job_queries(api: SlurmCliClient, commands: Commands) -> None:
    commands.respond("squeue", (DATA / "squeue-22.05.json").read_text())
    jobs = await asyncio.gather(*(api.find_job(37) for _ in range(20)))
    assert {job.id for job in jobs if job is not None} == {37}


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: If munged is up, restart with --num-threads=10",
        'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory',
        "Unexpected message received for job 37",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "squeue: fatal: Unable to process configuration file",
    ],
)
def test_connection_errors_mean_unreachable(said: str) -> None:
    assert isinstance(parse_refusal(said), SlurmUnreachable)


def test_error_message_is_shortened() -> None:
    said = (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition\n"
    )
    assert shorten_error(said) == "invalid partition specified: x; Batch job submission failed: Invalid partition"
    assert isinstance(parse_refusal(said), SlurmRefused)
    assert "without a message" in str(parse_refusal(""))
