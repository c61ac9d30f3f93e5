"""Both clients of Slurm (REST and commands) against one real Slurm: munged, slurmctld, slurmds, slurmdbd, slurmrestd."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gpuhub.slurm_client.cli import SlurmCliClient
from gpuhub.slurm_client.factory import make_client
from gpuhub.slurm_client.interface import SlurmClient, SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.messages import explain_end, explain_pending
from gpuhub.slurm_client.models import LIVE_STATES, SlurmJob, SlurmJobState, SlurmSubmission, Submitter
from gpuhub.slurm_client.parsers import expand_hosts
from gpuhub.slurm_client.rest import SlurmRestClient, TokenKey
from gpuhub.slurm_client.submission import HOLDER_SCRIPT
from gpuhub_closet.slurm.slurm_config import SlurmPartitionConfig
from tests.support.slurm.daemons import wait, wait_saved
from tests.support.slurm.site import SlurmSite, slurm_site

pytestmark = [pytest.mark.slurm, pytest.mark.root]

PORT = 27200
#: Much longer than the test's waits except one: no job here ends by its time limit.
KILL_WAIT_S = 90
GHOST = Submitter(name="ghost", uid=61077, gid=61077)


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmSite]:
    with slurm_site(
        port=PORT,
        nodes=(("rtx5090", "rtx5090"), ("rtx5060", "rtx5070"), ("rtx5090",)),
        has_accounts=True,
        has_rest=True,
        kill_wait_s=KILL_WAIT_S,
        partitions=(
            SlurmPartitionConfig(),
            SlurmPartitionConfig(
                name="short", nodes=("sx1",), is_default=False, max_minutes=60, default_minutes=10, max_nodes=1
            ),
        ),
        further=("EnforcePartLimits=ALL",),
    ) as site:
        yield site


@pytest.fixture(params=["cli", "rest"])
async def api(slurm: SlurmSite, request: pytest.FixtureRequest) -> AsyncIterator[SlurmClient]:
    """Each client; the test's jobs are removed afterwards."""
    api = make_client(slurm.table(api=request.param))
    yield api
    for job in (await api.read_snapshot()).jobs:
        if job.state in LIVE_STATES:
            await api.cancel(job.id, at_once=True)
    await api.close()
    slurm.wait_for_nodes(deadline_s=KILL_WAIT_S + 60)


def build_submission(slurm: SlurmSite, user: str = "ada", **further: object) -> SlurmSubmission:
    defaults: dict[str, object] = {
        "name": "gh-lease-1",
        "submitter": slurm.submitter(user),
        "script": HOLDER_SCRIPT,
        "gpus_per_node": 1,
        "memory_mib": 100,
    }
    return SlurmSubmission(**{**defaults, **further})  # type: ignore[arg-type]


async def until(
    look: Callable[[], Awaitable[SlurmJob | None]], is_true: Callable[[SlurmJob | None], bool]
) -> SlurmJob | None:
    deadline = time.monotonic() + 60
    while not is_true(job := await look()):
        assert time.monotonic() < deadline, (job and job.reason, job)
        await asyncio.sleep(0.1)
    return job


async def running(api: SlurmClient, submission: SlurmSubmission) -> SlurmJob:
    number = await api.submit(submission)
    job = await until(lambda: api.find_job(number), lambda job: job is not None and job.state is SlurmJobState.RUNNING)
    assert job is not None
    return job


