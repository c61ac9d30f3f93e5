"""Users' programs on the head node, as real processes, and what is refused before one starts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gpuhub.backends.slurm.user_programs import ProcessSession, UserPrograms
from gpuhub.common.errors import Conflict, NodeUnreachable, Unavailable
from gpuhub.common.program_session import STDERR, STDOUT
from gpuhub.slurm_client.models import Submitter
from tests.support.broker.factories import build_running_job
from tests.support.slurm.job_scripts import APPTAINER, PLAIN, cluster

pytestmark = pytest.mark.process
ME = Submitter(name="me", uid=os.geteuid(), gid=os.getegid())
ENVIRONMENT = {"PATH": os.environ["PATH"]}


async def start(script: str) -> ProcessSession:
    return await ProcessSession.start(["/bin/bash", "-c", script], ME, ENVIRONMENT)


async def read_all(session: ProcessSession) -> dict[int, bytearray]:
    """Return the output of each stream."""
    streams = {STDOUT: bytearray(), STDERR: bytearray()}
    while (part := await session.read()) is not None:
        streams[part[0]] += part[1]
    return streams


async def test_input_and_both_streams_are_passed_on() -> None:
    session = await start("echo ready >&2; cat; echo over >&2")
    assert await session.read() == (STDERR, b"ready\n")
    await session.send(b"\x00\xff" * 1000)
    assert await session.read() == (STDOUT, b"\x00\xff" * 1000)
    await session.wait_closed()
    assert await session.read() is None


async def test_much_output_waits_for_its_reader(tmp_path: Path) -> None:
    """No more than a few parts are kept; the program continues as they are read."""
    size = 32 * 1024 * 1024
    session = await start(f"head -c {size} /dev/zero; echo >{tmp_path}/written")
    await asyncio.sleep(0.5)
    assert not (tmp_path / "written").exists()
    assert len((await read_all(session))[STDOUT]) == size
    assert await session.read() is None
    assert (tmp_path / "written").exists()
    await session.wait_closed()


async def test_program_that_has_ended_takes_no_input() -> None:
    session = await start("exec 0<&-; echo bye")
    assert (await read_all(session))[STDOUT] == b"bye\n"
    with pytest.raises(NodeUnreachable, match="/bin/bash has ended"):
        for _ in range(50):
            await session.send(b"x" * 65536)
    await session.wait_closed()


@pytest.mark.parametrize("end", ["cat >/dev/null", "trap '' TERM; while :; do sleep 0.05; done"])
async def test_closed_program_ends(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, or it is killed; a pending read ends."""
    monkeypatch.setattr("gpuhub.backends.slurm.user_programs._END_S", 0.3)
    session = await start(f"echo $$ >{tmp_path}/pid; echo ready; {end}")
    assert await session.read() == (STDOUT, b"ready\n")
    reading = asyncio.ensure_future(session.read())
    session.close()
    session.close()
    assert await asyncio.wait_for(reading, 10) is None
    await session.wait_closed()
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_program_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match=r"/nowhere/python3 cannot be started on the head node: No such file"):
        await ProcessSession.start(["/nowhere/python3"], ME, ENVIRONMENT)


async def find_me(_owner: str) -> Submitter:
    return ME


async def test_home_that_is_not_on_the_head_node_is_named(tmp_path: Path) -> None:
    programs = UserPrograms(cluster(**PLAIN, home=f"{tmp_path}/{{username}}"), find_me)
    with pytest.raises(Conflict, match=f"{tmp_path}/ada is not on the head node: mount the homes there"):
        await programs.start_on_head("ada", ("state", "--", "run-1"))


async def test_owner_without_an_account_on_the_head_node_is_named(tmp_path: Path) -> None:
    async def find_ada(_owner: str) -> Submitter:
        return Submitter(name="ada", uid=71999, gid=71999)

    (tmp_path / "ada").mkdir()
    programs = UserPrograms(cluster(**APPTAINER, home=f"{tmp_path}/{{username}}"), find_ada)
    with pytest.raises(Conflict, match="no account with the UID 71999 of ada, which Apptainer needs"):
        await programs.start_on_head("ada", ("state", "--", "run-1"))


async def test_terminal_needs_srun_and_a_slurm_job(tmp_path: Path) -> None:
    programs = UserPrograms(cluster(**PLAIN, commands=str(tmp_path)), find_me)
    job, lease = build_running_job()
    with pytest.raises(Unavailable, match=f"srun, which is not in {tmp_path} on the head node"):
        await programs.start_in_job(lease.evolve(slurm_job=17), job, "rig1", ("shell",))
    with pytest.raises(Conflict, match="has no Slurm job"):
        await programs.start_in_job(lease, job, "rig1", ("shell",))
