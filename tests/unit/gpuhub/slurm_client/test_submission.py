"""What is asked of Slurm: the exact command line and document, and what never gets into one."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from gpuhub.slurm_client.interface import SlurmRefused
from gpuhub.slurm_client.models import SlurmSubmission, Submitter
from gpuhub.slurm_client.submission import HOLDER_SCRIPT, format_rest, format_rest_nodes, format_sbatch

PLAIN = SlurmSubmission(
    name="gh-lease-l0123456789abcdef",
    submitter=Submitter(name="ada", uid=71001, gid=71001),
    script=HOLDER_SCRIPT,
    gpus_per_node=1,
)
FULL = replace(
    PLAIN,
    nodes=4,
    min_nodes=2,
    gpus_per_node=2,
    gpu_type="rtx5090",
    cpus=8,
    memory_mib=16384,
    time_limit_s=3661,
    partition="gpu",
    account="lab",
    qos="high",
    reservation="course",
    exclude=("sx7", "sx9"),
    exclusive=True,
    nice=10,
    survives_nodes=True,
)
ALWAYS = [
    "sbatch",
    "--parsable",
    "--export=ALL",
    "--no-requeue",
    "--chdir=/",
    "--output=/dev/null",
    "--error=/dev/null",
    "--input=/dev/null",
    "--job-name=gh-lease-l0123456789abcdef",
]
HOSTILE = [
    "",
    "-x",
    "--uid=0",
    "a b",
    "a,b",
    "a;b",
    "a\nb",
    "$(id)",
    "a'b",
    "x" * 129,
    "ä",
    "a=b",
    "../a",
    "a\0b",
    "[1-9]",
]


def test_sbatch_command_lines() -> None:
    assert format_sbatch(PLAIN) == [*ALWAYS, "--nodes=1-1", "--cpus-per-task=1", "--gres=gpu:1"]
    assert format_sbatch(FULL) == [
        *ALWAYS,
        "--nodes=2-4",
        "--cpus-per-task=8",
        "--mem=16384M",
        "--gres=gpu:rtx5090:2",
        "--time=62",
        "--partition=gpu",
        "--account=lab",
        "--qos=high",
        "--reservation=course",
        "--exclude=sx7,sx9",
        "--no-kill",
        "--exclusive",
        "--nice=10",
    ]
    assert format_sbatch(replace(PLAIN, spread=3))[-2:] == ["--cpus-per-task=1", "--gpus=3"]
    assert format_sbatch(replace(PLAIN, spread=3, gpu_type="a"))[-1] == "--gpus=a:3"
    assert format_sbatch(replace(PLAIN, gpus_per_node=0))[-1] == "--cpus-per-task=1"
    assert format_sbatch(replace(PLAIN, time_limit_s=60))[-1] == "--time=1"


def test_submission_document_of_the_oldest_api_version() -> None:
    always = {
        "name": "gh-lease-l0123456789abcdef",
        "current_working_directory": "/",
        "standard_input": "/dev/null",
        "standard_output": "/dev/null",
        "standard_error": "/dev/null",
        "requeue": False,
        "environment": {"PATH": "/usr/local/bin:/usr/bin:/bin"},
    }
    assert format_rest(PLAIN) == {
        "script": HOLDER_SCRIPT,
        "job": always | {"cpus_per_task": 1, "nodes": "1-1", "gres": "gpu:1"},
    }
    assert format_rest(FULL) == {
        "script": HOLDER_SCRIPT,
        "job": always
        | {
            "cpus_per_task": 8,
            "nodes": "2-4",
            "gres": "gpu:rtx5090:2",
            "memory_per_node": 16384,
            "time_limit": 62,
            "partition": "gpu",
            "account": "lab",
            "qos": "high",
            "reservation": "course",
            "exclusive": "exclusive",
            "nice": 10,
            "no_kill": "set",
            "exclude_nodes": "sx7,sx9",
        },
    }
    assert format_rest(replace(PLAIN, spread=3, gpu_type="a"))["job"]["gpus"] == "a:3"
    with pytest.raises(SlurmRefused, match="choose a type"):
        format_rest(replace(PLAIN, spread=3))


def test_submission_documents_of_later_api_versions() -> None:
    job = format_rest(FULL, 40)["job"]
    assert job["environment"] == ["PATH=/usr/local/bin:/usr/bin:/bin"]
    assert (job["minimum_nodes"], job["maximum_nodes"], job["tres_per_node"]) == (2, 4, "gres/gpu:rtx5090:2")
    assert job["time_limit"] == {"set": True, "infinite": False, "number": 62}
    assert job["memory_per_node"] == {"set": True, "infinite": False, "number": 16384}
    assert (job["excluded_nodes"], job["kill_on_node_fail"], job["shared"]) == (["sx7", "sx9"], False, ["none"])
    assert format_rest(replace(PLAIN, spread=3), 40)["job"]["tres_per_job"] == "gres/gpu:3"


def test_node_list_is_formatted_for_each_api_version() -> None:
    assert format_rest_nodes(("sx1", "sx3")) == {"nodelist": "sx1,sx3"}
    assert format_rest_nodes(("sx1", "sx3"), 40) == {"required_nodes": ["sx1", "sx3"]}


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("where", ["name", "partition", "account", "qos", "reservation", "gpu_type", "exclude"])
def test_hostile_names_are_refused(where: str, hostile: str) -> None:
    value: object = (hostile,) if where == "exclude" else hostile
    submission = replace(PLAIN, **{where: value})  # type: ignore[arg-type]
    for form in (format_sbatch, format_rest):
        with pytest.raises(SlurmRefused, match="is not a name for Slurm"):
            form(submission)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"min_nodes": 0},
        {"nodes": 1, "min_nodes": 2},
        {"cpus": 0},
        {"memory_mib": -1},
        {"gpus_per_node": -1},
        {"spread": 0},
        {"time_limit_s": 0},
        {"script": "exec sleep 9"},
        {"script": "#!/bin/sh\n\0"},
    ],
)
def test_impossible_numbers_and_scripts_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SlurmRefused):
        format_sbatch(replace(PLAIN, **wrong))  # type: ignore[arg-type]


@pytest.mark.process
def test_holding_script_runs_in_any_shell() -> None:
    assert subprocess.run(["sh", "-n"], input=HOLDER_SCRIPT, text=True, check=True, capture_output=True).stderr == ""