async def test_placeholder_job_runs_and_is_ended_at_once(slurm: SlurmSite, api: SlurmClient) -> None:
    began = time.time()
    job = await running(api, build_submission(slurm, time_limit_s=630, account="lab"))
    assert (job.name, job.user_id, job.account, job.partition) == ("gh-lease-1", 71001, "lab", "all")
    # The head node does not know this user; slurmrestd's machine does.
    assert job.user_name == ("" if isinstance(api, SlurmCliClient) else "ada")
    assert job.time_limit_s == 660
    assert job.started_at is not None
    assert job.ends_at == job.started_at + 660
    assert job.submitted_at is not None
    assert began - 2 < job.submitted_at <= job.started_at < time.time() + 2
    assert job.wants == "gpu:1"
    look = await api.read_snapshot()
    assert job.id in {each.id for each in look.jobs if each.state is SlurmJobState.RUNNING}
    node = next(each for each in look.nodes if each.name == job.nodes[0])
    assert sum(node.used.values()) == 1
    assert node.takes_work

    await api.persist_job(job.id)
    await api.set_time_limit(job.id, 1200)
    longer = await api.find_job(job.id)
    assert longer is not None
    assert longer.ends_at == job.started_at + 1200

    ended_at = time.monotonic()
    await api.cancel(job.id, at_once=True)
    ended = await until(
        lambda: api.find_job(job.id),
        lambda job: job is None or (job.state not in LIVE_STATES and not job.is_completing),
    )
    assert time.monotonic() - ended_at < KILL_WAIT_S * 2 / 3
    assert ended is not None
    # On a busy machine the signal can come before the script's trap is set: the job is then FAILED.
    assert ended.state in {SlurmJobState.COMPLETED, SlurmJobState.CANCELLED, SlurmJobState.FAILED}
    assert ended.ends_at is not None
    # Ended jobs and unknown ones are ignored.
    for number in (job.id, 999_999):
        await api.cancel(number)
        await api.cancel(number, at_once=True)
        await api.persist_job(number)
    with pytest.raises(SlurmRefused):
        await api.set_time_limit(job.id, 600)
    assert await api.find_job(999_999) is None


async def test_gpu_indices_of_a_job(slurm: SlurmSite, api: SlurmClient) -> None:
    first = await running(api, build_submission(slurm, gpu_type="rtx5090", partition="short"))
    second = await running(api, build_submission(slurm, "ben", gpu_type="rtx5090", partition="short"))
    typed = await running(api, build_submission(slurm, gpu_type="rtx5070"))
    assert {**first.gpus, "user": first.user_id} == {"sx1": (0,), "user": 71001}
    assert {**second.gpus, "user": second.user_id} == {"sx1": (1,), "user": 71002}
    assert typed.gpus == {"sx2": (1,)}
    assert first.time_limit_s == 600  # the partition's default
    nodes = {node.name: node for node in (await api.read_snapshot()).nodes}
    assert nodes["sx2"].gpus == {"rtx5060": 1, "rtx5070": 1}
    assert nodes["sx2"].used == {"rtx5070": 1}
    assert (nodes["sx1"].used, nodes["sx3"].used) == ({"rtx5090": 2}, {})


async def test_gang_and_spread_placement(slurm: SlurmSite, api: SlurmClient) -> None:
    gang = await running(api, build_submission(slurm, nodes=4, min_nodes=2, gpu_type="rtx5090", survives_nodes=True))
    assert gang.gpus == {"sx1": (0,), "sx3": (0,)}
    assert gang.wants == "2 nodes × gpu:rtx5090:1"
    assert (gang.cpus, gang.memory_mib) == (2, 200)
    await api.cancel(gang.id, at_once=True)
    slurm.wait_for_nodes()
    spread = await running(api, build_submission(slurm, spread=3, gpu_type="rtx5090"))
    assert spread.gpus == {"sx1": (0, 1), "sx3": (0,)}
    assert spread.wants == "gpu:rtx5090:3 in all"
    # As many as a gang's on each node, although one number was requested.
    assert (spread.cpus, spread.memory_mib) == (2, 200)


async def test_owner_may_change_all_but_the_allocation(slurm: SlurmSite, api: SlurmClient) -> None:
    """Neither name nor comment shows who submitted a job, and a waiting job is not what was submitted."""
    other = await running(api, build_submission(slurm, "ben", gpu_type="rtx5070"))
    number = await api.submit(build_submission(slurm, gpu_type="rtx5070", cpus=4, memory_mib=1000))
    for change in ("JobName=mine", "Comment=mine", "MinMemoryNode=1", "Requeue=1"):
        slurm.ask("scontrol", "update", f"JobId={number}", change, user="ada")
    await api.cancel(other.id, at_once=True)
    job = await until(lambda: api.find_job(number), lambda job: job is not None and job.state is SlurmJobState.RUNNING)
    assert job is not None
    assert (job.name, job.cpus, job.memory_mib) == ("mine", 4, 1)
    for change in ("CPUsPerTask=1", "MinMemoryNode=1000", "Gres=gpu:rtx5060:1"):
        refused = slurm.run("scontrol", "update", f"JobId={number}", change, user="ada")
        assert "no longer pending" in refused.stderr, change
    unchanged = await api.find_job(number)
    assert unchanged is not None
    assert (unchanged.cpus, unchanged.memory_mib, unchanged.gpus) == (4, 1, {"sx2": (1,)})


