"""What the broker tells of itself."""

from __future__ import annotations

import asyncio
import threading

from gpuhub.broker.state.events import EventLog, list_job_events, list_lease_events
from gpuhub.broker_api.schemas import JobState, Purpose
from gpuhub.common.errors import Unavailable
from gpuhub.common.gpu import GpuSpec
from gpuhub.domain import job_states, lease_states
from gpuhub.domain.models import EventRow, LeaseRow, ResourceRequest
from gpuhub.scheduler.interface import GpuSlot, NodeAllocation
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.factories import build_running_job
from tests.support.broker.in_process import Setting, asgi_broker, until

CARD = GpuSpec(model="RTX 5090", memory_mib=32607)


def requested(**changes: object) -> LeaseRow:
    row = LeaseRow(
        id="l1", seq=1, key="k", owner="ada", purpose=Purpose.NOTEBOOK, subject="", profile="p", resources=ResourceRequest(),
        created_at=1.0, since=1.0,
    )  # fmt: skip
    return row.evolve(**changes)


def build_node_allocation(node: str) -> NodeAllocation:
    return NodeAllocation(node=node, slots=(GpuSlot(uuid=f"GPU-{node}", node=node, index=0, card=CARD),))


def list_events(before: LeaseRow | None, after: LeaseRow) -> list[tuple[str, str, str | None]]:
    return [(event.kind, event.text, event.node) for event in list_lease_events(before, after, 9.0)]


def test_each_step_of_a_lease_is_an_event() -> None:
    """Who, what and where; several steps that others see as one are told as what they came to."""
    asked = requested()
    granted = lease_states.grant(asked, [build_node_allocation("rig1")], 2.0, note="said")
    releasing = lease_states.release(granted, "stopped", 3.0)
    stuck = lease_states.quarantine(releasing, "node rig1 does not answer", 4.0)
    over = lease_states.prove_released(stuck, "rig1", 5.0)
    assert list_events(None, asked) == []
    assert list_events(asked, granted) == [("lease.granted", "notebook lease of ada: GPU 0 of rig1 (said)", "rig1")]
    assert list_events(granted, lease_states.activate(granted, "c", 2.5)) == []
    assert list_events(granted, releasing) == [("lease.releasing", "notebook lease of ada ends: stopped", "rig1")]
    text = "notebook lease of ada ends without proof, its GPUs stay blocked: quarantined: node rig1 does not answer"
    assert list_events(releasing, stuck) == [("lease.quarantined", text, "rig1")]
    assert list_events(stuck, over) == [("lease.released", "notebook lease of ada is over: stopped", "rig1")]
    assert list_events(asked, lease_states.release(asked, "left", 3.0)) == [
        ("lease.released", "notebook lease of ada is over: left", None)
    ]
    assert [kind for kind, _, _ in list_events(None, over)] == ["lease.granted", "lease.released"]


def test_events_name_shares_and_released_gpus() -> None:
    """Part numbers as people count, from 1."""
    asked = requested(resources=ResourceRequest(share=4))
    part = lease_states.grant(asked, [build_node_allocation("rig1")], 2.0, parts={"GPU-rig1": 1})
    assert list_events(asked, part)[0][1] == "notebook lease of ada: part 2 of 4 of GPU 0 of rig1"
    gang = lease_states.activate(
        lease_states.grant(requested(), [build_node_allocation("rig1"), build_node_allocation("rig2")], 2.0), None, 2.0
    )
    assert list_events(gang, lease_states.shrink(gang, {"rig2"}, 3.0)) == [
        ("lease.shed", "notebook lease of ada releases GPU 0 of rig2", None)
    ]


def test_preemption_and_end_of_a_job_are_events() -> None:
    """Its other steps are those of its lease and its workers."""
    job, _ = build_running_job()
    preempting = job_states.preempt(job, 160.0, 100.0)
    again = job_states.requeue(preempting, "l2", 200.0)
    over = job_states.end(job_states.stop(job, "stopped", 300.0), 301.0)
    kinds = [
        [event.kind for event in list_job_events(a, b, 9.0)]
        for a, b in ((job, preempting), (preempting, again), (job, over))
    ]
    assert kinds == [["job.preempting"], ["job.requeued"], ["job.ended"]]
    assert list(list_job_events(None, job.evolve(state=JobState.WAITING), 9.0)) == []


async def test_events_wait_for_a_working_store() -> None:
    """Events wait for a store that works, in their order, and are written together."""
    written: list[list[str]] = []
    failures = 2

    def save(rows: list[EventRow]) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise Unavailable("the disk is full")
        written.append([row.text for row in rows])

    log = EventLog(save)
    log.add(EventRow(at=1.0, kind="a", text="first"))
    await log.flush()
    log.add(EventRow(at=1.0, kind="a", text="second"))
    await log.flush()
    await log.close()
    assert written == [["first", "second"]]


async def test_flush_waits_for_events_that_are_being_written() -> None:
    """Who reads the events after it misses none."""
    written: list[EventRow] = []
    began, may_end = threading.Event(), threading.Event()

    def save(rows: list[EventRow]) -> None:
        began.set()
        assert may_end.wait(30)
        written.extend(rows)

    log = EventLog(save)
    log.add(EventRow(at=1.0, kind="a", text="first"))
    writing = asyncio.ensure_future(log.flush())
    await until(began.is_set, "the event is being written")
    second = asyncio.ensure_future(log.flush())
    await asyncio.wait([second], timeout=0.1)
    assert not second.done()
    may_end.set()
    await second
    assert [event.text for event in written] == ["first"]
    await writing
    await log.close()


async def test_events_are_written_without_a_request() -> None:
    """Nobody needs to ask for them."""
    written: list[EventRow] = []
    log = EventLog(written.extend)
    log.add(EventRow(at=1.0, kind="a", text="first"))
    await until(lambda: written, "the note is written")
    log.add(EventRow(at=1.0, kind="a", text="second"))
    await until(lambda: len(written) == 2, "the second note is written")
    await log.close()
    assert [event.text for event in written] == ["first", "second"]


async def test_users_read_only_their_own_events(setting: Setting) -> None:
    """An administrator reads all; reading continues where it stopped."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", key="1")
        await run_notebook(running, lease)
        await ask(running, "ben", profile="rtx5070", key="2")
        running.core.add_event("node.unreachable", "node rig3 is unreachable", node="rig3")
        mine = await read(running, "ada", "/events")
        assert [(event["kind"], event["owner"], event["lease"]) for event in mine] == [
            ("lease.granted", "ada", lease["id"])
        ]
        everything = await read(running, "root", "/events", limit=2)
        assert [event["kind"] for event in everything] == ["lease.granted", "node.unreachable"]
        await delete(running, "ada", f"/leases/{lease['id']}")
        await wait_for_state(running, f"/leases/{lease['id']}", "released")
        later = await read(running, "ada", "/events", after=mine[-1]["seq"])
        assert [event["kind"] for event in later] == ["lease.releasing", "lease.released"]


async def test_events_survive_a_broker_restart(setting: Setting) -> None:
    """A note of the last moment is written before the broker ends."""
    async with asgi_broker(setting) as running:
        await post(running, "ada", "/jobs", {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1}, 201)
        running.core.add_event("gpu.failed", "GPU 0 of rig3 fell off the bus", node="rig3")
        await asyncio.sleep(0)
    async with asgi_broker(setting) as running:
        kinds = [event["kind"] for event in await read(running, "root", "/events", limit=1000)]
        assert {"lease.granted", "gpu.failed"} <= set(kinds)
