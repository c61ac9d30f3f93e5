"""Parsing of Slurm's documents: real samples of 22.05, and the forms of later versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuhub.slurm_client.inventory import (
    parse_gpu_jobs,
    parse_gpu_time,
    parse_nodes,
    parse_partition_lines,
    parse_partitions,
    parse_reservation_lines,
    parse_settings,
)
from gpuhub.slurm_client.models import GpuTime, SlurmJob, SlurmJobState
from gpuhub.slurm_client.parsers import (
    GresGpus,
    expand_hosts,
    expand_numbers,
    parse_gpus,
    parse_jobs,
    parse_version,
    read_errors,
    read_number,
)

DATA = Path(__file__).parent / "data"


def read_sample(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def build_number(value: int | None) -> dict[str, Any]:
    """A number as Slurm 23.02 and later write it."""
    return {"set": value is not None, "infinite": False, "number": value or 0}


def job(**further: Any) -> SlurmJob:
    told = {"job_id": 7, "name": "n", "user_id": 1000, "job_state": "RUNNING", "nodes": "sx1", "start_time": 100}
    return parse_jobs({"jobs": [told | further]})[0]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("(null)", ()),
        ("sx1", ("sx1",)),
        ("sx[1-3,7]", ("sx1", "sx2", "sx3", "sx7")),
        ("sx[08-11]", ("sx08", "sx09", "sx10", "sx11")),
        ("login,sx[1,3],gpu-2", ("login", "sx1", "sx3", "gpu-2")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("a[1-2]-ib", ("a1-ib", "a2-ib")),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["sx[1-", "sx[a-b]", "sx1,,sx2", "sx[]", "[", "sx[1-2"])
def test_invalid_host_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:rtx5090:1(IDX:0)", (GresGpus("rtx5090", 1, (0,)),)),
        ("gpu:rtx5090:2(IDX:0-1)", (GresGpus("rtx5090", 2, (0, 1)),)),
        ("gpu:3(IDX:0,2-3)", (GresGpus("", 3, (0, 2, 3)),)),
        ("gpu(IDX:1-2)", (GresGpus("", 2, (1, 2)),)),
        ("gpu:rtx5060:0(IDX:),gpu:rtx5070:1(IDX:1)", (GresGpus("rtx5060", 0, ()), GresGpus("rtx5070", 1, (1,)))),
        ("gpu:rtx5090:0(IDX:N/A)", (GresGpus("rtx5090", 0, ()),)),
        ("gpu:rtx5090:2(S:0-1)", (GresGpus("rtx5090", 2, ()),)),
        ("gpu:(null):1(IDX:0)", (GresGpus("", 1, (0,)),)),
        ("gpu:(null):0(IDX:N/A),gpu:(null):2(IDX:0,2)", (GresGpus("", 0, ()), GresGpus("", 2, (0, 2)))),
        ("gpu:1080:2", (GresGpus("1080", 2, ()),)),
        ("gres:gpu:rtx5090:2", (GresGpus("rtx5090", 2, ()),)),
        ("gres/gpu:rtx5090=2", (GresGpus("rtx5090", 2, ()),)),
        ("gres/gpu=4", (GresGpus("", 4, ()),)),
        ("gpu", (GresGpus("", 1, ()),)),
        ("nic:2,craynetwork:1(IDX:0,1),mps:100", ()),
        ("N/A", ()),
        ("", ()),
    ],
)
def test_gpu_resources_are_parsed(text: str, gpus: tuple[GresGpus, ...]) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize(
    ("text", "cpus", "memory_mib"),
    [
        ("cpu=8,mem=100M,node=1,billing=8", 8, 100),
        ("cpu=12,mem=1.50G,node=3,billing=12,gres/gpu=3", 12, 1536),
        ("cpu=64,mem=2T,node=1", 64, 2 * 1024**2),
        # SelectTypeParameters=CR_Core.
        ("cpu=1,node=1,billing=1", 1, None),
        ("", None, None),
    ],
)
def test_allocated_cpus_and_memory_are_parsed(text: str, cpus: int | None, memory_mib: int | None) -> None:
    seen = job(tres_alloc_str=text)
    assert (seen.cpus, seen.memory_mib) == (cpus, memory_mib)
    waiting = job(tres_alloc_str=text, job_state="PENDING")
    assert (waiting.cpus, waiting.memory_mib) == (None, None)


def test_invalid_gpu_and_number_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="is not a GPU resource"):
        parse_gpus("gpu:a:b:c")
    with pytest.raises(ValueError, match="is not a list of numbers"):
        expand_numbers("1-2-3")


def test_jobs_of_22_05() -> None:
    jobs = {each.id: each for each in parse_jobs(read_sample("squeue-22.05.json"))}
    gang = jobs[37]
    assert (gang.name, gang.state, gang.reason, gang.time_limit_s) == ("gh-lease-a", SlurmJobState.RUNNING, "", 600)
    assert (gang.nodes, gang.gpus) == (("sx1", "sx2"), {"sx1": (0,), "sx2": (0,)})
    assert gang.wants == "2 nodes × gpu:rtx5090:1"
    assert gang.started_at is not None
    assert gang.ends_at == gang.started_at + 600
    assert jobs[3].gpus == {"sx3": (0, 1)}
    assert (jobs[3].cpus, jobs[3].memory_mib) == (8, 100)
    assert (gang.cpus, gang.memory_mib) == (2, 200)
    assert (jobs[2].time_limit_s, jobs[2].ends_at, jobs[2].wants) == (None, None, "gpu:2 in all")
    refused = jobs[5]
    assert (refused.state, refused.reason, refused.started_at) == (SlurmJobState.FAILED, "BadConstraints", None)
    waiting = jobs[8]
    assert (waiting.state, waiting.reason, waiting.expected_start) == (SlurmJobState.PENDING, "Resources", 1795294380)
    assert (waiting.time_limit_s, waiting.ends_at, waiting.started_at, waiting.gpus) == (None, None, None, {})
    assert (waiting.cpus, waiting.memory_mib) == (None, None)
    assert (jobs[7].reason, jobs[7].time_limit_s, jobs[7].expected_start) == ("PartitionTimeLimit", 7200, None)
    assert (jobs[41].reason, jobs[41].priority) == ("JobHeldUser", 0)
    assert (jobs[24].state, jobs[24].ends_at, jobs[24].gpus) == (SlurmJobState.CANCELLED, 1795292599, {})
    assert {each.user_id for each in jobs.values()} == {27801}


def test_a_job_of_later_versions() -> None:
    found = job(
        job_state=["RUNNING"],
        user_name="ada",
        nodes="sx[1-2]",
        gres_detail=["gpu:rtx5090:1(IDX:1)", "gpu:rtx5090:1(IDX:0)"],
        node_count=build_number(2),
        tres_per_node="gres/gpu:rtx5090:1",
        time_limit=build_number(10),
        priority=build_number(4294901750),
        start_time=build_number(1000),
        end_time=build_number(1600),
        submit_time=build_number(900),
    )
    assert (found.state, found.user_name, found.priority) == (SlurmJobState.RUNNING, "ada", 4294901750)
    assert found.gpus == {"sx1": (1,), "sx2": (0,)}
    assert (found.submitted_at, found.started_at, found.ends_at, found.time_limit_s) == (900, 1000, 1600, 600)
    assert found.wants == "2 nodes × gpu:rtx5090:1"
    assert job(job_state=["RUNNING"], time_limit={"set": True, "infinite": True, "number": 0}).time_limit_s is None


@pytest.mark.parametrize(
    ("said", "further", "state", "is_completing"),
    [
        ("COMPLETING", {}, SlurmJobState.COMPLETING, True),
        ("COMPLETING", {"state_reason": "TimeLimit"}, SlurmJobState.TIMEOUT, True),
        ("COMPLETING", {"state_reason": "NodeDown"}, SlurmJobState.NODE_FAIL, True),
        ("COMPLETING", {"preempt_time": 5}, SlurmJobState.PREEMPTED, True),
        (["CANCELLED", "COMPLETING"], {}, SlurmJobState.CANCELLED, True),
        (["RUNNING", "COMPLETING"], {}, SlurmJobState.COMPLETING, True),
        (["PENDING", "COMPLETING"], {}, SlurmJobState.PENDING, True),
        ("CONFIGURING", {}, SlurmJobState.PENDING, False),
        (["RUNNING", "CONFIGURING"], {}, SlurmJobState.PENDING, False),
        (["RUNNING", "RESIZING"], {}, SlurmJobState.RUNNING, False),
        (["RUNNING", "STOPPED"], {}, SlurmJobState.SUSPENDED, False),
        ("REQUEUE_HOLD", {}, SlurmJobState.PENDING, False),
        (["CANCELLED", "SIGNALING"], {}, SlurmJobState.CANCELLED, False),
        ("STOPPED", {}, SlurmJobState.SUSPENDED, False),
        ("REVOKED", {}, SlurmJobState.CANCELLED, False),
        ("SHINY", {}, SlurmJobState.SUSPENDED, False),
        (["PREEMPTED"], {}, SlurmJobState.PREEMPTED, False),
    ],
)
def test_states(said: Any, further: dict[str, Any], state: SlurmJobState, is_completing: bool) -> None:
    found = job(job_state=said, **further)
    assert (found.state, found.is_completing) == (state, is_completing)


def test_configuring_job_has_no_nodes_yet() -> None:
    found = job(job_state=["RUNNING", "CONFIGURING"], gres_detail=["gpu:1(IDX:0)"])
    assert (found.reason, found.nodes, found.gpus, found.started_at) == ("Configuring", (), {}, None)


def test_gpus_that_do_not_go_with_the_nodes_are_not_guessed() -> None:
    assert job(nodes="sx[1-2]", gres_detail=["gpu:1(IDX:0)"]).gpus == {}


def test_user_name_nobody_is_accepted_only_with_its_uid() -> None:
    assert job(user_name="nobody").user_name == ""
    assert job(user_name="nobody", user_id=65534).user_name == "nobody"


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (5, 5),
        (0, 0),
        (None, None),
        (-1, None),
        (0xFFFFFFFE, None),
        (0xFFFFFFFF, None),
        (0xFFFFFFFFFFFFFFFF, None),
        (6090260465, 6090260465),
        (build_number(3), 3),
        (build_number(None), None),
        ({"set": True, "infinite": True, "number": 0}, None),
    ],
)
def test_numbers_of_slurm_are_read(value: Any, meant: int | None) -> None:
    assert read_number(value) == meant


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"jobs": None},
        {"jobs": [1]},
        {"jobs": [{}]},
        {"jobs": [{"job_id": 1, "user_id": 1, "job_state": []}]},
        {"jobs": [{"job_id": 1, "user_id": 1, "job_state": "RUNNING", "nodes": "sx[", "start_time": 1}]},
        {"jobs": [{"job_id": 1, "user_id": 1, "job_state": "RUNNING", "time_limit": "soon"}]},
    ],
)
def test_invalid_job_documents_are_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_jobs(document)


def test_nodes_of_22_05() -> None:
    nodes = {node.name: node for node in parse_nodes(read_sample("sinfo-22.05.json"))}
    assert (nodes["sx1"].state, nodes["sx1"].takes_work) == ("mixed", True)
    assert (nodes["sx1"].gpus, nodes["sx1"].used) == ({"rtx5090": 2}, {"rtx5090": 1})
    assert (nodes["sx1"].cpus, nodes["sx1"].memory_mib, nodes["sx1"].partitions) == (8, 4000, ("all", "short"))
    assert (nodes["sx2"].state, nodes["sx2"].takes_work, nodes["sx2"].reason) == ("down", False, "lost")
    drained = nodes["sx3"]
    assert (drained.state, drained.takes_work, drained.reason) == ("idle+drain", False, "fan broken; ask ada")
    assert list(drained.gpus.items()) == [("rtx5060", 1), ("rtx5070", 1)]


@pytest.mark.parametrize(
    ("said", "flags", "shown", "takes_work"),
    [
        (["IDLE"], None, "idle", True),
        (["MIXED", "DRAIN"], None, "mixed+drain", False),
        (["DOWN", "NOT_RESPONDING"], None, "down*", False),
        (["IDLE", "NOT_RESPONDING"], None, "idle*", False),
        (["IDLE", "PLANNED"], None, "idle+planned", True),
        (["IDLE", "RESERVED"], None, "idle+reserved", True),
        ("down", ["DRAIN", "NOT_RESPONDING"], "down+drain*", False),
        ("unknown", [], "unknown", False),
        ("allocated", ["COMPLETING"], "allocated+completing", True),
        ("idle", ["MAINTENANCE"], "idle+maintenance", False),
    ],
)
def test_node_states(said: Any, flags: Any, shown: str, takes_work: bool) -> None:
    node = parse_nodes({"nodes": [{"name": "sx1", "state": said, "state_flags": flags, "gres": "gpu:1"}]})[0]
    assert (node.state, node.takes_work, node.gpus) == (shown, takes_work, {"": 1})


def test_invalid_node_documents_are_refused() -> None:
    for document in ({}, {"nodes": [{}]}, {"nodes": [{"name": "a", "state": []}]}):
        with pytest.raises(ValueError, match=r"\w"):
            parse_nodes(document)


def test_partitions_from_scontrol_and_rest_are_equal() -> None:
    partitions = parse_partition_lines((DATA / "partitions-22.05.txt").read_text())
    assert [(each.name, each.is_default, each.is_up) for each in partitions] == [
        ("all", True, True),
        ("short", False, True),
        ("off", False, False),
    ]
    short = partitions[1]
    assert (short.max_time_s, short.default_time_s, short.max_nodes, short.nodes) == (3600, 600, 1, ("sx1", "sx2"))
    assert (partitions[0].max_time_s, partitions[0].default_time_s, partitions[0].max_nodes) == (None, None, None)
    assert parse_partitions(read_sample("rest-partitions-22.05.json")) == partitions


def test_partition_of_later_versions() -> None:
    found = parse_partitions(
        {
            "partitions": [
                {
                    "name": "gpu",
                    "nodes": {"configured": "sx[1-2]"},
                    "maximums": {"nodes": build_number(2), "time": build_number(60)},
                    "defaults": {"time": build_number(None)},
                    "partition": {"state": ["UP"]},
                }
            ]
        }
    )[0]
    assert (found.nodes, found.max_nodes, found.max_time_s, found.default_time_s) == (("sx1", "sx2"), 2, 3600, None)
    assert found.is_up
    assert found.is_default is None


@pytest.mark.parametrize(
    ("span", "seconds"),
    [("1-00:00:00", 86400), ("2-12", 216000), ("01:30:00", 5400), ("30:15", 1815), ("90", 5400), ("UNLIMITED", None)],
)
def test_partition_time_limits_are_parsed(span: str, seconds: int | None) -> None:
    assert parse_partition_lines(f"PartitionName=a MaxTime={span} Nodes=(null)")[0].max_time_s == seconds


def test_scontrol_output_is_parsed_and_invalid_lines_are_refused() -> None:
    with pytest.raises(ValueError, match="is not a time span"):
        parse_partition_lines("PartitionName=a MaxTime=soon")
    assert parse_reservation_lines("No reservations in the system\n") == ()
    assert parse_reservation_lines("ReservationName=course StartTime=x Users=a\nReservationName=b X=y\n") == (
        "course",
        "b",
    )
    assert parse_settings("Configuration data as of x\nClusterName             = lab\nEmpty =\n") == {
        "ClusterName": "lab",
        "Empty": "",
    }


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (0, 0),
        (3 << 8, 3),
        (9, 137),
        ({"status": "ERROR", "return_code": 3}, 3),
        ({"status": ["SUCCESS"], "return_code": build_number(0)}, 0),
        ({"status": ["ERROR"], "return_code": build_number(3), "signal": {"id": build_number(None), "name": ""}}, 3),
        (
            {
                "status": ["SIGNALED"],
                "return_code": build_number(0),
                "signal": {"id": build_number(15), "name": "TERM"},
            },
            143,
        ),
        (None, None),
        (build_number(None), None),
    ],
)
def test_exit_codes_follow_shell_conventions(said: Any, code: int | None) -> None:
    assert job(job_state="FAILED", exit_code=said).exit_code == code
    assert job(exit_code=said).exit_code is None


def test_versions_and_errors_are_parsed() -> None:
    assert parse_version(read_sample("sinfo-22.05.json")) == (22, 5, 8)
    assert parse_version({"meta": {"slurm": {"version": {"major": "23", "minor": "11", "micro": "4"}}}}) == (23, 11, 4)
    for document in ({}, [], {"meta": {}}, {"meta": {"slurm": {"version": {"major": "23"}}}}):
        with pytest.raises(ValueError, match="no version"):
            parse_version(document)
    assert read_errors({"errors": []}) == ()
    assert read_errors({"errors": [{"error": "no", "description": "never"}, "x", {}]}) == (
        "no: never",
        "x",
        "an error without a message",
    )


def test_gpu_time_within_a_window() -> None:
    lines = "\n".join(
        [
            "ada|lab|100|200|billing=1,cpu=1,gres/gpu:rtx5090=2,gres/gpu=2,node=1",
            "ada|lab|50|120|gres/gpu:a=1,gres/gpu:b=1",  # no sum of all types: 20 s of two
            "ben|lab|180|Unknown|gres/gpu=1",  # continues
            "ben|lab|Unknown|Unknown|",  # waits
            "eve|lab|150|160|cpu=4",
            "old|lab|1|99|gres/gpu=1",
        ]
    )
    assert parse_gpu_time(lines, 100, 250) == (
        GpuTime(user="ada", account="lab", gpu_seconds=240),
        GpuTime(user="ben", account="lab", gpu_seconds=70),
    )
    with pytest.raises(ValueError, match="unpack"):
        parse_gpu_time("nonsense", 0, 1)


def test_gpu_time_from_slurmrestd() -> None:
    told = {
        "user": "ada",
        "account": "lab",
        "time": {"start": 100, "end": 0},
        "tres": {"allocated": [{"type": "cpu", "name": None, "count": 4}, {"type": "gres", "name": "gpu", "count": 2}]},
    }
    assert parse_gpu_jobs({"jobs": [told]}, 0, 150) == (GpuTime(user="ada", account="lab", gpu_seconds=100),)
    with pytest.raises(ValueError, match="record"):
        parse_gpu_jobs({"jobs": [{}]}, 0, 1)