async def test_own_job_with_a_lease_name_shows_what_it_was_allocated(slurm: SlurmSite, api: SlurmClient) -> None:
    number = slurm.submit("ada", "--job-name=gh-lease-1", "--gres=gpu:rtx5090:1", "--mem=1", "--nodes=1-1")
    job = await until(lambda: api.find_job(number), lambda job: job is not None and job.state is SlurmJobState.RUNNING)
    assert job is not None
    assert (job.name, job.user_id, job.cpus, job.memory_mib) == ("gh-lease-1", 71001, 1, 1)


@pytest.mark.parametrize("text", ["sx[1-3]", "sx3,sx1", "sx[03,1-2],a-[8-10]"])
def test_host_lists_match_scontrol(slurm: SlurmSite, text: str) -> None:
    """The broker and the job itself number workers by their place in the same list."""
    assert expand_hosts(text) == tuple(slurm.ask("scontrol", "show", "hostnames", text).split())


@pytest.mark.parametrize(
    ("script", "state", "code"), [("exit 0", SlurmJobState.COMPLETED, 0), ("exit 3", SlurmJobState.FAILED, 3)]
)
async def test_job_reports_its_exit_code(
    slurm: SlurmSite, api: SlurmClient, script: str, state: SlurmJobState, code: int
) -> None:
    number = await api.submit(build_submission(slurm, script=f"#!/bin/sh\n{script}\n"))
    is_over = {*SlurmJobState} - {*LIVE_STATES, SlurmJobState.COMPLETING}
    job = await until(lambda: api.find_job(number), lambda job: job is not None and job.state in is_over)
    assert job is not None
    assert (job.state, job.exit_code) == (state, code)


async def test_nodes_are_excluded(slurm: SlurmSite, api: SlurmClient) -> None:
    job = await running(api, build_submission(slurm, gpu_type="rtx5090", exclude=("sx1",)))
    assert job.nodes == ("sx3",)


async def test_job_releases_a_node(slurm: SlurmSite, api: SlurmClient) -> None:
    job = await running(api, build_submission(slurm, nodes=3, min_nodes=2, survives_nodes=True))
    assert job.nodes == ("sx1", "sx2", "sx3")
    await api.shrink(job.id, ["sx1", "sx3"], name=job.name)
    seen = await until(lambda: api.find_job(job.id), lambda job: job is not None and len(job.nodes) < 3)
    assert seen is not None
    assert (seen.state, seen.nodes, list(seen.gpus)) == (SlurmJobState.RUNNING, ("sx1", "sx3"), ["sx1", "sx3"])
    assert (await running(api, build_submission(slurm, "ben", gpu_type="rtx5070", name="gh-lease-2"))).nodes == ("sx2",)
    await api.cancel(job.id, at_once=True)
    with pytest.raises(SlurmRefused):
        await api.shrink(job.id, ["sx1"])


async def test_exclusive_has_every_gpu_of_its_node(slurm: SlurmSite, api: SlurmClient) -> None:
    job = await running(api, build_submission(slurm, gpu_type="rtx5060", exclusive=True))
    assert job.nodes == ("sx2",)
    assert job.gpus["sx2"]
    waiting = await api.submit(build_submission(slurm, "ben", gpu_type="rtx5070", name="gh-lease-2"))
    await until(lambda: api.find_job(waiting), lambda job: job is not None and job.reason == "Resources")


async def test_waiting_job_has_reason_and_estimate(slurm: SlurmSite, api: SlurmClient) -> None:
    job = await running(api, build_submission(slurm, gpu_type="rtx5060", time_limit_s=1200))
    number = await api.submit(build_submission(slurm, "ben", gpu_type="rtx5060", time_limit_s=600))
    waiting = await until(
        lambda: api.find_job(number),
        lambda job: job is not None and job.reason == "Resources" and job.expected_start is not None,
    )
    assert waiting is not None
    assert waiting.state is SlurmJobState.PENDING
    assert (waiting.nodes, waiting.gpus, waiting.started_at, waiting.ends_at) == ((), {}, None, None)
    assert job.ends_at is not None
    assert waiting.expected_start is not None
    assert abs(waiting.expected_start - job.ends_at) <= 60
    assert explain_pending(waiting) == "it is next, and waits for GPUs, CPUs or memory to be free"
    await api.cancel(number, at_once=True)
    ended = await api.find_job(number)
    assert ended is not None
    assert ended.state is SlurmJobState.CANCELLED
    assert ended.started_at is None
    assert explain_end(ended) == "its Slurm job was cancelled"


