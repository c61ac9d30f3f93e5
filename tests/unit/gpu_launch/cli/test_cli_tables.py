"""What the command line shows: tables, JSON, and which job is meant."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpu_launch.broker.models import Cluster, Gpu, Job, Node, Worker, parse_gpu
from gpu_launch.cli import job_lookup, tables
from gpu_launch.errors import UsageError

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def _job(run: str = "run-20261121-120000-abc123", **values: Any) -> Job:
    given: dict[str, Any] = {
        "id": f"id-{run}", "run_id": run, "state": "running", "version": 1, "position": None, "waiting_for": None,
        "workers": (), "reason": None, "renew_within_s": 30.0, "detached": True,
    }  # fmt: skip
    return Job(**(given | values))


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({"state": "waiting"}, "waiting"),
        ({"state": "running", "suspension": "resuming"}, "suspended"),
        ({"state": "stopping", "suspension": "resuming"}, "stopping"),
        ({"state": "ended", "exit_code": 0}, "done"),
        ({"state": "ended", "exit_code": 2}, "failed"),
        ({"state": "ended", "reason": "stopped"}, "cancelled"),
        ({"state": "ended", "reason": "its time limit is over"}, "ended"),
    ],
)
def test_format_job_state(values: dict[str, Any], state: str) -> None:
    """One word for how it is, or how it ended."""
    assert tables.derive_state(_job(**values)) == state


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"state": "waiting", "position": 3, "created_at": NOW - timedelta(seconds=75)}, "#3 since 1:15"),
        ({"started_at": NOW - timedelta(hours=1, seconds=5)}, "1:00:05"),
        ({"started_at": NOW - timedelta(days=3, hours=4)}, "3d 04h"),
        (
            {"state": "ended", "started_at": NOW - timedelta(days=9), "ended_at": NOW - timedelta(days=9, seconds=-7)},
            "0:07",
        ),
        ({"state": "starting"}, "-"),
    ],
)
def test_format_job_times(values: dict[str, Any], text: str) -> None:
    """Place and wait of what waits, else how long it runs or ran."""
    assert tables.build_job_row(_job(**values), NOW)[5] == text


def test_unreachable_nodes_are_named() -> None:
    """In the table, and for programs: what the job does there is not known."""
    worker = Worker(index=0, node="rig1", gpus=(), state="running", exit_code=None, message=None)
    workers = (worker, replace(worker, index=1, node="mia", is_reachable=False))
    assert tables.build_job_row(_job(workers=workers), NOW)[4] == "rig1,mia (unreachable)"
    view = tables.build_job_json(_job(workers=workers))
    assert (view["nodes"], view["unreachable_nodes"]) == (["rig1", "mia"], ["mia"])


def test_table_fits_the_terminal_width() -> None:
    """Long names are cut with a mark, ids never; wide characters count twice, control characters are not shown."""
    rows = [
        tables.build_job_row(_job(name="训练" * 30), NOW),
        tables.build_job_row(_job(name="evil\x1b[2J\nname"), NOW),
    ]
    for width in (80, 120):
        lines = tables.format_table(tables.JOB_COLUMNS, rows, width=width).split("\n")
        assert len(lines) == 3
        assert all(tables._count_columns(line) <= width for line in lines)
        assert all("run-20261121-120000-abc123" in line for line in lines[1:])
    assert "…" in lines[1]
    assert "\x1b" not in lines[2]
    assert "evil?[2J?name" in lines[2]


def test_json_output_of_a_job_has_stable_keys() -> None:
    """Scripts read them."""
    worker = Worker(
        index=0,
        node="rig1",
        gpus=(Gpu(uuid="GPU-1", node="rig1", model="RTX 5090", memory_mib=32000),),
        state="running",
        exit_code=None,
        message=None,
    )
    told = tables.build_job_json(_job(name="train.py", workers=(worker,), created_at=NOW))
    assert json.loads(json.dumps(told)) == told
    assert set(told) == {
        "run_id", "id", "name", "array", "state", "detached", "gpus", "nodes", "position", "expected_start", "waiting_for",
        "created_at", "started_at", "ended_at", "exit_code", "reason", "preemptions", "after", "unreachable_nodes",
        "retries", "max_retries", "sleeps", "port", "port_users", "costs",
    }  # fmt: skip
    assert (told["nodes"], told["gpus"], told["created_at"]) == (["rig1"], 1, "2026-11-21T12:00:00+00:00")


JOBS = (
    _job("run-20261121-120000-abc123", name="train.py", created_at=NOW),
    _job("run-20261121-110000-abd456", name="train.py", created_at=NOW - timedelta(hours=1)),
    _job("run-20261120-110000-fff456", name="abc", created_at=NOW - timedelta(days=1)),
)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("run-20261121-110000-abd456", 1),
        ("id-run-20261121-110000-abd456", 1),
        ("train.py", 0),
        ("abc", 2),
        ("abd", 1),
        ("20261120", 2),
        ("run-20261121-12", 0),
    ],
)
def test_job_is_found_by_id_name_or_prefix(text: str, place: int) -> None:
    """A whole id, then a name's last job, then a beginning."""
    assert job_lookup.match_job(text, JOBS) == JOBS[place]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ab", "ab is the beginning of several runs: run-20261121-120000-abc123, run-20261121-110000-abd456"),
        ("train", "There is no job train"),
        ("", "There is no job"),
    ],
)
def test_unknown_or_ambiguous_job_is_refused(text: str, said: str) -> None:
    """Said with those it could be."""
    with pytest.raises(UsageError, match=said):
        job_lookup.match_job(text, JOBS)


def test_jobs_are_listed_newest_first() -> None:
    """Whatever the order in which they came."""
    assert job_lookup.sort_newest_first(list(reversed(JOBS))) == list(JOBS)


def test_idle_holder_is_marked() -> None:
    """A GPU that its holder does not use while others wait is marked in the table, with the time in JSON."""
    data = {"uuid": "u", "node": "rig1", "model": "RTX 5090", "state": "held"}
    holders = [{"owner": "ada", "idle_since": "2026-11-23T12:00:00+00:00"}, {"owner": "ben", "idle_since": None}]
    node = Node(name="rig1", gpus=tuple(parse_gpu({**data, "holder": holder}) for holder in holders), state="up")
    assert tables.build_node_row(node)[-1] == "ada (idle), ben"
    shown = tables.build_cluster_json(Cluster(nodes=(node,)))["nodes"][0]["gpus"]
    assert [gpu["idle_since"] for gpu in shown] == ["2026-11-23T12:00:00+00:00", None]
