"""What JupyterLab shows of the broker's answers, and how often the broker is asked."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpu_launch.notebook_server.overview import FRESH_S, MAX_ENDED_JOBS, MAX_QUEUE, SharedReader, build_overview

HOLDER = {"owner": "ada", "purpose": "notebook", "until": None, "name": ""}
GPU = {
    "uuid": "GPU-1",
    "model": "RTX 5090",
    "memory_mib": 32607,
    "memory_used_mib": 12000,
    "utilisation_percent": 40,
    "state": "held",
    "holder": HOLDER,
    "holders": [HOLDER],
    "outside": [{"pid": 1, "memory_mib": 2}],
}
CLUSTER: dict[str, Any] = {"nodes": [{"name": "rig1", "state": "up", "message": None, "gpus": [GPU]}], "queue": []}


def lease(**gpu: Any) -> dict[str, Any]:
    leased = {"uuid": "GPU-1", "node": "rig1", "model": "RTX 5090", "memory_mib": 32607, **gpu}
    return {"gpus": [leased], "expires_at": "2026-11-23T12:00:00Z"}


def job(number: int, **values: Any) -> dict[str, Any]:
    base = {"id": f"j{number}", "run_id": f"run-{number}", "owner": "ada", "state": "running", "nnodes": 2}
    return {**base, "nproc_per_node": 3, "workers": [{"node": "rig2"}, {"node": "rig1"}], "lease": {}, **values}


def test_notebook_has_the_readings_of_its_gpus():
    """They are those of NVML, which are in the cluster's view."""
    notebook = build_overview(CLUSTER, lease(), [], user="ada")["notebook"]
    assert notebook["expires_at"] == "2026-11-23T12:00:00Z"
    (gpu,) = notebook["gpus"]
    assert (gpu["memory_used_mib"], gpu["memory_mib"], gpu["utilisation_percent"]) == (12000, 32607, 40)


def test_shared_gpu_has_its_part_of_the_memory_and_no_reading():
    """The reading is of all users of the GPU together."""
    (gpu,) = build_overview(CLUSTER, lease(share=4, memory_cap_mib=8000), [], user="ada")["notebook"]["gpus"]
    assert (gpu["share"], gpu["memory_mib"], gpu["memory_used_mib"]) == (4, 8000, None)


def test_own_things_are_marked_and_other_users_jobs_left_out():
    """Administrators get the jobs of all users, and the processes of others are nobody's business."""
    cluster = {**CLUSTER, "queue": [{"position": 1, "owner": "ben", "wants": "profile any"}], "waiting": 1}
    overview = build_overview(cluster, None, [job(1), job(2, owner="ben")], user="ada")
    assert overview["notebook"] is None
    (gpu,) = overview["nodes"][0]["gpus"]
    assert gpu["holders"][0]["is_own"]
    assert "outside" not in gpu
    assert overview["queue"] == [
        {"position": 1, "owner": "ben", "wants": "profile any", "expected_start": None, "is_own": False}
    ]
    (own,) = overview["jobs"]
    assert (own["id"], own["gpus"], own["nodes"]) == ("j1", 6, ["rig1", "rig2"])


def test_foreign_slurm_job_of_a_user_of_the_same_name_is_not_ones_own():
    """Its owner is a user of Slurm."""
    gpu = {**GPU, "holders": [{**HOLDER, "is_outside": True}]}
    cluster = {"nodes": [{"name": "rig1", "gpus": [gpu]}]}
    assert not build_overview(cluster, None, [], user="ada")["nodes"][0]["gpus"][0]["holders"][0]["is_own"]


def test_answers_of_any_length_are_shortened():
    """All open jobs come before the last ended ones."""
    queue = [{"position": index, "owner": "ben", "wants": "x"} for index in range(1, MAX_QUEUE + 50)]
    jobs = [job(index, state="ended") for index in range(MAX_ENDED_JOBS + 5)] + [job(999)]
    overview = build_overview({**CLUSTER, "queue": queue}, None, jobs, user="ada")
    assert len(overview["queue"]) == MAX_QUEUE
    assert [overview["jobs"][0]["id"], len(overview["jobs"])] == ["j999", MAX_ENDED_JOBS + 1]


async def test_windows_share_a_reading():
    """Those who ask at the same time, and a little later, get the same; then it is read again."""
    times, now = [], 0.0

    def read() -> dict[str, Any]:
        times.append(now)
        return {"count": len(times)}

    with ThreadPoolExecutor(1) as executor:
        reader = SharedReader(read, executor, clock=lambda: now)
        assert await asyncio.gather(reader.get(), reader.get()) == [{"count": 1}] * 2
        now = FRESH_S
        assert await reader.get() == {"count": 1}
        now = FRESH_S + 0.1
        assert await reader.get() == {"count": 2}
        reader.forget()
        assert await reader.get() == {"count": 3}


async def test_failed_reading_is_not_kept():
    """The next caller tries again at once."""
    answers = [OSError("away"), None]

    def read() -> dict[str, Any]:
        if error := answers.pop(0):
            raise error
        return {}

    with ThreadPoolExecutor(1) as executor:
        reader = SharedReader(read, executor)
        with pytest.raises(OSError, match="away"):
            await reader.get()
        assert await reader.get() == {}