async def test_placeholder_job_survives_scancel_until_slurm_kills_it(slurm: SlurmSite, api: SlurmClient) -> None:
    job = await running(api, build_submission(slurm))
    # The job counts as running before its script has set its trap.
    wait(lambda: any(b"sleep" in command for _, command in _processes(job.id)), "it sleeps")
    slurm.ask("scancel", str(job.id), user="ada")
    seen = await until(lambda: api.find_job(job.id), lambda job: job is None or job.state is not SlurmJobState.RUNNING)
    assert seen is not None
    assert seen.is_completing
    assert seen.state not in LIVE_STATES
    assert explain_end(seen).startswith("its Slurm job was ")
    # Slurm sends no second signal, and KillWait is long.
    _kill_script(job.id)


def _kill_script(job_id: int) -> None:
    """Kill a job's script."""
    for pid, _ in _processes(job_id):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(job_id: int) -> Iterator[tuple[int, bytes]]:
    """Yield a job's processes, found by their environment, with their command lines."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"SLURM_JOB_ID={job_id}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name), (entry / "cmdline").read_bytes()


REFUSALS = {
    "partition": ({"partition": "nowhere"}, "[Ii]nvalid partition"),
    "type": ({"gpu_type": "h200"}, "Requested node configuration is not available"),
    "count": ({"gpu_type": "rtx5090", "gpus_per_node": 3}, "Requested node configuration is not available"),
    "account": ({"account": "nobodys"}, "Invalid account or account/partition combination"),
    "qos": ({"qos": "express"}, "Invalid qos"),
    "reservation": ({"reservation": "course"}, "[Rr]eservation"),
    "too long": ({"partition": "short", "time_limit_s": 7200}, "time limit"),
    "too many nodes": ({"partition": "short", "nodes": 2, "min_nodes": 2}, "[Nn]ode"),
    "too much memory": ({"memory_mib": 10_000_000}, "Requested node configuration is not available"),
    "first of all": ({"nice": -5}, "Invalid --nice value"),
}


@pytest.mark.parametrize("wrong", REFUSALS)
async def test_refusals_quote_slurm(slurm: SlurmSite, api: SlurmClient, wrong: str) -> None:
    asked, word = REFUSALS[wrong]
    with pytest.raises(SlurmRefused, match=word):
        await api.submit(build_submission(slurm, **asked))
    assert not [job for job in (await api.read_snapshot()).jobs if job.state in LIVE_STATES]


async def test_unknown_user_gets_no_job(slurm: SlurmSite, api: SlurmClient) -> None:
    with pytest.raises(SlurmRefused):
        await api.submit(build_submission(slurm, submitter=GHOST))
    with pytest.raises(SlurmRefused):
        await api.submit(
            build_submission(slurm, submitter=replace(slurm.submitter("ada"), uid=GHOST.uid, gid=GHOST.gid))
        )
    assert not [job for job in (await api.read_snapshot()).jobs if job.state in LIVE_STATES]


async def test_read_site(slurm: SlurmSite, api: SlurmClient) -> None:
    slurm.ask(
        "scontrol", "create", "reservation", "ReservationName=course", "StartTime=now+1day", "Duration=60",
        "Users=ada", "Nodes=sx3",
    )  # fmt: skip
    try:
        site = await api.read_site()
    finally:
        slurm.ask("scontrol", "delete", "ReservationName=course")
    assert site.version[:2] >= (22, 5)
    assert [node.name for node in site.nodes] == ["sx1", "sx2", "sx3"]
    by_name = {partition.name: partition for partition in site.partitions}
    assert (by_name["all"].is_default, by_name["all"].max_time_s, by_name["all"].nodes) == (
        True,
        None,
        ("sx1", "sx2", "sx3"),
    )
    short = by_name["short"]
    assert (short.is_default, short.max_time_s, short.default_time_s, short.max_nodes) == (False, 3600, 600, 1)
    assert site.has_accounting
    assert {"lab", "root"} <= set(site.accounts)
    assert "normal" in site.qos
    assert site.reservations == ("course",)
    assert (site.nodes[0].cpus, site.nodes[0].memory_mib) == (8, 16000)


async def test_read_gpu_time(slurm: SlurmSite, api: SlurmClient) -> None:
    since = time.time()
    job = await running(api, build_submission(slurm, "ben", nodes=2, min_nodes=2, gpu_type="rtx5090"))
    assert job.started_at is not None
    until_ = job.started_at + 20

    async def counted() -> float:
        times = await api.read_gpu_time(since, until_)
        return sum(each.gpu_seconds for each in times if (each.user, each.account) == ("ben", "lab"))

    deadline = time.monotonic() + 60
    while (seconds := await counted()) == 0:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)
    # The job is still running: it has two GPUs until the window's end.
    assert seconds == pytest.approx(2 * (until_ - job.started_at), abs=2)
    assert not await api.read_gpu_time(since - 7200, since - 3600)


async def find_job_when_reachable(api: SlurmClient, job_id: int) -> SlurmJob:
    """Return a job as soon as Slurm answers again."""

    async def ask_again() -> SlurmJob | None:
        try:
            return await api.find_job(job_id)
        except SlurmUnreachable:
            return None

    back = await until(ask_again, lambda job: job is not None)
    assert back is not None
    return back


async def test_slurmctld_is_killed_and_returns(slurm: SlurmSite, api: SlurmClient) -> None:
    job = await running(api, build_submission(slurm))
    await api.persist_job(job.id)
    wait_saved(slurm.ask, slurm.files.state, job.id)
    slurm.daemons.kill("slurmctld")
    try:
        answers = await asyncio.gather(
            api.read_snapshot(),
            api.find_job(job.id),
            api.submit(build_submission(slurm)),
            api.cancel(job.id),
            api.cancel(job.id, at_once=True),
            api.persist_job(job.id),
            api.set_time_limit(job.id, 600),
            api.read_site(),
            return_exceptions=True,
        )
    finally:
        slurm.daemons.start("slurmctld")
    assert [type(answer) for answer in answers] == [SlurmUnreachable] * 8, answers

    back = await find_job_when_reachable(api, job.id)
    assert (back.state, back.gpus) == (SlurmJobState.RUNNING, job.gpus)


async def test_munged_is_killed_and_returns(slurm: SlurmSite) -> None:
    api, hasty = SlurmCliClient(conf=slurm.files.conf), SlurmCliClient(conf=slurm.files.conf, timeout_s=3)
    job = await running(api, build_submission(slurm))
    slurm.daemons.kill("munged")
    try:
        answers = await asyncio.gather(
            hasty.read_snapshot(),
            hasty.find_job(job.id),
            hasty.submit(build_submission(slurm)),
            hasty.cancel(job.id),
            return_exceptions=True,
        )
    finally:
        slurm.daemons.start("munged")
        await hasty.close()
    assert [type(answer) for answer in answers] == [SlurmUnreachable] * 4, answers

    back = await find_job_when_reachable(api, job.id)
    assert back.state is SlurmJobState.RUNNING
    await api.cancel(job.id, at_once=True)
    await api.close()


async def test_wrong_rest_key_and_unreachable_server(slurm: SlurmSite) -> None:
    url = slurm.daemons.rest_url
    assert url is not None
    for api in (SlurmRestClient(url, TokenKey(b"wrong")), SlurmRestClient("http://127.0.0.1:9", TokenKey(b"wrong"))):
        with pytest.raises((SlurmUnreachable, SlurmRefused)):
            await api.read_snapshot()
        await api.close()


async def test_a_time_limit_ends_a_job(slurm: SlurmSite) -> None:
    api = make_client(slurm.table())
    job = await running(api, build_submission(slurm, time_limit_s=20))
    assert job.time_limit_s == 60
    deadline = time.monotonic() + 240
    seen: SlurmJob | None = job
    while seen is not None and seen.state in LIVE_STATES:
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.5)
        seen = await api.find_job(job.id)
    assert seen is not None
    assert seen.state is SlurmJobState.TIMEOUT
    assert explain_end(seen) == "the time limit of its Slurm job was reached"
    _kill_script(job.id)
    await api.close()
